"""What the fourth assignment published: ResNet-18 on CIFAR-10 under DDP on four GPUs.

SGD 0.1 with momentum 0.9 and weight decay 5e-4, two loader workers. Times are of the second epoch, in seconds, by
batch per device.
"""

from __future__ import annotations

from collections.abc import Mapping

TRAIN_IMAGES = 50_000
NUM_PARAMETERS = 11_173_962
GRADIENT_BYTES = 44_695_848
BUFFER_FLOATS, BUFFER_COUNTERS = 9_600, 20

COMPUTE_SECONDS = {32: 22.782, 128: 18.051, 512: 19.448, 2048: 19.658}
OUT_OF_MEMORY_BATCH = 8192
"""R1: one device, without loading."""

BATCHES = (32, 128, 512)
EPOCH_SECONDS: Mapping[int, Mapping[int, float]] = {
    1: {32: 23.550, 128: 18.311, 512: 19.704},
    2: {32: 16.164, 128: 9.849, 512: 10.012},
    4: {32: 9.060, 128: 5.023, 512: 5.160},
}
"""R2: by number of devices."""
SPEEDUPS_TWO_TO_FOUR = {32: 1.78, 128: 1.96, 512: 1.94}

USED_FOR_512 = 19.764
"""R3: the one-device time of batch 512 that was used; the log says 19.704."""
COMMUNICATION_SECONDS: Mapping[int, Mapping[int, str]] = {
    2: {32: "4.389", 128: "0.693", 512: "0.130"},
    4: {32: "3.172", 128: "0.445", 512: "0.219"},
}
"""R3: T_N − T_1/N, as printed."""

BANDWIDTH_BYTES_PER_SECOND = 0.9e9
UTILIZATION_PERCENT: Mapping[int, Mapping[int, str]] = {
    2: {32: "1.13", 128: "7.17", 512: "38.20"},
    4: {32: "2.35", 128: "16.74", 512: "34.02"},
}
"""R4: as printed."""

LARGE_RANKS, LARGE_BATCH, LARGE_EPOCHS = 4, 2048, 5
BASE_BATCH, BASE_RATE, SCALED_RATE = 128, 0.1, 6.4
MOMENTUM, WEIGHT_DECAY = 0.9, 5e-4
LARGE_LOSS, LARGE_ACCURACY = 1.8399, 0.2899
"""R5: 4 × 2048, before the learning rate is scaled."""

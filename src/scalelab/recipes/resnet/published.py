"""What the fourth assignment published: ResNet-18 on CIFAR-10 under DDP on four GPUs.

SGD 0.1 with momentum 0.9 and weight decay 5e-4, two loader workers. Times are of the second epoch, in seconds, by
batch per device.

The checks recompute its claims from its own times.

R3 takes T_N − T_1/N of an epoch as communication. R4 divides the time of one ring all-reduce,
2·M·(N − 1) / (N·B) (Patarasu and Yuan 2009), by it, but an epoch has one all-reduce per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import ROUND_HALF_DOWN, Decimal

from scalelab.recipes.recipe import Check
from scalelab.workloads.image_options import Resnet18Options, list_resnet18_layers

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


DEVICES = (2, 4)


def subtract_ideal(num_devices: int, batch: int, *, as_used: bool) -> float:
    """R3: T_N − T_1/N, in seconds, to the microsecond; `as_used` takes the wrong T_1 of batch 512."""
    one = EPOCH_SECONDS[1][batch]
    if as_used and batch == 512:
        one = USED_FOR_512
    return round(EPOCH_SECONDS[num_devices][batch] - one / num_devices, 6)


def print_seconds(seconds: float) -> str:
    """Three decimals; halves were rounded down."""
    return str(Decimal(str(seconds)).quantize(Decimal("0.001"), rounding=ROUND_HALF_DOWN))


def count_ring_bytes(num_devices: int) -> float:
    """What every device sends in a ring all-reduce of all gradients."""
    return 2 * GRADIENT_BYTES * (num_devices - 1) / num_devices


def utilize_as_published(num_devices: int, batch: int) -> float:
    """R4, the published method, in percent: one all-reduce for the whole epoch, over R3's printed seconds."""
    seconds = float(print_seconds(subtract_ideal(num_devices, batch, as_used=True)))
    return 100 * count_ring_bytes(num_devices) / BANDWIDTH_BYTES_PER_SECOND / seconds


def count_epoch_steps(num_devices: int, batch: int) -> int:
    """Whole batches only, as the loader drops the last one."""
    return TRAIN_IMAGES // (num_devices * batch)


def find_effective_bandwidth(num_devices: int, batch: int) -> float:
    """R4 corrected, in bytes per second: an all-reduce in every step, over R3's time with the logged T_1."""
    sent = count_epoch_steps(num_devices, batch) * count_ring_bytes(num_devices)
    return sent / subtract_ideal(num_devices, batch, as_used=False)


def find_speedup(numerator: tuple[int, int], denominator: tuple[int, int]) -> float:
    """Epoch time over epoch time, each of (devices, batch per device)."""
    (n, batch), (m, other) = numerator, denominator
    return EPOCH_SECONDS[n][batch] / EPOCH_SECONDS[m][other]


def make_checks() -> list[Check]:
    return [*_check_scaling(), *_check_communication(), *_check_bandwidth(), _check_rate(), *_check_messages()]


def _check_scaling() -> Iterator[Check]:
    printed = [f"{found:.2f}×" for found in SPEEDUPS_TWO_TO_FOUR.values()]
    computed = [f"{find_speedup((2, batch), (4, batch)):.2f}×" for batch in BATCHES]
    yield Check(
        id="R2",
        claim=f"2 → 4 devices: {', '.join(printed)} (batch 32, 128, 512)",
        computed=", ".join(computed),
        holds=printed == computed,
    )
    per_step = [num_devices * BASE_BATCH for num_devices in EPOCH_SECONDS]
    yield Check(
        id="R2",
        claim="the epoch has a fixed size, so this is strong scaling",
        computed=f"the batch per device is fixed too: at {BASE_BATCH}, a step has"
        f" {'/'.join(map(str, per_step))} samples on 1/2/4 devices, so epochs scale strongly, steps weakly. At 128"
        f" samples per step, 1 × 128 → 4 × 32 is {find_speedup((1, 128), (4, 32)):.2f}×",
        holds=len(set(per_step)) == 1,
    )


def _check_communication() -> Iterator[Check]:
    for batch in BATCHES:
        printed = [COMMUNICATION_SECONDS[n][batch] for n in DEVICES]
        used = [print_seconds(subtract_ideal(n, batch, as_used=True)) for n in DEVICES]
        logged = [print_seconds(subtract_ideal(n, batch, as_used=False)) for n in DEVICES]
        computed = f"published method: {'/'.join(used)} s"
        if used != logged:
            one = EPOCH_SECONDS[1][batch]
            computed += f" with {USED_FOR_512}; corrected: {'/'.join(logged)} s with the logged {one}"
        yield Check(
            id="R3",
            claim=f"communication at batch {batch}: {'/'.join(printed)} s on 2/4 devices",
            computed=computed,
            holds=printed == logged,
        )


def _check_bandwidth() -> Iterator[Check]:
    limit = BANDWIDTH_BYTES_PER_SECOND
    for batch in BATCHES:
        printed = [UTILIZATION_PERCENT[n][batch] for n in DEVICES]
        found = [find_effective_bandwidth(n, batch) for n in DEVICES]
        steps = "/".join(str(count_epoch_steps(n, batch)) for n in DEVICES)
        as_published = "/".join(f"{utilize_as_published(n, batch):.2f}" for n in DEVICES)
        rates = "/".join(f"{rate / 1e9:.2f}" for rate in found)
        yield Check(
            id="R4",
            claim=f"bandwidth used at batch {batch}: {'/'.join(printed)} % of {limit / 1e9:g} GB/s on 2/4 devices",
            computed=f"published method, one all-reduce per epoch: {as_published} %; corrected, one in each of {steps}"
            f" steps: {rates} GB/s, at least {min(found) / limit:.0f} times the assumed bandwidth",
            holds=max(found) <= limit,
        )


def _check_rate() -> Check:
    growth = LARGE_RANKS * LARGE_BATCH / BASE_BATCH
    rate = BASE_RATE * growth
    return Check(
        id="R5",
        claim=f"linear scaling: learning rate {BASE_RATE} becomes {SCALED_RATE}",
        computed=f"{LARGE_RANKS} × {LARGE_BATCH} is {growth:g} times {BASE_BATCH}: {rate:g}",
        holds=abs(rate - SCALED_RATE) < 1e-9,
    )


def _check_messages() -> Iterator[Check]:
    num_parameters = Resnet18Options().count_parameters()
    yield Check(
        id="R6",
        claim=f"{NUM_PARAMETERS:,} parameters, {GRADIENT_BYTES:,} bytes of gradients",
        computed=f"{num_parameters:,} and {4 * num_parameters:,}, from the layers",
        holds=(num_parameters, 4 * num_parameters) == (NUM_PARAMETERS, GRADIENT_BYTES),
    )
    normalised = [channels for _, _, channels, _ in list_resnet18_layers()[:-1]]
    num_floats = sum(2 * channels for channels in normalised)
    yield Check(
        id="R6",
        claim=f"batch-norm buffers: {BUFFER_FLOATS:,} floats and {BUFFER_COUNTERS} counters",
        computed=f"{num_floats:,} and {len(normalised)}, {4 * num_floats + 8 * len(normalised):,} bytes: a mean and a"
        " variance per channel and a counter per layer",
        holds=(num_floats, len(normalised)) == (BUFFER_FLOATS, BUFFER_COUNTERS),
    )

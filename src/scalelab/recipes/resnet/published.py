"""What the fourth assignment published: ResNet-18 on CIFAR-10 under DDP on four GPUs.

SGD 0.1 with momentum 0.9 and weight decay 5e-4, two loader workers. Times are of the second epoch, in seconds, by
batch per device.

The checks recompute its claims from its own times.

R3 takes T_N − T_1/N of an epoch as communication. R4 divides the time of one ring all-reduce,
2·M·(N − 1) / (N·B) (Patarasuk and Yuan 2009), by it, but an epoch has one all-reduce per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import ROUND_HALF_DOWN, Decimal

from scalelab.recipes.recipe import Check, read_published
from scalelab.workloads.image_options import Resnet18Options, list_resnet18_layers

PRINTED = read_published("resnet")


def read(row: str, name: str) -> float:
    return PRINTED[row][name].number


def read_cells(row: str, name: str) -> dict[int, dict[int, str]]:
    """By number of devices and batch per device, as printed."""
    return {n: {batch: PRINTED[row][f"{name}_{n}_{batch}"].text for batch in BATCHES} for n in DEVICES}


BATCHES = (32, 128, 512)
DEVICES = (2, 4)
STRONG_FOR_EPOCHS = "Strong scaling per epoch, weak scaling per step"
TRAIN_IMAGES = 50_000
MOMENTUM, WEIGHT_DECAY = 0.9, 5e-4
"""Not printed: of the assignment's code."""
GRADIENT_BYTES = int(read("R4", "gradient_bytes"))

COMPUTE_SECONDS = {batch: read("R1", f"compute_{batch}") for batch in (*BATCHES, 2048)}
OUT_OF_MEMORY_BATCH = int(read("R1", "out_of_memory"))
"""R1: one device, without loading."""

EPOCH_SECONDS: Mapping[int, Mapping[int, float]] = {
    n: {batch: read("R2", f"seconds_{n}_{batch}") for batch in BATCHES} for n in (1, *DEVICES)
}
"""R2: by number of devices."""
ONE_DEVICE_SECONDS = {**EPOCH_SECONDS[1], 2048: read("R1", "seconds_2048")}
SPEEDUPS_TWO_TO_FOUR = {batch: read("R2", f"speedup_{batch}") for batch in BATCHES}

USED_FOR_512 = read("R3", "used_for_512")
"""R3: the one-device time of batch 512 that was used; the log says 19.704."""
COMPUTATION_SECONDS = read_cells("R3", "computation")
COMMUNICATION_SECONDS = read_cells("R3", "communication")
"""R3: T_1/N and T_N − T_1/N."""

BANDWIDTH_BYTES_PER_SECOND = 1e9 * read("R4", "bandwidth_gigabytes_per_second")
EFFECTIVE_GIGABYTES_PER_SECOND = read_cells("R4", "gigabytes_per_second")
UTILIZATION_PERCENT = read_cells("R4", "percent")
"""R4: one all-reduce over the communication of an epoch."""

LARGE_RANKS, LARGE_BATCH, LARGE_EPOCHS = (int(read("R5", name)) for name in ("ranks", "batch", "epochs"))
BASE_BATCH, BASE_RATE, SCALED_RATE = int(read("R5", "base_batch")), read("R5", "base_rate"), read("R5", "scaled_rate")
LARGE_LOSS, LARGE_ACCURACY = read("R5", "training_loss"), read("R5", "training_accuracy")
LARGE_EPOCH_LINES = {
    epoch: tuple(PRINTED["R5"][f"{name}_epoch_{epoch}"].text for name in ("seconds", "loss", "accuracy"))
    for epoch in range(1, LARGE_EPOCHS + 1)
}
SMALL_BATCH_PERCENT = read("R5", "small_batch_percent")
"""R5: 4 × 2048 on training images, before the learning rate is scaled; and at batch 128, at least."""


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
    return [
        _check_text(),
        *_check_scaling(),
        *_check_communication(),
        *_check_bandwidth(),
        _check_rate(),
        *_check_messages(),
    ]


def _check_text() -> Check:
    texts = {batch: PRINTED["R1"][f"text_{batch}"].text for batch in COMPUTE_SECONDS}
    rounded = {batch: f"{COMPUTE_SECONDS[batch]:.{len(text.partition('.')[2])}f}" for batch, text in texts.items()}
    wrong = [f"batch {batch}: {rounded[batch]} s" for batch, text in texts.items() if rounded[batch] != text]
    return Check(
        id="R1",
        claim=f"the text says {', '.join(texts.values())} s for batch {', '.join(map(str, texts))}",
        computed=f"its own log and table give {', '.join(wrong)}",
        holds=not wrong,
    )


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
        computed=f"{STRONG_FOR_EPOCHS.lower()}: the batch per device is fixed too. At {BASE_BATCH}, a step has"
        f" {'/'.join(map(str, per_step))} samples on 1/2/4 devices, so steps scale weakly. At 128"
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
            f" steps: {rates} GB/s, at least {min(found) / limit:.2f} times the assumed bandwidth",
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
        id="R4",
        claim=f"M = {GRADIENT_BYTES:,} bytes",
        computed=f"4 bytes for each of {num_parameters:,} parameters, from the layers: {4 * num_parameters:,}",
        holds=4 * num_parameters == GRADIENT_BYTES,
    )
    normalised = [channels for _, _, channels, _ in list_resnet18_layers()[:-1]]
    num_floats = sum(2 * channels for channels in normalised)
    yield Check(
        id="R6",
        claim=f"DDP {PRINTED['R6']['buffers'].text}",
        computed=f"yes: {len(normalised)} batch norms have a mean and a variance per channel ({num_floats:,} floats)"
        f" and a counter each: {4 * num_floats + 8 * len(normalised):,} bytes, which rank 0 broadcasts before forward",
        holds=bool(normalised),
    )

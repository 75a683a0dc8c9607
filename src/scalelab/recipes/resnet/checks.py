"""The checks of the resnet assignment: its claims, recomputed from its own times.

R3 takes T_N − T_1/N of an epoch as communication. R4 divides the time of one ring all-reduce,
2·M·(N − 1) / (N·B) (Patarasu and Yuan 2009), by it, but an epoch has one all-reduce per step.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import ROUND_HALF_DOWN, Decimal

from scalelab.recipes.recipe import Check
from scalelab.recipes.resnet import published
from scalelab.workloads.image_options import Resnet18Options, list_resnet18_layers

DEVICES = (2, 4)


def subtract_ideal(num_devices: int, batch: int, *, as_used: bool) -> float:
    """R3: T_N − T_1/N, in seconds, to the microsecond; `as_used` takes the wrong T_1 of batch 512."""
    one = published.EPOCH_SECONDS[1][batch]
    if as_used and batch == 512:
        one = published.USED_FOR_512
    return round(published.EPOCH_SECONDS[num_devices][batch] - one / num_devices, 6)


def print_seconds(seconds: float) -> str:
    """Three decimals; halves were rounded down."""
    return str(Decimal(str(seconds)).quantize(Decimal("0.001"), rounding=ROUND_HALF_DOWN))


def count_ring_bytes(num_devices: int) -> float:
    """What every device sends in a ring all-reduce of all gradients."""
    return 2 * published.GRADIENT_BYTES * (num_devices - 1) / num_devices


def utilize_as_published(num_devices: int, batch: int) -> float:
    """R4, the published method, in percent: one all-reduce for the whole epoch, over R3's printed seconds."""
    seconds = float(print_seconds(subtract_ideal(num_devices, batch, as_used=True)))
    return 100 * count_ring_bytes(num_devices) / published.BANDWIDTH_BYTES_PER_SECOND / seconds


def count_epoch_steps(num_devices: int, batch: int) -> int:
    """Whole batches only, as the loader drops the last one."""
    return published.TRAIN_IMAGES // (num_devices * batch)


def find_effective_bandwidth(num_devices: int, batch: int) -> float:
    """R4 corrected, in bytes per second: an all-reduce in every step, over R3's time with the logged T_1."""
    sent = count_epoch_steps(num_devices, batch) * count_ring_bytes(num_devices)
    return sent / subtract_ideal(num_devices, batch, as_used=False)


def find_speedup(numerator: tuple[int, int], denominator: tuple[int, int]) -> float:
    """Epoch time over epoch time, each of (devices, batch per device)."""
    (n, batch), (m, other) = numerator, denominator
    return published.EPOCH_SECONDS[n][batch] / published.EPOCH_SECONDS[m][other]


def make_checks() -> list[Check]:
    return [*_check_scaling(), *_check_communication(), *_check_bandwidth(), _check_rate(), *_check_messages()]


def _check_scaling() -> Iterator[Check]:
    printed = [f"{found:.2f}×" for found in published.SPEEDUPS_TWO_TO_FOUR.values()]
    computed = [f"{find_speedup((2, batch), (4, batch)):.2f}×" for batch in published.BATCHES]
    yield Check(
        id="R2",
        claim=f"2 → 4 devices: {', '.join(printed)} (batch 32, 128, 512)",
        computed=", ".join(computed),
        holds=printed == computed,
    )
    per_step = [num_devices * published.BASE_BATCH for num_devices in published.EPOCH_SECONDS]
    yield Check(
        id="R2",
        claim="the epoch has a fixed size, so this is strong scaling",
        computed=f"the batch per device is fixed too: at {published.BASE_BATCH}, a step has"
        f" {'/'.join(map(str, per_step))} samples on 1/2/4 devices, so epochs scale strongly, steps weakly. At 128"
        f" samples per step, 1 × 128 → 4 × 32 is {find_speedup((1, 128), (4, 32)):.2f}×",
        holds=len(set(per_step)) == 1,
    )


def _check_communication() -> Iterator[Check]:
    for batch in published.BATCHES:
        printed = [published.COMMUNICATION_SECONDS[n][batch] for n in DEVICES]
        used = [print_seconds(subtract_ideal(n, batch, as_used=True)) for n in DEVICES]
        logged = [print_seconds(subtract_ideal(n, batch, as_used=False)) for n in DEVICES]
        computed = f"published method: {'/'.join(used)} s"
        if used != logged:
            one = published.EPOCH_SECONDS[1][batch]
            computed += f" with {published.USED_FOR_512}; corrected: {'/'.join(logged)} s with the logged {one}"
        yield Check(
            id="R3",
            claim=f"communication at batch {batch}: {'/'.join(printed)} s on 2/4 devices",
            computed=computed,
            holds=printed == logged,
        )


def _check_bandwidth() -> Iterator[Check]:
    limit = published.BANDWIDTH_BYTES_PER_SECOND
    for batch in published.BATCHES:
        printed = [published.UTILIZATION_PERCENT[n][batch] for n in DEVICES]
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
    growth = published.LARGE_RANKS * published.LARGE_BATCH / published.BASE_BATCH
    rate = published.BASE_RATE * growth
    return Check(
        id="R5",
        claim=f"linear scaling: learning rate {published.BASE_RATE} becomes {published.SCALED_RATE}",
        computed=f"{published.LARGE_RANKS} × {published.LARGE_BATCH} is {growth:g} times {published.BASE_BATCH}:"
        f" {rate:g}",
        holds=abs(rate - published.SCALED_RATE) < 1e-9,
    )


def _check_messages() -> Iterator[Check]:
    num_parameters = Resnet18Options().count_parameters()
    yield Check(
        id="R6",
        claim=f"{published.NUM_PARAMETERS:,} parameters, {published.GRADIENT_BYTES:,} bytes of gradients",
        computed=f"{num_parameters:,} and {4 * num_parameters:,}, from the layers",
        holds=(num_parameters, 4 * num_parameters) == (published.NUM_PARAMETERS, published.GRADIENT_BYTES),
    )
    normalised = [channels for _, _, channels, _ in list_resnet18_layers()[:-1]]
    num_floats = sum(2 * channels for channels in normalised)
    yield Check(
        id="R6",
        claim=f"batch-norm buffers: {published.BUFFER_FLOATS:,} floats and {published.BUFFER_COUNTERS} counters",
        computed=f"{num_floats:,} and {len(normalised)}, {4 * num_floats + 8 * len(normalised):,} bytes: a mean and a"
        " variance per channel and a counter per layer",
        holds=(num_floats, len(normalised)) == (published.BUFFER_FLOATS, published.BUFFER_COUNTERS),
    )

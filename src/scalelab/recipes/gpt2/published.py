"""What one assignment published: GPT-2 on one GPU, then on two with DDP and FSDP, on shards of tokens.

Its megabytes are 2²⁰ bytes.

The checks recompute its claims from its own numbers and its model's sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.growth import Extrapolation, extrapolate_training, from_rounded, infer_throughput
from scalelab.recipes.recipe import Check, read_published
from scalelab.records.settings import Optimization
from scalelab.workloads.gpt2_options import Gpt2Options
from scalelab.workloads.schedule import learning_rate_factor

MEGABYTE = 2**20
PRINTED = read_published("gpt2")


def read(row: str, name: str) -> float:
    return PRINTED[row][name].number


SEQUENCE = int(read("G1", "sequence"))
SMALL_PARAMETERS = int(read("G1", "parameters"))

MEMORY_BATCH = int(read("G1", "batch"))
STATES = ("parameters", "gradients", "optimizer", "together")
ESTIMATED_MEGABYTES = {name: read("G1", f"estimated_{name}") for name in STATES}
ALLOCATED_MEGABYTES = read("G1", "allocated")
RESERVED_MEGABYTES = read("G1", "reserved")
ABOVE_ESTIMATE_MEGABYTES = read("G1", "above_estimate")
"""G1: GPT-2 small, batch 8, AdamW. What was called the peak is ALLOCATED_MEGABYTES."""

WARMUP_STEPS, TIMED_STEPS = 5, int(read("G2", "timed_steps"))
TOKENS_PER_SECOND = read("G2", "tokens_per_second")
STEPS_PER_SECOND = read("G2", "steps_per_second")
TIMED_TOKENS, TIMED_SECONDS = (PRINTED["G2"][name].text for name in ("tokens", "seconds"))
"""G2."""

TARGET_PARAMETERS, TARGET_TOKENS = 1e12, 1e13
TARGET_TOKENS_PER_SECOND = PRINTED["G3"]["tokens_per_second"].text
TARGET_DAYS = PRINTED["G3"]["days"].text
TARGET_YEARS = PRINTED["G3"]["years"].text
"""G3: as printed."""


class BatchRow(NamedTuple):
    """G4: one batch size."""

    batch: int
    tokens_per_second: float
    megabytes: float


BATCH_ROWS = tuple(
    BatchRow(batch, int(read("G4", f"tokens_per_second_{batch}")), int(read("G4", f"megabytes_{batch}")))
    for batch in (1, 4, 8, 16, 32)
)
OUT_OF_MEMORY_BATCH = int(read("G4", "out_of_memory"))

TRAIN_STEPS = 20
SHARD_TOKENS = PRINTED["G5"]["shard_tokens"].text
TRAIN_BATCH, TRAIN_MICRO_BATCH = 32, 8
LEARNING_RATE, LEARNING_RATE_MIN, WEIGHT_DECAY = 3e-4, 3e-5, 0.1
TRAIN_SEED = 42
"""Not printed: of the assignment's code."""
TRAIN_RANKS = int(read("G5", "ranks"))
TRAIN_SECONDS = {
    name: read("G5", f"seconds_{name.replace('-', '_')}") for name in ("single", "ddp", "fsdp-full", "fsdp-grad-op")
}
LOSSES = {step: read("G5", f"loss_{step}") for step in (0, 10)}
"""G5: by step, equal with DDP and both forms of FSDP."""
BASELINE_LOSSES = {step: read("G5", f"baseline_loss_{step}") for step in (0, 10)}
LEARNING_RATES = {step: read("G5", f"rate_{step}") for step in (0, 10)}
"""G5: by step."""


SCHEDULE = Optimization(
    optimizer="adamw",
    lr=LEARNING_RATE,
    weight_decay=WEIGHT_DECAY,
    schedule="cosine",
    schedule_steps=TRAIN_STEPS,
    lr_min=LEARNING_RATE_MIN,
)
"""G5: AdamW, cosine to a tenth."""


def estimate_states() -> dict[str, float]:
    """G1: parameters, gradients and AdamW's two moments in float32, in MiB: 4P, 4P and 8P."""
    one = 4 * Gpt2Options(size="small").count_parameters() / MEGABYTE
    return {"parameters": one, "gradients": one, "optimizer": 2 * one, "together": 4 * one}


def count_logits_bytes(batch: int) -> int:
    """One number of 4 bytes per token and word."""
    return batch * SEQUENCE * Gpt2Options(size="small").shape.vocabulary * 4


def bound_peak_megabytes() -> float:
    """G1: the least that is allocated when backward starts: parameters, moments, the logits and their gradient."""
    states = estimate_states()
    logits = count_logits_bytes(MEMORY_BATCH) / MEGABYTE
    return states["parameters"] + states["optimizer"] + 2 * logits


def fit_batch_memory() -> tuple[float, float]:
    """G4: fixed megabytes and megabytes per sample, from the rows whose memory was their own: least squares."""
    fresh = [row for row in BATCH_ROWS if row.batch >= 8]
    slope, intercept = np.polyfit([row.batch for row in fresh], [row.megabytes for row in fresh], 1)
    return float(intercept), float(slope)


def extrapolate_from(tokens_per_second: Estimate) -> Extrapolation:
    """G3: a model of 1T parameters and 10T tokens, from GPT-2 small's throughput."""
    return extrapolate_training(
        tokens_per_second,
        SMALL_PARAMETERS,
        target_parameters=TARGET_PARAMETERS,
        target_tokens=TARGET_TOKENS,
    )


def find_nearby_rate() -> float:
    """G3: the tokens/s, to three decimals, that the published days come from."""
    days = float(TARGET_DAYS.replace(",", ""))
    rate = infer_throughput(
        days,
        SMALL_PARAMETERS,
        target_parameters=TARGET_PARAMETERS,
        target_tokens=TARGET_TOKENS,
    )
    return round(rate, 3)


def extrapolate_published() -> Extrapolation:
    """G3, from the printed throughput, within its rounding."""
    return extrapolate_from(from_rounded(TOKENS_PER_SECOND, 1))


def find_learning_rate(step: int) -> float:
    """G5: by our own schedule."""
    factor = learning_rate_factor(step, SCHEDULE, TRAIN_STEPS, None, LEARNING_RATE)
    return LEARNING_RATE * factor


def make_checks() -> list[Check]:
    return [*_check_memory(), _check_rate(), _check_extrapolation(), *_check_batches(), *_check_training()]


def _check_memory() -> Iterator[Check]:
    states = [f"{megabytes:.2f}" for megabytes in estimate_states().values()]
    printed = [f"{megabytes:.2f}" for megabytes in ESTIMATED_MEGABYTES.values()]
    yield Check(
        id="G1",
        claim=f"estimate: {' / '.join(printed)} MB",
        computed=f"{' / '.join(states)}, of 2²⁰ bytes: 4P, 4P, 8P and their sum",
        holds=states == printed,
    )
    above = ALLOCATED_MEGABYTES - ESTIMATED_MEGABYTES["together"]
    yield Check(
        id="G1",
        claim=f"allocated against estimated: {ABOVE_ESTIMATE_MEGABYTES:.2f} MB",
        computed=f"{ALLOCATED_MEGABYTES:.2f} − {ESTIMATED_MEGABYTES['together']:.2f} = {above:.2f} MB",
        holds=f"{above:.2f}" == f"{ABOVE_ESTIMATE_MEGABYTES:.2f}",
    )
    least = bound_peak_megabytes()
    logits = count_logits_bytes(MEMORY_BATCH) / MEGABYTE
    yield Check(
        id="G1",
        claim=f"the peak is {ALLOCATED_MEGABYTES} MB",
        computed=f"when backward starts, parameters, moments, logits ({logits:.1f}) and their gradient alone are"
        f" {least:.1f}: it was read after zero_grad, when most was freed",
        holds=least <= ALLOCATED_MEGABYTES,
    )


def _check_rate() -> Check:
    steps = TOKENS_PER_SECOND / (MEMORY_BATCH * SEQUENCE)
    return Check(
        id="G2",
        claim=f"{TOKENS_PER_SECOND:,} tokens/s, {STEPS_PER_SECOND} steps/s",
        computed=f"{steps:.2f} steps/s of {MEMORY_BATCH} × {SEQUENCE} tokens",
        holds=f"{steps:.2f}" == str(STEPS_PER_SECOND),
    )


def _check_extrapolation() -> Check:
    found = extrapolate_published()
    rate, years = f"{found.tokens_per_second.value:.3f}", f"{found.years.value:.1f}"
    low, high = found.days.low or math.nan, found.days.high or math.nan
    days = float(TARGET_DAYS.replace(",", ""))
    nearby_rate = find_nearby_rate()
    nearby = extrapolate_from(Estimate(value=nearby_rate)).days.value
    return Check(
        id="G3",
        claim=f"{TARGET_TOKENS_PER_SECOND} tokens/s, {TARGET_DAYS} days, {TARGET_YEARS}"
        " years for 1T parameters and 10T tokens",
        computed=f"from the printed {TOKENS_PER_SECOND:,} tokens/s: {rate} tokens/s, {found.days.value:,.0f}"
        f" days ({low:,.0f} to {high:,.0f} within its rounding), {years} years; {nearby_rate:,} tokens/s, which"
        f" rounds to the same, gives {nearby:,.0f} days",
        holds=(rate, years) == (TARGET_TOKENS_PER_SECOND, TARGET_YEARS) and low <= days <= high,
    )


def _check_batches() -> Iterator[Check]:
    fixed, per_sample = fit_batch_memory()
    stale = [row for row in BATCH_ROWS if row.batch < 8]
    expected = [fixed + per_sample * row.batch for row in stale]
    yield Check(
        id="G4",
        claim="batch {} and {}: {:,} and {:,} MB".format(
            *(row.batch for row in stale), *(row.megabytes for row in stale)
        ),
        computed=f"batch 8 to 32 lie on {fixed:,.0f} + {per_sample:,.0f} × batch, which gives"
        f" {expected[0]:,.0f} and {expected[1]:,.0f} MB: the equal rows are an earlier peak that was never reset",
        holds=all(abs(row.megabytes / megabytes - 1) < 0.05 for row, megabytes in zip(stale, expected, strict=True)),
    )
    largest = BATCH_ROWS[-1]
    needed = fixed + per_sample * OUT_OF_MEMORY_BATCH
    yield Check(
        id="G4",
        claim=f"batch {OUT_OF_MEMORY_BATCH} runs out of memory",
        computed=f"the same line gives {needed:,.0f} MB, {needed / largest.megabytes:.1f} times batch {largest.batch}",
        holds=needed > largest.megabytes,
    )


def _check_training() -> Iterator[Check]:
    rates = {step: f"{find_learning_rate(step):.2e}" for step in LEARNING_RATES}
    yield Check(
        id="G5",
        claim=", ".join(f"{rate:.2e} at step {step}" for step, rate in LEARNING_RATES.items()),
        computed=", ".join(f"{rate} at step {step}" for step, rate in rates.items()) + " by the cosine schedule",
        holds=all(rates[step] == f"{rate:.2e}" for step, rate in LEARNING_RATES.items()),
    )
    chance = math.log(Gpt2Options(size="large").shape.vocabulary)
    first = LOSSES[0]
    yield Check(
        id="G5",
        claim=f"the loss starts at {first}",
        computed=f"a uniform guess costs ln(50257) = {chance:.4f}; the start is {first / chance - 1:.1%}"
        " above it, as expected of random weights",
        holds=chance < first < 1.05 * chance,
    )
    apart = first - BASELINE_LOSSES[0]
    yield Check(
        id="G5",
        claim=f"two GPUs train what one does: {' → '.join(map(str, BASELINE_LOSSES.values()))} on one,"
        f" {' → '.join(map(str, LOSSES.values()))} on two (steps 0 and 10)",
        computed=f"the losses differ by {apart:.4f} at step 0, before any update: rank 0 prints the loss of its own"
        " half of the batch. Only the mean over ranks compares with one GPU",
        holds=abs(apart) < 5e-5,
    )
    one = TRAIN_SECONDS["single"]
    speedups = [f"{one / seconds:.2f}×" for seconds in TRAIN_SECONDS.values()][1:]
    slowest = max(seconds for name, seconds in TRAIN_SECONDS.items() if name != "single")
    yield Check(
        id="G5",
        claim="DDP and both forms of FSDP take the same time on two GPUs",
        computed=f"{', '.join(speedups)}: within {slowest / TRAIN_SECONDS['ddp'] - 1:.1%} of each other, one run each",
        holds=slowest / TRAIN_SECONDS["ddp"] < 1.01,
    )

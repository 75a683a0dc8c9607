"""G4: throughput and memory by batch size, up to one that does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

from scalelab.analysis.estimate import Estimate
from scalelab.recipes.evidence import (
    ACCOUNTED,
    Compared,
    describe_limit,
    divide_steps,
    explain_limit,
    find_arm,
    find_too_large,
    is_out_of_memory,
    list_arms,
    quote,
    read_memory,
    say,
    say_wide,
    scale,
)
from scalelab.recipes.feasibility import choose, make_sampling
from scalelab.recipes.gpt2 import published
from scalelab.recipes.gpt2.one_device import OTHER_MEGABYTES, make_job
from scalelab.recipes.recipe import Answer, Main, Outcome, Outcomes, Row, Size, pair_questions
from scalelab.report.document import Table
from scalelab.report.tables import (
    INTERVAL_NOTE,
    PAIRED_NOTE,
    bytes_column,
    count_column,
    make_table,
    rate_column,
    ratio_column,
    text_column,
)
from scalelab.studies.batch_size import SATURATION, BatchSize
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.work import measure_rate
from scalelab.units import format_interval

SMALL_LIMIT = "300MB"
"""What a rank may allocate in small, so that the largest batch does not fit."""
EDGE = 0.001
"""How far above 1 the lower end of a gain must be: equal times divide to 1 only nearly."""


def make_g4(size: Size) -> Row:
    study = BatchSize(
        batches=(*(row.batch for row in published.BATCH_ROWS), published.OUT_OF_MEMORY_BATCH),
        job=make_job(size, memory_limit=choose(size, small=SMALL_LIMIT, full=None)),
        sampling=make_sampling(size, rounds=8, steps=8, phase_steps=0),
    )
    return Row(
        id="G4",
        title="Batch sweep",
        parts={"sweep": study},
        conclude=answer_g4,
        num_tables=0,
        expects=partial(is_out_of_memory, published.OUT_OF_MEMORY_BATCH),
        accounts_memory=True,
    )


def answer_g4(outcomes: Outcomes) -> Answer:
    outcome = outcomes.get("sweep")
    first_row = published.BATCH_ROWS[0]
    first = find_arm(outcome, global_batch=first_row.batch)
    if first is None or outcome is None:
        return Answer()
    arms = {row.batch: find_arm(outcome, global_batch=row.batch) for row in published.BATCH_ROWS}
    gains = [
        Compared(
            f"batch {row.batch}",
            1.0 if row is first_row else measure_gain(first, arms[row.batch]),
            row.tokens_per_second / first_row.tokens_per_second,
        )
        for row in published.BATCH_ROWS
    ]
    limit = describe_limit(outcome)
    sentence = (
        f"{name_fastest(list_arms(outcome))}{f'; {limit}' if limit else ''} (published: out of memory at"
        f" {published.OUT_OF_MEMORY_BATCH})."
    )
    told = [line for line in gains if isinstance(line.ours, Estimate) and line.ours.low is not None]
    last = (told or [line for line in gains if line.ours is not None])[-1]
    return Answer(
        main=Main("ratio", f"tokens/s over batch {first_row.batch}, {last.what}", *last[1:]),
        tables=(make_batch_table(arms, gains),),
        sentences=(sentence, *explain_limit(outcome)),
        questions=pair_questions(
            "gpt2",
            "G4",
            answer_sweep(list_arms(outcome), limit, [*predict_peak(outcome), *quote(outcome, SATURATION.name)]),
        ),
    )


def make_batch_table(arms: Mapping[int, Arm | None], gains: Sequence[Compared]) -> Table:
    """The published table, ours beside it, and both rates over that of the smallest batch."""
    over = {row.batch: gain for row, gain in zip(published.BATCH_ROWS, gains, strict=True)}

    def read_rate(row: published.BatchRow) -> Estimate | None:
        arm = arms[row.batch]
        return measure_rate(arm) if arm else None

    def read_peak(row: published.BatchRow) -> int | None:
        arm = arms[row.batch]
        return read_memory(arm) if arm else None

    return make_table(
        published.BATCH_ROWS,
        count_column("batch", "batch", lambda row: row.batch),
        rate_column("rate", "tokens/s", read_rate),
        text_column("published_rate", "published", lambda row: f"{row.tokens_per_second:,}", align="right"),
        ratio_column("gain", "× batch 1", lambda row: over[row.batch].ours),
        ratio_column("published_gain", "× from published", lambda row: over[row.batch].published),
        bytes_column("peak_bytes", "peak memory", read_peak),
        text_column("published_peak", "published", lambda row: f"{row.megabytes:,} MB", align="right"),
        title="By batch size",
        notes=(
            INTERVAL_NOTE,
            PAIRED_NOTE,
            *note_missing(gains),
            f"peak memory, {ACCOUNTED}",
            "published for batch 1 and 4: of an earlier batch, never reset",
            OTHER_MEGABYTES,
        ),
    )


def name_fastest(arms: Sequence[Arm]) -> str:
    """The batch with the highest throughput, where its interval against every other one says so."""
    best = max(arms, key=lambda arm: measure_rate(arm).value)
    gains = {arm.trial.global_batch: measure_gain(arm, best) for arm in arms if arm is not best}
    ties = {batch: gain for batch, gain in gains.items() if gain is None or not gain.is_above(1)}
    if not ties:
        rate = say_wide("rate", measure_rate(best))
        return f"The highest throughput is {rate} tokens/s at batch {best.trial.global_batch}"
    listed = ", ".join(
        f"{format_interval('ratio', gain)} times that of {batch}" for batch, gain in ties.items() if gain
    )
    return f"Which batch has the highest throughput is unresolved: batch {best.trial.global_batch} has {listed}"


def note_missing(lines: Sequence[Compared]) -> tuple[str, ...]:
    """Why a quotient has no interval."""
    alone = [line.what for line in lines if isinstance(line.ours, Estimate) and line.ours.low is None]
    return (f"{', '.join(alone)}: no interval, as fewer than two launches completed both batches",) if alone else ()


def predict_peak(outcome: Outcome) -> Iterator[str]:
    """What tensors alone would take at the batch that failed: a line through the accounted peaks of the two largest."""
    failed = find_too_large(outcome)
    held = {arm.trial.global_batch: peak for arm in list_arms(outcome) if (peak := read_memory(arm))}
    if failed is None or failed.trial.memory_limit_bytes is None or len(held) < 2:
        return
    (small, low), (large, high) = sorted(held.items())[-2:]
    batch, limit = failed.trial.global_batch, failed.trial.memory_limit_bytes
    tensors = high + (batch - large) * (high - low) / (large - small)
    beyond = "" if tensors > limit else "; what else the process allocates exceeds the rest"
    yield f"By the growth of peaks, tensors would take about {say('bytes', tensors)} at batch {batch}{beyond}."


def answer_sweep(arms: Sequence[Arm], limit: str, more: Sequence[str] = ()) -> dict[str, str]:
    """Where throughput stops growing: every batch over the one before, and what memory does; `more` at the end."""
    ordered = sorted(arms, key=lambda arm: arm.trial.global_batch)
    gains = {arm.trial.global_batch: measure_gain(before, arm) for before, arm in pairwise(ordered)}
    known = {batch: gain for batch, gain in gains.items() if gain is not None}
    if not known:
        return {}
    listed = ", ".join(
        f"{format_interval('ratio', gain)}{' (no interval)' if gain.low is None else ''} at {batch}"
        for batch, gain in known.items()
    )
    growing = [batch for batch, gain in known.items() if gain.is_above(1 + EDGE)]
    others = [str(batch) for batch in known if growing and batch not in growing and not is_flat(known[batch])]
    verdict = f"Throughput grows up to batch {growing[-1]}" if growing else judge_over_first(ordered)
    verdict += f"; whether it does at {', '.join(others)} is unresolved" if others else ""
    held = {arm.trial.global_batch: read_memory(arm) for arm in ordered}
    memory = ", ".join(f"{say('bytes', num_bytes)} at {batch}" for batch, num_bytes in held.items() if num_bytes)
    return {
        "batches": f"{verdict}{compare_ends(ordered)}. Memory keeps growing with the activations"
        f" ({memory}){f'; {limit}' if limit else ''}. Tokens/s over the batch before, with 95 % intervals: {listed}."
        " Larger batches spread the fixed cost of a step over more tokens, until it is negligible."
        f"{''.join(f' {sentence}' for sentence in more)}"
    }


def is_flat(gain: Estimate) -> bool:
    """Whether it is certain that a batch gains no more than next to nothing."""
    return gain.is_below(1 + 10 * EDGE)


def compare_ends(ordered: Sequence[Arm]) -> str:
    """What the largest batch that ran gains over the smallest, beside the published gain."""
    first, last = ordered[0], ordered[-1]
    rates = {row.batch: row.tokens_per_second for row in published.BATCH_ROWS}
    gain, batches = measure_gain(first, last), [arm.trial.global_batch for arm in (first, last)]
    if gain is None or any(batch not in rates for batch in batches):
        return ""
    there = rates[batches[1]] / rates[batches[0]]
    times = f"{say_wide('ratio', gain)} times the tokens/s of {batches[0]}"
    return f"; batch {batches[1]} has {times} (from the published rates: {there:.2f})"


def judge_over_first(ordered: Sequence[Arm]) -> str:
    """Whether any batch is clearly faster than the smallest, where no step from one to the next is."""
    first = ordered[0]
    gains = {arm.trial.global_batch: measure_gain(first, arm) for arm in ordered[1:]}
    clear = {batch: gain for batch, gain in gains.items() if gain and gain.is_above(1 + EDGE)}
    if not clear:
        return "No clear growth of throughput"
    listed = ", ".join(f"{format_interval('ratio', gain)} at {batch}" for batch, gain in clear.items())
    return (
        f"Throughput grows over that of batch {first.trial.global_batch} ({listed}), but where it stops growing is"
        " unresolved: no batch is clearly faster than the one before"
    )


def measure_gain(first: Arm, arm: Arm | None) -> Estimate | None:
    """Throughput over that of the first batch, round by round."""
    if arm is None:
        return None
    return scale(divide_steps(first, arm), arm.trial.global_batch / first.trial.global_batch)

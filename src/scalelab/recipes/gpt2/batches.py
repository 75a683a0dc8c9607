"""G4: throughput and memory by batch size, up to one that does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    keep_tables,
    list_arms,
    make_beside_table,
    read_memory,
    say,
    say_wide,
    scale,
)
from scalelab.recipes.feasibility import choose, make_sampling
from scalelab.recipes.gpt2 import published
from scalelab.recipes.gpt2.one_device import OTHER_MEGABYTES, make_job
from scalelab.recipes.recipe import Answer, Main, Outcome, Outcomes, Row, Size, pair_questions
from scalelab.studies.batch_size import BatchSize
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.work import measure_rate
from scalelab.units import format_interval

SMALL_LIMIT = "300MB"
"""What a rank may allocate in small, so that the largest batch does not fit."""
EDGE = 0.01
"""How far above 1 the lower end of a gain must be to be called clear."""


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
        conclude=partial(answer_g4, size),
        num_tables=0,
        expects=partial(is_out_of_memory, published.OUT_OF_MEMORY_BATCH),
        accounts_memory=True,
    )


def answer_g4(size: Size, outcomes: Outcomes) -> Answer:
    outcome = outcomes.get("sweep")
    first_row = published.BATCH_ROWS[0]
    first = find_arm(outcome, global_batch=first_row.batch)
    if first is None or outcome is None:
        return Answer()
    rates, gains, memory = [], [], []
    for row in published.BATCH_ROWS:
        arm, what = find_arm(outcome, global_batch=row.batch), f"batch {row.batch}"
        rate = measure_rate(arm) if arm else None
        rates.append(Compared(what, rate, row.tokens_per_second, f"{row.tokens_per_second:,}"))
        gain = 1.0 if arm is first else measure_gain(first, arm)
        gains.append(Compared(what, gain, row.tokens_per_second / first_row.tokens_per_second))
        peak = read_memory(arm) if arm else None
        memory.append(Compared(what, peak, row.megabytes * published.MEGABYTE, f"{row.megabytes:,} MB"))
    limit = describe_limit(outcome)
    sentence = (
        f"{name_fastest(list_arms(outcome))}{f'; {limit}' if limit else ''} (published: out of memory at"
        f" {published.OUT_OF_MEMORY_BATCH})."
    )
    told = [line for line in gains if isinstance(line.ours, Estimate) and line.ours.low is not None]
    last = (told or [line for line in gains if line.ours is not None])[-1]
    return Answer(
        main=Main("ratio", f"tokens/s over batch {first_row.batch}, {last.what}", *last[1:]),
        tables=keep_tables(
            make_beside_table("rate", rates, title="Tokens per second", size=size),
            make_beside_table(
                "ratio", gains, title="Tokens per second, over batch 1", size=size, notes=note_missing(gains)
            ),
            make_beside_table(
                "bytes",
                memory,
                title="Peak memory",
                size=size,
                notes=(ACCOUNTED, "published for batch 1 and 4: of an earlier batch, never reset", OTHER_MEGABYTES),
            ),
        ),
        sentences=(sentence, *explain_limit(outcome), *predict_peak(outcome)),
        questions=pair_questions("gpt2", "G4", answer_sweep(list_arms(outcome), limit)),
    )


def name_fastest(arms: Sequence[Arm]) -> str:
    """The batch with the highest throughput, where its interval against every other one says so."""
    best = max(arms, key=lambda arm: measure_rate(arm).value)
    gains = [measure_gain(arm, best) for arm in arms if arm is not best]
    if all(gain is not None and gain.low is not None and gain.low > 1 for gain in gains):
        rate = say_wide("rate", measure_rate(best))
        return f"The highest throughput is {rate} tokens/s at batch {best.trial.global_batch}"
    return "Which batch has the highest throughput is unresolved: the intervals of the fastest overlap"


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
    beyond = "" if tensors > limit else ": the limit was exceeded by what is allocated besides"
    yield f"By the growth of peaks, tensors alone would take about {say('bytes', tensors)} at batch {batch}{beyond}."


def answer_sweep(arms: Sequence[Arm], limit: str) -> dict[str, str]:
    """Where throughput stops growing: every batch over the one before, and what memory does."""
    ordered = sorted(arms, key=lambda arm: arm.trial.global_batch)
    gains = {arm.trial.global_batch: measure_gain(before, arm) for before, arm in pairwise(ordered)}
    known = {batch: gain for batch, gain in gains.items() if gain is not None}
    if not known:
        return {}
    listed = ", ".join(
        f"{format_interval('ratio', gain)}{' (no interval)' if gain.low is None else ''} at {batch}"
        for batch, gain in known.items()
    )
    growing = [batch for batch, gain in known.items() if gain.low is not None and gain.low > 1]
    clear = [batch for batch in growing if (known[batch].low or 0.0) >= 1 + EDGE]
    edge = [str(batch) for batch in growing if batch not in clear]
    verdict = f"Throughput clearly grows up to batch {clear[-1]}" if clear else judge_over_first(ordered)
    verdict += f"; at the edge of the interval at {', '.join(edge)}" if edge else ""
    held = {arm.trial.global_batch: read_memory(arm) for arm in ordered}
    memory = ", ".join(f"{say('bytes', num_bytes)} at {batch}" for batch, num_bytes in held.items() if num_bytes)
    return {
        "batches": f"{verdict}. Memory keeps growing with the activations"
        f" ({memory}){f'; {limit}' if limit else ''}. Tokens/s over the batch before, with 95 % intervals: {listed}."
        " Larger batches spread the fixed cost of a step over more tokens until the device is busy."
    }


def judge_over_first(ordered: Sequence[Arm]) -> str:
    """Whether any batch is clearly faster than the smallest, where no step from one to the next is."""
    first = ordered[0]
    gains = {arm.trial.global_batch: measure_gain(first, arm) for arm in ordered[1:]}
    clear = {batch: gain for batch, gain in gains.items() if gain and gain.low is not None and gain.low >= 1 + EDGE}
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

"""G1 to G4: memory, throughput, what a larger model would need, and the batch, on one device."""

from __future__ import annotations

from functools import partial
from typing import Any

from scalelab.analysis.estimate import Estimate
from scalelab.recipes.evidence import (
    Compared,
    divide_steps,
    find_arm,
    keep_tables,
    list_arms,
    make_beside_table,
    quote,
    say,
    scale,
)
from scalelab.recipes.feasibility import choose, make_sampling
from scalelab.recipes.forecast import Forecast, read_peak
from scalelab.recipes.gpt2 import published
from scalelab.recipes.recipe import Finding, Outcome, Outcomes, Row, Size
from scalelab.records.settings import Optimization
from scalelab.records.trial import Status
from scalelab.report.document import Table
from scalelab.studies.batch_size import BatchSize
from scalelab.studies.memory.answer import collect_rows
from scalelab.studies.memory.study import Memory
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.sampling import Sampling
from scalelab.studies.shared.study import Study
from scalelab.studies.shared.work import count_tokens, measure_rate
from scalelab.studies.throughput import Throughput

SMALL_LIMIT = "300MB"
"""What a rank may allocate in small, so that the largest batch does not fit."""
OTHER_MEGABYTES = "published in megabytes of 2²⁰ bytes, here of 10⁶"


def make_job(size: Size, model: str = "small", **fields: Any) -> Job:
    """GPT-2 on random tokens; the tiny one in small."""
    return Job(
        workload="gpt2",
        options={"size": choose(size, small="tiny", full=model)},
        threads_per_rank=choose(size, small=1, full=None),
        timeout=choose(size, small="5min", full="1h"),
        **({"optimization": Optimization(optimizer="adamw")} | fields),
    )


def make_g1(size: Size) -> Row:
    batches = (published.MEMORY_BATCH,)
    parts: dict[str, Study] = {"measured": Memory(strategies=("single",), ranks=1, batches=batches, job=make_job(size))}
    if size == "small":
        parts["forecast"] = Forecast(strategies=("single",), ranks=1, batches=batches, job=make_job("full"))
    return Row(id="G1", title="Memory", parts=parts, conclude=partial(find_g1, size))


def find_g1(size: Size, outcomes: Outcomes) -> Finding:
    outcome = outcomes.get("measured")
    row = next(iter(collect_rows(outcome.results)), None) if outcome else None
    measured = row.measured if row else None
    answers = list(quote(outcome))
    tables = []
    if measured is not None:
        megabyte = published.MEGABYTE
        difference = published.RESERVED_MEGABYTES - published.ALLOCATED_MEGABYTES
        tables.append(
            make_beside_table(
                "bytes",
                [
                    Compared("peak", measured.peak_bytes, None),
                    Compared(
                        "after the step",
                        measured.current_bytes,
                        published.ALLOCATED_MEGABYTES * megabyte,
                        print_megabytes(published.ALLOCATED_MEGABYTES),
                    ),
                    Compared(
                        "reserved",
                        measured.reserved_bytes,
                        published.RESERVED_MEGABYTES * megabyte,
                        print_megabytes(published.RESERVED_MEGABYTES),
                    ),
                    Compared(
                        "reserved − after the step",
                        subtract(measured.reserved_bytes, measured.current_bytes),
                        difference * megabyte,
                        print_megabytes(difference),
                    ),
                ],
                title="Allocated by torch",
                size=size,
                notes=("published as the peak: what was allocated after zero_grad", OTHER_MEGABYTES),
            )
        )
    forecast = read_peak(outcomes.get("forecast"))
    if forecast is not None:
        answers.append(
            f"Prediction, not measured: GPT-2 small at batch {published.MEMORY_BATCH} would peak at"
            f" {say('bytes', forecast)} with the operators of a CPU, whose attention keeps its matrices; published:"
            f" {print_megabytes(published.RESERVED_MEGABYTES)} reserved on a GPU, whose attention need not."
        )
    return Finding(tables=keep_tables(*tables), answers=tuple(answers))


def print_megabytes(number: float) -> str:
    return f"{number:.2f} MB"


def subtract(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one - other


def make_throughput(size: Size) -> Throughput:
    """The published way: 5 steps of warm-up, 20 timed; in several launches."""
    sampling = Sampling(
        rounds=choose(size, small=4, full=5),
        steps=published.WARMUP_STEPS + published.TIMED_STEPS,
        warmup=published.WARMUP_STEPS,
        phase_steps=0,
        comm_free_steps=0,
        control=False,
    )
    return Throughput(
        batch_per_rank=published.MEMORY_BATCH,
        target_parameters=published.TARGET_PARAMETERS,
        target_tokens=published.TARGET_TOKENS,
        job=make_job(size),
        sampling=sampling,
    )


def make_g2(size: Size) -> Row:
    return Row(
        id="G2",
        title="Throughput",
        parts={"speed": make_throughput(size)},
        conclude=partial(find_g2, size),
        num_tables=0,
    )


def find_g2(size: Size, outcomes: Outcomes) -> Finding:
    arm = find_arm(outcomes.get("speed"))
    if arm is None:
        return Finding()
    rate, steps = measure_rate(arm), arm.step.map(lambda seconds: 1 / seconds)
    table = make_beside_table(
        "rate",
        [
            Compared("tokens/s", rate, published.TOKENS_PER_SECOND, f"{published.TOKENS_PER_SECOND:,}"),
            Compared("steps/s", steps, published.STEPS_PER_SECOND, str(published.STEPS_PER_SECOND)),
        ],
        title="Per second",
        size=size,
    )
    answer = (
        f"{say('rate', rate)} tokens/s, {say('rate', steps)} steps/s of {count_tokens(arm)} tokens (published:"
        f" {published.TOKENS_PER_SECOND:,} and {published.STEPS_PER_SECOND})."
    )
    return Finding(tables=keep_tables(table), answers=(answer,))


def make_g3(size: Size) -> Row:
    return Row(
        id="G3",
        title="Extrapolation to 1T parameters and 10T tokens",
        parts={"speed": make_throughput(size)},
        conclude=partial(find_g3, size),
        reads="G2",
        num_tables=0,
    )


def find_g3(size: Size, outcomes: Outcomes) -> Finding:
    outcome = outcomes.get("speed")
    arm = find_arm(outcome)
    future = outcome.study.extrapolate(arm) if arm and outcome and isinstance(outcome.study, Throughput) else None
    if future is None:
        return Finding()
    rate = make_beside_table(
        "rate",
        [_compare("tokens/s", future.tokens_per_second, published.TARGET_TOKENS_PER_SECOND)],
        title="A model of 1T parameters",
        size=size,
    )
    time = make_beside_table(
        "number",
        [
            _compare("days", future.days, published.TARGET_DAYS),
            _compare("years of 365 days", future.years, published.TARGET_YEARS),
        ],
        title="10T tokens with it",
        size=size,
    )
    answer = (
        f"At this speed a model of 1T parameters would do {say('number', future.tokens_per_second)} tokens/s and need"
        f" {say('number', future.days)} days, {say('number', future.years)} years, for 10T tokens; published:"
        f" {published.TARGET_YEARS} years. That assumes the same operations per second, no communication and a device"
        " that it fits into."
    )
    return Finding(tables=keep_tables(rate, time), answers=(answer,))


def _compare(what: str, ours: Estimate, printed: str) -> Compared:
    return Compared(what, ours, float(printed.replace(",", "")), printed)


def make_g4(size: Size) -> Row:
    batches = (*(row.batch for row in published.BATCH_ROWS), published.OUT_OF_MEMORY_BATCH)
    study = BatchSize(
        batches=batches,
        job=make_job(size, memory_limit=choose(size, small=SMALL_LIMIT, full=None)),
        sampling=make_sampling(size, rounds=3, steps=8, phase_steps=0),
    )
    return Row(
        id="G4",
        title="Batch sweep",
        parts={"sweep": study},
        conclude=partial(find_g4, size),
        num_tables=0,
    )


def find_g4(size: Size, outcomes: Outcomes) -> Finding:
    outcome = outcomes.get("sweep")
    first = find_arm(outcome, global_batch=published.BATCH_ROWS[0].batch)
    if first is None or outcome is None:
        return Finding()
    lines = []
    for row in published.BATCH_ROWS:
        arm = find_arm(outcome, global_batch=row.batch)
        gain = None
        if arm is not None and arm is not first:
            gain = measure_gain(first, arm)
        there = row.tokens_per_second / published.BATCH_ROWS[0].tokens_per_second
        lines.append(Compared(f"batch {row.batch}", 1.0 if arm is first else gain, there))
    table = make_beside_table("ratio", lines, title="Tokens per second, over batch 1", size=size)
    memory = make_beside_table(
        "bytes",
        [
            Compared(
                f"batch {row.batch}",
                arm.peak_memory_bytes if arm else None,
                row.megabytes * published.MEGABYTE,
                f"{row.megabytes:,} MB",
            )
            for row in published.BATCH_ROWS
            for arm in (find_arm(outcome, global_batch=row.batch),)
        ],
        title="Peak memory",
        size=size,
        notes=("published for batch 1 and 4: of an earlier batch, never reset", OTHER_MEGABYTES),
    )
    failed = [arm for arm in outcome.arms.values() if arm.failure and arm.failure.status is Status.OUT_OF_MEMORY]
    best = max(list_arms(outcome), key=lambda arm: measure_rate(arm).value)
    limit = f"; batch {failed[0].trial.global_batch} is out of memory" if failed else ""
    answer = (
        f"The most is {say('rate', measure_rate(best))} tokens/s at batch {best.trial.global_batch}{limit} (published:"
        f" out of memory at {published.OUT_OF_MEMORY_BATCH}). Every row ran in a fresh process, so that its memory is"
        " its own."
    )
    return Finding(
        tables=keep_tables(compare_rates(size, outcome), table, memory), answers=(answer, *quote(outcome)[:2])
    )


def compare_rates(size: Size, outcome: Outcome) -> Table | None:
    lines = []
    for row in published.BATCH_ROWS:
        arm = find_arm(outcome, global_batch=row.batch)
        rate = measure_rate(arm) if arm else None
        lines.append(Compared(f"batch {row.batch}", rate, row.tokens_per_second, f"{row.tokens_per_second:,}"))
    return make_beside_table("rate", lines, title="Tokens per second", size=size)


def measure_gain(first: Arm, arm: Arm) -> Estimate | None:
    """Throughput over that of the first batch, round by round."""
    return scale(divide_steps(first, arm), arm.trial.global_batch / first.trial.global_batch)

"""The jobs of all rows; G1 to G3: memory, throughput, and extrapolation to a larger model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from scalelab.analysis.estimate import Estimate
from scalelab.recipes.evidence import (
    Compared,
    MemoryForecast,
    count_parameters,
    find_arm,
    keep_tables,
    make_beside_table,
    quote,
    read_peak,
    say,
    say_wide,
)
from scalelab.recipes.feasibility import choose, count_state_bytes, make_sized_job
from scalelab.recipes.gpt2 import published
from scalelab.recipes.recipe import Answer, Main, Outcomes, Row, Size, pair_questions
from scalelab.records.observations import MemoryReport
from scalelab.records.settings import Optimization, StepShape
from scalelab.records.strategies import PLAIN
from scalelab.records.trial import Option
from scalelab.studies.memory.answer import MemoryRow, collect_rows
from scalelab.studies.memory.study import Memory
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling, Study
from scalelab.studies.shared.work import count_tokens, measure_rate
from scalelab.studies.throughput import Throughput, measure_total_rate
from scalelab.units import format_quantity

STATES = ("parameters", "gradients", "optimizer")
ESTIMATED_SHARES = {"parameters": 1 / 4, "gradients": 1 / 4, "optimizer": 1 / 2}
"""Of 16 bytes per parameter: 4, 4, and AdamW's two moments."""
VIEWER = "https://pytorch.org/memory_viz"
SHARD: dict[str, Option] = {"data": "tokens", "data_path": str(Path(__file__).parent / "scripts" / "shakespeare.bin")}
"""The text that comes with scalelab, a byte a token; `--tokens` replaces it."""
STRATEGIES: tuple[str, ...] = ("single", "ddp", "fsdp-full", "fsdp-grad-op", "fsdp-none")
BASELINE = PLAIN
OTHER_MEGABYTES = "published in MB of 2²⁰ bytes (MiB), ours of 10⁶"
LETTERS = "M, G: millions, billions; years of 365 days"
NOT_RESERVED = "reserved: by the allocator of a GPU; that of a CPU reserves nothing"


def make_job(size: Size, model: str = "small", data: Mapping[str, Option] | None = None, **fields: Any) -> Job:
    """GPT-2, the tiny one in small; on random tokens unless data are given."""
    options = {"size": choose(size, small="tiny", full=model), **(data or {})}
    return make_sized_job(
        size, workload="gpt2", options=options, **({"optimization": Optimization(optimizer="adamw")} | fields)
    )


def make_large_job(size: Size, data: Mapping[str, Option] = SHARD) -> Job:
    """The large model in micro-batches of 8, with selective activation checkpointing and the published schedule."""
    return make_job(
        size,
        model="large",
        data=data,
        optimization=published.SCHEDULE,
        seed=published.TRAIN_SEED,
        shape=StepShape(micro_batch=published.TRAIN_MICRO_BATCH, checkpointing="selective"),
    )


def make_g1(size: Size) -> Row:
    batches = (published.MEMORY_BATCH,)
    parts: dict[str, Study] = {"measured": Memory(strategies=("single",), ranks=1, batches=batches, job=make_job(size))}
    if size == "small":
        parts["forecast"] = MemoryForecast(strategies=("single",), ranks=1, batches=batches, job=make_job("full"))
    names = {"measured": "gpt2 tiny, measured", "forecast": "gpt2 small, forecast"} if size == "small" else {}
    return Row(id="G1", title="Memory", parts=parts, conclude=partial(answer_g1, size), names=names, num_tables=0)


def answer_g1(size: Size, outcomes: Outcomes) -> Answer:
    outcome = outcomes.get("measured")
    row = next(iter(collect_rows(outcome.results)), None) if outcome else None
    measured = row.measured if row else None
    sentences = list(quote(outcome))
    if measured is not None and measured.snapshot:
        sentences.append(f"Memory snapshot: {measured.snapshot} beside the result. View at: {VIEWER}.")
    table, main = None, None
    if measured is not None:
        left, reserved = measured.current_bytes, measured.reserved_bytes
        estimate = count_state_bytes(row.trial) if row else 0
        above = None if left is None else left - estimate
        after = compare_megabytes("after the step", left, published.ALLOCATED_MEGABYTES)
        lines = [
            Compared("peak of a step", measured.peak_bytes, None),
            *(
                compare_megabytes(f"estimate: {name}", estimate * share, published.ESTIMATED_MEGABYTES[name])
                for name, share in ESTIMATED_SHARES.items()
            ),
            compare_megabytes("estimate: 16 bytes per parameter", estimate, published.ESTIMATED_MEGABYTES["together"]),
            after,
            compare_megabytes("after the step − estimate", above, published.ABOVE_ESTIMATE_MEGABYTES),
            compare_megabytes("reserved", reserved, published.RESERVED_MEGABYTES),
        ]
        main = Main("bytes", "allocated after the step", *after[1:])
        table = make_beside_table(
            "bytes",
            lines,
            title="Allocated by torch",
            size=size,
            is_signed=True,
            notes=(
                "after the step: published as the peak, which in float32 cannot be so low",
                OTHER_MEGABYTES,
                *((NOT_RESERVED,) if reserved is None else ()),
            ),
        )
    forecast = read_peak(outcomes.get("forecast"))
    predicted = (
        f" Prediction, not measured: GPT-2 small at batch {published.MEMORY_BATCH} peaks at {say('bytes', forecast)}"
        " with"
        f" CPU operators, whose attention stores its matrices (published: {published.RESERVED_MEGABYTES:.2f} MB"
        " reserved"
        " on a GPU)."
        if forecast is not None
        else ""
    )
    found = answer_difference(row) if row and measured else {}
    questions = pair_questions("gpt2", "G1", {name: f"{answer}{predicted}" for name, answer in found.items()})
    return Answer(main=main, tables=keep_tables(table), sentences=tuple(sentences), questions=questions)


def answer_difference(row: MemoryRow) -> dict[str, str]:
    """What is allocated beyond 16 bytes per parameter, after the step and at its peak, and what it is."""
    measured, estimate = row.measured, count_state_bytes(row.trial)
    if measured is None or measured.current_bytes is None:
        return {}
    above, at_peak = measured.current_bytes - estimate, measured.peak_bytes - estimate
    others = {name: held for name, held in measured.by_category.items() if name not in STATES and held}
    largest = sorted(others, key=others.__getitem__, reverse=True)[:3]
    listed = ", ".join(f"{name} {say('bytes', others[name])}" for name in largest)
    return {
        "difference": f"After a step torch holds {say('bytes', measured.current_bytes)}, {say_signed(above)} than the"
        f" estimate of {say('bytes', estimate)} for parameters, gradients and AdamW's two moments, as zero_grad has"
        " freed"
        f" the gradients. At the peak, in {measured.peak_phase}, it holds {say('bytes', measured.peak_bytes)},"
        f" {say_signed(at_peak)} than the estimate{f': {listed}' if listed else ''}{name_missing(measured, estimate)}."
        f" {explain_published()}"
    }


def name_missing(measured: MemoryReport, estimate: int) -> str:
    """What of the estimate is not there at the peak: gradients, where backward has just begun."""
    missing = estimate - sum(measured.by_category.get(name, 0) for name in STATES)
    return f", less {say('bytes', missing)} of states that are not there yet" if missing > 0 else ""


def explain_published() -> str:
    """What stayed allocated there: beyond parameters and moments about the logits, which the script still held."""
    states = published.ESTIMATED_MEGABYTES
    kept = published.ALLOCATED_MEGABYTES - states["parameters"] - states["optimizer"]
    logits = published.count_logits_bytes(published.MEMORY_BATCH) / published.MEGABYTE
    peak = next(row.megabytes for row in published.BATCH_ROWS if row.batch == published.MEMORY_BATCH)
    return (
        "The published number was probably read after the step too, although it is called a peak: the log's own sweep"
        f" has {peak:,} MB at this batch (G4), and in float32 a peak is at least"
        f" {published.bound_peak_megabytes():.0f} MB"
        " (parameters, moments, logits and their gradient; MB of 2²⁰ bytes, as published). It is"
        f" {published.ABOVE_ESTIMATE_MEGABYTES:.2f} MB above the estimate:"
        f" {kept:.0f} MB stayed allocated besides parameters and moments, about the logits ({logits:.0f} MB), as if its"
        " script still held them."
    )


def say_signed(num_bytes: float) -> str:
    return f"{say('bytes', abs(num_bytes))} {'more' if num_bytes >= 0 else 'less'}"


def compare_megabytes(what: str, ours: float | None, megabytes: float) -> Compared:
    return Compared(what, ours, megabytes * published.MEGABYTE, f"{megabytes:.2f} MB")


def make_throughput_rows(size: Size) -> tuple[Row, Row]:
    """The published way: 5 warm-up steps, 20 timed; in several launches."""
    sampling = Sampling(
        rounds=choose(size, small=8, full=5),
        steps=published.WARMUP_STEPS + published.TIMED_STEPS,
        warmup=published.WARMUP_STEPS,
        phase_steps=0,
        comm_free_steps=0,
        control=False,
    )
    study = Throughput(
        batch_per_rank=published.MEMORY_BATCH,
        target_parameters=published.TARGET_PARAMETERS,
        target_tokens=published.TARGET_TOKENS,
        job=make_job(size),
        sampling=sampling,
    )
    parts = {"speed": study}
    larger = partial(answer_g3, size, study)
    return (
        Row(id="G2", title="Throughput", parts=parts, conclude=partial(answer_g2, size), num_tables=0),
        Row(id="G3", title="Extrapolation to 1T parameters", parts=parts, conclude=larger, reads="G2", num_tables=0),
    )


def answer_g2(size: Size, outcomes: Outcomes) -> Answer:
    arm = find_arm(outcomes.get("speed"))
    if arm is None:
        return Answer()
    rate, num_tokens = measure_total_rate(arm), count_tokens(arm)
    steps = rate.map(lambda tokens: tokens / num_tokens)
    lines = [
        Compared("tokens/s", rate, published.TOKENS_PER_SECOND, f"{published.TOKENS_PER_SECOND:,}"),
        Compared("steps/s", steps, published.STEPS_PER_SECOND, str(published.STEPS_PER_SECOND)),
    ]
    sentence = (
        f"{say_wide('rate', rate)} tokens/s, {say_wide('rate', steps)} steps/s of {num_tokens} tokens, over all steps"
        f" (published: {lines[0].printed} and {lines[1].printed}); by the median step"
        f" {say_wide('rate', measure_rate(arm))} tokens/s."
    )
    return Answer(
        main=Main("rate", *lines[0]),
        tables=keep_tables(make_beside_table("rate", lines, title="Per second", size=size)),
        sentences=(sentence,),
        questions=pair_questions("gpt2", "G2", {"throughput": f"{sentence} {count_timed(arm)} {say_flops(arm, rate)}"}),
    )


def say_flops(arm: Arm, rate: Estimate) -> str:
    """Operations per second, which compare machines where models differ: 6 per parameter and token."""
    own = count_parameters(arm)
    ours, there = (
        format_quantity("number", 6 * tokens * parameters / 1e12)
        for tokens, parameters in (
            (rate.value, own),
            (published.TOKENS_PER_SECOND, published.SMALL_PARAMETERS),
        )
    )
    return (
        f"With 6 FLOP per parameter and token that is {ours} TFLOP/s on {say_count(own)} parameters; the published rate"
        f" is {there} TFLOP/s on {published.SMALL_PARAMETERS:,}. This compares the machines, tokens/s do not."
    )


def say_count(number: int) -> str:
    return format_quantity("count", number)


def count_timed(arm: Arm) -> str:
    """Total tokens and time of the timed steps of all launches."""
    num_steps = sum(len(steps) for steps in arm.clean)
    seconds = sum(sum(steps) for steps in arm.clean)
    return (
        f"{num_steps} timed steps after {arm.num_dropped} of warm-up per launch processed"
        f" {say_count(round(count_tokens(arm) * num_steps))} tokens in {say('seconds', seconds)} (published:"
        f" {published.TIMED_TOKENS} in {published.TIMED_SECONDS} s)."
    )


def answer_g3(size: Size, study: Throughput, outcomes: Outcomes) -> Answer:
    arm = find_arm(outcomes.get("speed"))
    future = study.extrapolate(arm, measure_total_rate(arm)) if arm else None
    if arm is None or future is None:
        return Answer()
    rate = compare_printed("tokens/s", future.tokens_per_second, published.TARGET_TOKENS_PER_SECOND)
    days = compare_printed("days", future.days, published.TARGET_DAYS)
    years = compare_printed("years", future.years, published.TARGET_YEARS)
    sentences = (
        f"At this speed, 10T tokens take a 1T-parameter model {say_large(future.years)} years"
        f" (published: {published.TARGET_YEARS}).",
        "This assumes the same FLOP/s, no communication and enough memory; ± covers the timing alone.",
    )
    return Answer(
        main=Main("rate", "years (M: millions) for 1T parameters, 10T tokens", *years[1:]),
        tables=keep_tables(
            make_beside_table("rate", [rate], title="A model of 1T parameters", size=size),
            make_beside_table("rate", [days], title="Days for 10T tokens", size=size, notes=(LETTERS,)),
            make_beside_table("rate", [years], title="Years for 10T tokens", size=size, notes=(LETTERS,)),
        ),
        sentences=sentences,
        questions=pair_questions(
            "gpt2",
            "G3",
            {
                "extrapolation": f"{say('number', future.tokens_per_second)} tokens/s, {say_large(future.days)} days"
                f" (published: {published.TARGET_TOKENS_PER_SECOND} tokens/s, {days.printed} days)."
                f" {sentences[0]} FLOPs per token grow with the parameters, so tokens/s shrink by 1T over this model's"
                f" {say_count(count_parameters(arm))} parameters (published: {published.SMALL_PARAMETERS:,}). To finish"
                f" in a year takes {say_large(future.years)} such devices. {sentences[1]}"
            },
        ),
    )


def say_large(estimate: Estimate) -> str:
    """At most four digits: `12.84 ± 0.23 million`, or both ends, where the width exceeds the number."""
    names = ("", "thousand", "million", "billion", "trillion")
    power = min(len(names) - 1, max(0, (len(f"{estimate.value:.0f}") - 1) // 3)) if estimate.value >= 1e4 else 0
    value, width = estimate.value / 1000**power, (estimate.half_width or 0.0) / 1000**power
    if not width:
        return f"{value:.4g} {names[power]}".strip()
    if width > value and estimate.low is not None and estimate.high is not None:
        low, high = estimate.low / 1000**power, estimate.high / 1000**power
        return f"{value:.3g} {names[power]}".strip() + f" ({low:.3g} to {high:.3g})"
    decimals = max(0, 1 - math.floor(math.log10(width)))
    return f"{value:.{decimals}f} ± {width:.{decimals}f} {names[power]}".strip()


def compare_printed(what: str, ours: Estimate, printed: str) -> Compared:
    return Compared(what, ours, float(printed.replace(",", "")), printed)

"""P8: larger models, their memory, and an epoch of each in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from scalelab.analysis.estimate import Estimate
from scalelab.answers.train import TrainStudy
from scalelab.recipes.evidence import (
    Compared,
    MemoryForecast,
    describe_forecast,
    find_arm,
    find_completed,
    keep_tables,
    make_beside_table,
    read_memory,
    read_peak,
    say,
    say_wide,
    scale,
)
from scalelab.recipes.feasibility import choose, choose_ranks, make_sampling
from scalelab.recipes.polaris import published
from scalelab.recipes.polaris.jobs import SCALED_BY_RANKS, SMALL_WIDTH, make_training_job, print_gigabytes
from scalelab.recipes.recipe import Answer, Main, Outcome, Outcomes, Row, Size, pair_questions
from scalelab.records.settings import Dtype, TrainingRun
from scalelab.report.document import Table
from scalelab.report.tables import (
    INTERVAL_NOTE,
    bytes_column,
    count_column,
    make_table,
    rate_column,
    seconds_column,
    text_column,
)
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.breakdown import break_arm
from scalelab.studies.shared.study import Study
from scalelab.studies.straggler import Straggler
from scalelab.workloads.catalogue import TransformerOptions

LARGEST = published.SCALE_UPS[-1]
FORECAST_DTYPES: tuple[Dtype, ...] = ("bfloat16", "float32")
"""What ran, and what allegedly does not fit."""
NUM_EPOCHS = 5
"""Not printed: enough for a range."""


def list_widths(size: Size) -> tuple[int, ...]:
    """Of the models, in the published order."""
    full = tuple(scale_up.d_model for scale_up in published.SCALE_UPS)
    return choose(size, small=(2 * SMALL_WIDTH, 4 * SMALL_WIDTH), full=full)


def make_p8(size: Size) -> Row:
    parts: dict[str, Study] = {}
    for scale_up, width in zip(published.SCALE_UPS, list_widths(size), strict=True):
        samples = choose(size, small=512, full=scale_up.samples)
        ranks = choose_ranks(size, published.NUM_RANKS)
        job = make_training_job(size, {"d_model": width, "features": width, "samples": samples}, dtype=scale_up.dtype)
        batch = published.BATCH_PER_RANK * ranks
        parts[f"width{width}"] = Straggler(
            ranks=ranks, global_batch=batch, job=job, sampling=make_sampling(size, phase_steps=8)
        )
        parts[f"epochs{width}"] = TrainStudy(
            ranks=ranks,
            global_batch=batch,
            course=TrainingRun(epochs=NUM_EPOCHS, log_every=10**6, keep=0),
            job=replace(job, optimization=SCALED_BY_RANKS),
        )
    for dtype in FORECAST_DTYPES:
        parts[f"forecast-{dtype}"] = MemoryForecast(
            strategies=("ddp",),
            ranks=published.NUM_RANKS,
            batches=(published.BATCH_PER_RANK,),
            device_memory=f"{published.CARD_BYTES:.0f}",
            job=make_training_job("full", {"d_model": LARGEST.d_model, "features": LARGEST.d_model}, dtype=dtype),
        )
    return Row(
        id="P8",
        title="Scale-up",
        parts=parts,
        conclude=partial(answer_p8, size),
        num_tables=0,
        shows=tuple(f"width{width}" for width in list_widths(size)),
        names={f"width{width}": f"d_model {width}" for width in list_widths(size)},
        cites={"dimensions": "P3.matching"},
        accounts_memory=True,
    )


class ScaledUp(NamedTuple):
    """A larger model as it was published, and as it ran here."""

    there: published.ScaleUp
    arm: Arm
    trained: Outcome | None
    """Epochs of a training run."""

    @property
    def num_steps(self) -> int:
        """Of an epoch."""
        return int(self.arm.trial.options["samples"]) // self.arm.trial.global_batch

    @property
    def epoch(self) -> Estimate | None:
        return scale(self.arm.step, self.num_steps)

    @property
    def rate(self) -> Estimate | None:
        return scale(self.arm.step.map(lambda seconds: 1 / seconds), self.arm.trial.global_batch)

    @property
    def epoch_rates(self) -> tuple[float, float] | None:
        """The lowest and the highest throughput of an epoch in samples per second."""
        result = find_completed(self.trained)
        samples = self.num_steps * self.arm.trial.global_batch
        rates = [samples / point.seconds for point in (result.epochs if result else ()) if point.seconds]
        return (min(rates), max(rates)) if rates else None

    @property
    def printed_rate(self) -> str:
        return "{:g}–{:g}".format(*self.there.samples_per_second)

    def measure_part(self, name: str) -> Estimate | None:
        """A part of the epoch on the rank that waits longest."""
        ranks = break_arm(self.arm) or []
        latest = max(ranks, key=lambda rank: rank.parts["waiting"].value, default=None)
        return scale(latest.parts[name], self.num_steps) if latest else None


def list_scaled_up(size: Size, outcomes: Outcomes) -> list[ScaledUp]:
    found = []
    for there, width in zip(published.SCALE_UPS, list_widths(size), strict=True):
        arm = find_arm(outcomes.get(f"width{width}"))
        found += [ScaledUp(there, arm, outcomes.get(f"epochs{width}"))] if arm is not None else []
    return found


def answer_p8(size: Size, outcomes: Outcomes) -> Answer:
    models = list_scaled_up(size, outcomes)
    sentences: list[str] = []
    for one in models:
        arm, held = one.arm, print_gigabytes(one.there.memory_bytes)
        options = TransformerOptions(**arm.trial.options)  # type: ignore[arg-type]
        sentences.append(
            f"{options.label} in {arm.trial.dtype}, {options.count_parameters():,} parameters, on"
            f" {arm.trial.num_ranks} ranks: {describe_rate(one)}, peak memory"
            f" {say('bytes', read_memory(arm))} (published for d_model {one.there.d_model}:"
            f" {one.printed_rate} samples/s, {held})."
        )
    for dtype in FORECAST_DTYPES:
        sentences += describe_forecast(outcomes.get(f"forecast-{dtype}"), published.CARD_BYTES)
    peak = read_peak(outcomes.get(f"forecast-{LARGEST.dtype}"))
    if peak is not None and peak < LARGEST.memory_bytes:
        sentences.insert(
            len(models),
            f"The forecast in {LARGEST.dtype}, activations included, is {say('bytes', LARGEST.memory_bytes - peak)}"
            f" below the published {print_gigabytes(LARGEST.memory_bytes)}: nothing here explains that rest.",
        )
    what = f"d_model {LARGEST.d_model} in {LARGEST.dtype}"
    forecast = Compared(what, peak, LARGEST.memory_bytes, print_gigabytes(LARGEST.memory_bytes))
    return Answer(
        main=Main("bytes", f"forecast peak, d_model {LARGEST.d_model}", *forecast[1:], is_ratio=True, is_forecast=True),
        tables=keep_tables(
            make_comparison_table(models),
            make_beside_table(
                "bytes", [forecast], title="Peak memory of the published size, forecast", size=size, is_ratio=True
            ),
            make_epoch_table(models),
        ),
        sentences=tuple(sentences),
        questions=pair_questions(
            "polaris",
            "P8",
            answer_throughput(models)
            | answer_growth(models, outcomes.get("dimensions"))
            | answer_crash(read_peak(outcomes.get("forecast-float32"))),
        ),
    )


def make_comparison_table(models: Sequence[ScaledUp]) -> Table | None:
    """The report's comparison of its two models, and ours."""
    table = make_table(
        models,
        count_column("d_model", "d_model", lambda one: one.arm.trial.options["d_model"]),
        text_column("dtype", "data type", lambda one: one.arm.trial.dtype),
        count_column("samples", "samples", lambda one: one.arm.trial.options["samples"]),
        bytes_column("peak_bytes", "peak memory", lambda one: read_memory(one.arm)),
        text_column("epoch_rates", "samples/s by epoch", print_rates, align="right"),
        text_column("there", "published: d_model, samples", lambda one: f"{one.there.d_model}, {one.there.samples:,}"),
        text_column(
            "published_peak", "peak memory", lambda one: print_gigabytes(one.there.memory_bytes), align="right"
        ),
        text_column("published_rate", "samples/s", lambda one: one.printed_rate, align="right"),
        title="Both models",
        notes=(f"peak memory: what torch's allocator of a rank holds; by epoch: the range of {NUM_EPOCHS} epochs",),
    )
    return table if models else None


def answer_growth(models: Sequence[ScaledUp], dimensions: Outcome | None) -> dict[str, str]:
    """Whether memory grows with the square of the width."""
    answers = {}
    if len(models) == 2:
        (small, large), found = models, [TransformerOptions(**one.arm.trial.options) for one in models]  # type: ignore[arg-type]
        held = [read_memory(one.arm) for one in models]
        wider = found[1].d_model / found[0].d_model
        parameters = found[1].count_parameters() / found[0].count_parameters()
        grown = held[1] / held[0] if held[0] and held[1] else None
        peaks = f", peaks of torch's allocator {grown:.1f}×" if grown else ""
        is_square = grown is not None and abs(grown / wider**2 - 1) < published.ALIKE
        verdict = "Nearly here, but not for that reason" if is_square else "It does not follow"
        answers["quadratic"] = (
            f"{verdict}. From d_model {found[0].d_model} ({small.arm.trial.dtype}) to {found[1].d_model}"
            f" ({large.arm.trial.dtype}) the width grows {wider:.0f}×, its square {wider**2:.0f}×, parameters"
            f" {parameters:.1f}×{peaks}: attention grows with the square of the width, feed-forward layers of fixed"
            " width only linearly, and the data type changed at the same time."
            f"{compare_widths(dimensions, found[0].d_model, found[1].d_model)} The number of samples does not matter: a"
            " step holds one batch."
        )
    return answers


def answer_crash(full_peak: int | None) -> dict[str, str]:
    """Whether float32 would not have fitted: into what the report assumed, and into the cards that it had."""
    if full_peak is None:
        return {}
    assumed, there = published.CLAIMED_LIMIT_BYTES, published.CARD_BYTES
    more = "more than" if full_peak > assumed else "within"
    return {
        "crash": f"{'No' if full_peak <= there else 'Yes'}: by forecast, d_model {LARGEST.d_model} in float32 peaks at"
        f" {say('bytes', full_peak)}, activations included: {more} the {say('bytes', assumed)} that the report assumed,"
        f" {'but within' if full_peak <= there else 'and more than'} the {say('bytes', there)} of its cards."
    }


def describe_rate(one: ScaledUp) -> str:
    """Whole epochs first, as published; the median step leaves out what long steps take."""
    epochs = print_rates(one)
    return f"{epochs} samples/s by epoch" if epochs else f"{say_wide('rate', one.rate)} samples/s by the median step"


def answer_throughput(models: Sequence[ScaledUp]) -> dict[str, str]:
    """Samples per second of both models, beside the published ranges."""
    said = [
        f"{rates} samples/s at d_model {one.arm.trial.options['d_model']} in {one.arm.trial.dtype} (published"
        f" {one.printed_rate} at {one.there.d_model})"
        for one in models
        if (rates := print_rates(one))
    ]
    by_step = ", ".join(say_wide("rate", one.rate) for one in models)
    if not said:
        return {}
    return {"throughput": f"Here {' and '.join(said)}, by epoch. By the median step, in other launches: {by_step}."}


def compare_widths(dimensions: Outcome | None, narrow: int, wide: int) -> str:
    """` The width alone, in float32 (P3), makes 2.2×.` Empty where P3 did not measure both."""
    held = [read_memory(arm) for width in (narrow, wide) if (arm := find_arm(dimensions, {"d_model": width}))]
    if len(held) < 2 or not held[0] or not held[1]:
        return ""
    return f" The width alone, in one data type (P3), makes {held[1] / held[0]:.1f}×."


def print_rates(one: ScaledUp) -> str | None:
    """`340–370`, to three digits."""
    return None if one.epoch_rates is None else "–".join(say("rate", rate) for rate in one.epoch_rates)


def make_epoch_table(models: Sequence[ScaledUp]) -> Table | None:
    """An epoch of every model in parts, on the rank that waits longest."""
    table = make_table(
        models,
        text_column("model", "model", lambda one: f"d_model {one.arm.trial.options['d_model']}"),
        seconds_column("epoch_seconds", "epoch, by the median step", lambda one: one.epoch),
        seconds_column("compute_seconds", "compute", lambda one: one.measure_part("compute")),
        seconds_column("waiting_seconds", "wait at barrier", lambda one: one.measure_part("waiting")),
        rate_column("samples_per_second", "samples/s of the median step", lambda one: one.rate),
        text_column("published_rate", "published samples/s", lambda one: one.printed_rate, align="right"),
        title="An epoch",
        notes=(
            INTERVAL_NOTE,
            "compute, wait: on the rank that waits longest for the others' gradients, by phases",
        ),
    )
    return table if models else None

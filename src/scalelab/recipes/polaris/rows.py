"""P3, P7 and P8: dimensions, data types and larger models."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from scalelab.analysis.stats import judge
from scalelab.recipes.evidence import (
    Compared,
    divide_steps,
    find_arm,
    keep_tables,
    list_arms,
    make_beside_table,
    say,
    scale,
)
from scalelab.recipes.feasibility import choose, choose_ranks, make_sampling
from scalelab.recipes.forecast import Forecast, describe_forecast, read_peak
from scalelab.recipes.polaris import published
from scalelab.recipes.polaris.jobs import SHALLOW, SMALL_WIDTH, make_training_job, print_gigabytes, print_seconds
from scalelab.recipes.recipe import Finding, Outcome, Outcomes, Row, Size
from scalelab.records.settings import Dtype
from scalelab.report.document import Column, Table, make_row
from scalelab.report.tables import INTERVAL_NOTE
from scalelab.studies.dimensions import BASE, Dimensions
from scalelab.studies.dtypes import REFERENCE, Dtypes
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.breakdown import break_arm
from scalelab.studies.shared.study import Study
from scalelab.studies.straggler.study import Straggler
from scalelab.workloads.options import TransformerOptions

LENGTHS = (20, 50, 100)
LARGEST = published.SCALE_UPS[-1]
FORECAST_DTYPES: tuple[Dtype, ...] = ("bfloat16", "float32")
"""P8: what was run, and what was said not to fit."""


def make_p3(size: Size) -> Row:
    base = choose(size, small=SMALL_WIDTH, full=published.FEATURES)
    samples = choose(size, small=512, full=published.SAMPLES)
    widths = ",".join(str(base * factor) for factor in choose(size, small=(2, 4), full=(2, 4, 8)))
    ranks = choose_ranks(size, published.NUM_RANKS)

    def vary(*dimensions: str, rounds: int = 4) -> Dimensions:
        return Dimensions(
            vary=dimensions,
            ranks=ranks,
            batch_per_rank=published.BATCH_PER_RANK,
            job=make_training_job(size),
            sampling=make_sampling(size, rounds=rounds, phase_steps=0),
        )

    return Row(
        id="P3",
        title="Dimensions",
        parts={
            "matching": vary(f"features+d_model={widths}", "tgt_length=50,100", f"samples={2 * samples}"),
            "fixed": vary(f"features={widths}", rounds=1),
        },
        conclude=partial(find_p3, size),
    )


def find_p3(size: Size, outcomes: Outcomes) -> Finding:
    matching = outcomes.get("matching")
    base = matching.arms.get(BASE) if matching else None
    tables: list[Table | None] = []
    answers: list[str] = []
    if base is not None and base.is_measured:
        there = published.DIMENSIONS_MEMORY_BYTES
        memory = Compared("the baseline", base.peak_memory_bytes, there, print_gigabytes(there))
        others = [Compared(arm.label, arm.peak_memory_bytes, None) for arm in list_arms(matching) if arm is not base]
        tables = [
            _make_baseline(size, base),
            make_beside_table("bytes", [memory, *others], title="Peak memory of a rank", size=size),
        ]
        grown = [
            f"{say('ratio', ratio)} times with {arm.label}"
            for arm in list_arms(matching)
            if arm is not base and (ratio := divide_steps(arm, base)) is not None
        ]
        answers.append(f"Over the base's {say('seconds', base.step)}, a step takes {', '.join(grown)}.")
    answers += _describe_invalid(outcomes.get("fixed"))
    return Finding(tables=keep_tables(*tables), answers=tuple(answers))


def _make_baseline(size: Size, base: Arm) -> Table | None:
    samples = base.trial.options.get("samples", published.SAMPLES)
    num_steps = published.DIMENSIONS_EPOCHS * int(samples) // base.trial.global_batch
    return make_beside_table(
        "seconds",
        [
            Compared(
                f"{published.DIMENSIONS_EPOCHS} epochs of the baseline",
                base.step.map(lambda seconds: seconds * num_steps),
                published.DIMENSIONS_SECONDS,
                print_seconds(published.DIMENSIONS_SECONDS),
            )
        ],
        title="Baseline",
        size=size,
        notes=(f"{num_steps} steps here, by the median step",),
    )


def _describe_invalid(fixed: Outcome | None) -> Iterator[str]:
    """What became of data that are wider than the model."""
    failed = [arm for arm in (fixed.arms.values() if fixed else ()) if not arm.is_measured and arm.failure]
    for status in dict.fromkeys(arm.failure.status for arm in failed if arm.failure):
        alike = [arm for arm in failed if arm.failure and arm.failure.status is status]
        reasons = dict.fromkeys(arm.failure.reason for arm in alike if arm.failure)
        yield (
            f"With the model's width left as it is, {', '.join(arm.label for arm in alike)}: {status.words}"
            f" ({'; '.join(reasons)}); published: {published.UNEQUAL_WORDS!r}."
        )


def make_p7(size: Size) -> Row:
    parts: dict[str, Study] = {
        f"length{length}": Dtypes(
            dtypes=("float32", "float16", "bfloat16"),
            ranks=choose(size, small=1, full=published.NUM_RANKS),
            batch_per_rank=published.DTYPE_BATCH,
            job=make_training_job(size, {"tgt_length": length} | choose(size, small=SHALLOW, full={})),
            sampling=make_sampling(size, rounds=3, steps=8, phase_steps=0),
        )
        for length in LENGTHS
    }
    return Row(id="P7", title="Data types", parts=parts, conclude=partial(find_p7, size), num_tables=0)


def find_p7(size: Size, outcomes: Outcomes) -> Finding:
    times: list[Compared] = []
    epochs: list[Compared] = []
    memory: list[Compared] = []
    answers: list[str] = []
    for length in LENGTHS:
        outcome = outcomes.get(f"length{length}")
        reference = find_arm(outcome, dtype=REFERENCE)
        seconds = dict(zip(published.DTYPES, published.DTYPE_SECONDS[length], strict=True))
        held = dict(zip(published.DTYPES, published.DTYPE_MEMORY_BYTES[length], strict=True))
        words = []
        for arm in list_arms(outcome):
            what = f"length {length}, {arm.label}"
            there, there_bytes = seconds.get(arm.trial.dtype), held.get(arm.trial.dtype)
            if there is not None:
                epochs.append(Compared(what, scale(arm.step, count_dtype_steps(arm)), there, print_seconds(there)))
            printed = print_gigabytes(there_bytes) if there_bytes else ""
            memory.append(Compared(what, arm.peak_memory_bytes, there_bytes, printed))
            ratio = None if arm is reference else divide_steps(arm, reference)
            if ratio is None:
                continue
            base = seconds[REFERENCE]
            times.append(Compared(what, ratio, there / base if there and base else None))
            words.append(f"{arm.label} {say('ratio', ratio)}, {judge(ratio)}")
        if words:
            answers.append(f"Target length {length}, times the step of float32: {'; '.join(words)}.")
    unclear = "published: whole trainings of one run each; whether by cast or autocast is not told apart"
    return Finding(
        tables=keep_tables(
            make_beside_table("ratio", times, title="Time over that of float32", size=size, notes=(unclear,)),
            make_beside_table("seconds", epochs, title=f"{published.DTYPE_EPOCHS} epochs, by steps", size=size),
            make_beside_table("bytes", memory, title="Peak memory", size=size),
        ),
        answers=tuple(answers),
    )


def count_dtype_steps(arm: Arm) -> int:
    """Of the epochs that were published."""
    samples = int(arm.trial.options.get("samples", published.SAMPLES))
    return published.DTYPE_EPOCHS * samples // arm.trial.global_batch


def list_widths(size: Size) -> tuple[int, ...]:
    """Of the models, in the order in which they were published."""
    full = tuple(scale_up.d_model for scale_up in published.SCALE_UPS)
    return choose(size, small=(2 * SMALL_WIDTH, 4 * SMALL_WIDTH), full=full)


def make_p8(size: Size) -> Row:
    parts: dict[str, Study] = {}
    for scale_up, width in zip(published.SCALE_UPS, list_widths(size), strict=True):
        samples = choose(size, small=512, full=scale_up.samples)
        ranks = choose_ranks(size, published.NUM_RANKS)
        parts[f"width{width}"] = Straggler(
            ranks=ranks,
            global_batch=published.BATCH_PER_RANK * ranks,
            job=make_training_job(
                size, {"d_model": width, "features": width, "samples": samples}, dtype=scale_up.dtype
            ),
            sampling=make_sampling(size, phase_steps=8),
        )
    for dtype in FORECAST_DTYPES:
        parts[f"forecast-{dtype}"] = Forecast(
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
        conclude=partial(find_p8, size),
        num_tables=0,
    )


def find_p8(size: Size, outcomes: Outcomes) -> Finding:
    lines: list[Compared] = []
    answers: list[str] = []
    for scale_up, width in zip(published.SCALE_UPS, list_widths(size), strict=True):
        arm = find_arm(outcomes.get(f"width{width}"))
        if arm is None:
            continue
        rate = scale(arm.step.map(lambda seconds: 1 / seconds), arm.trial.global_batch)
        num_steps = int(arm.trial.options["samples"]) // arm.trial.global_batch
        epoch = scale(arm.step, num_steps)
        options = TransformerOptions(**arm.trial.options)  # type: ignore[arg-type]
        held = print_gigabytes(scale_up.memory_bytes)
        lines.append(Compared(f"{options.label} {arm.trial.dtype}", arm.peak_memory_bytes, scale_up.memory_bytes, held))
        low, high = scale_up.samples_per_second
        answers.append(
            f"{options.label} in {arm.trial.dtype}, {options.count_parameters():,} parameters, on"
            f" {arm.trial.num_ranks} ranks: {say('rate', rate)} samples/s, {say('seconds', epoch)} per epoch,"
            f" {say('bytes', arm.peak_memory_bytes)} at most on a rank (published for d_model {scale_up.d_model}:"
            f" {low:g} to {high:g} samples/s, {held})."
        )
    table = make_beside_table("bytes", lines, title="Peak memory of a rank", size=size)
    for dtype in FORECAST_DTYPES:
        answers += describe_forecast(outcomes.get(f"forecast-{dtype}"), published.CARD_BYTES)
    peak = read_peak(outcomes.get(f"forecast-{LARGEST.dtype}"))
    forecast = make_beside_table(
        "bytes",
        [
            Compared(
                f"d_model {LARGEST.d_model} in {LARGEST.dtype}",
                peak,
                LARGEST.memory_bytes,
                print_gigabytes(LARGEST.memory_bytes),
            )
        ],
        title="Peak memory of the published size, by forecast",
        size=size,
        is_ratio=True,
    )
    return Finding(tables=keep_tables(table, forecast, make_epoch_table(size, outcomes)), answers=tuple(answers))


def make_epoch_table(size: Size, outcomes: Outcomes) -> Table | None:
    """An epoch of every model by its parts, of the rank that waits longest."""
    columns = (
        Column(key="model", header="model", align="left"),
        Column(key="epoch_seconds", header="epoch", quantity="seconds"),
        Column(key="compute_seconds", header="compute", quantity="seconds"),
        Column(key="waiting_seconds", header="wait at barrier", quantity="seconds"),
        Column(key="samples_per_second", header="samples/s", quantity="rate"),
        Column(key="published_rate", header="published samples/s"),
    )
    rows = []
    for scale_up, width in zip(published.SCALE_UPS, list_widths(size), strict=True):
        arm = find_arm(outcomes.get(f"width{width}"))
        if arm is None:
            continue
        num_steps = int(arm.trial.options["samples"]) // arm.trial.global_batch
        ranks = break_arm(arm) or []
        latest = max(ranks, key=lambda rank: rank.parts["waiting"].value, default=None)
        parts = [scale(latest.parts[name], num_steps) if latest else None for name in ("compute", "waiting")]
        rate = scale(arm.step.map(lambda seconds: 1 / seconds), arm.trial.global_batch)
        low, high = scale_up.samples_per_second
        rows.append(make_row(f"d_model {width}", scale(arm.step, num_steps), *parts, rate, f"{low:g}–{high:g}"))
    notes = (INTERVAL_NOTE, "compute, wait: of the rank that waits longest for the others' gradients, by phases")
    return Table(title="An epoch", columns=columns, rows=tuple(rows), notes=notes) if rows else None

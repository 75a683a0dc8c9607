"""The polaris recipe: DDP on a supercomputer, from two reports of one homework.

P3, P7 and P8: dimensions, data types and larger models. The other rows are in modules of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import judge
from scalelab.recipes.evidence import (
    ACCOUNTED,
    Compared,
    MemoryForecast,
    describe_forecast,
    divide_steps,
    find_arm,
    keep_tables,
    list_arms,
    make_beside_table,
    read_memory,
    read_peak,
    say,
    scale,
)
from scalelab.recipes.feasibility import choose, choose_ranks, make_sampling
from scalelab.recipes.polaris import published
from scalelab.recipes.polaris.formats import make_p6
from scalelab.recipes.polaris.jobs import (
    SHALLOW,
    SMALL_WIDTH,
    is_unequal,
    make_p9,
    make_training_job,
    print_gigabytes,
    print_seconds,
)
from scalelab.recipes.polaris.links import make_p1, make_p4, make_p5, make_p10
from scalelab.recipes.polaris.published import make_checks
from scalelab.recipes.polaris.ranks import make_p2
from scalelab.recipes.recipe import Answer, Main, Outcome, Outcomes, Recipe, Row, Size, pair_questions
from scalelab.records.settings import Dtype
from scalelab.records.trial import Status
from scalelab.report.document import Table
from scalelab.report.tables import INTERVAL_NOTE, make_table, rate_column, seconds_column, text_column
from scalelab.studies.dimensions import BASE, Dimensions
from scalelab.studies.dtypes import REFERENCE, Dtypes
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.breakdown import break_arm
from scalelab.studies.shared.study import Study
from scalelab.studies.straggler import Straggler
from scalelab.workloads.options import TransformerOptions

LENGTHS = (20, 50, 100)
LARGEST = published.SCALE_UPS[-1]
FORECAST_DTYPES: tuple[Dtype, ...] = ("bfloat16", "float32")
"""P8: what ran, and what allegedly does not fit."""


def make_rows(size: Size) -> Sequence[Row]:
    makers = (make_p1, make_p2, make_p3, make_p4, make_p5, make_p6, make_p7, make_p8, make_p9, make_p10)
    return tuple(make(size) for make in makers)


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
        conclude=partial(answer_p3, size),
        expects=lambda result: result.status is Status.INVALID and is_unequal(result.trial),
        accounts_memory=True,
    )


def answer_p3(size: Size, outcomes: Outcomes) -> Answer:
    matching = outcomes.get("matching")
    base = matching.arms.get(BASE) if matching else None
    tables: list[Table | None] = []
    main: Main | None = None
    sentences: list[str] = []
    if base is not None and base.is_measured:
        there = published.DIMENSIONS_MEMORY_BYTES
        memory = Compared("the baseline", read_memory(base), there, print_gigabytes(there))
        others = [Compared(arm.label, read_memory(arm), None) for arm in list_arms(matching) if arm is not base]
        epochs = _compare_baseline(base)
        main = Main("seconds", *epochs)
        tables = [
            make_beside_table("seconds", [epochs], title="Baseline, by the median step", size=size),
            make_beside_table("bytes", [memory, *others], title="Peak memory of a rank", size=size, notes=(ACCOUNTED,)),
        ]
        grown = [
            f"{say('ratio', ratio)} with {arm.label}"
            for arm in list_arms(matching)
            if arm is not base and (ratio := divide_steps(arm, base)) is not None
        ]
        sentences.append(f"A step of the baseline takes {say('seconds', base.step)}.")
        sentences.append(f"Step over the baseline: {', '.join(grown)}.")
    failed = list(_describe_invalid(outcomes.get("fixed")))
    sentences += failed
    return Answer(
        main=main,
        tables=keep_tables(*tables),
        sentences=tuple(sentences),
        questions=pair_questions("polaris", "P3", answer_widths(failed, matching) if failed else {}),
    )


def answer_widths(failed: Sequence[str], matching: Outcome | None) -> dict[str, str]:
    """Whether features must equal d_model: what failed, and what ran once both were raised."""
    widths = {arm.trial.options.get("d_model") for arm in list_arms(matching)}
    listed = ", ".join(map(str, sorted(int(width) for width in widths if width is not None)))
    ran = f" With d_model raised to the features, {listed} run." if listed else ""
    why = "nn.Transformer has no layer that maps features to d_model: it adds and normalizes in the features' own width"
    return {"d_model": f"Yes: {why}. {failed[0]}{ran} It is a shape error, not a lack of memory."}


def _compare_baseline(base: Arm) -> Compared:
    what = f"{published.DIMENSIONS_EPOCHS} epochs of the baseline"
    ours = scale(base.step, count_steps(base, published.DIMENSIONS_EPOCHS))
    there = published.DIMENSIONS_SECONDS
    return Compared(what, ours, there, print_seconds(there))


def count_steps(arm: Arm, epochs: int) -> int:
    samples = int(arm.trial.options.get("samples", published.SAMPLES))
    return epochs * samples // arm.trial.global_batch


def _describe_invalid(fixed: Outcome | None) -> Iterator[str]:
    """What happened to data that are wider than the model."""
    failed = [arm for arm in (fixed.arms.values() if fixed else ()) if not arm.is_measured and arm.failure]
    for status in dict.fromkeys(arm.failure.status for arm in failed if arm.failure):
        alike = [arm for arm in failed if arm.failure and arm.failure.status is status]
        reasons = dict.fromkeys(arm.failure.reason for arm in alike if arm.failure)
        yield (
            f"With d_model unchanged, {', '.join(arm.label for arm in alike)}: {status.words} ({'; '.join(reasons)};"
            f" published: {published.UNEQUAL_WORDS!r})."
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
    return Row(
        id="P7", title="Data types", parts=parts, conclude=partial(answer_p7, size), num_tables=0, accounts_memory=True
    )


def answer_p7(size: Size, outcomes: Outcomes) -> Answer:
    times: list[Compared] = []
    epochs: list[Compared] = []
    memory: list[Compared] = []
    sentences: list[str] = []
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
                ours = scale(arm.step, count_steps(arm, published.DTYPE_EPOCHS))
                epochs.append(Compared(what, ours, there, print_seconds(there)))
            printed = print_gigabytes(there_bytes) if there_bytes else ""
            memory.append(Compared(what, read_memory(arm), there_bytes, printed))
            ratio = None if arm is reference else divide_steps(arm, reference)
            if ratio is None:
                continue
            base = seconds[REFERENCE]
            times.append(Compared(what, ratio, there / base if there and base else None))
            words.append(f"{arm.label} {say('ratio', ratio)}, {judge(ratio)}")
        if words:
            sentences.append(f"Step over float32 at target length {length}: {'; '.join(words)}.")
    unclear = "published: whole training runs, one each; cast or autocast is not specified"
    held_by = {length: measure_dtypes(outcomes.get(f"length{length}")) for length in LENGTHS}
    first = next((line for line in times if line.published is not None), None)
    return Answer(
        main=Main("ratio", f"step over {REFERENCE}, {first.what}", *first[1:]) if first else None,
        tables=keep_tables(
            make_beside_table("ratio", times, title="Time over float32", size=size, notes=(unclear,)),
            make_beside_table("seconds", epochs, title=f"{published.DTYPE_EPOCHS} epochs, from steps", size=size),
            make_beside_table("bytes", memory, title="Peak memory", size=size, notes=(ACCOUNTED,)),
        ),
        sentences=tuple(sentences),
        questions=pair_questions("polaris", "P7", answer_memory(held_by)),
    )


def measure_dtypes(outcome: Outcome | None) -> dict[str, int]:
    """The accounted peak of every data type, by its label."""
    return {arm.label: held for arm in list_arms(outcome) if (held := read_memory(arm)) is not None}


def answer_memory(held_by: Mapping[int, Mapping[str, int]]) -> dict[str, str]:
    """Whether bfloat16 holds less than float32: cast and autocast, at every length."""
    saved: dict[str, list[tuple[int, float]]] = {}
    for length, held in held_by.items():
        for label, num_bytes in held.items():
            if label.startswith("bfloat16") and held.get(REFERENCE):
                saved.setdefault(label, []).append((length, 1 - num_bytes / held[REFERENCE]))
    if not saved:
        return {}
    is_always = all(share > 0 for shares in saved.values() for _, share in shares)
    listed = "; ".join(
        f"{label} {', '.join(f'{100 * share:+.0f} % at length {length}' for length, share in shares)}"
        for label, shares in saved.items()
    )
    return {
        "memory": f"{'Yes' if is_always else 'Not in every case'}. Accounted peak saved against {REFERENCE}: {listed}."
        " A cast stores parameters, gradients, moments and activations in half the bytes, and saves less than half of"
        " the peak where other buffers keep their size; autocast keeps parameters, gradients and"
        " moments in float32, halves the activations of matrix products, and holds 16-bit copies of the weights: it"
        " saves only where activations outweigh those copies."
    }


def list_widths(size: Size) -> tuple[int, ...]:
    """Of the models, in the published order."""
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
        parts[f"forecast-{dtype}"] = MemoryForecast(
            strategies=("ddp",),
            ranks=published.NUM_RANKS,
            batches=(published.BATCH_PER_RANK,),
            device_memory=f"{published.CARD_BYTES:.0f}",
            job=make_training_job("full", {"d_model": LARGEST.d_model, "features": LARGEST.d_model}, dtype=dtype),
        )
    return Row(
        id="P8", title="Scale-up", parts=parts, conclude=partial(answer_p8, size), num_tables=0, accounts_memory=True
    )


class ScaledUp(NamedTuple):
    """A larger model as it was published, and as it ran here."""

    there: published.ScaleUp
    arm: Arm

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
    def printed_rate(self) -> str:
        return "{:g}–{:g}".format(*self.there.samples_per_second)

    def measure_part(self, name: str) -> Estimate | None:
        """A part of the epoch on the rank that waits longest."""
        ranks = break_arm(self.arm) or []
        latest = max(ranks, key=lambda rank: rank.parts["waiting"].value, default=None)
        return scale(latest.parts[name], self.num_steps) if latest else None


def list_scaled_up(size: Size, outcomes: Outcomes) -> list[ScaledUp]:
    pairs = zip(published.SCALE_UPS, list_widths(size), strict=True)
    found = [(there, find_arm(outcomes.get(f"width{width}"))) for there, width in pairs]
    return [ScaledUp(there, arm) for there, arm in found if arm is not None]


def answer_p8(size: Size, outcomes: Outcomes) -> Answer:
    models = list_scaled_up(size, outcomes)
    lines: list[Compared] = []
    sentences: list[str] = []
    for one in models:
        arm, held = one.arm, print_gigabytes(one.there.memory_bytes)
        options = TransformerOptions(**arm.trial.options)  # type: ignore[arg-type]
        what = f"{options.label} {arm.trial.dtype}"
        lines.append(Compared(what, read_memory(arm), one.there.memory_bytes, held))
        sentences.append(
            f"{options.label} in {arm.trial.dtype}, {options.count_parameters():,} parameters, on"
            f" {arm.trial.num_ranks} ranks: {say('rate', one.rate)} samples/s, {say('seconds', one.epoch)} per epoch,"
            f" peak memory {say('bytes', read_memory(arm))} (published for d_model {one.there.d_model}:"
            f" {one.printed_rate} samples/s, {held})."
        )
    for dtype in FORECAST_DTYPES:
        sentences += describe_forecast(outcomes.get(f"forecast-{dtype}"), published.CARD_BYTES)
    peak = read_peak(outcomes.get(f"forecast-{LARGEST.dtype}"))
    what = f"d_model {LARGEST.d_model} in {LARGEST.dtype}"
    forecast = Compared(what, peak, LARGEST.memory_bytes, print_gigabytes(LARGEST.memory_bytes))
    return Answer(
        main=Main("bytes", f"forecast peak, d_model {LARGEST.d_model}", *forecast[1:], is_ratio=True),
        tables=keep_tables(
            make_beside_table("bytes", lines, title="Peak memory of a rank", size=size, notes=(ACCOUNTED,)),
            make_beside_table(
                "bytes", [forecast], title="Peak memory of the published size, forecast", size=size, is_ratio=True
            ),
            make_epoch_table(models),
        ),
        sentences=tuple(sentences),
        questions=pair_questions("polaris", "P8", answer_growth(models, read_peak(outcomes.get("forecast-float32")))),
    )


def answer_growth(models: Sequence[ScaledUp], full_peak: int | None) -> dict[str, str]:
    """Whether memory grows with the square of the width, and whether float32 would not have fitted."""
    answers = {}
    if len(models) == 2:
        (small, large), found = models, [TransformerOptions(**one.arm.trial.options) for one in models]  # type: ignore[arg-type]
        held = [read_memory(one.arm) for one in models]
        wider = found[1].d_model / found[0].d_model
        parameters = found[1].count_parameters() / found[0].count_parameters()
        grown = held[1] / held[0] if held[0] and held[1] else None
        peaks = f", accounted peaks {grown:.1f}×" if grown else ""
        is_square = grown is not None and abs(grown / wider**2 - 1) < published.ALIKE
        verdict = "Nearly here, but not for that reason" if is_square else "It does not follow"
        answers["quadratic"] = (
            f"{verdict}. From d_model {found[0].d_model} ({small.arm.trial.dtype}) to {found[1].d_model}"
            f" ({large.arm.trial.dtype}), {wider:.0f}× and {wider**2:.0f}× squared, parameters grow {parameters:.1f}×"
            f" here{peaks}: attention grows with the square of the width, feed-forward layers of fixed width only"
            " linearly, and the data type changed at the same time. More samples hold no more memory."
        )
    if full_peak is not None:
        verdict = "No" if full_peak <= published.CARD_BYTES else "Yes"
        answers["crash"] = (
            f"{verdict}: the forecast peak of d_model {LARGEST.d_model} in float32 is {say('bytes', full_peak)}; the"
            f" report assumed cards of {say('bytes', published.CLAIMED_LIMIT_BYTES)}, and they have"
            f" {say('bytes', published.CARD_BYTES)}."
        )
    return answers


def make_epoch_table(models: Sequence[ScaledUp]) -> Table | None:
    """An epoch of every model in parts, on the rank that waits longest."""
    table = make_table(
        models,
        text_column("model", "model", lambda one: f"d_model {one.arm.trial.options['d_model']}"),
        seconds_column("epoch_seconds", "epoch", lambda one: one.epoch),
        seconds_column("compute_seconds", "compute", lambda one: one.measure_part("compute")),
        seconds_column("waiting_seconds", "wait at barrier", lambda one: one.measure_part("waiting")),
        rate_column("samples_per_second", "samples/s", lambda one: one.rate),
        text_column("published_rate", "published samples/s", lambda one: one.printed_rate, align="right"),
        title="An epoch",
        notes=(INTERVAL_NOTE, "compute, wait: on the rank that waits longest for the others' gradients, by phases"),
    )
    return table if models else None


POLARIS = Recipe(
    name="polaris",
    title="DDP on a supercomputer",
    assignment="two reports of a homework on Polaris: ranks, links, I/O, data types",
    make_rows=make_rows,
    make_checks=make_checks,
)

"""Data types: the same training in fewer or more bits, by casting the model or under autocast.

Casting puts weights, gradients and optimizer state into the type, so memory falls with it and updates smaller than a
weight's last bit are lost. Autocast keeps them in float32 and computes products in the type, with a loss scale for
float16, so memory for weights does not fall. Whether either is faster is up to the hardware: it must have units for
the type.

The losses are compared too, because a type that is fast and does not train is no answer. All rows start from the same
weights and see the same batches. The tolerances are those with which torch takes two tensors of a type for equal.

Data types in words with numbers: which is faster here, which saves memory, which still trains, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import ClassVar, Final, Literal

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import Verdict, judge
from scalelab.errors import UsageError
from scalelab.records.settings import Dtype
from scalelab.records.trial import Trial, TrialResult
from scalelab.report.document import Column, Document, Section
from scalelab.report.findings import as_findings
from scalelab.studies.dimensions.report import describe_failures
from scalelab.studies.shared.arms import Arm, group_arms
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.sampling import Configuration, Sampling
from scalelab.studies.shared.study import Study
from scalelab.studies.shared.sweep import (
    CONTROL,
    INTERVALS,
    LossComparison,
    MaybeStrategy,
    SweepColumn,
    check_placement,
    choose_strategy,
    compare_losses,
    compare_steps,
    describe_measurement,
    describe_placement,
    draw_columns,
    find_sweep_cautions,
    is_non_finite,
    keep_charts,
    list_keys,
    make_sweep_table,
    memory_column,
    plan_sweep,
    ratio_column,
    read_losses,
    samples_column,
    step_column,
)
from scalelab.units import format_bytes, format_interval, format_share

SMALLEST_SAVING = 0.05
"""A peak memory that differs by less is not worth a word."""


def summarise_dtypes(
    arms: Mapping[str, Arm], reference: Arm | None, judge_loss: Callable[[Arm], str | None]
) -> tuple[str, ...]:
    """The findings, the main one first."""
    rows = [arm for arm in arms.values() if arm is not reference and arm.configuration != CONTROL]
    ratios = {arm.label: compare_steps(arm, reference) for arm in rows}
    known = {label: ratio for label, ratio in ratios.items() if isinstance(ratio, Estimate)}
    return tuple(
        chain(
            _describe_speed(known),
            _explain_speed(known, reference),
            _describe_memory(rows, reference),
            _describe_losses(rows, judge_loss),
            describe_failures(rows),
        )
    )


def _describe_speed(ratios: Mapping[str, Estimate]) -> Iterator[str]:
    if not ratios:
        return
    best = min(ratios, key=lambda label: ratios[label].value)
    if judge(ratios[best]) is Verdict.FASTER:
        yield f"{best} is the fastest here: {format_interval('ratio', ratios[best])} times the step of float32."
    elif all(judge(ratio) is Verdict.SLOWER for ratio in ratios.values()):
        yield "float32 is the fastest here: every other type is slower."
    else:
        yield "No type is surely faster than float32 here."
    for label, ratio in ratios.items():
        if label != best or judge(ratio) is not Verdict.FASTER:
            yield f"{label}: {format_interval('ratio', ratio)} times the step of float32, {judge(ratio)}."


def _explain_speed(ratios: Mapping[str, Estimate], reference: Arm | None) -> Iterator[str]:
    """What usually makes 16 bits slow; which of it holds is not measured."""
    slow = [label for label, ratio in ratios.items() if "16" in label and judge(ratio) is Verdict.SLOWER]
    if not slow or reference is None:
        return
    if reference.trial.device == "cpu":
        yield (
            f"Why {_list(slow)} may be slower on a CPU: without instructions for the type (AVX512-FP16, AVX512-BF16,"
            " AMX) its products are converted to float32 and back or run in kernels that are not vectorised; what is"
            " saved in memory traffic pays only for large tensors."
        )
    else:
        yield (
            f"Why {_list(slow)} may be slower on a GPU: products that are too small to fill its units for the type do"
            " not pay for the casts around them."
        )


def _describe_memory(rows: list[Arm], reference: Arm | None) -> Iterator[str]:
    before = reference.peak_memory_bytes if reference else None
    if not before:
        return
    for arm in rows:
        peak = arm.peak_memory_bytes
        change = None if peak is None else peak / before - 1
        if change is not None and abs(change) >= SMALLEST_SAVING:
            word = "less" if change < 0 else "more"
            yield f"{arm.label} takes {format_share(abs(change))} {word} memory at its peak: {format_bytes(peak)}."


def _describe_losses(rows: list[Arm], judge_loss: Callable[[Arm], str | None]) -> Iterator[str]:
    verdicts = {arm.label: judge_loss(arm) for arm in rows if arm.is_measured}
    equal = [label for label, verdict in verdicts.items() if verdict == "as float32"]
    differing = [label for label, verdict in verdicts.items() if verdict == "differently"]
    broken = [label for label, verdict in verdicts.items() if verdict == "not finite"]
    if equal:
        yield f"The last loss is float32's, within the type's tolerance: {_list(equal)}."
    if differing:
        yield f"The last loss differs from float32's by more than the type's tolerance: {_list(differing)}."
    if broken:
        yield f"The loss became NaN or infinite: {_list(broken)}; a step time of that is one of a failed training."


def _list(labels: list[str]) -> str:
    return " and ".join([", ".join(labels[:-1]), labels[-1]]) if len(labels) > 1 else labels[0]


Mode = Literal["cast", "autocast"]

REFERENCE: Final = "float32"
AUTOCAST_TYPES = ("bfloat16", "float16")
LOSS_TOLERANCES: Mapping[str, float] = {
    "float32": 1.3e-6,
    "float64": 1.3e-6,
    "tf32": 1e-3,
    "bfloat16": 1.6e-2,
    "float16": 1e-3,
}
"""Relative differences that `torch.testing.assert_close` allows by default; tf32 has as many bits as float16, and
float64 is held against float32 here."""


@dataclass(frozen=True, kw_only=True)
class Dtypes(Study):
    """Every data type by cast, and those of 16 bits by autocast as well, against float32."""

    name: ClassVar[str] = "dtypes"
    title: ClassVar[str] = "Data types"
    question: ClassVar[str] = "Which data type is faster here, what does it save, and does it still train?"

    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")
    """Data types to compare; float32 is always measured."""
    modes: tuple[Mode, ...] = ("cast", "autocast")
    """cast: the whole model in the type; autocast: weights in float32, products in the type (bfloat16 and float16)."""
    ranks: int = 1
    """Ranks of every row."""
    strategy: MaybeStrategy = None
    """How the training is spread. None: single on one rank, ddp on more."""
    batch_per_rank: int = 16
    """Samples per step on each rank."""
    job: Job = field(default_factory=lambda: Job(workload="transformer"))
    sampling: Sampling = field(default_factory=lambda: Sampling(comm_free_steps=0))

    def __post_init__(self) -> None:
        check_placement(self.ranks, self.batch_per_rank)
        for name in ("dtypes", "modes"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise UsageError(f"--{name} {' '.join(values)} must name at least one, each once")
        if self.job.dtype != REFERENCE or self.job.shape.autocast:
            raise UsageError(f"--dtype {self.job.dtype} is what this study varies: use --dtypes and --modes")
        without = [dtype for dtype in self.dtypes if dtype not in (*AUTOCAST_TYPES, REFERENCE)]
        if without and "cast" not in self.modes:
            raise UsageError(f"--dtypes {without[0]} has no autocast: add --modes cast, or leave it out")

    def plan(self) -> list[Trial]:
        return plan_sweep(self.job, self.sampling, self._list_rows())

    def _list_rows(self) -> list[Configuration]:
        rows = [self._configure(REFERENCE, "cast", REFERENCE)]
        for dtype in self.dtypes:
            if dtype in AUTOCAST_TYPES:
                rows += [self._configure(dtype, mode, f"{dtype} {mode}") for mode in self.modes]
            elif dtype != REFERENCE:
                rows.append(self._configure(dtype, "cast", dtype))
        return rows

    def _configure(self, dtype: Dtype, mode: Mode, label: str) -> Configuration:
        shape = replace(self.job.shape, autocast=mode == "autocast")
        return Configuration(
            name=label.replace(" ", "-"),
            label=label,
            strategy=choose_strategy(self.strategy, self.ranks),
            num_ranks=self.ranks,
            global_batch=self.batch_per_rank * self.ranks,
            job=replace(self.job, dtype=dtype, shape=shape),
        )

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        arms = group_arms(results, self.sampling.warmup)
        reference = arms.get(REFERENCE)
        columns = [
            step_column(),
            samples_column(),
            ratio_column(reference, "× float32"),
            memory_column(),
            *make_loss_columns(reference),
        ]
        notes = ("trains: the last loss is that of float32 within torch's tolerance for the type",)
        table = make_sweep_table(arms.values(), columns, notes=notes)
        keys = list_keys(arms.values())
        charts = keep_charts(
            draw_columns(table, ["step_seconds"], title="Step by data type", keys=keys),
            draw_columns(
                table,
                ["step_ratio"],
                title="Step over that of float32",
                keys=keys,
                reference=1.0,
                from_zero=False,
                caption=f"{INTERVALS} Left of the dashed line is faster than float32.",
            ),
            draw_columns(
                table,
                ["peak_memory_bytes"],
                title="Memory by data type",
                keys=keys,
                caption="The highest of any rank in any launch, with all that the process holds; without intervals.",
            ),
        )
        return Document(
            title=self.title,
            question=self.question,
            setting=describe_measurement(
                self.job,
                self.sampling,
                arms.values(),
                describe_placement(self.strategy, self.ranks),
                f"batch {self.batch_per_rank} per rank",
            ),
            sections=(Section(tables=(table,), charts=charts),),
            findings=as_findings(summarise_dtypes(arms, reference, lambda arm: judge_loss(arm, reference))),
            cautions=find_sweep_cautions(arms, reference),
        )


def make_loss_columns(reference: Arm | None) -> list[SweepColumn]:
    """The last loss, how far it is from float32's, and the verdict."""
    return [
        SweepColumn(
            column=Column(key="last_loss", header="last loss", quantity="loss"),
            read=lambda arm: compare_with(arm, reference).last,
        ),
        SweepColumn(
            column=Column(key="loss_difference", header="loss difference", quantity="share"),
            read=lambda arm: compare_with(arm, reference).difference,
        ),
        SweepColumn(
            column=Column(key="trains", header="trains", align="left"), read=lambda arm: judge_loss(arm, reference)
        ),
    ]


def compare_with(arm: Arm, reference: Arm | None) -> LossComparison:
    return compare_losses(read_losses(arm), read_losses(reference) if reference else {})


def judge_loss(arm: Arm, reference: Arm | None) -> str | None:
    """Whether the row trains as float32 does; None where that cannot be said."""
    if is_non_finite(arm):
        return "not finite"
    difference = compare_with(arm, reference).difference
    if difference is None:
        return None
    return "as float32" if difference <= LOSS_TOLERANCES[arm.trial.dtype] else "differently"

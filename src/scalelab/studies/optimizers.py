"""Optimizers: the same training, updated by one optimizer after the other.

Forward and backward do not depend on the optimizer, so what differs is the update: how many numbers it reads and
writes for every parameter, and how many of them it keeps. Every optimizer keeps a known number of tensors as large as
the parameters, so that its memory can be told before anything runs; both are shown.

What is learnt meanwhile is information and no ranking: a few steps at torch's default learning rates say nothing about
which optimizer trains better.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_ratio, judge
from scalelab.errors import UsageError
from scalelab.records.trial import Trial, TrialResult
from scalelab.report.document import Column, Document, Section
from scalelab.report.findings import as_findings
from scalelab.studies.shared.arms import Arm, group_arms
from scalelab.studies.shared.breakdown import estimate_phase_share
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.sampling import Configuration, Sampling
from scalelab.studies.shared.study import Study
from scalelab.studies.shared.sweep import (
    CONTROL,
    MaybeStrategy,
    SweepColumn,
    check_placement,
    choose_strategy,
    describe_measurement,
    describe_placement,
    draw_columns,
    find_sweep_cautions,
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
from scalelab.units import format_bytes, format_interval, format_quantity

OptimizerName = Literal["sgd", "nesterov", "adagrad", "adadelta", "adam", "adamw"]

KEPT_TENSORS = {"sgd": 0, "nesterov": 1, "adagrad": 1, "adadelta": 2, "adam": 2, "adamw": 2}
"""Tensors as large as the parameters that each keeps: momentum; sum of squares; averages of squares, of updates, of
gradients. Counters of steps come on top, a few bytes for each tensor of the model."""
KEPT_DTYPE_BYTES = {"float64": 8, "float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2}
SHARDED = ("fsdp-full", "fsdp-grad-op", "fsdp2")
"""Strategies whose ranks keep a piece of the state each."""


@dataclass(frozen=True, kw_only=True)
class Optimizers(Study):
    """The first optimizer is the reference."""

    name: ClassVar[str] = "optimizers"
    title: ClassVar[str] = "Optimizers"
    question: ClassVar[str] = "What does the optimizer cost in time and memory?"

    optimizers: tuple[OptimizerName, ...] = ("sgd", "nesterov", "adagrad", "adadelta", "adam")
    """Optimizers to measure; the first is the reference."""
    ranks: int = 1
    """Ranks to measure on."""
    strategy: MaybeStrategy = None
    """How the training is spread: single, dp, ddp, fsdp-full, fsdp-grad-op, fsdp-none or fsdp2. None: single on one
    rank, ddp on more."""
    batch_per_rank: int = 128
    """Samples per step on each rank."""
    job: Job = field(default_factory=lambda: Job(workload="resnet18"))
    sampling: Sampling = field(default_factory=lambda: Sampling(phase_steps=8, comm_free_steps=0))

    def __post_init__(self) -> None:
        check_placement(self.ranks, self.batch_per_rank)
        if not self.optimizers:
            raise UsageError("--optimizers needs at least one name, for example --optimizers sgd adam")
        if len(set(self.optimizers)) < len(self.optimizers):
            raise UsageError(f"--optimizers {' '.join(self.optimizers)} names one twice: give each once")
        wanted = self.job.optimization
        if wanted.optimizer is not None and wanted.momentum is None:
            raise UsageError(
                f"--optimizer {wanted.optimizer} is not read here: this study takes --optimizers {wanted.optimizer} …"
            )

    def plan(self) -> list[Trial]:
        configurations = [
            Configuration(
                name=name,
                strategy=choose_strategy(self.strategy, self.ranks),
                num_ranks=self.ranks,
                global_batch=self.batch_per_rank * self.ranks,
                job=self._choose_optimizer(name),
                label=name,
            )
            for name in self.optimizers
        ]
        return plan_sweep(self.job, self.sampling, configurations)

    def _choose_optimizer(self, name: OptimizerName) -> Job:
        """The job with one optimizer; a momentum is for those that have one."""
        wanted = self.job.optimization
        momentum = wanted.momentum if name in ("sgd", "nesterov") else None
        return replace(self.job, optimization=replace(wanted, optimizer=name, momentum=momentum))

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        arms = group_arms(results, self.sampling.warmup)
        reference = arms.get(self.optimizers[0])
        times = make_sweep_table(
            arms.values(),
            [step_column(), ratio_column(reference), optimizer_column(), samples_column()],
            name_header="optimizer",
            notes=(f"× reference: the step time over that of {self.optimizers[0]}, round by round",),
        )
        own = [arm for name, arm in arms.items() if name != CONTROL]
        memory = make_sweep_table(
            own, [state_column(), forecast_column(), memory_column(), loss_column()], name_header="optimizer"
        )
        memory = replace(memory, notes=memory.notes[1:])  # none of its numbers has an interval
        keys = list_keys(arms.values())
        drawn = keep_charts(
            draw_columns(
                times,
                {"step_seconds": "whole step", "optimizer_seconds": "update alone"},
                title="Step and update by optimizer",
                keys=keys,
                axis_title="time",
            ),
        )
        kept = keep_charts(
            draw_columns(
                memory,
                {"state_bytes": "measured", "forecast_bytes": "forecast"},
                title="What every optimizer keeps",
                keys=list_keys(own),
                axis_title="state of the fullest rank",
                caption="Counted, so without intervals; forecast from the parameters alone.",
            ),
        )
        batch = f"batch {self.batch_per_rank} per rank"
        place = describe_placement(self.strategy, self.ranks)
        return Document(
            title=self.title,
            question=self.question,
            setting=describe_measurement(self.job, self.sampling, arms.values(), place, self.job.dtype, batch),
            sections=(
                Section(tables=(times,), charts=drawn),
                Section(heading="What is kept", tables=(memory,), charts=kept),
            ),
            findings=as_findings(summarise_optimizers(own, reference)),
            cautions=find_sweep_cautions(arms, reference),
        )


def optimizer_column() -> SweepColumn:
    return SweepColumn(
        column=Column(key="optimizer_seconds", header="optimizer", quantity="seconds", note="the update alone"),
        read=lambda arm: arm.phase("optimizer"),
    )


def state_column() -> SweepColumn:
    return SweepColumn(
        column=Column(key="state_bytes", header="state", quantity="bytes", note="what the fullest rank keeps"),
        read=read_state_bytes,
    )


def forecast_column() -> SweepColumn:
    return SweepColumn(
        column=Column(key="forecast_bytes", header="forecast", quantity="bytes", note="from the parameters alone"),
        read=forecast_state_bytes,
    )


def loss_column() -> SweepColumn:
    return SweepColumn(
        column=Column(key="last_loss", header="last loss", quantity="loss", note="information, no ranking"),
        read=read_last_loss,
    )


def read_state_bytes(arm: Arm) -> int | None:
    """What the optimizer of the fullest rank keeps."""
    found = [rank.optimizer_bytes for result in arm.completed for rank in result.ranks]
    return max((size for size in found if size is not None), default=None)


def forecast_state_bytes(arm: Arm) -> int | None:
    """Kept tensors × parameters × bytes of each; under sharding an equal piece of it."""
    trial, chosen = arm.trial, arm.trial.optimization
    parameters = next((rank.num_parameters for result in arm.completed for rank in result.ranks), None)
    if parameters is None or chosen.optimizer is None:
        return None
    kept = 1 if chosen.optimizer == "sgd" and chosen.momentum else KEPT_TENSORS[chosen.optimizer]
    size = 4 if trial.shape.autocast else KEPT_DTYPE_BYTES[trial.dtype]
    return math.ceil(kept * parameters * size / (trial.num_ranks if trial.strategy in SHARDED else 1))


def read_last_loss(arm: Arm) -> float | None:
    """Of the last step; None where it is no finite number."""
    losses = read_losses(arm)
    last = losses[max(losses)] if losses else math.nan
    return last if math.isfinite(last) else None


def summarise_optimizers(arms: Sequence[Arm], reference: Arm | None) -> Iterator[str]:
    """The dearest first, then the others, then what is kept."""
    if reference is None or not reference.is_measured:
        return
    others = [arm for arm in arms if arm is not reference and arm.is_measured]
    ratios = {arm.label: estimate_ratio(arm.clean, reference.clean) for arm in others}
    for arm in sorted(others, key=lambda arm: -ratios[arm.label].value):
        yield f"{describe_ratio(arm, ratios[arm.label], reference)}."
    share = estimate_phase_share(reference, "optimizer")
    if share is not None:
        yield f"{reference.label} itself spends {format_quantity('share', share)} of a step on its update."
    sizes = [(read_state_bytes(arm), arm.label) for arm in arms if arm.is_measured]
    known = sorted(((size, label) for size, label in sizes if size is not None), key=lambda pair: pair[0])
    if known:
        (least, lightest), (most, heaviest) = known[0], known[-1]
        kept = "nothing" if least == 0 else format_bytes(least)
        yield f"{lightest} keeps {kept} between steps, {heaviest} {format_bytes(most)} on every rank."


def describe_ratio(arm: Arm, ratio: Estimate, reference: Arm) -> str:
    words = f"{arm.label} took {format_interval('ratio', ratio)} times the step of {reference.label}: {judge(ratio)}"
    ours, theirs = arm.phase("optimizer"), reference.phase("optimizer")
    if ours is None or theirs is None:
        return words
    return f"{words}; its update {format_quantity('seconds', ours)}, for {format_quantity('seconds', theirs)}"

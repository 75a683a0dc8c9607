"""Compilation: the same training with and without torch.compile.

A compiled step is faster or not, and the first one waits for the compiler. Both are measured in the same launches. What
compiling costs is everything before the steps have settled, over what the plain training takes there: loading the
compiler, and the excess of the first steps over a settled one.

The first launch is told from the others. torch keeps what it has compiled in a cache on disk, so later launches find
most of it there, and so does the first where an earlier run has filled the cache.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from scalelab.errors import UsageError
from scalelab.report.document import Column, Document, Section
from scalelab.studies.arms import Arm, group_arms
from scalelab.studies.compile_charts import draw_compiled, draw_payoffs
from scalelab.studies.compile_cost import find_payoffs, make_payoff_table, measure_starts, summarise_compile
from scalelab.studies.losses import compare_losses, read_losses
from scalelab.studies.placement import MaybeStrategy, check_placement, choose_strategy, describe_placement
from scalelab.studies.study import Configuration, Job, Sampling
from scalelab.studies.sweep import (
    SweepColumn,
    describe_measurement,
    find_sweep_cautions,
    make_sweep_table,
    memory_column,
    plan_sweep,
    ratio_column,
    samples_column,
    step_column,
)
from scalelab.trial import Trial, TrialResult

EAGER, COMPILED = "eager", "compiled"


@dataclass(frozen=True, kw_only=True)
class Compile:
    """The job as it is and under torch.compile: step, time to the first step, and the steps after which it pays."""

    name: ClassVar[str] = "compile"
    question: ClassVar[str] = "Is the compiled training faster, and after how many steps does compiling pay?"

    ranks: int = 1
    """Ranks of both rows."""
    strategy: MaybeStrategy = None
    """How the training is spread. None: single on one rank, ddp on more."""
    batch_per_rank: int = 32
    """Samples per step on each rank."""
    job: Job = field(default_factory=Job)
    sampling: Sampling = field(default_factory=lambda: Sampling(rounds=6, phase_steps=0, comm_free_steps=0))

    def __post_init__(self) -> None:
        check_placement(self.ranks, self.batch_per_rank)
        if self.job.shape.compile:
            raise UsageError("--compile is what this study varies: leave it out")

    def plan(self) -> list[Trial]:
        compiled = replace(self.job, shape=replace(self.job.shape, compile=True))
        rows = [
            Configuration(
                name=name,
                label=name,
                strategy=choose_strategy(self.strategy, self.ranks),
                num_ranks=self.ranks,
                global_batch=self.batch_per_rank * self.ranks,
                job=job,
            )
            for name, job in ((EAGER, self.job), (COMPILED, compiled))
        ]
        return plan_sweep(self.job, self.sampling, rows)

    def refuse(self, trial: Trial, results: Sequence[TrialResult]) -> str | None:  # noqa: ARG002 - the protocol's
        """Without a C++ compiler there is nothing to launch on a CPU."""
        if not trial.shape.compile or trial.device != "cpu":
            return None
        wanted = os.environ.get("CXX", "g++")
        if shutil.which(wanted):
            return None
        return f"torch.compile needs a C++ compiler on a CPU, and there is no {wanted}: install one, or name it in CXX"

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        arms = group_arms(results, self.sampling.warmup)
        eager, compiled = arms.get(EAGER), arms.get(COMPILED)
        payoffs = find_payoffs(eager, compiled)
        columns = [
            step_column(),
            samples_column(),
            ratio_column(eager, "× eager"),
            *make_start_columns(),
            memory_column(),
            SweepColumn(
                column=Column(key="loss_difference", header="loss difference", quantity="share"),
                read=lambda arm: compare_losses(read_losses(arm), read_losses(eager) if eager else {}).difference,
            ),
        ]
        table = make_sweep_table(arms.values(), columns)
        sections = [Section(tables=(table,), charts=draw_compiled(table, list(arms.values())))]
        if payoffs:
            paid = make_payoff_table(payoffs)
            sections.append(Section(heading="When compiling pays", tables=(paid,), charts=draw_payoffs(payoffs)))
        return Document(
            title="Compilation",
            question=self.question,
            setting=describe_measurement(
                self.job,
                self.sampling,
                arms.values(),
                describe_placement(self.strategy, self.ranks),
                f"batch {self.batch_per_rank} per rank",
            ),
            sections=tuple(sections),
            summary=summarise_compile(eager, compiled, payoffs),
            cautions=find_sweep_cautions(arms, eager),
        )


def make_start_columns() -> list[SweepColumn]:
    """From the launch to the end of the first step, in the first launch and in the others."""

    def read_first(arm: Arm) -> float | None:
        return measure_starts(arm).first

    return [
        SweepColumn(
            column=Column(key="first_start_seconds", header="first launch", quantity="seconds"), read=read_first
        ),
        SweepColumn(
            column=Column(key="later_start_seconds", header="later launches", quantity="seconds"),
            read=lambda arm: measure_starts(arm).later,
        ),
    ]

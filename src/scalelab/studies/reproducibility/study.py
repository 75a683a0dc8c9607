"""Reproducibility: what a seed fixes, what warm-up is, and how far a step time can be trusted.

The same job is launched again and again with the same seed, and with others. A seed should fix every loss to the last
bit; if it does not, two runs cannot be compared by their losses. It cannot fix a time. So the same launches also say
what the usual ways of timing a step are worth: the mean over everything, the mean without the first steps, the mean of
ten steps, the median over launches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from scalelab.checks import check_at_least, check_divisible
from scalelab.errors import UsageError
from scalelab.records.trial import Trial, TrialResult
from scalelab.report.document import Column, Document, Section
from scalelab.report.findings import as_findings
from scalelab.studies.reproducibility.report import (
    Repeats,
    find_unequal_step,
    make_launch_table,
    make_step_table,
    make_way_table,
    plot_first_steps,
    plot_launches,
    plot_ways,
    summarise_repeats,
)
from scalelab.studies.shared.arms import Arm, group_arms
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.losses import find_first_difference, read_losses
from scalelab.studies.shared.sampling import Configuration, Sampling
from scalelab.studies.shared.study import Study
from scalelab.studies.shared.sweep import (
    MaybeStrategy,
    SweepColumn,
    choose_strategy,
    describe_measurement,
    describe_placement,
    find_sweep_cautions,
    make_sweep_table,
    plan_sweep,
    ratio_column,
    samples_column,
    step_column,
)


@dataclass(frozen=True, kw_only=True)
class Reproducibility(Study):
    """The same job with the same seed and with others: are losses bit-equal, and how far do times agree?"""

    name: ClassVar[str] = "reproducibility"
    title: ClassVar[str] = "Reproducibility"
    question: ClassVar[str] = "What does a seed fix, why is there a warm-up, and how far can a step time be trusted?"

    global_batch: int = 64
    """Samples per step, over all ranks."""
    ranks: int = 1
    """Ranks of every row."""
    strategy: MaybeStrategy = None
    """How the training is spread. None: single on one rank, ddp on more."""
    seeds: int = 2
    """Seeds to train with, from --seed on."""
    dropped: int = 5
    """First steps that are held against the rest."""
    job: Job = field(default_factory=Job)
    sampling: Sampling = field(default_factory=lambda: Sampling(phase_steps=0, comm_free_steps=0))

    def __post_init__(self) -> None:
        check_at_least("ranks", self.ranks, 1)
        check_at_least("global_batch", self.global_batch, 1)
        check_divisible(self.global_batch, self.ranks)
        check_at_least("seeds", self.seeds, 1)
        check_at_least("dropped", self.dropped, 1)
        if self.dropped >= self.sampling.steps:
            raise UsageError(
                f"--dropped {self.dropped} leaves nothing of --steps {self.sampling.steps}: use fewer, or --steps"
                f" {self.dropped + 20}"
            )

    @property
    def _reference(self) -> str:
        return f"seed-{self.job.seed}"

    def plan(self) -> list[Trial]:
        rows = [
            Configuration(
                name=f"seed-{seed}",
                label=f"seed {seed}",
                strategy=choose_strategy(self.strategy, self.ranks),
                num_ranks=self.ranks,
                global_batch=self.global_batch,
                job=replace(self.job, seed=seed),
            )
            for seed in range(self.job.seed, self.job.seed + self.seeds)
        ]
        return plan_sweep(self.job, self.sampling, rows)

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        arms = group_arms(results, self.sampling.warmup)
        reference = arms.get(self._reference)
        repeats = Repeats.from_arms(group_arms(results, None).values(), self.job.seed, self.dropped)
        launches = plot_launches(arms.values())
        main = make_sweep_table(arms.values(), self._make_columns(reference))
        sections = [Section(tables=(main,), charts=(launches,) if launches else ())]
        ways = plot_ways(repeats) if repeats.launches else None
        if repeats.launches:
            sections += [
                Section(
                    heading="The first steps", tables=(make_step_table(repeats),), charts=(plot_first_steps(repeats),)
                ),
                Section(
                    heading="Ways to time a step", tables=(make_way_table(repeats),), charts=(ways,) if ways else ()
                ),
            ]
        if repeats.spread is not None:
            sections.append(Section(heading="Launches for a precision", tables=(make_launch_table(repeats),)))
        return Document(
            title=self.title,
            question=self.question,
            setting=describe_measurement(
                self.job,
                self.sampling,
                arms.values(),
                describe_placement(self.strategy, self.ranks),
                f"global batch {self.global_batch}",
            ),
            sections=tuple(sections),
            findings=as_findings(summarise_repeats(repeats, self._compare_seeds(arms))),
            cautions=find_sweep_cautions(arms, reference),
        )

    def _make_columns(self, reference: Arm | None) -> list[SweepColumn]:
        expected = read_losses(reference) if reference else {}
        first = f"seed {self.job.seed}"
        return [
            step_column(),
            samples_column(),
            ratio_column(reference, f"× {first}"),
            SweepColumn(
                column=Column(key="repeats", header="its launches", align="left"),
                read=lambda arm: describe_equality(find_unequal_step(arm.completed), len(arm.completed) > 1),
            ),
            SweepColumn(
                column=Column(key="against_first", header="against the first", align="left"),
                read=lambda arm: describe_equality(
                    find_first_difference(read_losses(arm), expected), bool(expected) and arm is not reference
                ),
            ),
        ]

    def _compare_seeds(self, arms: Mapping[str, Arm]) -> dict[int, int | None]:
        """By other seed: the first step whose loss differs from the first seed's; None: none does."""
        expected = read_losses(arms[self._reference]) if self._reference in arms else {}
        return {
            arm.trial.seed: find_first_difference(read_losses(arm), expected)
            for arm in arms.values()
            if expected and arm.completed and arm.trial.seed != self.job.seed
        }


def describe_equality(step: int | None, is_compared: bool) -> str | None:
    """Whether losses are the same, in words; None where there is nothing to compare."""
    if not is_compared:
        return None
    return "bit-equal" if step is None else f"differ from step {step} on"

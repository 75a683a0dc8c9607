"""Strategies: the same training under different parallel strategies.

Every strategy trains the same model on the same global batches from the same weights, so its losses must equal those
of the others up to rounding: a strategy that is faster because it trains something else is detected. The first
strategy is the reference. `single` runs on one rank with the whole global batch.

Device utilization is sampled from outside the ranks, in every round, while clean steps run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from scalelab.checks import check_at_least, check_divisible, flag
from scalelab.errors import UsageError
from scalelab.records.settings import Spreading
from scalelab.records.strategies import StrategyName, find_strategy
from scalelab.records.trial import Trial, TrialResult
from scalelab.report.document import Chart, Document, Section
from scalelab.studies.shared.arms import Arm, group_arms
from scalelab.studies.shared.communication import make_traced_table
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.losses import plot_losses
from scalelab.studies.shared.study import FEW_STEPS, Configuration, Sampling, Study
from scalelab.studies.shared.sweep import CONTROL, describe_measurement, find_sweep_cautions, plan_sweep
from scalelab.studies.strategies.report import (
    make_communication_table,
    make_device_table,
    make_loss_table,
    make_main_table,
    make_time_table,
    plot_strategies,
    summarise_strategies,
    warn_of_devices,
)


@dataclass(frozen=True, kw_only=True)
class Strategies(Study):
    """Run the same training under several strategies."""

    strategies: tuple[StrategyName, ...] = ("single", "dp", "ddp", "fsdp-full")
    """Strategies to compare; the first is the reference. `single` runs on one rank."""
    ranks: int = 2
    """Ranks of every other strategy; replicas of dp."""
    global_batch: int = 64
    """Samples per step, over all ranks."""
    job: Job = field(default_factory=Job)
    sampling: Sampling = field(default_factory=lambda: Sampling(comm_free_steps=0, profile_steps=FEW_STEPS))

    def __post_init__(self) -> None:
        check_at_least("ranks", self.ranks, 1)
        check_at_least("global_batch", self.global_batch, 1)
        check_strategies(self.strategies)
        if not any(find_strategy(name).axes for name in self.strategies):
            check_divisible(self.global_batch, self.ranks)  # ranks of a mesh may share samples: its trials are checked

    def plan(self) -> list[Trial]:
        rows = [
            Configuration(
                name=name_row(strategy, self.ranks),
                strategy=strategy,
                num_ranks=find_strategy(strategy).count_ranks(self.ranks),
                global_batch=self.global_batch,
                job=fit_job(self.job, strategy, self.strategies),
            )
            for strategy in self.strategies
        ]
        return [_look(trial) for trial in plan_sweep(self.job, self.sampling, rows)]

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        arms = group_arms(results, self.sampling.warmup)
        reference = arms.get(name_row(self.strategies[0], self.ranks))
        shown = [arm for name, arm in arms.items() if name != CONTROL]
        measured = [arm for arm in shown if arm.is_measured]
        return Document(
            title=self.title,
            question=self.question,
            setting=describe_measurement(
                self.job, self.sampling, arms.values(), f"global batch {self.global_batch}", f"{self.ranks} ranks"
            ),
            sections=_make_sections(list(arms.values()), measured, reference),
            findings=tuple(summarise_strategies(measured, reference)),
            cautions=(*find_sweep_cautions(arms, reference), *warn_of_devices(measured)),
        )


def _make_sections(arms: list[Arm], measured: list[Arm], reference: Arm | None) -> tuple[Section, ...]:
    table = make_main_table(arms, reference)
    sections = [Section(tables=(table,), charts=plot_strategies(table, arms))]
    if measured:
        sections += [
            Section(heading="Devices", tables=(make_device_table(measured),)),
            Section(heading="Utilisation over time", tables=(make_time_table(measured),)),
            Section(heading="Losses", tables=(make_loss_table(measured, reference),), charts=_draw_losses(measured)),
        ]
        traced = make_traced_table(measured, title="")
        tables = tuple(table for table in (traced, make_communication_table(measured)) if table is not None)
        if tables:
            sections.append(Section(heading="Communication in profiled steps", tables=tables))
    return tuple(sections)


def _draw_losses(measured: list[Arm]) -> tuple[Chart, ...]:
    """The losses of the first launch of each: they should lie on each other."""
    chart = plot_losses({arm.label: arm.completed[0] for arm in measured})
    return (chart,) if chart is not None else ()


def _look(trial: Trial) -> Trial:
    """In every round: sampling from outside costs the ranks nothing, and one launch would give no interval.

    DDP's counters need steps of their own, and are read in one launch.
    """
    wanted = {"replicas": True, "counters": trial.round == 1}
    own = (name for name in find_strategy(trial.strategy).instruments if wanted.get(name))
    return replace(trial, instruments=("utilization", *own))


def name_row(strategy: str, num_ranks: int) -> str:
    return f"{strategy}-{find_strategy(strategy).count_ranks(num_ranks)}"


def check_strategies(strategies: Sequence[str]) -> None:
    """Refuse a list that compares nothing, or something with itself."""
    if not strategies:
        raise UsageError("--strategies needs at least one name, for example --strategies ddp fsdp-full")
    if len(set(strategies)) < len(strategies):
        raise UsageError(f"--strategies {' '.join(strategies)} names a strategy twice: give each once")


def fit_job(job: Job, strategy: str, strategies: Sequence[str]) -> Job:
    """The job with the strategy options that the strategy knows; one that none of them knows is refused."""
    defaults = Spreading()
    given = [f.name for f in fields(Spreading) if getattr(job.spreading, f.name) != getattr(defaults, f.name)]
    for name in given:
        if not any(name in find_strategy(known).options for known in strategies):
            raise UsageError(f"{flag(name)} has no effect with --strategies {' '.join(strategies)}: leave it out")
    unknown = {name: getattr(defaults, name) for name in given if name not in find_strategy(strategy).options}
    return replace(job, spreading=replace(job.spreading, **unknown)) if unknown else job

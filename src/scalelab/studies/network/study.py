"""Network: the same training over different links between its ranks.

One rank alone is the base. Then the same ranks run inside one host, and on separate hosts joined by each link
(`--launcher hosts` emulates them): the compute is the same, so the difference is the link. Every training is observed
in three ways. Step times show what the link costs. Steps without the gradient all-reduce show how much of that is
exposed. Profiled steps show what ranks did in their collectives: *transfer*, the shortest time that any rank spent in
one, and *waiting*, what the others spent beyond that because they arrived early. A slow link makes transfers long; a
late rank makes the others wait on any link, and a profile that adds up both blames the network for it.

All-reduces alone are timed over the same links, and their bus bandwidth is compared with the link's nominal rate:
where both agree, the link works as declared, and training that reaches less is not limited by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from scalelab.checks import check_at_least, read_flag
from scalelab.errors import UsageError
from scalelab.launch.ranks.namespaces import UNSHAPED, Link, parse_link
from scalelab.records.launchers import LAUNCHERS
from scalelab.records.strategies import PLAIN, ProcessStrategy
from scalelab.records.tasks import Exchange
from scalelab.records.trial import NO_STRATEGY, Trial, TrialResult
from scalelab.report.document import Document, Section
from scalelab.studies.network.answer import BASE, name_exchange, read_answer
from scalelab.studies.network.report import (
    draw_costs,
    make_bandwidth_table,
    make_cost_table,
    make_profile_table,
    plot_link_rates,
    summarise_links,
    warn_of_links,
)
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Configuration, Sampling, Study
from scalelab.studies.shared.sweep import describe_measurement, find_sweep_cautions, plan_sweep

NUMBER_BYTES = 4
CALL_SECONDS = 0.25
"""What the largest message of the all-reduces alone should take."""
SHARED_FIELDS = (
    *("num_ranks", "round", "seed", "device", "threads_per_rank", "is_oversubscribed"),
    *("timeout_seconds", "port", "link", "ranks_per_host"),
)
"""What the all-reduces alone take over from the training."""
LARGEST_BYTES, SMALLEST_BYTES = 1 << 26, 1 << 18
"""Limits of that message on any link."""


@dataclass(frozen=True, kw_only=True)
class Network(Study):
    """Train on one rank, on ranks inside one host, and on hosts joined by each link."""

    takes_script: ClassVar[bool] = True

    links: tuple[str, ...] = ("inside", "unshaped", "1gbit", "100mbit")
    """inside: all ranks on this host. Any other link gives every rank an emulated host (Linux, root): unshaped, or a
    rate such as 1gbit."""
    ranks: int = 2
    """Number of ranks."""
    batch_per_rank: int = 8
    """Samples per step and rank."""
    strategy: ProcessStrategy = "ddp"
    """Parallel strategy."""
    exchange: bool = True
    """Also time all-reduces alone over every link."""
    job: Job = field(default_factory=Job)
    sampling: Sampling = field(default_factory=lambda: Sampling(rounds=5, steps=15, comm_free_steps=4, profile_steps=4))

    def __post_init__(self) -> None:
        check_at_least("ranks", self.ranks, 2)
        check_at_least("batch_per_rank", self.batch_per_rank, 1)
        names = [link.name for link in self.read_links()]
        if not names or len(set(names)) < len(names):
            raise UsageError(f"--links {' '.join(self.links)} must name at least one link, each once")
        if not LAUNCHERS[self.job.launcher].is_on_this_machine:
            raise UsageError(
                f"--launcher {self.job.launcher}: this study emulates hosts and links on one machine; leave it out, or"
                f" use run strong-scaling --launcher {self.job.launcher} to measure the real link"
            )
        if self.job.ranks_per_host >= self.ranks and any(not link.is_inside for link in self.read_links()):
            raise UsageError(
                f"--ranks-per-host {self.job.ranks_per_host} puts all of --ranks {self.ranks} on one host, without a"
                " link between them: use fewer per host, or more ranks"
            )
        if self.job.link != UNSHAPED:
            raise UsageError(f"--link {self.job.link} is not read by this study: use --links {self.job.link}")

    def read_links(self) -> list[Link]:
        return [read_flag("links", text, parse_link) for text in self.links]

    def plan(self) -> list[Trial]:
        base = Configuration(
            name=BASE,
            strategy=PLAIN,
            num_ranks=1,
            global_batch=self.batch_per_rank,
            job=replace(self.job, launcher="local", ranks_per_host=1),
            label="1 rank, no link",
        )
        trainings = plan_sweep(self.job, self.sampling, [base, *map(self._make_row, self.read_links())])
        return self._add_exchanges(trainings) if self.exchange else trainings

    def _make_row(self, link: Link) -> Configuration:
        return Configuration(
            name=link.name,
            strategy=self.strategy,
            num_ranks=self.ranks,
            global_batch=self.ranks * self.batch_per_rank,
            job=self._join(link),
            label=link.name,
            instruments=("messages",),
        )

    def _join(self, link: Link) -> Job:
        if link.is_inside:
            return replace(self.job, launcher="local", ranks_per_host=1)
        return replace(self.job, launcher="hosts", link=link.name)

    def _add_exchanges(self, trainings: Sequence[Trial]) -> list[Trial]:
        """After every training the all-reduces over the same link, so that both see the same machine."""
        links = {link.name: link for link in self.read_links()}
        trials: list[Trial] = []
        for trial in trainings:
            trials.append(trial)
            if trial.configuration in links:
                trials.append(make_exchange(trial, links[trial.configuration]))
        return trials

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        answer = read_answer(self.read_links(), results, self.sampling.warmup)
        base, costs = answer.arms.get(BASE), make_cost_table(answer)
        return Document(
            title=self.title,
            question=self.question,
            setting=describe_measurement(
                self.job,
                self.sampling,
                answer.arms.values(),
                self.job.name_ranks(self.strategy, self.ranks),
                f"{self.batch_per_rank} samples per rank",
            ),
            sections=(
                Section(tables=(costs,), charts=draw_costs(costs)),
                Section(heading="Profiled communication", tables=(make_profile_table(answer),)),
                Section(heading="Bandwidth", tables=(make_bandwidth_table(answer),), charts=plot_link_rates(answer)),
            ),
            findings=tuple(summarise_links(answer)),
            cautions=(*find_sweep_cautions(answer.arms, base), *warn_of_links(answer)),
        )


def make_exchange(trial: Trial, link: Link) -> Trial:
    """All-reduces alone with a training trial's ranks and link: one number, and messages that saturate the link."""
    return Trial(
        configuration=name_exchange(link.name),
        label=f"{link.name}, all-reduce alone",
        workload="",
        strategy=NO_STRATEGY,
        task=Exchange(operation="all_reduce", sizes=choose_sizes(link), repeats=8, warmup_calls=1),
        global_batch=trial.num_ranks,
        **{name: getattr(trial, name) for name in SHARED_FIELDS},
    )


def choose_sizes(link: Link) -> tuple[int, ...]:
    """One number, what the link carries in about a quarter of a second, and a quarter of that."""
    wanted = LARGEST_BYTES if link.bytes_per_second is None else CALL_SECONDS * link.bytes_per_second
    largest = SMALLEST_BYTES
    while largest * 2 <= min(wanted, LARGEST_BYTES):
        largest *= 2
    return (NUMBER_BYTES, largest // 4, largest)

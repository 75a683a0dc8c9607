"""Links: the same training, with its ranks joined in different ways.

One rank alone is the base. Then the same ranks run inside one host, and on hosts of their own that are joined by each
link (`--launcher hosts` emulates them here): what they compute is the same, so that what differs is the link. Every
training is looked at in three ways. Step times say what the link costs. Steps without the gradient exchange say how
much of that is exposed. Profiled steps say what ranks did in their collectives: *transfer*, the shortest time that any
rank spent in one, and *waiting*, what the others spent beyond because they came early. A slow link makes transfers
long; a late rank makes others wait on any link, and a profile that adds up both blames the network for it.

Beside the trainings, all-reduces alone are timed over the same links. Their bus bandwidth is held against the link's
nominal rate: where both agree, the link is what it is said to be, and a training that gets less has itself to blame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from scalelab.checks import check_at_least, read_flag
from scalelab.errors import UsageError
from scalelab.ranks.links import UNSHAPED, Link, parse_link
from scalelab.records.settings import Exchange
from scalelab.records.trial import NO_STRATEGY, Trial, TrialResult
from scalelab.report.document import Document, Section
from scalelab.report.findings import as_findings
from scalelab.studies.collectives.charts import plot_link_costs, plot_link_rates
from scalelab.studies.network.answer import BASE, LinksAnswer, name_exchange, read_answer
from scalelab.studies.network.report import (
    make_bandwidth_table,
    make_cost_table,
    make_profile_table,
    summarise_links,
    warn_of_links,
)
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.sampling import Configuration, Sampling
from scalelab.studies.shared.study import Study
from scalelab.studies.shared.sweep import describe_measurement, find_sweep_cautions, plan_sweep

NUMBER_BYTES = 4
CALL_SECONDS = 0.25
"""What the largest message of an exchange should take."""
LARGEST_BYTES, SMALLEST_BYTES = 1 << 26, 1 << 18
"""Of that message, whatever the link."""


@dataclass(frozen=True, kw_only=True)
class Links(Study):
    """One rank, the same ranks inside one host, and on hosts joined by each link."""

    name: ClassVar[str] = "links"
    title: ClassVar[str] = "Links"
    question: ClassVar[str] = "What does the link between ranks cost?"

    links: tuple[str, ...] = ("inside", "unshaped", "1gbit", "100mbit")
    """inside: all ranks on this host. Others have a host for every rank, emulated here (Linux, root): unshaped, or a
    rate such as 1gbit."""
    ranks: int = 2
    """Ranks that are joined."""
    batch_per_rank: int = 8
    """Samples per step on every rank, and on the one that is the base."""
    strategy: Literal["ddp", "fsdp-full", "fsdp-grad-op", "fsdp-none", "fsdp2"] = "ddp"
    """How the training is spread."""
    exchange: bool = True
    """Time all-reduces alone over every link as well."""
    job: Job = field(default_factory=Job)
    sampling: Sampling = field(default_factory=lambda: Sampling(rounds=5, steps=15, comm_free_steps=4, profile_steps=4))

    def __post_init__(self) -> None:
        check_at_least("ranks", self.ranks, 2)
        check_at_least("batch_per_rank", self.batch_per_rank, 1)
        names = [link.name for link in self.read_links()]
        if not names or len(set(names)) < len(names):
            raise UsageError(f"--links {' '.join(self.links)} must name at least one link, each once")
        if self.job.launcher not in ("local", "hosts"):
            raise UsageError(
                f"--launcher {self.job.launcher}: the hosts and links of this study are emulated on one machine; leave"
                f" it out, or use run strong-scaling --launcher {self.job.launcher} for the link that is there"
            )
        if self.job.ranks_per_host >= self.ranks and any(not link.is_inside for link in self.read_links()):
            raise UsageError(
                f"--ranks-per-host {self.job.ranks_per_host} puts all of --ranks {self.ranks} on one host, where no"
                " link joins them: use fewer per host, or more ranks"
            )
        if self.job.link != UNSHAPED:
            raise UsageError(f"--link {self.job.link} is one link of many here: use --links {self.job.link}")

    def read_links(self) -> list[Link]:
        return [read_flag("links", text, parse_link) for text in self.links]

    def plan(self) -> list[Trial]:
        base = Configuration(
            name=BASE,
            strategy="single",
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
        """Behind every training over a link an exchange over the same, so that both see the same machine."""
        links = {link.name: link for link in self.read_links()}
        trials: list[Trial] = []
        for trial in trainings:
            trials.append(trial)
            if trial.configuration in links:
                trials.append(make_exchange(trial, links[trial.configuration]))
        return trials

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        answer = read_answer(self.read_links(), results, self.sampling.warmup)
        base = answer.arms.get(BASE)
        return Document(
            title=self.title,
            question=self.question,
            setting=describe_measurement(
                self.job,
                self.sampling,
                answer.arms.values(),
                f"{self.strategy} × {self.ranks}",
                f"{self.batch_per_rank} samples per rank",
            ),
            sections=_make_sections(answer),
            findings=as_findings(summarise_links(answer)),
            cautions=(*find_sweep_cautions(answer.arms, base), *warn_of_links(answer)),
        )


def _make_sections(answer: LinksAnswer) -> tuple[Section, ...]:
    costs, rates = plot_link_costs(answer), plot_link_rates(answer)
    return (
        Section(tables=(make_cost_table(answer),), charts=(costs,) if costs else ()),
        Section(heading="Communication, as profiled", tables=(make_profile_table(answer),)),
        Section(heading="Bandwidth", tables=(make_bandwidth_table(answer),), charts=(rates,) if rates else ()),
    )


def make_exchange(trial: Trial, link: Link) -> Trial:
    """All-reduces alone, with the ranks and the link of a training: one number, and messages that fill the link."""
    return Trial(
        configuration=name_exchange(link.name),
        label=f"{link.name}, all-reduce alone",
        workload="",
        strategy=NO_STRATEGY,
        exchange=Exchange(operation="all_reduce", sizes=choose_sizes(link), repeats=8, warmup_calls=1),
        num_ranks=trial.num_ranks,
        global_batch=trial.num_ranks,
        round=trial.round,
        seed=trial.seed,
        device=trial.device,
        threads_per_rank=trial.threads_per_rank,
        is_oversubscribed=trial.is_oversubscribed,
        timeout_seconds=trial.timeout_seconds,
        port=trial.port,
        link=trial.link,
        ranks_per_host=trial.ranks_per_host,
    )


def choose_sizes(link: Link) -> tuple[int, ...]:
    """One number, what the link carries in about a quarter of a second, and a quarter of that."""
    wanted = LARGEST_BYTES if link.bytes_per_second is None else CALL_SECONDS * link.bytes_per_second
    largest = SMALLEST_BYTES
    while largest * 2 <= min(wanted, LARGEST_BYTES):
        largest *= 2
    return (NUMBER_BYTES, largest // 4, largest)

"""What a study is: one question, the trials that it plans and the document that answers it.

Its sampling is how often it measures each of its configurations, and in which order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from scalelab.checks import check_at_least, check_divisible
from scalelab.errors import UsageError
from scalelab.launch.ranks.placement import default_threads_per_rank, is_oversubscribed
from scalelab.records.observations import Instrument
from scalelab.records.refusals import check_strategy
from scalelab.records.settings import MaybeInt, find_kind
from scalelab.records.store import RunStore
from scalelab.records.strategies import SCRIPT, find_strategy
from scalelab.records.tasks import Exchange, Forecast, Measure, Script
from scalelab.records.trial import NO_STRATEGY, Cause, Status, StepPlan, Trial, TrialResult
from scalelab.report.document import Document
from scalelab.report.findings import CautionKind
from scalelab.studies.catalogue import STUDIES
from scalelab.studies.shared.job import Job, check_devices, describe_place, describe_trial_fields
from scalelab.units import format_count

if TYPE_CHECKING:
    from scalelab.launch.batch.site import Site


FEW_STEPS = 3
"""Profiled steps of one launch, where a study records some unasked: the first is often slow, the median is not it."""
LINK = "link"
"""The configuration of an all-reduce on two ranks that predictions take the link from."""
LINK_SIZES = tuple(4**power * 1024 for power in range(1, 7))
LINK_ROUNDS = 3
QUICK_ROUNDS, QUICK_STEPS = 5, 10
"""What is left with --quick."""
QUICK_FIELDS = ("rounds", "steps", "phase_steps", "comm_free_steps", "profile_steps")
"""What it sets."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How often each configuration is measured."""

    rounds: int = 12
    """Launches of every configuration, interleaved."""
    steps: int = 30
    """Clean steps per launch, warm-up included."""
    warmup: MaybeInt = None
    """First steps to drop. None: found from the step times."""
    phase_steps: int = 4
    """Extra steps per launch with input, forward, backward and optimizer timed."""
    comm_free_steps: int = 8
    """Extra steps per launch without the gradient all-reduce: they show what communication costs."""
    profile_steps: int = 0
    """Steps at the end of each launch under torch.profiler; traces are kept. None with --memory-limit."""
    free_steps: int = 8
    """GPUs: extra steps per launch without synchronization before and after each; they show host-bound time."""
    control: bool = True
    """Measure the reference twice, as two configurations: if they differ, so does the machine."""

    def __post_init__(self) -> None:
        check_at_least("rounds", self.rounds, 1)
        check_at_least("steps", self.steps, 2)
        for name in ("phase_steps", "comm_free_steps", "profile_steps", "free_steps"):
            check_at_least(name, getattr(self, name), 0)
        if self.warmup is not None:
            check_at_least("warmup", self.warmup, 0)
            if self.warmup >= self.steps:
                raise UsageError(
                    f"--warmup {self.warmup} leaves nothing of --steps {self.steps}: use fewer warm-up steps,"
                    f" or --steps {self.warmup + 20}"
                )

    def hasten(self) -> Sampling:
        """Fewer of everything: what is left takes a minute, and its intervals are wider."""
        return replace(
            self,
            rounds=min(self.rounds, QUICK_ROUNDS),
            steps=min(self.steps, QUICK_STEPS),
            warmup=None if self.warmup is None else min(self.warmup, QUICK_STEPS // 2),
            phase_steps=min(self.phase_steps, 2),
            comm_free_steps=min(self.comm_free_steps, 4),
            profile_steps=0,
        )

    @property
    def launches(self) -> str:
        """Launches per configuration, in words."""
        return format_count(self.rounds, "launch")

    @property
    def plan(self) -> StepPlan:
        """The steps of one launch: a third of the clean ones lead in, the rest is interleaved with the other kinds."""
        lead_in = min(self.steps - 1, max(self.warmup or 0, self.steps // 3))
        return StepPlan(
            lead_in_steps=lead_in,
            clean_steps=self.steps - lead_in,
            phase_steps=self.phase_steps,
            comm_free_steps=self.comm_free_steps,
            profiled_steps=self.profile_steps,
            free_steps=self.free_steps,
        )


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One row of a study: what is measured in every round."""

    name: str
    strategy: str
    num_ranks: int
    global_batch: int
    job: Job | None = None
    """What is trained, where it differs from the study's job."""
    label: str = ""
    """What tables call it; empty: its strategy and number of ranks."""
    instruments: tuple[Instrument, ...] = ()
    """What is recorded besides time, in its first round."""


def plan_forecast(job: Job, row: Configuration, task: Forecast, prefix: str = "") -> Trial:
    """A row as one process on fake tensors; its ranks are not started."""
    return Trial(
        configuration=f"{prefix}{row.name}",
        strategy=row.strategy,
        num_ranks=row.num_ranks,
        global_batch=row.global_batch,
        label=row.label,
        task=task,
        **describe_trial_fields(row.job or job, row.strategy),
    )


FAKE = CautionKind("fake", "Nothing was started: fake tensors, and a fake process group", "note")


def check_fake(is_fake: bool, job: Job) -> None:
    """Refuse what fake tensors cannot run (`--fake`)."""
    if is_fake and job.script is not None:
        raise UsageError("--fake cannot run a script: it needs a workload, such as --workload gpt2 or file.py:build")
    if is_fake and job.device == "auto":
        raise UsageError("--fake looks for no device: name the one to forecast for, such as --device cuda")


def mark_fake(document: Document, job: Job, *size: str) -> Document:
    """The same answer, which says everywhere that nothing ran."""
    setting = [job.label, job.dtype, *size, f"{job.device}, fake: nothing was started"]
    caution = FAKE(
        "",
        f"fake: no rank was started and no {job.device} device was used; where torch has none, its operators are a"
        " CPU's",
        "run it without --fake where the devices are, to measure it",
    )
    return replace(
        document,
        title=f"{document.title} (fake)",
        setting=" · ".join(setting),
        cautions=(caution, *document.cautions),
    )


def plan_rounds(job: Job, sampling: Sampling, configurations: Sequence[Configuration]) -> list[Trial]:
    """Every configuration once per round, the rounds one after the other, so that slow drift falls on all alike.

    Every other round runs backwards: what comes first in a round is not always the same.
    """
    if job.script is not None:
        configurations = [replace(one, strategy=SCRIPT.name) for one in configurations]
    most_ranks = max(configuration.num_ranks for configuration in configurations)
    check_devices(job, job.count_on_node(most_ranks))
    alike = {c.name: describe_trial_fields(c.job or job, c.strategy) for c in configurations}
    cores = {num_ranks: share_cores(job, num_ranks, most_ranks) for num_ranks in {c.num_ranks for c in configurations}}
    trials = [
        Trial(
            configuration=configuration.name,
            strategy=configuration.strategy,
            num_ranks=configuration.num_ranks,
            global_batch=configuration.global_batch,
            round=number,
            **cores[configuration.num_ranks],
            task=plan_task(configuration.job or job, sampling, configuration),
            label=configuration.label,
            instruments=configuration.instruments if number == 1 else (),
            **alike[configuration.name],
        )
        for number in range(1, sampling.rounds + 1)
        for configuration in (configurations if number % 2 else reversed(configurations))
    ]
    if job.script is None:
        for trial in trials:
            check_strategy(trial)
    return trials


def plan_task(job: Job, sampling: Sampling, configuration: Configuration) -> Measure | Script:
    """What the ranks of a configuration do: train the workload, or run the script."""
    plan = plan_steps(sampling, configuration.strategy, job.memory_limit_bytes, configuration.num_ranks)
    if job.script is not None or not find_kind(job.found_device).is_accelerator:
        plan = replace(plan, free_steps=0)  # a CPU has nothing queued, and a script waits where it likes
    if job.script is None:
        return Measure(plan=plan)
    num_ranks = configuration.num_ranks
    check_divisible(configuration.global_batch, num_ranks)
    return job.make_script_task(plan, configuration.global_batch // num_ranks, num_ranks)


def share_cores(job: Job, num_ranks: int, most_ranks: int) -> dict[str, Any]:
    """The cores of each rank, the same in every trial, and whether these ranks have to share them.

    Of nodes that are not known yet the latter cannot be said: ranks report where they are, and a caution names sharing.
    """
    num_cores = job.count_node_cores()
    threads = job.threads_per_rank or default_threads_per_rank(job.count_on_node(most_ranks), num_cores)
    is_shared = not job.has_unknown_nodes and is_oversubscribed(job.count_on_node(num_ranks), threads, num_cores)
    return {"threads_per_rank": threads, "is_oversubscribed": is_shared}


def describe_bare_trial(job: Job, num_ranks: int, most_ranks: int) -> dict[str, Any]:
    """What a job says about a trial that trains nothing."""
    place = describe_place(job) | share_cores(job, num_ranks, most_ranks)
    return {"workload": "", "strategy": NO_STRATEGY, "num_ranks": num_ranks, **place}


def plan_link(job: Job, sampling: Sampling, num_ranks: int) -> list[Trial]:
    """An all-reduce on two ranks by size."""
    trial = Trial(
        configuration=LINK,
        label="all-reduce × 2",
        global_batch=2,
        **describe_bare_trial(job, 2, num_ranks),
        task=Exchange(operation="all_reduce", sizes=LINK_SIZES, repeats=20, budget_seconds=0.1),
    )
    return [replace(trial, round=number) for number in range(1, min(LINK_ROUNDS, sampling.rounds) + 1)]


def plan_steps(
    sampling: Sampling, strategy: str, limit_bytes: int | None = None, num_ranks: int | None = None
) -> StepPlan:
    """Communication is skipped only where all of it can be: `no_sync` does not cover FSDP's all-gathers.

    Under a memory limit nothing is profiled: the profiler's own memory could make a trial run out of it. A pipeline of
    one stage is a plain loop, whose phases can be timed.
    """
    plan = sampling.plan if limit_bytes is None else replace(sampling.plan, profiled_steps=0)
    record = find_strategy(strategy)
    plan = plan if record.has_phases or num_ranks == 1 else replace(plan, phase_steps=0)
    return plan if record.can_skip_communication else replace(plan, comm_free_steps=0)


def check_ranks(ranks: Sequence[int], global_batch: int | None = None) -> None:
    """Reject numbers of ranks that no trial could have, naming the flag."""
    if not ranks:
        raise UsageError("--ranks needs at least one number, for example --ranks 1 2")
    for num_ranks in ranks:
        check_at_least("ranks", num_ranks, 1)
        if global_batch is not None:
            check_divisible(global_batch, num_ranks)
    if len(set(ranks)) < len(ranks):
        raise UsageError(f"--ranks {' '.join(map(str, ranks))} lists a number twice: give each once")


class Study:
    """One question. Subclasses are frozen keyword-only dataclasses: fields are flags, JSON keys and help at once."""

    name: ClassVar[str]
    """What `scalelab run` calls it."""
    title: ClassVar[str]
    question: ClassVar[str]
    swept_options: ClassVar[tuple[str, ...]] = ()
    """Options of the workload that the study sets itself: they have no flag."""
    takes_script: ClassVar[bool] = False
    """Whether a training script can take the place of the workload: `-- train.py …`."""
    has_own_launchers: ClassVar[bool] = False
    """Whether its trials choose their launchers themselves, as the rows of a recipe do."""
    is_recorded: ClassVar[bool] = False
    """Whether the user's own script records its runs: they cannot be started or resumed."""
    forecasts_memory: ClassVar[bool] = False
    """Whether the study itself keeps trials from running that cannot fit into memory."""
    is_search: ClassVar[bool] = False
    """Whether results decide how many trials there are."""
    quick_fields: ClassVar[Mapping[str, Any]] = {}
    """Its fields with --quick, besides those of its sampling."""
    quick_cost: ClassVar[str] = ""
    """What these give up, in words."""

    def __init_subclass__(cls, *, is_abstract: bool = False) -> None:
        """A study of the catalogue has its name, title and question; one without a name is named after its class."""
        if is_abstract:
            return
        for name, entry in STUDIES.items():
            if entry.place == f"{cls.__module__}:{cls.__name__}":
                cls.name, cls.title, cls.question = name, entry.title, entry.question
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", cls.__name__)
        for name, value in (("name", words.lower().replace(" ", "-")), ("title", words.capitalize()), ("question", "")):
            if not hasattr(cls, name):
                setattr(cls, name, value)

    if TYPE_CHECKING:  # fields or properties of subclasses: a property here would stand in the way of a field
        __dataclass_fields__: ClassVar[dict[str, Any]]

        @property
        def job(self) -> Job:
            """What is trained, and on what."""

        @property
        def sampling(self) -> Sampling | None:
            """How often it is measured; None: the study says so in its own way."""

        @property
        def label(self) -> str | None:
            """What its runs are called; None: as the study."""
    else:
        sampling = None
        label = None

    def hasten(self) -> Self:
        """The same question in about a minute: fewer launches and steps, or what the study says itself."""
        sampling = {} if self.sampling is None else {"sampling": self.sampling.hasten()}
        return replace(self, **sampling, **self.quick_fields)

    def plan(self) -> list[Trial]:
        """The trials in the order in which they run; raises `UsageError` for fields that do not work together."""
        raise NotImplementedError

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        """The answer from what has been measured so far."""
        raise NotImplementedError

    def find_notes(self) -> list[str]:
        """What a user should know before the first launch."""
        return []

    def plan_more(self, results: Sequence[TrialResult]) -> list[Trial]:
        """What to run next, once every planned trial has a result; nothing ends the run."""
        return []

    def refuse(self, trial: Trial, results: Sequence[TrialResult]) -> str | None:
        """Why earlier results make the trial unnecessary; None: run it."""
        return None

    def expects(self, result: TrialResult) -> bool:
        """Whether a trial that did not complete is part of the answer, so that the run does not exit with code 3."""
        return False

    def find_unexpected(self, results: Sequence[TrialResult]) -> list[TrialResult]:
        """Those of all results that did not complete and should have."""
        return [one for one in results if one.status is not Status.COMPLETED and not self.expects(one)]

    def find_site(self, trial: Trial) -> Site | None:
        """The batch resources of a trial that is a job of its own; None: it is not one."""
        return None

    def find_part(self, trial: Trial) -> str:
        """The part of the study that a trial belongs to: each part drops a warm-up of its own."""
        return ""

    def name_part(self, trial: Trial) -> tuple[str, str]:
        """The row of a recipe that a trial belongs to, and what the row calls that part; empty outside of recipes."""
        return "", ""

    def find_warmup(self, trial: Trial) -> int | None:
        """The steps that every launch drops; None: as many as are found to be warm-up."""
        return self.sampling.warmup if self.sampling else None

    def count_steps(self, result: TrialResult) -> TrialResult:
        """The result with the steps that charts draw."""
        return result

    def make_report(
        self, results: Sequence[TrialResult], planned: Iterable[Trial], find_directory: Callable[[str], Path]
    ) -> Document:
        """The answer with the charts that every run with step samples has."""
        from scalelab.studies.shared.step_charts import add_general_charts

        return add_general_charts(self.conclude(results), self, results, planned, find_directory)

    def rescue(self, store: RunStore) -> TrialResult | None:
        """The result of a run without any, from what a killed process left behind; None: nothing can be read."""
        return None


def was_refused(result: TrialResult) -> bool:
    """Whether its study left it out, by `refuse`; before 0.2 results had no cause."""
    return result.status is Status.NOT_RUN and result.cause in (Cause.ANSWERED, None)

"""Results grouped by configuration, without their warm-up: where every study's analysis starts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from operator import attrgetter
from typing import TypeVar

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.fetches import FetchSeries, group_fetches
from scalelab.analysis.link import TransferSeries, group_transfers
from scalelab.analysis.quality import Warmup, find_warmup
from scalelab.analysis.stats import Launches, Rounds, estimate_median
from scalelab.records.observations import RankReport, ScriptReport
from scalelab.records.strategies import find_strategy
from scalelab.records.trial import Status, StepKind, StepSample, Trial, TrialResult
from scalelab.units import format_bytes, list_some

Kept = TypeVar("Kept")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """All rounds of one configuration. A round that gave nothing is an empty list and keeps its place."""

    trial: Trial
    """The first round's; the others differ only in the round."""
    results: tuple[TrialResult, ...]
    clean: Rounds
    """Step times after warm-up, the maximum over ranks."""
    comm_free: Rounds
    warmup: Warmup
    """Found from this configuration's own steps, or as given."""
    num_dropped: int
    """How many first steps are dropped, the same in every configuration of a study."""
    num_clean_steps: int
    """Clean steps of one launch, warm-up included."""
    free: Rounds = ()
    """Steps that ran freely; empty rounds where there were none."""

    @property
    def configuration(self) -> str:
        return self.trial.configuration

    @property
    def label(self) -> str:
        """What tables call it."""
        return name_configuration(self.trial)

    @cached_property
    def completed(self) -> list[TrialResult]:
        return [result for result in self.results if result.status is Status.COMPLETED]

    @cached_property
    def reports(self) -> list[RankReport]:
        """Of every rank of every round that completed."""
        return [rank for result in self.completed for rank in result.ranks]

    @property
    def failure(self) -> TrialResult | None:
        """The first round that did not complete, if there is one."""
        return next((result for result in self.results if result.status is not Status.COMPLETED), None)

    @property
    def is_measured(self) -> bool:
        return any(len(steps) for steps in self.clean)

    @cached_property
    def step(self) -> Estimate:
        return estimate_median(self.clean)

    @cached_property
    def step_samples(self) -> int:
        """Samples per step over all ranks."""
        return next((count_step_samples(result) for result in self.completed), self.trial.global_batch)

    @property
    def rank_samples(self) -> int:
        """Samples per step on each rank."""
        return self.step_samples // self.trial.num_data_ranks

    @property
    def num_passes(self) -> int:
        """Backward passes of one step: those of a script as they were seen, those of a workload as it says."""
        seen = [one.num_passes for one in self.scripts]
        said = [rank.num_passes for rank in self.reports]
        return next((number for number in (*seen, *said) if number), self.trial.accumulation)

    @property
    def scripts(self) -> list[ScriptReport]:
        """What was seen of a training script, on every rank of every round that completed."""
        return [rank.script for rank in self.reports if rank.script is not None]

    @property
    def is_alone(self) -> bool:
        """Whether the ranks of a script send each other nothing: each trains its own model."""
        scripts = self.scripts
        return (
            self.trial.num_ranks > 1 and bool(scripts) and not any(one.has_group and one.is_joined for one in scripts)
        )

    def phase(self, name: str) -> Estimate | None:
        """The median of one phase over steps and ranks, or None when phases were not timed."""
        if name not in self._phases:
            read = attrgetter(f"{name}_seconds")
            rounds = [[seconds for seconds in map(read, timed) if seconds is not None] for timed in self._phase_samples]
            self._phases[name] = estimate_median(rounds) if any(rounds) else None
        return self._phases[name]

    @cached_property
    def _phases(self) -> dict[str, Estimate | None]:
        return {}

    @cached_property
    def _phase_samples(self) -> list[list[StepSample]]:
        return [[one for one in result.samples if one.kind is StepKind.PHASES] for result in self.completed]

    @property
    def start_skew_seconds(self) -> float | None:
        """How far apart the ranks begin a clean step: the median over steps; None with one rank."""
        if self.trial.num_ranks == 1:
            return None
        skews = []
        for result in self.completed:
            starts: dict[int, list[float]] = {}
            for sample in result.samples:
                if sample.kind is StepKind.CLEAN:
                    starts.setdefault(sample.step, []).append(sample.start_seconds)
            skews += [max(times) - min(times) for times in starts.values()]
        return statistics.median(skews) if skews else None

    @property
    def peak_memory_bytes(self) -> int | None:
        """The highest of any rank in any round."""
        found = [rank.peak_memory_bytes for rank in self.reports]
        return max((peak for peak in found if peak is not None), default=None)


def find_measured(arms: Mapping[str, Arm], configuration: str) -> Arm | None:
    arm = arms.get(configuration)
    return arm if arm is not None and arm.is_measured else None


def keep_by_arm(compute: Callable[[Arm], Kept]) -> Callable[[Arm], Kept]:
    """Computes something of an arm once: several tables, charts and findings of a study ask for it."""
    name = f"{compute.__module__}.{compute.__qualname__}"

    @wraps(compute)
    def look_up(arm: Arm) -> Kept:
        if name not in arm.__dict__:
            arm.__dict__[name] = compute(arm)
        kept: Kept = arm.__dict__[name]
        return kept

    return look_up


def count_step_samples(result: TrialResult) -> int:
    """Samples per step over all ranks: those that a script really took, otherwise those of the plan."""
    counted = [rank.script.num_samples if rank.script is not None else None for rank in result.ranks]
    known = [number for number in counted if number is not None]
    num_sharing = next((rank.script.num_sharing for rank in result.ranks if rank.script is not None), 1)
    return sum(known) // num_sharing if len(known) == result.trial.num_processes else result.trial.global_batch


def name_sender(arm: Arm) -> str:
    """The strategy that says what a row sends: of a script, the one that it applies itself."""
    return next((script.strategy for script in arm.scripts if script.strategy), arm.trial.strategy)


def name_configuration(trial: Trial) -> str:
    """By its own label; otherwise the plain loop by its name, a strategy with its number of ranks."""
    if trial.label:
        return trial.label
    if trial.configuration == "control":
        return "control"
    if find_strategy(trial.strategy).is_plain:
        return "plain loop"
    over = f" over {trial.link}" if trial.num_hosts > 1 else ""
    return f"{trial.strategy} × {trial.num_ranks}{' (emulated)' if trial.is_emulated else ''}{over}"


def group_arms(results: Sequence[TrialResult], forced_warmup: int | None) -> dict[str, Arm]:
    """One arm per configuration, in the order in which they first ran."""
    grouped: dict[str, list[TrialResult]] = {}
    for result in sorted(results, key=lambda result: result.trial.round):
        grouped.setdefault(result.trial.configuration, []).append(result)
    last_round = max((result.trial.round for result in results), default=0)
    arms = {name: _make_arm(found, last_round, forced_warmup) for name, found in grouped.items()}
    shared = share_warmup([arm.warmup for arm in arms.values() if arm.is_measured])
    return {
        name: replace(arm, clean=Launches(list(steps[shared:]) for steps in arm.clean), num_dropped=shared)
        for name, arm in arms.items()
    }


def make_transfer_arms(results: Sequence[TrialResult]) -> dict[str, Arm]:
    """One arm per exchange and size of its messages, whose steps are calls."""
    return {
        f"{name}-{size}": _make_series_arm(series, f"{series.trial.label}, {format_bytes(size)}", rounds)
        for name, series in group_transfers(results).items()
        for size, rounds in series.seconds.items()
    }


def make_fetch_arms(results: Sequence[TrialResult]) -> dict[str, Arm]:
    """One arm per stored set and pass over it, whose steps are batches."""
    return {
        f"{name}-{one.replace(' ', '-')}": _make_series_arm(series, f"{series.label}, {one}", times.fetch)
        for name, series in group_fetches(results).items()
        for one, times in series.passes.items()
    }


def _make_series_arm(series: TransferSeries | FetchSeries, label: str, rounds: Rounds) -> Arm:
    """Its steps are calls or batches: none is warm-up, and none ran without communication."""
    return Arm(
        trial=replace(series.trial, label=label),
        results=series.results,
        clean=rounds,
        comm_free=[[] for _ in rounds],
        warmup=Warmup(num_steps=0, is_settled=True),
        num_dropped=0,
        num_clean_steps=max(map(len, rounds)),
    )


def share_warmup(found: Sequence[Warmup]) -> int:
    """One warm-up for all that is compared, or a difference could be that of the cut.

    The longest of those that settled. A configuration that never settled has none, and gets a warning instead.
    """
    settled = [warmup.num_steps for warmup in found if warmup.is_settled]
    return max(settled) if settled else min((warmup.num_steps for warmup in found), default=0)


def _make_arm(results: list[TrialResult], last_round: int, forced_warmup: int | None) -> Arm:
    by_round = {result.trial.round: result for result in results}
    clean: list[list[float]] = [[] for _ in range(last_round)]
    comm_free = Launches([] for _ in range(last_round))
    free: list[list[float]] = [[] for _ in range(last_round)]
    for number, result in by_round.items():
        if result.status is Status.COMPLETED:
            free[number - 1] = list(result.step_seconds(StepKind.FREE).values())
            clean[number - 1] = list(result.step_seconds(StepKind.CLEAN).values())
            comm_free[number - 1] = list(result.step_seconds(StepKind.COMM_FREE).values())
    if forced_warmup is None:
        warmup = find_warmup([steps for steps in clean if steps])
    else:
        warmup = Warmup(num_steps=forced_warmup, is_settled=True)
    return Arm(
        trial=results[0].trial,
        results=tuple(results),
        clean=clean,
        comm_free=comm_free,
        warmup=warmup,
        num_dropped=0,
        num_clean_steps=max((len(steps) for steps in clean), default=0),
        free=free,
    )


NOT_YET = "not run yet"
TOO_SHORT = "no step after the warm-up"
MOST_NAMED = 6


def describe_status(arm: Arm | None) -> str:
    """What a row says that was not measured: how it ended; one that completed had too few steps."""
    if arm is None:
        return NOT_YET
    return arm.failure.status.words if arm.failure else TOO_SHORT


def describe_failures(failed: Iterable[tuple[str, str]]) -> Iterator[str]:
    """A sentence of all that is missing, by name and status; nothing if nothing is."""
    words = [f"{label} ({status})" for label, status in failed]
    if words:
        yield f"Not measured: {list_some(words, MOST_NAMED)}."


def join_words(*sentences: str) -> str:
    """Sentences in a row; empty ones are left out."""
    return " ".join(sentence for sentence in sentences if sentence)


def count_rest(number: int, what: str, how: str) -> str:
    """What is left out of a chart, in a sentence: "2 more ranks are in the table only."."""
    return f"{number} more {what}{'s are' if number > 1 else ' is'} {how}."


def describe_warmup(num_dropped: int | str) -> str:
    """How many first steps of every launch do not count."""
    return f"first {num_dropped} dropped as warm-up" if num_dropped else "no warm-up dropped"


def read_counted(arm: Arm) -> RankReport | None:
    """Rank 0's report of the round in which messages were counted: all ranks take part in every collective."""
    return next((one.ranks[0] for one in arm.completed if one.ranks and one.ranks[0].message_basis is not None), None)

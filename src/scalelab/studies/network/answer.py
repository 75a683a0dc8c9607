"""What a link costs, in numbers: from steps, from profiles, and from all-reduces alone.

In a profiled step, a rank's communication is the time with at least one collective in flight, overlapped or not
(exposed + overlapped). Transfer and waiting are sums over collectives instead, and so is their mean latency: two that
run at once both count. All are means over ranks, step by step.

The bus bandwidth in training is what its collectives had to move, each by its own factor
(`analysis/traffic.py`), over the time of communication. That time includes waiting, but not the pauses between
buckets.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.link import TransferSeries, group_transfers
from scalelab.analysis.speedup import ExposedCommunication, communication_by_ablation
from scalelab.analysis.stats import (
    Rounds,
    estimate_median,
    estimate_over_rounds,
    estimate_positive_over_rounds,
    estimate_ratio,
)
from scalelab.analysis.traffic import KINDS, bus_factor
from scalelab.launch.ranks.namespaces import Link
from scalelab.records.observations import TracedStep
from scalelab.records.strategies import find_strategy
from scalelab.records.tasks import Exchange
from scalelab.records.trial import TrialResult
from scalelab.studies.shared.arms import Arm, group_arms, name_sender

BASE = "single"
NANOSECONDS = 1e-9

ReadStep = Callable[[TracedStep], float | None]


@dataclass(frozen=True, kw_only=True)
class LinkRow:
    """Everything that is known of one link."""

    link: Link
    arm: Arm | None
    """The training over it; None: no result yet."""
    series: TransferSeries | None
    """The all-reduces alone over it."""

    @property
    def is_measured(self) -> bool:
        return self.arm is not None and self.arm.is_measured

    @cached_property
    def exposed(self) -> ExposedCommunication | None:
        """What a step without the gradient all-reduce saves; only ddp has such steps."""
        if self.arm is None or not any(self.arm.comm_free):
            return None
        return communication_by_ablation(self.arm.clean, self.arm.comm_free)

    def traced(self, read: ReadStep) -> Rounds | None:
        """A number of every profiled step, as the mean over ranks; None unless every rank has it."""
        if self.arm is None:
            return None
        rounds: list[list[float]] = [[] for _ in self.arm.clean]  # one that gave nothing keeps its place
        for result in self.arm.completed:
            rounds[result.trial.round - 1] = _average_steps(result, read)
        return rounds if any(rounds) else None

    def estimate(self, read: ReadStep) -> Estimate | None:
        """The median of the launches' medians, with its interval over launches, as in `profiled.py`."""
        medians = [statistics.median(steps) for steps in self.traced(read) or () if steps]
        return estimate_over_rounds(statistics.median(medians), medians) if medians else None

    @cached_property
    def payload_bytes(self) -> int | None:
        """Of all collectives of one step, as rank 0 counted them at the operator, or as its trace has them."""
        messages = self._find_messages()
        if messages:
            return sum(size for _, size in messages)
        traced = [step.payload_bytes for step in self._first_steps()]
        return traced[0] if traced else None

    @cached_property
    def bus_bytes(self) -> float | None:
        """What a step's collectives put on every link and direction under the cheapest schedule."""
        if self.arm is None:
            return None
        num_ranks = self.arm.trial.num_ranks
        messages = self._find_messages()
        if messages:
            return sum(size * bus_factor(kind, num_ranks) for kind, size in messages)
        kinds = [send.kind for send in find_strategy(name_sender(self.arm)).sends if send.size == "gradients"]
        if self.payload_bytes is None or not kinds:
            return None
        return self.payload_bytes * bus_factor(kinds[0], num_ranks)

    @cached_property
    def trained_bandwidth(self) -> Estimate | None:
        """Of the training, in bytes per second."""
        moved = self.bus_bytes
        medians = [statistics.median(steps) for steps in self.traced(read_communication) or () if steps]
        if not moved or not medians or min(medians) <= 0:
            return None
        rates = [moved / seconds for seconds in medians]
        return estimate_positive_over_rounds(moved / statistics.median(medians), rates)

    @cached_property
    def bandwidth(self) -> Estimate | None:
        """Of the largest all-reduce alone, in bytes per second."""
        if self.series is None or not self.series.is_measured:
            return None
        size = max(self.series.seconds)
        moved = size * bus_factor(self.series.operation, self.series.trial.num_ranks)
        return estimate_median(self.series.seconds[size]).map(lambda taken: moved / taken)

    @property
    def best_bandwidth(self) -> Estimate | None:
        """Alone where that was measured, of the training otherwise."""
        return self.bandwidth or self.trained_bandwidth

    @cached_property
    def latency(self) -> Estimate | None:
        """Of an all-reduce of one number."""
        if self.series is None or not self.series.is_measured:
            return None
        return estimate_median(self.series.seconds[min(self.series.seconds)])

    @property
    def nominal_share(self) -> Estimate | None:
        """The bus bandwidth over the link's nominal rate; None if it has none."""
        nominal, found = self.link.bytes_per_second, self.best_bandwidth
        return None if nominal is None or found is None else found.map(lambda rate: rate / nominal)

    def _find_messages(self) -> list[tuple[str, int]]:
        """Kind and bytes of what a step sends; nothing unless every size is known."""
        reports = self.arm.reports if self.arm else []
        found = next((report.messages for report in reports if report.rank == 0 and report.messages), ())
        known = [(m.kind, m.payload_bytes) for m in found if m.kind in KINDS and m.payload_bytes is not None]
        return known if len(known) == len(found) else []

    def _first_steps(self) -> list[TracedStep]:
        reports = self.arm.reports if self.arm else []
        return [rank.traced_steps[0] for rank in reports if rank.rank == 0 and rank.traced_steps][:1]


@dataclass(frozen=True, kw_only=True)
class NetworkAnswer:
    """All links, and the base."""

    arms: Mapping[str, Arm]
    rows: tuple[LinkRow, ...]

    @property
    def reference(self) -> LinkRow | None:
        """What links are compared with: the ranks inside one host, where they were measured."""
        return next((row for row in self.rows if row.link.is_inside and row.is_measured), None)

    @property
    def inside(self) -> Arm | None:
        """The training inside one host."""
        return self.reference.arm if self.reference else None

    def compare_communication(self, row: LinkRow) -> Estimate | float | None:
        """Communication over the link, over that inside one host."""
        if self.reference is None or row is self.reference:
            return None if self.reference is None or self.reference.traced(read_communication) is None else 1.0
        above, below = row.traced(read_communication), self.reference.traced(read_communication)
        if above is None or below is None or not _are_positive(above) or not _are_positive(below):
            return None
        return estimate_ratio(above, below)


def read_answer(links: Sequence[Link], results: Sequence[TrialResult], warmup: int | None) -> NetworkAnswer:
    """Everything that results say so far."""
    arms = group_arms([result for result in results if not isinstance(result.trial.task, Exchange)], warmup)
    series = group_transfers(results)
    rows = [LinkRow(link=x, arm=arms.get(x.name), series=series.get(name_exchange(x.name))) for x in links]
    return NetworkAnswer(arms=arms, rows=tuple(rows))


def name_exchange(link: str) -> str:
    """The configuration of the all-reduces alone over a link."""
    return f"{link}-alone"


def read_communication(step: TracedStep) -> float:
    """Seconds with at least one collective in flight."""
    return NANOSECONDS * (step.exposed_ns + step.overlapped_ns)


def read_share(step: TracedStep) -> float | None:
    """Communication over the profiled step."""
    return (step.exposed_ns + step.overlapped_ns) / step.span_ns if step.span_ns else None


def read_device_share(step: TracedStep) -> float | None:
    """Communication over all that ran on the device, computation and communication, each counted where both did."""
    communication = step.exposed_ns + step.overlapped_ns
    busy = communication + step.compute_ns
    return communication / busy if busy else None


def read_latency(step: TracedStep) -> float | None:
    """The mean time of one collective on this rank, waiting included: of those that all ranks' traces hold.

    Where waiting cannot be separated from transfer, of all of this rank's.
    """
    if step.transfer_ns is None or step.waiting_ns is None:
        spent, count = step.exposed_ns + step.overlapped_ns, step.num_collectives
    else:
        spent = step.transfer_ns + step.waiting_ns
        count = step.num_collectives if step.num_matched is None else step.num_matched
    return NANOSECONDS * spent / count if count else None


def read_transfer(step: TracedStep) -> float | None:
    return None if step.transfer_ns is None else NANOSECONDS * step.transfer_ns


def read_waiting(step: TracedStep) -> float | None:
    return None if step.waiting_ns is None else NANOSECONDS * step.waiting_ns


def _average_steps(result: TrialResult, read: ReadStep) -> list[float]:
    ranks = [report.traced_steps for report in result.ranks]
    if len(ranks) < result.trial.num_processes or len({len(steps) for steps in ranks}) != 1:
        return []
    found = []
    for steps in zip(*ranks, strict=True):
        values = [value for step in steps if (value := read(step)) is not None]
        if len(values) == len(steps):
            found.append(sum(values) / len(values))
    return found


def _are_positive(rounds: Rounds) -> bool:
    """Whether they can be compared as ratios."""
    return all(value > 0 for steps in rounds for value in steps)

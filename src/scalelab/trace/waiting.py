"""Which rank waited for which, from matched collectives; and collectives by kind: count, size, time, bandwidth.

Bandwidth is bytes over time, summed over the collectives of known size (formulas: `analysis/traffic.py`). There
are two times. A rank's own time includes waiting for the others: it is what the training run pays. The transfer, the
shortest time of any rank, is what the network needs; it is known if the traces of several ranks were matched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from scalelab.analysis.traffic import KINDS, POINT_TO_POINT, bus_factor
from scalelab.trace.collectives import Collective
from scalelab.trace.matching import MatchedGroup, Matching
from scalelab.trace.rank_trace import RankTrace


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """How one rank came to the collectives that it shares with others."""

    rank: int
    num_collectives: int
    transfer_ns: int
    """Added up over its matched collectives."""
    waiting_ns: int
    """What it waited in them for others."""
    num_last: int = 0
    """How often it was surely the last to come."""
    median_late_ns: int | None = None
    """Of those times: how long after the median of the others' arrivals."""
    max_late_ns: int | None = None
    waited_for_ns: int = 0
    """Of those times: the waiting of all others together, from each one's arrival to this rank's."""


@dataclass(frozen=True, kw_only=True)
class JobArrivals:
    """The ranks side by side."""

    by_rank: tuple[Arrivals, ...]
    num_matched: int
    """Collectives that were matched."""
    num_unclear: int
    """Those in which the last two came closer together than the clocks are certain."""

    @property
    def last(self) -> Arrivals | None:
        """The rank that the others waited for longest; None if no rank was ever certainly last."""
        most = max(self.by_rank, key=lambda arrivals: arrivals.waited_for_ns, default=None)
        return most if most is not None and most.num_last else None


@dataclass
class _Tally:
    num_collectives: int = 0
    transfer_ns: int = 0
    waiting_ns: int = 0
    late_ns: list[int] = field(default_factory=list)
    waited_for_ns: int = 0


def find_arrivals(matching: Matching) -> JobArrivals:
    """Who waited, and for whom."""
    tallies: dict[int, _Tally] = {}
    num_unclear = 0
    for group in matching.groups:
        uncertainty = max(matching.clocks[rank].uncertainty_ns for rank in group.ranks)
        waiting, transfer = group.waiting_ns, group.transfer_ns
        for column, rank in enumerate(group.ranks):
            tally = tallies.setdefault(rank, _Tally())
            tally.num_collectives += len(group)
            tally.transfer_ns += int(transfer.sum())
            tally.waiting_ns += int(waiting[:, column].sum())
        num_unclear += _tally_last(group, uncertainty, tallies)
    ranks = [_conclude(rank, tally) for rank, tally in sorted(tallies.items())]
    return JobArrivals(by_rank=tuple(ranks), num_matched=matching.num_matched, num_unclear=num_unclear)


def _tally_last(group: MatchedGroup, uncertainty_ns: int, tallies: dict[int, _Tally]) -> int:
    """Count which rank was last, and return the number of undecided collectives."""
    if not len(group):
        return 0
    ordered = np.sort(group.start_ns, axis=1)
    last = group.start_ns.argmax(axis=1)
    is_clear = ordered[:, -1] - ordered[:, -2] > uncertainty_ns
    # Medians of small differences: a double does not hold nanoseconds since 1970.
    behind = ordered[:, -1:] - ordered[:, :-1]
    for row in np.flatnonzero(is_clear):
        tally = tallies[group.ranks[last[row]]]
        tally.late_ns.append(round(float(np.median(behind[row]))))
        tally.waited_for_ns += int(behind[row].sum())
    return int((~is_clear).sum())


def _conclude(rank: int, tally: _Tally) -> Arrivals:
    return Arrivals(
        rank=rank,
        num_collectives=tally.num_collectives,
        transfer_ns=tally.transfer_ns,
        waiting_ns=tally.waiting_ns,
        num_last=len(tally.late_ns),
        median_late_ns=round(float(np.median(tally.late_ns))) if tally.late_ns else None,
        max_late_ns=max(tally.late_ns, default=None),
        waited_for_ns=tally.waited_for_ns,
    )


def select_steps(matching: Matching, ranks: Mapping[int, RankTrace], steps: Set[int]) -> Matching:
    """The matched collectives of these steps, by the first rank of each group."""
    groups = []
    for group in matching.groups:
        numbers = ranks[group.ranks[0]].collectives.step_numbers[group.places[:, 0]].tolist()
        rows = [row for row, step in enumerate(numbers) if step in steps]
        if rows:
            groups.append(group.pick(rows))
    return replace(matching, groups=tuple(groups))


ALIASES = {"send_recv": POINT_TO_POINT}


@dataclass(frozen=True, kw_only=True)
class KindSummary:
    """All collectives of one kind."""

    kind: str
    ran_as: str = ""
    """What was really run where it is another kind."""
    is_beside: bool = False
    """Whether the host ran them, beside the collectives of a device."""
    count: int
    num_sized: int
    """Those whose size is known."""
    payload_bytes: int | None
    """Of those, together; None: of none."""
    group_sizes: tuple[int, ...]
    """The sizes of the groups that they ran in, as far as known."""
    total_ns: int
    mean_ns: float
    p95_ns: float
    max_ns: int
    algorithm_bandwidth: float | None
    """Bytes per second; None if no size is known, or no time passed."""
    bus_bandwidth: float | None
    """The same; None also where the size of the group is not known."""


@dataclass
class _KindTally:
    times_ns: list[int] = field(default_factory=list)
    num_sized: int = 0
    payload_bytes: int = 0
    sized_ns: int = 0
    bus_bytes: float = 0.0
    bus_ns: int = 0
    group_sizes: set[int] = field(default_factory=set)

    def add(self, kind: str, nanoseconds: int, payload_bytes: int | None, group_size: int | None) -> None:
        self.times_ns.append(nanoseconds)
        if group_size is not None:
            self.group_sizes.add(group_size)
        if payload_bytes is None:
            return
        self.num_sized += 1
        self.payload_bytes += payload_bytes
        self.sized_ns += nanoseconds
        known = ALIASES.get(kind, kind)
        if known in KINDS and group_size is not None:
            self.bus_bytes += payload_bytes * bus_factor(known, group_size)
            self.bus_ns += nanoseconds

    def conclude(self, kind: str, ran_as: str) -> KindSummary:
        times = np.array(self.times_ns, dtype=np.int64)
        return KindSummary(
            kind=kind,
            ran_as=ran_as,
            count=len(times),
            num_sized=self.num_sized,
            payload_bytes=self.payload_bytes if self.num_sized else None,
            group_sizes=tuple(sorted(self.group_sizes)),
            total_ns=int(times.sum()),
            mean_ns=float(times.mean()),
            p95_ns=find_quantile(times, 0.95),
            max_ns=int(times.max()),
            algorithm_bandwidth=_divide(self.payload_bytes, self.sized_ns) if self.num_sized else None,
            bus_bandwidth=_divide(self.bus_bytes, self.bus_ns),
        )


def summarise_kinds(collectives: Iterable[Collective]) -> list[KindSummary]:
    """By kind, the most time first; of one rank, or of several together. The host's come after those of devices."""
    tallies: dict[bool, dict[tuple[str, str], _KindTally]] = {True: {}, False: {}}
    for collective in collectives:
        own = tallies[collective.on_device]
        tally = own.setdefault((collective.kind, collective.ran_as), _KindTally())
        length = collective.end_ns - collective.start_ns
        tally.add(collective.kind, length, collective.payload_bytes, collective.group_size)
    beside = [replace(one, is_beside=bool(tallies[True])) for one in _summarise(tallies[False])]
    return [*_summarise(tallies[True]), *beside]


def summarise_transfers(matching: Matching) -> list[KindSummary]:
    """The same of matched collectives, each counted once, with the shortest time of any rank."""
    tallies: dict[tuple[str, str], _KindTally] = {}
    for group in matching.groups:
        for kind, payload_bytes, transfer in zip(group.kinds, group.payload_bytes, group.transfer_ns, strict=True):
            tally = tallies.setdefault((kind, ""), _KindTally())
            tally.add(kind, int(transfer), payload_bytes, group.group_size)
    return _summarise(tallies)


def find_quantile(values: NDArray[np.int64], share: float) -> float:
    """As `np.quantile`, which loads numpy's masked arrays; between two values linear."""
    place, ordered = share * (len(values) - 1), np.sort(values)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (place - low))


def _summarise(tallies: dict[tuple[str, str], _KindTally]) -> list[KindSummary]:
    found = [tally.conclude(*key) for key, tally in tallies.items()]
    return sorted(found, key=lambda summary: -summary.total_ns)


def _divide(num_bytes: float, nanoseconds: int) -> float | None:
    return num_bytes / (nanoseconds / 1e9) if nanoseconds > 0 else None

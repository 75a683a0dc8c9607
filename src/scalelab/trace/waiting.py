"""Who waited and who was waited for, from matched collectives: by rank, and by rank and step."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

import numpy as np

from scalelab.trace.matching import MatchedGroup, Matching, find_steps
from scalelab.trace.rank import RankTrace


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
        """The rank that the others waited for longest; None where nobody ever surely was the last."""
        most = max(self.by_rank, key=lambda arrivals: arrivals.waited_for_ns, default=None)
        return most if most is not None and most.num_last else None


@dataclass
class _Tally:
    num_collectives: int = 0
    transfer_ns: int = 0
    waiting_ns: int = 0
    late_ns: list[int] = field(default_factory=list)
    waited_for_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class StepWaiting:
    """What one rank's matched collectives that begin in one step took."""

    num_collectives: int = 0
    transfer_ns: int = 0
    waiting_ns: int = 0


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
    """Add up who came last, and give the number of collectives of which that cannot be said."""
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
    """The matched collectives that begin in these steps, by the first rank of each group."""
    groups = []
    for group in matching.groups:
        trace = ranks[group.ranks[0]]
        starts = [int(start) for start in trace.collectives.start_ns[group.places[:, 0]]]
        rows = [row for row, step in enumerate(find_steps(trace.tables.steps, starts)) if step in steps]
        if rows:
            groups.append(group.pick(rows))
    return replace(matching, groups=tuple(groups))


def sum_by_step(matching: Matching, ranks: Mapping[int, RankTrace]) -> dict[int, dict[int, StepWaiting]]:
    """Transfer and waiting by rank and step; a collective counts in the step in which it begins on the rank."""
    found: dict[int, dict[int, StepWaiting]] = {rank: {} for rank in ranks}
    for group in matching.groups:
        for column, rank in enumerate(group.ranks):
            trace = ranks[rank]
            places = group.places[:, column]
            starts = [int(start) for start in trace.collectives.start_ns[places]]
            steps = find_steps(trace.tables.steps, starts)
            for step, transfer, waiting in zip(steps, group.transfer_ns, group.waiting_ns[:, column], strict=True):
                if step is not None:
                    known = found[rank].get(step, StepWaiting())
                    found[rank][step] = StepWaiting(
                        num_collectives=known.num_collectives + 1,
                        transfer_ns=known.transfer_ns + int(transfer),
                        waiting_ns=known.waiting_ns + int(waiting),
                    )
    return found

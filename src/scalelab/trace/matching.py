"""The same collective in the traces of several ranks, and which rank waited in it.

The k-th collective of a group is the same on all its ranks. If torch numbered them, the number decides; otherwise kind,
size, order and time do (`pairing.py`). Collectives in one trace only are counted and left out. A send and its receive
are matched if torch's annotation says between which ranks they run; other point-to-point kernels only if all ranks of
their group leave them together, as in an all-to-all.

A collective whose group is not recorded may fit several (`alignment.py`): the one whose ranks leave it together
is taken.

In a matched collective

    transfer   the shortest time of any rank: that of the last rank, which found all others there
    waiting    the time of a rank beyond that

so waiting needs no common clock. The last rank does (see `alignment.py`): it is the one with the latest start, or
none if the next one is closer than the clock error. On a device, a collective begins with its kernel; with gloo, when
one of its threads starts it, which may be later than the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from scalelab.trace.alignment import (
    ENDS_TOGETHER,
    POINT_TO_POINT,
    Clock,
    GroupFinder,
    GroupKey,
    agree_on_keys,
    set_clock,
)
from scalelab.trace.collectives import Collective
from scalelab.trace.pairing import Ends, Pairing, measure_agreement, pair_ends
from scalelab.trace.rank_trace import RankTrace

Times = NDArray[np.int64]

SIZED_BY_RANK = ("all_to_all",)
"""Collectives in which ranks may send different amounts, as experts do: sizes do not identify them."""
FEWEST_AGREEING = 0.8
"""Kernels whose group or nature is inferred are matched only if this share of them ends together on all ranks."""
FEWEST_CONFIRMING = 3
"""Fewer ends coincide by chance."""
LARGEST_BASE_NS = 2**62
"""Clocks that count from 1970 get there in 2116."""


@dataclass(frozen=True, kw_only=True)
class MatchedGroup:
    """The matched collectives of one process group: one row each, one column per rank."""

    name: str
    """Of the process group; empty: unknown."""
    ranks: tuple[int, ...]
    """Those with a trace."""
    group_size: int | None
    """All of them, where known."""
    sender: int | None
    """Of transfers between two ranks: who sends, and need not wait for its end."""
    kinds: tuple[str, ...]
    payload_bytes: tuple[int | None, ...]
    places: Times
    """Where each stands among the collectives of its rank."""
    start_ns: Times
    """On the clock of the reference."""
    end_ns: Times
    duration_ns: Times
    """On the rank's own clock."""

    def __len__(self) -> int:
        return len(self.kinds)

    def pick(self, rows: Sequence[int]) -> MatchedGroup:
        """Only these of its collectives."""
        names = ("places", "start_ns", "end_ns", "duration_ns")
        return replace(
            self,
            kinds=tuple(self.kinds[row] for row in rows),
            payload_bytes=tuple(self.payload_bytes[row] for row in rows),
            **{name: getattr(self, name)[list(rows)] for name in names},
        )

    @property
    def transfer_ns(self) -> Times:
        """The shortest time of any rank, one by one."""
        found: Times = self.duration_ns.min(axis=1)
        return found

    @property
    def waiting_ns(self) -> Times:
        """What each rank spent beyond that."""
        found: Times = self.duration_ns - self.duration_ns.min(axis=1, keepdims=True)
        return found


@dataclass(frozen=True, kw_only=True)
class Matching:
    """What the traces of several ranks have in common."""

    groups: tuple[MatchedGroup, ...] = ()
    clocks: Mapping[int, Clock]
    num_unmatched: Mapping[int, int]
    """Collectives of several ranks that not every trace of the group holds, by rank."""
    num_point_to_point: int = 0
    """Sends and receipts of all ranks that are not matched."""
    num_inferred: Mapping[int, int] = field(default_factory=dict)
    """Matched collectives whose group is not recorded, by rank."""
    certainty: float = 1.0
    """Of the least certain pairing: 0 if another one fits as well (`pairing.py`)."""
    uncertain: tuple[tuple[int, int], ...] = ()
    """Pairs of ranks whose collectives could be paired in another way as well."""

    @property
    def num_matched(self) -> int:
        return sum(len(group) for group in self.groups)

    @property
    def uncertainty_ns(self) -> int:
        """Of the worst clock."""
        return max((clock.uncertainty_ns for clock in self.clocks.values()), default=0)


@dataclass(frozen=True)
class _GroupLane:
    """The collectives of one group on one rank, in order."""

    trace: RankTrace
    places: list[int]
    collectives: list[Collective]

    @property
    def base_ns(self) -> int:
        """The offset of all times in the file; 0 if it is not a plausible clock reading."""
        base = self.trace.header.base_ns
        return base if abs(base) < LARGEST_BASE_NS else 0

    @property
    def ends(self) -> Times:
        return np.array([c.end_ns for c in self.collectives], dtype=np.int64) + self.base_ns

    @property
    def starts(self) -> Times:
        return np.array([c.start_ns for c in self.collectives], dtype=np.int64) + self.base_ns

    @property
    def pairable(self) -> Ends:
        found = self.collectives
        return Ends(
            keys=[(name_kind(c), None if c.kind in SIZED_BY_RANK else c.payload_bytes) for c in found],
            steps=[c.step for c in found],
            ends=self.ends,
            is_together=np.array([c.kind in ENDS_TOGETHER for c in found], dtype=np.bool_),
            is_exact=all(c.on_device for c in found),
        )


def name_kind(collective: Collective) -> str:
    """Both ends of a transfer have one name."""
    return "send_recv" if collective.kind in POINT_TO_POINT else collective.kind


@dataclass(frozen=True)
class _Matched:
    """The lanes of one key and the places in them that belong together."""

    key: GroupKey
    lanes: Mapping[int, _GroupLane]
    table: Times
    uncertain: Sequence[tuple[int, int]] = ()
    certainty: float = 1.0
    agreement: float = 1.0


def match_collectives(ranks: Mapping[int, RankTrace]) -> Matching:
    """Match the collectives of the traces of one job, by rank."""
    lanes = _sort_into_lanes(ranks)
    hosts = {rank: trace.header.host_name for rank, trace in ranks.items()}
    found = [_match_lanes(key, lanes[key], hosts) for key in sorted(lanes) if _is_one_group(lanes[key])]
    found = _confirm(found)
    clocks = _set_clocks(ranks, [(one.lanes, one.table) for one in found])
    groups = tuple(_make_group(one.key, one.lanes, one.table, clocks) for one in found if len(one.table))
    matched, transfers = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
    inferred = dict.fromkeys(ranks, 0)
    for one in found:
        for column, (rank, lane) in enumerate(one.lanes.items()):
            kinds = [lane.collectives[place].kind for place in one.table[:, column]]
            matched[rank] += sum(kind not in POINT_TO_POINT for kind in kinds)
            transfers[rank] += sum(kind in POINT_TO_POINT for kind in kinds)
            inferred[rank] += sum(not lane.collectives[place].group for place in one.table[:, column])
    listed = {rank: [c for c in trace.collectives if c.group_size != 1] for rank, trace in ranks.items()}
    alone = {rank: sum(c.kind not in POINT_TO_POINT for c in listed[rank]) - matched[rank] for rank in ranks}
    return Matching(
        groups=groups,
        clocks=clocks,
        num_unmatched=alone,
        num_point_to_point=sum(c.kind in POINT_TO_POINT for one in listed.values() for c in one)
        - sum(transfers.values()),
        num_inferred=inferred,
        certainty=min((one.certainty for one in found), default=1.0),
        uncertain=tuple(pair for one in found for pair in one.uncertain),
    )


def _confirm(found: Sequence[_Matched]) -> list[_Matched]:
    """What was recorded, and of what was inferred the answers that time confirms, each collective once."""
    kept = [one for one in found if not one.key.is_inferred]
    taken: set[tuple[int, int]] = set()
    inferred = [one for one in found if one.key.is_inferred and len(one.table)]
    for one in sorted(inferred, key=lambda one: (-round(one.agreement * one.table.size), one.key)):
        places = {
            (rank, lane.places[place])
            for column, (rank, lane) in enumerate(one.lanes.items())
            for place in one.table[:, column]
        }
        is_confirmed = len(one.table) >= FEWEST_CONFIRMING or len(one.key.members) == 2
        if is_confirmed and one.agreement >= FEWEST_AGREEING and not places & taken:
            kept.append(one)
            taken |= places
    return kept


def _sort_into_lanes(ranks: Mapping[int, RankTrace]) -> dict[GroupKey, dict[int, _GroupLane]]:
    """The collectives by group and rank; one whose group is not recorded may stand in several."""
    keyed: list[tuple[GroupKey, int, int, Collective]] = []
    for rank, trace in sorted(ranks.items()):
        finder = GroupFinder(rank, trace)
        keyed += [
            (key, rank, place, collective)
            for place, collective in enumerate(trace.collectives)
            if collective.group_size != 1
            for key in finder.list_keys(collective)
        ]
    agreed = agree_on_keys({key for key, *_ in keyed})
    lanes: dict[GroupKey, dict[int, _GroupLane]] = {}
    for key, rank, place, collective in keyed:
        lane = lanes.setdefault(agreed[key], {}).setdefault(rank, _GroupLane(ranks[rank], [], []))
        lane.places.append(place)
        lane.collectives.append(collective)
    return lanes


def _is_one_group(lanes: Mapping[int, _GroupLane]) -> bool:
    """Whether these ranks may share a group; more than it has are several groups of one name, in old traces."""
    size = next(iter(lanes.values())).collectives[0].group_size
    return 1 < len(lanes) <= (size or len(lanes))


def _match_lanes(key: GroupKey, lanes: Mapping[int, _GroupLane], hosts: Mapping[int, str]) -> _Matched:
    """Which collectives belong together: one row each, places in the lanes in columns."""
    (first_rank, first), *others = lanes.items()
    table = {place: [place] for place in range(len(first.collectives))}
    pairings: dict[int, Pairing] = {}
    for rank, lane in others:
        is_same_clock = bool(hosts[rank]) and hosts[rank] == hosts[first_rank]
        pairings[rank] = _match_pair(first, lane, is_same_clock=is_same_clock)
        pairs = dict(pairings[rank].pairs.tolist())
        table = {place: [*row, pairs[place]] for place, row in table.items() if place in pairs}
    return _Matched(
        key=key,
        lanes=lanes,
        table=np.array(list(table.values()), dtype=np.int64).reshape(-1, len(lanes)),
        uncertain=[(first_rank, rank) for rank, pairing in pairings.items() if pairing.certainty < 1],
        certainty=min(pairing.certainty for pairing in pairings.values()),
        agreement=min(pairing.agreement for pairing in pairings.values()),
    )


def _match_pair(left: _GroupLane, right: _GroupLane, *, is_same_clock: bool) -> Pairing:
    both = (*left.collectives, *right.collectives)
    if all(c.sequence is not None and c.kind not in POINT_TO_POINT for c in both):  # a rank numbers those to all peers
        pairs = _match_by_sequence(left.collectives, right.collectives)
        return Pairing(pairs, agreement=measure_agreement(left.ends[pairs[:, 0]], right.ends[pairs[:, 1]]))
    return pair_ends(left.pairable, right.pairable, is_same_clock=is_same_clock)


def _match_by_sequence(left: Sequence[Collective], right: Sequence[Collective]) -> NDArray[np.intp]:
    """By number; several kernels of one call have one number, and keep their order."""
    places = {key: place for place, key in enumerate(_number(right))}
    pairs = [(place, places[key]) for place, key in enumerate(_number(left)) if key in places]
    found = [(i, j) for i, j in pairs if name_kind(left[i]) == name_kind(right[j])]
    return np.array(found, dtype=np.intp).reshape(-1, 2)


def _number(collectives: Sequence[Collective]) -> Iterator[tuple[int | None, int]]:
    seen: dict[int | None, int] = {}
    for collective in collectives:
        seen[collective.sequence] = seen.get(collective.sequence, 0) + 1
        yield collective.sequence, seen[collective.sequence]


def _set_clocks(
    ranks: Mapping[int, RankTrace], groups: Sequence[tuple[Mapping[int, _GroupLane], Times]]
) -> dict[int, Clock]:
    """Every rank's clock; a rank that shares no collective with those before it begins a reference of its own."""
    clocks: dict[int, Clock] = {}
    for rank in sorted(ranks):
        if rank in clocks:
            continue
        clocks[rank] = Clock(rank=rank, reference=rank)
        waiting = [rank]
        while waiting:
            known = waiting.pop()
            for other in sorted(ranks):
                ends = _collect_ends(known, other, groups) if other not in clocks else None
                if ends is not None:
                    clocks[other] = _set_against(clocks[known], other, *ends, ranks)
                    waiting.append(other)
    return clocks


def _set_against(
    known: Clock, rank: int, ends: Times, known_ends: Times, is_loose: bool, ranks: Mapping[int, RankTrace]
) -> Clock:
    hosts = {ranks[one].header.host_name for one in (rank, known.rank)}
    is_same_host = len(hosts) == 1 and "" not in hosts
    clock = set_clock(rank, known.reference, ends, known.correct(known_ends), is_same_host=is_same_host)
    return replace(clock, is_loose=is_loose or known.is_loose)


def _collect_ends(
    known: int, other: int, groups: Sequence[tuple[Mapping[int, _GroupLane], Times]]
) -> tuple[Times, Times, bool] | None:
    """When the collectives of two ranks ended on each: those that end together; with True others, for want of them."""
    found: dict[bool, list[tuple[Times, Times]]] = {True: [], False: []}
    for lanes, table in groups:
        if known in lanes and other in lanes and len(table):
            columns = {rank: table[:, index] for index, rank in enumerate(lanes)}
            kinds = [lanes[known].collectives[place].kind in ENDS_TOGETHER for place in columns[known]]
            ends = lanes[other].ends[columns[other]], lanes[known].ends[columns[known]]
            for is_together in (True, False):
                is_chosen = np.array(kinds, dtype=bool) == is_together
                if is_chosen.any():
                    found[is_together].append((ends[0][is_chosen], ends[1][is_chosen]))
    chosen = found[True] or found[False]
    if not chosen:
        return None
    others, knowns = (np.concatenate([pair[place] for pair in chosen]) for place in (0, 1))
    return others, knowns, not found[True]


def _make_group(
    key: GroupKey, lanes: Mapping[int, _GroupLane], table: Times, clocks: Mapping[int, Clock]
) -> MatchedGroup:
    first = next(iter(lanes.values()))
    columns = [(rank, lane, table[:, index]) for index, (rank, lane) in enumerate(lanes.items())]
    return MatchedGroup(
        name=key.name,
        ranks=tuple(lanes),
        group_size=first.collectives[0].group_size,
        sender=key.members[0] if key.is_transfer else None,
        kinds=tuple(name_kind(first.collectives[place]) for place in table[:, 0]),
        payload_bytes=tuple(first.collectives[place].payload_bytes for place in table[:, 0]),
        places=np.stack([np.array(lane.places, dtype=np.int64)[places] for _, lane, places in columns], axis=1),
        start_ns=np.stack([clocks[rank].correct(lane.starts[places]) for rank, lane, places in columns], axis=1),
        end_ns=np.stack([clocks[rank].correct(lane.ends[places]) for rank, lane, places in columns], axis=1),
        duration_ns=np.stack([(lane.ends - lane.starts)[places] for _, lane, places in columns], axis=1),
    )


@dataclass(frozen=True, kw_only=True)
class StepWaiting:
    """What one rank's matched collectives of one step took."""

    num_collectives: int = 0
    transfer_ns: int = 0
    waiting_ns: int = 0


def sum_by_step(matching: Matching, ranks: Mapping[int, RankTrace]) -> dict[int, dict[int, StepWaiting]]:
    """Transfer and waiting by rank and step; a collective counts in its step on the rank."""
    found: dict[int, dict[int, StepWaiting]] = {rank: {} for rank in ranks}
    for group in matching.groups:
        for column, rank in enumerate(group.ranks):
            steps = ranks[rank].collectives.step_numbers[group.places[:, column]].tolist()
            for step, transfer, waiting in zip(steps, group.transfer_ns, group.waiting_ns[:, column], strict=True):
                if step >= 0:
                    known = found[rank].get(step, StepWaiting())
                    found[rank][step] = StepWaiting(
                        num_collectives=known.num_collectives + 1,
                        transfer_ns=known.transfer_ns + int(transfer),
                        waiting_ns=known.waiting_ns + int(waiting),
                    )
    return found

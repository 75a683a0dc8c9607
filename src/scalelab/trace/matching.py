"""The same collective in the traces of several ranks, and which rank waited in it.

The k-th collective of a group is the same on all its ranks. If torch numbered them, the number decides; otherwise the
order does, and if one trace lacks some, the longest common list of kinds and sizes (step by step if steps are known).
Of several equally long lists, the one whose ends agree best in time is taken. Collectives in one trace only are
counted and left out, and so is point-to-point communication, whose other end is not recorded.

In a matched collective

    transfer   the shortest time of any rank: that of the last rank, which found all others there
    waiting    the time of a rank beyond that

so waiting needs no common clock. The last rank does (see `clocks.py`): it is the one with the latest start, or none if
the next one is closer than the clock error. On a device, a collective begins with its kernel; with gloo, when one of
its threads starts it, which may be later than the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from scalelab.trace.clocks import ENDS_TOGETHER, Clock, Pairs, align_from_end, align_lists, measure_spread, set_clock
from scalelab.trace.collectives import Collective
from scalelab.trace.rank_trace import RankTrace
from scalelab.trace.windows import ProfilerStep

Times = NDArray[np.int64]

POINT_TO_POINT = ("send", "recv", "send_recv")
SIZED_BY_RANK = ("all_to_all",)
"""Collectives in which ranks may send different amounts, as experts do: sizes do not identify them."""
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
    """Sends and receipts of all ranks, which are not matched."""

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

    def list_keys(self, *, with_steps: bool) -> list[tuple[object, ...]]:
        steps = find_steps(self.trace.tables.steps, [c.start_ns for c in self.collectives]) if with_steps else None
        numbers = steps if steps is not None else [None] * len(self.collectives)
        return [
            (c.kind, None if c.kind in SIZED_BY_RANK else c.payload_bytes, step)
            for c, step in zip(self.collectives, numbers, strict=True)
        ]


_Key = tuple[str, tuple[int, ...], bool]


def match_collectives(ranks: Mapping[int, RankTrace]) -> Matching:
    """Match the collectives of the traces of one job, by rank."""
    lanes, num_point_to_point = _sort_into_lanes(ranks)
    found = [(key, lanes[key], _match_lanes(lanes[key])) for key in sorted(lanes) if _is_one_group(lanes[key])]
    clocks = _set_clocks(ranks, [(group, table) for _, group, table in found])
    groups = tuple(_make_group(key[0], group, table, clocks) for key, group, table in found if len(table))
    matched = dict.fromkeys(ranks, 0)
    for group in groups:
        for rank in group.ranks:
            matched[rank] += len(group)
    collective = {
        rank: sum(c.kind not in POINT_TO_POINT and c.group_size != 1 for c in trace.collectives) - matched[rank]
        for rank, trace in ranks.items()
    }
    return Matching(groups=groups, clocks=clocks, num_unmatched=collective, num_point_to_point=num_point_to_point)


def _sort_into_lanes(ranks: Mapping[int, RankTrace]) -> tuple[dict[_Key, dict[int, _GroupLane]], int]:
    """The collectives by group and rank, and how many have none because they are point-to-point."""
    lanes: dict[_Key, dict[int, _GroupLane]] = {}
    num_point_to_point = 0
    for rank, trace in sorted(ranks.items()):
        members = list_members(trace)
        for place, collective in enumerate(trace.collectives):
            if collective.kind in POINT_TO_POINT:
                num_point_to_point += 1
            elif collective.group_size != 1 and (collective.group or len(members) < 2):
                key = (collective.group, members.get(collective.group, ()), collective.on_device)
                lane = lanes.setdefault(key, {}).setdefault(rank, _GroupLane(trace, [], []))
                lane.places.append(place)
                lane.collectives.append(collective)
    return lanes, num_point_to_point


def list_members(trace: RankTrace) -> dict[str, tuple[int, ...]]:
    """The ranks of every group, by name, as the header lists them."""
    distributed = trace.header.distributed
    return {group.pg_name: tuple(group.ranks) for group in distributed.pg_config} if distributed else {}


def _is_one_group(lanes: Mapping[int, _GroupLane]) -> bool:
    """Whether these ranks may share a group; more than it has are several groups of one name, in old traces."""
    size = next(iter(lanes.values())).collectives[0].group_size
    return 1 < len(lanes) <= (size or len(lanes))


def _match_lanes(lanes: Mapping[int, _GroupLane]) -> Times:
    """Which collectives belong together: one row each, places in the lanes in columns."""
    first, *others = lanes.values()
    table = {place: [place] for place in range(len(first.collectives))}
    for lane in others:
        pairs = dict(_match_pair(first, lane))
        table = {place: [*row, pairs[place]] for place, row in table.items() if place in pairs}
    return np.array(list(table.values()), dtype=np.int64).reshape(-1, len(lanes))


def _match_pair(left: _GroupLane, right: _GroupLane) -> Pairs:
    if all(c.sequence is not None for c in (*left.collectives, *right.collectives)):
        return _match_by_sequence(left.collectives, right.collectives)
    keys = left.list_keys(with_steps=False), right.list_keys(with_steps=False)
    if keys[0] == keys[1]:
        return [(place, place) for place in range(len(keys[0]))]
    by_step = left.list_keys(with_steps=True), right.list_keys(with_steps=True)
    candidates = [align(*pair) for pair in (by_step, keys) for align in (align_lists, align_from_end)]
    most = max(len(pairs) for pairs in candidates)
    # Steps may be numbered differently; but where they are not, they are a better guide than length.
    if 2 * max(map(len, candidates[:2])) >= most:
        candidates = candidates[:2]
    most = max(len(pairs) for pairs in candidates)
    longest = [pairs for pairs in candidates if len(pairs) == most]
    return min(longest, key=lambda pairs: _measure_disagreement(left, right, pairs))


def _match_by_sequence(left: Sequence[Collective], right: Sequence[Collective]) -> Pairs:
    """By number; several kernels of one call have one number, and keep their order."""
    places = {key: place for place, key in enumerate(_number(right))}
    pairs = [(place, places[key]) for place, key in enumerate(_number(left)) if key in places]
    return [(i, j) for i, j in pairs if left[i].kind == right[j].kind]


def _number(collectives: Sequence[Collective]) -> Iterator[tuple[int | None, int]]:
    seen: dict[int | None, int] = {}
    for collective in collectives:
        seen[collective.sequence] = seen.get(collective.sequence, 0) + 1
        yield collective.sequence, seen[collective.sequence]


def _measure_disagreement(left: _GroupLane, right: _GroupLane, pairs: Pairs) -> float:
    """How far apart the ends of paired collectives lie, a constant difference of clocks aside."""
    if not pairs:
        return 0.0
    i, j = np.array(pairs, dtype=np.int64).T
    return measure_spread((left.ends[i] - right.ends[j]).astype(np.float64))


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


def _make_group(name: str, lanes: Mapping[int, _GroupLane], table: Times, clocks: Mapping[int, Clock]) -> MatchedGroup:
    first = next(iter(lanes.values()))
    columns = [(rank, lane, table[:, index]) for index, (rank, lane) in enumerate(lanes.items())]
    return MatchedGroup(
        name=name,
        ranks=tuple(lanes),
        group_size=first.collectives[0].group_size,
        kinds=tuple(first.collectives[place].kind for place in table[:, 0]),
        payload_bytes=tuple(first.collectives[place].payload_bytes for place in table[:, 0]),
        places=np.stack([np.array(lane.places, dtype=np.int64)[places] for _, lane, places in columns], axis=1),
        start_ns=np.stack([clocks[rank].correct(lane.starts[places]) for rank, lane, places in columns], axis=1),
        end_ns=np.stack([clocks[rank].correct(lane.ends[places]) for rank, lane, places in columns], axis=1),
        duration_ns=np.stack([(lane.ends - lane.starts)[places] for _, lane, places in columns], axis=1),
    )


def find_steps(steps: Sequence[ProfilerStep], starts: Sequence[int]) -> list[int | None]:
    """The step in which each begins; None: in none."""
    if not steps:
        return [None] * len(starts)
    places = np.searchsorted([step.start for step in steps], starts, side="right") - 1
    return [
        steps[place].number if place >= 0 and start < steps[place].end else None
        for place, start in zip(places, starts, strict=True)
    ]

"""What brings the traces of several ranks together: clocks, aligned lists of collectives, process groups.

Clocks are aligned by the ends of the collectives that ranks share.

A collective that gives every rank a result ends on all of them at nearly the same time: no rank has the result before
the last piece arrives. So the median difference of two ranks' ends is the offset of their clocks. Clocks of different
hosts also drift: if a line through the differences (slope by Theil 1950 and Sen 1968) leaves less than half the spread
of a constant, the line is used. The remaining spread is the clock error. Ranks of one host share a clock: there, an
offset within the error, or from a single collective, counts as zero.

Lists that differ by missing entries are aligned with the shortest edit script (Myers, "An O(ND) Difference Algorithm
and Its Variations", Algorithmica 1, 1986): fast if little differs, and given up beyond `MOST_DIFFERENCES`.

A collective whose process group is not recorded belongs to the only set of ranks that the header lists, or to that of
the recorded collectives on its stream (NCCL has a stream per group). Otherwise every listed set of its size may be
meant.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from scalelab.trace.collectives import Collective
from scalelab.trace.rank_trace import RankTrace

Times = NDArray[np.int64]

ENDS_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that no rank leaves before all have entered. A broadcast's root may be long gone."""
FEWEST_FOR_LINE = 8
"""Fewer differences fit a line by chance, and seem to spread less than they do."""
MOST_POINTS = 200
"""Differences that a slope is taken from, evenly chosen: their pairs are many."""
LARGEST_DRIFT = 1e-3
"""A clock that runs faster or slower by more is none."""
DEVIATIONS_PER_MEDIAN = 1.4826
"""From the median of absolute deviations to the standard deviation, for normally distributed ones."""


@dataclass(frozen=True, kw_only=True)
class Clock:
    """How one rank's clock is set against the reference's."""

    rank: int
    reference: int
    """The rank whose clock the others are set to; itself: it is the reference."""
    offset_ns: int = 0
    """How far it is ahead, at `origin_ns`."""
    drift: float = 0.0
    """By how much faster it runs: nanoseconds per nanosecond."""
    origin_ns: int = 0
    uncertainty_ns: int = 0
    """Twice the robust standard deviation of the ends' differences after the correction; of a few, the largest."""
    num_collectives: int = 0
    """What it was set by; 0: by the host, whose clock ranks share."""
    is_loose: bool = False
    """Whether it was set by collectives that ranks need not leave together, for want of others."""

    def correct(self, times: Times) -> Times:
        """Times of this rank's trace on the reference's clock."""
        corrected = times - self.offset_ns
        if self.drift:
            corrected = corrected - np.rint(self.drift * (times - self.origin_ns)).astype(np.int64)
        return corrected


def set_clock(rank: int, reference: int, ends: Times, reference_ends: Times, *, is_same_host: bool) -> Clock:
    """The clock of a rank from when the same collectives ended on it and on the reference."""
    differences = ends - reference_ends
    offset, origin = find_offset(differences), int(ends[0])
    rest = (differences - offset).astype(np.float64)
    drift = find_drift(ends, rest)
    if drift:
        bent = rest - drift * (ends - origin)
        offset += round(float(np.median(bent)))
        rest = bent - np.median(bent)
    is_few = len(ends) < FEWEST_FOR_LINE
    uncertainty = round(float(np.abs(rest).max()) if is_few else 2 * measure_spread(rest))
    is_shared = is_same_host and len(ends) == 1  # one end shows no error
    if is_shared or (is_same_host and abs(offset) <= uncertainty):
        offset, drift = 0, 0.0
    return Clock(
        rank=rank,
        reference=reference,
        offset_ns=offset,
        drift=drift,
        origin_ns=origin,
        uncertainty_ns=uncertainty,
        num_collectives=0 if is_shared else len(ends),
    )


def measure_spread(differences: NDArray[np.float64]) -> float:
    """The standard deviation, as the median of absolute deviations shows it: single ones that are far off do not."""
    return DEVIATIONS_PER_MEDIAN * float(np.median(np.abs(differences - np.median(differences))))


def find_offset(differences: Times) -> int:
    """Their median; a double would lose nanoseconds of clocks that are years apart."""
    return int(differences[0]) + round(float(np.median(differences - differences[0])))


def find_drift(times: Times, rest: NDArray[np.float64]) -> float:
    """The slope of a line through what an offset leaves, where it leaves less than half the spread; else 0."""
    if len(times) < FEWEST_FOR_LINE:
        return 0.0
    since = (times - times[0]).astype(np.float64)
    slope = find_slope(since, rest)
    is_better = 2 * measure_spread(rest - slope * since) < measure_spread(rest)
    return slope if abs(slope) < LARGEST_DRIFT and is_better else 0.0


def find_slope(times: NDArray[np.float64], values: NDArray[np.float64]) -> float:
    """The median of the slopes between all pairs of (at most `MOST_POINTS`) points; 0 where no two times differ."""
    chosen = np.unique(np.linspace(0, len(times) - 1, min(len(times), MOST_POINTS)).astype(np.int64))
    left, right = np.triu_indices(len(chosen), k=1)
    apart = times[chosen][right] - times[chosen][left]
    is_apart = apart != 0
    if not is_apart.any():
        return 0.0
    rises = values[chosen][right] - values[chosen][left]
    return float(np.median(rises[is_apart] / apart[is_apart]))


MOST_DIFFERENCES = 1000

Pairs = list[tuple[int, int]]


def align_lists(left: Sequence[Hashable], right: Sequence[Hashable]) -> Pairs:
    """Places in both that hold equal entries, in order; nothing if the lists differ too much.

    Where several answers are as good, entries are paired as early as possible.
    """
    reached = _search(left, right)
    if reached is None:
        return []
    pairs: Pairs = []
    x, y = len(left), len(right)
    for num_differences in range(len(reached) - 1, -1, -1):
        diagonal = x - y
        if num_differences:
            before = reached[num_differences - 1]
            came_down = _comes_down(before, diagonal, num_differences)
            previous = diagonal + 1 if came_down else diagonal - 1
            start_x = before[previous] if came_down else before[previous] + 1
        else:
            previous, start_x = 0, 0
        while x > start_x:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        if num_differences:
            x = before[previous]
            y = x - previous
    return pairs[::-1]


def _comes_down(reached: dict[int, int], diagonal: int, num_differences: int) -> bool:
    """Whether the furthest way to a diagonal skips an entry of the right list, not of the left one."""
    if diagonal == -num_differences:
        return True
    return diagonal != num_differences and reached[diagonal - 1] < reached[diagonal + 1]


def _search(left: Sequence[Hashable], right: Sequence[Hashable]) -> list[dict[int, int]] | None:
    """How far along each diagonal one gets with 0, 1, 2 … differences, until the end of both lists."""
    reached: list[dict[int, int]] = []
    for num_differences in range(min(len(left) + len(right), MOST_DIFFERENCES) + 1):
        found: dict[int, int] = {}
        for diagonal in range(-num_differences, num_differences + 1, 2):
            if not num_differences:
                x = 0
            elif _comes_down(reached[-1], diagonal, num_differences):
                x = reached[-1][diagonal + 1]
            else:
                x = reached[-1][diagonal - 1] + 1
            while x < len(left) and x - diagonal < len(right) and left[x] == right[x - diagonal]:
                x += 1
            found[diagonal] = x
            if x >= len(left) and x - diagonal >= len(right):
                reached.append(found)
                return reached
        reached.append(found)
    return None


def align_from_end(left: Sequence[Hashable], right: Sequence[Hashable]) -> Pairs:
    """The same, with entries paired as late as possible where several answers are as good."""
    pairs = align_lists(left[::-1], right[::-1])
    return [(len(left) - 1 - i, len(right) - 1 - j) for i, j in reversed(pairs)]


def find_increasing(values: NDArray[np.intp]) -> NDArray[np.intp]:
    """Places of a longest increasing list of values (patience sorting)."""
    if (np.diff(values) > 0).all():
        return np.arange(len(values))
    tops: list[int] = []
    places: list[int] = []
    before = np.full(len(values), -1, dtype=np.intp)
    for place, value in enumerate(values.tolist()):
        pile = bisect_left(tops, value)
        before[place] = places[pile - 1] if pile else -1
        tops[pile : pile + 1], places[pile : pile + 1] = [value], [place]
    found = []
    place = places[-1] if places else -1
    while place >= 0:
        found.append(place)
        place = int(before[place])
    return np.array(found[::-1], dtype=np.intp)


POINT_TO_POINT = ("send", "recv", "send_recv")


@dataclass(frozen=True)
class GroupKey:
    """What belongs together: a group, or the two ends of a transfer."""

    name: str
    members: tuple[int, ...]
    on_device: bool
    is_inferred: bool = False
    """Whether the group, or that it is a collective at all, has to be confirmed by time."""
    stream: int = -1
    """The how-maniest stream of its rank, if the group is not recorded."""
    is_transfer: bool = False
    """Whether the first member sends to the second."""

    def __lt__(self, other: GroupKey) -> bool:
        return self._order < other._order

    @property
    def _order(self) -> tuple[str, tuple[int, ...], bool, bool, int]:
        return self.name, self.members, self.on_device, self.is_inferred, self.stream


def agree_on_keys(keys: Iterable[GroupKey]) -> dict[GroupKey, GroupKey]:
    """What ranks call the same set of theirs: only one rank may be in doubt whether it is meant, then all are.

    Streams are distinguished only in doubt.
    """
    known = list(keys)
    doubted = {(key.name, key.members, key.on_device) for key in known if key.is_inferred}
    return {
        key: replace(key, is_inferred=True)
        if (key.name, key.members, key.on_device) in doubted
        else replace(key, stream=-1)
        for key in known
    }


def list_members(trace: RankTrace) -> dict[str, tuple[int, ...]]:
    """The ranks of every group, by name, as the header lists them."""
    distributed = trace.header.distributed
    return {group.pg_name: tuple(group.ranks) for group in distributed.pg_config} if distributed else {}


class GroupFinder:
    """The groups that the collectives of one rank may belong to."""

    def __init__(self, rank: int, trace: RankTrace) -> None:
        self._rank = rank
        self._members = list_members(trace)
        self._streams: dict[int, str] = {}
        """The group of the recorded collectives on each stream; empty: several."""
        self._ordinals: dict[int, int] = {}
        for collective in trace.collectives:
            if collective.group:
                known = self._streams.setdefault(collective.stream, collective.group)
                self._streams[collective.stream] = known if known == collective.group else ""
            else:
                self._ordinals.setdefault(collective.stream, len(self._ordinals))

    def list_keys(self, collective: Collective) -> Iterator[GroupKey]:
        on_device = collective.on_device
        if collective.kind in POINT_TO_POINT:
            yield from self._list_transfers(collective)
        elif collective.group:
            yield GroupKey(collective.group, self._members.get(collective.group, ()), on_device)
        elif len(self._members) < 2:
            yield GroupKey("", next(iter(self._members.values()), ()), on_device)
        else:
            yield from self._infer(collective)

    def _infer(self, collective: Collective, is_sure: bool = True) -> Iterator[GroupKey]:
        """Of a collective without a recorded group: the sets of ranks that fit."""
        stream = self._ordinals.get(collective.stream, -1)
        known = self._streams.get(collective.stream, "")
        sets = {members for members in self._members.values() if len(members) > 1 and self._rank in members}
        if collective.group_size is not None:
            sets = {members for members in sets if len(members) == collective.group_size}
        if known in self._members and self._members[known] in sets:
            sets = {self._members[known]}
        is_inferred = len(sets) > 1 or not is_sure
        for members in sorted(sets):
            yield GroupKey("", members, collective.on_device, is_inferred, stream)

    def _list_transfers(self, collective: Collective) -> Iterator[GroupKey]:
        """A send or a receive: the two ranks, or the group if all of it may take part."""
        members = self._members.get(collective.group, ())
        if collective.peer is None or collective.kind == "send_recv":
            if collective.group:
                yield GroupKey(f"{collective.group} send/recv", members, collective.on_device, True)
            elif len(self._members) < 2:
                yield GroupKey("send/recv", next(iter(self._members.values()), ()), collective.on_device, True)
            else:
                yield from self._infer(collective, is_sure=False)
            return
        peer = members[collective.peer] if collective.peer < len(members) else collective.peer
        ends = (self._rank, peer) if collective.kind == "send" else (peer, self._rank)
        yield GroupKey(f"{ends[0]} → {ends[1]}", ends, collective.on_device, is_transfer=True)

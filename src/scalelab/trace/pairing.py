"""Which collectives of two ranks are the same one, by kind, size, order and time.

A collective that every rank leaves together ends at the same time on both ranks, up to a constant difference of their
clocks. So the difference of clocks is the one that lets most ends of equal kind and size coincide: all differences of
ends vote, in windows of several widths (clocks drift, and ends of gloo's threads scatter). Given the difference, a
collective is paired with the nearest of its kind if that one's nearest is it. What one trace lacks stays alone and
shifts nothing. Pairings by order alone (the longest common list of kinds and sizes, step by step if steps are known)
compete; the pairing whose ends agree most often wins, and among equals the one that leaves least alone. Where threads
of a host ran equal lists, their order is trusted: such ends may be milliseconds late.

Regular training may leave several answers: if another pairing agrees as often and leaves no more alone, the pairing is
uncertain, unless both ranks share a clock.

Only collectives of one process group are paired. One whose group is not recorded belongs to the only set of ranks that
the header lists, or to that of the recorded collectives on its stream (NCCL has a stream per group). Otherwise every
listed set of its size may be meant.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from scalelab.trace.clocks import (
    DEVIATIONS_PER_MEDIAN,
    FEWEST_FOR_LINE,
    LARGEST_DRIFT,
    align_from_end,
    align_lists,
    find_slope,
    measure_spread,
)
from scalelab.trace.collectives import Collective
from scalelab.trace.rank_trace import RankTrace

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

    def __lt__(self, other: GroupKey) -> bool:
        return self._order < other._order

    @property
    def _order(self) -> tuple[str, tuple[int, ...], bool, bool, int]:
        return self.name, self.members, self.on_device, self.is_inferred, self.stream


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
            yield GroupKey("", members, collective.on_device, is_inferred, stream if is_inferred else -1)

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
        yield GroupKey(f"{ends[0]} → {ends[1]}", ends, collective.on_device)


Times = NDArray[np.int64]
Pairs = NDArray[np.intp]
"""Places in both lists, one pair per row, in order."""

WIDTHS_NS = (20_000, 200_000, 2_000_000, 20_000_000)
"""How far ends may scatter to vote for one difference of clocks."""
MOST_VOTES = 1 << 21
MOST_PEAKS = 3
"""Differences of clocks that are tried, per width."""
CLOSE_NS = 20_000
"""Ends that scatter by less need no further search."""
FAR = 3
"""Ends further apart than this many tolerances, and half the distance of close ones, are of different collectives."""
AS_GOOD = 0.9
"""Another pairing whose ends agree this often, compared with the best, is as good."""
SAME_CLOCK_NS = 1_000_000
"""Ranks of one host have clocks that differ by less."""


@dataclass(frozen=True)
class Ends:
    """The collectives of one rank in order."""

    keys: Sequence[Hashable]
    """Kind and size: only equal ones may be the same."""
    steps: Sequence[int | None]
    ends: Times
    is_together: NDArray[np.bool_]
    """Which of them all ranks leave together."""
    is_exact: bool = True
    """Whether ends are those of kernels; threads of a host may end milliseconds late."""

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class Pairing:
    """Places in two lists that hold the same collective."""

    pairs: Pairs
    certainty: float = 1.0
    """1 minus the agreement of the best other pairing over that of this one; 1: no other is as good."""
    agreement: float = 1.0
    """The share of pairs whose ends coincide."""


@dataclass(frozen=True)
class _Candidate:
    left: Ends
    right: Ends
    pairs: Pairs

    @cached_property
    def voters(self) -> NDArray[np.bool_]:
        """The pairs that ranks leave together; all, if there are none."""
        found = self.left.is_together[self.pairs[:, 0]] & self.right.is_together[self.pairs[:, 1]]
        return found if found.any() else np.ones(len(self.pairs), dtype=np.bool_)

    @cached_property
    def offset(self) -> int:
        return find_offset(self._differences[self.voters]) if len(self.pairs) else 0

    @property
    def _differences(self) -> Times:
        return self.right.ends[self.pairs[:, 1]] - self.left.ends[self.pairs[:, 0]]

    @cached_property
    def drift(self) -> float:
        times = self.left.ends[self.pairs[:, 0]][self.voters]
        if len(times) < FEWEST_FOR_LINE:
            return 0.0
        rest = (self._differences[self.voters] - self.offset).astype(np.float64)
        slope = find_slope((times - times[0]).astype(np.float64), rest)
        bent = rest - slope * (times - times[0])
        return slope if abs(slope) < LARGEST_DRIFT and 2 * measure_spread(bent) < measure_spread(rest) else 0.0

    @cached_property
    def rest(self) -> NDArray[np.float64]:
        """How far the ends of voters lie apart on one clock."""
        times = self.left.ends[self.pairs[:, 0]][self.voters]
        rest = (self._differences[self.voters] - self.offset).astype(np.float64)
        if self.drift:
            rest -= self.drift * (times - times[0])
        return np.asarray(np.abs(rest - np.median(rest))) if len(rest) else rest

    @property
    def spread(self) -> float:
        return DEVIATIONS_PER_MEDIAN * float(np.median(self.rest)) if len(self.rest) else np.inf

    def count_agreeing(self, tolerance: float) -> int:
        return int((self.rest <= tolerance).sum())

    @property
    def num_alone(self) -> int:
        return len(self.left) + len(self.right) - 2 * len(self.pairs)

    def drop_distant(self) -> _Candidate:
        """Without neighbours that stand in for one which is missing on both sides."""
        limit = FAR * (3 * self.spread + 1000)
        for one in (self.left, self.right):
            limit = max(limit, float(np.quantile(np.diff(np.sort(one.ends)), 0.1)) / 2 if len(one) > 1 else 0.0)
        is_kept = np.ones(len(self.pairs), dtype=np.bool_)
        is_kept[self.voters] = self.rest <= limit
        return _Candidate(self.left, self.right, self.pairs[is_kept])

    def shares(self, other: _Candidate) -> bool:
        """Whether most pairs are the same."""
        own, others = ({(int(i), int(j)) for i, j in one.pairs} for one in (self, other))
        return 2 * len(own & others) > min(len(own), len(others))


def find_offset(differences: Times) -> int:
    """Their median; a double would lose nanoseconds of clocks that are years apart."""
    return int(differences[0]) + round(float(np.median(differences - differences[0])))


def measure_agreement(left: Times, right: Times) -> float:
    """The share of ends that coincide on one clock."""
    if not len(left):
        return 0.0
    differences = right - left
    return float((np.abs(differences - find_offset(differences)) <= CLOSE_NS).mean())


def pair_ends(left: Ends, right: Ends, *, is_same_clock: bool = False) -> Pairing:
    """The collectives that two ranks share."""
    if not len(left) or not len(right):
        return Pairing(np.empty((0, 2), dtype=np.intp))
    is_alike = list(left.keys) == list(right.keys)
    by_order = _Candidate(left, right, np.stack([np.arange(len(left))] * 2, axis=1)) if is_alike else None
    if by_order is not None and by_order.rest.max(initial=0.0) <= CLOSE_NS:
        return Pairing(by_order.pairs)
    candidates = [one for one in (by_order, *_list_candidates(left, right)) if one is not None and len(one.pairs)]
    if not candidates:
        return Pairing(np.empty((0, 2), dtype=np.intp))
    most = max(len(one.pairs) for one in candidates)
    tolerance = 3 * min(one.spread for one in candidates if 2 * len(one.pairs) >= most) + 1000
    ranked = sorted(candidates, key=lambda one: _rate(one, tolerance, is_same_clock))
    best = ranked[0]
    if by_order is not None and not left.is_exact:
        is_likely = 2 * by_order.count_agreeing(tolerance) >= best.count_agreeing(tolerance)
        best = by_order if is_likely else best
    agreeing = best.count_agreeing(tolerance)
    certainty = 1.0
    if not (is_same_clock and abs(best.offset) < SAME_CLOCK_NS):
        others = [one for one in ranked if one is not best and one.num_alone <= best.num_alone and not one.shares(best)]
        second = max((one.count_agreeing(tolerance) for one in others), default=0)
        certainty = 1 - second / agreeing if second > AS_GOOD * agreeing else 1.0
    return Pairing(best.pairs, max(0.0, certainty), agreeing / max(1, len(best.rest)))


def _rate(one: _Candidate, tolerance: float, is_same_clock: bool) -> tuple[bool, int, int, int]:
    """The best has the least: other clocks than one host has, disagreement, collectives left alone, distance."""
    is_foreign = is_same_clock and abs(one.offset) >= SAME_CLOCK_NS
    return is_foreign, -one.count_agreeing(tolerance), one.num_alone, abs(one.offset)


def _list_candidates(left: Ends, right: Ends) -> Iterator[_Candidate]:
    numbers = {key: number for number, key in enumerate(dict.fromkeys([*left.keys, *right.keys]))}
    codes = [np.array([numbers[key] for key in one.keys], dtype=np.int64) for one in (left, right)]
    ordered = [
        align(first, second)
        for first, second in (
            ([*zip(left.keys, left.steps, strict=True)], [*zip(right.keys, right.steps, strict=True)]),
            (left.keys, right.keys),
        )
        for align in (align_lists, align_from_end)
    ]
    found = [_Candidate(left, right, np.array(pairs, dtype=np.intp).reshape(-1, 2)) for pairs in ordered]
    yield from found
    offsets = {one.offset for one in found if len(one.pairs)} | set(_vote(left, right, codes[0], codes[1]))
    for offset in sorted(offsets):
        candidate = _Candidate(left, right, _pair_nearest(left.ends + offset, right.ends, codes[0], codes[1]))
        if len(candidate.pairs):
            shifted = left.ends + candidate.offset
            if candidate.drift:
                start = left.ends[candidate.pairs[0, 0]]
                shifted = shifted + np.rint(candidate.drift * (left.ends - start)).astype(np.int64)
            yield _Candidate(left, right, _pair_nearest(shifted, right.ends, codes[0], codes[1])).drop_distant()


def _vote(left: Ends, right: Ends, left_codes: Times, right_codes: Times) -> Iterator[int]:
    """Differences of clocks that let many ends coincide."""
    chosen = [np.flatnonzero(one.is_together) for one in (left, right)]
    if not len(chosen[0]) or not len(chosen[1]):
        chosen = [np.arange(len(left)), np.arange(len(right))]
    step = max(1, len(chosen[0]) * len(chosen[1]) // MOST_VOTES)
    first, second = chosen[0][::step], chosen[1]
    differences = right.ends[second][None, :] - left.ends[first][:, None]
    votes = np.sort(differences[left_codes[first][:, None] == right_codes[second][None, :]])
    for width in WIDTHS_NS if len(votes) else ():
        counts = np.searchsorted(votes, votes + width, side="right") - np.arange(len(votes))
        for _ in range(MOST_PEAKS):
            peak = int(counts.argmax())
            if counts[peak] <= 0:
                break
            inside = votes[peak : peak + int(counts[peak])]
            yield find_offset(inside)
            counts[(votes >= votes[peak] - width) & (votes <= votes[peak] + width)] = 0


def _pair_nearest(left: Times, right: Times, left_codes: Times, right_codes: Times) -> Pairs:
    """Ends on one clock that are each other's nearest of their kind, in order on both sides."""
    found = []
    for code in np.intersect1d(left_codes, right_codes):
        own = [np.flatnonzero(codes == code) for codes in (left_codes, right_codes)]
        forth, back = _find_nearest(left[own[0]], right[own[1]]), _find_nearest(right[own[1]], left[own[0]])
        is_mutual = back[forth] == np.arange(len(forth))
        found.append(np.stack([own[0][is_mutual], own[1][forth[is_mutual]]], axis=1))
    pairs = np.concatenate(found) if found else np.empty((0, 2), dtype=np.intp)
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    return pairs[find_increasing(pairs[:, 1])]


def _find_nearest(times: Times, others: Times) -> Pairs:
    """For every time, the place of the nearest other."""
    order = np.argsort(others, kind="stable")
    ordered = others[order]
    right = np.clip(np.searchsorted(ordered, times), 0, len(ordered) - 1)
    left = np.maximum(right - 1, 0)
    is_left = np.abs(times - ordered[left]) <= np.abs(ordered[right] - times)
    return np.asarray(order[np.where(is_left, left, right)])


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

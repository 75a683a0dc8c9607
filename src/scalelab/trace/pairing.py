"""Which collectives of two ranks are the same one, by kind, size, order and time.

A collective that every rank leaves together ends at the same time on both ranks, up to a constant difference of their
clocks. So the difference of clocks is the one that lets most ends of equal kind and size coincide. All differences of
ends vote, in windows of several widths (clocks drift, and ends of gloo's threads scatter), and the differences that
lists of equal kinds and sizes suggest by their order compete with them. Given the difference, ends within a tolerance
that follows from their scatter are the same collective; where several are that close, only equal numbers of them are
paired, in order. What one trace lacks stays alone and shifts nothing. What ranks need not leave together (broadcasts)
is paired by order between those that they do. Where threads of a host ran equal lists, their order is trusted: such
ends may be milliseconds late.

Another difference of clocks is as good if it pairs more than half as many, and leaves hardly more alone of what both
traces recorded at the same time. Regular training has such answers: a step later, everything coincides again. Then the
pairing is uncertain, unless both ranks share a clock. So it is with fewer than three pairs of unequal lists, and with
ends that scatter as widely as collectives follow each other.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from scalelab.trace.alignment import (
    DEVIATIONS_PER_MEDIAN,
    FEWEST_FOR_LINE,
    align_from_end,
    align_lists,
    find_drift,
    find_increasing,
    find_offset,
)

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
SPREADS = 6
"""Ends further apart than this many standard deviations, and `CLOSE_NS`, are of different collectives."""
FINEST = 3
"""Where several ends are within the tolerance, it is narrowed down to this many standard deviations."""
SHORTEST_TOLERANCE_NS = 1000
FEW_SPREAD_NS = 10_000.0
"""The most that a few ends of kernels are taken to scatter: wrong ones among them would hide behind more."""
LATE, NEAR = 3, 0.1
"""In equal lists, an end may be this many tolerances late, or this share of the time to its neighbours."""
FEWEST_PAIRS = 3
"""Fewer ends of unequal lists coincide by chance."""
LIKELY_SHARE = 0.5
"""Another pairing needs more than this share of the best one's pairs to be as good."""
AS_GOOD = 0.6
"""It also explains this share of what the best one explains."""
WIDER = 2
"""And its ends scatter at most this many times as widely, if there are enough to see that."""
FEWEST_EXPLAINED = 0.5
"""A pairing that explains less of what both traces recorded is uncertain."""
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

    @cached_property
    def is_voter(self) -> NDArray[np.bool_]:
        """Those whose ends coincide: which ranks leave together, or all if there are none."""
        return self.is_together if self.is_together.any() else np.ones(len(self), dtype=np.bool_)


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
        found = self.left.is_voter[self.pairs[:, 0]] & self.right.is_voter[self.pairs[:, 1]]
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
        return find_drift(times, (self._differences[self.voters] - self.offset).astype(np.float64))

    @cached_property
    def rest(self) -> NDArray[np.float64]:
        """How far the ends of voters lie apart on one clock."""
        times = self.left.ends[self.pairs[:, 0]][self.voters]
        rest = (self._differences[self.voters] - self.offset).astype(np.float64)
        if self.drift:
            rest -= self.drift * times
        return np.asarray(np.abs(rest - np.median(rest))) if len(rest) else rest

    @property
    def spread(self) -> float:
        return DEVIATIONS_PER_MEDIAN * float(np.median(self.rest)) if len(self.rest) else np.inf

    def count_agreeing(self, tolerance: float) -> int:
        return int((self.rest <= tolerance).sum())

    def shift_left(self) -> Times:
        """The left ends on the clock of the right ones."""
        differences, start = self._differences, self.left.ends[self.pairs[0, 0]]
        shifted = self.left.ends + self.offset
        if self.drift:
            shifted = shifted + np.rint(self.drift * (self.left.ends - start)).astype(np.int64)
        rest = differences + self.left.ends[self.pairs[:, 0]] - shifted[self.pairs[:, 0]]
        return shifted + round(float(np.median(rest[self.voters])))

    @cached_property
    def explained(self) -> float:
        """The share of paired ones among those that both traces recorded at the same time."""
        num_paired = int(self.voters.sum())
        if not num_paired:
            return 0.0
        ends = [self.shift_left(), self.right.ends]
        chosen = [ends[side][one.is_voter] for side, one in enumerate((self.left, self.right))]
        low, high = (max(one.min() for one in chosen) - CLOSE_NS, min(one.max() for one in chosen) + CLOSE_NS)
        num_shared = sum(int(((one >= low) & (one <= high)).sum()) for one in chosen)
        return min(1.0, 2 * num_paired / max(num_shared, 1))

    @property
    def num_same_step(self) -> int:
        steps = [(self.left.steps[i], self.right.steps[j]) for i, j in self.pairs.tolist()]
        return sum(one is not None and one == other for one, other in steps)

    def shares(self, other: _Candidate) -> bool:
        """Whether most pairs are the same."""
        own, others = ({(int(i), int(j)) for i, j in one.pairs} for one in (self, other))
        return 2 * len(own & others) > min(len(own), len(others))


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
        is_known = is_same_clock and abs(by_order.offset) < SAME_CLOCK_NS
        if is_known or not repeats(left, CLOSE_NS):
            return Pairing(by_order.pairs)
    codes = _number_keys(left, right)
    rough = [one for one in (by_order, *_list_candidates(left, right, codes)) if one is not None and len(one.pairs)]
    if not rough:
        return Pairing(np.empty((0, 2), dtype=np.intp))
    most = max(len(one.pairs) for one in rough)
    spread = min(one.spread for one in rough if 2 * len(one.pairs) >= most)
    if most < FEWEST_FOR_LINE and left.is_exact:
        spread = min(spread, FEW_SPREAD_NS)
    found = [_refine(_refine(one, codes, spread), codes, spread) for one in rough]
    near = [one for one in found if is_same_clock and abs(one.offset) < SAME_CLOCK_NS]
    found = near if any(len(one.pairs) for one in near) else found
    most = max(int(one.voters.sum()) for one in found)
    best = max(found, key=lambda one: _rate(one, most))
    if by_order is not None and not left.is_exact:
        tolerance = _find_tolerance(spread)
        if 2 * by_order.count_agreeing(tolerance) >= len(best.pairs):
            return Pairing(by_order.pairs, 1.0, by_order.count_agreeing(tolerance) / max(1, len(by_order.rest)))
    certainty = _find_certainty(best, found, spread, is_whole=is_alike and len(best.pairs) == len(left))
    return Pairing(_complete(best, spread) if is_alike else best.pairs, certainty, best.explained)


def repeats(one: Ends, tolerance: float) -> bool:
    """Whether a list, moved by some of its collectives, coincides with itself in more than half of its length."""
    codes = _number_keys(one, one)[0]
    for places in range(1, (len(one) + 1) // 2):
        if (codes[places:] == codes[:-places]).all():
            distances = one.ends[places:] - one.ends[:-places]
            if (np.abs(distances - find_offset(distances)) <= tolerance).mean() >= AS_GOOD:
                return True
    return False


def _find_tolerance(spread: float) -> float:
    return max(float(CLOSE_NS), SPREADS * spread)


def _find_certainty(best: _Candidate, found: Sequence[_Candidate], spread: float, *, is_whole: bool) -> float:
    """1 minus how good the best other pairing is. Whole: equal lists of which everything is paired."""
    num_pairs = int(best.voters.sum())
    gaps = np.diff(np.sort(best.left.ends[best.left.is_voter]))
    is_vague = len(gaps) > 0 and _find_tolerance(spread) > float(np.median(gaps)) / 2
    if not is_whole and (num_pairs < FEWEST_PAIRS or is_vague):
        return 0.0
    if best.explained < FEWEST_EXPLAINED:
        return 0.0
    others = [
        int(one.voters.sum()) * one.explained
        for one in found
        if int(one.voters.sum()) > LIKELY_SHARE * num_pairs
        and one.explained >= AS_GOOD * best.explained
        and (num_pairs < FEWEST_FOR_LINE or one.spread <= WIDER * max(best.spread, CLOSE_NS / SPREADS))
        and not one.shares(best)
    ]
    return max(0.0, 1 - max(others, default=0.0) / (num_pairs * best.explained))


def _rate(one: _Candidate, most: int) -> tuple[bool, int, int, float, int]:
    """The best pairs about as many as any, agrees with the numbers of steps, explains most, and differs least."""
    num_pairs = int(one.voters.sum())
    is_likely = len(one.pairs) > 0 and num_pairs > LIKELY_SHARE * most and one.explained >= AS_GOOD
    return is_likely, one.num_same_step if is_likely else 0, num_pairs, one.explained, -abs(one.offset)


def _number_keys(left: Ends, right: Ends) -> tuple[Times, Times]:
    numbers = {key: number for number, key in enumerate(dict.fromkeys([*left.keys, *right.keys]))}
    first, second = (np.array([numbers[key] for key in one.keys], dtype=np.int64) for one in (left, right))
    return first, second


def _list_candidates(left: Ends, right: Ends, codes: tuple[Times, Times]) -> Iterator[_Candidate]:
    """Pairings by order, and by the differences of clocks that they or the ends suggest."""
    ordered = [
        align(first, second)
        for first, second in (
            ([*zip(left.keys, left.steps, strict=True)], [*zip(right.keys, right.steps, strict=True)]),
            (left.keys, right.keys),
        )
        for align in (align_lists, align_from_end)
    ]
    found = [_Candidate(left, right, np.array(pairs, dtype=np.intp).reshape(-1, 2)) for pairs in ordered]
    offsets = {one.offset for one in found if len(one.pairs)} | set(_vote(left, right, *codes))
    for offset in sorted(offsets):
        yield _Candidate(left, right, _pair_nearest(left.ends + offset, right.ends, *codes))


def _refine(rough: _Candidate, codes: tuple[Times, Times], spread: float) -> _Candidate:
    """The pairing of a candidate's difference of clocks: only ends that coincide, and what is surely between them."""
    if not len(rough.pairs):
        return rough
    left, right, shifted = rough.left, rough.right, rough.shift_left()
    anchors = []
    for code in np.intersect1d(codes[0][left.is_voter], codes[1][right.is_voter]):
        own = [np.flatnonzero((one == code) & ends.is_voter) for one, ends in zip(codes, (left, right), strict=True)]
        for i, j in pair_close(shifted[own[0]], right.ends[own[1]], spread):
            anchors.append((own[0][i], own[1][j]))
    pairs = np.concatenate([np.stack(one, axis=1) for one in anchors]) if anchors else np.empty((0, 2), dtype=np.intp)
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    pairs = pairs[find_increasing(pairs[:, 1])]
    if len(pairs) and not (left.is_voter.all() and right.is_voter.all()):
        pairs = _fill_between(pairs, left, right, codes)
    return _Candidate(left, right, pairs)


def pair_close(left: Times, right: Times, spread: float) -> Iterator[tuple[Pairs, Pairs]]:
    """Places of ends on one clock that are close: clusters with as many on both sides, narrower ones if need be."""
    tolerance, finest = _find_tolerance(spread), max(FINEST * spread, SHORTEST_TOLERANCE_NS)
    rest = [np.argsort(one, kind="stable") for one in (left, right)]
    while len(rest[0]) and len(rest[1]):
        times = np.concatenate([left[rest[0]], right[rest[1]]])
        is_right = np.repeat([False, True], [len(one) for one in rest])
        order = np.argsort(times, kind="stable")
        cluster = np.empty(len(times), dtype=np.intp)
        cluster[order] = np.cumsum(np.diff(times[order], prepend=times[order[0]]) > tolerance)
        counts = [np.bincount(cluster[side], minlength=int(cluster.max()) + 1) for side in (~is_right, is_right)]
        is_even = (counts[0] == counts[1])[cluster]
        yield rest[0][is_even[~is_right]], rest[1][is_even[is_right]]
        rest = [one[~is_even[side]] for one, side in zip(rest, (~is_right, is_right), strict=True)]
        tolerance /= 2
        if tolerance < finest:
            return


def _fill_between(anchors: Pairs, left: Ends, right: Ends, codes: tuple[Times, Times]) -> Pairs:
    """With what ranks need not leave together: paired by order where lists between two anchors are equal."""
    found = [anchors]
    edges = [(-1, -1), *map(tuple, anchors.tolist()), (len(left), len(right))]
    for number, (low, high) in enumerate(pairwise(edges)):
        rests = [
            [place for place in range(low[side] + 1, high[side]) if not ends.is_voter[place]]
            for side, ends in enumerate((left, right))
        ]
        if number == 0 or number == len(edges) - 2:  # before the first anchor only the last are surely recorded
            count = min(map(len, rests))
            rests = [one[len(one) - count :] if number == 0 else one[:count] for one in rests]
        if rests[0] and [codes[0][i] for i in rests[0]] == [codes[1][j] for j in rests[1]]:
            found.append(np.array(list(zip(*rests, strict=True)), dtype=np.intp))
    pairs = np.concatenate(found)
    return pairs[np.argsort(pairs[:, 0], kind="stable")]


def _complete(best: _Candidate, spread: float) -> Pairs:
    """Of equal lists whose paired ends all keep their order: also those that a rank left a little late."""
    if (best.pairs[:, 0] != best.pairs[:, 1]).any():
        return best.pairs
    whole = np.stack([np.arange(len(best.left))] * 2, axis=1)
    rest = np.abs(best.right.ends - best.shift_left()) if len(best.pairs) else np.zeros(len(whole))
    gaps = np.diff(best.right.ends, prepend=best.right.ends[0] - 1, append=best.right.ends[-1] + 1)
    limit = np.maximum(LATE * _find_tolerance(spread), NEAR * np.minimum(gaps[:-1], gaps[1:]))
    is_kept = (rest <= limit) | ~(best.left.is_voter & best.right.is_voter)
    is_kept[best.pairs[:, 0]] = True
    return whole[is_kept]


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

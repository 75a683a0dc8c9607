"""Which collectives of two ranks are the same one, where some are missing and clocks differ."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from scalelab.trace.alignment import find_increasing
from scalelab.trace.pairing import CLOSE_NS, Ends, _Candidate, _rate, pair_close, pair_ends, repeats

SECOND = 1_000_000_000
RNG = np.random.default_rng
Numbers = NDArray[np.intp]


def make_ends(numbers: Numbers, ends: NDArray[np.float64], steps: Numbers | None = None) -> Ends:
    """All-reduces that look alike, which of all those of the job `numbers` says."""
    return Ends(
        keys=["all_reduce"] * len(numbers),
        steps=[None] * len(numbers) if steps is None else steps[numbers].tolist(),
        ends=ends[numbers].astype(np.int64),
        is_together=np.ones(len(numbers), dtype=np.bool_),
    )


def find_wrong(left: Numbers, right: Numbers, pairs: Numbers) -> list[tuple[int, int]]:
    return [(int(left[i]), int(right[j])) for i, j in pairs if left[i] != right[j]]


@pytest.mark.parametrize("scatter_ns", [2_000, 100_000])
@pytest.mark.parametrize("ahead", [0, SECOND, -SECOND])
def test_what_one_rank_lacks_shifts_nothing(ahead: int, scatter_ns: int) -> None:
    for seed in range(10):
        rng = RNG(seed)
        num_collectives, per_step = int(rng.integers(12, 120)), int(rng.integers(1, 9))
        gaps = 3_000_000 * (1 + 4 * (np.arange(num_collectives) % per_step == 0)) * rng.normal(1, 0.15, num_collectives)
        ends = np.cumsum(np.abs(gaps)) + 1e15
        scattered = ends + ahead + rng.normal(0, scatter_ns, num_collectives) + 2e-6 * (ends - ends[0])
        left, right = (np.flatnonzero(rng.random(num_collectives) > 0.08)[rng.integers(0, 4) :] for _ in range(2))
        found = pair_ends(make_ends(left, ends), make_ends(right, scattered))
        assert find_wrong(left, right, found.pairs) == []
        assert len(found.pairs) == len(np.intersect1d(left, right))
        assert found.certainty == 1


def test_times_decide_against_the_numbers_of_steps() -> None:
    ends = np.cumsum(RNG(1).normal(1e6, 2e5, 60))
    left, right = np.arange(0, 50), np.arange(8, 60)
    lagging = make_ends(right, ends + SECOND, steps=(np.arange(60) - 4) // 4)
    found = pair_ends(make_ends(left, ends, steps=np.arange(60) // 4), lagging)
    assert find_wrong(left, right, found.pairs) == []
    assert len(found.pairs) == 42


def test_a_regular_beat_leaves_doubt_unless_the_clock_is_the_same() -> None:
    ends = 1e6 * np.arange(20)
    left, right = make_ends(np.arange(20), ends), make_ends(np.arange(1, 20), ends)
    assert pair_ends(left, right).certainty < 0.1
    found = pair_ends(left, right, is_same_clock=True)
    assert (found.certainty, found.pairs[0].tolist()) == (1, [1, 0])
    assert pair_ends(left, left).certainty < 0.1
    assert pair_ends(left, left, is_same_clock=True).certainty == 1


def test_certainty_is_one_minus_what_the_best_other_pairing_explains() -> None:
    """On an even beat, a list that lacks the eighth fits as well moved by one: 18 pairs of 19, of what both have."""
    ends = 1e6 * np.arange(20)
    found = pair_ends(make_ends(np.arange(20), ends), make_ends(np.delete(np.arange(20), [7]), ends))
    explained = 2 * 18 / (19 + 18)
    assert found.agreement == 2 * 19 / 39
    assert found.certainty == pytest.approx(1 - 18 * explained / (19 * found.agreement))
    ahead = pair_ends(make_ends(np.arange(16), ends), make_ends(np.arange(4, 20), ends))
    assert (ahead.certainty, len(ahead.pairs)) == (1 - 15 / 16, 16)


@pytest.mark.parametrize(
    ("left", "right", "moved", "certainty"),
    [
        ([0, 1], [0, 1], 0, 1.0),  # equal lists of which everything is paired
        ([0, 1, 2], [1, 2], 0, 0.0),  # two ends of unequal lists coincide by chance
        ([0, 1, 2, 3], [1, 2, 3], 0, 1.0),
        ([0, 1, 2, 3], [0, 1, 2, 3], 5e6, 0.0),  # of equal lists, only two coincide
    ],
)
def test_few_pairs_are_certain_only_if_they_are_all(
    left: list[int], right: list[int], moved: float, certainty: float
) -> None:
    ends = np.cumsum(RNG(11).normal(3e6, 5e5, 6))
    late = ends + np.array([0, 0, 1, 2, 0, 0]) * moved
    found = pair_ends(make_ends(np.array(left), ends), make_ends(np.array(right), late))
    assert found.certainty == certainty


def test_an_extra_collective_is_paired_with_none() -> None:
    ends = np.cumsum(RNG(3).normal(3e6, 5e5, 40))
    with_extra = np.sort(np.append(np.delete(ends, [7, 21]), [ends[7] - 4e5, ends[30] + 1e6]))
    found = pair_ends(make_ends(np.arange(40), ends), make_ends(np.arange(40), with_extra + SECOND))
    assert (found.certainty, len(found.pairs)) == (1, 38)
    assert all(abs(with_extra[j] - ends[i]) < 1 for i, j in found.pairs)


def test_where_several_are_as_close_only_equal_numbers_are_paired() -> None:
    left = np.array([0, 5_000, 1_000_000, 1_005_000], dtype=np.int64)
    right = np.array([2_000, 6_000, 1_002_000], dtype=np.int64)
    found = [
        pair for i, j in pair_close(left, right, spread=4_000.0) for pair in zip(i.tolist(), j.tolist(), strict=True)
    ]
    assert found == [(0, 0), (1, 1)]
    finer = [
        pair for i, j in pair_close(left, right, spread=500.0) for pair in zip(i.tolist(), j.tolist(), strict=True)
    ]
    assert finer == [(0, 0), (1, 1), (2, 2)]


def test_broadcasts_are_paired_by_order_between_all_reduces() -> None:
    """Ranks need not leave a broadcast together, so only lists that are equal between two all-reduces are paired."""
    kinds = list("brbbrbrbbrbrb")
    times = np.cumsum(RNG(5).normal(3e6, 5e5, len(kinds)))
    lacking = [0, 1, 7]  # what stands before the second all-reduce and one of two broadcasts between two others
    places = [np.arange(len(kinds)), np.delete(np.arange(len(kinds)), lacking)]
    left, right = (
        Ends(
            keys=[kinds[place] for place in chosen],
            steps=[None] * len(chosen),
            ends=(times[chosen] + late * np.array([kinds[place] == "b" for place in chosen])).astype(np.int64),
            is_together=np.array([kinds[place] == "r" for place in chosen]),
        )
        for chosen, late in zip(places, (0, 1e6), strict=True)
    )
    found = [(int(places[0][i]), int(places[1][j])) for i, j in pair_ends(left, right).pairs]
    assert found == [(place, place) for place in range(2, len(kinds)) if place not in (7, 8)]


@pytest.mark.parametrize(
    ("gap_ns", "late_ns", "is_kept"),
    [(300_000, 59_000, True), (300_000, 61_000, False), (3_000_000, 290_000, True), (3_000_000, 310_000, False)],
)
def test_an_end_may_be_three_tolerances_or_a_tenth_of_the_gap_late(gap_ns: int, late_ns: int, is_kept: bool) -> None:
    gaps = gap_ns * RNG(7).uniform(1.5, 2.5, 30)
    gaps[12], gaps[13] = gap_ns, 5 * gap_ns  # how late it is makes the first longer, so that it is not the shorter one
    ends = np.cumsum(gaps)
    ends[12:] -= late_ns
    late = ends.copy()
    late[12] += late_ns
    found = pair_ends(make_ends(np.arange(30), ends), make_ends(np.arange(30), late))
    assert found.pairs.tolist() == [[place, place] for place in range(30) if is_kept or place != 12]


def test_threads_that_end_late_keep_their_order() -> None:
    ends = 1e6 * np.arange(12)
    left = make_ends(np.arange(12), ends)
    late = ends.copy()
    late[5] += 2.4e6
    right = make_ends(np.arange(12), late)
    found = pair_ends(*(Ends(one.keys, one.steps, one.ends, one.is_together, is_exact=False) for one in (left, right)))
    assert found.pairs.tolist() == [[place, place] for place in range(12)]


def test_different_kinds_are_never_paired() -> None:
    left = make_ends(np.arange(6), 1e6 * np.arange(6))
    right = Ends(["broadcast"] * 6, left.steps, left.ends, left.is_together)
    assert len(pair_ends(left, right).pairs) == 0


def test_the_longest_increasing_list_is_found() -> None:
    assert find_increasing(np.array([3, 1, 2, 9, 4, 5])).tolist() == [1, 2, 4, 5]
    assert find_increasing(np.array([], dtype=np.intp)).tolist() == []


@pytest.mark.parametrize(("period", "num"), [(1, 20), (2, 20), (1, 3)])
def test_a_list_repeats_from_one_collective_on(period: int, num: int) -> None:
    even = make_ends(np.arange(num), 1_000_000.0 * np.arange(num) + 100_000.0 * (np.arange(num) % period))
    assert repeats(even, CLOSE_NS)
    uneven = make_ends(np.arange(num), 1_000_000.0 * np.arange(num) ** 1.5)
    assert not repeats(uneven, CLOSE_NS)


def test_steps_agree_only_where_both_are_known() -> None:
    ends = 1e6 * np.arange(5)
    steps = ([1, None, 2, 3, None], [1, None, 3, 3, 4])
    left, right = (replace(make_ends(np.arange(5), ends), steps=own) for own in steps)
    assert _Candidate(left, right, np.stack([np.arange(5)] * 2, axis=1)).num_same_step == 2


@pytest.mark.parametrize(("num", "is_repeated"), [(6, False), (7, True)])
def test_a_list_that_coincides_with_itself_in_half_of_its_length_does_not_repeat(num: int, is_repeated: bool) -> None:
    ends = np.array([10e6 * (place // 3) + (0.0, 1.3e6, 3.1e6)[place % 3] for place in range(num)])
    assert repeats(make_ends(np.arange(num), ends), CLOSE_NS) is is_repeated


def test_three_of_five_that_coincide_are_a_repetition_and_two_of_four_are_none() -> None:
    even = np.cumsum([0, 1e6, 1e6, 1e6, 5e6, 9e6])
    assert repeats(make_ends(np.arange(6), even), CLOSE_NS)
    assert not repeats(make_ends(np.arange(5), np.cumsum([0, 1e6, 1e6, 5e6, 9e6])), CLOSE_NS)


@pytest.mark.parametrize(("most", "is_likely"), [(3, True), (5, True), (6, False)])
def test_a_pairing_of_three_fifths_is_likely_unless_another_has_twice_as_many(most: int, is_likely: bool) -> None:
    ends = make_ends(np.arange(5), 1e6 * np.arange(5), steps=np.arange(5))
    three = _Candidate(ends, ends, np.stack([np.arange(3)] * 2, axis=1))
    assert three.explained == 0.6
    assert _rate(three, most) == (is_likely, 3 if is_likely else 0, 3, 0.6, 0)
    assert not _rate(_Candidate(ends, ends, np.empty((0, 2), dtype=np.intp)), 0)[0]

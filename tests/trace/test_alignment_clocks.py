"""Clocks that are ahead, behind, or run at another speed, and the groups that a collective may belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelab.trace.alignment import (
    Clock,
    GroupFinder,
    GroupKey,
    Times,
    agree_on_keys,
    find_slope,
    measure_spread,
    set_clock,
)
from scalelab.trace.collectives import Collective
from scalelab.trace.rank_trace import read_rank
from tests.trace.build import TraceBuilder

Groups = Mapping[str, Sequence[int]]
YEARS_NS = 1_790_000_000_000_000_000
"""Times count from 1970."""


def make_ends(num: int = 50, period_ns: int = 10_000_000) -> Times:
    return YEARS_NS + period_ns * np.arange(num, dtype=np.int64)


def test_a_constant_difference_is_found_to_the_nanosecond() -> None:
    ends = make_ends()
    clock = set_clock(1, 0, ends + 3_000_000_017, ends, is_same_host=False)
    assert (clock.offset_ns, clock.drift, clock.uncertainty_ns, clock.num_collectives) == (3_000_000_017, 0.0, 0, 50)
    assert np.array_equal(clock.correct(ends + 3_000_000_017), ends)


def test_even_where_one_clock_counts_from_1970_and_the_other_from_0() -> None:
    ends = make_ends(20)
    clock = set_clock(1, 0, ends, ends - YEARS_NS, is_same_host=False)
    assert clock.offset_ns == YEARS_NS


def test_single_ends_that_are_far_off_do_not_move_it() -> None:
    ends = make_ends(21)
    late = ends.copy()
    late[::5] += 7_000_000
    assert set_clock(1, 0, late + 1000, ends, is_same_host=False).offset_ns == 1000


def test_a_clock_that_runs_faster_is_put_back_at_every_time() -> None:
    ends = make_ends()
    elapsed = ends - ends[0]
    fast = ends + 5_000_000 + np.rint(4e-5 * elapsed).astype(np.int64)
    clock = set_clock(1, 0, fast, ends, is_same_host=False)
    assert clock.drift == pytest.approx(4e-5, rel=1e-3)
    assert np.abs(clock.correct(fast) - ends).max() <= 10
    assert clock.uncertainty_ns <= 10


def test_noise_is_no_drift_and_becomes_the_uncertainty() -> None:
    rng = np.random.default_rng(1)
    ends = make_ends(200)
    noise = np.rint(rng.normal(0, 10_000, 200)).astype(np.int64)
    clock = set_clock(1, 0, ends + noise, ends, is_same_host=False)
    assert clock.drift == 0
    assert clock.uncertainty_ns == pytest.approx(20_000, rel=0.3)


def test_of_a_few_the_largest_difference_is_the_uncertainty() -> None:
    ends = make_ends(3)
    clock = set_clock(1, 0, ends + np.array([0, 100, 5000]), ends, is_same_host=False)
    assert (clock.offset_ns, clock.uncertainty_ns) == (100, 4900)


def test_ranks_of_one_host_have_one_clock_unless_they_clearly_do_not() -> None:
    ends = make_ends(3)
    close = ends + np.array([10, 20, 500])
    assert set_clock(1, 0, close, ends, is_same_host=True).offset_ns == 0
    assert set_clock(1, 0, close, ends, is_same_host=False).offset_ns == 20
    assert set_clock(1, 0, ends + 9_000_000, ends, is_same_host=True).offset_ns == 9_000_000


def test_the_reference_is_left_alone() -> None:
    ends = make_ends()
    assert np.array_equal(Clock(rank=0, reference=0).correct(ends), ends)


def test_points_at_one_time_have_no_slope() -> None:
    assert find_slope(np.zeros(10), np.arange(10.0)) == 0.0


def test_the_spread_of_normal_noise_is_its_standard_deviation() -> None:
    rng = np.random.default_rng(2)
    assert measure_spread(rng.normal(5, 3, 10_000)) == pytest.approx(3, rel=0.05)


def test_a_single_collective_does_not_move_the_clock_that_ranks_of_a_host_share() -> None:
    ends = make_ends(1)
    assert set_clock(1, 0, ends + 9_000_000, ends, is_same_host=True).offset_ns == 0
    assert set_clock(1, 0, ends + 9_000_000, ends, is_same_host=False).offset_ns == 9_000_000


def test_a_line_needs_eight_ends() -> None:
    """Of fewer, the largest difference is the uncertainty; of these, twice the robust deviation."""
    for num, drift in ((7, 0.0), (8, 5e-4)):
        ends = make_ends(num)
        clock = set_clock(1, 0, ends + np.rint(5e-4 * (ends - ends[0])).astype(np.int64), ends, is_same_host=False)
        assert clock.drift == pytest.approx(drift, rel=1e-3)
        assert clock.origin_ns == ends[0]
        assert clock.uncertainty_ns == (15_000 if num == 7 else 0)


@pytest.mark.parametrize(("drift", "is_line"), [(9.9e-4, True), (1.02e-3, False), (-9.9e-4, True), (-1.02e-3, False)])
def test_a_clock_that_runs_faster_by_more_than_a_thousandth_is_none(drift: float, is_line: bool) -> None:
    ends = make_ends(9)
    clock = set_clock(1, 0, ends + np.rint(drift * (ends - ends[0])).astype(np.int64), ends, is_same_host=False)
    assert (clock.drift != 0) is is_line


def test_a_line_has_to_halve_the_spread() -> None:
    ends, elapsed = make_ends(20), np.arange(20)
    for rise, is_line in ((300, False), (1000, True)):
        clock = set_clock(1, 0, ends + rise * elapsed + 4000 * (elapsed % 2), ends, is_same_host=False)
        assert (clock.drift != 0) is is_line


def test_the_uncertainty_is_twice_the_robust_deviation_of_what_the_line_leaves() -> None:
    ends, rest = make_ends(9), np.array([0, 100, -100, 0, 200, -200, 0, 50, -50])
    clock = set_clock(1, 0, ends + 700 + rest, ends, is_same_host=False)
    assert (clock.offset_ns, clock.drift, clock.uncertainty_ns) == (700, 0.0, round(2 * 1.4826 * 50))
    host = set_clock(1, 0, ends + 148 + rest, ends, is_same_host=True)
    assert (host.offset_ns, host.num_collectives) == (0, 9), "within the error"
    assert set_clock(1, 0, ends + 149 + rest, ends, is_same_host=True).offset_ns == 149


def test_a_clock_of_the_host_is_set_by_nothing() -> None:
    ends = make_ends(2)
    assert set_clock(1, 0, ends[:1] + 9, ends[:1], is_same_host=True).num_collectives == 0
    assert set_clock(1, 0, ends[:1] + 9, ends[:1], is_same_host=False).num_collectives == 1
    assert set_clock(1, 0, ends + 9, ends, is_same_host=True).num_collectives == 2


def test_a_slope_is_the_median_over_all_pairs_of_a_few_points() -> None:
    assert find_slope(np.array([0.0, 1.0, 3.0, 3.0]), np.array([0.0, 2.0, 3.0, 9.0])) == pytest.approx(2.0)
    assert measure_spread(np.array([1.0, 2.0, 4.0, 8.0, 100.0])) == pytest.approx(1.4826 * 3)
    times = np.arange(1000.0)
    values = np.where(np.isin(times, np.linspace(0, 999, 200).astype(int)), 3 * times, 0.0)
    assert find_slope(times, values) == pytest.approx(3.0), "of many points, 200 evenly chosen ones"


class Listed(TraceBuilder):
    """A rank whose header lists groups."""

    groups: Mapping[str, Sequence[int]] = {"a": (0, 1), "b": (0, 2), "all": (0, 1, 2)}

    @property
    def header(self) -> dict[str, Any]:
        header = super().header
        groups = [{"pg_name": name, "pg_size": len(one), "ranks": one} for name, one in self.groups.items()]
        header["distributedInfo"]["pg_config"] = groups
        return header


def list_keys(
    directory: Path, *collectives: Collective, groups: Mapping[str, Sequence[int]] | None = None
) -> list[Any]:
    """The keys of the last of rank 0's collectives."""
    builder = Listed(num_ranks=3)
    builder.groups = Listed.groups if groups is None else groups
    trace = read_rank(builder.kernel("gemm", 0, 1).write(directory / "t.json"))
    trace = replace(trace, collectives=collectives)
    return [(key.name, key.members, key.is_inferred, key.stream, key.is_transfer) for key in
            GroupFinder(0, trace).list_keys(collectives[-1])]  # fmt: skip


def test_a_collective_belongs_to_every_listed_set_that_fits(tmp_path: Path) -> None:
    plain = Collective("all_reduce", 0, 1, stream=7)
    assert list_keys(tmp_path, plain._replace(group="b")) == [("b", (0, 2), False, -1, False)]
    assert list_keys(tmp_path, plain._replace(group="unlisted")) == [("unlisted", (), False, -1, False)]
    assert list_keys(tmp_path, plain) == [("", one, True, 0, False) for one in ((0, 1), (0, 1, 2), (0, 2))]
    assert list_keys(tmp_path, plain._replace(group_size=2)) == [("", one, True, 0, False) for one in ((0, 1), (0, 2))]
    assert list_keys(tmp_path, plain._replace(group_size=3)) == [("", (0, 1, 2), False, 0, False)]
    assert list_keys(tmp_path, plain, groups={"a": (0, 1)}) == [("", (0, 1), False, -1, False)]
    two = {"a": (0, 1), "b": (1, 2), "alone": (0,)}
    assert list_keys(tmp_path, plain, groups=two) == [("", (0, 1), False, 0, False)]


def test_a_stream_names_its_group_unless_it_has_several(tmp_path: Path) -> None:
    plain = Collective("all_reduce", 0, 1, stream=7)
    known = plain._replace(group="b")
    assert list_keys(tmp_path, known, plain) == [("", (0, 2), False, 0, False)]
    assert len(list_keys(tmp_path, known, plain._replace(group="a"), plain)) == 3
    assert len(list_keys(tmp_path, known, plain._replace(stream=8))) == 3
    assert list_keys(tmp_path, plain, plain._replace(stream=9))[0][3] == 1, "the second stream without a group"


def test_a_transfer_belongs_to_its_two_ends_or_to_all_that_may_take_part(tmp_path: Path) -> None:
    send = Collective("send", 0, 1, stream=7, group="b", peer=1)
    assert list_keys(tmp_path, send) == [("0 → 2", (0, 2), False, -1, True)]
    assert list_keys(tmp_path, send._replace(kind="recv")) == [("2 → 0", (2, 0), False, -1, True)]
    assert list_keys(tmp_path, send._replace(peer=2)) == [("0 → 2", (0, 2), False, -1, True)]
    assert list_keys(tmp_path, send._replace(peer=None)) == [("b send/recv", (0, 2), True, -1, False)]
    assert list_keys(tmp_path, send._replace(kind="send_recv")) == [("b send/recv", (0, 2), True, -1, False)]
    unnamed = send._replace(group="", peer=None)
    assert list_keys(tmp_path, unnamed, groups={"a": (0, 1)}) == [("send/recv", (0, 1), True, -1, False)]
    assert list_keys(tmp_path, unnamed._replace(group_size=3)) == [("", (0, 1, 2), True, 0, False)]


def test_if_one_rank_doubts_a_set_all_do_and_streams_count_only_then() -> None:
    sure, doubted = GroupKey("", (0, 1), True, stream=2), GroupKey("", (0, 1), True, True, stream=3)
    other = GroupKey("", (0, 1), False, stream=2)
    assert agree_on_keys([sure, doubted, other]) == {
        sure: GroupKey("", (0, 1), True, True, stream=2),
        doubted: doubted,
        other: GroupKey("", (0, 1), False),
    }

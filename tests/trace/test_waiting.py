"""Who waits, and for whom."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalelab.trace.matching import StepWaiting, sum_by_step
from scalelab.trace.waiting import find_arrivals
from tests.trace.jobs import SECOND_US, match, reduce_on_time, write_job


@pytest.mark.parametrize("ahead_us", [(0, 0, 0), (0, 4 * SECOND_US, 9 * SECOND_US)])
def test_the_last_rank_is_named_with_what_the_others_wait(tmp_path: Path, ahead_us: tuple[float, ...]) -> None:
    arrivals = [(0, 10, 100), (10, 0, 200), (0, 90, 30), *[(0, 0, 0)] * 6]
    found = find_arrivals(match(write_job(tmp_path, reduce_on_time(arrivals, ahead_us=ahead_us))))
    assert (found.num_matched, found.num_unclear) == (9, 6)
    first, second, third = found.by_rank
    assert (third.num_last, third.median_late_ns, third.max_late_ns) == (2, 145_000, 195_000)
    assert third.waited_for_ns == 100_000 + 90_000 + 190_000 + 200_000
    assert (second.num_last, second.median_late_ns, second.waited_for_ns) == (1, 75_000, 90_000 + 60_000)
    assert (first.num_last, first.median_late_ns, first.max_late_ns) == (0, None, None)
    assert [rank.waiting_ns for rank in found.by_rank] == [380_000, 290_000, 60_000]
    assert {rank.transfer_ns for rank in found.by_rank} == {9 * 50_000}
    assert found.last is third


def test_nobody_is_last_where_the_clocks_are_not_certain_enough(tmp_path: Path) -> None:
    builders = reduce_on_time([(0, 10)] * 9)
    for number, event in enumerate(builders[1].events):
        event["dur"] += (-30, 0, 30)[number % 3]
    found = find_arrivals(match(write_job(tmp_path, builders)))
    assert found.num_unclear == 9
    assert found.last is None


def test_transfer_and_waiting_by_step_add_up_to_those_of_the_rank(tmp_path: Path) -> None:
    builders = reduce_on_time([(0, 10), (0, 20), (30, 0), (0, 0)])
    for builder in builders:
        builder.step(7, -1, 1999).step(8, 1998, 1002)
    job = write_job(tmp_path, builders)
    found = sum_by_step(match(job), job.by_rank)
    assert found[0] == {
        7: StepWaiting(num_collectives=2, transfer_ns=100_000, waiting_ns=30_000),
        8: StepWaiting(num_collectives=1, transfer_ns=50_000, waiting_ns=0),
    }
    assert found[1][8].waiting_ns == 30_000

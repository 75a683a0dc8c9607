"""How busy a device was, from readings whose answer is known."""

from __future__ import annotations

import pytest

from scalelab.records.observations import DeviceLoad
from scalelab.studies.strategies.answer import Launch, describe_utilization, slice_time


def make_loads(shares: list[float], *, start: float = 0.0, period: float = 1.0) -> list[DeviceLoad]:
    """One reading after the other, each over one period."""
    return [
        DeviceLoad(seconds=start + (number + 1) * period, device="rank 0", busy=share, interval_seconds=period)
        for number, share in enumerate(shares)
    ]


def make_launch(shares: list[float], *, start: float = 0.0, end: float | None = None) -> Launch:
    return Launch(loads=make_loads(shares), start_seconds=start, end_seconds=len(shares) if end is None else end)


def test_a_device_that_always_works_is_busy_and_never_idle() -> None:
    seen = describe_utilization([make_launch([1.0] * 20)] * 3)
    assert seen is not None
    assert (seen.busy.value, seen.busy.low, seen.busy.high) == (1.0, 1.0, 1.0)
    assert seen.idle.value == 0.0
    assert seen.slices == (1.0,) * 10


def test_only_intervals_that_lie_wholly_within_the_steps_count() -> None:
    launch = make_launch([0.0, 0.0, 1.0, 1.0, 1.0, 0.0], start=1.5, end=5.5)
    seen = describe_utilization([launch])
    assert seen is not None
    assert seen.busy.value == 1.0
    assert len(launch.counted) == 3


def test_a_launch_shorter_than_the_looks_says_nothing() -> None:
    assert describe_utilization([make_launch([1.0, 1.0], start=0.5, end=1.4)]) is None
    assert describe_utilization([]) is None


def test_idle_is_the_share_of_time_in_which_hardly_anything_was_done() -> None:
    seen = describe_utilization([make_launch([0.05] * 3 + [0.9] * 7)])
    assert seen is not None
    assert seen.idle.value == pytest.approx(0.3)
    assert seen.low == pytest.approx(0.05)
    assert seen.high == pytest.approx(0.9)


def test_long_intervals_weigh_more_than_short_ones() -> None:
    loads = [
        DeviceLoad(seconds=1.0, device="rank 0", busy=1.0, interval_seconds=1.0),
        DeviceLoad(seconds=4.0, device="rank 0", busy=0.0, interval_seconds=3.0),
    ]
    seen = describe_utilization([Launch(loads=loads, start_seconds=0.0, end_seconds=4.0)])
    assert seen is not None
    assert seen.busy.value == pytest.approx(0.25)


def test_tenths_follow_the_time_and_what_was_not_looked_at_is_unknown() -> None:
    rising = [number / 20 for number in range(20)]
    assert slice_time([make_launch(rising)]) == pytest.approx([(4 * k + 1) / 40 for k in range(10)])
    assert slice_time([make_launch([0.5], end=10.0)]) == (0.5, *[None] * 9)


def test_the_interval_counts_launches() -> None:
    seen = describe_utilization([make_launch([share] * 10) for share in (0.4, 0.5, 0.6)])
    assert seen is not None
    assert seen.busy.value == pytest.approx(0.5)
    assert seen.busy.low is not None
    assert seen.busy.low < 0.4
    alone = describe_utilization([make_launch([0.4] * 10)])
    assert alone is not None
    assert alone.busy.low is None

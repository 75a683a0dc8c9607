"""The slow rank is found, and found only where there is one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_median
from scalelab.analysis.step_parts import (
    SMALLEST_EXCESS,
    Excess,
    LaunchSteps,
    _choose_other,
    _estimate_excess,
    find_excesses,
    find_quiet_step,
    find_slow,
)
from scalelab.records.trial import PHASES

OWN = {"input": 0.01, "forward": 0.3, "backward": 0.5, "optimizer": 0.1}
EXCHANGE = 0.09


def make_launch(
    seed: int,
    num_ranks: int = 2,
    excess: Mapping[tuple[int, str], float] | None = None,
    *,
    noise: float = 0.01,
    num_steps: int = 20,
) -> LaunchSteps:
    """Ranks that all begin a step together, wait for the last gradient and exchange."""
    rng = np.random.default_rng(seed)
    shape = (num_steps, num_ranks)
    own = {name: seconds * np.exp(noise * rng.standard_normal(shape)) for name, seconds in OWN.items()}
    for (rank, phase), seconds in (excess or {}).items():
        own[phase][:, rank] += seconds
    ready = own["input"] + own["forward"] + own["backward"]
    end = np.broadcast_to(ready.max(axis=1, keepdims=True) + EXCHANGE, shape)
    times = {**own, "backward": end - own["input"] - own["forward"], "ready": ready}
    start = np.arange(num_steps)[:, None] * 10.0 + np.zeros(shape)
    return LaunchSteps(start=start, step=end + own["optimizer"], times=times, stalls=None)


def make_launches(num_rounds: int = 6, **fields: object) -> list[LaunchSteps]:
    return [make_launch(seed, **fields) for seed in range(num_rounds)]  # type: ignore[arg-type]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_phase_and_delay_are_found(rank: int, phase: str) -> None:
    (found,) = find_slow(find_excesses(make_launches(excess={(rank, phase): 0.05})))
    assert (found.rank, found.phase, found.other) == (rank, phase, 1 - rank)
    assert found.seconds.value == pytest.approx(0.05, rel=0.1)
    assert found.seconds.low is not None
    assert found.seconds.low < 0.05 < (found.seconds.high or 0)


def test_equal_ranks_raise_no_alarm_in_two_hundred_runs() -> None:
    for run in range(200):
        launches = [make_launch(1000 + 6 * run + number, noise=0.05) for number in range(6)]
        assert not find_slow(find_excesses(launches)), run


def test_what_is_certain_and_small_is_no_alarm() -> None:
    excesses = find_excesses(make_launches(excess={(0, "input"): 0.9 * SMALLEST_EXCESS}))
    assert excesses[0].seconds.low is not None
    assert excesses[0].seconds.low > 0
    assert not find_slow(excesses)


def test_what_is_large_and_uncertain_is_no_alarm() -> None:
    launches = [make_launch(seed, excess={(0, "forward"): 0.2 * (-1) ** seed + 0.05}) for seed in range(6)]
    assert not find_slow(find_excesses(launches))


@pytest.mark.parametrize(("num_ranks", "slow"), [(3, {0, 2}), (4, {1, 2}), (5, {4}), (8, {0, 3, 5})])
def test_several_slow_ranks_are_all_named(num_ranks: int, slow: set[int]) -> None:
    excess = {(rank, "backward"): 0.1 for rank in slow}
    found = find_slow(find_excesses(make_launches(num_ranks=num_ranks, excess=excess)))
    assert {(excess.rank, excess.phase) for excess in found} == {(rank, "backward") for rank in slow}
    assert all(excess.seconds.value == pytest.approx(0.1, rel=0.1) for excess in found)


def test_a_rank_slow_in_two_phases_is_named_for_both_the_worse_first() -> None:
    found = find_slow(find_excesses(make_launches(excess={(1, "input"): 0.05, (1, "optimizer"): 0.2})))
    assert [excess.phase for excess in found] == ["optimizer", "input"]


def test_bursts_of_other_work_do_not_hide_a_delay() -> None:
    launches = make_launches(excess={(0, "forward"): 0.05})
    for number, launch in enumerate(launches):
        hit = np.random.default_rng(number).random(launch.start.shape) < 0.4
        launch.times["forward"][hit] += 0.5
        launch.times["ready"][hit] += 0.5
    (found,) = find_slow(find_excesses(launches))
    assert (found.rank, found.phase) == (0, "forward")
    assert found.seconds.value == pytest.approx(0.05, rel=0.1)


def test_a_single_launch_has_an_interval_from_its_steps() -> None:
    (found,) = find_slow(find_excesses(make_launches(1, excess={(0, "forward"): 0.1})))
    assert (found.rank, found.phase) == (0, "forward")
    few = find_excesses([make_launch(0, excess={(0, "forward"): 0.1}, num_steps=5)])
    assert few[0].seconds.low is None
    assert not find_slow(few)


def test_one_rank_has_nobody_to_be_compared_with() -> None:
    assert find_excesses(make_launches(num_ranks=1)) == []
    assert find_excesses([]) == []


def test_the_step_without_stalls_is_own_time_and_exchange() -> None:
    assert find_quiet_step(make_launches(noise=0.0)) == pytest.approx(sum(OWN.values()) + EXCHANGE)


def test_the_interval_of_one_launch_lies_around_the_difference_of_its_levels() -> None:
    steps = np.zeros((21, 2))
    steps[:, 0] = np.arange(21) / 100
    levels = np.array([[0.5, 0.2]])
    found = _estimate_excess([steps], levels, 0, 1)
    middle = estimate_median([list(steps[:, 0])])
    assert found.value == pytest.approx(0.3)
    assert (found.low, found.high) == (pytest.approx(middle.low + 0.2), pytest.approx(middle.high + 0.2))
    assert found.low < found.value < found.high
    assert _estimate_excess([steps[:2]], levels, 0, 1).low is None


@pytest.mark.parametrize(
    ("low", "share", "is_alarm"), [(0.001, 0.03, True), (0.0, 0.03, False), (0.001, 0.0299, False), (None, 0.5, False)]
)
def test_an_alarm_is_sure_and_three_percent_of_the_step(low: float | None, share: float, is_alarm: bool) -> None:
    high = None if low is None else 1.0
    seconds = Estimate(value=0.1, low=low, high=high)
    found = Excess(rank=0, other=1, phase="input", seconds=seconds, share=Estimate(value=share))
    assert found.is_alarm is is_alarm


@pytest.mark.parametrize(("rank", "other"), [(0, 3), (1, 0), (2, 3), (3, 0)])
def test_a_rank_is_compared_with_the_lower_median_of_the_others(rank: int, other: int) -> None:
    assert _choose_other(np.array([3.0, 1.0, 9.0, 2.0]), rank) == other
    assert _choose_other(np.array([3.0, 1.0, 9.0]), 0) == 1
    assert _choose_other(np.array([3.0, 1.0]), 1) == 0


def test_an_excess_is_over_rounds_that_of_the_lower_quartiles() -> None:
    """Of five steps the lower quartile is the second; the share is of the quiet step, 1 s of the slowest rank."""
    launches = [make_launch(seed, noise=0.0, excess={(0, "forward"): 0.1 * (seed + 1)}) for seed in range(3)]
    found = find_excesses(launches)[0]
    assert (found.rank, found.phase, found.seconds.value) == (0, "forward", pytest.approx(0.2))
    assert found.seconds.half_width == pytest.approx(4.302653 * 0.1 / np.sqrt(3), rel=1e-5)
    quiet = sum(OWN.values()) + EXCHANGE + 0.2
    assert find_quiet_step(launches) == pytest.approx(quiet)
    assert found.share.value == pytest.approx(0.2 / quiet)
    steps = np.array([[1.0, 0.0], [2.0, 0.0], [5.0, 0.0], [7.0, 0.0], [9.0, 0.0]])
    assert _estimate_excess([steps] * 2, np.array([[2.0, 0.5], [2.0, 0.5]]), 0, 1).value == 1.5


def test_ten_steps_of_one_launch_have_an_interval_and_nine_none() -> None:
    steps, levels = np.arange(22.0).reshape(11, 2) ** 1.5, np.array([[1.0, 0.0]])
    assert _estimate_excess([steps[:10]], levels, 0, 1).low is not None
    assert _estimate_excess([steps[:9]], levels, 0, 1).low is None


def test_without_the_last_gradient_the_quiet_step_is_the_step_of_the_slowest_rank() -> None:
    launch = make_launch(0)
    blind = replace(launch, times={**launch.times, "ready": np.full_like(launch.start, np.nan)})
    assert find_quiet_step([blind]) == pytest.approx(float(np.quantile(launch.step.max(axis=1), 0.25)))

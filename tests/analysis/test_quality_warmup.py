"""Warm-up: exact on clean series, and to one step under noise."""

from __future__ import annotations

import numpy as np
import pytest

from scalelab.analysis.quality import Warmup, find_step_medians, find_warmup
from tests.analysis.noise import simulate_rounds


def test_constant_steps_have_no_warmup() -> None:
    assert find_warmup([[1.0] * 30]) == Warmup(num_steps=0, is_settled=True)


@pytest.mark.parametrize("length", range(16))
def test_slow_leading_steps_are_counted_exactly_without_noise(length: int) -> None:
    assert find_warmup([[1.3] * length + [1.0] * (30 - length)]) == Warmup(num_steps=length, is_settled=True)


def test_the_usual_decay_is_found_down_to_a_tenth() -> None:
    assert find_warmup([[3.5, 1.6, 1.2, 1.11, 1.05] + [1.0] * 25]).num_steps == 4


def test_a_later_spike_does_not_extend_it() -> None:
    steps = [2.0, 2.0] + [1.0] * 28
    steps[6] = steps[12] = 5.0
    assert find_warmup([steps]).num_steps == 2


def test_a_spike_in_one_launch_is_outvoted_by_the_others() -> None:
    assert find_warmup([[9.0] + [1.0] * 29, [1.0] * 30, [1.0] * 30]).num_steps == 0


def test_one_fast_step_inside_does_not_end_it() -> None:
    assert find_warmup([[2.0] * 5 + [1.0] + [2.0] * 5 + [1.0] * 19]).num_steps == 11


def test_a_warmup_longer_than_half_of_the_steps_has_not_settled() -> None:
    assert find_warmup([[2.0] * 16 + [1.0] * 14]) == Warmup(num_steps=16, is_settled=False)


def test_a_fast_beginning_is_no_warmup() -> None:
    assert find_warmup([[0.5] * 5 + [1.0] * 25]).num_steps == 0


def test_nothing_measured_has_not_settled() -> None:
    assert find_warmup([[], []]) == Warmup(num_steps=0, is_settled=False)


def test_the_unit_of_time_does_not_matter() -> None:
    rounds = simulate_rounds(np.random.default_rng(0), 1.0, 8, 30)
    assert find_warmup(rounds) == find_warmup([[1024 * seconds for seconds in steps] for steps in rounds])


def test_launches_are_read_as_far_as_all_of_them_got() -> None:
    assert find_step_medians([[1.0, 2.0, 3.0], [], [3.0, 4.0]]).tolist() == [2.0, 3.0]


def inject_warmup(rounds: list[list[float]], factors: list[float]) -> list[list[float]]:
    padded = np.ones(len(rounds[0]))
    padded[: len(factors)] = factors
    slowed: list[list[float]] = (np.array(rounds) * padded).tolist()
    return slowed


def measure_recovery(factors: list[float], num_rounds: int, num_steps: int, replications: int) -> float:
    """How often the length of the injected warm-up is found to one step."""
    rng = np.random.default_rng(len(factors))
    found = [
        find_warmup(inject_warmup(simulate_rounds(rng, 1.0, num_rounds, num_steps), factors)).num_steps
        for _ in range(replications)
    ]
    return float(np.mean(np.abs(np.array(found) - len(factors)) <= 1))


@pytest.mark.parametrize("num_steps", [30, 45])
@pytest.mark.parametrize("length", range(21))
def test_eight_launches_find_every_warmup_to_one_step(length: int, num_steps: int) -> None:
    for factors in ([1.3] * length, [3.5] * length, np.geomspace(3.5, 1.3, length).tolist()):
        assert measure_recovery(factors, 8, num_steps, replications=50) >= 0.98


@pytest.mark.parametrize("num_steps", [30, 45])
@pytest.mark.parametrize("length", range(21))
def test_a_single_launch_finds_most_warmups_to_one_step(length: int, num_steps: int) -> None:
    for factors in ([1.3] * length, [2.0] * length, np.geomspace(3.5, 1.3, length).tolist()):
        assert measure_recovery(factors, 1, num_steps, replications=200) >= 0.9

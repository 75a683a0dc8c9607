"""The numbers that laws are fitted to, and the small least-squares problems."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelab.analysis.speedup import measure_residual, solve_non_negative, solve_relative, tabulate_sizes


def test_sizes_are_sorted_and_empty_ones_left_out() -> None:
    table = tabulate_sizes({4: [[1.0]], 1: [[3.0]], 2: [[]]})
    assert table.num_ranks.tolist() == [1.0, 4.0]
    assert table.centres == pytest.approx([3.0, 1.0])
    assert table.largest_ranks == 4


def test_no_sizes_make_an_empty_table() -> None:
    assert len(tabulate_sizes({}).num_ranks) == 0


def test_a_machine_that_drifts_leaves_the_shape_alone() -> None:
    weather = [1.0, 1.0, 1.0, 1.5, 2.0, 2.0]
    table = tabulate_sizes({1: [[2 * w] for w in weather], 2: [[w] for w in weather]})
    assert table.centres[0] / table.centres[1] == pytest.approx(2.0)


def test_sizes_without_common_rounds_are_summarised_one_by_one() -> None:
    table = tabulate_sizes({1: [[2.0], [2.0]], 2: [[1.0]]})
    assert table.centres == pytest.approx([2.0, 1.0])
    assert len(table.per_round) == 0


def test_an_exact_law_is_solved_exactly() -> None:
    columns = np.array([[1.0, 1.0], [1.0, 0.5], [1.0, 0.25]])
    assert solve_relative(columns, columns @ [0.2, 0.8]) == pytest.approx([0.2, 0.8])
    assert solve_non_negative(columns, columns @ [0.2, 0.8]) == pytest.approx([0.2, 0.8])


def test_a_negative_coefficient_becomes_none() -> None:
    columns = np.array([[1.0, 1.0], [1.0, 0.5], [1.0, 0.25]])
    coefficients = solve_non_negative(columns, columns @ [-0.1, 1.0])
    assert coefficients[0] == 0.0
    assert coefficients[1] > 0


@given(st.lists(st.floats(0.1, 10), min_size=4, max_size=4))
@settings(deadline=None)
def test_the_non_negative_solution_is_possible_and_no_better_than_the_free_one(target: list[float]) -> None:
    sizes = np.array([1.0, 2.0, 4.0, 8.0])
    columns = np.column_stack([np.ones(4), sizes - 1, sizes * (sizes - 1)])
    values = np.array(target)
    bounded = solve_non_negative(columns, values)
    free = measure_residual(columns, solve_relative(columns, values), values)
    assert np.all(bounded >= 0)
    assert measure_residual(columns, bounded, values) >= free - 1e-9


@given(st.lists(st.floats(0.1, 10), min_size=4, max_size=4), st.lists(st.floats(0, 5), min_size=3, max_size=3))
@settings(deadline=None)
def test_no_other_non_negative_coefficients_fit_better(target: list[float], other: list[float]) -> None:
    sizes = np.array([1.0, 2.0, 4.0, 8.0])
    columns = np.column_stack([np.ones(4), sizes - 1, sizes * (sizes - 1)])
    values = np.array(target)
    best = measure_residual(columns, solve_non_negative(columns, values), values)
    assert best <= measure_residual(columns, np.array(other), values) + 1e-9


def test_the_non_negative_solution_is_that_of_lawson_and_hanson() -> None:
    optimize = pytest.importorskip("scipy.optimize")
    random = np.random.default_rng(0)
    for num_columns in (1, 2, 3):
        for _ in range(20):
            columns, target = random.normal(0.3, 1.0, (5, num_columns)), random.uniform(0.5, 2.0, 5)
            expected = optimize.nnls(columns / target[:, np.newaxis], np.ones(5))[0]
            assert solve_non_negative(columns, target) == pytest.approx(expected, abs=1e-9)


def test_a_residual_is_the_root_mean_square_of_what_is_off_relative_to_the_target() -> None:
    found = measure_residual(np.ones((2, 1)), np.array([1.0]), np.array([0.8, 1.25]))
    assert found == pytest.approx(((0.25**2 + 0.2**2) / 2) ** 0.5)

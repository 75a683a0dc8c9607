"""Two numbers explain the time of a reader, and are found from what it took."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from scalelab.data.reading_cost import Costs, ItemTiming, TimedRead, TriedReader, fit_costs, measure_costs


def test_costs_are_found_from_times_that_follow_them() -> None:
    timings = [ItemTiming(0.002 + 1e-6 * number, number) for number in (0, 0, 0, 500, 1000)]
    costs = fit_costs(timings, timings)
    assert costs.item_seconds == pytest.approx(0.002)
    assert costs.byte_seconds == pytest.approx(1e-6)
    assert costs.predict(10, 1e6) == pytest.approx(1.02)


def test_a_single_slow_item_changes_nothing() -> None:
    timings = [ItemTiming(0.001, 0)] * 10 + [ItemTiming(5.0, 0)] + [ItemTiming(0.003, 1000)] * 10
    costs = fit_costs(timings, timings)
    assert costs.item_seconds == 0.001
    assert costs.byte_seconds == pytest.approx(2e-6)


def test_what_one_order_does_not_tell_is_taken_from_all() -> None:
    always, never = [ItemTiming(0.011, 1000)] * 12, [ItemTiming(0.001, 0)] * 12
    assert fit_costs(always, always + never) == fit_costs(never, always + never)
    assert fit_costs(always, always).predict(3, 3000) == pytest.approx(0.033)
    assert fit_costs(never, never) == Costs(0.001, 0.0)


def test_a_reader_is_opened_for_each_part_and_reads_at_least_one_item() -> None:
    opened: list[list[tuple[int, ...]]] = []

    @contextmanager
    def open_reader() -> Iterator[TimedRead]:
        opened.append([])
        yield lambda item: opened[-1].append(tuple(item))

    parts = [[(0,), (1,)], [(2,), (3,)]]
    measure_costs(TriedReader(open_reader, lambda: len), parts, parts, seconds=0)
    assert len(opened) == 8
    assert all(read for read in opened)
    assert opened[0][0] == opened[1][0] == (0,)

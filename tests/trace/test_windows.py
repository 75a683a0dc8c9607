from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelab.trace.windows import (
    RECORD,
    ProfilerStep,
    Records,
    Window,
    arrange_steps,
    cut_windows,
    place_in_steps,
)

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), min_size=1, max_size=20)


def make(spans: list[tuple[int, int]]) -> Records:
    records = np.zeros(len(spans), dtype=RECORD)
    records["start"] = [start for start, _ in spans]
    records["end"] = [start + length for start, length in spans]
    records["name"] = np.arange(len(spans))
    return records


def cut(spans: list[tuple[int, int]], steps: list[ProfilerStep], num_blocks: int = 1) -> list[Window]:
    records = make(sorted(spans))
    low = min([int(records["start"].min()), *(step.start for step in steps)])
    high = max([int(records["end"].max()), *(step.end for step in steps)])
    blocks = [records[part] for part in np.array_split(np.arange(len(records)), num_blocks)]
    return list(cut_windows(blocks, sorted(steps, key=lambda step: step.start), low, high))


@given(
    spans=SPANS,
    steps=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 30)), max_size=4),
    num_blocks=st.integers(1, 6),
)
@settings(derandomize=True, deadline=None, max_examples=150)
def test_windows_follow_each_other_and_hold_every_event_where_it_runs(
    spans: list[tuple[int, int]], steps: list[tuple[int, int]], num_blocks: int
) -> None:
    given_steps = [ProfilerStep(number, start, start + length) for number, (start, length) in enumerate(steps)]
    windows = cut(spans, given_steps, num_blocks)
    for window, following in pairwise(windows):
        assert window.end == following.start
    begun = np.concatenate([window.records for window in windows])
    assert sorted(begun["name"].tolist()) == list(range(len(spans)))
    for record in begun:
        for window in windows:
            runs = record["start"] < window.end and record["end"] > window.start
            assert not runs or record["name"] in window.all_records["name"]
    for window in windows:
        for time in range(window.start, window.end):
            assert sorted(window.steps) == [step.number for step in given_steps if step.start <= time < step.end]


def test_the_last_event_belongs_to_all_steps_that_follow() -> None:
    windows = cut([(10, 90)], [ProfilerStep(0, 0, 50), ProfilerStep(1, 50, 100)])
    assert [(w.start, w.end, w.steps, len(w.all_records)) for w in windows] == [
        (0, 10, (0,), 0),
        (10, 50, (0,), 1),
        (50, 100, (1,), 1),
    ]


def test_a_step_on_several_streams_is_one() -> None:
    assert arrange_steps([ProfilerStep(3, 10, 20), ProfilerStep(3, 5, 15), ProfilerStep(4, 18, 30)]) == [
        ProfilerStep(3, 5, 18),
        ProfilerStep(4, 18, 30),
    ]


def test_a_trace_of_nothing_is_an_empty_window() -> None:
    (window,) = cut_windows([], [], 0, 0)
    assert (window.start, window.end, window.steps, len(window.all_records)) == (0, 0, (), 0)


def test_what_begins_between_steps_is_in_none() -> None:
    steps = [ProfilerStep(4, 10, 20), ProfilerStep(5, 30, 40)]
    assert place_in_steps(steps, np.array([9, 10, 19, 20, 30, 40])).tolist() == [-1, 0, 0, -1, 1, -1]
    assert place_in_steps([], np.array([1])).tolist() == [-1]

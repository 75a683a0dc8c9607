"""A step's memory, replayed from a list of allocations: peaks and categories whose truth is known."""

from __future__ import annotations

import pytest

from scalelab.analysis.memory import MemoryEvent, PhaseMark, account_step, estimate_states, find_alive

STANDING = {"parameters": 100, "optimizer": 200}


def make_events(*changes: tuple[int, int]) -> list[MemoryEvent]:
    """Events from pairs of address and bytes, one per second."""
    return [MemoryEvent(float(number), num_bytes, address) for number, (address, num_bytes) in enumerate(changes)]


STEP = make_events(
    (1, 40),  # an activation
    (2, 7),  # lives within forward
    (2, -7),
    (3, 10),  # the output
    (4, 4),  # what the loss keeps
    (5, 100),  # a gradient
    (1, -40),
    (3, -10),
    (4, -4),
    (6, 50),  # the optimizer's own
    (6, -50),
    (5, -100),
)
MARKS = [
    PhaseMark(phase="begin", position=0),
    PhaseMark(phase="model", position=4, named={3: "output"}),
    PhaseMark(phase="forward", position=5),
    PhaseMark(phase="backward", position=9, named={5: "gradients"}),
    PhaseMark(phase="optimizer", position=12),
]


def test_the_categories_add_up_to_the_peak() -> None:
    account = account_step(STEP, MARKS, STANDING)
    assert account.peak_bytes == 300 + 40 + 10 + 4 + 100
    assert sum(account.by_category.values()) == account.peak_bytes
    assert account.by_category == STANDING | {"activations": 40, "output": 14, "gradients": 100}


def test_the_peak_is_not_what_is_alive_after_the_step() -> None:
    account = account_step(STEP, MARKS, STANDING)
    assert account.current_bytes == 300
    assert account.peak_phase == "backward"
    assert account.phase_peaks == {"forward": 354, "backward": 454, "optimizer": 450}


def test_what_does_not_outlive_its_phase_is_temporary() -> None:
    account = account_step(STEP, MARKS, {})
    temporary = [change for change in account.timeline if change.category == "temporary"]
    assert [change.num_bytes for change in temporary] == [7, -7, 50, -50]


def test_what_was_alive_before_the_step_and_is_unknown_is_the_rest() -> None:
    events = make_events((9, 5), *[(event.address, event.num_bytes) for event in STEP])
    marks = [PhaseMark(phase=m.phase, position=m.position + 1, named=m.named) for m in MARKS]
    assert account_step(events, marks, {}).by_category["rest"] == 5


def test_what_the_strategy_asks_for_is_for_the_exchange() -> None:
    events = [MemoryEvent(0.0, 30, 1, is_exchange=True), MemoryEvent(1.0, -30, 1)]
    account = account_step(events, [PhaseMark(phase="forward", position=2)], {})
    assert account.by_category == {"buckets": 30}


def test_a_release_of_something_unknown_is_left_out() -> None:
    account = account_step(make_events((1, 8), (2, -100)), [], {"parameters": 10})
    assert account.peak_bytes == 18
    assert account.current_bytes == 18


def test_an_address_that_is_given_out_again_was_released_before() -> None:
    account = account_step(make_events((1, 8), (1, 6)), [], {})
    assert account.peak_bytes == 8
    assert account.current_bytes == 6


def test_a_step_without_a_call_has_what_was_there() -> None:
    account = account_step([], [], STANDING)
    assert account.peak_bytes == account.current_bytes == 300
    assert account.by_category == STANDING


def test_passes_that_are_accumulated_are_one_step() -> None:
    events = make_events((1, 20), (1, -20), (2, 20), (2, -20))
    marks = [PhaseMark(phase=phase, position=at) for phase, at in (("model", 1), ("backward", 2), ("model", 3))]
    account = account_step(events, marks, {})
    assert account.by_category == {"activations": 20}


def test_adam_in_float32_has_states_of_sixteen_bytes_a_parameter() -> None:
    assert estimate_states(4 * 1000, 8 * 1000) == 16 * 1000


@pytest.mark.parametrize(("changes", "alive"), [([(1, 5), (2, 5), (1, -5)], {2}), ([], set())])
def test_what_was_not_released_is_alive(changes: list[tuple[int, int]], alive: set[int]) -> None:
    assert find_alive(make_events(*changes)) == alive


def test_what_comes_before_the_step_only_fills_the_memory() -> None:
    events = make_events((1, 100), (1, -100), (2, 10), (2, -10))
    account = account_step(events, [PhaseMark(phase="begin", position=2), PhaseMark(phase="forward", position=4)], {})
    assert (account.peak_bytes, account.phase_peaks) == (10, {"forward": 10})
    assert [point.num_bytes for point in account.timeline] == [10, -10]


def test_what_the_first_call_of_the_step_releases_is_the_rest_too() -> None:
    events = make_events((9, 5), (9, -5), (1, 8))
    marks = [PhaseMark(phase="begin", position=1), PhaseMark(phase="forward", position=3)]
    found = account_step(events, marks, {})
    assert [(point.category, point.num_bytes) for point in found.timeline] == [("rest", -5), ("output", 8)]


def test_the_first_of_equal_peaks_is_the_peak_and_calls_after_the_last_mark_are_its_phases() -> None:
    events = make_events((1, 8), (1, -8), (2, 8), (2, -8), (3, 1))
    marks = [PhaseMark(phase="forward", position=2), PhaseMark(phase="backward", position=4)]
    found = account_step(events, marks, {})
    assert found.peak_phase == "forward"
    assert [point.phase for point in found.timeline] == ["forward", "forward", "backward", "backward", "backward"]


def test_an_allocation_of_nothing_is_not_there() -> None:
    assert account_step(make_events((1, 0)), [], {}).timeline == []
    assert find_alive(make_events((1, 0), (2, 1))) == {2}


def test_what_a_mark_names_was_made_before_it_and_is_released_after_it() -> None:
    """An address may be given out again: the second piece at 1 is made after the mark that names the first."""
    marks = [
        PhaseMark(phase="input", position=0, named={1: "gradients"}),
        PhaseMark(phase="forward", position=1),
        PhaseMark(phase="backward", position=2),
    ]
    found = account_step(make_events((1, 1), (1, -1)), marks, {})
    assert [point.category for point in found.timeline] == ["output", "output"]
    assert (found.by_category, found.phase_peaks) == ({"output": 1}, {"forward": 1, "backward": 0})

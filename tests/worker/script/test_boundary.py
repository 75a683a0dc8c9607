"""Which optimizer ends a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import pytest

from scalelab.worker.script.boundary import StepFacts, StepRule, choose_last, is_regular


@pytest.mark.parametrize(
    ("calls", "last"),
    [
        ("A", "A"),
        ("AAAA", "A"),
        ("AB", "B"),  # two that step together, such as Muon and AdamW
        ("ABABA", "B"),
        ("ABCAB", "C"),
        ("DDDDDG", "G"),  # a critic that steps more often than the generator
        ("DDDDDGDDD", "G"),
        ("GDDDG", "G"),
    ],
)
def test_a_step_ends_with_the_rarest_optimizer_and_among_equals_the_last(calls: str, last: str) -> None:
    assert choose_last(Counter[Hashable](calls)) == last


def list_ends(calls: str) -> list[int]:
    """The calls that end a step, counted from the last change of the rule."""
    rule, ends = StepRule(), list[int]()
    for number, one in enumerate(calls):
        is_end, is_changed = rule.see(one)
        if is_changed:
            ends.clear()
        if is_end:
            ends.append(number)
    return ends


def test_one_optimizer_ends_every_step() -> None:
    assert list_ends("AAAAA") == [0, 1, 2, 3, 4]


def test_what_looked_like_steps_before_the_generator_stepped_is_forgotten() -> None:
    assert list_ends("DDDDDGDDDDDG") == [5, 11]


def test_optimizers_that_take_turns_make_one_step() -> None:
    assert list_ends("ABABAB") == [1, 3, 5]


@pytest.mark.parametrize(
    ("calls", "is_second"),
    [
        ("AAAABBBB", True),
        ("AABABBBB", False),
        ("DDDDDGDDDDDG", False),
        ("DDDDDDGGG", False),
        ("AAAA", False),
        ("ABCD", False),
    ],
)
def test_an_optimizer_that_takes_over_is_a_second_training(calls: str, is_second: bool) -> None:
    rule = StepRule()
    for one in calls:
        rule.see(one)
    assert rule.is_second_training is is_second


def test_irregular_turns_are_noticed() -> None:
    assert is_regular("DDGDDG", "G")
    assert is_regular("DDGDGDG", "G"), "the first step is kept apart"
    assert not is_regular("DDGDGDDG", "G")


def test_a_rank_that_loads_for_all_trains_on_its_share() -> None:
    facts = StepFacts(loads=[16, 16], forwards={0: [16]})
    assert facts.list_batches() == ([16, 16], True)
    assert facts.list_batches(2) == ([16], False)
    assert StepFacts(loads=[16], forwards={0: [16]}).list_batches(2) == ([16], True)

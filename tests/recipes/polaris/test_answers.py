"""P4, P5, P7: what is said of opposite outcomes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from scalelab.analysis.estimate import Estimate
from scalelab.recipes.evidence import divide_trainings
from scalelab.recipes.polaris.dtypes import answer_memory, list_saved, say_judged
from scalelab.recipes.polaris.jobs import list_durations, say_verdict
from scalelab.recipes.polaris.links import estimate_seconds
from scalelab.recipes.polaris.rows import (
    compare_recorded,
    describe_recorded,
    judge_profiler,
    locate_cost,
    make_p1,
    make_p5,
    make_p10,
)
from scalelab.recipes.recipe import Outcome
from scalelab.recipes.setting import describe_trials
from scalelab.records.trial import StepKind, StepSample, TrialResult
from scalelab.studies.network.answer import LinkRow, read_communication
from tests.records import make_result


def make_outcome(*results: TrialResult) -> Outcome:
    return Outcome(study=make_p5("small").parts["plain"], results=results, document=None)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.9, 1.2, "Unresolved: the interval of their ratio includes 1"),
        (1.1, 1.2, "The profiler costs time"),
        (0.8, 0.9, "It was faster"),
        (None, None, "One launch each does not show a cost"),
    ],
)
def test_a_cost_of_the_profiler_is_seen_only_beyond_its_interval(
    low: float | None, high: float | None, words: str
) -> None:
    assert judge_profiler(Estimate(value=1.15, low=low, high=high)) == words


def test_a_cost_in_single_steps_is_seen_where_the_whole_run_hides_it() -> None:
    """Three of 32 steps take half as long again: 5 % of the run, within its interval."""
    results = []
    for trial in make_p5("small").parts["profiled"].plan():
        kinds = [StepKind.PROFILED] * 3 + [StepKind.CLEAN] * 29
        seconds = {StepKind.PROFILED: 0.015 + 1e-4 * trial.round, StepKind.CLEAN: 0.01}
        steps = (StepSample(0, step, kind, step, seconds[kind], loss=1.0) for step, kind in enumerate(kinds))
        results.append(make_result(trial, samples=tuple(steps)))
    recorded = compare_recorded(make_outcome(*results))
    assert recorded is not None
    assert recorded.value == pytest.approx(1.5, abs=0.05)
    whole = Estimate(value=1.03, low=0.9, high=1.2)
    assert judge_profiler(whole, recorded).startswith("A cost is visible in the steps under the profiler, not in")
    assert judge_profiler(whole, Estimate(value=1.5, low=0.9, high=2.0)).startswith("Unresolved: the interval")


def profile_between_steps(seconds: float) -> Outcome:
    """32 steps of 10 ms, the first to the fourth under the profiler, which starts and writes after the fourth."""
    results = []
    for trial in make_p5("small").parts["profiled"].plan():
        starts = [0.01 * step + (seconds if step > 3 else 0.0) + trial.round for step in range(32)]
        kinds = [StepKind.PROFILED if 0 < step < 4 else StepKind.CLEAN for step in range(32)]
        steps = zip(range(32), kinds, starts, strict=True)
        samples = tuple(StepSample(0, step, kind, start, 0.01, loss=1.0) for step, kind, start in steps)
        results.append(make_result(trial, samples=samples))
    return make_outcome(*results)


def test_a_profiler_costs_what_lies_between_steps() -> None:
    """No step is slower, and the whole run takes 0.32 s more."""
    plain, profiled = profile_between_steps(0.0), profile_between_steps(0.32)
    assert list(list_durations(profiled).values()) == pytest.approx([0.64] * 6)
    ratio = divide_trainings(profiled, plain, list_durations)
    assert ratio is not None
    assert ratio.value == pytest.approx(2.0)
    assert "it spends 320 ms more" in locate_cost(profiled, plain)
    assert locate_cost(plain, profiled) == ""
    words = make_p5("small").conclude({"plain": plain, "profiled": profiled}).questions[0].answer
    assert words.startswith("The profiler costs time. The whole run took 640")
    assert "The 3 steps under the profiler (1 of warm-up, 2 recorded) are not measurably slower" in words


def test_steps_under_the_profiler_are_counted_once() -> None:
    outcome = profile_between_steps(0.0)
    assert [result.trial.round for result in outcome.results] == [1, 2, 3, 4, 5, 6]
    assert "(1 of warm-up, 2 recorded)" in describe_recorded(outcome, Estimate(value=1.0))


def test_memory_is_less_or_more() -> None:
    less = answer_memory({20: {"float32": 100, "bfloat16 cast": 62}})["memory"]
    assert less.startswith("Yes.")
    assert "bfloat16 cast 38 % less at length 20 (published: 10, 20 % less at length 50, 100)" in less
    more = answer_memory({20: {"float32": 100, "bfloat16 cast": 110}})["memory"]
    assert more.startswith("Not in every case.")
    assert "bfloat16 cast 10 % more at length 20" in more


def test_float16_stands_beside_its_published_savings() -> None:
    words = answer_memory({50: {"float32": 100, "bfloat16 autocast": 81, "float16 autocast": 82}})["memory"]
    assert "float16 autocast: 18 % less at length 50 (published: 0 %)." in words


def test_no_time_of_a_link_reaches_zero() -> None:
    rounds = [[0.002], [0.003], [0.003], [0.004], [0.004], [0.030]]
    row = cast("LinkRow", SimpleNamespace(traced=lambda read: rounds))
    found = estimate_seconds(row, read_communication)
    assert found is not None
    assert found.value == pytest.approx(0.0035)
    assert 0 < found.ends[0] < 0.0035 < 0.01 < found.ends[1]


def test_savings_of_both_signs_stand_one_by_one() -> None:
    assert list_saved([(20, 0.38), (50, 0.29)]) == "38, 29 % less at length 20, 50"
    assert list_saved([(20, 0.38), (50, -0.1)]) == "38 % less at length 20, 10 % more at length 50"


def test_what_could_be_equal_is_not_called_unresolved() -> None:
    assert say_verdict(Estimate(value=1.02, low=0.9, high=1.2)) == "could be equal"
    assert say_verdict(Estimate(value=3.0, low=2.0, high=4.0)) == "slower"


def test_settings_of_rows_that_differ_in_layers_differ() -> None:
    one, ten = (describe_trials(next(iter(make("small").parts.values())).plan()) for make in (make_p1, make_p10))
    assert one.startswith("transformer 64 with 2 + 2 layers")
    assert ten.startswith("transformer 64 with 1 + 1 layers")


def test_a_lopsided_ratio_stands_before_its_verdict_with_both_ends() -> None:
    assert say_judged(Estimate(value=3.0, low=1.6, high=5.4)) == "3.0 (1.6 to 5.4)"
    assert say_judged(Estimate(value=3.0, low=2.5, high=3.5)) == "3.0 ± 0.5"
    assert say_judged(Estimate(value=1.1, low=0.8, high=1.4)) == "1.10 ± 0.30"
    assert say_judged(Estimate(value=3.5, low=0.9, high=12.9)) == "3.5 (0.9 to 12.9)"

"""The parts of a step: known ones are found again, and they add up."""

from __future__ import annotations

import numpy as np
import pytest

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.step_parts import PARTS, LaunchSteps, RankBreakdown, break_down, tabulate_steps
from scalelab.records.trial import StepKind, StepSample


def make_samples(num_steps: int = 8) -> list[StepSample]:
    """Rank 1 has its last gradient 3 s after rank 0; then both exchange for 2 s."""
    found = []
    for step in range(num_steps):
        start = 20.0 * step
        found.append(
            StepSample(0, step, StepKind.PHASES, start, 13.0, 1.0, 2.0, 9.0, 1.0, 0.5, 7.0, 0.0, 0.0, 0.0, 0.0)
        )
        found.append(
            StepSample(1, step, StepKind.PHASES, start, 13.0, 1.0, 2.0, 9.0, 1.0, 0.5, 10.0, 0.0, 0.0, 0.0, 0.0)
        )
    return found


def tabulate(samples: list[StepSample], *, waits_for_buffers: bool = False) -> LaunchSteps:
    launch = tabulate_steps(samples, 2, waits_for_buffers=waits_for_buffers)
    assert launch is not None
    return launch


def read_parts(launch: LaunchSteps, rank: int) -> dict[str, float]:
    assert launch.parts is not None
    return {name: float(values[0, rank]) for name, values in launch.parts.items()}


def test_waiting_and_exchange_are_told_apart_by_the_last_gradient_of_the_last_rank() -> None:
    launch = tabulate(make_samples())
    assert read_parts(launch, 0) == {"input": 1, "compute": 7, "exposed": 2, "waiting": 3, "stalled": 0}
    assert read_parts(launch, 1) == {"input": 1, "compute": 10, "exposed": 2, "waiting": 0, "stalled": 0}


def test_a_rank_that_begins_later_is_the_late_one_whatever_its_own_clock_says() -> None:
    late = [sample._replace(start_seconds=sample.start_seconds + 4 * (1 - sample.rank)) for sample in make_samples()]
    assert read_parts(tabulate(late), 0)["waiting"] == 0
    assert read_parts(tabulate(late), 1)["waiting"] == 1


def test_waiting_is_never_longer_than_the_gap() -> None:
    early = [sample._replace(start_seconds=sample.start_seconds + 100 * sample.rank) for sample in make_samples()]
    parts = read_parts(tabulate(early), 0)
    assert (parts["waiting"], parts["exposed"]) == (5, 0)


@pytest.mark.parametrize("waits", [False, True])
def test_the_parts_add_up_to_the_step_with_stalls_and_buffers_too(waits: bool) -> None:
    samples = [
        sample._replace(
            input_seconds=1.0 + 0.5 * (sample.rank == 0),
            backward_seconds=9.0 - 0.5 * (sample.rank == 0),
            input_stall_seconds=0.1,
            forward_stall_seconds=0.2,
            ready_stall_seconds=0.6,
            optimizer_stall_seconds=0.4,
        )
        for sample in make_samples()
    ]
    launch = tabulate(samples, waits_for_buffers=waits)
    assert launch.parts is not None
    assert np.allclose(sum(launch.parts[name] for name in PARTS), launch.step)
    assert read_parts(launch, 1)["stalled"] == pytest.approx(1.0)


def test_ranks_wait_in_forward_for_the_buffers_of_rank_0() -> None:
    """Rank 0 enters forward 0.5 s after rank 1, whose forward is the longer by that."""
    samples = [
        sample._replace(input_seconds=0.5, forward_seconds=2.5) if sample.rank else sample for sample in make_samples()
    ]
    launch = tabulate(samples, waits_for_buffers=True)
    assert float(launch.own["forward"][0, 1]) == 2.0
    assert read_parts(launch, 1)["waiting"] == 0.5
    assert float(tabulate(samples).own["forward"][0, 1]) == 2.5


def test_time_on_a_core_that_others_had_is_not_the_ranks_own() -> None:
    samples = [
        sample._replace(forward_stall_seconds=0.5, ready_stall_seconds=1.5, optimizer_stall_seconds=0.25)
        for sample in make_samples()
    ]
    own = tabulate(samples).own
    assert [float(own[phase][0, 0]) for phase in ("input", "forward", "backward", "optimizer")] == [1, 1.5, 3, 0.75]


def test_without_the_last_gradient_only_input_and_optimizer_are_a_ranks_own() -> None:
    launch = tabulate([sample._replace(ready_seconds=None) for sample in make_samples()])
    assert launch.parts is None
    assert set(launch.own) == {"input", "optimizer"}
    assert break_down([launch], [[[1.0], [1.0]]]) is None


def test_a_step_that_a_rank_did_not_complete_is_left_out() -> None:
    samples = make_samples()
    assert len(tabulate(samples[:-1]).start) == 7
    assert tabulate_steps(samples[:1], 2, waits_for_buffers=False) is None


def test_what_clean_steps_have_besides_is_the_rest() -> None:
    launches = [tabulate(make_samples()) for _ in range(6)]
    clean = [[[13.5] * 5, [13.5] * 5] for _ in range(6)]
    found = break_down(launches, clean)
    assert found is not None
    for rank in found:
        assert rank.step.value == 13.5
        assert rank.rest.value == pytest.approx(0.5)
        assert sum(part.value for part in rank.parts.values()) + rank.rest.value == pytest.approx(rank.step.value)
        assert rank.is_explained
    assert found[0].share("waiting").value == pytest.approx(3 / 13.5)


def test_a_large_rest_is_not_an_explanation() -> None:
    found = break_down([tabulate(make_samples())], [[[15.0], [15.0]]])
    assert found is not None
    assert not found[0].is_explained
    assert found[0].rest.low is None


def test_stalls_that_nobody_counted_are_unknown_and_not_zero() -> None:
    launch = tabulate([sample._replace(ready_stall_seconds=None) for sample in make_samples()])
    found = break_down([launch], [[[13.0], [13.0]]])
    assert found is not None
    assert "stalled" not in found[0].parts


def test_one_long_step_does_not_move_the_parts() -> None:
    samples = make_samples()
    samples[2] = samples[2]._replace(step_seconds=113.0, backward_seconds=109.0)
    found = break_down([tabulate(samples)], [[[13.0], [13.0]]])
    assert found is not None
    assert found[0].parts["exposed"].value == 2


@pytest.mark.parametrize(("seconds", "is_explained"), [(105.0, True), (105.1, False), (95.1, True), (94.9, False)])
def test_a_rest_of_five_percent_is_still_explained(seconds: float, is_explained: bool) -> None:
    """The parts add up to 99.75 s: of 105 s a twentieth is left, and 95 s are a twentieth too few."""
    part, step = Estimate(value=99.75), Estimate(value=seconds)
    found = RankBreakdown(rank=0, step=step, parts={"compute": part}, rest=Estimate(value=seconds - 99.75))
    assert found.is_explained is is_explained


def test_parts_are_means_over_the_middle_half_of_the_steps() -> None:
    """Steps of 0 … 7 s more: the middle half is 2 … 5 more, whatever their order."""
    samples = [
        sample._replace(step_seconds=13.0 + 3 * sample.step % 8, backward_seconds=9.0 + 3 * sample.step % 8)
        for sample in make_samples()
    ]
    launch = tabulate(samples)
    assert sorted(3 * number % 8 for number in launch.middle) == [2, 3, 4, 5]
    found = break_down([launch], [[[13.0, 14.0, 20.0], [13.0]]])
    assert found is not None
    assert found[0].parts["exposed"].value == pytest.approx(2 + 3.5)
    assert (found[0].step.value, found[1].step.value) == (14.0, 13.0)
    assert found[0].rest.value == pytest.approx(14.0 - 13.0 - 3.5)


def test_a_launch_without_clean_steps_of_a_rank_does_not_count() -> None:
    launches = [tabulate(make_samples()), tabulate(make_samples()), None]
    found = break_down(launches, [[[13.5], [13.5]], [[99.0], []], [[1.0], [1.0]]])
    assert found is not None
    assert [rank.step.value for rank in found] == [13.5, 13.5]
    assert break_down([None], [[[1.0], [1.0]]]) is None


def test_a_gap_of_half_a_second_is_no_more() -> None:
    samples = [sample._replace(ready_seconds=11.5) for sample in make_samples()]
    assert read_parts(tabulate(samples), 0) == {
        "input": 1, "compute": 11.5, "exposed": 0.5, "waiting": 0, "stalled": 0,
    }  # fmt: skip


def test_ranks_wait_for_buffers_no_longer_than_their_forward_took() -> None:
    samples = [
        sample._replace(start_seconds=sample.start_seconds + (100.0 if sample.rank == 0 else 0.0))
        for sample in make_samples()
    ]
    waiting = tabulate(samples, waits_for_buffers=True).buffer_waiting
    assert waiting[0].tolist() == [0.0, 2.0]


def test_only_phase_timed_steps_that_ended_count() -> None:
    samples = make_samples()
    samples[-1] = samples[-1]._replace(optimizer_seconds=None)
    samples[0] = samples[0]._replace(kind=StepKind.CLEAN)
    assert len(tabulate(samples).start) == 6

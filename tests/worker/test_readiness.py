"""The clock that sees a rank's last gradient: between forward and the end of backward, also where others are late."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from scalelab.launch.local import LocalLauncher
from scalelab.records.settings import Perturbation, StepShape
from scalelab.records.trial import Status, StepKind, StepPlan, StepSample
from scalelab.worker.loop import ReadyClock
from tests.worker.trials import launch, make_trial

PHASES_ONLY = StepPlan(lead_in_steps=2, clean_steps=1, phase_steps=6, comm_free_steps=0, cycles=1)


def test_the_last_gradient_is_that_of_the_first_layer_and_only_it_is_watched_later() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    seen: list[int] = []
    with ReadyClock(model) as clock:
        for _ in range(3):
            clock.begin()
            model(torch.ones(2, 4)).sum().backward()
            assert clock.read(0.0) is not None
            seen.append(len(clock._hooks))
        assert clock._last is model[0].weight or clock._last is model[0].bias
    assert seen == [1, 1, 1]
    assert not clock._hooks


def test_without_a_backward_nothing_is_said() -> None:
    with ReadyClock(nn.Linear(2, 2)) as clock:
        clock.begin()
        assert clock.read(0.0) is None


def read_phases(samples: tuple[StepSample, ...], rank: int) -> list[StepSample]:
    return [sample for sample in samples if sample.kind is StepKind.PHASES and sample.rank == rank]


@pytest.mark.ranks
@pytest.mark.alone
def test_a_rank_that_waits_for_a_late_one_had_its_gradients_before(launcher: LocalLauncher, tmp_path: Path) -> None:
    """Rank 0 sleeps in backward: rank 1's backward is as long, and its own gradients were ready long before its end."""
    slow = Perturbation(delay="30ms", delay_phase="backward", delay_rank=0)
    result = launch(launcher, make_trial(plan=PHASES_ONLY, perturbation=slow), tmp_path)
    assert result.status is Status.COMPLETED, result.reason
    for late, early in zip(read_phases(result.samples, 0), read_phases(result.samples, 1), strict=True):
        assert late.ready_seconds is not None
        assert early.ready_seconds is not None
        assert late.backward_seconds is not None
        assert early.backward_seconds is not None
        assert late.ready_seconds > 0.03
        assert late.start_seconds + late.ready_seconds > early.start_seconds + early.ready_seconds
        assert early.ready_seconds < early.step_seconds


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["fsdp-full", "fsdp2"])
def test_sharded_strategies_have_no_ready_time(launcher: LocalLauncher, tmp_path: Path, strategy: str) -> None:
    result = launch(launcher, make_trial(plan=PHASES_ONLY, strategy=strategy), tmp_path)
    assert result.status is Status.COMPLETED, result.reason
    assert all(sample.ready_seconds is None for sample in result.samples)


@pytest.mark.ranks
def test_with_accumulation_the_last_pass_counts(launcher: LocalLauncher, tmp_path: Path) -> None:
    result = launch(launcher, make_trial(plan=PHASES_ONLY, shape=StepShape(micro_batch=1)), tmp_path)
    assert result.status is Status.COMPLETED, result.reason
    for sample in read_phases(result.samples, 0):
        assert sample.ready_seconds is not None
        assert sample.forward_seconds is not None
        assert sample.optimizer_seconds is not None
        assert sample.forward_seconds < sample.ready_seconds <= sample.step_seconds - sample.optimizer_seconds

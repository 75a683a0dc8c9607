"""The gradients that are read inside a step, against those that are computed by hand, and with real ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # what torch.optim loads at its first use; it sets an environment variable
from torch import nn

from scalelab.analysis.learning import GradientSquares, estimate_noise_scale
from scalelab.errors import UsageError
from scalelab.launch.local import LocalLauncher
from scalelab.records.settings import StepShape, TrainingRun
from scalelab.records.tasks import Train
from scalelab.records.trial import Status, Trial
from scalelab.worker.batches.stream import BatchStream
from scalelab.worker.step import take_step
from scalelab.worker.training import Training
from scalelab.worker.training_run import GradientNoise
from tests.worker.trials import launch, make_trial

SMALL, LARGE, DIM = 2, 8, 5
TRIAL = make_trial(strategy="single", num_ranks=1, global_batch=LARGE, shape=StepShape(micro_batch=SMALL))


class Point(nn.Module):
    """½|θ − x|², whose gradient is θ less the mean of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(DIM))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return (self.place - samples).square().sum(1).mean() / 2


def make_training(batches: list[torch.Tensor], scaler: torch.amp.GradScaler | None = None) -> Training:
    """One that does not move: its gradients keep their distribution."""
    model = Point()
    return Training(
        model=model,
        loss=lambda model, batch: model(batch),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        batches=BatchStream(batches, None, SMALL),
        synchronize=lambda: None,
        accumulation=LARGE // SMALL,
        scaler=scaler,
    )


def draw(num_batches: int, mean: float = 0.5, spread: float = 2.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [mean + spread * torch.randn(SMALL, DIM, generator=generator) for _ in range(num_batches)]


def read_step(noise: GradientNoise, training: Training) -> GradientSquares:
    noise.begin()
    take_step(training, noise.mark)
    assert noise.small is not None
    assert noise.large is not None
    return GradientSquares(noise.small, noise.large)


@pytest.mark.parametrize("has_scale", [False, True])
def test_the_squares_are_those_of_the_first_pass_and_of_the_whole_step(has_scale: bool) -> None:
    batches = draw(8)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if has_scale else None
    training = make_training(batches, scaler)
    noise = GradientNoise(TRIAL, training)
    for first in (0, 4):
        found = read_step(noise, training)
        assert found.small == pytest.approx(batches[first].mean(0).square().sum().item(), rel=1e-5)
        whole = torch.cat(batches[first : first + 4]).mean(0)
        assert found.large == pytest.approx(whole.square().sum().item(), rel=1e-5)


def test_a_known_covariance_is_recovered_from_the_steps_of_a_training() -> None:
    """tr(Σ) = 5·2² = 20 and |G|² = 5·0.5² = 1.25: the noise scale is 16 samples."""
    training = make_training(draw(8_000))
    noise = GradientNoise(TRIAL, training)
    found = estimate_noise_scale([[read_step(noise, training) for _ in range(2000)]], SMALL, LARGE)
    assert found is not None
    assert found.batch is not None
    assert found.batch.low is not None
    assert found.batch.high is not None
    assert found.batch.low < 16 < found.batch.high
    assert found.batch.value == pytest.approx(16, rel=0.2)


def test_a_gradient_that_is_no_number_is_unknown() -> None:
    training = make_training([torch.full((SMALL, DIM), math.inf)])
    noise = GradientNoise(TRIAL, training)
    noise.begin()
    take_step(training, noise.mark)
    assert noise.small is None
    assert noise.large is None


def test_steps_of_one_pass_and_sharded_gradients_are_refused() -> None:
    training = make_training(draw(4))
    with pytest.raises(UsageError, match="--micro-batch"):
        GradientNoise(make_trial(strategy="single", num_ranks=1), replace(training, accumulation=1))
    sharded = make_trial(strategy="fsdp-full", shape=StepShape(micro_batch=1))
    with pytest.raises(UsageError, match="fsdp-full shards them"):
        GradientNoise(sharded, training)


def make_course(**fields: Any) -> Trial:
    run = TrainingRun(steps=4, keep=0)
    return make_trial(task=Train(run=run), instruments=("gradient_noise",), shape=StepShape(micro_batch=2), **fields)


@pytest.mark.ranks
def test_ranks_read_the_gradient_of_all_and_the_rest_of_a_line_as_ever(launcher: LocalLauncher, tmp_path: Path) -> None:
    one = launch(launcher, make_course(strategy="single", num_ranks=1), tmp_path / "one")
    two = launch(launcher, make_course(strategy="ddp", num_ranks=2), tmp_path / "two")
    assert one.status is two.status is Status.COMPLETED, (one.reason, two.reason)
    wholes = [[point.large_gradient_square for point in result.curve] for result in (one, two)]
    assert len(wholes[0]) == 4
    assert wholes[1] == pytest.approx(wholes[0], rel=1e-4)
    assert all(point.small_gradient_square for point in (*one.curve, *two.curve))
    assert not (tmp_path / "one" / "checkpoints").exists()


@pytest.mark.ranks
def test_looking_changes_no_bit_of_the_training(launcher: LocalLauncher, tmp_path: Path) -> None:
    trial = make_course(strategy="single", num_ranks=1)
    plain = make_trial(strategy="single", num_ranks=1, task=trial.task, shape=trial.shape)
    seen, unseen = launch(launcher, trial, tmp_path / "a"), launch(launcher, plain, tmp_path / "b")
    assert seen.losses() == unseen.losses()
    assert {point.large_gradient_square for point in unseen.curve} == {None}


@pytest.mark.ranks
def test_a_step_of_one_pass_makes_the_trial_invalid_with_the_way_out(launcher: LocalLauncher, tmp_path: Path) -> None:
    trial = make_trial(
        strategy="single", num_ranks=1, task=Train(run=TrainingRun(steps=2, keep=0)), instruments=("gradient_noise",)
    )
    result = launch(launcher, trial, tmp_path)
    assert result.status is Status.INVALID
    assert "--micro-batch" in result.reason

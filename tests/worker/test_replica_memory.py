"""What the replicas of an emulated dp hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalelab.launch.local import LocalLauncher
from scalelab.records.settings import Optimization, StepShape
from scalelab.records.trial import Status
from tests.worker.trials import launch, make_trial

pytestmark = pytest.mark.ranks

DIM, DEPTH, BATCH = 16, 2, 8
PARAMETERS = 4 * DEPTH * (DIM * DIM + DIM)
OUTPUTS = 4 * BATCH * DIM


def test_replica_0_also_holds_the_optimizer_and_the_gathered_outputs(launcher: LocalLauncher, tmp_path: Path) -> None:
    trial = make_trial(
        strategy="dp", instruments=("replicas",), optimization=Optimization(optimizer="sgd", momentum=0.9)
    )
    result = launch(launcher, trial, tmp_path)
    assert result.status is Status.COMPLETED, result.reason
    first, second = result.ranks[0].replica_bytes
    assert first - second == PARAMETERS + OUTPUTS  # momentum, one number for each parameter
    inputs = relus = 4 * BATCH // 2 * DIM
    assert second == 2 * PARAMETERS + inputs + DEPTH * relus


def test_passes_of_one_step_hold_no_more_than_the_last_of_them(launcher: LocalLauncher, tmp_path: Path) -> None:
    trial = make_trial(
        strategy="dp",
        instruments=("replicas",),
        shape=StepShape(micro_batch=BATCH // 4),
        optimization=Optimization(optimizer="sgd"),
    )
    result = launch(launcher, trial, tmp_path)
    assert result.status is Status.COMPLETED, result.reason
    assert trial.accumulation == 2
    first, second = result.ranks[0].replica_bytes
    assert first - second == OUTPUTS // 2
    assert second == 2 * PARAMETERS + (1 + DEPTH) * 4 * BATCH // 4 * DIM


def test_other_strategies_have_no_replicas(launcher: LocalLauncher, tmp_path: Path) -> None:
    result = launch(launcher, make_trial(instruments=("replicas",)), tmp_path)
    assert result.ranks[0].replica_bytes == ()

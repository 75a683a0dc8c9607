"""What only shows on real ranks: parameters after training, held gradients, hooks, synchronized batch norm."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from scalelab.launch.local import LocalLauncher
from scalelab.worker.strategies.sync_batch_norm import SyncBatchNormOnCpu, apply_sync_batch_norm
from tests.worker.strategies.cases import CASES, run_check


@pytest.mark.ranks
@pytest.mark.parametrize("case", [case for case in CASES if case != "resnet18"])
def test_sharded_strategies_end_with_the_parameters_of_ddp(launcher: LocalLauncher, tmp_path: Path, case: str) -> None:
    run_check(launcher, tmp_path, "parameters", case)


@pytest.mark.ranks
@pytest.mark.parametrize("check", ["held_gradients", "exchange_is_held", "hook_state"])
def test_every_strategy_holds_gradients_back_compiled_or_not_and_hooks_are_found(
    launcher: LocalLauncher, tmp_path: Path, check: str
) -> None:
    run_check(launcher, tmp_path, check)


@pytest.mark.ranks
@pytest.mark.parametrize("which", ["clipping", "turns"])
def test_clipping_schedules_accumulation_and_turns_train_two_ranks_as_one(
    launcher: LocalLauncher, tmp_path: Path, which: str
) -> None:
    run_check(launcher, tmp_path, "own_parts", which)


@pytest.mark.ranks
def test_synchronized_batch_norm_gives_the_numbers_of_the_whole_batch(launcher: LocalLauncher, tmp_path: Path) -> None:
    run_check(launcher, tmp_path, "sync_batch_norm")


def test_converting_batch_norms_keeps_names_values_and_shared_norms() -> None:
    norm = nn.BatchNorm1d(3)
    model = nn.Sequential(nn.Linear(3, 3), norm, nn.Sequential(norm), nn.BatchNorm1d(3, affine=False))
    model(torch.randn(4, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    converted = apply_sync_batch_norm(model, torch.device("cpu"))
    assert isinstance(converted[1], SyncBatchNormOnCpu)
    assert converted[1] is converted[2][0]
    after = converted.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_batch_norm_alone_is_converted_and_without_ranks_is_ordinary() -> None:
    norm, x = nn.BatchNorm2d(3), torch.randn(4, 3, 2, 2)
    expected = norm(x)
    converted = apply_sync_batch_norm(nn.BatchNorm2d(3), torch.device("cpu"))
    assert torch.equal(converted(x), expected)
    assert torch.equal(converted.eval()(x), norm.eval()(x))

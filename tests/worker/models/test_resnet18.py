"""ResNet-18: what DDP sends, and where its blocks stand."""

from __future__ import annotations

import math
from itertools import islice

import pytest
import torch
from torch import nn

from scalelab.worker.models.networks import BasicBlock, Resnet18
from tests.worker.models.built import build, compute_loss


def test_gradients_and_buffers_are_the_published_bytes() -> None:
    with torch.device("meta"):
        model = Resnet18()
    buffers = list(model.buffers())
    assert sum(p.numel() * p.element_size() for p in model.parameters()) == 44_695_848
    assert sum(b.numel() for b in buffers if b.is_floating_point()) == 9_600
    assert sum(1 for b in buffers if not b.is_floating_point()) == 20


def test_without_norm_there_are_no_buffers_and_the_same_weights() -> None:
    with torch.device("meta"):
        plain, normed = Resnet18(has_norm=False), Resnet18()
    assert not list(plain.buffers())
    weights = {name: p.shape for name, p in normed.named_parameters() if p.ndim > 1 or name.startswith("head")}
    assert {name: p.shape for name, p in plain.named_parameters()} == weights


def test_its_blocks_are_elements_of_named_stages() -> None:
    with torch.device("meta"):
        model = Resnet18()
    for number in range(1, 5):
        stage = model.get_submodule(f"stage{number}")
        assert isinstance(stage, nn.Sequential)
        assert [type(block) for block in stage] == [BasicBlock, BasicBlock]


def test_only_a_block_that_changes_the_shape_projects_its_shortcut() -> None:
    with torch.device("meta"):
        model = Resnet18()
    projected = [name for name, block in model.named_modules() if isinstance(block, BasicBlock) and block.projects]
    assert projected == ["stage2.0", "stage3.0", "stage4.0"]


@pytest.mark.parametrize("norm", ["batch", "none"])
def test_it_starts_near_guessing_and_its_loss_stays_finite(norm: str) -> None:
    torch.manual_seed(0)
    workload = build("resnet18", {"norm": norm}, batch_size=4)
    assert workload.optimizer is not None
    optimizer = workload.optimizer(workload.model.parameters())
    losses = []
    for batch in islice(workload.batches, 4):
        loss = compute_loss(workload, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(10), abs=0.5)
    assert all(map(math.isfinite, losses))

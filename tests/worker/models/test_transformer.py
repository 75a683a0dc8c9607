"""torch's transformer: its data, its loss, and the failures that are torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from scalelab.worker.models.transformer import draw_sequences, soft_target_loss
from scalelab.workloads.catalogue import TransformerOptions
from tests.worker.models.built import build, compute_loss

SMALL: dict[str, Any] = {"samples": 6, "features": 8, "d_model": 8, "heads": 2, "feedforward": 4, "tgt_length": 5}


def test_all_sources_are_drawn_and_then_all_targets() -> None:
    src, tgt = draw_sequences(TransformerOptions(**SMALL), seed=3)
    generator = torch.Generator().manual_seed(3)
    assert torch.equal(src, torch.rand(6, 1, 8, generator=generator))
    assert torch.equal(tgt, torch.rand(6, 5, 8, generator=generator))


def test_an_epoch_goes_through_every_sample_once_and_the_next_in_another_order() -> None:
    workload = build("transformer", SMALL)
    _, tgt = draw_sequences(TransformerOptions(**SMALL), seed=0)
    epoch = torch.cat([batch[1] for batch in workload.batches])
    workload.batches.set_epoch(1)  # type: ignore[attr-defined]
    other = torch.cat([batch[1] for batch in workload.batches])
    expected = sorted(tgt[:, 0, 0].tolist())
    assert sorted(epoch[:, 0, 0].tolist()) == sorted(other[:, 0, 0].tolist()) == expected
    assert not torch.equal(epoch, other)


def test_the_loss_takes_the_positions_as_classes() -> None:
    output, tgt = torch.randn(2, 5, 8), torch.rand(2, 5, 8)

    class Answer(nn.Module):
        def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
            return output

    by_hand = -(tgt * output.log_softmax(dim=1)).sum(dim=1).mean()
    assert torch.allclose(soft_target_loss(Answer(), (tgt[:, :1], tgt)), by_hand)


def test_it_trains() -> None:
    workload = build("transformer", SMALL | {"dropout": 0.0})
    assert workload.optimizer is not None
    optimizer = workload.optimizer(workload.model.parameters())
    batch = next(iter(workload.batches))
    losses = []
    for _ in range(20):
        loss = compute_loss(workload, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_features_other_than_the_width_fail_in_torch_itself() -> None:
    workload = build("transformer", SMALL | {"features": 16})
    with pytest.raises(RuntimeError, match=r"feature number .* must be equal to d_model"):
        compute_loss(workload, next(iter(workload.batches)))


def test_heads_that_do_not_divide_the_width_fail_in_torch_itself() -> None:
    with pytest.raises(AssertionError, match="divisible"):
        build("transformer", SMALL | {"heads": 3})

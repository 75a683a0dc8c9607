"""Activations that are recomputed instead of kept: the same numbers with less memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scalelab.worker.models.gpt2 import Gpt2
from scalelab.worker.strategies.blocks import CheckpointingMode, apply_checkpointing, find_blocks
from scalelab.workloads.gpt2_options import Gpt2Shape

Tensor = torch.Tensor
MODES: list[CheckpointingMode] = ["none", "selective", "full"]


class ResidualBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.2)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + scale * self.drop(torch.relu(self.norm(self.conv(x))))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x)
        return result


def make_gpt2() -> nn.Module:
    return Gpt2(Gpt2Shape(num_layers=2, num_heads=2, width=16, vocabulary=11, context=8), dropout=0.1)


MODELS: dict[str, tuple[Any, tuple[int, ...] | None]] = {
    "linear": (lambda: nn.Linear(8, 8), (4, 8)),
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8)), (4, 8)),
    "convolutions": (lambda: nn.Sequential(ResidualBlock(), ResidualBlock()), (4, 4, 6, 6)),
    "encoder": (Encoder, (4, 5, 8)),
    "gpt2": (make_gpt2, None),
}


def make_model(name: str, mode: CheckpointingMode) -> tuple[nn.Module, Tensor]:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = apply_checkpointing(make(), mode)
    return model, torch.randint(11, (4, 8)) if shape is None else torch.randn(shape)


def train(model: nn.Module, x: Tensor) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


class StorageWatch(TorchDispatchMode):
    """Remembers, without keeping it alive, every piece of memory that an operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.seen[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return result

    def count_living_bytes(self) -> int:
        return sum(num_bytes for reference, num_bytes in self.seen.values() if not reference.expired())


def count_kept_bytes(model: nn.Module, x: Tensor) -> int:
    """Activations that are alive between forward and backward, whoever keeps them."""
    with StorageWatch() as watch:
        output = model(x)
        assert output.requires_grad
        return watch.count_living_bytes()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_losses_and_parameters_are_bit_equal_to_keeping_everything(name: str, mode: CheckpointingMode) -> None:
    losses, state = train(*make_model(name, "none"))
    other_losses, other_state = train(*make_model(name, mode))
    assert other_losses == losses
    assert list(other_state) == list(state)
    for key, value in state.items():
        assert torch.equal(other_state[key], value), key


@pytest.mark.parametrize("name", ["convolutions", "encoder", "gpt2"])
def test_fewer_activations_are_kept_the_more_is_recomputed(name: str) -> None:
    none, selective, full = (count_kept_bytes(*make_model(name, mode)) for mode in MODES)
    assert none > selective > full > 0, (none, selective, full)


def test_blocks_keep_their_type_and_copies_stand_on_their_own() -> None:
    model, x = make_model("mlp", "full")
    assert all(isinstance(block, nn.Linear) for block in find_blocks(model))
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert copied(x).abs().sum() == 0
    assert model(x).abs().sum() > 0


class StrictNorm(nn.BatchNorm2d):
    """Wants a counter, as nn.SyncBatchNorm does on CUDA."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.num_batches_tracked is not None
        return super().forward(x)


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_norm_that_wants_its_counter_has_it_and_counts_a_batch_once(
    mode: CheckpointingMode, momentum: float | None
) -> None:
    norm = StrictNorm(4, momentum=momentum)
    counter = norm.num_batches_tracked
    model = apply_checkpointing(nn.Sequential(nn.Conv2d(4, 4, 1), norm), mode)
    x = torch.randn(2, 4, 3, 3)
    for _ in range(3):
        model(x).sum().backward()
    assert norm.num_batches_tracked is counter
    assert norm.num_batches_tracked.item() == 3
    assert norm.momentum == momentum


def test_a_norm_without_running_statistics_is_left_without() -> None:
    norm = nn.BatchNorm2d(4, track_running_stats=False)
    apply_checkpointing(norm, "full")(torch.randn(2, 4, 3, 3)).sum().backward()
    assert norm.num_batches_tracked is None


def test_nothing_is_recomputed_without_gradients() -> None:
    model, x = make_model("mlp", "full")
    with torch.no_grad():
        assert not model.eval()(x).requires_grad


def test_keyword_arguments_reach_the_block() -> None:
    block = ResidualBlock().eval()
    x = torch.randn(2, 4, 3, 3)
    expected = block(x, scale=2.0)
    assert torch.equal(apply_checkpointing(block, "full")(x, scale=2.0), expected)


def test_no_checkpointing_leaves_the_model_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert apply_checkpointing(model, "none") is model
    assert type(model[0]) is nn.Linear

"""Which parts of a model are sharded, gathered and recomputed as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from scalelab.worker.models.load import load_workload
from scalelab.worker.strategies.blocks import find_blocks
from tests.worker.trials import make_trial


def build_model(workload: str, options: Mapping[str, Any]) -> nn.Module:
    with torch.device("meta"):
        return load_workload(make_trial(workload=workload, options=options, global_batch=2), rank=0).model


@pytest.mark.parametrize(
    ("workload", "options", "kinds"),
    [
        ("mlp", {"dim": 8, "depth": 3}, ["Linear"] * 3),
        ("gpt2", {"size": "tiny"}, ["TransformerBlock"] * 4),
        ("resnet18", {}, ["BasicBlock"] * 8),
    ],
)
def test_built_in_models_have_their_repeated_parts_as_blocks(
    workload: str, options: dict[str, Any], kinds: list[str]
) -> None:
    assert [type(block).__name__ for block in find_blocks(build_model(workload, options))] == kinds


def test_a_transformer_has_its_layers_as_blocks() -> None:
    model = nn.Transformer(8, 2, num_encoder_layers=2, num_decoder_layers=3, dim_feedforward=8, batch_first=True)
    kinds = [type(block) for block in find_blocks(model)]
    assert kinds == [nn.TransformerEncoderLayer] * 2 + [nn.TransformerDecoderLayer] * 3


def test_a_model_without_containers_has_no_blocks() -> None:
    assert find_blocks(nn.Linear(2, 2)) == []
    assert find_blocks(nn.LSTM(2, 2)) == []


def test_parts_without_parameters_are_no_blocks() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    assert find_blocks(nn.Sequential(first, nn.ReLU(), nn.Dropout(), second)) == [first, second]


def test_a_block_is_not_searched_further() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert find_blocks(nn.ModuleDict({"layers": nn.ModuleList([inner])})) == [inner]


def test_a_list_of_lists_gives_what_is_in_them() -> None:
    layers = [nn.Linear(2, 2) for _ in range(4)]
    model = nn.ModuleList([nn.ModuleList(layers[:2]), nn.ModuleList(layers[2:])])
    assert find_blocks(model) == layers


def test_a_layer_that_is_used_twice_is_one_block() -> None:
    layer = nn.Linear(2, 2)
    assert find_blocks(nn.Sequential(layer, nn.ReLU(), layer)) == [layer]

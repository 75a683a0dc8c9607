"""The optimizer: the workload's own or the one that is asked for, with the numbers that are given."""

from __future__ import annotations

import functools
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import nn

from scalelab.errors import UsageError
from scalelab.records.settings import Optimization
from scalelab.worker.optimizers import OPTIMIZERS, Factory, make_optimizer
from tests.worker.models.built import build

OWN = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-4)


def make(factory: Factory | None = OWN, **fields: Any) -> torch.optim.Optimizer:
    return make_optimizer(factory, nn.Linear(2, 2).parameters(), Optimization(**fields))


def read_group(optimizer: torch.optim.Optimizer, *names: str) -> tuple[Any, ...]:
    (group,) = optimizer.param_groups
    return tuple(group[name] for name in names)


def test_every_optimizer_that_can_be_asked_for_is_there() -> None:
    (names, _) = get_args(get_type_hints(Optimization)["optimizer"])
    assert set(get_args(names)) == set(OPTIMIZERS)


def test_nothing_given_is_the_workloads_own() -> None:
    assert read_group(make(), "lr", "momentum", "weight_decay") == (0.1, 0.9, 5e-4)
    assert type(make()) is torch.optim.SGD


def test_a_workload_without_one_gets_adam() -> None:
    assert type(make(None)) is torch.optim.Adam
    assert read_group(make(None, lr=0.5), "lr") == (0.5,)


def test_a_number_alone_changes_the_workloads_own() -> None:
    changed = make(lr=0.4, weight_decay=0.0)
    assert type(changed) is torch.optim.SGD
    assert read_group(changed, "lr", "momentum", "weight_decay") == (0.4, 0.9, 0.0)
    assert changed.defaults["lr"] == 0.4


def test_a_number_goes_into_every_group() -> None:
    def make_two(parameters: Any) -> torch.optim.Optimizer:
        first, second = parameters
        return torch.optim.AdamW([{"params": [first], "lr": 0.1}, {"params": [second], "lr": 0.2}])

    optimizer = make_optimizer(make_two, nn.Linear(2, 2).parameters(), Optimization(lr=0.5))
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("name", "kind", "lr"),
    [
        ("sgd", torch.optim.SGD, 1e-3),
        ("nesterov", torch.optim.SGD, 1e-3),
        ("adagrad", torch.optim.Adagrad, 1e-2),
        ("adadelta", torch.optim.Adadelta, 1.0),
        ("adam", torch.optim.Adam, 1e-3),
        ("adamw", torch.optim.AdamW, 1e-3),
    ],
)
def test_one_that_is_asked_for_has_torchs_defaults_and_the_numbers_given(name: str, kind: type, lr: float) -> None:
    assert type(make(optimizer=name)) is kind
    assert read_group(make(optimizer=name), "lr") == (lr,)
    assert read_group(make(optimizer=name, lr=0.3, weight_decay=0.2), "lr", "weight_decay") == (0.3, 0.2)


def test_momentum_is_that_of_sgd_and_nesterov_has_some_of_its_own() -> None:
    names = ("momentum", "nesterov")
    assert read_group(make(optimizer="sgd"), *names) == (0, False)
    assert read_group(make(optimizer="sgd", momentum=0.8), *names) == (0.8, False)
    assert read_group(make(optimizer="nesterov"), *names) == (0.9, True)
    assert read_group(make(optimizer="nesterov", momentum=0.8), *names) == (0.8, True)


def test_a_number_that_the_workloads_own_does_not_know_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--weight-decay 0.1 does not apply to the workload's LBFGS"):
        make(torch.optim.LBFGS, weight_decay=0.1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_moves_the_parameters(name: str) -> None:
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    optimizer = make_optimizer(None, model.parameters(), Optimization(optimizer=name))  # type: ignore[arg-type]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.weight)


@pytest.mark.parametrize(
    ("name", "options", "kind", "numbers"),
    [
        ("mlp", {"dim": 2, "depth": 1}, torch.optim.Adam, {"lr": 1e-3}),
        ("transformer", {"samples": 2, "d_model": 8, "features": 8, "feedforward": 8}, torch.optim.Adam, {"lr": 1e-3}),
        ("gpt2", {}, torch.optim.AdamW, {"lr": 3e-4, "weight_decay": 0.1}),
        ("moe", {}, torch.optim.AdamW, {"lr": 3e-4, "weight_decay": 0.1}),
        ("resnet18", {}, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}),
        ("lenet", {}, torch.optim.SGD, {"lr": 0.001, "momentum": 0.9, "weight_decay": 0}),
    ],
)
def test_the_workloads_have_the_published_optimizers(
    name: str, options: dict[str, Any], kind: type, numbers: dict[str, float]
) -> None:
    workload = build(name, options)
    optimizer = make_optimizer(workload.optimizer, workload.model.parameters(), Optimization())
    assert type(optimizer) is kind
    assert read_group(optimizer, *numbers) == tuple(numbers.values())

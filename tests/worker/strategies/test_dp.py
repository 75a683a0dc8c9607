"""Data parallelism in one process: the emulation on a CPU against the plain model."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from scalelab.worker.strategies.dp import EmulatedDataParallel, apply_dp, replicate, scatter
from tests.worker.trials import make_trial

Tensor = torch.Tensor


class Tied(nn.Module):
    """One weight under two names, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.tanh(self.first(x)) * self.frozen)
        return result


def make_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))


def make_conv() -> nn.Module:
    """Batch norm in eval mode: in training every replica would have statistics of its own."""
    return nn.Sequential(
        nn.Conv1d(1, 3, 3, padding=1), nn.BatchNorm1d(3), nn.ReLU(), nn.Conv1d(3, 1, 3, padding=1)
    ).eval()


class Recurrent(nn.Module):
    """Modules that keep a second list of their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.cells(x)[0]
        return result


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(6, 2, 1, 1, 12, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x, x)
        return result


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (make_mlp, (6,)),
    "tied": (Tied, (6,)),
    "conv": (make_conv, (1, 6)),
    "recurrent": (Recurrent, (3, 6)),
    "transformer": (Translator, (3, 6)),
}


def train(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, num_steps: int = 4) -> list[float]:
    """Losses of a few steps on batches of 7, which no number of replicas divides."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(num_steps):
        x, y = (torch.randn(7, *shape, generator=generator, dtype=dtype) for _ in range(2))
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make_pair(name: str, num_replicas: int, dtype: torch.dtype) -> tuple[nn.Module, nn.Module, tuple[int, ...]]:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make().to(dtype)
    return model, EmulatedDataParallel(copy.deepcopy(model), num_replicas), shape


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_training_equals_single_to_the_last_places(name: str, num_replicas: int) -> None:
    # Only the order differs in which samples' gradients are added: units in the last place of float64.
    single, spread, shape = make_pair(name, num_replicas, torch.float64)
    assert train(spread, shape, torch.float64) == pytest.approx(train(single, shape, torch.float64), rel=1e-12)
    for mine, theirs in zip(spread.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_training_in_float32_stays_within_its_rounding(name: str) -> None:
    # A sum of some dozen terms in another order: about ten units of 6e-8, for four steps.
    single, spread, shape = make_pair(name, 2, torch.float32)
    assert train(spread, shape, torch.float32) == pytest.approx(train(single, shape, torch.float32), rel=3e-6)


def test_one_replica_is_the_model_itself() -> None:
    single, spread, shape = make_pair("mlp", 1, torch.float32)
    assert train(spread, shape, torch.float32) == train(single, shape, torch.float32)


def test_forward_alone_is_bit_equal_where_samples_do_not_meet() -> None:
    single, spread, _ = make_pair("conv", 2, torch.float32)
    x = torch.randn(8, 1, 6)
    assert torch.equal(single(x), spread(x))


def test_a_batch_smaller_than_the_replicas_uses_fewer() -> None:
    single, spread, _ = make_pair("mlp", 4, torch.float64)
    for num_samples in (1, 2, 3, 5):
        x = torch.randn(num_samples, 6, dtype=torch.float64)
        torch.testing.assert_close(spread(x), single(x), rtol=1e-12, atol=1e-12)
    assert [len(scatter([torch.zeros(n)], 4)) for n in (1, 3, 5, 8)] == [1, 3, 3, 4]


class Nested(nn.Module):
    """Nested inputs of all kinds; outputs as a dict of tensors and other things."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, pair: tuple[Tensor, Tensor], *, more: dict[str, Any], times: int) -> dict[str, Any]:
        total = pair[0] * self.scale + pair[1] * times + more["x"]
        return {"total": total, "index": pair[0].long(), "loss": total.mean(), "tag": more["tag"], "nothing": None}


def test_nested_inputs_are_cut_and_nested_outputs_joined() -> None:
    a, b, c = (torch.arange(6.0).view(6, 1) * k for k in (1, 2, 3))
    a.requires_grad_()
    model = Nested()
    expected = model((a, b), more={"x": c, "tag": "t"}, times=3)
    found = EmulatedDataParallel(model, 3)((a, b), more={"x": c, "tag": "t"}, times=3)
    assert torch.equal(found["total"], expected["total"])
    assert torch.equal(found["index"], expected["index"])
    assert not found["index"].requires_grad
    assert found["loss"].tolist() == expected["total"].view(3, 2).mean(1).tolist()
    assert (found["tag"], found["nothing"]) == ("t", None)
    found["total"].sum().backward()
    assert a.grad is not None
    assert torch.equal(a.grad, torch.full_like(a, 2.0))


class Observer(nn.Module):
    """Reports what its thread sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(
            (
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled("cpu"),
                torch.get_autocast_dtype("cpu"),
                torch.get_num_threads(),
            )
        )
        result: Tensor = self.layer(x)
        return result


def test_replicas_work_under_what_the_caller_set() -> None:
    spread = EmulatedDataParallel(Observer(), 2)
    x = torch.randn(4, 2)
    threads = torch.get_num_threads()
    spread(x)
    with torch.no_grad():
        spread(x)
    with torch.inference_mode():
        spread(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert spread(x).dtype == torch.bfloat16
    modes = [(True, False, False), (False, False, False), (False, True, False), (True, False, True)]
    assert [seen[:3] for seen in spread.module.seen] == [mode for mode in modes for _ in range(2)]
    assert {seen[4] for seen in spread.module.seen} == {threads}
    assert spread.module.seen[-1][3] is torch.bfloat16


def test_only_the_first_replicas_statistics_survive() -> None:
    norm = nn.BatchNorm1d(3)
    alone = copy.deepcopy(norm)
    x = torch.randn(8, 3)
    EmulatedDataParallel(norm, 2)(x)
    alone(x[:4])
    assert torch.equal(norm.running_mean, alone.running_mean)
    assert norm.num_batches_tracked == 1


class Faulty(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] > 0:
            raise ZeroDivisionError("replica 1 is broken")
        return x


def test_an_error_in_a_thread_is_raised_as_it_is_and_no_thread_is_left() -> None:
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError, match="replica 1 is broken"):
        EmulatedDataParallel(Faulty(), 2)(torch.tensor([[0.0], [1.0]]))
    assert threading.active_count() == before


def test_replicas_run_at_the_same_time() -> None:
    meeting = threading.Barrier(2, timeout=20)

    class Meeting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            meeting.wait()
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            meeting.wait()
            return gradient

    class Waiting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            met: Tensor = Meeting.apply(super().forward(x))
            return met

    EmulatedDataParallel(Waiting(2, 2), 2)(torch.randn(4, 2)).sum().backward()


def test_replicas_have_parameters_of_their_own_but_for_the_first() -> None:
    model = Tied()
    first, second = replicate(model, 2)
    assert isinstance(second, Tied)
    assert first.first.weight.data_ptr() == model.first.weight.data_ptr()
    assert second.first.weight.data_ptr() != model.first.weight.data_ptr()
    assert second.first.weight is second.second.weight
    assert not second.frozen.requires_grad


def test_names_are_those_of_data_parallel() -> None:
    model = make_mlp()
    assert list(EmulatedDataParallel(model, 2).state_dict()) == list(nn.DataParallel(model).state_dict())


def test_a_trial_on_cpu_gets_a_replica_per_rank() -> None:
    spread = apply_dp(make_mlp(), torch.device("cpu"), make_trial(strategy="dp", num_ranks=2))
    assert isinstance(spread, EmulatedDataParallel)
    assert spread.num_replicas == 2

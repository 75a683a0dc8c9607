"""Checks that run on real ranks, before the training that a trial asks for: `build` is told which.

An assertion that fails on a rank makes the trial invalid, with its message as the reason.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR

from scalelab.analysis.traffic import compare_messages, expect_messages
from scalelab.records.observations import RankReport
from scalelab.records.settings import Spreading
from scalelab.records.trial import Trial
from scalelab.worker.instruments.messages import watch_messages
from scalelab.worker.step import mark_nothing, take_step
from scalelab.worker.strategies.apply import can_update_without_sync, load_strategy, without_sync
from scalelab.worker.strategies.ddp import find_hook_state
from scalelab.worker.strategies.sync_batch_norm import apply_sync_batch_norm
from scalelab.worker.training import Training, build_training, dress_workload
from scalelab.workloads.workload import Workload

# A rank is forked from a server that knows nothing of the tests.
sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.worker.strategies.cases import CASES, SPREAD
from tests.worker.trials import make_trial

Tensor = torch.Tensor
CPU = torch.device("cpu")


def read_parameters(model: nn.Module) -> list[Tensor]:
    """All parameters, whole, however they are sharded."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return [parameter.detach().clone() for parameter in model.parameters()]
    found = [parameter.detach() for parameter in model.parameters()]
    return [value.full_tensor() if isinstance(value, DTensor) else value.clone() for value in found]


def train(trial: Trial, rank: int, num_steps: int = 5) -> list[Tensor]:
    training: Training = build_training(trial, rank, CPU)
    for _ in range(num_steps):
        take_step(training, mark_nothing)
    return read_parameters(training.model)


def check_parameters(rank: int, num_ranks: int, case: str) -> None:
    """Every strategy ends with the very parameters of ddp."""
    fields = CASES[case]
    expected = train(make_trial(num_ranks=num_ranks, **fields), rank)
    for strategy in SPREAD:
        found = train(make_trial(strategy=strategy, num_ranks=num_ranks, **fields), rank)
        assert len(found) == len(expected), strategy
        for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(mine, theirs), f"{strategy}: parameter {number} differs from ddp's"


class Normed(nn.Module):
    """Batch norms of images and of vectors: with and without weights, with and without a momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None)
        )
        self.end = nn.Sequential(nn.Linear(16, 5), nn.BatchNorm1d(5, affine=False), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.end(self.body(x).flatten(1))
        return result


def check_sync_batch_norm(rank: int, num_ranks: int, _: str) -> None:
    """Ranks with a part of the batch each give the numbers of one process with all of it."""
    torch.manual_seed(0)
    whole = Normed().double()
    spread = DistributedDataParallel(apply_sync_batch_norm(copy.deepcopy(whole), CPU), broadcast_buffers=False)
    mine = slice(4 * rank, 4 * rank + 4)
    for _step in range(3):
        x, y = torch.randn(4 * num_ranks, 2, 6, 6).double(), torch.randn(4 * num_ranks, 3).double()
        for model, part in ((whole, slice(None)), (spread, mine)):
            model.zero_grad()
            nn.functional.mse_loss(model(x[part]), y[part]).backward()
        for (name, expected), found in zip(whole.named_parameters(), spread.parameters(), strict=True):
            assert expected.grad is not None
            assert found.grad is not None
            torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=1e-10, msg=f"gradient of {name}")
        for (name, expected), found in zip(whole.named_buffers(), spread.buffers(), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10, msg=name)
    torch.testing.assert_close(spread.module.eval()(x), whole.eval()(x), rtol=0, atol=1e-10)


def check_held_gradients(rank: int, num_ranks: int, _: str) -> None:
    """Two passes without exchange and one with it exchange the sum of all three, and only then."""
    for strategy in SPREAD:
        compare_held_gradients(rank, num_ranks, strategy)


def compare_held_gradients(rank: int, num_ranks: int, strategy: str) -> None:
    trial = make_trial(strategy=strategy, num_ranks=num_ranks)
    x = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(rank))

    def train_once(is_held: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = load_strategy(strategy)(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), CPU, trial)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if is_held:
            for part in x[:2]:
                with without_sync(model):
                    model(part).square().sum().backward()
            model(x[2]).square().sum().backward()
        else:
            model(x.flatten(0, 1)).square().sum().backward()
        optimizer.step()
        return read_parameters(model)

    for held, whole in zip(train_once(True), train_once(False), strict=True):
        torch.testing.assert_close(held, whole, rtol=1e-5, atol=1e-5, msg=lambda text: f"{strategy}: {text}")
        everyone = [torch.empty_like(held) for _ in range(num_ranks)]
        dist.all_gather(everyone, held)
        assert all(torch.equal(everyone[0], other) for other in everyone), f"{strategy}: the ranks drifted apart"


def check_exchange_is_held(rank: int, num_ranks: int, _: str) -> None:
    """Without the exchange every rank has gradients of its own; a compiled model is looked through."""
    for strategy in SPREAD:
        trial = make_trial(strategy=strategy, num_ranks=num_ranks)
        model = load_strategy(strategy)(nn.Sequential(nn.Linear(4, 4)), CPU, trial)
        wrapped: Any = torch.compile(model, backend="eager")
        assert can_update_without_sync(wrapped) == (strategy in ("ddp", "fsdp-none", "zero1")), strategy
        with without_sync(wrapped):
            if isinstance(model, FSDPModule):
                state = model._get_fsdp_state()._fsdp_param_group
                assert state is None or not state.reduce_grads, strategy
            else:
                is_held = not getattr(model, "require_backward_grad_sync", getattr(model, "_sync_gradients", True))
                assert is_held, strategy


def check_hook_state(rank: int, num_ranks: int, _: str) -> None:
    for hook in ("none", "fp16", "powersgd"):
        find_state(rank, num_ranks, hook)


def find_state(rank: int, num_ranks: int, hook: str) -> None:
    settings = {"powersgd_rank": 2, "powersgd_start": 3} if hook == "powersgd" else {}
    spreading = Spreading(gradient_hook=hook, **settings)  # type: ignore[arg-type]
    training = build_training(make_trial(num_ranks=num_ranks, spreading=spreading), rank, CPU)
    state = find_hook_state(training.model)
    assert (state is not None) == (hook == "powersgd"), hook
    if state is not None:
        for _ in range(5):
            take_step(training, mark_nothing)
        assert state.matrix_approximation_rank == 2
        assert state.error_dict, "PowerSGD has not begun"
        assert find_hook_state(torch.compile(training.model, backend="eager")) is state  # type: ignore[arg-type]


def make_clipped(rank: int, num_ranks: int, **parts: Any) -> Workload:
    """Everything that one optimizer can be told: clipping, a schedule, accumulation; the same data on any ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Linear(5, 3))
    data = torch.randn(6, 8, 7)
    mine = [half for step in data for half in step.chunk(num_ranks)[rank].chunk(2)]
    fields: dict[str, Any] = {"clip_norm": 0.2, "schedule": lambda made: StepLR(made, 2), "accumulation": 2} | parts
    return Workload(
        model=model,
        batches=[(one[:, :4], one[:, 4:]) for one in mine],
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
        **fields,
    )


def make_gan(rank: int, num_ranks: int) -> Workload:
    """Two networks that take turns; buffers in one of them, and noise that comes with the batch."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    discriminator = nn.Sequential(nn.Linear(2, 8), Counting(), nn.Linear(8, 1))
    data = torch.randn(6, 8, 5)

    def judge(model: Any, batch: Tensor) -> Tensor:
        fake = model["generator"](batch[:, 2:]).detach()
        return model["discriminator"](fake).square().mean() + (model["discriminator"](batch[:, :2]) - 1).square().mean()

    def fool(model: Any, batch: Tensor) -> Tensor:
        loss: Tensor = (model["discriminator"](model["generator"](batch[:, 2:])) - 1).square().mean()
        return loss

    return Workload(
        model=nn.ModuleDict({"generator": generator, "discriminator": discriminator}),
        batches=[step.chunk(num_ranks)[rank] for step in data],
        loss={"discriminator": judge, "generator": fool},
        optimizer={"generator": lambda parameters: torch.optim.SGD(parameters, lr=0.2)},
        clip_norm=0.5,
        schedule=lambda made: StepLR(made, 2),
    )


class Counting(nn.Module):
    """A layer with a buffer that no gradient needs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.tanh()


def dress(workload: Workload, strategy: str, num_ranks: int, rank: int) -> tuple[Training, Trial]:
    trial = make_trial(workload="", strategy=strategy, num_ranks=num_ranks, global_batch=8, dtype="float64")
    return dress_workload(workload, trial, rank, CPU), trial


def check_own_parts(rank: int, num_ranks: int, which: str) -> None:
    """What `build` says of a step trains two ranks as one, and sends what theory says, to the byte."""
    make, strategies = (make_gan, ("ddp",)) if which == "turns" else (make_clipped, SPREAD)
    alone, _ = dress(make(0, 1), "single", 1, 0)
    alone_losses = [take_step(alone, mark_nothing).item() for _ in range(5)]
    expected = read_parameters(alone.model)
    loose, _ = dress(replace(make(0, 1), clip_norm=None), "single", 1, 0)
    assert [take_step(loose, mark_nothing).item() for _ in range(5)] != alone_losses, "nothing was clipped"
    for strategy in strategies:
        training, trial = dress(make(rank, num_ranks), strategy, num_ranks, rank)
        losses = torch.tensor([take_step(training, mark_nothing).item() for _ in range(5)])
        dist.all_reduce(losses)
        torch.testing.assert_close(losses / num_ranks, torch.tensor(alone_losses), msg=strategy)
        for mine, theirs in zip(read_parameters(training.model), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7, msg=strategy)
        report = watch_messages(trial, training, Path(), RankReport(rank=rank))
        assert report.message_basis is not None
        theory = expect_messages(strategy, num_ranks, report.message_basis, Spreading(), training.accumulation)
        for line in compare_messages(report.messages, theory, num_ranks):
            is_exact = training.accumulation == 1 or line.purpose == "gradient norm"
            assert line.payload_bytes == line.expected_bytes or not is_exact, f"{strategy}: {line}"


CHECKS = {
    "own_parts": check_own_parts,
    "parameters": check_parameters,
    "sync_batch_norm": check_sync_batch_norm,
    "held_gradients": check_held_gradients,
    "exchange_is_held": check_exchange_is_held,
    "hook_state": check_hook_state,
}


def build(batch_size: int, rank: int, num_ranks: int, check: str = "", argument: str = "") -> Any:
    CHECKS[check](rank, num_ranks, argument)
    return nn.Linear(4, 3), [(torch.ones(batch_size, 4), torch.zeros(batch_size, 3))], nn.MSELoss()

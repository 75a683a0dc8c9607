"""A training loop that we did not write, in this process: its steps, losses and phases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from scalelab.errors import UsageError
from scalelab.records.trial import Block, StepKind, StepSample
from scalelab.worker.script.session import ScriptEnded, ScriptSession, refuse_samples

CLEAN = (Block(StepKind.CLEAN, 6),)
Loop = Callable[[nn.Module, Iterator[Any]], None]


class Kept(list[StepSample]):
    def flush(self) -> None: ...


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def make_batches(batch_size: int = 4) -> Iterator[Any]:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(400, 8), torch.randint(0, 4, (400,)))
    return iter(DataLoader(data, batch_size))


def watch(
    loop: Loop, tmp_path: Path, blocks: Sequence[Block] = CLEAN, check: Callable[[int], None] | None = None
) -> tuple[ScriptSession, Kept]:
    """The session and its samples after the loop was ended."""
    kept = Kept()
    session = ScriptSession(blocks, 0, tmp_path / "trace.json", kept, check)
    with pytest.raises(ScriptEnded), session:
        loop(make_model(), make_batches())
    return session, kept


def train_plainly(model: nn.Module, batches: Iterator[Any], losses: list[float] | None = None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in batches:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        if losses is not None:
            losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_losses_are_those_of_the_loop_without_us(tmp_path: Path) -> None:
    alone: list[float] = []
    train_plainly(make_model(), make_batches(), alone)
    _, kept = watch(train_plainly, tmp_path)
    assert [one.loss for one in kept] == alone[:6]
    assert [one.kind for one in kept] == [StepKind.SETTLE, *[StepKind.CLEAN] * 5]


def test_the_loop_ends_with_the_last_planned_step(tmp_path: Path) -> None:
    taken: list[float] = []
    watch(lambda model, batches: train_plainly(model, batches, taken), tmp_path)
    assert len(taken) == 6


def test_nothing_stays_patched(tmp_path: Path) -> None:
    before = (torch.autograd.backward, torch.save, nn.Module.eval, torch.amp.GradScaler.step)
    watch(train_plainly, tmp_path)
    assert (torch.autograd.backward, torch.save, nn.Module.eval, torch.amp.GradScaler.step) == before


def test_accumulated_passes_are_one_step(tmp_path: Path) -> None:
    def loop(model: nn.Module, batches: Iterator[Any]) -> None:
        optimizer = torch.optim.AdamW(model.parameters())
        for number, (inputs, targets) in enumerate(batches):
            (nn.functional.cross_entropy(model(inputs), targets) / 4).backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()

    session, kept = watch(loop, tmp_path)
    assert (session.num_passes, session.step_samples, len(kept)) == (4, 16, 6)


def test_the_two_optimizers_of_a_gan_make_one_step(tmp_path: Path) -> None:
    def loop(model: nn.Module, batches: Iterator[Any]) -> None:
        critic = nn.Linear(4, 1)
        of_model, of_critic = (torch.optim.SGD(one.parameters(), lr=0.01) for one in (model, critic))
        for number, (inputs, _) in enumerate(batches):
            critic(model(inputs).detach()).mean().backward()
            of_critic.step()
            if number % 3 == 2:
                (-critic(model(inputs)).mean()).backward()
                of_model.step()

    session, kept = watch(loop, tmp_path)
    assert len(kept) == 6
    assert session.watch.rule.num_optimizers == 2
    assert session.watch.rule.is_regular
    assert (session.num_passes, session.step_samples) == (4, 12)


def test_a_skipped_update_of_a_grad_scaler_is_kept_apart(tmp_path: Path) -> None:
    def loop(model: nn.Module, batches: Iterator[Any]) -> None:
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
        for number, (inputs, targets) in enumerate(batches):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            scaler.scale(loss).backward()
            if number == 3:
                next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
            scaler.step(optimizer)
            scaler.update()

    session, kept = watch(loop, tmp_path)
    assert session.num_apart["skipped"] == 1
    assert [one.step for one in kept if one.kind is StepKind.SETTLE] == [0, 3]
    alone: list[float] = []
    train_plainly(make_model(), make_batches(), alone)
    assert kept[0].loss == alone[0], "the loss before it was scaled"


def test_a_closure_is_one_step(tmp_path: Path) -> None:
    def loop(model: nn.Module, batches: Iterator[Any]) -> None:
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        for inputs, targets in batches:

            def close(inputs: Any = inputs, targets: Any = targets) -> torch.Tensor:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), targets)
                loss.backward()
                return loss

            optimizer.step(close)  # type: ignore[arg-type]

    session, kept = watch(loop, tmp_path)
    assert len(kept) == 6
    assert session.num_passes is not None
    assert session.num_passes > 1


def test_steps_with_an_evaluation_or_a_checkpoint_are_kept_apart(tmp_path: Path) -> None:
    def loop(model: nn.Module, batches: Iterator[Any]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, (inputs, targets) in enumerate(batches):
            if number == 2:
                model.eval()
                model.train()
            if number == 4:
                torch.save(model.state_dict(), tmp_path / "model.pt")
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    session, kept = watch(loop, tmp_path)
    assert [one.step for one in kept if one.kind is StepKind.SETTLE] == [0, 2, 4]
    assert session.num_apart == {"evaluation": 1, "checkpoint": 1, "skipped": 0}


def test_phases_add_up_to_no_more_than_the_step(tmp_path: Path) -> None:
    _, kept = watch(train_plainly, tmp_path, (Block(StepKind.CLEAN, 4), Block(StepKind.PHASES, 3)))
    timed = [one for one in kept if one.kind is StepKind.PHASES]
    assert len(timed) == 3
    for one in timed:
        parts = (one.input_seconds, one.forward_seconds, one.backward_seconds, one.optimizer_seconds)
        assert all(part is not None and part > 0 for part in parts)
        assert sum(part or 0.0 for part in parts) <= one.step_seconds


def test_profiled_steps_leave_a_trace(tmp_path: Path) -> None:
    watch(train_plainly, tmp_path, (Block(StepKind.CLEAN, 3), Block(StepKind.PROFILED, 2)))
    text = (tmp_path / "trace.json").read_text(encoding="utf-8")
    assert "ProfilerStep#0" in text
    assert "ProfilerStep#1" in text


def test_without_ddp_the_communication_free_block_is_left_out_with_a_reason(tmp_path: Path) -> None:
    blocks = (Block(StepKind.CLEAN, 4), Block(StepKind.COMM_FREE, 2), Block(StepKind.CLEAN, 2))
    session, kept = watch(train_plainly, tmp_path, blocks)
    assert {one.kind for one in kept} == {StepKind.SETTLE, StepKind.CLEAN}
    assert len(kept) == 6
    assert "one DDP model" in session.obstacle


def test_another_batch_than_planned_is_an_error_that_names_both(tmp_path: Path) -> None:
    session = ScriptSession(CLEAN, 0, tmp_path / "trace.json", Kept(), refuse_samples(8))
    with pytest.raises(UsageError, match="gave 4 samples per step and rank, the plan says 8"), session:
        train_plainly(make_model(), make_batches())

"""The timed loop trains exactly as a loop written by hand does, whatever it measures meanwhile."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # what torch.optim loads at its first use; it sets an environment variable
from torch import nn

from scalelab.records.trial import PHASES, Block, StepKind, StepPlan, StepSample
from scalelab.worker import loop
from scalelab.worker.batches.stream import BatchStream
from scalelab.worker.loop import RawStep, run_block, run_clean_steps, run_comm_free_steps, run_phase_steps
from scalelab.worker.training import Training, as_loss

NUM_BATCHES = 3


def make_parts() -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    return model, [(torch.randn(6, 4), torch.randn(6, 1)) for _ in range(NUM_BATCHES)]


def make_training(waits: list[str] | None = None) -> Training:
    model, batches = make_parts()
    return Training(
        model=model,
        loss=as_loss(nn.MSELoss()),
        optimizer=torch.optim.Adam(model.parameters()),
        batches=BatchStream(batches, None, 6),
        synchronize=lambda: None if waits is None else waits.append("waited"),
    )


def train_by_hand(num_steps: int) -> tuple[dict[str, Any], list[float]]:
    """The loop that every tutorial has."""
    model, batches = make_parts()
    optimizer, losses = torch.optim.Adam(model.parameters()), []
    for step in range(num_steps):
        inputs, targets = batches[step % NUM_BATCHES]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model.state_dict(), losses


def run_plan(training: Training, blocks: list[Block], trace: Path) -> list[StepSample]:
    samples: list[StepSample] = []
    for block in blocks:
        run_block(training, block, 0, trace, samples)
    return samples


def play_block(training: Training, block: Block, rank: int, first_step: int, trace: Path) -> list[StepSample]:
    """The samples of one block that comes after others."""
    samples = [StepSample(rank, first_step - 1, StepKind.CLEAN, 0.0, 1.0)]
    run_block(training, block, rank, trace, samples)
    return samples[1:]


def check_equal(model: nn.Module, expected: dict[str, Any]) -> None:
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in state.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("run", [run_clean_steps, run_phase_steps])
def test_the_timed_loop_trains_bit_for_bit_as_one_written_by_hand(run: Any) -> None:
    training = make_training()
    raw: list[RawStep] = []
    run(training, 7, raw)
    expected, losses = train_by_hand(7)
    check_equal(training.model, expected)
    assert [readings.loss for readings in raw] == losses


def test_all_kinds_of_steps_but_comm_free_ones_are_one_training(tmp_path: Path) -> None:
    training = make_training()
    # A comm-free block takes one batch more than it has steps: with two steps the pool of three comes round.
    plan = StepPlan(lead_in_steps=2, clean_steps=3, phase_steps=2, comm_free_steps=2, profiled_steps=2, cycles=1)
    samples = run_plan(training, list(plan.blocks), tmp_path / "trace.json.gz")
    num_trained = plan.num_steps - plan.comm_free_steps
    expected, losses = train_by_hand(num_trained)
    check_equal(training.model, expected)
    assert [s.loss for s in samples if s.kind is not StepKind.COMM_FREE] == losses


def test_a_comm_free_block_leaves_no_trace_in_the_training() -> None:
    training = make_training()
    run_clean_steps(training, 4, [])
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    random = torch.get_rng_state()
    raw: list[RawStep] = []
    run_comm_free_steps(training, 5, raw)
    assert len(raw) == 5
    check_equal(training.model, before)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in training.model.parameters())


def test_comm_free_steps_ask_the_model_not_to_exchange_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    class Replica(nn.Linear):
        is_silent = False
        seen: list[bool] = []  # noqa: RUF012

        def no_sync(self) -> Any:
            return Silence(self)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(self.is_silent)
            return super().forward(x)

    class Silence:
        def __init__(self, replica: Replica) -> None:
            self.replica = replica

        def __enter__(self) -> None:
            self.replica.is_silent = True

        def __exit__(self, *_: object) -> None:
            self.replica.is_silent = False

    monkeypatch.setattr(loop, "without_sync", lambda model: model.no_sync())
    model = Replica(4, 1)
    training = Training(
        model=model,
        loss=as_loss(nn.MSELoss()),
        optimizer=torch.optim.SGD(model.parameters()),
        batches=BatchStream([(torch.ones(2, 4), torch.ones(2, 1))], None, 2),
        synchronize=lambda: None,
    )
    run_comm_free_steps(training, 2, [])
    run_clean_steps(training, 1, [])
    assert Replica.seen == [True, True, True, False]


def test_samples_are_numbered_on_and_carry_their_rank_and_kind(tmp_path: Path) -> None:
    samples = play_block(make_training(), Block(StepKind.SETTLE, 3), 2, 10, tmp_path)
    assert [(s.rank, s.step, s.kind) for s in samples] == [(2, step, StepKind.SETTLE) for step in (10, 11, 12)]
    starts = [s.start_seconds for s in samples]
    assert starts == sorted(starts)
    assert all(s.step_seconds > 0 for s in samples)


def test_phases_are_timed_only_in_their_own_steps_and_sum_to_the_step(tmp_path: Path) -> None:
    training = make_training()
    clean, timed = (
        play_block(training, Block(kind, 1), 0, 0, tmp_path)[0] for kind in (StepKind.CLEAN, StepKind.PHASES)
    )
    assert [getattr(clean, f"{phase}_seconds") for phase in PHASES] == [None] * 4
    parts = [getattr(timed, f"{phase}_seconds") for phase in PHASES]
    assert all(part >= 0 for part in parts)
    assert sum(parts) == pytest.approx(timed.step_seconds)


@pytest.mark.parametrize(("kind", "per_step"), [(StepKind.CLEAN, 2), (StepKind.PHASES, 5)])
def test_the_device_is_waited_for_at_every_edge_of_what_is_timed(tmp_path: Path, kind: StepKind, per_step: int) -> None:
    waits: list[str] = []
    play_block(make_training(waits), Block(kind, 3), 0, 0, tmp_path)
    assert len(waits) == 3 * per_step


def test_a_profiled_block_leaves_a_trace_of_its_steps(tmp_path: Path) -> None:
    trace = tmp_path / "trace" / "rank0.json.gz"
    samples = play_block(make_training(), Block(StepKind.PROFILED, 2), 0, 0, trace)
    assert len(samples) == 2
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "aten::mse_loss" for event in events) == 2


def test_a_loss_that_is_not_finite_is_recorded_as_it_is(tmp_path: Path) -> None:
    training = make_training()
    with torch.no_grad():
        next(training.model.parameters()).fill_(float("inf"))
    (sample,) = play_block(training, Block(StepKind.CLEAN, 1), 0, 0, tmp_path)
    assert sample.loss is not None
    assert math.isnan(sample.loss)


def test_steps_before_an_error_are_kept(tmp_path: Path) -> None:
    training = make_training()
    stream = iter([next(training.batches) for _ in range(2)])
    samples: list[StepSample] = []
    with pytest.raises(StopIteration):
        run_block(replace(training, batches=stream), Block(StepKind.CLEAN, 5), 0, tmp_path, samples)
    assert [sample.step for sample in samples] == [0, 1]

"""A Meter around a real training: the same numbers to the last bit, and tensors that are read and not kept."""

from __future__ import annotations

import gc
import gzip
import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from scalelab.errors import UsageError
from scalelab.records.trial import Status, StepKind
from scalelab.worker.meter.meter import Meter
from scalelab.worker.meter.step_log import read_losses, take_loss
from tests.worker.meter.test_meter import read_result

torch.optim.SGD([nn.Parameter(torch.zeros(1))]).zero_grad()  # torch loads more on first use, and sets a variable


def train(meter: Meter | None) -> tuple[list[float], list[torch.Tensor], tuple[object, ...]]:
    """Two epochs with everything that is random in a training: losses, parameters, and the state of chance after."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    losses = []
    with meter or nullcontext():
        for _epoch in range(2):
            for inputs, targets in loader if meter is None else meter.steps(loader):
                with meter.phase("forward") if meter else nullcontext():
                    loss = nn.functional.mse_loss(model(inputs), targets)
                if meter:
                    meter.loss(loss)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    chance = (torch.rand(1).item(), random.random(), float(np.random.rand()))
    return losses, [p.detach().clone() for p in model.parameters()], chance


def test_a_training_gives_the_same_numbers_with_and_without(tmp_path: Path) -> None:
    losses, parameters, chance = train(None)
    metered_losses, metered_parameters, metered_chance = train(Meter("my-run", runs_dir=tmp_path))
    assert metered_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(metered_parameters, parameters, strict=True))
    assert metered_chance == chance
    result = read_result(tmp_path)
    assert result.status is Status.COMPLETED
    assert [s.loss for s in result.samples] == losses


def test_neither_the_loss_nor_its_graph_is_kept(tmp_path: Path) -> None:
    gc.collect()
    before = count_tensors()
    weight = torch.ones(2, requires_grad=True)
    with Meter("my-run", runs_dir=tmp_path) as meter:
        for factor in meter.steps(torch.ones(2) * k for k in range(5)):
            loss = (weight * factor).mean()
            meter.loss(loss)
            del loss, factor
            gc.collect()
            assert count_tensors() <= before + 2
    assert [s.loss for s in read_result(tmp_path).samples] == [0.0, 1.0, 2.0, 3.0, 4.0]


def count_tensors() -> int:
    return sum(type(thing) is torch.Tensor for thing in gc.get_objects())


def test_a_loss_with_several_elements_is_refused() -> None:
    with pytest.raises(UsageError, match=r"loss has 3 elements: pass one"):
        take_loss(torch.ones(3))
    assert take_loss(torch.full((1, 1), 2.5)) == 2.5


def test_losses_that_stay_on_their_device_are_read_together() -> None:
    """As on CUDA, where reading one would wait for the device."""
    kept = torch.tensor(0.25)
    assert read_losses([1.0, kept, None]) == [1.0, 0.25, None]


def test_running_out_of_memory_is_told_apart(tmp_path: Path) -> None:
    def loader() -> Iterator[torch.Tensor]:
        yield torch.empty(1)
        yield torch.empty(1 << 60, dtype=torch.uint8)

    with pytest.raises(RuntimeError, match="memory"), Meter("my-run", runs_dir=tmp_path) as meter:
        for _ in meter.steps(loader()):
            pass
    result = read_result(tmp_path)
    assert result.status is Status.OUT_OF_MEMORY
    assert len(result.samples) == 1


def test_steps_without_a_loop_to_wrap_end_where_the_script_says(tmp_path: Path) -> None:
    meter = Meter("my-run", runs_dir=tmp_path)
    for number in range(5):
        with meter.phase("forward"):
            meter.loss(float(number))
        meter.step()
    meter.close()
    meter.close()
    samples = read_result(tmp_path).samples
    assert [one.loss for one in samples] == [1.0, 2.0, 3.0, 4.0], "the first call begins the recording"
    assert all(one.input_seconds is None and one.forward_seconds is not None for one in samples)


def test_accumulated_batches_are_one_step_and_an_incomplete_one_is_none(tmp_path: Path) -> None:
    with Meter("my-run", runs_dir=tmp_path, batch_size=8, accumulate=3) as meter:
        for number in meter.steps(range(8)):
            meter.loss(float(number))
    result = read_result(tmp_path)
    assert [one.loss for one in result.samples] == [2.0, 5.0]
    assert result.trial.global_batch == 24


def test_profiled_steps_are_kept_apart_and_their_trace_stays(tmp_path: Path) -> None:
    with Meter("my-run", runs_dir=tmp_path, profile_steps=2) as meter:
        for _ in meter.steps(range(15)):
            torch.ones(4, 4) @ torch.ones(4, 4)
    kinds = [one.kind for one in read_result(tmp_path).samples]
    assert kinds == [*[StepKind.CLEAN] * 10, *[StepKind.PROFILED] * 2, *[StepKind.CLEAN] * 3]
    (trace,) = tmp_path.glob("*/trials/*/trace/*.json*")
    assert b"aten::mm" in gzip.decompress(trace.read_bytes())

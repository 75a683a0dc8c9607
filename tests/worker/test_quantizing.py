"""Models taken to int8 in the process of a rank: whose they are, on which samples, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scalelab.errors import UsageError
from scalelab.launch.local import LocalLauncher
from scalelab.records.settings import TrainingRun
from scalelab.records.tasks import Quantization, Quantize
from scalelab.records.trial import Status, TrialResult
from scalelab.worker.quantizing import find_state, load_weights, take_samples
from tests.worker.trials import launch, make_trial

OWN = """\
import torch
from torch import nn


def build(batch_size, activation="ReLU", kind="classes"):
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("conv", nn.Conv2d(1, 4, 3))
    model.add_module("act", getattr(nn, activation)())
    model.add_module("flat", nn.Flatten())
    model.add_module("head", nn.Linear(4 * 36, 3))
    images, classes = torch.randn(8 * batch_size, 1, 8, 8), torch.randint(3, (8 * batch_size,))
    batches = list(zip(images.split(batch_size), classes.split(batch_size)))
    tests = {"classes": batches, "none": None, "empty": []}[kind]
    return dict(model=model, batches=batches, loss=nn.CrossEntropyLoss(), test_batches=tests)
"""

Run = Callable[..., TrialResult]


@pytest.fixture
def run(launcher: LocalLauncher, tmp_path: Path) -> Run:
    (tmp_path / "own.py").write_text(OWN)

    def run_trial(options: dict[str, Any] | None = None, run: TrainingRun | None = None, **fields: Any) -> TrialResult:
        defaults: dict[str, Any] = {"num_samples": 8, "num_rounds": 1, "batches": (1,)}
        trial = make_trial(
            configuration="quantize",
            workload=f"{tmp_path / 'own.py'}:build",
            options=options or {},
            strategy="single",
            num_ranks=1,
            task=Quantize(settings=Quantization(**(defaults | fields)), run=run),
        )
        return launch(launcher, trial, tmp_path / "trial")

    return run_trial


@pytest.mark.ranks
def test_a_model_of_the_users_own_is_trained_quantized_and_exported(run: Run, tmp_path: Path) -> None:
    result = run(run=TrainingRun(steps=2, keep=0))
    assert result.status is Status.COMPLETED, result.reason
    assert len(result.samples) == 2
    assert result.quantized is not None
    assert len(result.quantized.labels) == 64
    assert [stage.name for stage in result.quantized.stages][:2] == ["float", "int8"]
    assert not list((tmp_path / "trial").glob("rank*.json"))
    if result.quantized.sizes:
        assert {file.name for file in (tmp_path / "trial").glob("*.onnx")} == {"float32.onnx", "int8.onnx"}


@pytest.mark.ranks
def test_without_test_batches_training_samples_tell_agreement(run: Run) -> None:
    result = run({"kind": "none"})
    assert result.status is Status.COMPLETED, result.reason
    assert result.samples == ()
    assert result.quantized is not None
    assert result.quantized.labels == ()
    assert result.quantized.tested_on == (
        "512 training samples following the calibration samples, 64 of them also used for calibration"
    ), "batches of a short list come again"


@pytest.mark.ranks
def test_a_module_without_an_int8_kernel_makes_the_trial_invalid_and_is_named(run: Run) -> None:
    result = run({"activation": "SiLU"})
    assert result.status is Status.INVALID
    assert "act is nn.SiLU" in result.reason
    assert result.quantized is None


@pytest.mark.ranks
def test_empty_test_data_is_named(run: Run) -> None:
    result = run({"kind": "empty"})
    assert result.status is Status.INVALID
    assert "there are no test samples" in result.reason


def test_weights_are_put_into_the_model_whatever_wraps_them(tmp_path: Path) -> None:
    trained, model = nn.Linear(3, 2), nn.Linear(3, 2)
    for number, saved in enumerate([
        trained.state_dict(),
        {"state_dict": trained.state_dict(), "epoch": 3},
        {"model": {f"module.{name}": value for name, value in trained.state_dict().items()}},
    ]):  # fmt: skip
        file = tmp_path / f"{number}.pt"
        torch.save(saved, file)
        nn.init.zeros_(model.weight)
        load_weights(model, str(file))
        assert torch.equal(model.weight, trained.weight)
    load_weights(model, "")


def test_weights_that_cannot_be_used_are_refused_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "trained.pt"
    file.write_text("no weights at all")
    with pytest.raises(UsageError, match=r"trained\.pt cannot be read"):
        load_weights(nn.Linear(3, 2), str(file))
    torch.save([1, 2], file)
    with pytest.raises(UsageError, match=r"trained\.pt holds a list, not a state_dict"):
        load_weights(nn.Linear(3, 2), str(file))
    torch.save(nn.Linear(4, 2).state_dict(), file)
    with pytest.raises(UsageError, match="does not match the model: size mismatch for weight"):
        load_weights(nn.Linear(3, 2), str(file))
    assert find_state({}) is None
    assert find_state({"epoch": 3}) is None


def test_as_many_samples_are_taken_as_asked_for() -> None:
    batches = [torch.zeros(4, 1), torch.zeros(0, 1), torch.zeros(4, 1)]
    assert [len(images) for images in take_samples(batches, 6)] == [4, 2]
    assert [len(images) for images in take_samples(batches, 4)] == [4]
    assert [len(images) for images in take_samples(batches, 99)] == [4, 4]

"""The Meter inside libraries that own the loop, with the real ones."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import scalelab as sl
from scalelab.records.trial import StepKind, TrialResult

pytestmark = pytest.mark.filterwarnings("ignore")
DATA = TensorDataset(torch.randn(48, 4), torch.randint(2, (48,)))


def read_only(runs: Path) -> TrialResult:
    (result,) = sl.open("lab", runs_dir=runs).trials
    return result


def list_kinds(result: TrialResult) -> list[StepKind]:
    return [sample.kind for sample in result.samples]


def test_a_trainer_of_transformers_is_a_run(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'scalelab[examples]'")
    pytest.importorskip("accelerate", reason="needs accelerate: pip install 'scalelab[bench]'")
    from scalelab.integrations.huggingface import TrainerMeter

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.cross_entropy(self.layer(x), labels)}

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        save_steps=3,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = [{"x": x, "labels": label} for x, label in DATA]
    callback = TrainerMeter("lab", runs_dir=tmp_path / "runs")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.Trainer(model=Model(), args=arguments, train_dataset=rows, callbacks=[callback]).train()
    result = read_only(tmp_path / "runs")
    assert result.trial.global_batch == 8
    assert len(result.samples) == 6
    assert list_kinds(result).count(StepKind.CLEAN) == 5, "the step after the checkpoint is kept apart"


def test_a_trainer_of_lightning_is_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Lightning sets it for good
    lightning = pytest.importorskip("lightning", reason="needs lightning: pip install 'scalelab[bench]'")
    from lightning.fabric.plugins.environments import LightningEnvironment

    from scalelab.integrations.lightning import LightningMeter

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    monkeypatch.chdir(tmp_path)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    for accumulated, steps in ((1, 6), (3, 2)):
        runs = tmp_path / f"runs{accumulated}"
        callback = LightningMeter("lab", runs_dir=runs)
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            plugins=[LightningEnvironment()],  # it would ask mpi4py, which has no library here
            callbacks=[callback],
            accumulate_grad_batches=accumulated,
            **quiet,
        )
        trainer.fit(Module(), DataLoader(DATA, batch_size=8))
        result = read_only(runs)
        assert result.trial.global_batch == 8 * accumulated
        assert len(result.samples) == steps
        assert len(result.losses()) == (steps if accumulated == 1 else 0)


def test_a_loop_of_accelerate_is_a_run(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install 'scalelab[bench]'")
    from scalelab.integrations.accelerate import MeterTracker

    tracker = MeterTracker("lab", batch_size=8, runs_dir=tmp_path)
    accelerator = accelerate.Accelerator(log_with=tracker, cpu=True)
    accelerator.init_trackers("project", config={"lr": 0.1})
    for step in range(5):
        accelerator.log({"loss": torch.tensor(1.0 / (step + 1))}, step=step)
    assert accelerator.get_tracker("scalelab", unwrap=True) is tracker.tracker
    accelerator.end_training()
    result = read_only(tmp_path)
    assert result.losses() == pytest.approx({step: 1.0 / (step + 1) for step in range(5)})
    assert result.trial.global_batch == 8

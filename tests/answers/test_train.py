"""What `scalelab train` says of a training run: its data, its epochs, its steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scalelab.answers.train import TrainStudy
from scalelab.data.shards import write_shard
from scalelab.records.settings import TrainingRun
from scalelab.report.document import Document
from scalelab.runs.experiment import run_study
from scalelab.studies.shared.job import Job
from tests.recipes.played import PlayedLauncher


def play(place: Path, course: TrainingRun, job: Job) -> Document:
    _, document = run_study(TrainStudy(course=course, job=job), runs_dir=place, launcher=PlayedLauncher())
    return document


def test_every_epoch_has_its_time_with_and_without_loading_its_loss_and_its_accuracy(tmp_path: Path) -> None:
    """Played: each epoch is a tenth of a second shorter, and a quarter of it is loading."""
    job = Job(workload="resnet18", options={"data": "digits"}, device="cpu")
    document = play(tmp_path, TrainingRun(epochs=2), job)
    (section,) = (section for section in document.sections if section.heading == "Epochs")
    (table,) = section.tables
    assert [column.header for column in table.columns] == ["epoch", "time", "without loading", "mean loss", "accuracy"]
    assert [[cell.value for cell in row] for row in table.rows] == [
        [1, pytest.approx(1.9), pytest.approx(0.75 * 1.9), 1.0, 0.4],
        [2, pytest.approx(1.8), pytest.approx(0.75 * 1.8), 1.0, 0.4],
    ]


def test_tokens_of_all_shards_are_counted_in_its_setting(tmp_path: Path) -> None:
    for number, count in enumerate((3000, 2000)):
        write_shard(tmp_path / f"tokens_{number}.bin", np.arange(count) % 500)
    options = {"size": "tiny", "data": "tokens", "data_path": str(tmp_path)}
    document = play(tmp_path / "runs", TrainingRun(steps=3), Job(workload="gpt2", options=options, device="cpu"))
    assert document.setting.endswith(" · 5,000 tokens in 2 shards")

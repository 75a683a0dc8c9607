"""`scalelab quantize`, whole: training, integers, exported models, and errors that name what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import answer

QUICK = ("--samples", "16", "--tested", "32", "--threads-per-rank", "1")


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.usefixtures("shared_ranks")
def test_the_verb_trains_on_the_digits_and_leaves_a_model_that_runs(tmp_path: Path) -> None:
    done = answer("quantize", "--epochs", "1", "--full", "--json", "out.json", *QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Quantization: What does int8 cost in accuracy")
    for words in ("int8", "won", "lost", "Layers", "fc3", "Summary", "of 355 samples"):
        assert words in done.stdout
    document = json.loads((tmp_path / "out.json").read_text())
    first = document["sections"][0]["tables"][0]
    assert [column["key"] for column in first["columns"]] == [
        "stage", "accuracy", "change", "won", "lost", "agreement",
    ]  # fmt: skip
    (run,) = (tmp_path / "runs").iterdir()
    trial = run / "trials" / "quantize-r1"
    result = json.loads((trial / "result.json").read_text())
    assert len(result["quantized"]["stages"][0]["predictions"]) == 355
    assert not list(trial.glob("rank*.json"))
    if (trial / "int8.onnx").is_file():
        assert (trial / "int8.onnx").stat().st_size * 3 < (trial / "float32.onnx").stat().st_size
    shown = answer("show", "last", "--refresh", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "355" in shown.stdout


def test_flags_that_cannot_work_together_are_usage_errors(tmp_path: Path) -> None:
    done = answer("quantize", "--lab-peak", "255", cwd=tmp_path)
    assert done.returncode == 2
    assert "--lab-peak is not read without --calibration lab" in done.stderr
    assert not (tmp_path / "runs").exists()

"""Training really learns: real images and real text, through whole commands."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import answer

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.usefixtures("shared_ranks")]

WARM = ["--lr-warmup", "40"]
"""Without it one text in two leaves the model where only the frequencies of letters are learnt."""
ONE_CORE = ["--threads-per-rank", "1"]
PAGES = Path(__file__).parents[1] / "docs"


def read_curve(runs_dir: Path) -> list[dict[str, Any]]:
    (file,) = runs_dir.glob("*/trials/*/result.json")
    curve: list[dict[str, Any]] = json.loads(file.read_text())["curve"]
    return curve


def test_lenet_learns_digits(tmp_path: Path) -> None:
    job = ["--workload", "lenet", "--data", "digits", "--global-batch-size", "16", *ONE_CORE]
    adam = ["--optimizer", "adam", "--lr", "2e-3"]
    done = answer("train", *job, *adam, "--epochs", "8", "--log-every", "500", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert read_curve(tmp_path / "runs")[-1]["accuracy"] > 0.95


def test_a_tiny_language_model_knows_more_of_a_text_than_how_often_its_letters_come(tmp_path: Path) -> None:
    pages = [page.read_text(encoding="utf-8") for page in sorted(PAGES.rglob("*.md")) if page.name != "cli.md"]
    prose = re.sub(r"```.*?```|^\|.*?$", "", "".join(pages), flags=re.DOTALL | re.MULTILINE)
    text = prose.encode()
    (tmp_path / "pages.txt").write_bytes(text)
    made = answer("data", "tokenize", "pages.txt", "--out", "shards", "--test-share", "0.1", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    job = ["--workload", "gpt2", "--data", "tokens", "--data-path", "shards", "--vocabulary", "256", "--dropout", "0"]
    job += ["--sequence", "32"]
    done = answer(
        "train", *job, "--global-batch-size", "16", "--steps", "120", "--lr", "1e-3", *WARM, *ONE_CORE, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    counts = Counter(text)
    unigram_entropy = -sum(count / len(text) * math.log(count / len(text)) for count in counts.values())
    *lines, test = read_curve(tmp_path / "runs")
    assert test["is_evaluation"]
    assert sum(line["loss"] for line in lines[-10:]) / 10 < unigram_entropy
    assert test["loss"] < unigram_entropy

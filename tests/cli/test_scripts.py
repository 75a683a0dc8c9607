"""`scalelab run STUDY … -- train.py …`: the user's own script, unedited, with real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import answer
from tests.worker.script.scripts import write_script

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.usefixtures("shared_ranks")]

QUICK = ("--rounds", "1", "--steps", "8", "--phase-steps", "2", "--comm-free-steps", "2", "--profile-steps", "0")


def test_strong_scaling_of_a_script(tmp_path: Path) -> None:
    write_script(tmp_path)
    done = answer(
        *("run", "strong-scaling", *QUICK, "--ranks", "1", "2", "--global-batch-size", "8", "--json", "-"),
        *("--", "train.py", "--batch-size", "{batch_per_rank}"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    table = document["sections"][0]["tables"][0]
    keys = [column["key"] for column in table["columns"]]
    rows = {row[0]["value"]: dict(zip(keys, row, strict=True)) for row in table["rows"]}
    assert list(rows) == ["script × 1", "control", "script × 2"]
    assert rows["script × 2"]["exposed_share"]["value"] is not None
    assert "train.py · script · gloo · global batch 8" in document["setting"]
    kinds = {finding["kind"] for finding in document["findings"]}
    assert {"speedup", "efficiency", "control"} <= kinds
    (run,) = (tmp_path / "runs").iterdir()
    trial = json.loads((run / "trials" / "script-2-r1" / "trial.json").read_text())
    assert trial["task"]["arguments"] == ["--batch-size", "4"]


def test_weak_scaling_needs_no_placeholder(tmp_path: Path) -> None:
    write_script(tmp_path)
    done = answer(
        *("run", "weak-scaling", *QUICK, "--no-control", "--ranks", "1", "2", "--batch-per-rank", "4", "--dry-run"),
        *("--", "train.py"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "script-2  script, 2 ranks, batch 4 per rank" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["strong-scaling", "--", "train.py"], "train.py needs the batch size of each trial: write {batch_per_rank}"),
        (["strong-scaling", "--"], "-- needs a script"),
        (["strong-scaling", "--", "-m"], "-- -m needs a module"),
        (["strong-scaling", "--", "missing.py"], "there is no script missing.py"),
        (["strong-scaling", "--", "notes.ipynb"], "notes.ipynb is a notebook: export it first"),
        (["strong-scaling", "--", "torchrun", "train.py"], "leave out torchrun; scalelab starts the ranks itself"),
        (["strong-scaling", "--", "train.py", "{batch}"], "unknown placeholder '{batch}'"),
        (["strong-scaling", "--dtype", "bfloat16", "--", "train.py"], "--dtype does not apply to a script"),
        (["strong-scaling", "--lr", "0.1", "--", "train.py"], "--lr does not apply to a script"),
        (["strong-scaling", "--workload", "mlp", "--", "train.py"], "leave out --workload and --strategy with --"),
        (["optimizers", "--", "train.py"], "optimizers does not take a script after --"),
    ],
)
def test_mistakes_get_one_line_that_names_the_cure(words: list[str], message: str, tmp_path: Path) -> None:
    write_script(tmp_path)
    done = answer("run", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_script_that_fails_shows_the_users_own_line_and_keeps_the_rest(tmp_path: Path) -> None:
    action = "assert dist.get_world_size() == 1, 'only one rank'"
    write_script(tmp_path, action=action)
    done = answer(
        *("run", "strong-scaling", *QUICK, "--no-control", "--ranks", "1", "2", "--global-batch-size", "8"),
        *("--", "train.py", "--batch-size", "{batch_per_rank}"),
        cwd=tmp_path,
    )
    assert done.returncode == 3
    assert "AssertionError: only one rank" in done.stdout + done.stderr
    assert action in done.stderr, "the user's own line"
    assert "script × 1" in done.stdout

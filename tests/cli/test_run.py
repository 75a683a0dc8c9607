"""`scalelab run`, whole, with real ranks."""

from __future__ import annotations

import csv
import io
import json
import textwrap
from pathlib import Path

import pytest

from tests.cli.commands import QUICK, answer, scalelab

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.usefixtures("shared_ranks")]


def test_a_study_prints_its_answer_and_says_where_it_is(tmp_path: Path) -> None:
    done = scalelab("run", "strong-scaling", *QUICK, "--ranks", "1", "2", "--rounds", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "Strong scaling: How much faster does the same job get with more ranks?"
    for label in ("plain loop", "ddp × 1", "ddp × 2", "± is the 95 % CI half-width", "Summary"):
        assert label in done.stdout
    (run,) = (tmp_path / "runs").iterdir()
    assert f"Saved to runs/{run.name}" in lines[-1]
    assert "scalelab report last --html report.html" in lines[-1]
    assert "[3/3] " in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert len(lines) <= 40
    kept = sorted(file.name for file in (run / "trials/ddp-2-r1").iterdir())
    assert kept == ["rank0.log", "rank1.log", "result.json", "samples.csv", "trace", "trial.json"]


def test_formats_go_to_files_and_to_standard_output(tmp_path: Path) -> None:
    done = answer(
        *("run", "weak-scaling", "--workload", "mlp", "--dim", "16", "--depth", "2", "--batch-size-per-rank", "4"),
        *("--ranks", "1", "2", "--no-control", "--steps", "4", "--phase-steps", "2", "--comm-free-steps", "2"),
        *("--profile-steps", "0", "--rounds", "1"),
        *("--csv", "out/table.csv", "--markdown", "out/report.md", "--json", "-"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["title"] == "Weak scaling"
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out/table.csv").read_text())))
    assert {row["column"] for row in rows} >= {"step_seconds", "speedup", "efficiency"}
    assert (tmp_path / "out/report.md").read_text().startswith("# Weak scaling")
    assert "Saved to" in done.stderr


def test_a_configuration_that_fails_keeps_its_row_and_the_exit_code_says_so(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
        import torch
        from torch import nn

        def build(batch_size, num_ranks, width=4):
            if num_ranks == 2:
                width = missing_on_two_ranks
            return nn.Linear(width, 1), [(torch.ones(batch_size, width), torch.ones(batch_size, 1))], nn.MSELoss()
        """)
    )
    done = answer(
        *("run", "strong-scaling", "--workload", "mine.py:build", "--width", "5", "--ranks", "1", "2"),
        *("--global-batch-size", "4", "--steps", "4", "--rounds", "1"),
        cwd=tmp_path,
    )
    assert done.returncode == 3
    assert "invalid" in next(line for line in done.stdout.splitlines() if line.strip().startswith("ddp × 2"))
    assert "plain loop" in done.stdout
    trace = done.stderr[done.stderr.index("Traceback") :]
    assert "mine.py" in trace
    assert "NameError: name 'missing_on_two_ranks' is not defined" in trace
    assert "scalelab" not in trace
    options = json.loads(next((tmp_path / "runs").glob("*/trials/ddp-1-r1/trial.json")).read_text())["options"]
    assert options == {"width": 5}


def test_a_workload_that_never_works_is_one_line_after_the_users_own_traceback(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n\ndef build(batch_size):\n"
        "    return nn.Linear(5, 1), [torch.ones(batch_size, 4)], lambda model, batch: model(batch).sum()\n"
    )
    done = answer(
        *("run", "strong-scaling", "--workload", "mine.py", "--ranks", "1", "--rounds", "1", "--steps", "4"),
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: no trial completed; single-1 of --workload mine.py:build was invalid: RuntimeError")
    assert "shapes cannot be multiplied" in last
    assert done.stderr.index("Traceback") < done.stderr.index("error: ")


def test_a_study_of_which_every_trial_times_out_exits_with_124(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text("import time\ndef build():\n    time.sleep(3600)\n")
    done = answer(
        *("run", "strong-scaling", "--workload", "stuck.py", "--ranks", "1", "--rounds", "1", "--no-control"),
        *("--timeout", "1s"),
        cwd=tmp_path,
    )
    assert done.returncode == 124
    assert "timed out" in done.stderr.splitlines()[-1]
    assert "--timeout" in done.stderr.splitlines()[-1]


def test_more_ranks_than_cores_are_marked(tmp_path: Path) -> None:
    done = answer(
        *("run", "strong-scaling", *QUICK, "--ranks", "4", "--threads-per-rank", "64", "--rounds", "1"), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "ddp × 4†" in done.stdout
    assert "† oversubscribed: its ranks share cores" in done.stdout
    assert "Oversubscribed at 4 ranks" in done.stdout

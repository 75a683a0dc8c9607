"""`scalelab train` as a user types it: alone, killed and resumed, under torchrun."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from scalelab.launch.local import LocalLauncher
from tests.cli.commands import answer, make_environment, start_scalelab, wait_until
from tests.launch.lent import lend_ranks

SMALL = ["train", "--workload", "mlp", "--dim", "32", "--depth", "2", "--global-batch-size", "12"]
LINE = re.compile(r"^step +(\d+)  epoch +([\d.]+)  loss ([\d.]+)  lr (\S+)  ", re.MULTILINE)


def torchrun(*arguments: str, cwd: Path, num_ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """The same command on every rank of a job that torchrun launches on loopback."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return subprocess.run(
        [*command, "-m", "scalelab", *arguments],
        cwd=cwd, env=make_environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def read_result(runs_dir: Path) -> dict[str, Any]:
    (file,) = runs_dir.glob("*/trials/*/result.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def read_losses(runs_dir: Path) -> list[tuple[str, str, str]]:
    """Rank, step and loss of every sample of the only run, as they stand in the file."""
    (file,) = runs_dir.glob("*/trials/*/samples.csv")
    rows = [line.split(",") for line in file.read_text().splitlines()[1:]]
    return [(row[0], row[1], row[-1]) for row in rows]


@pytest.mark.ranks
@pytest.mark.usefixtures("shared_ranks")
def test_a_training_prints_lines_and_an_answer_and_is_a_run_like_others(tmp_path: Path) -> None:
    schedule = ["--schedule", "cosine", "--lr", "3e-4", "--lr-min", "3e-5", "--optimizer", "adamw"]
    done = answer(*SMALL, *schedule, "--steps", "20", "--json", "out.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = LINE.findall(done.stderr)
    assert [int(step) for step, *_ in lines] == list(range(20))
    assert (lines[0][3], lines[10][3]) == ("2.98e-04", "1.44e-04")
    result = read_result(tmp_path / "runs")
    assert [f"{point['loss']:.4f}" for point in result["curve"]] == [loss for _, _, loss, _ in lines]
    assert "Training: What does this model learn" in done.stdout
    assert "train" in answer("list", cwd=tmp_path).stdout
    assert answer("show", "last", "--refresh", cwd=tmp_path).stdout.startswith("Training:")
    (table, *_) = json.loads((tmp_path / "out.json").read_text())["sections"][0]["tables"]
    assert len(table["rows"]) == 20


LONG = [*SMALL, "--ranks", "2", "--steps", "300", "--checkpoint-every", "15"]


@pytest.fixture(scope="module")
def undisturbed(launcher: LocalLauncher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of a training that nobody stopped."""
    place = tmp_path_factory.mktemp("undisturbed")
    with lend_ranks(launcher):
        assert answer(*LONG, cwd=place).returncode == 0
    return place / "runs"


@pytest.mark.ranks
@pytest.mark.usefixtures("shared_ranks")
@pytest.mark.slow
def test_a_training_is_held_while_it_runs_and_goes_on_bit_for_bit_when_it_is_killed(
    tmp_path: Path, undisturbed: Path
) -> None:
    command = start_scalelab(*LONG, cwd=tmp_path)
    wait_until(lambda: bool(list(tmp_path.glob("runs/*/trials/*/checkpoints/step-*"))))
    command.send_signal(signal.SIGSTOP)  # its ranks go on, and it cannot end before it is killed
    refused = answer("resume", "last", cwd=tmp_path)
    family = psutil.Process(command.pid).children(recursive=True)
    command.kill()
    command.communicate(timeout=30)
    assert refused.returncode == 1
    assert "is executing run" in refused.stderr
    assert not psutil.wait_procs(family, timeout=10)[1]
    assert not list(tmp_path.glob("runs/*/trials/*/result.json")), "it ended before it was killed"
    shown = answer("show", "last", "--refresh", cwd=tmp_path)
    assert "\nFailed\n" in shown.stdout

    resumed = answer("resume", "last", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    steps = int(re.findall(r"resuming from the checkpoint after step (\d+)", resumed.stderr)[0])
    assert steps % 15 == 0
    assert int(LINE.findall(resumed.stderr)[0][0]) == steps
    assert read_losses(tmp_path / "runs") == read_losses(undisturbed)
    curves = [read_result(runs_dir)["curve"] for runs_dir in (tmp_path / "runs", undisturbed)]
    assert [p["loss"] for p in curves[0]] == [p["loss"] for p in curves[1]]


SLOW_RANK_0 = """
import time
import torch
from torch import nn


def build(batch_size, rank):
    def loss(model, batch):
        if rank == 1:
            raise RuntimeError("no luck")
        time.sleep(60)
        return model(batch).sum()

    return nn.Linear(2, 1), [torch.ones(batch_size, 2)], loss
"""


@pytest.mark.ranks
@pytest.mark.slow
def test_a_rank_that_fails_under_torchrun_ends_the_job_and_is_named_although_another_was_busy(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SLOW_RANK_0)
    failed = torchrun("train", "--workload", "own.py", "--steps", "2", cwd=tmp_path)
    assert failed.returncode != 0
    assert "no luck" in failed.stderr
    result = read_result(tmp_path / "runs")
    assert result["status"] == "invalid"
    assert "no luck" in result["reason"]


STUCK_AFTER_5_STEPS = """
import time
from pathlib import Path
import torch
from torch import nn

STUCK = Path(__file__).with_name("stuck")


def build(batch_size):
    losses = []

    def loss(model, batch):
        losses.append(model(batch).square().sum())
        while len(losses) > 5 and STUCK.exists():
            time.sleep(0.1)
        return losses[-1]

    return nn.Linear(2, 1), [torch.ones(batch_size, 2)], loss
"""


@pytest.mark.ranks
@pytest.mark.usefixtures("shared_ranks")
@pytest.mark.slow
def test_a_training_under_torchrun_keeps_to_its_time_is_resumed_there_and_learns_what_it_does_alone(
    tmp_path: Path,
) -> None:
    (tmp_path / "own.py").write_text(STUCK_AFTER_5_STEPS)
    (tmp_path / "stuck").touch()
    training = ["train", "--workload", "own.py", "--steps", "8", "--checkpoint-every", "2"]
    late = torchrun(*training, "--checkpoints", "kept", "--timeout", "30s", cwd=tmp_path)
    assert late.returncode != 0
    assert read_result(tmp_path / "runs")["status"] == "timed_out", late.stderr
    (tmp_path / "stuck").unlink()
    resumed = torchrun("resume", "last", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming from the checkpoint after step 4" in resumed.stderr
    assert resumed.stdout.count("Training: What") == 1
    assert [int(step) for step, *_ in LINE.findall(resumed.stderr)] == [4, 5, 6, 7]
    result = read_result(tmp_path / "runs")
    assert (result["status"], len(result["ranks"])) == ("completed", 2)
    assert [step for rank, step, _ in read_losses(tmp_path / "runs") if rank == "0"] == [str(n) for n in range(8)]

    alone = answer(*training, "--ranks", "2", "--runs-dir", "alone", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert read_losses(tmp_path / "runs") == read_losses(tmp_path / "alone")
    longer = [*training[:3], "--steps", "10", "--ranks", "2", "--checkpoints", "kept", "--runs-dir", "longer"]
    assert "resuming from the checkpoint after step 8" in answer(*longer, cwd=tmp_path).stderr
    assert [step for rank, step, _ in read_losses(tmp_path / "longer") if rank == "0"] == ["8", "9"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "5", "--epochs", "2"], "--steps 5 and --epochs 2 are mutually exclusive"),
        (["--ranks", "5"], "--global-batch-size 12 is not divisible by 5 ranks"),
        (["--strategy", "single", "--ranks", "2"], "--strategy single runs on one rank, got 2"),
        (["--bucket-cap-mb", "5"], "--bucket-cap-mb does not apply to --strategy single: use it with ddp"),
        (["--strategy", "fspd2"], "fspd2"),
        (["--checkpoints", "a-file"], "--checkpoints a-file is a file: give a directory"),
        (["--delay", "1s", "--delay-rank", "3"], "--delay-rank must be < --ranks (1), got 3"),
        (["--momentum", "0.9"], "--momentum 0.9 needs --optimizer sgd or nesterov"),
        (["--lr-scaling", "batch"], "--lr-base-batch must be given together"),
        (["--delay", "fast"], "--delay"),
        (["--micro-batch", "5"], "--micro-batch must divide the 12 samples per rank, got 5"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "a-file").touch()
    done = answer(*SMALL, *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--workload", "transformer", "--features", "1024"], "d-model"),
        (["--workload", "transformer", "--heads", "7"], "--heads 7"),
        (["--workload", "gpt2", "--data", "tokens", "--data-path", "nowhere.bin"], "nowhere.bin"),
        (["--workload", "resnet18", "--data", "cifar10"], "cifar-10"),
    ],
)
def test_options_of_a_workload_that_cannot_work_are_refused_before_launch(
    options: list[str], words: str, tmp_path: Path
) -> None:
    done = answer("train", *options, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_number_of_ranks_that_contradicts_torchrun_is_refused(tmp_path: Path) -> None:
    launched = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    done = answer(*SMALL, "--ranks", "3", cwd=tmp_path, **launched)
    assert done.returncode == 2
    assert "--ranks 3 contradicts the 2 launched ranks" in done.stderr

"""Scripts with a Meter as users write and start them: alone, under torchrun, killed; then list, show and compare."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scalelab.records.store import RunStore, find_runs
from scalelab.records.trial import Status, StepKind
from tests.cli.commands import answer, make_environment, scalelab
from tests.worker.script.scripts import write_script

DDP = """\
import json, os, signal
from contextlib import nullcontext
import torch, torch.distributed as dist
from torch import nn
import scalelab

def train(meter, model, loader, victim=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, inputs in enumerate(meter.steps(loader) if meter else loader):
        if step == 20 and dist.get_rank() == victim:
            meter._log.write()  # as a second passing would
            os.kill(os.getpid(), signal.SIGKILL)
        with meter.phase("forward") if meter else nullcontext():
            loss = (model(inputs) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if meter:
            meter.loss(loss)
        yield loss.item()

def train_twice(name, is_metered):
    with scalelab.Meter(name + "-early", batch_size=4) if is_metered else nullcontext() as early:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        torch.manual_seed(7)
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.2), nn.Linear(4, 1)))
        torch.manual_seed(dist.get_rank())
        loader = [torch.randn(4, 8) for _ in range(30)]
        losses = [*train(early, model, loader)]
    with scalelab.Meter(name + "-late", global_batch=8) if is_metered else nullcontext() as late:
        losses += train(late, model, loader)
    with open(f"{name}{dist.get_rank()}.json", "w") as file:
        json.dump(losses, file)

train_twice("metered", True)
train_twice("plain", False)
with scalelab.Meter("doomed", batch_size=4) as meter:
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
    for _ in train(meter, model, [torch.ones(4, 8)] * 30, victim=1):
        pass
"""


def run_script(directory: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A script of the user's own, alone."""
    (directory / "train.py").write_text(text)
    return run_python(directory, "train.py", *arguments)


def run_python(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=make_environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def show(directory: Path, name: str) -> dict[str, object]:
    done = answer("show", name, "--json", "-", cwd=directory)
    assert done.returncode == 0, done.stderr
    document: dict[str, object] = json.loads(done.stdout)
    return document


PLAIN = """\
import sys, time, scalelab
with scalelab.Meter(sys.argv[1], batch_size=4) as meter:
    for number in meter.steps(range(30)):
        meter.loss(1 / (1 + number))
assert "torch" not in sys.modules, "a script without torch need not load it"
"""


def test_a_script_is_listed_shown_and_compared(tmp_path: Path) -> None:
    for name in ("before", "after"):
        done = run_script(tmp_path, PLAIN, name)
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
        assert done.stderr.startswith("Saved to runs/")
        assert done.stderr.endswith("  ·  scalelab show last\n")
    first, second = find_runs(tmp_path / "runs")
    listed = answer("list", "--json", cwd=tmp_path)
    lines = [json.loads(line) for line in listed.stdout.splitlines()]
    assert [(line["study"], line["workload"], line["state"]) for line in lines] == [
        ("metered", "train.py", "complete")
    ] * 2
    shown = answer("show", cwd=tmp_path)
    assert "after · train.py · 1 rank · global batch 4 · 30 steps" in shown.stdout
    assert "The loss went from 1.0000 at step 0 to 0.0333 at step 29." in shown.stdout
    assert "one launch: intervals cover its steps" in shown.stdout
    compared = answer("compare", first.name, second.name, cwd=tmp_path)
    assert compared.returncode == 0, compared.stderr
    assert "before → after" in compared.stdout
    assert "unresolved" in compared.stdout
    assert "--rounds" not in compared.stdout
    refused = answer("resume", "last", cwd=tmp_path)
    assert refused.returncode == 2
    assert "was recorded by a Meter" in refused.stderr


KILLED = """\
import os, signal, scalelab
from scalelab.worker.meter.step_log import MOST_WAITING
with scalelab.Meter("doomed") as meter:
    for number in meter.steps(range(10_000)):
        if number == MOST_WAITING + 5:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_script_loses_only_what_was_not_written(tmp_path: Path) -> None:
    assert run_script(tmp_path, KILLED).returncode == -9
    listed = answer("list", cwd=tmp_path)
    assert "interrupted" in listed.stdout
    shown = answer("show", cwd=tmp_path)
    assert "512 steps" in shown.stdout
    assert "rank 0 did not reach the end of the Meter" in shown.stdout
    assert "complete, 1 failed" in answer("list", cwd=tmp_path).stdout


def test_a_script_that_fails_ends_as_it_would_without(tmp_path: Path) -> None:
    text = "import scalelab\nwith scalelab.Meter('x') as m:\n    for n in m.steps([1, 2]):\n        n / (n - 2)\n"
    done = run_script(tmp_path, text)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert "crashed: rank 0 raised an error after 1 steps: ZeroDivisionError" in answer("show", cwd=tmp_path).stdout


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks of torchrun trained with a Meter twice, without one, and a last time, when one of them died."""
    place = tmp_path_factory.mktemp("ddp")
    (place / "ddp.py").write_text(DDP)
    done = run_python(place, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "ddp.py")
    assert done.returncode != 0
    assert done.stderr.count("Saved to") == 2, done.stderr
    return place


@pytest.mark.ranks
@pytest.mark.slow
def test_two_ranks_are_recorded_and_their_losses_stay_the_same(ddp: Path) -> None:
    losses = [json.loads((ddp / f"metered{rank}.json").read_text()) for rank in (0, 1)]
    assert losses == [json.loads((ddp / f"plain{rank}.json").read_text()) for rank in (0, 1)]
    early, late, _ = (RunStore.open(path) for path in find_runs(ddp / "runs"))
    for store, expected in ((early, [part[:30] for part in losses]), (late, [part[30:] for part in losses])):
        result = store.result(store.record.trials[0])
        assert result.status is Status.COMPLETED, result.reason
        assert [[s.loss for s in result.samples if s.rank == rank] for rank in (0, 1)] == expected
        assert {s.kind for s in result.samples} == {StepKind.PHASES}
        assert all(rank.peak_memory_bytes for rank in result.ranks)
        assert store.record.fields["global_batch"] == 8
        assert not list(store.trial_directory(result.trial.name).glob("rank*"))
    assert "metered-late · ddp.py · 2 ranks · global batch 8 · 30 steps" in str(show(ddp, late.name)["setting"])
    compared = answer("compare", early.name, late.name, "--json", "-", cwd=ddp)
    found = json.loads(compared.stdout)["findings"][0]
    assert found["text"].startswith("metered-early → metered-late: ")
    assert found["values"]["verdict"] == "unresolved", "one launch of each"


@pytest.mark.ranks
@pytest.mark.slow
def test_a_rank_that_is_killed_is_named(ddp: Path) -> None:
    document = show(ddp, "last")
    # torchrun may end rank 0 before it has noticed
    assert re.search(r"ranks? (0, )?1 did not reach the end of the Meter", json.dumps(document["cautions"]))
    store = RunStore.open(find_runs(ddp / "runs")[-1])
    result = store.result(store.record.trials[0])
    assert result.status is Status.CRASHED
    assert sum(s.rank == 1 for s in result.samples) == 20


@pytest.mark.ranks
@pytest.mark.slow
def test_an_unedited_script_is_recorded_whatever_starts_it(tmp_path: Path) -> None:
    path = write_script(tmp_path)
    path.write_text(path.read_text().replace("range(100)", "range(1)").replace("512", "64"))
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = scalelab("meter", "--", *launcher, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "scalelab show last" in done.stderr
    (run,) = find_runs(tmp_path / "runs")
    store = RunStore.open(run)
    result = store.result(store.record.trials[0])
    assert (result.status, result.trial.num_ranks, result.trial.global_batch) == (Status.COMPLETED, 2, 8)
    assert store.record.fields["label"] == "train"
    printed = [float(line) for line in (tmp_path / "losses1.txt").read_text().split()]
    assert [s.loss for s in result.samples if s.rank == 1] == printed[3:], "the first three are only watched"


@pytest.mark.slow
def test_a_script_that_never_calls_backward_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        """
import torch

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    parameters = list(model.parameters())
    for one, gradient in zip(parameters, torch.autograd.grad(model(torch.ones(3, 4)).sum(), parameters)):
        one.grad = gradient
    optimizer.step()
"""
    )
    done = scalelab("meter", "--", sys.executable, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = find_runs(tmp_path / "runs")
    store = RunStore.open(run)
    result = store.result(store.record.trials[0])
    assert (len(result.samples), result.trial.global_batch) == (5, 3)


def test_a_command_that_trains_nothing_ends_with_its_own_code(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("open('own.txt', 'w').close()\n")
    (tmp_path / "fails.py").write_text("raise SystemExit(7)\n")
    done = answer("meter", "--", sys.executable, "fails.py", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 7
    said = f"nothing was recorded: {sys.executable} failed with exit code 7, and no Python process of"
    assert said in done.stderr, "what the command printed last may be far above"
    assert (tmp_path / "own.txt").exists(), "the user's own sitecustomize runs too"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "meter needs a command: scalelab meter -- torchrun"),
        (["--name", "a", "python", "b.py"], "put the command after --: scalelab meter --name a -- python b.py"),
        (["--", "train.py"], "there is no command train.py: write python train.py"),
        (["--profile-steps", "-1", "--", "python"], "--profile-steps must be at least 0, got -1"),
    ],
)
def test_a_command_that_cannot_start_is_refused(words: list[str], message: str, tmp_path: Path) -> None:
    done = answer("meter", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr

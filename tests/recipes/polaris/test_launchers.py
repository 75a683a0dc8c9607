"""P2: ranks by several launchers in one run, each by its own; those that are not here say why."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalelab.cli.reproduce import main
from scalelab.launch.launcher import MixedLauncher, choose_launcher
from scalelab.launch.local import LocalLauncher
from scalelab.recipes.feasibility import find_launcher_obstacle
from scalelab.recipes.polaris.ranks import LAUNCHERS, make_p2
from scalelab.records.trial import Status, Trial
from scalelab.studies.shared.job import Job


def make_trial(launcher: str) -> Trial:
    return Trial(configuration="p2", workload="mlp", strategy="ddp", num_ranks=2, launcher=launcher)  # type: ignore[arg-type]


def test_every_launcher_is_a_part_of_its_own() -> None:
    parts = make_p2("small").parts
    assert [parts[name].job.launcher for name in LAUNCHERS] == list(LAUNCHERS)
    assert [trial.launcher for name in LAUNCHERS for trial in parts[name].plan()] == list(LAUNCHERS)
    assert [trial.launcher for trial in parts["train"].plan()] == ["local"] * 6


def test_launchers_that_are_not_here_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"):
        monkeypatch.delenv(name, raising=False)
    assert "mpiexec" in str(find_launcher_obstacle("mpi"))
    assert "not running inside a slurm allocation" in str(find_launcher_obstacle("slurm"))
    assert find_launcher_obstacle("local") is find_launcher_obstacle("torchrun") is None
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert "srun is not on PATH" in str(find_launcher_obstacle("slurm"))
    assert find_launcher_obstacle("pbs") is not None


def test_trials_of_several_launchers_have_a_launcher_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose_launcher(Job(), [make_trial("local")]), LocalLauncher)
    mixed = choose_launcher(Job(), [make_trial("local"), make_trial("mpi")])
    assert isinstance(mixed, MixedLauncher)
    monkeypatch.setenv("PATH", "/nowhere")
    result = mixed.launch(make_trial("mpi"), tmp_path)
    assert (result.status, "mpiexec" in result.reason) == (Status.NOT_RUN, True), "the others can go on"


def test_where_no_hosts_can_be_emulated_other_launchers_still_start_their_own_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of an ordinary user's torchrun would else be those of the local launcher, under torchrun's name."""
    chosen: list[object] = []
    monkeypatch.chdir(tmp_path)
    for place in ("cli.reproduce", "recipes.feasibility"):
        monkeypatch.setattr(f"scalelab.{place}.find_host_obstacle", lambda: "it needs root")
    monkeypatch.setattr(
        "scalelab.cli.reproduce.measure_and_report", lambda store, study, launcher, output: chosen.append(launcher) or 0
    )
    assert main(["polaris", "--only", "P2", "--size", "small"]) == 0
    assert isinstance(chosen[0], MixedLauncher)

"""What real launchers leave behind when a rank, the trial or the command is ended: nothing but the reason."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from scalelab.launch.stepped import StepLauncher
from scalelab.records.files import write_trial
from scalelab.records.trial import Status
from tests.cli.commands import make_environment
from tests.launch.programs import find_mpiexec, make_step
from tests.slurm import Cluster
from tests.worker.trials import launch, make_trial, write_step_workload

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
LAUNCH = """
import json, os, sys
from pathlib import Path
from scalelab.launch.stepped import LaunchStep, StepLauncher
from scalelab.records.launchers import find_allocation
from scalelab.records.files import read_trial
directory, step = Path(sys.argv[1]), json.loads(sys.argv[2])
launcher = StepLauncher(LaunchStep(**step, allocation=find_allocation(os.environ)))
launcher.launch(read_trial(directory), directory)
"""


def find_processes(directory: Path) -> list[psutil.Process]:
    """Every process that was told of a directory, whoever its parent is."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(directory) in word for word in process.cmdline()):
                found.append(process)
    return found


def test_a_killed_rank_is_a_crash_that_names_it_and_keeps_the_samples(tmp_path: Path) -> None:
    spec = write_step_workload(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", rank=1, step=4)
    result = launch(StepLauncher(make_step("mpich")), make_trial(workload=spec), tmp_path / "t")
    assert result.status is Status.CRASHED
    assert "rank 1 on " in result.reason
    assert "was killed by SIGKILL" in result.reason
    assert {sample.step for sample in result.samples if sample.rank == 1} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("name", "how"),
    [*((name, signal.SIGINT) for name in ("torchrun", "mpich", "openmpi", "intel")), ("openmpi", signal.SIGKILL)],
)
def test_a_launcher_that_is_stopped_leaves_no_process(name: str, how: signal.Signals, tmp_path: Path) -> None:
    is_torchrun = name == "torchrun"
    step = {"kind": "", "is_torchrun": True} if is_torchrun else {"kind": name, "program": find_mpiexec(name)}
    stop_launcher(step, how, tmp_path)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_step_of_slurm_that_is_stopped_leaves_no_process(slurm: Cluster, how: signal.Signals, tmp_path: Path) -> None:
    allocate = ["salloc", "--quiet", "--ntasks=2"]
    stop_launcher({"kind": "srun", "program": "srun"}, how, tmp_path, *allocate, **slurm.variables)


def stop_launcher(step: dict[str, Any], how: signal.Signals, tmp_path: Path, *prefix: str, **variables: str) -> None:
    """Start a trial in its own process, stop that when the ranks have begun, and see that every process ends."""
    directory = tmp_path / "t"
    directory.mkdir()
    write_trial(directory, make_trial())
    command = subprocess.Popen(
        [*prefix, sys.executable, "-c", LAUNCH, str(directory), json.dumps(step)],
        env=make_environment(**variables),
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for_ranks(directory)
        family = find_processes(directory)
        next(process for process in family if process.cmdline()[1] == "-c").send_signal(how)
        assert not psutil.wait_procs(family, timeout=40)[1]
        assert not find_processes(directory)
    finally:
        command.kill()
        command.wait()


def wait_for_ranks(directory: Path, seconds: float = 60.0) -> None:
    """Until both ranks have been started, on their way to loading torch."""
    give_up = time.monotonic() + seconds
    while sum("scalelab.worker" in process.cmdline() for process in find_processes(directory)) < 2:
        assert time.monotonic() < give_up
        time.sleep(0.05)

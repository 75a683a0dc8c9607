"""How long a user waits: for `--help`, `list` and `show`, and for the first step of a two-rank trial.

Each command runs several times in a fresh process; the limit is half a second each. The trial is launched several
times after a first one has loaded torch; the time is from the launch to the start of the first step.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scalelab import FakeLauncher, Job, LocalLauncher, Sampling, StrongScaling, run_study
from scalelab.records.files import write_trial
from scalelab.records.tasks import Measure
from scalelab.records.trial import StepPlan, Trial
from scalelab.units import format_seconds

NUM_TIMES = 10
MOST_SECONDS = 0.5


def time_command(arguments: list[str]) -> list[float]:
    times = []
    for _ in range(NUM_TIMES):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "scalelab", *arguments], capture_output=True, check=True)
        times.append(time.perf_counter() - start)
    return times


def time_first_steps(directory: Path) -> list[float]:
    """From launch to first step of two ranks, after a trial that loads torch."""
    plan = StepPlan(lead_in_steps=2, clean_steps=2, phase_steps=0, comm_free_steps=0)
    trial = Trial(
        configuration="ddp-2",
        workload="mlp",
        options={"dim": 64, "depth": 2},
        strategy="ddp",
        num_ranks=2,
        task=Measure(plan=plan),
    )
    write_trial(directory, trial)
    with LocalLauncher() as launcher:
        launcher.launch(trial, directory)
        times = [launcher.launch(trial, directory).first_step_seconds for _ in range(NUM_TIMES)]
    return [seconds for seconds in times if seconds is not None]


def main() -> int:
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        study = StrongScaling(job=Job(workload="mlp"), sampling=Sampling(rounds=3))
        run_study(study, runs_dir=directory / "runs", launcher=FakeLauncher(lambda trial: 0.1 / trial.num_ranks))
        where = ["--runs-dir", str(directory / "runs")]
        measured = {
            "scalelab --help": time_command(["--help"]),
            "scalelab list": time_command(["list", *where]),
            "scalelab show": time_command(["show", "last", *where]),
            "two ranks, launch to first step": time_first_steps(directory),
        }
    table = Table("what", "median", "slowest", box=None)
    for name, times in measured.items():
        table.add_row(name, format_seconds(statistics.median(times)), format_seconds(max(times)))
    Console().print(table)
    worst = max(statistics.median(times) for times in measured.values())
    print(f"\nstartup: {worst:.2f} s at the most (bar {MOST_SECONDS} s)")
    return 0 if worst <= MOST_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())

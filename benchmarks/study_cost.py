"""What a study costs besides measuring: the whole command against the time inside its ranks' loops.

A strong-scaling study of 12 trials (four configurations, three rounds) is run as a user runs it, in a fresh process:
starting Python, loading torch, launching, storing, analysing and printing all count. What is imported has been compiled
before, as it has after the first command of a new installation. The bar: at most 1.3 times the time from the first
step to the last of every trial, plus 5 s.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scalelab.records.store import RunStore, find_runs
from scalelab.records.trial import TrialResult
from scalelab.units import format_seconds

WORKLOAD = ["--workload", "gpt2", "--size", "tiny", "--global-batch-size", "16"]
COMMAND = ["run", "strong-scaling", *WORKLOAD, "--ranks", "1", "2", "--rounds", "3"]
COMPILE = "import scipy.stats, scalelab.worker.forkserver"
NUM_TRIALS = 12
MOST_RATIO = 1.3
FREE_SECONDS = 5.0


def loop_seconds(result: TrialResult) -> float:
    """From the start of the first step of any rank to the end of the last."""
    ends = [sample.start_seconds + sample.step_seconds for sample in result.samples]
    return max(ends) - min(sample.start_seconds for sample in result.samples)


def main() -> int:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, "-c", COMPILE], env=environment, check=True)
    with tempfile.TemporaryDirectory() as directory:
        start = time.perf_counter()
        command = [sys.executable, "-m", "scalelab", *COMMAND, "--runs-dir", directory, "--json", "-"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        wall = time.perf_counter() - start
        if done.returncode != 0:
            print(done.stderr, file=sys.stderr)
            return 1
        results, _ = RunStore.open(find_runs(Path(directory))[0]).results()
    assert len(results) == NUM_TRIALS
    inside = sum(loop_seconds(result) for result in results)
    launched = sum(result.wall_seconds for result in results)

    table = Table("part", "time", "share of the command", box=None)
    table.add_row("inside the ranks' loops", format_seconds(inside), f"{inside / wall:.0%}")
    table.add_row("starting and ending ranks", format_seconds(launched - inside), f"{(launched - inside) / wall:.0%}")
    table.add_row("everything else", format_seconds(wall - launched), f"{(wall - launched) / wall:.0%}")
    table.add_row("the whole command", format_seconds(wall), "100%")
    Console().print(table)

    limit = MOST_RATIO * inside + FREE_SECONDS
    bar = f"{MOST_RATIO} x + {FREE_SECONDS:.0f} s = {limit:.1f} s"
    print(f"\nstudy_cost: {wall:.1f} s for {inside:.1f} s in loops (bar {bar})")
    return 0 if wall <= limit else 1


if __name__ == "__main__":
    sys.exit(main())

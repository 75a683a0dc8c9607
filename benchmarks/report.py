"""How long a report takes and how large it is: `scalelab report --html` of a study with 12 trials, in a fresh process.

A first report fills the cache with the program that draws; it is shown apart. Limits: 3 s, 5 MB, and no torch: the
command runs once more under `-X importtime`, which lists every module that is loaded. As a yardstick, the same command
that only writes JSON: what is above it is the page.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scalelab import FakeLauncher, Job, Sampling, StrongScaling, run_study
from scalelab.units import format_bytes, format_seconds

NUM_TIMES = 5
MOST_SECONDS = 3.0
MOST_BYTES = 5_000_000


def run_report(directory: Path, *flags: str, options: tuple[str, ...] = ()) -> tuple[float, str]:
    """One report; gives its time and what it wrote to standard error."""
    command = [sys.executable, *options, "-m", "scalelab", "report", "last", *flags]
    variables = {**os.environ, "XDG_CACHE_HOME": str(directory / "cache")}
    start = time.perf_counter()
    done = subprocess.run(command, cwd=directory, env=variables, capture_output=True, text=True, check=True)
    return time.perf_counter() - start, done.stderr


def main() -> int:
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        study = StrongScaling(job=Job(workload="mlp", device="cpu"), sampling=Sampling(rounds=3), ranks=(1, 2))
        launcher = FakeLauncher(lambda trial: 0.1 / trial.num_ranks, noise=0.02)
        store, document = run_study(study, runs_dir=directory / "runs", launcher=launcher)
        num_charts = sum(len(section.charts) for section in document.sections)
        first, _ = run_report(directory, "--html", "report.html")
        pages = [run_report(directory, "--html", "report.html")[0] for _ in range(NUM_TIMES)]
        plain = [run_report(directory, "--json", "report.json")[0] for _ in range(NUM_TIMES)]
        _, modules = run_report(directory, "--html", "report.html", options=("-X", "importtime"))
        size = (directory / "report.html").stat().st_size
    loads_torch = any(line.rpartition("|")[2].strip() == "torch" for line in modules.splitlines())
    seconds = statistics.median(pages)
    print(f"{len(store.record.trials)} trials, {num_charts} charts")
    print(f"  first report, nothing in the cache  {format_seconds(first)}")
    print(f"  HTML, median of {NUM_TIMES}                  {format_seconds(seconds)}")
    print(f"  JSON, median of {NUM_TIMES}                  {format_seconds(statistics.median(plain))}")
    print(
        f"\nreport: {seconds:.2f} s (bar {MOST_SECONDS:.0f} s), {format_bytes(size)} (bar {format_bytes(MOST_BYTES)}),"
        f" torch {'is loaded' if loads_torch else 'is not loaded'}"
    )
    return 0 if seconds <= MOST_SECONDS and size <= MOST_BYTES and not loads_torch else 1


if __name__ == "__main__":
    sys.exit(main())

"""How long a report takes and how large it is: `scalelab report --html` of a study with 12 trials, in a fresh process.

A first report fills the cache with the program that draws; it is shown apart. Limits: 3 s, 5 MB, and no torch: the
command runs once more under `-X importtime`, which lists every module that is loaded. As a yardstick, the same command
that only writes JSON: what is above it is the page. Modules are compiled before, by the first report, as pip compiles
them where a package is installed, also if PYTHONDONTWRITEBYTECODE is set here.

The same of one run with 10,000 trials, four configurations in 2,500 rounds of 29 steps: 5 s and 3 MB. Its files are
copies of 40 rounds that were played from a formula, under other round numbers. Processor time is shown beside the time
that passed: where they differ, other programs had the cores.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
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
NUM_TRIALS = 10_000
NUM_PLAYED_ROUNDS = 40
MOST_LARGE_SECONDS = 5.0
MOST_LARGE_BYTES = 3_000_000


def run_report(directory: Path, *flags: str, options: tuple[str, ...] = ()) -> tuple[float, str]:
    """One report; returns its time and what it wrote to standard error."""
    command = [sys.executable, *options, "-m", "scalelab", "report", "last", *flags]
    variables = {
        **os.environ,
        "XDG_CACHE_HOME": str(directory / "cache"),
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(directory / "compiled"),
    }
    start = time.perf_counter()
    done = subprocess.run(command, cwd=directory, env=variables, capture_output=True, text=True, check=True)
    return time.perf_counter() - start, done.stderr


def main() -> int:
    return max(time_small(), time_large())


def time_small() -> int:
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


def time_large() -> int:
    """The report of ten thousand trials: two times, the better counts."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        fill_large(directory)
        run_report(directory, "--html", "report.html")
        times = [run_counted(directory) for _ in range(2)]
        size = (directory / "report.html").stat().st_size
    seconds, processor_seconds = min(times)
    print(f"{NUM_TRIALS:,} trials in one run")
    print(f"  HTML, better of 2                   {format_seconds(seconds)}")
    print(f"  processor time of it                {format_seconds(processor_seconds)}")
    print(
        f"large report: {seconds:.2f} s (bar {MOST_LARGE_SECONDS:.0f} s), {format_bytes(size)}"
        f" (bar {format_bytes(MOST_LARGE_BYTES)})"
    )
    return 0 if seconds <= MOST_LARGE_SECONDS and size <= MOST_LARGE_BYTES else 1


def run_counted(directory: Path) -> tuple[float, float]:
    """One report: the time that passed, and that of the processor."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds, _ = run_report(directory, "--html", "report.html")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def fill_large(directory: Path) -> None:
    """One run whose later rounds are copies of its first ones."""
    study = StrongScaling(
        job=Job(workload="mlp", device="cpu"), sampling=Sampling(rounds=NUM_PLAYED_ROUNDS, steps=12), ranks=(1, 2)
    )
    launcher = FakeLauncher(lambda trial: 0.02 / trial.num_ranks, noise=0.02)
    store, _ = run_study(study, runs_dir=directory / "runs", launcher=launcher)
    played = store.record.trials
    per_round = len(played) // NUM_PLAYED_ROUNDS
    names = list(played)
    for number in range(len(played), NUM_TRIALS):
        source = played[number % len(played)]
        old, new = number % len(played) // per_round + 1, number // per_round + 1
        name = f"{source.rpartition('-r')[0]}-r{new}"
        target = store.trial_directory(name)
        shutil.copytree(store.trial_directory(source), target)
        for file in ("trial.json", "result.json"):
            text = (target / file).read_text()
            (target / file).write_text(text.replace(f'"round": {old},', f'"round": {new},'))
        names.append(name)
    record = json.loads((store.path / "run.json").read_text())
    (store.path / "run.json").write_text(json.dumps(record | {"trials": names}))


if __name__ == "__main__":
    sys.exit(main())

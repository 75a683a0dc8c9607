"""Real A/A comparisons, and a planted slowdown of 5 %: how often `scalelab compare` is right on this machine.

    20 pairs of separate runs of the same workload    at most 1 may be called faster or slower
    20 comparisons with --interleave                  of the workload and one that sleeps 5 % longer: at least 15 found

The workload sleeps for most of its step, so that a loaded machine disturbs it less; what is measured is the whole way
from `scalelab compare` through rank processes to the verdict. Runs are short, and one fork server serves all of them.
With 8 rounds judged once, 11 of 20 were found at a load of 14; since then unresolved rows get up to twice the rounds
that were asked for. Separate runs that are all unresolved meet their bar without saying much, so counts of all verdicts
are printed.

    python benchmarks/compare_aa.py --comparisons 20

In parts: with --results FILE every verdict is appended to FILE at once, and a later call continues from it. With
--minutes M no comparison begins after M minutes; what is missing counts as not met.

    python benchmarks/compare_aa.py --results aa.jsonl --minutes 6
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from scalelab.analysis.stats import DIFFERENT, Verdict
from scalelab.answers.comparison import compare_runs, read_side
from scalelab.answers.interleaved import make_interleaved
from scalelab.launch.local import LocalLauncher
from scalelab.records.store import RunStore
from scalelab.report.document import Document
from scalelab.report.findings import select
from scalelab.runs.experiment import execute_run, start_run
from scalelab.runs.scheduler import ignore_event
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling, Study
from scalelab.studies.throughput import Throughput

SECONDS = 0.05
SLOWER = 1.05
MOST_WRONG, FEWEST_FOUND = 0.05, 0.75
WORKLOAD = """
import time

import torch
from torch import nn


class Sleeper(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs):
        time.sleep({seconds})
        return self.layer(inputs)


def build(batch_size: int):
    inputs = torch.ones(batch_size, 4)

    def draw():
        while True:
            yield inputs, inputs

    return Sleeper(), draw(), nn.functional.mse_loss
"""


class KeptLauncher(LocalLauncher):
    """Stays open when a run ends, so that torch is imported once."""

    def close(self) -> None:
        pass

    def end(self) -> None:
        super().close()


def make_study(file: Path, rounds: int) -> Throughput:
    job = Job(workload=f"{file}:build", device="cpu", threads_per_rank=1)
    sampling = Sampling(rounds=rounds, steps=12, warmup=2, phase_steps=0, comm_free_steps=0, control=False)
    return Throughput(job=job, sampling=sampling, batch_per_rank=1)


def measure(study: Study, runs_dir: Path, launcher: KeptLauncher) -> tuple[RunStore, Document]:
    store = start_run(study, runs_dir, ["compare_aa"])
    return store, execute_run(store, study, launcher, ignore_event)


def read_verdict(document: Document) -> str:
    return next((str(finding.values["verdict"]) for finding in select(document.findings, "verdict")), "no verdict")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    wanted = parser.parse_args()
    num, began = wanted.comparisons, time.perf_counter()
    launcher = KeptLauncher()
    with tempfile.TemporaryDirectory() as place:
        deadline = began + 60 * wanted.minutes
        pairs = compare_all(Path(place), num, wanted.rounds, launcher, wanted.results, deadline)
    equal, planted = ([pair[kind] for pair in pairs] for kind in (0, 1))
    launcher.end()
    wrong = sum(verdict in DIFFERENT for verdict in equal)
    found = sum(verdict == Verdict.SLOWER for verdict in planted)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, {time.perf_counter() - began:.0f} s")
    for name, verdicts in (("separate runs of the same", equal), ("in turns, B 5 % slower", planted)):
        counts = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
        print(f"  {name:28} {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}")
    measured = len(pairs)
    print(
        f"compare_aa: {wrong} of {measured} wrong (bar {int(MOST_WRONG * num)} of {num}), {found} of {measured} found"
        f" (bar {int(FEWEST_FOUND * num)} of {num})"
    )
    is_whole = measured == num
    return 0 if is_whole and wrong <= int(MOST_WRONG * num) and found >= int(FEWEST_FOUND * num) else 1


def compare_all(
    place: Path, num: int, rounds: int, launcher: KeptLauncher, results: Path | None, deadline: float
) -> list[tuple[str, str]]:
    """The verdicts on equal runs and on the planted slowdown, in turns; those that the file has are not measured."""
    lines = results.read_text().splitlines() if results and results.exists() else []
    pairs: list[tuple[str, str]] = [(equal, planted) for equal, planted in map(json.loads, lines)][:num]
    if len(pairs) == num:
        return pairs
    files = []
    for factor in (1.0, SLOWER):
        folder = place / f"{factor:g}"
        folder.mkdir()
        files.append(folder / "sleeper.py")
        files[-1].write_text(WORKLOAD.format(seconds=SECONDS * factor))
    before, _ = measure(make_study(files[0], rounds), place, launcher)
    slow = start_run(make_study(files[1], rounds), place, ["compare_aa"])
    while len(pairs) < num and time.perf_counter() < deadline:
        after, _ = measure(make_study(files[0], rounds), place, launcher)
        equal = read_verdict(compare_runs(read_side(before), read_side(after)))
        _, document = measure(make_interleaved([before, slow], runs_dir=place), place, launcher)
        pairs.append((equal, read_verdict(document)))
        print(f"{len(pairs)}: {', '.join(pairs[-1])}", file=sys.stderr, flush=True)
        if results:
            with results.open("a") as file:
                file.write(json.dumps(pairs[-1]) + "\n")
        before = after
    return pairs


if __name__ == "__main__":
    sys.exit(main())

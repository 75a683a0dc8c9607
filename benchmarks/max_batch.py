"""How many probes `max-batch` needs, and whether it is right: against trying every batch.

For each workload and strategy, under a memory limit: the study's answer, and the truth by brute force, which runs
every batch in fresh processes, upwards from a few below that answer, until one runs out of memory. Beside them stands
what doubling and then bisecting would need for the same answer, which is how public finders go about it. The bar:
exact, at most 6 probes, at most 2 of them failures, in every case.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scalelab.launch.local import LocalLauncher
from scalelab.records.files import write_trial
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.runs.experiment import run_study
from scalelab.studies.max_batch.answer import BatchSearch
from scalelab.studies.max_batch.study import MaxBatch, make_probe_trial
from scalelab.studies.shared.job import Job

MOST_PROBES = 6
MOST_FAILURES = 2
WORKLOADS: dict[str, tuple[dict[str, Any], str]] = {
    "transformer": ({"features": 64, "d_model": 64, "feedforward": 128}, "60MB"),
    "gpt2": ({"size": "tiny"}, "60MB"),
    "resnet18": ({}, "240MB"),
    "lenet": ({}, "60MB"),
}
"""Options, and a limit that some samples reach. A sample takes far more than launches differ by, a few kilobytes: only
then is there a truth."""
BELOW = 1
"""Where brute force begins, in samples below the answer."""
PLACES = (("single", 1), ("ddp", 2), ("fsdp-full", 2))


class SharedLauncher(LocalLauncher):
    """Stays alive when a run ends: loading torch is not what is measured."""

    def close(self) -> None:
        return

    def end(self) -> None:
        super().close()


def search(study: MaxBatch, launcher: SharedLauncher, place: Path) -> BatchSearch:
    store, _ = run_study(study, runs_dir=place, launcher=launcher)
    return BatchSearch.from_results(store.results()[0])


def find_by_brute_force(study: MaxBatch, launcher: SharedLauncher, place: Path, answer: int) -> int:
    """The largest batch below the first that runs out of memory."""
    first, *_ = study.plan()
    batch = max(0, answer - BELOW)
    while True:
        trial = make_probe_trial(first, batch + 1)
        result = launch(launcher, trial, place / trial.name)
        if result.status is Status.OUT_OF_MEMORY:
            return batch
        if result.status is not Status.COMPLETED:
            raise SystemExit(f"{trial.name} was {result.status.words}: {result.reason}")
        batch += 1


def launch(launcher: SharedLauncher, trial: Trial, directory: Path) -> TrialResult:
    directory.mkdir(parents=True)
    write_trial(directory, trial)
    return launcher.launch(trial, directory)


def count_by_bisection(largest: int) -> int:
    """Probes of a search that doubles until it fails and then bisects."""
    batch, count = 1, 1
    while batch <= largest:
        batch, count = 2 * batch, count + 1
    low, high = batch // 2, batch
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle <= largest else (low, middle)
        count += 1
    return count


def main() -> int:
    table = Table("workload", "strategy", "limit", "largest", "truth", "probes", "failures", "bisection", box=None)
    is_good = True
    worst_probes = worst_failures = num_exact = num_cases = 0
    launcher = SharedLauncher()
    with tempfile.TemporaryDirectory() as scratch:
        for workload, (options, limit) in WORKLOADS.items():
            for strategy, num_ranks in PLACES:
                job = Job(workload=workload, options=options, device="cpu", threads_per_rank=1, memory_limit=limit)
                study = MaxBatch(ranks=num_ranks, strategy=strategy, job=job)
                place = Path(scratch) / f"{workload}-{strategy}"
                found = search(study, launcher, place)
                truth = find_by_brute_force(study, launcher, place / "brute", found.largest or 1)
                failures = sum(not probe.fits for probe in found.probes)
                is_exact = found.is_confirmed and found.largest == truth
                num_cases, num_exact = num_cases + 1, num_exact + is_exact
                worst_probes, worst_failures = max(worst_probes, len(found.probes)), max(worst_failures, failures)
                is_good &= is_exact and len(found.probes) <= MOST_PROBES and failures <= MOST_FAILURES
                counts = (found.largest, truth, len(found.probes), failures, count_by_bisection(truth))
                table.add_row(workload, f"{strategy} {num_ranks}", limit, *map(str, counts))
    launcher.end()
    Console().print(table)
    print(
        f"\nmax_batch: {num_exact} of {num_cases} exact, at most {worst_probes} probes and {worst_failures} failures"
        f" (bar all, {MOST_PROBES}, {MOST_FAILURES})"
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())

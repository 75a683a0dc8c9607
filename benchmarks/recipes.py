"""Every recipe in small, as a user runs it: does every row run, and how long does each recipe take?

    python benchmarks/recipes.py            all five
    python benchmarks/recipes.py scaling    one of them

The bar: each takes less than ten minutes on two quiet cores, no trial fails but those that should, and every row is
answered. Processor time is of all processes, and tells a slow recipe from a busy machine; rows are by the time of
their trials.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from scalelab.recipes.report import ROW
from scalelab.recipes.reproduce import RECIPES, Reproduce
from scalelab.records.trial import from_builtins
from scalelab.report.findings import select
from scalelab.runs.experiment import find_failed, run_study
from scalelab.studies.catalogue import read_study
from scalelab.units import format_duration

MOST_SECONDS = 600.0
MOST_ROWS = 3
"""That are named as the longest."""


class Timing(NamedTuple):
    """What became of one recipe."""

    seconds: float
    processor_seconds: float
    longest: list[str]
    num_trials: int
    num_failed: int
    unanswered: list[str]


def read_processor_seconds() -> float:
    """Of this process and of those that it has waited for, torch's ranks among them."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def time_recipe(name: str) -> Timing:
    reproduce = from_builtins({"recipe": name}, Reproduce)
    with tempfile.TemporaryDirectory() as directory:
        start, used = time.perf_counter(), read_processor_seconds()
        store, document = run_study(reproduce, runs_dir=Path(directory))
        seconds, processor_seconds = time.perf_counter() - start, read_processor_seconds() - used
        answered = {finding.subject for finding in select(document.findings, ROW)}
        unanswered = [row.id for row in reproduce.rows if row.parts and row.id not in answered]
        rows: dict[str, float] = {}
        for result in store.results()[0]:
            row = result.trial.configuration.partition(".")[0].upper()
            rows[row] = rows.get(row, 0.0) + result.wall_seconds
        ordered = sorted(rows, key=rows.__getitem__, reverse=True)
        longest = [f"{row} {format_duration(rows[row])}" for row in ordered[:MOST_ROWS]]
        num_failed = len(find_failed(store, read_study(store)))
        return Timing(seconds, processor_seconds, longest, len(store.record.trials), num_failed, unanswered)


def main() -> int:
    table = Table("recipe", "time", "processor", "longest rows", "trials", "failed", "rows without an answer")
    timings = {name: time_recipe(name) for name in sys.argv[1:] or RECIPES}
    for name, one in timings.items():
        times = (format_duration(one.seconds), format_duration(one.processor_seconds), ", ".join(one.longest))
        table.add_row(name, *times, str(one.num_trials), str(one.num_failed), " ".join(one.unanswered) or "none")
    Console().print(table)
    slowest = max(timing.seconds for timing in timings.values())
    has_failed = any(timing.unanswered or timing.num_failed for timing in timings.values())
    print(
        f"recipes: {format_duration(slowest)} for the slowest (bar {format_duration(MOST_SECONDS)}),"
        f" {'some rows or trials failed' if has_failed else 'every row runs'}"
    )
    return 1 if has_failed or slowest > MOST_SECONDS else 0


if __name__ == "__main__":
    sys.exit(main())

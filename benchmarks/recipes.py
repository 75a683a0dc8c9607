"""Every recipe in small, as a user runs it: does every row run, and how long does each recipe take?

    python benchmarks/recipes.py            all four
    python benchmarks/recipes.py scaling    one of them

The bar: each takes less than ten minutes, no trial fails but those that should, and every row is answered.
"""

from __future__ import annotations

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


class Timing(NamedTuple):
    """What became of one recipe."""

    seconds: float
    num_trials: int
    num_failed: int
    unanswered: list[str]


def time_recipe(name: str) -> Timing:
    reproduce = from_builtins({"recipe": name}, Reproduce)
    with tempfile.TemporaryDirectory() as directory:
        start = time.perf_counter()
        store, document = run_study(reproduce, runs_dir=Path(directory))
        seconds = time.perf_counter() - start
        answered = {finding.subject for finding in select(document.findings, ROW)}
        unanswered = [row.id for row in reproduce.rows if row.parts and row.id not in answered]
        return Timing(seconds, len(store.record.trials), len(find_failed(store, read_study(store))), unanswered)


def main() -> int:
    table = Table("recipe", "time", "trials", "failed", "rows without an answer")
    timings = {name: time_recipe(name) for name in sys.argv[1:] or RECIPES}
    for name, timing in timings.items():
        unanswered = " ".join(timing.unanswered) or "none"
        table.add_row(name, format_duration(timing.seconds), str(timing.num_trials), str(timing.num_failed), unanswered)
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

"""`scalelab list`: the runs, newest last."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from scalelab.checks import check_at_least
from scalelab.cli.flags import RunsDir, parse_flags
from scalelab.records.store import RUNS_DIR, find_runs
from scalelab.report.text import clean_text, measure_text, pad_text
from scalelab.serve.listing import RunLine, describe_run

MOST_LETTERS = 14
"""Of a workload's name."""


@dataclass(frozen=True, kw_only=True)
class ListRuns:
    """List the runs, newest last."""

    runs_dir: RunsDir = RUNS_DIR
    limit: int = 20
    """Number of runs to list; 0: all."""
    json: bool = False
    """Print one JSON object per run."""


def main(args: Sequence[str]) -> int:
    wanted = parse_flags(ListRuns, args, "list")
    check_at_least("limit", wanted.limit, 0)
    paths = find_runs(wanted.runs_dir)
    shown = paths[-wanted.limit :] if wanted.limit else paths
    lines = [describe_run(path) for path in shown]
    if wanted.json:
        for line in lines:
            print(json.dumps(vars(line)))  # noqa: T201
        return 0
    if not lines:
        print(f"No runs in {wanted.runs_dir} yet  ·  scalelab run strong-scaling")  # noqa: T201
        return 0
    print_runs(lines, num_hidden=len(paths) - len(shown))
    return 0


def shorten(workload: str) -> str:
    """The name of a workload in its column; a long one is cut."""
    return workload if len(workload) <= MOST_LETTERS else f"{workload[: MOST_LETTERS - 1]}…"


def print_runs(lines: Sequence[RunLine], num_hidden: int) -> None:
    """One line per run, never cut: names are there to be copied."""
    rows = [("run", "study", "workload", "trials", "state")]
    rows += [(x.name, x.study, shorten(x.workload), f"{x.num_done}/{x.num_trials}", x.state) for x in lines]
    cleaned = [[clean_text(cell) for cell in row] for row in rows]
    widths = [max(measure_text(row[i]) for row in cleaned) for i in range(len(rows[0]))]
    for row in cleaned:
        padded = (pad_text(cell, width, "left") for cell, width in zip(row, widths, strict=True))
        print("  ".join(padded).rstrip())  # noqa: T201
    if num_hidden:
        print(f"… and {num_hidden} older  ·  scalelab list --limit 0")  # noqa: T201
    print(f"\nscalelab show {cleaned[-1][0]}")  # noqa: T201

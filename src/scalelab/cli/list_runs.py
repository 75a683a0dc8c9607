"""`scalelab list`: the runs there are, newest last."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scalelab.checks import check_at_least
from scalelab.cli.flags import parse_flags
from scalelab.cli.output import RunsDir
from scalelab.errors import ScalelabError, StoreError
from scalelab.measure.launchers.batch import find_living, name_job, read_record
from scalelab.report.text import clean_text, measure_text, pad_text
from scalelab.store import RUNNING, RUNS_DIR, RunStore, find_holder, find_runs


@dataclass(frozen=True, kw_only=True)
class ListRuns:
    """The runs there are, newest last."""

    runs_dir: RunsDir = RUNS_DIR
    limit: int = 20
    """How many of the newest runs to list; 0: all."""
    json: bool = False
    """One JSON object per run instead of a table."""


@dataclass(frozen=True, kw_only=True)
class RunLine:
    """What the listing says of one run."""

    name: str
    study: str
    workload: str
    num_done: int
    num_trials: int
    state: str


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


def describe_run(path: Path) -> RunLine:
    """One line for one run; a damaged run is a line too."""
    try:
        store = RunStore.open(path)
    except StoreError:
        return RunLine(name=path.name, study="–", workload="–", num_done=0, num_trials=0, state="damaged")
    trials = store.record.trials
    done = sum(store.has_result(name) for name in trials)
    state = describe_jobs(store) if done < len(trials) else ""
    state = state or ("running" if store.is_running() else "complete" if done == len(trials) else "interrupted")
    failed = store.count_failed()
    job = store.record.fields.get("job", {})
    workload = str(job.get("workload", "–")) if isinstance(job, dict) else "–"
    return RunLine(
        name=path.name,
        study=store.record.study,
        workload=Path(workload).name,
        num_done=done,
        num_trials=len(trials),
        state=f"{state}, {failed} failed" if failed else state,
    )


def describe_jobs(store: RunStore) -> str:
    """How far the jobs of a run are that has trials left; empty: it has none, or others execute it meanwhile."""
    try:
        record = read_record(store.path)
        if record is None or not record.jobs:
            return ""
        living = find_living(store.path, record)
    except ScalelabError:  # without PSI/J, or from a damaged record, nobody can be asked
        return "submitted"
    if not living:
        holder = find_holder(store.path / RUNNING)
        own = [name_job(record.scheduler, job.id) for job in record.jobs]
        if holder is not None and holder.get("job") not in own:
            return ""
        numbers = ", ".join(job.id for job in record.jobs)
        return f"interrupted, {record.scheduler} job {numbers} ended"
    number, state = next(iter(living.items()))
    others = f" and {len(living) - 1} more" if len(living) > 1 else ""
    return f"{record.scheduler} job {number} {state}{others}"


def print_runs(lines: Sequence[RunLine], num_hidden: int) -> None:
    """One line each, whole: names are there to be copied, also from a narrow terminal or a pipe."""
    rows = [("run", "study", "workload", "trials", "state")]
    rows += [(x.name, x.study, x.workload, f"{x.num_done}/{x.num_trials}", x.state) for x in lines]
    cleaned = [[clean_text(cell) for cell in row] for row in rows]
    widths = [max(measure_text(row[i]) for row in cleaned) for i in range(len(rows[0]))]
    for row in cleaned:
        padded = (pad_text(cell, width, "left") for cell, width in zip(row, widths, strict=True))
        print("  ".join(padded).rstrip())  # noqa: T201
    if num_hidden:
        print(f"… and {num_hidden} older  ·  scalelab list --limit 0")  # noqa: T201
    print(f"\nscalelab show {cleaned[-1][0]}")  # noqa: T201

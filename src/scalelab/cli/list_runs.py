"""`scalelab list`, `rm` and `prune`: the runs, newest last, and those that are no longer wanted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from scalelab.checks import check_at_least, clean_text
from scalelab.cli.flags import RunsDir, parse_flags
from scalelab.errors import RunBusy, UsageError
from scalelab.records.files import storage_errors
from scalelab.records.store import RUNS_DIR, RunStore, find_runs, has_failed, open_run
from scalelab.report.tables import measure_text, pad_text, wrap_text
from scalelab.serve.listing import RunLine, describe_run, find_result

MOST_LETTERS = 14
"""Of a workload's name."""


@dataclass(frozen=True, kw_only=True)
class ListRuns:
    """List the runs, newest last."""

    runs_dir: RunsDir = RUNS_DIR
    limit: int = 15
    """Number of runs to list; 0: all."""
    json: bool = False
    """Print one JSON object per run."""


@dataclass(frozen=True, kw_only=True)
class Remove:
    """Delete runs, with all their samples."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN…")]
    """Full names or paths of runs."""
    runs_dir: RunsDir = RUNS_DIR


@dataclass(frozen=True, kw_only=True)
class Prune:
    """List the runs in which every trial failed, and interrupted ones; flags delete them."""

    failed: bool = False
    """Delete the runs in which every trial failed."""
    interrupted: bool = False
    """Delete the runs that were stopped before their last trial, which resume would continue."""
    runs_dir: RunsDir = RUNS_DIR


def main(args: Sequence[str]) -> int:
    verb, *rest = args
    if verb == "rm":
        return remove(parse_flags(Remove, rest, verb))
    if verb == "prune":
        return prune(parse_flags(Prune, rest, verb))
    return list_runs(parse_flags(ListRuns, rest, verb))


def list_runs(wanted: ListRuns) -> int:
    check_at_least("limit", wanted.limit, 0)
    paths = find_runs(wanted.runs_dir)
    shown = paths[-wanted.limit :] if wanted.limit else paths
    lines = [replace(describe_run(path), result=find_result(path)) for path in shown]
    if wanted.json:
        for line in lines:
            print(json.dumps(vars(line)))  # noqa: T201
        return 0
    if not lines:
        print(f"No runs in {wanted.runs_dir} yet  ·  scalelab run strong-scaling")  # noqa: T201
        return 0
    print_runs(lines, num_hidden=len(paths) - len(shown))
    return 0


def remove(wanted: Remove) -> int:
    """Delete runs by their whole names: a part of one, or `last`, is easily another than meant."""
    if not wanted.runs:
        raise UsageError("name the runs to delete: scalelab rm RUN …; scalelab list shows them")
    stores = [open_run(name, wanted.runs_dir) for name in wanted.runs]
    for typed, store in zip(wanted.runs, stores, strict=True):
        if Path(typed).name != store.name:
            raise UsageError(f"{typed} is not the whole name of a run: did you mean scalelab rm {store.name}")
    delete(stores)
    return 0


def prune(wanted: Prune) -> int:
    paths = find_runs(wanted.runs_dir)
    failed = [path for path in paths if has_failed(path)]
    lines = {path: describe_run(path) for path in paths if path not in failed}
    stopped = {path: line for path, line in lines.items() if line.phase == "interrupted"}
    if wanted.failed or wanted.interrupted:
        chosen = [*(failed if wanted.failed else ()), *(stopped if wanted.interrupted else ())]
        delete(RunStore.open(path) for path in chosen)
        if not chosen:
            print(f"No run in {wanted.runs_dir} to delete")  # noqa: T201
        return 0
    for path in failed:
        print(f"{clean_text(path.name)}  every trial failed")  # noqa: T201
    for path, line in stopped.items():
        print(f"{clean_text(path.name)}  interrupted after {line.num_done} of {line.num_trials} trials")  # noqa: T201
    if failed:
        print("\nscalelab prune --failed deletes the runs in which every trial failed")  # noqa: T201
    if stopped:
        print("\nscalelab prune --interrupted deletes what scalelab resume RUN would continue")  # noqa: T201
    if not (failed or stopped):
        print(f"No run in {wanted.runs_dir} failed altogether or was interrupted")  # noqa: T201
    return 0


def delete(stores: Iterable[RunStore]) -> None:
    """Delete runs that are not running; `run.json` first, so that what is left is not taken for a run."""
    for store in stores:
        line = describe_run(store.path)
        if line.phase in ("running", "submitted"):
            raise RunBusy(f"{store.name} is not done ({line.state}): wait for it, or stop it first")
        with storage_errors(store.path):
            (store.path / "run.json").unlink()
            shutil.rmtree(store.path)
        print(f"Deleted {clean_text(str(store.path))}")  # noqa: T201


def shorten(workload: str) -> str:
    """The name of a workload in its column; a long one is cut."""
    return workload if len(workload) <= MOST_LETTERS else f"{workload[: MOST_LETTERS - 1]}…"


def print_runs(lines: Sequence[RunLine], num_hidden: int) -> None:
    """One line per run, never cut: names are there to be copied; below it its note, or what it found."""
    rows = [("run", "study", "workload", "trials", "state")]
    rows += [(x.name, x.study, shorten(x.workload), f"{x.num_done}/{x.num_trials}", x.state) for x in lines]
    cleaned = [[clean_text(cell) for cell in row] for row in rows]
    widths = [max(measure_text(row[i]) for row in cleaned) for i in range(len(rows[0]))]
    told = ["", *(clean_text(x.note or x.result) for x in lines)]
    room = max(MOST_LETTERS, shutil.get_terminal_size().columns - 2)
    for row, result in zip(cleaned, told, strict=True):
        padded = (pad_text(cell, width, "left") for cell, width in zip(row, widths, strict=True))
        print("  ".join(padded).rstrip())  # noqa: T201
        if result:
            first = wrap_text(result, room - 2)[0]
            print(f"  {first}{'' if first == result else ' …'}")  # noqa: T201
    if num_hidden:
        print(f"… and {num_hidden} older  ·  scalelab list --limit 0")  # noqa: T201
    print(f"\nscalelab show {cleaned[-1][0]}")  # noqa: T201

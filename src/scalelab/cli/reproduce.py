"""`scalelab reproduce RECIPE`: run a published assignment and compare with its numbers."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from scalelab.cli.batch import check_unused_by_rows, make_submitter
from scalelab.cli.flags import parse_flags
from scalelab.cli.measuring import measure_and_report, print_plan, refuse_ranks
from scalelab.cli.output import fill_notebook
from scalelab.cli.study_flags import Execution, find_flag_value
from scalelab.data.shards import find_shards
from scalelab.errors import DamagedRun, UsageError
from scalelab.launch.launcher import choose_launcher
from scalelab.launch.ranks.namespaces import find_host_obstacle
from scalelab.recipes.recipe import write_scripts
from scalelab.recipes.reproduce import RECIPES, Reproduce
from scalelab.records.store import RunStore, find_runs
from scalelab.records.trial import from_builtins
from scalelab.runs.experiment import start_run

NO_BREAK = "\u00a0"


@dataclass(frozen=True, kw_only=True)
class Command:
    """Run the experiments of a published assignment with its parameters and compare with its numbers."""

    reproduce: Reproduce
    again: bool = False
    """Start a new run even if an earlier one of the same command was interrupted."""
    scripts: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Write the assignment's code to this directory (plain PyTorch, one script per task; a notebook with its outputs)
    and measure nothing."""
    execution: Execution = field(default_factory=Execution)


def main(args: Sequence[str]) -> int:
    refuse_ranks()
    if not args:
        print_recipes()
        return 2
    if find_flag_value(args, "--launcher") is not None:
        raise UsageError(
            "reproduce has no --launcher: every row has its own. To use a cluster node, start it inside a job (salloc,"
            " qsub -I)"
        )
    try:
        command = parse_flags(Command, args, "reproduce")
    except SystemExit:  # --help was asked for
        print_recipes()
        raise
    reproduce, execution = command.reproduce, command.execution
    if command.scripts is not None:
        print_scripts(reproduce.recipe, command.scripts)
        return 0
    if reproduce.tokens:
        find_shards(reproduce.tokens)  # raises if there are none: without them, rows would only be left out
    trials = reproduce.plan()
    check_unused_by_rows(execution.submission, reproduce, trials)
    if execution.dry_run:
        print("\n".join(reproduce.describe_rows()), end="\n\n")  # noqa: T201
        print_plan(trials, execution, may_try=False)
        for row, reason in reproduce.reasons.items():
            print(f"{row} does not run, or only in part: {reason}")  # noqa: T201
        return 0
    execution.output.check()
    # Rows that need several hosts say so if hosts cannot be emulated; the others run.
    can_emulate = find_host_obstacle() is None
    possible = [trial for trial in trials if can_emulate or trial.num_hosts == 1]
    launcher = choose_launcher(reproduce.job, possible, make_submitter(reproduce, execution.submission))
    launcher.check()
    store = None if command.again else find_interrupted(reproduce, execution.runs_dir)
    if store is not None:
        print(f"Resuming {store.path}; --again starts a new run", file=sys.stderr)  # noqa: T201
    typed = ["scalelab", "reproduce", *args]
    store = store or start_run(reproduce, execution.runs_dir, typed, name=execution.name, note=execution.note)
    return measure_and_report(store, reproduce, launcher, execution.output)


def print_scripts(recipe: str, directory: Path) -> None:
    """Write the code of an assignment and print its files; a notebook is executed, so that it has its outputs."""
    for file in write_scripts(recipe, directory):
        print(file)  # noqa: T201
        if file.suffix == ".ipynb":
            fill_notebook(file)


def find_interrupted(reproduce: Reproduce, runs_dir: Path) -> RunStore | None:
    """The newest run of the same recipe, if it has trials left and no process is executing it."""
    for path in reversed(find_runs(runs_dir)):
        if "reproduce-" not in path.name:
            continue
        try:
            store = RunStore.open(path)
            is_same = store.record.study == Reproduce.name and is_alike(
                from_builtins(store.record.fields, Reproduce), reproduce
            )
        except (DamagedRun, ValueError, UsageError):
            continue  # `scalelab show` reports the damage
        if is_same and store.is_own:  # the trials of a run that was sent may name any file
            is_over = all(store.has_result(name) for name in store.record.trials) and store.read_document_text()
            return None if is_over or store.is_running() else store
    return None


def is_alike(one: Reproduce, other: Reproduce) -> bool:
    """Whether both measure the same rows, named in any order, twice or in either case."""
    is_same = replace(one, only=()) == replace(other, only=())
    return is_same and [row.id for row in one.rows] == [row.id for row in other.rows]


def print_recipes() -> None:
    """Every recipe, the assignment that it is, and its rows."""
    lines = ["Recipes:"]
    for name, recipe in RECIPES.items():
        named = [f"{row.id} {row.title}".replace(" ", NO_BREAK) for row in recipe.make_rows("small")]
        title = f"{name:<14}{recipe.title} ({recipe.assignment})"
        lines += textwrap.wrap(title, width=96, initial_indent="  ", subsequent_indent=" " * 16)
        lines += textwrap.wrap(", ".join(named), width=96, initial_indent=" " * 16, subsequent_indent=" " * 16)
    print("\n".join(lines).replace(NO_BREAK, " "))  # noqa: T201

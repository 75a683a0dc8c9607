"""A report with what reproduces it: the script, the raw data, the workload, in one directory.

    DIR/
      README.md          what is here, and how to check it
      reproduce.sh       measures the same again, and compares
      runs/NAME/         the run: plan, environment, every result, every raw sample, every log
      workload/          the user's own file, as it was measured

Whoever gets it can render the report again from the samples, with scalelab and without torch, or measure again. What is
large and can be made again, checkpoints and models, is left out and named.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from scalelab.errors import UsageError
from scalelab.files import storage_errors, write_atomically
from scalelab.report.text import clean_text
from scalelab.store import RunStore, hash_workload

LEFT_OUT = ("checkpoints",)
"""Directories of a trial that are large and can be made again."""
LEFT_OUT_ENDINGS = (".onnx", ".pt")
SCRIPT = "reproduce.sh"


def check_bundle(directory: Path) -> None:
    """Refuse a place that holds something already."""
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"--bundle {directory} is a file: give a directory")
    if directory.is_dir() and any(directory.iterdir()):
        raise UsageError(f"--bundle {directory} is not empty: give a new directory")


def write_bundle(directory: Path, stores: Sequence[RunStore], reports: Sequence[str]) -> None:
    """Put the runs, their script and a page about them into a directory, beside the reports that are named."""
    check_names(stores)
    with storage_errors(directory, "--bundle"):
        directory.mkdir(parents=True, exist_ok=True)
        for store in stores:
            copy_run(store, directory / "runs" / store.name)
            copy_workload(store, directory / "workload")
        script = directory / SCRIPT
        write_atomically(script, render_script(stores))
        script.chmod(0o755)
        write_atomically(directory / "README.md", render_page(stores, reports))


def check_names(stores: Sequence[RunStore]) -> None:
    """Refuse runs of the same name from two places: one would hide the other."""
    names = [store.name for store in stores]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"--bundle: two runs are called {twice[0]}: rename the directory of one, or bundle them apart")


def copy_run(store: RunStore, target: Path) -> None:
    """The files of a run but those that are left out."""
    shutil.copytree(store.path, target, ignore=lambda _, names: [name for name in names if is_left_out(name)])


def is_left_out(name: str) -> bool:
    return name in LEFT_OUT or name == "running.json" or name.endswith(LEFT_OUT_ENDINGS)


def find_own_workload(store: RunStore) -> Path | None:
    """The file of the user's own workload; None for a built-in one."""
    workload = store.trials()[0].workload
    file, colon, _ = workload.rpartition(":")
    return Path(file) if colon else None


def copy_workload(store: RunStore, target: Path) -> None:
    """The user's own file, unless it is gone or has changed since: the page says so then."""
    file = find_own_workload(store)
    if file is not None and is_unchanged(store):
        target.mkdir(exist_ok=True)
        shutil.copy2(file, target / file.name)


def is_unchanged(store: RunStore) -> bool:
    return hash_workload(store.trials()[0].workload) == store.record.workload_sha256


def describe_command(store: RunStore) -> str:
    """The command line that made a run, as it is typed."""
    if not store.record.command:
        return ""
    program, *arguments = store.record.command
    return shlex.join([Path(program).name, *map(clean_text, arguments)])


def render_script(stores: Sequence[RunStore]) -> str:
    """A script that measures every run again, into a directory of its own, and compares."""
    versions = sorted({store.record.version for store in stores})
    torches = sorted({store.environment().torch or "" for store in stores} - {""})
    lines = [
        "#!/bin/sh",
        "# Measures again what this bundle reports, into runs-again, and compares it with what is here.",
        f"# It was made with scalelab {', '.join(versions)}{' and torch ' + ', '.join(torches) if torches else ''}.",
        "set -eu",
        'cd "$(dirname "$0")"',
        'command -v scalelab >/dev/null || { echo "please install scalelab[torch,report] first" >&2; exit 1; }',
    ]
    for store in stores:
        lines += ["", f"# {clean_text(store.name)}", *list_commands(store)]
    return "\n".join(lines) + "\n"


def list_commands(store: RunStore) -> Iterator[str]:
    """The commands for one run; those of a run that a script of the user's made are only named."""
    command = store.record.command
    if not command or Path(command[0]).name != "scalelab":
        yield f"# made by: {describe_command(store) or 'a Python program'}"
        return
    arguments = place_runs(move_workload(store, command[1:]))
    yield shlex.join(["scalelab", *arguments])
    yield shlex.join(["scalelab", "compare", f"runs/{store.name}", "last", "--runs-dir", "runs-again"])


def place_runs(arguments: Sequence[str]) -> list[str]:
    """The same arguments with a directory of runs of their own, and no files to write."""
    kept: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, _ = argument.partition("=")
        if name in ("--runs-dir", "--markdown", "--json", "--csv", "--html", "--pdf"):
            rest = rest if equals else rest[1:]
        else:
            kept.append(argument)
    return [*kept, "--runs-dir", "runs-again"]


def move_workload(store: RunStore, arguments: Sequence[str]) -> list[str]:
    """The same arguments with the user's own workload taken from the bundle."""
    file = find_own_workload(store)
    if file is None:
        return list(arguments)
    moved = []
    for argument in arguments:
        path, colon, function = argument.rpartition(":")
        is_it = bool(colon) and Path(path).name == file.name
        moved.append(f"workload/{file.name}:{function}" if is_it else argument)
    return moved


def render_page(stores: Sequence[RunStore], reports: Sequence[str]) -> str:
    """What is in the bundle, in Markdown."""
    lines = ["# Report and raw data", ""]
    lines += [f"- `{name}`: the report" for name in reports]
    lines += [f"- `{SCRIPT}`: measures the same again into `runs-again`, and compares"]
    for store in stores:
        command = describe_command(store) or "a Python program"
        lines.append(f"- `runs/{store.name}`: measured {store.record.created_at[:10]} by `{command}`")
        file = find_own_workload(store)
        if file is not None and not is_unchanged(store):
            lines.append(f"  - its workload, `{file.name}`, is gone or has changed since: it is not here")
        elif file is not None:
            lines.append(f"  - `workload/{file.name}`: what was trained")
    first = stores[0].name
    lines += [
        "",
        f"Derive the report again from the raw samples: `scalelab report runs/{first} --html again.html`.",
        "Checkpoints and exported models are left out: the script makes them again.",
    ]
    return "\n".join(lines) + "\n"

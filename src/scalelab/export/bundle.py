"""A report with what reproduces it: the script, the raw data, the workload, in one directory.

    DIR/
      README.md          what is here, and how to check it
      reproduce.sh       measures the same again, and compares
      runs/NAME/         the run: plan, environment, every result, every raw sample, every log
      workload/          the user's own file, as it was measured

Whoever gets it can render the report again from the samples, with scalelab and without torch, or measure again. What is
large and can be made again, checkpoints and models, is left out and named. So is what the command reads, such as data:
the script looks for it where it was, or where a variable says, and tells what is missing before it measures.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from scalelab.errors import UsageError
from scalelab.records.files import storage_errors, write_atomically
from scalelab.records.store import RunStore, hash_workload
from scalelab.report.text import clean_text

LEFT_OUT = ("checkpoints",)
"""Directories of a trial that are large and can be made again."""
LEFT_OUT_ENDINGS = (".onnx", ".pt")
SCRIPT = "reproduce.sh"
WRITTEN = ("--runs-dir", "--markdown", "--json", "--csv", "--html", "--pdf", "--checkpoints")
"""Flags that name what a command writes: going on from old checkpoints would measure nothing."""
READ = ("--data-path", "--test-path", "--weights", "--site")
"""Flags that name what it reads besides the workload."""
SOME_FAILED = 3
"""The exit code of a run in which some trials failed, as they may have before."""


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
    sums: dict[str, str | None] = {}
    for store in stores:
        file = find_own_workload(store)
        if (
            file is not None
            and sums.setdefault(file.name, store.record.workload_sha256) != store.record.workload_sha256
        ):
            raise UsageError(f"--bundle: two different workloads are called {file.name}: bundle their runs apart")


def copy_run(store: RunStore, target: Path) -> None:
    """The files of a run but those that are left out."""
    shutil.copytree(
        store.path,
        target,
        ignore=lambda _, names: [name for name in names if is_left_out(name)],
        ignore_dangling_symlinks=True,
    )


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
    for number, store in enumerate(stores, start=1):
        lines += ["", f"# {clean_text(store.name)}", *list_commands(store, number)]
    return "\n".join(lines) + "\n"


def list_commands(store: RunStore, number: int = 1) -> Iterator[str]:
    """The commands for one run; those of a run that a script of the user's made are only named."""
    command = store.record.command
    if not command or Path(command[0]).name != "scalelab":
        yield f"# made by: {describe_command(store) or 'a Python program'}"
        return
    launcher = store.trials()[0].launcher
    if launcher not in ("local", "hosts"):
        yield f"# its ranks were started by {launcher}: run this where that can start them"
    variables = {}
    for name, path in find_inputs(store).items():
        variables[name] = name_variable(name, number)
        yield from list_checks(variables[name], path)
    yield f"{join_words(place_runs(move_workload(store, command[1:])), variables)} || [ $? -eq {SOME_FAILED} ]"
    yield shlex.join(["scalelab", "compare", f"runs/{store.name}", "last", "--runs-dir", "runs-again"])


def list_checks(variable: str, path: str) -> Iterator[str]:
    """Lines that choose a path, and end the script where nothing is there; a pattern is left to the command."""
    yield f'[ -n "${{{variable}:-}}" ] || {variable}={shlex.quote(path)}'
    if "*" not in path:
        told = f"is not here: say where by {variable}=PATH ./{SCRIPT}"
        yield f'[ -e "${variable}" ] || {{ echo "${variable} {told}" >&2; exit 1; }}'


def name_variable(flag: str, number: int) -> str:
    name = flag.strip("-").replace("-", "_").upper()
    return name if number == 1 else f"{name}_{number}"


def join_words(arguments: Sequence[str], variables: Mapping[str, str]) -> str:
    """A command line in which what it reads is named by variables."""
    words = ["scalelab"]
    for flag, value in pair_flags(arguments):
        if flag in variables:
            words += [flag, f'"${variables[flag]}"']
        elif value is None:
            words.append(shlex.quote(flag))
        else:
            words += [flag, shlex.quote(value)]
    return " ".join(words)


def pair_flags(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Words one by one, and with its value every flag that names a path, however it was typed."""
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name not in (*WRITTEN, *READ):
            yield word, None
        elif equals:
            yield name, value
        elif rest:
            yield name, rest.pop(0)


def find_inputs(store: RunStore) -> dict[str, str]:
    """What a command reads by flag, by its whole path where the run knows that."""
    command = store.record.command
    if not command or Path(command[0]).name != "scalelab":
        return {}
    typed = {flag: value for flag, value in pair_flags(command[1:]) if flag in READ and value is not None}
    options = store.trials()[0].options
    return {flag: str(options.get(flag.strip("-").replace("-", "_")) or value) for flag, value in typed.items()}


def place_runs(arguments: Sequence[str]) -> list[str]:
    """The same arguments with a directory of runs of their own, and no other files to write."""
    kept = [pair for pair in pair_flags(arguments) if pair[0] not in WRITTEN]
    words = [word for pair in kept for word in pair if word is not None]
    return [*words, "--runs-dir", "runs-again"]


def move_workload(store: RunStore, arguments: Sequence[str]) -> list[str]:
    """The same arguments with the user's own workload taken from the bundle."""
    file = find_own_workload(store)
    if file is None:
        return list(arguments)
    moved = []
    for argument in arguments:
        before = "--workload=" if argument.startswith("--workload=") else ""
        path, colon, function = argument.removeprefix(before).rpartition(":")
        is_it = bool(colon) and Path(path).name == file.name
        moved.append(f"{before}workload/{file.name}:{function}" if is_it else argument)
    return moved


def render_page(stores: Sequence[RunStore], reports: Sequence[str]) -> str:
    """What is in the bundle, in Markdown."""
    lines = ["# Report and raw data", ""]
    lines += [f"- `{name}`: the report" for name in reports]
    lines += [f"- `{SCRIPT}`: measures the same again into `runs-again`, and compares"]
    for number, store in enumerate(stores, start=1):
        command = describe_command(store) or "a Python program"
        lines.append(f"- `runs/{store.name}`: measured {store.record.created_at[:10]} by `{command}`")
        file = find_own_workload(store)
        if file is not None and not is_unchanged(store):
            lines.append(f"  - its workload, `{file.name}`, is gone or has changed since: it is not here")
        elif file is not None:
            lines.append(f"  - `workload/{file.name}`: what was trained; modules of yours that it imports are not here")
        for flag, path in find_inputs(store).items():
            place = name_variable(flag, number)
            lines.append(f"  - `{flag} {path}` is not here: `{place}=PATH ./{SCRIPT}` takes it from elsewhere")
    first = stores[0].name
    lines += [
        "",
        f"Derive the report again from the raw samples: `scalelab report runs/{first} --html again.html`.",
        "Checkpoints and exported models are left out: the script makes them again.",
    ]
    return "\n".join(lines) + "\n"

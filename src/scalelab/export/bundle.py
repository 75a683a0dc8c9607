"""A report with everything that reproduces it: script, raw data and workload in one directory.

    DIR/
      README.md          what is here, and how to check it
      reproduce.sh       measures the same again, and compares
      runs/NAME/         the run: plan, environment, every result, every raw sample, every log
      workload/          the user's own file, as it was measured
      scripts/           of a reproduced assignment: its code in plain PyTorch

The report can be rendered again from the samples with scalelab and without torch, or measured again. Checkpoints and
models are omitted, because the script makes them again. So are the inputs of the command, such as data: the script
looks for them where they were, or where a variable says, and reports what is missing before it measures.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from scalelab.checks import clean_text
from scalelab.errors import UsageError
from scalelab.recipes.recipe import list_scripts, write_scripts
from scalelab.recipes.reproduce import Reproduce
from scalelab.records.files import storage_errors, write_atomically
from scalelab.records.launchers import LAUNCHERS
from scalelab.records.store import RunStore, hash_workload
from scalelab.workloads.source import find_root, list_imported, split_name

LEFT_OUT = ("checkpoints",)
"""Large directories of a trial that the script makes again."""
LEFT_OUT_ENDINGS = (".onnx", ".pt")
SCRIPT = "reproduce.sh"
WRITTEN = ("--runs-dir", "--markdown", "--json", "--csv", "--html", "--pdf", "--checkpoints")
"""Flags that name what a command writes: resuming from old checkpoints would measure nothing."""
READ = ("--data-path", "--test-path", "--weights", "--site")
"""Flags that name what it reads, besides the workload."""
SOME_FAILED = 3
"""Exit code of a run in which some trials failed, as they may have before."""


def check_bundle(directory: Path) -> None:
    """Reject a directory that is not empty."""
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"--bundle {directory} is a file: use a directory")
    if directory.is_dir() and any(directory.iterdir()):
        raise UsageError(f"--bundle {directory} is not empty: use a new directory")


def write_bundle(directory: Path, stores: Sequence[RunStore], reports: Sequence[str]) -> None:
    """Write the runs, their script and a README into a directory, beside the named reports."""
    check_names(stores)
    with storage_errors(directory, "--bundle"):
        directory.mkdir(parents=True, exist_ok=True)
        for store in stores:
            copy_run(store, directory / "runs" / store.name)
            copy_workload(store, directory / "workload")
        for recipe in list_recipes(stores):
            write_scripts(recipe, place_scripts(directory, recipe, stores), "--bundle")
        script = directory / SCRIPT
        write_atomically(script, render_script(stores))
        script.chmod(0o755)
        write_atomically(directory / "README.md", render_page(stores, reports))


def list_recipes(stores: Sequence[RunStore]) -> list[str]:
    """The assignments that were reproduced, each once; those without code have nothing to add."""
    found = (store.record.fields["recipe"] for store in stores if store.record.study == Reproduce.name)
    return [recipe for recipe in dict.fromkeys(map(str, found)) if list_scripts(recipe)]


def place_scripts(directory: Path, recipe: str, stores: Sequence[RunStore]) -> Path:
    """`scripts/`, or a directory in it for each of several assignments."""
    return directory / "scripts" if len(list_recipes(stores)) == 1 else directory / "scripts" / recipe


def check_names(stores: Sequence[RunStore]) -> None:
    """Reject two runs with the same name: one would hide the other."""
    names = [store.name for store in stores]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"--bundle: two runs are called {twice[0]}: rename one, or bundle them separately")
    sums: dict[str, str | None] = {}
    for store in stores:
        file = find_own_workload(store)
        if (
            file is not None
            and sums.setdefault(file.name, store.record.workload_sha256) != store.record.workload_sha256
        ):
            raise UsageError(f"--bundle: two different workloads are called {file.name}: bundle their runs separately")


def copy_run(store: RunStore, target: Path) -> None:
    """The files of a run, except those left out."""
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
    return Path(file) if colon and Path(file).is_absolute() else None


def find_own_study(store: RunStore) -> Path | None:
    """The file of the user's own study; None for one of scalelab."""
    file, _, _ = (store.record.study_class or "").rpartition(":")
    return Path(file) if file.endswith(".py") else None


def copy_workload(store: RunStore, target: Path) -> None:
    """The user's own file, unless it is missing or changed: then the README says so."""
    workload, study = find_own_workload(store), find_own_study(store)
    for file, is_copied in ((workload, is_unchanged(store)), (study, study is not None and study.is_file())):
        if file is not None and is_copied:
            for one in (file, *list_imported(file)):
                place = target / place_in_bundle(one, file)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(one, place)


def place_in_bundle(one: Path, file: Path) -> Path:
    """Where a file of the user's goes: as it lies to the directory that its workload is imported from."""
    return one.relative_to(find_root(file))


def is_unchanged(store: RunStore) -> bool:
    return hash_workload(store.trials()[0].workload) == store.record.workload_sha256


def describe_command(store: RunStore) -> str:
    """The command line that made a run."""
    if not store.record.command:
        return ""
    program, *arguments = store.record.command
    return shlex.join([Path(program).name, *map(clean_text, arguments)])


def render_script(stores: Sequence[RunStore]) -> str:
    """A script that measures every run again into a new directory, and compares."""
    versions = sorted({store.record.version for store in stores})
    torches = sorted({store.environment().torch or "" for store in stores} - {""})
    lines = [
        "#!/bin/sh",
        "# Measures the runs of this bundle again, into runs-again, and compares.",
        f"# Made with scalelab {', '.join(versions)}{' and torch ' + ', '.join(torches) if torches else ''}.",
        "set -eu",
        'cd "$(dirname "$0")"',
        'command -v scalelab >/dev/null || { echo "install scalelab[torch,report] first" >&2; exit 1; }',
    ]
    for number, store in enumerate(stores, start=1):
        lines += ["", f"# {clean_text(store.name)}", *list_commands(store, number)]
    return "\n".join(lines) + "\n"


def list_commands(store: RunStore, number: int = 1) -> Iterator[str]:
    """The commands for one run; a run made by a script of the user is only named."""
    command = store.record.command
    if not command or Path(command[0]).name != "scalelab":
        yield f"# made by: {describe_command(store) or 'a Python program'}"
        return
    launcher = store.trials()[0].launcher
    if not LAUNCHERS[launcher].is_on_this_machine:
        yield f"# ranks started by {launcher}: run this where {launcher} works"
    variables = {}
    for name, path in find_inputs(store).items():
        variables[name] = name_variable(name, number)
        yield from list_checks(variables[name], path)
    yield f"{join_words(place_runs(move_workload(store, command[1:])), variables)} || [ $? -eq {SOME_FAILED} ]"
    yield shlex.join(["scalelab", "compare", f"runs/{store.name}", "last", "--runs-dir", "runs-again"])


def list_checks(variable: str, path: str) -> Iterator[str]:
    """Lines that choose a path and end the script if it is missing; a pattern is left to the command."""
    yield f'[ -n "${{{variable}:-}}" ] || {variable}={shlex.quote(path)}'
    if "*" not in path:
        told = f"does not exist: use {variable}=PATH ./{SCRIPT}"
        yield f'[ -e "${variable}" ] || {{ echo "${variable} {told}" >&2; exit 1; }}'


def name_variable(flag: str, number: int) -> str:
    name = flag.strip("-").replace("-", "_").upper()
    return name if number == 1 else f"{name}_{number}"


def join_words(arguments: Sequence[str], variables: Mapping[str, str]) -> str:
    """A command line whose inputs are variables."""
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
    """Words one by one; flags that name a path with their value, however they were typed."""
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
    """The inputs of a command by flag, as absolute paths if the run has them."""
    command = store.record.command
    if not command or Path(command[0]).name != "scalelab":
        return {}
    typed = {flag: value for flag, value in pair_flags(command[1:]) if flag in READ and value is not None}
    options = store.trials()[0].options
    return {flag: str(options.get(flag.strip("-").replace("-", "_")) or value) for flag, value in typed.items()}


def place_runs(arguments: Sequence[str]) -> list[str]:
    """The arguments with a new directory of runs and no other output."""
    kept = [pair for pair in pair_flags(arguments) if pair[0] not in WRITTEN]
    words = [word for pair in kept for word in pair if word is not None]
    return [*words, "--runs-dir", "runs-again"]


def move_workload(store: RunStore, arguments: Sequence[str]) -> list[str]:
    """The arguments with the user's own files taken from the bundle."""
    own = [file for file in (find_own_workload(store), find_own_study(store)) if file is not None]
    moved = []
    for argument in arguments:
        before = "--workload=" if argument.startswith("--workload=") else ""
        path, function = split_name(argument.removeprefix(before))
        found = [file for file in own if Path(path).name == file.name or path == name_module(file)]
        moved.append(f"{before}workload/{place_in_bundle(found[0], found[0])}:{function}" if found else argument)
    return moved


def name_module(file: Path) -> str:
    """The dotted name of a file inside a package."""
    return ".".join(file.relative_to(find_root(file)).with_suffix("").parts).removesuffix(".__init__")


def render_page(stores: Sequence[RunStore], reports: Sequence[str]) -> str:
    """The README of the bundle."""
    lines = ["# Report and raw data", ""]
    lines += [f"- `{name}`: the report" for name in reports]
    lines += [f"- `{SCRIPT}`: measures the runs again into `runs-again`, and compares"]
    for number, store in enumerate(stores, start=1):
        command = describe_command(store) or "a Python program"
        lines.append(f"- `runs/{store.name}`: measured {store.record.created_at[:10]} by `{command}`")
        file = find_own_workload(store)
        if file is not None and not is_unchanged(store):
            lines.append(f"  - its workload, `{file.name}`, is missing or changed since, and not included")
        elif file is not None:
            lines.append(f"  - `workload/{place_in_bundle(file, file)}`: the workload, with what it imports of yours")
        for flag, path in find_inputs(store).items():
            place = name_variable(flag, number)
            lines.append(f"  - `{flag} {path}` is not included: use `{place}=PATH ./{SCRIPT}`")
    lines += [
        f"- `{place_scripts(Path(), recipe, stores)}`: the code of the {recipe} assignment, in plain PyTorch"
        for recipe in list_recipes(stores)
    ]
    first = stores[0].name
    lines += [
        "",
        f"Render the report again from the raw samples: `scalelab report runs/{first} --html again.html`.",
        "Checkpoints and exported models are omitted: the script makes them again.",
    ]
    return "\n".join(lines) + "\n"

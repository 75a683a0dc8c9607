"""`scalelab completion bash|zsh|fish`: the completion script of a shell.

tyro writes a script that knows verbs, studies and flags. What changes from day to day (runs, files, rows of a recipe)
is asked for first, with `scalelab completion words …`, which gets the words typed so far.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from scalelab.cli.app import VERBS
from scalelab.cli.flags import FIELD_FLAGS, find_project, parse_flags
from scalelab.records.store import RUNS_DIR, find_runs

FLAG_CLASSES = {
    "init": "Init",
    "reproduce": "Command",
    "meter": "MeterCommand",
    "list": "ListRuns",
    "rm": "Remove",
    "prune": "Prune",
    "show": "Show",
    "report": "Report",
    "compare": "Compare",
    "export": "Export",
    "serve": "Serve",
    "resume": "Resume",
    "predict": "Predict",
    "plan": "PlanFlags",
    "trace": "Trace",
    "doctor": "Doctor",
    "completion": "Completion",
}
"""The class of flags in each verb's module."""


RUN_VERBS = ("show", "report", "compare", "export", "resume", "rm", "predict", "trace")
"""Verbs that take the names of runs."""
WRAPPERS = {
    "bash": r"""
_scalelab() {
  local found
  found=$("${COMP_WORDS[0]}" completion words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
  if [ -n "$found" ]; then
    COMPREPLY=($(compgen -W "$found" -- "${COMP_WORDS[COMP_CWORD]}"))
  else
    _tyro_scalelab "$@"
  fi
}
complete -F _scalelab scalelab
""",
    "zsh": r"""
_scalelab_words() {
  local -a found
  found=(${(f)"$(${words[1]} completion words "${(@)words[2,CURRENT]}" 2>/dev/null)"})
  if (( $#found )); then
    compadd -a found
  else
    _tyro_scalelab "$@"
  fi
}
if [[ $funcstack[1] == _scalelab ]]; then  # a file on fpath
  _scalelab_words "$@"
else  # sourced
  (( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
  compdef _scalelab_words scalelab
fi
""",
    "fish": r"""
function _scalelab_words
    scalelab completion words (commandline -opc)[2..-1] "$(commandline -ct)" 2>/dev/null
end
complete --no-files --command scalelab --arguments "(_scalelab_words)"
""",
}
"""What asks for words first, behind tyro's script."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Print the completion script of a shell. For bash and zsh: source <(scalelab completion bash)"""

    shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]


def main(args: Sequence[str]) -> int:
    if args[:1] == ["words"]:
        print("\n".join(find_words(args[1:])))  # noqa: T201
        return 0
    shell = parse_flags(Completion, args, "completion").shell
    print(make_script(shell))  # noqa: T201
    return 0


def find_words(typed: Sequence[str]) -> list[str]:
    """Completions of the last typed word; empty: the script decides."""
    if len(typed) < 2:
        return []
    verb, *before, current = typed
    flags = [word for word in before if word.startswith("-")]
    previous = before[-1] if before else ""
    if previous == "--workload":
        return keep(list_workloads(), current)
    if current.startswith("-"):
        return []
    if verb == "reproduce":
        return keep(list_recipes(before, flags[-1:] == ["--only"]), current)
    if verb in RUN_VERBS and not previous.startswith("-"):
        return keep(list_run_names(before), current)
    return []


def keep(words: Sequence[str], beginning: str) -> list[str]:
    return [word for word in words if word.startswith(beginning)]


def list_workloads() -> list[str]:
    """The built-in workloads, and the files of this directory that define `build`."""
    from scalelab.workloads.catalogue import BUILT_IN

    files = [file.name for file in sorted(Path().glob("*.py")) if re.search(rb"^def build\(", file.read_bytes(), re.M)]
    return [*BUILT_IN, *files]


def list_recipes(before: Sequence[str], is_row: bool) -> list[str]:
    """The recipes, or the rows of the one that was named."""
    from scalelab.recipes.reproduce import RECIPES

    named = next((word for word in before if word in RECIPES), None)
    if named is None:
        return list(RECIPES)
    return [row.id for row in RECIPES[named].make_rows("small")] if is_row else []


def list_run_names(before: Sequence[str]) -> list[str]:
    """`last`, and the names of all runs, newest first."""
    project = find_project()
    given = before[before.index("--runs-dir") + 1] if "--runs-dir" in before[:-1] else None
    of_project = project.file.parent / project.values["runs-dir"] if project and "runs-dir" in project.values else None
    runs = find_runs(Path(given) if given else of_project or RUNS_DIR)
    return ["last", *(path.name for path in reversed(runs))] if runs else []


def make_script(shell: str) -> str:
    """tyro's script for all verbs, studies and built-in workloads in one parser."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        tyro.cli(
            make_full_parser(),
            args=["--tyro-print-completion", shell],
            prog="scalelab",
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
        )
    script = text.getvalue()
    for new, field_flag in FIELD_FLAGS.items():
        script = re.sub(rf"{field_flag}(?![\w-])", new, script)
    if shell == "zsh":
        script = script.rstrip().removesuffix('_tyro_scalelab "$@"')
    return f"{script.rstrip()}\n{WRAPPERS[shell]}"


def make_full_parser() -> Any:
    """Every command as one union of subcommands; a study offers the options of all built-in workloads."""
    from scalelab.answers.train import TrainStudy
    from scalelab.cli.study_flags import is_training, make_command_class
    from scalelab.studies.catalogue import STUDIES, load_study

    studies = [
        Annotated[
            make_command_class(kind, make_all_options() if is_training(kind) else None, "…"), tyro.conf.subcommand(name)
        ]
        for name, kind in {name: load_study(name) for name in STUDIES}.items()
    ]
    run = dataclasses.make_dataclass("Run", [("study", Union[tuple(studies)])])  # noqa: UP007
    verbs = {
        "run": run,
        "train": make_command_class(TrainStudy, make_all_options(), "…"),
        "collectives": make_command_class(load_study("collectives"), None, ""),
        "quantize": make_command_class(load_study("quantize"), make_all_options(), "…"),
        "data": make_data_class(),
    } | {name: getattr(importlib.import_module(VERBS[name][0]), kind) for name, kind in FLAG_CLASSES.items()}
    return Union[tuple(Annotated[verbs[name], tyro.conf.subcommand(name)] for name in VERBS)]  # noqa: UP007


def make_data_class() -> type[Any]:
    kinds: dict[str, type[Any]] = importlib.import_module(VERBS["data"][0]).FLAGS
    commands = tuple(Annotated[kind, tyro.conf.subcommand(name)] for name, kind in kinds.items())
    return dataclasses.make_dataclass("Data", [("command", Union[commands])])  # noqa: UP007


def make_all_options() -> type[Any]:
    """The options of every built-in workload in one class; a name that two share appears once, with all its values."""
    from scalelab.workloads.catalogue import BUILT_IN

    found: dict[str, tuple[str, Any, Any]] = {}
    for kind in BUILT_IN.values():
        hints = get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            hint = hints[field.name]
            if field.name in found:
                hint = join_choices(found[field.name][1], hint)
            found[field.name] = (field.name, hint, field.default)
    return dataclasses.make_dataclass("AllOptions", found.values())


def join_choices(before: Any, now: Any) -> Any:
    """The values that either of two options of the same name takes."""
    if get_origin(before) is Literal and get_origin(now) is Literal:
        return Literal[tuple(dict.fromkeys((*get_args(before), *get_args(now))))]
    return now

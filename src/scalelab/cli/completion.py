"""`scalelab completion bash|zsh|fish`: the completion script of a shell."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from scalelab.answers.train import TrainStudy
from scalelab.cli.app import VERBS
from scalelab.cli.flags import FIELD_FLAGS, parse_flags
from scalelab.cli.study_flags import is_training, make_command_class
from scalelab.studies.catalogue import STUDIES, load_study
from scalelab.workloads.catalogue import BUILT_IN

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


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Print the completion script of a shell. For bash: source <(scalelab completion bash)"""

    shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]


def main(args: Sequence[str]) -> int:
    shell = parse_flags(Completion, args, "completion").shell
    print(make_script(shell))  # noqa: T201
    return 0


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
    return script


def make_full_parser() -> Any:
    """Every command as one union of subcommands; a study offers the options of all built-in workloads."""
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

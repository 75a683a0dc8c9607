"""A workload's options as flags: declared ones for built-in workloads, those of `build` for the user's own."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import typing
from collections.abc import Sequence
from typing import Any

from scalelab.checks import flag
from scalelab.errors import UsageError
from scalelab.records.trial import Option
from scalelab.workloads.catalogue import find_workload
from scalelab.workloads.source import OwnWorkload


def find_flag_value(args: Sequence[str], wanted: str) -> str | None:
    """The value of a flag before the flags are parsed: which others there are depends on it."""
    value = None
    for index, argument in enumerate(args):
        if argument == wanted and index + 1 < len(args):
            value = args[index + 1]
        elif argument.startswith(f"{wanted}="):
            value = argument.partition("=")[2]
    return value


def make_options_class(workload: str) -> tuple[type[Any], bool]:
    """A dataclass whose fields are the workload's options, and whether it takes any others too."""
    found = find_workload(workload)
    if not isinstance(found, OwnWorkload):
        return found, False
    fields: list[Any] = []
    for option in found.options:
        if option.is_required:
            fields.append((option.name, option.kind))
        elif option.default is None:
            fields.append((option.name, option.kind | None, None))
        else:
            fields.append((option.name, option.kind, option.default))
    made = dataclasses.make_dataclass("OwnOptions", fields, frozen=True, kw_only=True)
    made.__doc__ = f"Parameters of {found.label}."
    return made, found.takes_any_option


ROUTED = ("lr", "weight_decay")
"""Flags of every study that a parameter of `build` may be called too: then the value is that parameter's."""


def check_names(options_class: type[Any], taken: Sequence[str], workload: str) -> None:
    """Refuse a parameter of `build` that a flag of the study is called by."""
    for field in dataclasses.fields(options_class):
        if field.name in taken and field.name not in ROUTED:
            clash = f"its parameter {field.name!r} would be {flag(field.name)}, which is a flag of the study"
            raise UsageError(f"--workload {workload}: {clash}: rename it")


def explain_unknown_flag(unknown: str, command: type[Any], help_command: str) -> str:
    """What is wrong with a flag that nothing takes, and which one may have been meant."""
    known = [flag(name) for name in list_fields(command)]
    close = difflib.get_close_matches(unknown, known, n=1)
    guess = f" Did you mean {close[0]}?" if close else ""
    return f"unknown option {unknown}.{guess} See {help_command}"


def list_fields(kind: Any) -> list[str]:
    """The names of all fields of a dataclass and of the dataclasses in it."""
    names: list[str] = []
    for name, hint in typing.get_type_hints(kind).items():
        if typing.get_origin(hint) is not typing.ClassVar:
            names += list_fields(hint) if dataclasses.is_dataclass(hint) else [name]
    return names


def read_options(parsed: Any, extra: Sequence[str]) -> dict[str, Option]:
    """The options that a trial carries: what was parsed, and free `--name value` pairs for `**options`."""
    options = {field.name: getattr(parsed, field.name) for field in dataclasses.fields(parsed)}
    options = {name: value for name, value in options.items() if value is not None}
    rest = list(extra)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        if not name.startswith("--") or not (equals or rest):
            raise UsageError(f"{argument} is not a flag with a value: options of your build() are --name value")
        options[name.removeprefix("--").replace("-", "_")] = _read_literal(value if equals else rest.pop(0))
    return options


def _read_literal(text: str) -> Option:
    """A number or a truth where the text is one; otherwise the text."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, bool | int | float | str) else text

"""Flags from dataclasses: how every verb reads its arguments."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

from scalelab.checks import FLAGS, flag
from scalelab.cli.project import add_defaults, describe_defaults
from scalelab.errors import UsageError

T = TypeVar("T")
RunsDir = Annotated[Path, tyro.conf.arg(name="runs-dir", help="Directory of the runs.")]


def list_values(read: Callable[[str], Any], metavar: str) -> Any:
    """For a flag of any number of values: with a plain `tuple` as its type, tyro does not load typeguard."""
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar=metavar,
        instance_from_str=lambda words: tuple(map(read, words)),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda values: list(map(str, values)),
    )


if TYPE_CHECKING:
    Integers = tuple[int, ...]
    Patterns = tuple[str, ...]
    Recordings = tuple[Path, ...]
else:
    Integers = Annotated[tuple, list_values(int, "N…")]
    Patterns = Annotated[tuple, list_values(str, "REGEX…")]
    Recordings = Annotated[tuple, list_values(Path, "DIR|FILE|RUN…")]

FIELD_FLAGS = {f"--{new}": f"--{field.replace('_', '-')}" for field, new in FLAGS.items()}
"""From a flag with torch's name to the one that tyro makes from the field."""


MEANT = {"full_shard": "fsdp-full", "shard_grad_op": "fsdp-grad-op", "no_shard": "fsdp-none"}
MEANT |= {"zero3": "fsdp-full", "zero2": "fsdp-grad-op", "fully_shard": "fsdp2", "none": "single", "fp32": "float32"}
MEANT |= {"bf16": "bfloat16", "fp16": "float16", "half": "float16"}
"""What torch, DeepSpeed and people call some choices."""


def parse_flags(kind: type[T], args: Sequence[str], verb: str) -> T:
    """The dataclass of a verb from its arguments; `--help` prints and exits."""
    parsed, unknown = parse_known_flags(kind, add_defaults(kind, args), verb)
    if unknown:
        raise UsageError(f"unknown option {unknown[0]}: see scalelab {verb} --help")
    return parsed


def parse_known_flags(
    kind: type[T], args: Sequence[str], verb: str, description: str | None = None
) -> tuple[T, list[str]]:
    """The same, and the arguments that no field takes."""
    if {"-h", "--help", "--help-all"} & set(args):
        from scalelab.cli.help import print_help

        told = (inspect.getdoc(kind) or "") if description is None else description
        print_help(kind, verb, told, shows_all="--help-all" in args, given=describe_defaults(kind, args))
        raise SystemExit(0)
    parse: Any = tyro.cli
    with raising_errors(args, verb):
        parsed, unknown = parse(
            kind,
            args=list(rename_flags(args)),
            prog=f"scalelab {verb}",
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
            return_unknown_args=True,
            add_help=False,
        )
    return parsed, unknown


@contextlib.contextmanager
def raising_errors(args: Sequence[str], verb: str) -> Iterator[None]:
    """Raise what tyro rejects as a `UsageError` of one line.

    tyro has no public hook for this (1.0.16): its own is private and may change in any release. This is the only place
    that knows it, with `describe_error` below; without it tyro prints its own text and exits with 2 as well.
    """
    try:
        from tyro._errors import on_parse_error
    except ImportError:
        yield
        return

    def refuse(event: Any) -> None:
        raise UsageError(f"{describe_error(event, args)}: see scalelab {verb} --help")

    with on_parse_error(refuse):
        yield


def rename_flags(args: Sequence[str]) -> list[str]:
    """Arguments as tyro knows them, from torch's names; the names of 0.1 still work and print a note."""
    renamed = []
    for argument in args:
        name, equals, value = argument.partition("=")
        old = name.replace("_", "-") if name.startswith("--") else name
        if old in FIELD_FLAGS.values():
            new = next(new for new, known in FIELD_FLAGS.items() if known == old)
            print(f"note: {name} is now called {new}", file=sys.stderr)  # noqa: T201
        renamed.append(f"{FIELD_FLAGS.get(old, name)}{equals}{value}")
    return renamed


def describe_error(event: Any, args: Sequence[str]) -> str:
    """What is wrong with the arguments, from tyro's event."""
    if hasattr(event, "missing_arguments"):
        missing = ", ".join(name_argument(one.arg) for one in event.missing_arguments)
        return f"{missing} {'are' if ',' in missing else 'is'} required"
    if hasattr(event, "choices"):
        name = name_argument(event.argument)
        return (
            f"{name} must be one of {', '.join(event.choices)}, got {event.value!r}{guess(event.value, event.choices)}"
        )
    if hasattr(event, "message") and event.argument is not None:
        name, kind = name_argument(event.argument), event.argument.lowered.metavar
        return f"{name} must be {kind}, got {' '.join(find_values(args, name)) or 'nothing'}"
    if hasattr(event, "argument"):
        return f"{name_argument(event.argument)} needs a value"
    return f"the arguments do not fit ({type(event).__name__})"


def guess(value: str, choices: Sequence[str]) -> str:
    """Choices that begin like the value, or that torch and DeepSpeed call so."""
    meant = MEANT.get(value.lower().replace("-", "_"))
    close = [one for one in choices if one == meant] or [one for one in choices if one.startswith(value.lower())]
    return f" (did you mean {', '.join(close)}?)" if close else ""


def find_values(args: Sequence[str], name: str) -> list[str]:
    """What was given to a flag, in either of its names."""
    names = {name, FIELD_FLAGS.get(name, name)}
    for index, argument in enumerate(args):
        given, equals, value = argument.partition("=")
        if given in names:
            rest = [value] if equals else args[index + 1 :]
            end = next((number for number, one in enumerate(rest) if one.startswith("--")), len(rest))
            return list(rest[:end])
    return []


def name_argument(argument: Any) -> str:
    """An argument as the user types it: its flag, or the name of its place."""
    lowered = argument.lowered
    if argument.is_positional():
        return str(lowered.metavar)
    spelled = str(lowered.name_or_flags[-1])
    return flag(spelled.removeprefix("--").replace("-", "_"))

"""Flags from dataclasses: how every verb reads its arguments, and the defaults of a project in `scalelab.toml`.

The file in the working directory counts, or the next one above it up to the root of the repository. A flag beats it.
Its values become arguments in front of those that were typed, so a run's command holds them and can be repeated
elsewhere. Paths in it are relative to it.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import os
import sys
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

from scalelab.checks import FLAGS, flag
from scalelab.errors import UnknownName, UsageError
from scalelab.records.launchers import LAUNCHERS
from scalelab.records.settings import DEVICES, Dtype
from scalelab.records.strategies import STRATEGIES

FILE = "scalelab.toml"
NAMES_OF_BATCH = ("batch-size-per-rank", "global-batch-size", "batch-per-rank", "global-batch", "batch-size", "batch")
OPTIONS = "options"
OF_WORKLOAD = ("workload", "strategy", "dtype", OPTIONS)
"""Keys that do not apply to a script."""
EVERYWHERE = ("runs-dir", "site")
"""Keys that do not only apply to studies and training runs."""


def is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_ranks(value: Any) -> bool:
    return is_number(value) or (isinstance(value, list) and value != [] and all(map(is_number, value)))


def is_table(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, bool | int | float | str) for one in value.values())


def one_of(choices: Sequence[str]) -> Callable[[Any], bool]:
    return lambda value: value in choices


@dataclass(frozen=True, kw_only=True)
class Key:
    """What a key of the file may be."""

    field: str
    """The field of its flag."""
    wanted: str
    """What it must be, in words."""
    is_valid: Callable[[Any], bool] = is_text
    is_path: bool = False


def choose(field: str, choices: Sequence[str]) -> Key:
    return Key(field=field, wanted=f"one of {', '.join(choices)}", is_valid=one_of(choices))


KEYS = {
    "workload": Key(field="workload", wanted="text, such as 'my_model.py:build'"),
    "ranks": Key(field="ranks", wanted="a number or a list of numbers", is_valid=is_ranks),
    "strategy": choose("strategy", list(STRATEGIES)),
    "batch-size-per-rank": Key(field="batch_per_rank", wanted="a number", is_valid=is_number),
    "global-batch-size": Key(field="global_batch", wanted="a number", is_valid=is_number),
    "launcher": choose("launcher", list(LAUNCHERS)),
    "site": Key(field="site_file", wanted="text, the path of a site file", is_path=True),
    "device": choose("device", ["auto", *DEVICES]),
    "dtype": choose("dtype", typing.get_args(Dtype)),
    "threads-per-rank": Key(field="threads_per_rank", wanted="a number", is_valid=is_number),
    "memory-limit": Key(field="memory_limit", wanted="text, such as '2GB'"),
    "timeout": Key(field="timeout", wanted="text, such as '10min'"),
    "seed": Key(field="seed", wanted="a number", is_valid=is_number),
    "runs-dir": Key(field="runs_dir", wanted="text, a directory", is_path=True),
    OPTIONS: Key(field=OPTIONS, wanted="a table of the workload's options", is_valid=is_table),
}
"""What the file may say; a study, or a command, takes what it has a flag for."""


@dataclass(frozen=True, kw_only=True)
class Project:
    """A file, and what it says."""

    file: Path
    values: Mapping[str, Any]

    @property
    def label(self) -> str:
        """The file as seen from here."""
        return os.path.relpath(self.file)

    def describe(self, kind: type[Any], args: Sequence[str]) -> dict[str, str]:
        """The defaults of a command's flags that are among its arguments, for its help."""
        flags = [one for _, words in self.list_words(kind) for one in split_flags(words)]
        given = {tuple(one) for one in split_flags(args)}
        return {one[0]: " ".join(one[1:]) for one in flags if tuple(one) in given}

    def list_words(self, kind: type[Any]) -> Iterator[tuple[str, list[str]]]:
        """The flags of a command that the file sets, by key."""
        hints = read_fields(kind)
        is_study = "study" in {one.name for one in fields(kind)} and "reproduce" not in hints
        for key, value in self.values.items():
            applies = key in EVERYWHERE or (is_study and (key != "ranks" or "workload" in hints))
            if key == OPTIONS and is_study and "workload" in hints:
                yield key, [word for name, one in value.items() for word in make_option(name, one)]
            elif applies and KEYS[key].field in hints:
                name = flag(KEYS[key].field) if key != "site" else "--site"
                yield key, [name, *self._make_values(key, value, hints[KEYS[key].field])]

    def _make_values(self, key: str, value: Any, hint: Any) -> list[str]:
        """The value as it would be typed here: a study of one number of ranks gets the largest."""
        if key == "ranks":
            numbers = value if isinstance(value, list) else [value]
            return [str(one) for one in (numbers if typing.get_origin(hint) is tuple else [max(numbers)])]
        if KEYS[key].is_path:
            return [os.path.relpath(self.file.parent / value)]
        if key == "workload" and value.rpartition(":")[0].endswith(".py"):
            return [os.path.relpath(self.file.parent / value)]
        return [str(value)]


def make_option(name: str, value: bool | float | str) -> list[str]:
    """An option of the workload as a flag."""
    plain = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{plain}" if value else f"--no-{plain}"]
    return [f"--{plain}", str(value)]


def read_fields(kind: Any) -> dict[str, Any]:
    """The types of all fields of a dataclass and of the dataclasses in it."""
    found: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(kind).items():
        if typing.get_origin(hint) is not typing.ClassVar:
            found |= read_fields(hint) if is_dataclass(hint) else {name: hint}
    return found


def find_project() -> Project | None:
    """The nearest file from here upwards, up to the root of the repository; None: there is none."""
    here = Path.cwd()
    for directory in (here, *here.parents):
        if (directory / FILE).is_file():
            return read_project(directory / FILE)
        if (directory / ".git").exists():
            return None
    return None


def read_project(file: Path) -> Project:
    """The file, checked: what is wrong in it is named with its line's key."""
    label = os.path.relpath(file)
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{label} cannot be read: {error}") from error
    named = {key.replace("_", "-"): value for key, value in values.items()}
    for key, value in named.items():
        if key not in KEYS:
            raise UnknownName(f"key in {label}:", key, KEYS)
        if not KEYS[key].is_valid(value):
            raise UsageError(f"{label}: {key} must be {KEYS[key].wanted}, got {value!r}")
    if {"batch-size-per-rank", "global-batch-size"} <= named.keys():
        raise UsageError(f"{label} has both batch-size-per-rank and global-batch-size: leave out one of them")
    return Project(file=file, values=named)


def add_defaults(kind: type[Any], args: Sequence[str], *, is_script: bool = False, is_told: bool = False) -> list[str]:
    """The arguments with those of the project's file in front, where the same was not typed; `is_told` prints them."""
    project = find_project()
    if project is None:
        return list(args)
    typed = {word.partition("=")[0].removeprefix("--").replace("_", "-") for word in args if word.startswith("--")}
    if typed & set(NAMES_OF_BATCH):
        typed |= set(NAMES_OF_BATCH)
    if "workload" in typed:
        typed.add(OPTIONS)
    left_out = typed | set(OF_WORKLOAD if is_script else ())
    found = [words for key, words in project.list_words(kind) if key not in left_out]
    added = [word for words in found for one in split_flags(words) if not is_typed(one[0], typed) for word in one]
    if added and is_told:
        print(f"note: from {project.label}: {' '.join(added)}", file=sys.stderr)  # noqa: T201
    return [*added, *args]


def describe_defaults(kind: type[Any], args: Sequence[str]) -> dict[str, str]:
    """What `--help` says about the flags that the file sets: the value and the file."""
    project = find_project()
    found = {} if project is None else project.describe(kind, args)
    return {name: f"(default: {value}, from {project.label})" for name, value in found.items() if project}


def split_flags(words: Sequence[str]) -> list[list[str]]:
    """Arguments by flag, each with its values."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not found:
            found.append([])
        found[-1].append(word)
    return found


def is_typed(name: str, typed: set[str]) -> bool:
    """Whether a flag, or the one that switches it off or on, was typed."""
    plain = name.removeprefix("--")
    return bool({plain, plain.removeprefix("no-"), f"no-{plain}"} & typed)


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


MEANT_FLAGS = {
    "ranks": ("nproc", "nproc-per-node", "np", "world-size", "num-processes", "gpus", "num-gpus", "devices"),
    "workload": ("model", "net", "network", "arch", "architecture"),
    "steps": ("iterations", "iters", "num-iterations", "max-steps", "epochs", "num-epochs"),
    "rounds": ("repeats", "repetitions", "trials", "launches", "num-runs", "runs"),
    "lr": ("learning-rate",),
    "dtype": ("precision", "amp", "bf16", "fp16", "mixed-precision"),
    "threads_per_rank": ("threads", "num-threads", "cpus-per-task", "cores"),
    "micro_batch": ("accumulation", "gradient-accumulation", "gradient-accumulation-steps", "grad-accum"),
    "find_unused_parameters": ("unused-parameters", "find-unused"),
    "html": ("output", "out", "report"),
}
"""What torchrun, other tools and people call flags, by field."""


def suggest_flag(unknown: str, names: Sequence[str]) -> str:
    """The flag that an unknown one means, else the one that is spelled most like it; nothing if neither is there."""
    plain = unknown.removeprefix("--").replace("_", "-").lower()
    meant = [name for name in names if plain in MEANT_FLAGS.get(name, ())]
    close = difflib.get_close_matches(plain, [flag(name).removeprefix("--") for name in names], n=1)
    found = [flag(name) for name in meant] or [f"--{name}" for name in close]
    is_new = bool(found) and found[0] != unknown  # a name without dashes, such as RUN, is not a flag
    return f" Did you mean {found[0]}?" if is_new and unknown.startswith("--") else ""


def parse_flags(kind: type[T], args: Sequence[str], verb: str) -> T:
    """The dataclass of a verb from its arguments; `--help` prints and exits."""
    parsed, unknown = parse_known_flags(kind, add_defaults(kind, args), verb)
    if unknown:
        meant = suggest_flag(unknown[0], list(read_fields(kind)))
        raise UsageError(f"unknown option {unknown[0]}.{meant} See scalelab {verb} --help")
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
        name, choices = name_argument(event.argument), [one for one in event.choices if one != "None"]
        known = sorted(choices) if "None" in event.choices else choices  # of several types: in no order
        return f"{name} must be one of {', '.join(known)}, got {event.value!r}{guess(event.value, known)}"
    if hasattr(event, "message") and event.argument is not None:
        name, values = name_argument(event.argument), find_values(args, name_argument(event.argument))
        spaced = f": write {name} {values[0].replace(',', ' ')}" if len(values) == 1 and "," in values[0] else ""
        return f"{name} must be {describe_kind(event.argument)}, got {' '.join(values) or 'nothing'}{spaced}"
    if hasattr(event, "argument"):
        return f"{name_argument(event.argument)} needs a value"
    return f"the arguments do not fit ({type(event).__name__})"


def describe_kind(argument: Any) -> str:
    """What the value of a flag must be, in words where tyro has a type's name."""
    metavar = str(argument.lowered.metavar)
    words = {"INT": "an integer", "FLOAT": "a number", "[INT [INT ...]]": "integers separated by spaces"}
    return words.get(metavar, metavar)


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
        return str(argument.field.extern_name).upper()
    spelled = str(lowered.name_or_flags[-1])
    return flag(spelled.removeprefix("--").replace("-", "_"))

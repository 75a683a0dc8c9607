"""The help of a command, from the dataclass that its flags are read into.

A field is a flag, and the text below the field is its help. A nested record is a group with a title. `--help` shows the
command's own flags and the few of its groups that most people need; `--help-all` shows every flag.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import tyro

from scalelab.checks import flag

MOST_COLUMNS = 100
INDENT = 30
"""Columns before the text of a flag."""
LONGEST_CHOICES = 34
"""Most letters of a list of choices on the line of its flag."""
FEW_OPTIONS = 4
"""Most options of a workload that `--help` describes; more are only named."""
FEW_FLAGS = 22
"""A command with no more flags than this has them all in `--help`."""
COMMON = frozenset(
    ["workload", "device", "dtype", "rounds", "steps", "launcher", "quick", "dry_run", "html", "json", "full"]
)
"""Fields of groups that `--help` shows too."""
COMMON_OF = {
    "ChangeFlags": ("link", "cores", "batch"),
    "BestFlags": ("best", "memory"),
    "ModelFlags": ("model", "parameters", "layers"),
}
"""The same, of one group only."""
COMMON_OF_VERB = {
    "run max-batch": ("memory_limit",),
    "run straggler": ("delay", "delay_rank"),
}
"""The same, where a study is about one of the shared flags."""
TITLES = {
    "ChangeFlags": "What if",
    "BestFlags": "Fastest settings",
    "TableFlags": "Columns of the table",
    "ModelFlags": "Model",
    "DeviceFlags": "Device",
    "LayoutFlags": "Layout",
    "Reading": "Traces",
    "Job": "Model and device",
    "StepShape": "Training step",
    "Optimization": "Optimizer",
    "Spreading": "Strategy options",
    "Perturbation": "Injected delay",
    "Sampling": "Sampling",
    "TrainingRun": "Training run",
    "Pace": "Sampling",
    "Execution": "Run",
    "Submission": "Batch job",
    "Site": "Batch job resources",
    "Output": "Output",
    "Again": "Measure both again",
}
TAILS = {"meter": ("-- COMMAND [ARGUMENTS]",)}
"""What follows the flags of a verb."""
WITHOUT = {
    "augment": "Train on the images as they are, without random crops and flips.",
    "batch_norm": "Skip the rows about buffers and batch norm.",
    "broadcast_buffers": "ddp: keep each rank's own buffers, such as batch-norm statistics, instead of rank 0's.",
    "cold": "Skip the passes that read from disk.",
    "control": "Skip the control, a second measurement of the reference that shows the noise.",
    "exchange": "Skip the all-reduce benchmark of every link.",
    "measure": "Skip the timing of shuffled reads before and after.",
    "overlap_gradients": "Reduce gradients after backward instead of beside it.",
    "reshard_after_forward": "fsdp2 and meshes: keep gathered parameters between forward and backward.",
}
"""What the flag does that switches off a field which is on by default."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """A field as the help lists it."""

    field: str
    invocation: str
    text: str
    group: str = ""
    """The title of its group; empty: it is the command's own."""
    is_positional: bool = False
    is_common: bool = True
    """Whether `--help` shows it."""
    is_of_workload: bool = False
    brief: str = ""
    """The first sentence of the text, for `--help` of a command with many flags; empty: the whole text."""


def print_help(
    kind: type[Any], verb: str, description: str, *, shows_all: bool, given: Mapping[str, str] | None = None
) -> None:
    """Print the usage, what the command does, and its flags by group."""
    print(render_help(kind, verb, description, shows_all=shows_all, given=given))  # noqa: T201


def render_help(
    kind: type[Any], verb: str, description: str, *, shows_all: bool, given: Mapping[str, str] | None = None
) -> str:
    """The whole help as text, as wide as the terminal up to 100 columns; `given` are defaults of the project."""
    width = min(MOST_COLUMNS, shutil.get_terminal_size((MOST_COLUMNS, 40)).columns)
    flags = [put_default(one, given or {}) for one in list_flags(kind)]
    flags = [replace(one, is_common=True) if one.field in COMMON_OF_VERB.get(verb, ()) else one for one in flags]
    positional = [one for one in flags if one.is_positional]
    shown = flags if shows_all or len(flags) <= FEW_FLAGS else [one for one in flags if one.is_common]
    num_hidden = len(flags) - len(shown)
    if num_hidden:
        shown = [replace(one, text=one.brief or one.text) if one.group else one for one in shown]
    usage = " ".join(
        ["usage: scalelab", verb, *(one.invocation for one in positional), "[OPTIONS]", *TAILS.get(verb, ())]
    )
    lines = [usage, "", *(line for part in description.split("\n\n") for line in wrap(part, width))]
    groups = dict.fromkeys(one.group for one in shown if not one.is_positional)
    listed = [("Arguments", positional)] if positional else []
    listed += [(group or "Options", [o for o in shown if o.group == group and not o.is_positional]) for group in groups]
    for title, some in listed:
        is_long = num_hidden > 0 and len(some) > FEW_OPTIONS and all(one.is_of_workload for one in some)
        listed_flags = render_names(some, width) if is_long else [line for o in some for line in render_flag(o, width)]
        lines += ["", f"{title}:", *listed_flags]
    if num_hidden:
        lines += ["", f"{num_hidden} more options: scalelab {verb} --help-all"]
    return "\n".join(lines)


def put_default(one: Flag, given: Mapping[str, str]) -> Flag:
    """The flag with the default of the project's file instead of its own; `--help` shows it."""
    default = given.get(one.invocation.partition(" ")[0])
    if default is None:
        return one
    full, brief = (f"{text.partition(' (default: ')[0]} {default}" for text in (one.text, one.brief or one.text))
    return replace(one, text=full, brief=brief, is_common=True)


def render_names(flags: Sequence[Flag], width: int) -> list[str]:
    """The flags of a workload without their texts, on as few lines as they need."""
    words = ", ".join(one.invocation.replace(" ", "\xa0") for one in flags)
    lines = textwrap.wrap(words, width - 2, break_on_hyphens=False, break_long_words=False)
    return [f"  {line}".replace("\xa0", " ") for line in lines]


def render_flag(one: Flag, width: int) -> list[str]:
    """The flag and, beside it or below, its text."""
    head = f"  {one.invocation}"
    lines = [f"{'':{INDENT}}{line}" for line in wrap(one.text, width - INDENT)]
    if lines and len(head) < INDENT - 1:
        return [f"{head:<{INDENT}}{lines[0].strip()}", *lines[1:]]
    return [head, *lines]


def wrap(text: str, width: int) -> list[str]:
    """Lines of whole words; a flag is never broken at its hyphens."""
    return textwrap.wrap(" ".join(text.split()), max(width, 40), break_on_hyphens=False, break_long_words=False)


def list_flags(kind: type[Any], group: str = "", default: Any = None) -> list[Flag]:
    """The flags of a dataclass and of the records in it, in the order of the fields; its own come first."""
    own: list[Flag] = []
    nested: list[Flag] = []
    texts, hints = read_field_texts(kind), read_hints(kind)
    for one in dataclasses.fields(kind):
        hint, marks = split_hint(hints[one.name])
        value = getattr(default, one.name) if default is not None else read_default(one)
        if tyro.conf.Suppress in marks:
            continue
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            some = list_flags(hint, read_title(hint, marks, group), None if value is MISSING else value)
            is_own = one.name == "options"  # the workload's, which is why it was chosen
            shown = COMMON_OF.get(hint.__name__, ())
            nested += [
                replace(o, is_common=o.is_common or is_own or o.field in shown, is_of_workload=is_own) for o in some
            ]
        else:
            own.append(make_flag(one.name, hint, marks, value, texts.get(one.name, ""), group))
    return [*own, *nested]


MISSING = dataclasses.MISSING


def read_default(one: dataclasses.Field[Any]) -> Any:
    return one.default_factory() if one.default_factory is not MISSING else one.default


def read_hints(kind: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def split_hint(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without what is annotated to it, and that."""
    marks: tuple[Any, ...] = ()
    while hasattr(hint, "__metadata__"):
        marks, hint = (*marks, *hint.__metadata__), hint.__origin__
    return hint, marks


def read_setting(marks: Sequence[Any], name: str) -> Any:
    """What `tyro.conf.arg` says about a field."""
    return next((value for mark in marks if (value := getattr(mark, name, None)) is not None), None)


def read_title(kind: type[Any], marks: Sequence[Any], group: str) -> str:
    """The title of a group: what is annotated, a name of the table, or the words of the class's name."""
    given = read_setting(marks, "help")
    if given is not None:
        return str(given)
    return TITLES.get(kind.__name__) or group or re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind.__name__).capitalize()


def make_flag(name: str, hint: Any, marks: Sequence[Any], value: Any, text: str, group: str) -> Flag:
    given = read_setting(marks, "name")
    spelled = f"--{given}" if given else flag(name)
    is_positional = tyro.conf.Positional in marks
    is_common = not group or name in COMMON
    metavar = read_setting(marks, "metavar") or (name.upper() if is_positional else describe_type(hint))
    told = " ".join((read_setting(marks, "help") or text).split()).replace("None: ", "Default: ")
    if is_positional:
        words = metavar if value is MISSING else f"[{metavar}]"
        return Flag(field=name, invocation=words, text=told, is_positional=True)
    if value is True:
        text = WITHOUT.get(name, f"Turn off: {told}")
        return Flag(field=name, invocation=f"--no-{spelled[2:]}", text=text, group=group, is_common=is_common)
    rest = [describe_default(value)]
    if len(metavar) > LONGEST_CHOICES:
        choices, several = metavar.removesuffix(" …"), metavar.endswith(" …")
        rest = [f"{'Any' if several else 'One'} of {choices.strip('{}').replace(',', ', ')}.", *rest]
        metavar = f"{name_value(name)}{' …' if several else ''}"
    full, brief = (" ".join(filter(None, (words, *rest))) for words in (told, take_first_sentence(told)))
    words = f"{spelled} {metavar}".strip()
    return Flag(field=name, invocation=words, text=full, brief=brief, group=group, is_common=is_common)


def take_first_sentence(text: str) -> str:
    first, stop, _ = text.partition(". ")
    return f"{first}." if stop else text


def name_value(name: str) -> str:
    return name.rpartition("_")[2].upper()


def describe_type(hint: Any) -> str:
    """What stands for a value of this type: INT, a choice, several of them."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        parts = [part for part in typing.get_args(hint) if part is not type(None)]
        return "|".join(dict.fromkeys(describe_type(split_hint(part)[0]) for part in parts))
    if typing.get_origin(hint) is Literal:
        return f"{{{','.join(map(str, typing.get_args(hint)))}}}"
    if typing.get_origin(hint) is tuple:
        return f"{describe_type(split_hint(typing.get_args(hint)[0])[0])} …"
    if hint is bool:
        return ""
    return {int: "INT", float: "FLOAT"}.get(hint, "PATH" if getattr(hint, "__name__", "") == "Path" else "TEXT")


def describe_default(value: Any) -> str:
    """The default in brackets; what is off, empty or explained in words has none."""
    if value is None or value is MISSING or value is False or value in ("", ()):
        return "(required)" if value is MISSING else ""
    if isinstance(value, float) and abs(value) >= 1e6:
        value = f"{value:g}"
    return f"(default: {' '.join(map(str, value)) if isinstance(value, tuple) else value})"


def read_field_texts(kind: type[Any]) -> dict[str, str]:
    """The text below every field of a class and of the classes that it is made from."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if dataclasses.is_dataclass(one):
            found |= _read_own_texts(one)
    return found


@functools.cache
def _read_own_texts(kind: type[Any]) -> dict[str, str]:
    """Read once: Python parses the whole module to find a class, and most classes are part of every study."""
    return dict(_find_own_texts(kind))


def _find_own_texts(kind: type[Any]) -> Iterator[tuple[str, str]]:
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError, SyntaxError, ValueError):  # a class that was made while the program runs
        return
    if not isinstance(tree, ast.ClassDef):
        return
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, text

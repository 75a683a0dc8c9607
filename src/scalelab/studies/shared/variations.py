"""Options of a workload as a person types them to vary them, each value read as the option's own type.

dim=256,depth=2             one set of options
tgt_length=20,50            one option, several values
features+d_model=256,512    options that always get the same value
"""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from scalelab.checks import read_flag
from scalelab.errors import UnknownName, UsageError
from scalelab.records.trial import Option
from scalelab.studies.shared.job import Job
from scalelab.workloads.catalogue import find_workload
from scalelab.workloads.source import OwnWorkload


@dataclass(frozen=True, kw_only=True)
class Variation:
    """One dimension of a workload, and the values that it is given."""

    names: tuple[str, ...]
    """The options that get each value."""
    values: tuple[Option, ...]

    @property
    def label(self) -> str:
        """How tables call the dimension."""
        return " = ".join(self.names)

    def assign(self, value: Option) -> dict[str, Option]:
        """The options that give the dimension this value."""
        return dict.fromkeys(self.names, value)


def read_variations(field: str, texts: Sequence[str], workload: str) -> tuple[Variation, ...]:
    """Every variation of a study's field; what cannot be read is refused with the flag, the text and the reason."""
    found = tuple(read_flag(field, text, lambda words: parse_variation(words, workload)) for text in texts)
    for variation in found:
        if sum(variation.names == other.names for other in found) > 1:
            raise UsageError(f"--{field} has {'+'.join(variation.names)} twice: give all its values at once")
    return found


def parse_variation(text: str, workload: str) -> Variation:
    """`a=1,2` or `a+b=1,2`."""
    left, equals, right = text.partition("=")
    names = tuple(_clean_name(name) for name in left.split("+"))
    values = [value.strip() for value in right.split(",")]
    if not equals or not all(names) or not all(values):
        raise UsageError(f"{text!r} is not an option with values: use a form such as dim=256,512 or a+b=256,512")
    read = [tuple(_read_option(name, value, workload, text) for name in names) for value in values]
    if any(len(set(map(repr, same))) > 1 for same in read):
        raise UsageError(f"{text!r} joins options of different kinds: vary them one by one")
    found = tuple(same[0] for same in read)
    if len(set(found)) < len(found):
        raise UsageError(f"{text!r} has a value twice: give each once")
    return Variation(names=names, values=found)


def read_base(names: Iterable[str], job: Job) -> dict[str, Option | None]:
    """What the job itself gives to each of the options; None: nothing, or unknown."""
    if job.built_in is not None:
        return {name: getattr(job.built_in, name) for name in names}
    found = find_workload(job.workload)
    declared = found.options if isinstance(found, OwnWorkload) else ()
    defaults = {option.name: option.default for option in declared}
    return {name: job.options.get(name, defaults.get(name)) for name in names}


def parse_options(text: str, workload: str) -> dict[str, Option]:
    """`a=1,b=2`: one set of options of a workload."""
    options: dict[str, Option] = {}
    for part in text.split(","):
        left, equals, value = part.partition("=")
        name = _clean_name(left)
        if not equals or not name or not value.strip():
            raise UsageError(f"{text!r} is not a set of options: use a form such as dim=256,depth=2")
        if name in options:
            raise UsageError(f"{text!r} has {name} twice: give it once")
        options[name] = _read_option(name, value.strip(), workload, text)
    return options


def _clean_name(name: str) -> str:
    """Options may be written as flags."""
    return name.strip().removeprefix("--").replace("-", "_")


def _read_option(name: str, value: str, workload: str, text: str) -> Option:
    """A value as the option's type; an unknown option lists the known ones."""
    kinds, takes_any = _list_kinds(workload)
    if name not in kinds:
        if takes_any:
            return read_literal(value)
        raise UsageError(f"{text!r}: {UnknownName(f'option of {workload}', name, kinds)}")
    try:
        read = msgspec.convert(value, kinds[name], strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"{text!r}: {value!r} is not a valid {name} of {workload}: {error}") from None
    if read is None:
        raise UsageError(f"{text!r}: {name} needs a value: leave it out")
    given: Option = read
    return given


def _list_kinds(workload: str) -> tuple[Mapping[str, Any], bool]:
    """The types of a workload's options by name, and whether it takes any others too."""
    found = find_workload(workload)
    if isinstance(found, OwnWorkload):
        return {option.name: option.kind for option in found.options}, found.takes_any_option
    hints = typing.get_type_hints(found, include_extras=True)
    return {name: hints[name] for name in found.__dataclass_fields__}, False


def read_literal(text: str) -> Option:
    """A number or a boolean if the text is one; otherwise the text."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, bool | int | float | str) else text

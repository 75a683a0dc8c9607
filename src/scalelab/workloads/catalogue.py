"""The workloads by name, without torch.

The parent process makes flags of it, checks values before a launch, and estimates how long a study takes. Only ranks
import the code that builds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from scalelab.errors import UnknownName, UsageError
from scalelab.records.trial import Option, from_builtins
from scalelab.workloads.gpt2_options import Gpt2Options
from scalelab.workloads.image_options import LenetOptions, Resnet18Options
from scalelab.workloads.options import MlpOptions, MoeOptions, TransformerOptions, WorkloadOptions
from scalelab.workloads.source import (
    OwnWorkload,
    find_module,
    is_in_library,
    read_library_workload,
    read_own_workload,
)

__all__ = ["BUILT_IN", "WorkloadOptions", "find_workload", "make_options", "resolve_options"]

BUILT_IN: dict[str, type[Any]] = {
    "gpt2": Gpt2Options,
    "lenet": LenetOptions,
    "mlp": MlpOptions,
    "moe": MoeOptions,
    "resnet18": Resnet18Options,
    "transformer": TransformerOptions,
}


def make_options(name: str, options: Mapping[str, Option]) -> WorkloadOptions:
    """The options of a built-in workload, each valid by itself; the others have their defaults."""
    kind = BUILT_IN[name]
    known = [field.name for field in fields(kind)]
    for option in options:
        if option not in known:
            raise UnknownName(f"option of {name}", option, known)
    try:
        made: WorkloadOptions = from_builtins(dict(options), kind)
    except ValueError as error:
        raise UsageError(f"--workload {name}: {error}") from error
    return made


def resolve_options(name: str, options: Mapping[str, Option]) -> dict[str, Option]:
    """The options as a trial carries them, with absolute paths, so a run can be resumed from any directory.

    Those of a user's workload stay as they are: which of them are paths is unknown.
    """
    if name not in BUILT_IN:
        return dict(options)
    given = make_options(name, options)
    resolved = given.resolve()
    names = [field.name for field in fields(given) if getattr(given, field.name) != getattr(resolved, field.name)]
    return {**options, **{found: getattr(resolved, found) for found in names}}


def find_workload(name: str) -> type[Any] | OwnWorkload:
    """The options class of a built-in workload, or what the user's file declares."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if is_in_library(name):
        return read_library_workload(name)
    if ".py" in name or ":" in name or Path(name).is_file() or find_module(name) is not None:
        return read_own_workload(name)
    raise UnknownName("workload", name, BUILT_IN, "Your own: --workload file.py:build; of a library: hf:gpt2")

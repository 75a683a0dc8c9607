"""Everything that a run on disk may be of: studies, trainings, metered loops and recipes."""

from __future__ import annotations

from typing import Any

from scalelab.errors import UnknownName
from scalelab.recipes.reproduce import Reproduce
from scalelab.studies.catalogue import KINDS

EVERY_KIND: dict[str, type[Any]] = KINDS | {Reproduce.name: Reproduce}


def find_kind(name: str) -> type[Any]:
    """The class that a run was made by."""
    if name not in EVERY_KIND:
        raise UnknownName("study", name, EVERY_KIND)
    return EVERY_KIND[name]

"""The studies by name."""

from __future__ import annotations

from typing import Any

from scalelab.errors import UnknownName
from scalelab.studies.strong_scaling import StrongScaling
from scalelab.studies.weak_scaling import WeakScaling

STUDIES: dict[str, type[Any]] = {study.name: study for study in (StrongScaling, WeakScaling)}


def find_study(name: str) -> type[Any]:
    """The class of a study; an unknown name lists the known ones."""
    if name not in STUDIES:
        raise UnknownName("study", name, STUDIES)
    return STUDIES[name]

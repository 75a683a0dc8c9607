"""The studies by name, and the other kinds of runs that are read back like them."""

from __future__ import annotations

from typing import Any

from scalelab.errors import UnknownName
from scalelab.studies.metered import MeteredRun
from scalelab.studies.strong_scaling import StrongScaling
from scalelab.studies.train import Train
from scalelab.studies.weak_scaling import WeakScaling

STUDIES: dict[str, type[Any]] = {study.name: study for study in (StrongScaling, WeakScaling)}
"""What `scalelab run` offers."""

KINDS: dict[str, type[Any]] = STUDIES | {kind.name: kind for kind in (MeteredRun, Train)}
"""Everything that a run on disk may be of."""


def find_runnable(name: str) -> type[Any]:
    """The class of a study that `scalelab run` takes; an unknown name lists the known ones."""
    if name not in STUDIES:
        raise UnknownName("study", name, STUDIES)
    return STUDIES[name]


def find_study(name: str) -> type[Any]:
    """The class that a run was made by."""
    if name not in KINDS:
        raise UnknownName("study", name, KINDS)
    return KINDS[name]

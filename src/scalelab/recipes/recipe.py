"""What a recipe is: the experiments of a published assignment, its numbers, its questions and its checks.

A row is one experiment. It has parts, each a study with exact parameters, and says what it finds in their answers: a
table with ours beside the published one, and a few sentences for every question. A row may read the parts of another
one instead of measuring the same again. A row that cannot be run here has a reason instead, and may still predict.

A check recomputes a published claim from the published numbers alone, so that it holds on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from scalelab.records.trial import Status, TrialResult
from scalelab.report.document import Document, Table
from scalelab.studies.shared.arms import Arm, group_arms
from scalelab.studies.shared.study import Study

Size = Literal["small", "full"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one part of a row gave so far."""

    study: Study
    results: tuple[TrialResult, ...]
    document: Document | None
    """None until the first trial has a result."""

    @cached_property
    def arms(self) -> dict[str, Arm]:
        """By configuration, with warm-up taken off."""
        sampling = getattr(self.study, "sampling", None)
        return group_arms(self.results, sampling.warmup if sampling else None)

    @property
    def is_measured(self) -> bool:
        return any(result.status is Status.COMPLETED for result in self.results)


Outcomes = Mapping[str, Outcome]
"""By the name of the part; parts that cannot be run here are missing."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a row says."""

    tables: tuple[Table, ...] = ()
    """Ours beside the published one."""
    answers: tuple[str, ...] = ()
    """The row's questions, answered with this run's numbers; the first is its main one."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One experiment of an assignment."""

    id: str
    """As the assignment numbers it, such as P3."""
    title: str
    parts: Mapping[str, Study] = field(default_factory=dict)
    """The studies that it takes, by a short name; none: it is not run."""
    conclude: Callable[[Outcomes], Finding] = lambda _: Finding()
    """Its finding from what its parts gave so far; called with whatever there is, also with nothing."""
    reason: str = ""
    """Why it is not run, or not whole: what is missing, and where that will come from."""
    reads: str = ""
    """The row whose parts these are, where it measures nothing of its own."""
    num_tables: int | None = None
    """How many tables of each of its studies it shows. None: 1 where it has tables of its own, else 2; 0: it
    says all of it itself."""
    state: str = ""
    """What the overview says of a row that is nothing to run; empty: what became of its parts."""

    @property
    def prefix(self) -> str:
        """What the trials of its parts are named by."""
        return (self.reads or self.id).lower()


@dataclass(frozen=True, kw_only=True)
class Check:
    """A published claim, recomputed from the published numbers."""

    id: str
    """The row that it belongs to."""
    claim: str
    """What was published."""
    computed: str
    """What follows from the numbers."""
    holds: bool


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A published assignment."""

    name: str
    title: str
    make_rows: Callable[[Size], Sequence[Row]]
    make_checks: Callable[[], Sequence[Check]]

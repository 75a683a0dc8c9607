"""A row that is a job of a batch system of its own: whether the batch system takes it is what the row asks.

Inside an allocation it is a step of that. Outside of one it is submitted where there is a batch system, and waited for;
a refusal is the row's result, in the batch system's words. Where there is none, the row says so and is not run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from scalelab.answers.train import Train
from scalelab.errors import RankUnknown
from scalelab.measure.launchers.jobscripts import NO_PSIJ
from scalelab.measure.launchers.site import Site
from scalelab.ranks.allocation import Scheduler, find_allocation
from scalelab.records.environment import installed_version
from scalelab.records.trial import Status, TrialResult
from scalelab.report.document import Document

PROGRAMS: dict[Scheduler, str] = {"pbs": "qsub", "slurm": "sbatch"}
"""What jobs are submitted by, in the order in which they are looked for."""
NO_BATCH_SYSTEM = f"there is no batch system here: neither {' nor '.join(PROGRAMS.values())} is on PATH"


@dataclass(frozen=True, kw_only=True)
class SubmittedTraining(Train):
    """A training that is handed to a batch system as a job of its own."""

    site: Site = field(default_factory=Site)
    """What the job asks for where neither flags nor a site file say it."""

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        """What the training says; nothing where it was not run, which the row says itself."""
        document = super().conclude(results)
        is_run = any(result.status is not Status.NOT_RUN for result in results)
        return document if is_run else replace(document, sections=(), cautions=())


def find_batch_system() -> Scheduler | None:
    """The batch system that this process is in, or else one that takes jobs from here."""
    try:
        allocation = find_allocation(os.environ)
    except RankUnknown:
        allocation = None
    if allocation is not None and allocation.scheduler in PROGRAMS:
        return allocation.scheduler
    return next((name for name, program in PROGRAMS.items() if shutil.which(program)), None)


def find_submission_obstacle() -> str | None:
    """Why no job can be submitted from here; None: it can be tried."""
    if find_batch_system() is None:
        return NO_BATCH_SYSTEM
    return NO_PSIJ if installed_version("psij-python") is None else None

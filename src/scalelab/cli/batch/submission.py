"""The flags that submit a run to a batch system, and the job that they describe."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from scalelab.checks import check_positive, flag, read_flag
from scalelab.errors import UsageError
from scalelab.launch.batch.site import Site, combine_sites, find_scheduler, load_site
from scalelab.launch.batch.system import BatchRecord, read_record, size_job
from scalelab.records.launchers import LAUNCHERS, SCHEDULERS, Scheduler, load
from scalelab.records.trial import Trial
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Study
from scalelab.units import parse_seconds

if TYPE_CHECKING:  # launchers load numpy, which takes longer than --help
    from scalelab.cli.study_flags import Execution
    from scalelab.launch.batch.handover import JobLauncher
    from scalelab.runs.launching import Submitter

ROW_QUEUE_SECONDS = 600.0
"""Queue time limit of a recipe's row that is a job, without --queue-timeout."""
OF_WHOLE_RUNS = ("--detach", "--job-per-trial")


@dataclass(frozen=True, kw_only=True)
class Submission:
    """How a job is submitted with --launcher slurm, pbs or lsf outside an allocation."""

    site_file: Annotated[str | None, tyro.conf.arg(name="site", metavar="FILE")] = None
    """File with defaults of the flags below. None: ~/.config/scalelab/site.toml, if it exists."""
    detach: bool = False
    """Submit and return; scalelab list shows the state."""
    job_per_trial: bool = False
    """Submit one job per trial, each on the nodes it needs, instead of one for all."""
    queue_timeout: Annotated[str | None, tyro.conf.arg(metavar="TIME")] = None
    """Cancel a job that waits in the queue for longer. None: no limit."""
    asked: Site = field(default_factory=Site)

    def __post_init__(self) -> None:
        if self.queue_seconds is not None:
            check_positive("queue_timeout", self.queue_seconds)

    @property
    def queue_seconds(self) -> float | None:
        return None if self.queue_timeout is None else read_flag("queue_timeout", self.queue_timeout, parse_seconds)

    def make_record(self, scheduler: Scheduler, earlier: BatchRecord | None = None) -> BatchRecord:
        """What a run requests: by flags, else as before, else by the site file."""
        if earlier is not None and self.site_file is None:
            site = combine_sites(self.asked, earlier.site)
        else:
            site = load_site(self.asked, self.site_file, scheduler)
        is_per_trial = self.job_per_trial or bool(earlier and earlier.is_per_trial)
        return BatchRecord(scheduler=scheduler, site=site, is_per_trial=is_per_trial)


def check_unused(submission: Submission, job: Job) -> None:
    """Reject flags of a batch system that would have no effect: without one, or inside its job."""
    is_inside = job.launcher in SCHEDULERS and find_scheduler(job.launcher, os.environ) is None
    given = [name for name in list_given(submission) if name not in LAUNCHERS[job.launcher].manifest_flags]
    if not given or (job.launcher in SCHEDULERS and not is_inside):
        return
    if is_inside:
        raise UsageError(f"{given[0]} has no effect inside a {job.launcher} job: omit it, or start outside the job")
    raise UsageError(
        f"{given[0]} needs a batch system, but --launcher is {job.launcher}: use {', '.join(SCHEDULERS)}, or omit it"
    )


def check_unused_by_rows(submission: Submission, study: Study, trials: Sequence[Trial]) -> None:
    """The same for a recipe, whose rows have their own launchers and may be jobs."""
    given = list_given(submission)
    jobs = [Job(launcher=trial.launcher) for trial in trials if study.find_site(trial) is not None]
    is_submitted = any(find_scheduler(job.launcher, os.environ) for job in jobs)
    unused = next((name for name in given if not is_submitted or name in OF_WHOLE_RUNS), None)
    if unused is not None:
        raise UsageError(
            f"{unused} has no effect: a recipe is not submitted as a whole. Omit it, or start the recipe inside a"
            " job of your own"
        )


def list_given(submission: Submission) -> list[str]:
    """The given flags of a batch system."""
    given = []
    for record in (submission, submission.asked):
        for one in dataclasses.fields(record):
            value = getattr(record, one.name)
            if value not in (None, (), False) and not isinstance(value, Site):
                given.append("--site" if one.name == "site_file" else flag(one.name))
    return given


def make_submitter(study: Study, submission: Submission) -> Submitter:
    """Submits a recipe's row that is a job and waits for it, up to a limit.

    Its request comes from flags, else as before, else from a site file, else from the row itself.
    """
    from scalelab.launch.batch.handover import JobLauncher

    def submit(scheduler: Scheduler, trial: Trial, run: Path) -> JobLauncher:
        earlier = read_record(run)
        record = submission.make_record(scheduler, earlier)
        own = study.find_site(trial)
        if own is not None and record.site == submission.asked:
            record = dataclasses.replace(record, site=combine_sites(record.site, own))
        record = dataclasses.replace(record, is_per_trial=True, jobs=earlier.jobs if earlier else ())
        return JobLauncher(
            record,
            run,
            ranks_per_node=trial.ranks_per_node,
            queue_seconds=submission.queue_seconds or ROW_QUEUE_SECONDS,
            say=say,
        )

    return submit


def prepare(study: Study, submission: Submission) -> tuple[Any, BatchRecord | None]:
    """The study with the site's settings, and the batch request; None: it runs from here."""
    check_unused(submission, study.job)
    scheduler = find_scheduler(study.job.launcher, os.environ)
    if scheduler is None:
        return study, None
    record = submission.make_record(scheduler)
    return set_ranks_per_node(study, record.site), record


def show_jobs(
    study: Study, trials: Sequence[Trial], record: BatchRecord | None, execution: Execution, command: Sequence[str]
) -> str:
    """What --dry-run shows beside the plan: the scripts of a batch system, or the manifests that were written."""
    from scalelab.launch.batch.handover import show_scripts

    if record is not None:
        return show_scripts(trials, record, execution.runs_dir, study.job.ranks_per_node)
    write = LAUNCHERS[study.job.launcher].manifests
    return str(load(write)(trials, execution.submission.asked, execution.runs_dir, command)) if write else ""


def set_ranks_per_node(study: Study, site: Site) -> Study:
    """The study with the ranks per node of the site, unless a flag set them."""
    if study.job.ranks_per_node is not None:
        return study
    _, per_node = size_job([trial.num_processes for trial in study.plan()], site, None)
    changeable: Any = study
    if any(one.name == "job" for one in dataclasses.fields(changeable)):
        job = dataclasses.replace(study.job, ranks_per_node=per_node)
        return dataclasses.replace(changeable, job=job)  # type: ignore[no-any-return]
    return dataclasses.replace(changeable, ranks_per_node=per_node)  # type: ignore[no-any-return]


def say(words: str) -> None:
    """Print a line of progress."""
    print(words, file=sys.stderr, flush=True)  # noqa: T201

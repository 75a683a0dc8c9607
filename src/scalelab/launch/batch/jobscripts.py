"""Job scripts for Slurm, PBS and LSF, written by PSI/J.

A job is two files. The script with the directives comes from PSI/J's own templates; it redirects, notes the exit code
and runs the second. That one is ours, `launch.sh`: the site's set-up lines, then scalelab. PSI/J (`psij-python`, the
extra `cluster`) is imported only when a job is made.

What PSI/J's templates do not say the way a cluster wants it goes through its custom attributes:

- the name of the job: the templates' own line is not filled in, and PBS would not take its form (`-N="x"`);
- the resources of PBS: the template writes `ncpus`, `mpiprocs` and `place=scatter:shared` always, while Polaris wants
  `select=2:system=polaris`, `place=scatter` and `filesystems=…`. So no resources are handed over, and every `-l` is an
  attribute. Attributes are a dictionary; one that is wanted several times gets its prefix in another case, which PSI/J
  takes for the same.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING

from scalelab.errors import LaunchFailed, UsageError
from scalelab.launch.batch.site import PLAIN, Site
from scalelab.launch.starters import RANK_PREFIX, RANK_PYTHON
from scalelab.records.environment import installed_version
from scalelab.records.launchers import Scheduler, find_batch, load

if TYPE_CHECKING:
    from psij import Job
    from psij.executors.batch.batch_scheduler_executor import BatchSchedulerExecutor

NO_PSIJ = "submitting jobs needs PSI/J, which is not installed: pip install 'scalelab[cluster]'"


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """One job: what it is called, how large it is and what it runs."""

    name: str
    num_nodes: int
    ranks_per_node: int
    cores_per_rank: int
    has_gpus: bool
    """Whether every rank needs a GPU."""
    arguments: tuple[str, ...]
    """What Python is given."""
    directory: Path
    """Where it is run: the directory in which it was asked for."""
    batch_directory: Path
    """Where its scripts, its log and PSI/J's files are; nodes must see it too."""

    @property
    def launch_file(self) -> Path:
        return self.batch_directory / f"{self.name}.sh"

    @property
    def log_file(self) -> Path:
        return self.batch_directory / f"{self.name}.log"

    def check(self) -> None:
        """Reject paths that would break in a job script."""
        for path in (self.directory, self.batch_directory):
            if not PLAIN.fullmatch(str(path)):
                raise UsageError(
                    f"{str(path)!r} cannot be used in a job script: use a working directory and a --runs-dir"
                    " whose paths have no spaces or special characters"
                )


def check_psij() -> None:
    """Reject at once where nothing can be submitted."""
    if installed_version("psij-python") is None:
        raise LaunchFailed(NO_PSIJ)


def render_launch(request: JobRequest, site: Site) -> str:
    """The script of ours that the job runs: set-up lines, then scalelab, with everything it says in one log."""
    python = sys.executable if site.container else site.python or sys.executable
    lines = [
        "#!/bin/bash",
        f"exec >>{shlex.quote(str(request.log_file))} 2>&1",
        *site.setup,
        f"cd {shlex.quote(str(request.directory))} || exit 1",
    ]
    if site.container:
        lines.append(f"export {RANK_PREFIX}={quote_text(site.container)}")
    if site.container and site.python:
        lines.append(f"export {RANK_PYTHON}={quote_text(site.python)}")
    program = python if PLAIN.fullmatch(python) else quote_text(python)
    return "\n".join([*lines, f"exec {program} {shlex.join(request.arguments)}", ""])


def quote_text(text: str) -> str:
    """One word of shell, in which variables such as $HOME keep their meaning, and commands have none."""
    return '"' + re.sub(r'([\\"`]|\$(?=[(\[]))', r"\\\1", text) + '"'


def make_job(request: JobRequest, site: Site, scheduler: Scheduler) -> Job:
    """PSI/J's job."""
    from psij import Job, JobAttributes, JobSpec, ResourceSpecV1

    request.check()
    unit = find_batch(scheduler).wall_unit_seconds
    duration = timedelta(seconds=unit * math.ceil(site.wall_seconds / unit))
    own = load(find_batch(scheduler).executor).list_directives(request, site)
    pairs = [*own, *(d.split("=", 1) for d in site.directives)]
    attributes = JobAttributes(
        duration=duration,
        queue_name=site.queue,
        account=site.account,
        custom_attributes=name_attributes(scheduler, [(name, value) for name, value in pairs]),
    )
    resources = ResourceSpecV1(
        node_count=request.num_nodes,
        processes_per_node=request.ranks_per_node,
        cpu_cores_per_process=request.cores_per_rank,
        exclusive_node_use=False,
    )
    # A login shell, where there are set-up lines: `module` and `conda` are functions of one.
    arguments = [*(["-l"] if site.setup else []), str(request.launch_file)]
    return Job(
        JobSpec(
            executable="/bin/bash",
            arguments=arguments,
            directory=request.directory,
            resources=resources,
            attributes=attributes,
            launcher="single",
        )
    )


def name_attributes(scheduler: Scheduler, pairs: Sequence[tuple[str, str]]) -> dict[str, object]:
    """PSI/J's custom attributes; a directive that comes again has its prefix in another case."""
    named: dict[str, object] = {}
    spellings = ["".join(letters) for letters in itertools.product(*((c, c.upper()) for c in scheduler))]
    for name, value in pairs:
        free = [key for key in (f"{spelling}.{name}" for spelling in spellings) if key not in named]
        if not free:
            raise UsageError(f"--directives sets {name} more than {len(spellings)} times: remove the extra ones")
        named[free[0]] = value
    return named


def make_executor(scheduler: Scheduler, batch_directory: Path) -> BatchSchedulerExecutor:
    """PSI/J's side of a batch system; its files go to the run and stay there."""
    check_psij()
    from scalelab.launch.batch.executors import PollingOff

    return load(find_batch(scheduler).executor)(config=PollingOff(batch_directory))  # type: ignore[no-any-return]


def render_script(executor: BatchSchedulerExecutor, job: Job) -> str:
    """The script that PSI/J would submit; nothing is submitted."""
    executor._check_job(job)
    text: IO[str] = io.StringIO()
    executor.generate_submit_script(job, executor._create_script_context(job), text)
    assert isinstance(text, io.StringIO)
    return text.getvalue()

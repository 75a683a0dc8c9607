"""Job scripts for Slurm, PBS and LSF, written by PSI/J.

A job is two files. The script with the directives comes from PSI/J's own templates; it redirects, notes the exit code
and runs the second. That one is ours, `launch.sh`: the site's set-up lines, then scalelab. PSI/J (`psij-python`, the
extra `cluster`) is loaded only here and where jobs are submitted.

What PSI/J's templates do not say the way a cluster wants it goes through its custom attributes:

- the name of the job: the templates' own line is not filled in, and PBS would not take its form (`-N="x"`);
- the resources of PBS: the template writes `ncpus`, `mpiprocs` and `place=scatter:shared` always, while Polaris wants
  `select=2:system=polaris`, `place=scatter` and `filesystems=…`. So no resources are handed over, and every `-l` is an
  attribute. Attributes are a dictionary; one that is wanted several times gets its prefix in another case, which PSI/J
  takes for the same.

PSI/J's executors, as we use them: submission, cancellation and the state of jobs, each by PSI/J's own commands.

They differ from PSI/J's in what would otherwise fail on a real cluster:

- Slurm: the states of all jobs of the user are read, and PSI/J's reader ends in an assertion when any of them has a
  reason with blanks, or one that it does not know. Here the reason is the rest of the line, whatever it says.
- LSF: PSI/J's reader fails on every job that has a reason: a job that was killed would never be known to have ended.
- PBS: the template's resources are left out; attributes say them (`jobscripts.py`). The JSON of qstat holds the job's
  environment as it is, so that a quote in a variable breaks it: the same question has a plain form.

PSI/J's thread that asks for states is put to sleep: it gives a job up after three questions without an answer, and a
batch system that restarts is no reason to lose a job.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import re
import shlex
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, ClassVar

from packaging.version import Version
from psij import Job, JobState, JobStatus
from psij.executors.batch.batch_scheduler_executor import BatchSchedulerExecutor, check_status_exit_code
from psij.executors.batch.lsf import LsfExecutorConfig, LsfJobExecutor
from psij.executors.batch.pbs import PBSJobExecutor
from psij.executors.batch.pbs_base import PBSExecutorConfig
from psij.executors.batch.slurm import SlurmExecutorConfig, SlurmJobExecutor

from scalelab.errors import LaunchFailed, UsageError
from scalelab.launch.batch.site import DEFAULT_PLACEMENT, PLAIN, Site
from scalelab.launch.ranks.allocation import Scheduler
from scalelab.launch.steps import RANK_PREFIX, RANK_PYTHON
from scalelab.records.environment import installed_version

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
        """Refuse paths that would break in a job script."""
        for path in (self.directory, self.batch_directory):
            if not PLAIN.fullmatch(str(path)):
                raise UsageError(
                    f"{str(path)!r} cannot be used in a job script: use a working directory and a --runs-dir"
                    " whose paths have no spaces or special characters"
                )


def check_psij() -> None:
    """Refuse at once where nothing can be submitted."""
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
    """One word of shell, in which variables such as $HOME keep their meaning."""
    return '"' + re.sub(r'([\\"`])', r"\\\1", text) + '"'


def make_job(request: JobRequest, site: Site, scheduler: Scheduler) -> Job:
    """PSI/J's job."""
    from psij import Job, JobAttributes, JobSpec, ResourceSpecV1

    request.check()
    unit = 60 if scheduler == "lsf" else 1  # seconds; LSF counts minutes
    duration = timedelta(seconds=unit * math.ceil(site.wall_seconds / unit))
    pairs = [*_list_directives(request, site, scheduler), *(d.split("=", 1) for d in site.directives)]
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


def _list_directives(request: JobRequest, site: Site, scheduler: Scheduler) -> Iterator[tuple[str, str]]:
    """What is said by custom attributes."""
    own = {directive.partition("=")[0] for directive in site.directives}
    if scheduler == "slurm":
        yield "job-name", request.name
        if request.has_gpus and not any(name.startswith(("gpus", "gres")) for name in own):
            yield "gpus-per-node", str(request.ranks_per_node)
    elif scheduler == "lsf":
        yield "J", request.name
    else:
        yield "N", request.name[:230]
        chunk = _describe_chunk(request) if site.chunk is None else site.chunk
        yield "l", f"select={request.num_nodes}{':' * bool(chunk)}{chunk}"
        yield "l", f"place={site.placement or DEFAULT_PLACEMENT}"
        if site.filesystems:
            yield "l", f"filesystems={site.filesystems}"


def _describe_chunk(request: JobRequest) -> str:
    ranks = request.ranks_per_node
    gpus = f":ngpus={ranks}" if request.has_gpus else ""
    return f"ncpus={ranks * request.cores_per_rank}:mpiprocs={ranks}{gpus}"


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
    return EXECUTORS[scheduler](config=PollingOff(batch_directory))


def render_script(executor: BatchSchedulerExecutor, job: Job) -> str:
    """The script that PSI/J would submit; nothing is submitted."""
    executor._check_job(job)
    text: IO[str] = io.StringIO()
    executor.generate_submit_script(job, executor._create_script_context(job), text)
    assert isinstance(text, io.StringIO)
    return text.getvalue()


NEVER_SECONDS = 10**8
"""When PSI/J's thread would ask for the first time."""
PBS_STATES = {
    **dict.fromkeys("QHWTS", JobState.QUEUED),
    **dict.fromkeys("RBEU", JobState.ACTIVE),
    **dict.fromkeys("FXM", JobState.COMPLETED),
}
"""By the letters of qstat: waiting, held or suspended; at work; over, or moved to another server."""
PBS_CANCELLED = "265"
"""The exit code by which PSI/J too tells that a job was ended by somebody."""


class PollingOff(SlurmExecutorConfig, PBSExecutorConfig, LsfExecutorConfig):
    """PSI/J's settings: everything in one directory, nothing removed, no thread that asks."""

    def __init__(self, work_directory: Path) -> None:
        super().__init__(work_directory=work_directory, initial_queue_polling_delay=NEVER_SECONDS, keep_files=True)


class Slurm(SlurmJobExecutor):
    """sbatch, squeue, scancel."""

    _NAME_: ClassVar[str] = "slurm"
    _VERSION_: ClassVar[Version] = Version("0.0.2")

    def get_status_command(self, native_ids: Collection[str]) -> list[str]:  # noqa: ARG002 - PSI/J's signature
        return ["squeue", "--me", "--states=all", "--format=%i %t %r"]

    def parse_status_output(self, exit_code: int, out: str) -> dict[str, JobStatus]:
        check_status_exit_code("squeue", exit_code, out)
        found = {}
        for line in out.splitlines()[1:]:
            number, state, *reason = line.split(maxsplit=2)
            words = reason[0] if reason and reason[0] not in ("None", "(null)") else None
            found[number] = JobStatus(self._STATE_MAP.get(state, JobState.ACTIVE), message=words)
        return found


class Pbs(PBSJobExecutor):
    """qsub, qstat, qdel of PBS Pro and OpenPBS."""

    _NAME_: ClassVar[str] = "pbs"
    _VERSION_: ClassVar[Version] = Version("0.0.2")

    def generate_submit_script(self, job: Job, context: dict[str, object], submit_file: IO[str]) -> None:
        assert job.spec is not None
        job.spec.resources = None
        super().generate_submit_script(job, context, submit_file)

    def get_plain_status_command(self, native_ids: Collection[str]) -> list[str]:
        return ["qstat", "-x", "-f", *native_ids]

    def parse_plain_status_output(self, out: str) -> dict[str, JobStatus]:
        """The states by number; a line of an attribute begins with four blanks, one that goes on with a tab."""
        found = {}
        for number, text in re.findall(r"^Job Id: (\S+)$(.*?)(?=^Job Id: |\Z)", out, re.MULTILINE | re.DOTALL):
            values = dict(re.findall(r"^    (job_state|Exit_status|comment) = (.*)$", text, re.MULTILINE))
            state = PBS_STATES.get(values.get("job_state", ""), JobState.ACTIVE)
            if state is JobState.COMPLETED and values.get("Exit_status", "0") != "0":
                state = JobState.CANCELED if values["Exit_status"] == PBS_CANCELLED else JobState.FAILED
            if "job_state" in values:
                found[number] = JobStatus(state, message=values.get("comment"))
        return found


class Lsf(LsfJobExecutor):
    """bsub, bjobs, bkill."""

    _NAME_: ClassVar[str] = "lsf"
    _VERSION_: ClassVar[Version] = Version("0.0.1")

    def __init__(self, config: LsfExecutorConfig) -> None:
        super().__init__(url=None, config=config)

    def parse_status_output(self, exit_code: int, out: str) -> dict[str, JobStatus]:
        check_status_exit_code("bjobs", exit_code, out)
        found = {}
        for entry in json.loads(out)["RECORDS"]:
            if "ERROR" not in entry:
                reasons = (entry.get(name) for name in ("EXIT_REASON", "KILL_REASON", "SUSPEND_REASON"))
                words = next(filter(None, reasons), None)
                found[entry["JOBID"]] = JobStatus(self._STATE_MAP.get(entry["STAT"], JobState.ACTIVE), message=words)
        return found


EXECUTORS: dict[Scheduler, type[BatchSchedulerExecutor]] = {"slurm": Slurm, "pbs": Pbs, "lsf": Lsf}

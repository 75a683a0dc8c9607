"""PSI/J's executors as we use them: submission, cancellation and job states, by PSI/J's own commands.

They differ from PSI/J's where those fail on a real cluster:

- Slurm: PSI/J's reader fails if any job of the user has a reason with blanks, or one that it does not know. Here the
  reason is the rest of the line.
- LSF: PSI/J's reader fails on every job that has a reason, so a killed job would never count as ended.
- PBS: the template's resources are left out, because attributes set them (`jobscripts.py`). The JSON of qstat contains
  the job's environment unescaped, so a quote in a variable breaks it: the plain form is read instead.

PSI/J's polling thread is off: it drops a job after three queries without an answer, for instance while a batch system
restarts.

This is the only module that needs PSI/J when it is imported; `jobscripts.py` imports it where a job is made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, ClassVar

from packaging.version import Version
from psij import Job, JobState, JobStatus
from psij.executors.batch.batch_scheduler_executor import check_status_exit_code
from psij.executors.batch.lsf import LsfExecutorConfig, LsfJobExecutor
from psij.executors.batch.pbs import PBSJobExecutor
from psij.executors.batch.pbs_base import PBSExecutorConfig
from psij.executors.batch.slurm import SlurmExecutorConfig, SlurmJobExecutor

from scalelab.launch.batch.jobscripts import JobRequest
from scalelab.launch.batch.site import DEFAULT_PLACEMENT, Site

NEVER_SECONDS = 10**8
"""When PSI/J's thread would ask for the first time."""
PBS_STATES = {
    **dict.fromkeys("QHWTS", JobState.QUEUED),
    **dict.fromkeys("RBEU", JobState.ACTIVE),
    **dict.fromkeys("FXM", JobState.COMPLETED),
}
"""By the letters of qstat: waiting, held or suspended; at work; over, or moved to another server."""
PBS_CANCELLED = "265"
"""The exit code by which PSI/J too marks a job that was cancelled."""


class PollingOff(SlurmExecutorConfig, PBSExecutorConfig, LsfExecutorConfig):
    """PSI/J's settings: everything in one directory, nothing removed, no thread that asks."""

    def __init__(self, work_directory: Path) -> None:
        super().__init__(work_directory=work_directory, initial_queue_polling_delay=NEVER_SECONDS, keep_files=True)


class Slurm(SlurmJobExecutor):
    """sbatch, squeue, scancel."""

    _NAME_: ClassVar[str] = "slurm"
    _VERSION_: ClassVar[Version] = Version("0.0.2")

    @staticmethod
    def list_directives(request: JobRequest, site: Site) -> Iterator[tuple[str, str]]:
        """What is said by custom attributes."""
        yield "job-name", request.name
        own = {directive.partition("=")[0] for directive in site.directives}
        if request.has_gpus and not any(name.startswith(("gpus", "gres")) for name in own):
            yield "gpus-per-node", str(request.ranks_per_node)

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

    @staticmethod
    def list_directives(request: JobRequest, site: Site) -> Iterator[tuple[str, str]]:
        """What is said by custom attributes."""
        yield "N", request.name[:230]
        chunk = describe_chunk(request) if site.chunk is None else site.chunk
        yield "l", f"select={request.num_nodes}{':' * bool(chunk)}{chunk}"
        yield "l", f"place={site.placement or DEFAULT_PLACEMENT}"
        if site.filesystems:
            yield "l", f"filesystems={site.filesystems}"

    def generate_submit_script(self, job: Job, context: dict[str, object], submit_file: IO[str]) -> None:
        assert job.spec is not None
        job.spec.resources = None
        super().generate_submit_script(job, context, submit_file)

    def get_plain_status_command(self, native_ids: Collection[str]) -> list[str]:
        return ["qstat", "-x", "-f", *native_ids]

    def parse_plain_status_output(self, out: str) -> dict[str, JobStatus]:
        """The states by number; a line of an attribute begins with four blanks, one that continues with a tab."""
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

    @staticmethod
    def list_directives(request: JobRequest, site: Site) -> Iterator[tuple[str, str]]:  # noqa: ARG004 - as others
        """What is said by custom attributes."""
        yield "J", request.name

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


def describe_chunk(request: JobRequest) -> str:
    ranks = request.ranks_per_node
    gpus = f":ngpus={ranks}" if request.has_gpus else ""
    return f"ncpus={ranks * request.cores_per_rank}:mpiprocs={ranks}{gpus}"

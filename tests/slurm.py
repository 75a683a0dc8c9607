"""A real Slurm of one node in a directory: munged, slurmctld and slurmd, with ports and sockets of their own.

Nothing of it touches the machine's own Slurm, if it has one: every program is told where it is by `SLURM_CONF`. The
fixture `slurm` is there for every test (`conftest.py` names this module); a test asks for it and passes
`slurm.variables` on, or puts them into its own environment by `slurm.join(monkeypatch)`. The node has more CPUs than
the machine, so that four ranks find room on two cores, and its own name.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "squeue", "scancel", "scontrol", "sinfo")
NUM_CPUS = 4
START_SECONDS = 30.0
CONFIGURATION = """\
ClusterName=scalelab
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0
ReturnToService=2
EnforcePartLimits=ALL
MailProg=/bin/true
KillWait=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=1000 State=UNKNOWN
PartitionName=debug Nodes={host} Default=YES MaxTime=60 State=UP OverSubscribe=YES:4
"""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A Slurm that runs."""

    directory: Path
    host: str
    """The name of its only node."""

    @property
    def variables(self) -> dict[str, str]:
        """What makes `srun`, `sbatch` and the others speak to this Slurm."""
        return {"SLURM_CONF": str(self.directory / "slurm.conf")}

    def join(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let everything this test starts speak to this Slurm."""
        for name, value in self.variables.items():
            monkeypatch.setenv(name, value)

    def ask(self, *command: str, seconds: float = 60) -> str:
        """What a command of Slurm prints; a command that fails raises with what it said."""
        done = self.run(*command, seconds=seconds)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}: {done.stderr}{done.stdout}")
        return done.stdout

    def run(self, *command: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
        """A command beside this Slurm, whatever becomes of it."""
        return subprocess.run(
            command, env=os.environ | self.variables, capture_output=True, text=True, timeout=seconds, check=False
        )

    def list_jobs(self) -> list[str]:
        """The numbers of the jobs that wait or run."""
        return self.ask("squeue", "--noheader", "--format=%i").split()

    def wait_until_empty(self, seconds: float = 30) -> None:
        """Until no job waits, runs or is being ended."""
        deadline = time.monotonic() + seconds
        while self.list_jobs():
            if time.monotonic() > deadline:
                raise RuntimeError(f"jobs {self.list_jobs()} have not ended in {seconds:g} s")
            time.sleep(0.1)


def explain_absence() -> str | None:
    """Why there can be no Slurm here; None when there can."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        return f"a Slurm needs {', '.join(missing)} (apt-get install slurm-wlm munge)"
    return None if os.geteuid() == 0 else "a Slurm of its own needs root"


@contextmanager
def start_cluster(directory: Path) -> Iterator[Cluster]:
    """Start the daemons, wait until the node is idle, and end all of it by process number."""
    cluster = Cluster(directory=directory, host=socket.gethostname().split(".")[0])
    _write_files(cluster)
    kinds = {"key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    files = [f"--{kind}={directory}/munge/{name}" for kind, name in kinds.items()]
    with ExitStack() as stack:
        for command in (
            ["munged", "--foreground", "--force", f"--socket={directory}/munge.socket", *files],
            ["slurmctld", "-D", "-c"],
            ["slurmd", "-D", "-c"],
        ):
            stack.enter_context(_run_daemon(command, cluster))
        _wait_until_idle(cluster)
        stack.callback(cluster.run, "scancel", "--user=root")
        yield cluster


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """A real Slurm of one node, started once for all tests that want it."""
    reason = explain_absence()
    if reason is not None:
        pytest.skip(reason)
    # A short path of its own: sockets have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="slurm-") as scratch, start_cluster(Path(scratch)) as cluster:
        yield cluster


def _write_files(cluster: Cluster) -> None:
    directory = cluster.directory
    directory.chmod(0o755)
    for name in ("state", "spool", "munge"):
        (directory / name).mkdir()
    (directory / "munge").chmod(0o700)
    key = directory / "munge" / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        ports = {"controller_port": first.getsockname()[1], "node_port": second.getsockname()[1]}
    cpus = max(NUM_CPUS, os.cpu_count() or 1)
    text = CONFIGURATION.format(host=cluster.host, directory=directory, cpus=cpus, **ports)
    (directory / "slurm.conf").write_text(text)


@contextmanager
def _run_daemon(command: list[str], cluster: Cluster) -> Iterator[None]:
    environment = os.environ | cluster.variables
    environment["PATH"] = os.pathsep.join([environment.get("PATH", ""), "/usr/sbin"])
    program = shutil.which(command[0], path=environment["PATH"]) or command[0]
    # Tests that are killed end no daemon; the kernel does.
    bound = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
    with (cluster.directory / f"{command[0]}.out").open("wb") as log:
        process = subprocess.Popen(
            [*bound, program, *command[1:]], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_idle(cluster: Cluster) -> None:
    deadline = time.monotonic() + START_SECONDS
    while "idle" not in cluster.run("sinfo", "--noheader", "--format=%T").stdout:
        if time.monotonic() > deadline:
            logs = [file.read_text()[-2000:] for file in sorted(cluster.directory.glob("slurm*.log"))]
            raise RuntimeError("Slurm did not start:\n" + "\n".join(logs))
        time.sleep(0.1)

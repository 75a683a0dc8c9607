"""The commands by which clusters start processes on their nodes, each as a function from a spread of ranks to words.

    srun       Slurm's own. Steps overlap, so that one can be started from an interactive step too; a node's cores are
               not bound but shared out by the ranks themselves, as the local launcher does
    mpich      Hydra, of MPICH and MVAPICH; finds the nodes of Slurm and PBS itself
    intel      Intel MPI's Hydra, which would follow the batch system's placement rather than -ppn by default
    openmpi    refuses to run as root, and more ranks than cores, unless variables allow it; those are understood by
               versions 4 and 5, whose flags differ. Of the environment it hands on only what is named
    pals       HPE Cray's mpiexec (Polaris, Aurora)
    jsrun      IBM's, under LSF: a resource set for every rank
    torchrun   once on every node, started there by one of the others; on this machine without any

Nothing is run here, but for `mpiexec --version`, which names the MPI library.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from scalelab.errors import LaunchFailed
from scalelab.records.launchers import STARTERS, Allocation, count_ranks_per_node

VERSION_SECONDS = 30.0
RANK_PREFIX = "SCALELAB_RANK_PREFIX"
"""The variable with the prefix of every rank's command: that of a container."""
RANK_PYTHON = "SCALELAB_RANK_PYTHON"
"""The variable that says which Python runs the ranks; without it, the one that runs this, in a container its own."""
CONTAINER_PYTHON = "python3"
"""The Python of a container, which need not have the path of this one."""
TORCHRUN_PORTS = range(20000, 30000)
"""Where the torchruns of several nodes meet, unless --port says another: below what Linux gives out by itself."""
HANDED_ON = (
    "CUDA_", "FI_", "GLOO_", "HF_", "LD_LIBRARY_PATH", "MASTER_", "MKL_", "NCCL_", "OMP_", "PATH", "PYTHON", "TORCH",
    "VIRTUAL_ENV",
)  # fmt: skip
"""How the variables begin that ranks on other nodes need; everything else is Open MPI's own affair."""
LEFT_OVER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
"""Variables of an earlier launch, which would contradict what the step's own launcher says."""


@dataclass(frozen=True, kw_only=True)
class RankSpread:
    """How many processes, and where."""

    num_ranks: int
    num_nodes: int = 1
    ranks_per_node: int
    """At the most: the last node may have fewer."""
    cores_per_rank: int = 1
    cores_per_node: int | None = None
    """What the allocation has; None: unknown."""
    has_gpus: bool = False

    @property
    def is_crowded(self) -> bool:
        """Whether a node must serve more threads than it has cores."""
        return self.cores_per_node is not None and self.ranks_per_node * self.cores_per_rank > self.cores_per_node


@dataclass(frozen=True, kw_only=True)
class StepCommand:
    """The command that starts the processes, before their own command."""

    words: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


def step_srun(program: str, spread: RankSpread) -> StepCommand:
    words = [
        program,
        f"--ntasks={spread.num_ranks}",
        f"--nodes={spread.num_nodes}",
        f"--ntasks-per-node={spread.ranks_per_node}",
        "--overcommit" if spread.is_crowded else f"--cpus-per-task={spread.cores_per_rank}",
        "--overlap",
        "--cpu-bind=none",
        "--kill-on-bad-exit=1",
        "--unbuffered",
        "--export=ALL",
    ]
    return StepCommand(words=tuple(words))


def step_mpich(program: str, spread: RankSpread) -> StepCommand:
    words = (
        program,
        "-genvall",
        "-bind-to",
        "none",
        "-ppn",
        str(spread.ranks_per_node),
        "-n",
        str(spread.num_ranks),
    )
    return StepCommand(words=words)


def step_intel(program: str, spread: RankSpread) -> StepCommand:
    words = (program, "-genvall", "-ppn", str(spread.ranks_per_node), "-n", str(spread.num_ranks))
    return StepCommand(words=words, variables={"I_MPI_JOB_RESPECT_PROCESS_PLACEMENT": "off", "I_MPI_PIN": "off"})


def step_openmpi(program: str, spread: RankSpread) -> StepCommand:
    variables = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    if os.geteuid() == 0:
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    words = [program, "--bind-to", "none", "-n", str(spread.num_ranks)]
    if spread.num_nodes > 1:
        words += ["-N", str(spread.ranks_per_node)]
        words += [word for name in sorted(os.environ) if name.startswith(HANDED_ON) for word in ("-x", name)]
    return StepCommand(words=tuple(words), variables=variables)


def step_pals(program: str, spread: RankSpread) -> StepCommand:
    words = (
        *(program, "-n", str(spread.num_ranks), "--ppn", str(spread.ranks_per_node)),
        *("--cpu-bind", "none", "--envall"),
    )
    return StepCommand(words=words)


def step_jsrun(program: str, spread: RankSpread) -> StepCommand:
    words = [
        program,
        f"--nrs={spread.num_ranks}",
        f"--rs_per_host={min(spread.num_ranks, spread.ranks_per_node)}",
        "--tasks_per_rs=1",
        f"--cpu_per_rs={spread.cores_per_rank}",
        "--bind=none",
    ]
    if spread.has_gpus:
        words.append("--gpu_per_rs=1")
    return StepCommand(words=tuple(words))


def place_ranks(
    num_ranks: int, allocation: Allocation | None, *, ranks_per_node: int | None, cores_per_rank: int, has_gpus: bool
) -> RankSpread:
    """Which ranks go where: nodes are filled one after the other; raises `LaunchFailed` where there are too few."""
    num_nodes = allocation.num_nodes if allocation else 1
    per_node = count_ranks_per_node(num_ranks, allocation, ranks_per_node)
    needed = -(-num_ranks // per_node)
    if needed > num_nodes:
        where = f"job {allocation.job_id} has {num_nodes}" if allocation else "this is one"
        raise LaunchFailed(
            f"{num_ranks} ranks with --ranks-per-node {per_node} need {needed} nodes, {where}: request more nodes, or"
            f" use --ranks-per-node {-(-num_ranks // num_nodes)}"
        )
    return RankSpread(
        num_ranks=num_ranks,
        num_nodes=needed,
        ranks_per_node=per_node,
        cores_per_rank=cores_per_rank,
        cores_per_node=allocation.cores_per_node if allocation else None,
        has_gpus=has_gpus,
    )


def run_torchrun(spread: RankSpread, *, first_node: str, port: int, name: str, scratch: str) -> tuple[str, ...]:
    """The torchrun of every node; all meet on the first node."""
    if spread.num_ranks % spread.num_nodes:
        raise LaunchFailed(
            f"torchrun starts the same number of ranks on every node, and {spread.num_ranks} ranks do not divide over"
            f" {spread.num_nodes} nodes: change the number of ranks, or set --ranks-per-node"
        )
    meeting = (
        (
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={first_node}:{port or choose_port(name, first_node)}",
            f"--rdzv-id={name}",
        )
        if spread.num_nodes > 1
        else ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1")
    )
    return (
        *(*find_interpreter(), "-P", "-m", "torch.distributed.run"),
        f"--nnodes={spread.num_nodes}",
        f"--nproc-per-node={spread.num_ranks // spread.num_nodes}",
        *meeting,
        f"--log-dir={scratch}",
    )


def choose_port(name: str, first_node: str) -> int:
    """A port derived from the launch's name, so jobs that share a node do not collide.

    Where this is the node on which it will be used, one that is taken is passed over.
    """
    start, can_look = zlib.crc32(name.encode()), is_this_host(first_node)
    for attempt in range(len(TORCHRUN_PORTS)):
        port = TORCHRUN_PORTS[(start + attempt) % len(TORCHRUN_PORTS)]
        if not can_look or is_free(port):
            return port
    raise LaunchFailed(f"no port from {TORCHRUN_PORTS[0]} to {TORCHRUN_PORTS[-1]} is free: choose another with --port")


def is_this_host(node: str) -> bool:
    """Whether a node is the one that this process is on; names may or may not have a domain."""
    return node.partition(".")[0] == socket.gethostname().partition(".")[0]


def is_free(port: int) -> bool:
    """Whether a port of this host is free."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def find_interpreter() -> tuple[str, ...]:
    """The words before `-m` in the command of every rank: a container's, if there is one, and Python."""
    prefix = shlex.split(os.environ.get(RANK_PREFIX, ""))
    return (*prefix, os.environ.get(RANK_PYTHON) or (CONTAINER_PYTHON if prefix else sys.executable))


def put_once_on_each_node(spread: RankSpread) -> RankSpread:
    """Where the step's own processes are torchruns."""
    cores = spread.cores_per_rank * spread.ranks_per_node
    return replace(spread, num_ranks=spread.num_nodes, ranks_per_node=1, cores_per_rank=cores)


def find_program(name: str, flag: str = "", given: str | None = None) -> str:
    """The whole path of a command, on PATH or where pip put it; raises `LaunchFailed` where there is none."""
    found = shutil.which(given or name) or (
        None if given else shutil.which(name, path=str(Path(sys.executable).parent))
    )
    if found is None and given:
        raise LaunchFailed(f"{flag} {given} is not executable: give the path of {name}")
    if found is None:
        otherwise = f", or give its path with {flag}" if flag else ""
        raise LaunchFailed(f"{name} is not on PATH: load the module that provides it{otherwise}")
    return found


def tell_kind(program: str, kinds: Sequence[str]) -> str:
    """Which of several starters a program is: the only one, or whose words it prints as its version."""
    if len(kinds) == 1:
        return kinds[0]
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=VERSION_SECONDS, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchFailed(f"{program} --version failed ({error}): choose another with --mpiexec") from error
    text = done.stdout + done.stderr
    kind = next((kind for kind in kinds if any(word in text for word in STARTERS[kind].version_words)), None)
    if kind is None:
        said = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
        raise LaunchFailed(
            f"{program} --version prints {said!r}, which is not MPICH, Intel MPI, Open MPI or PALS: choose one"
            " with --mpiexec"
        )
    return kind


def clean_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment without what another launch has left there."""
    return {
        name: value
        for name, value in variables.items()
        if name not in LEFT_OVER and not name.startswith("TORCHELASTIC_")
    }


def name_words(command: Sequence[str]) -> str:
    """The program of a command, for messages."""
    modules = {"torch.distributed.run": "torchrun", "scalelab.launch.ray": "ray"}
    return next((name for module, name in modules.items() if module in command), Path(command[0]).name)

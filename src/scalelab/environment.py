"""Hardware, software, git and load: what a measurement was taken on, recorded with every run.

Read without importing torch: versions come from package metadata, GPUs from the driver's own tools. What cannot be
found out is None.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from scalelab.control_groups import read_cpu_quota, read_memory_left, read_memory_limit

RECORDED_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "LD_PRELOAD",
    "MALLOC_CONF",
)
RECORDED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "KMP_", "GOMP_")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    name: str
    memory_bytes: int
    driver: str


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Everything about the machine and the software that can move a measurement."""

    host: str
    system: str
    python: str
    scalelab: str
    torch: str | None
    processor: str | None
    num_cores: int
    """Logical cores that this process may use."""
    num_machine_cores: int
    """Logical cores of the machine."""
    memory_bytes: int
    gpus: tuple[Gpu, ...]
    load_average: float | None
    """Of the last minute."""
    frequency_governor: str | None
    git_commit: str | None
    git_is_dirty: bool | None
    variables: dict[str, str]
    """Environment variables that change how torch, NCCL, gloo or OpenMP behave."""


def read_environment(version: str) -> Environment:
    """Look at this machine now."""
    commit, is_dirty = read_git_state(Path.cwd())
    return Environment(
        host=platform.node(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        scalelab=version,
        torch=installed_version("torch"),
        processor=read_processor_name(),
        num_cores=len(usable_cores()),
        num_machine_cores=os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        gpus=find_gpus(),
        load_average=read_load_average(),
        frequency_governor=_read_line(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        git_commit=commit,
        git_is_dirty=is_dirty,
        variables={
            name: value
            for name, value in sorted(os.environ.items())
            if name in RECORDED_VARIABLES or name.startswith(RECORDED_PREFIXES)
        },
    )


def installed_version(package: str) -> str | None:
    """The version of an installed package, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def usable_cores() -> tuple[int, ...]:
    """The logical cores that this process may run on, in order."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def count_cores() -> int:
    """How many cores' worth of time this process may use: a control group's quota can allow fewer than it sees."""
    quota = read_cpu_quota()
    seen = len(usable_cores())
    return seen if quota is None else max(1, min(seen, int(quota)))


def read_load_average() -> float | None:
    """How many processes wanted to run, averaged over the last minute."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def read_processor_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    for line in lines:
        if line.startswith(("model name", "Model", "cpu model")):
            return line.partition(":")[2].strip()
    return platform.processor() or None


def find_gpus() -> tuple[Gpu, ...]:
    """The NVIDIA devices that this process may use, as the driver lists them."""
    if shutil.which("nvidia-smi") is None:
        return ()
    query = [
        "nvidia-smi",
        "--query-gpu=index,name,memory.total,driver_version",
        "--format=csv,noheader,nounits",
    ]
    listing = _run(query)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    wanted = None if visible is None else [part.strip() for part in visible.split(",") if part.strip()]
    if wanted and all(part.startswith(("GPU-", "MIG-")) for part in wanted):
        wanted = [str(index) for index in range(len(wanted))]  # named by UUID: as many as are named
    found = []
    for line in (listing or "").splitlines():
        fields = [part.strip() for part in line.split(",")]
        if len(fields) != 4 or not fields[2].isdigit() or (wanted is not None and fields[0] not in wanted):
            continue
        found.append(Gpu(name=fields[1], memory_bytes=int(fields[2]) * 2**20, driver=fields[3]))
    return tuple(found)


def read_git_state(directory: Path) -> tuple[str | None, bool | None]:
    """The commit that `directory` is at and whether it has uncommitted changes."""
    commit = _run(["git", "-C", str(directory), "rev-parse", "HEAD"])
    if not commit:
        return None, None
    status = _run(["git", "-C", str(directory), "status", "--porcelain", "--untracked-files=no"])
    return commit.strip(), None if status is None else bool(status.strip())


def read_stolen_seconds() -> tuple[float, float] | None:
    """Processor seconds that the hypervisor gave to others, and all of them, since the host started."""
    if sys.platform != "linux":
        return None
    times = psutil.cpu_times()
    return times.steal, sum(times)


def read_allowed_memory() -> int:
    """Bytes that programs may take in all: the machine's, or fewer where a control group of this process says so."""
    total, limit = psutil.virtual_memory().total, read_memory_limit()
    return total if limit is None else min(total, limit)


def read_available_memory() -> int:
    """Bytes that programs could still take without others losing theirs, within this process's control groups."""
    available, left = psutil.virtual_memory().available, read_memory_left()
    return available if left is None else min(available, left)


def count_oom_kills() -> int | None:
    """How many processes the kernel has killed for want of memory since it started."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        return None
    return None


def _run(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _read_line(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None

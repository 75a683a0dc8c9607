"""Hardware, software, git and load: what a measurement was taken on, recorded with every run.

Read without importing torch: versions come from package metadata, GPUs from the driver's own tools. What cannot be
found out is None. psutil is imported where it is needed: showing a run takes less time than importing it.

What the kernel allows this process: limits of memory and of processor time, by control group.

A process is in one group of a tree, and every group on the way from there to the root may have a limit of its own: a
batch job's stands two or three levels above its tasks, a container's at its root. What counts is the smallest. Which
group it is stands in /proc/self/cgroup, and where the tree is mounted in /proc/self/mountinfo (cgroups(7)):

    version 2   one tree: `memory.max` and `memory.current`, `cpu.max` as quota and period
    version 1   a tree for every controller: `memory.limit_in_bytes`, `cpu.cfs_quota_us` over `cpu.cfs_period_us`

Both may be there at once, each with some of the controllers. A container may see only a part of its tree, mounted as if
it were the root: limits above it are hidden inside. A limit that cannot be read is unknown.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

Number = TypeVar("Number", int, float)

ROOT = Path("/")
NO_LIMIT = 2**60
"""Version 1 has no word for none: it writes the largest number of whole pages."""


class Group(NamedTuple):
    """One group on the way from the process's own to the root."""

    directory: Path
    is_unified: bool
    """Whether it is of version 2."""

    def read(self, name: str) -> str:
        """One of its files; empty: there is none, or it is hidden."""
        return read_text(self.directory / name)

    def read_number(self, name: str) -> int | None:
        text = self.read(name).strip()
        return int(text) if re.fullmatch(r"-?\d+", text) else None


def read_cpu_quota(root: Path = ROOT) -> float | None:
    """How many cores' worth of time this process may use at once; None: no limit is known."""
    return _find_least(_read_quota(group) for group in list_groups("cpu", root))


def read_memory_limit(root: Path = ROOT) -> int | None:
    """How many bytes the processes of the most limited group may hold; None: no limit is known."""
    return _find_least(_read_limit(group) for group in list_groups("memory", root))


def read_memory_left(root: Path = ROOT) -> int | None:
    """How many bytes this process could still take before a group's limit is reached; None: no limit is known."""
    return _find_least(_read_left(group) for group in list_groups("memory", root))


def list_groups(controller: str, root: Path = ROOT) -> list[Group]:
    """The groups of this process that the controller may be limited by, its own first."""
    own = _read_own_groups(root)
    found: list[Group] = []
    for mount, top, options in _list_mounts(root):
        is_unified = options is None
        path = own.get("" if is_unified else controller)
        if path is None or (options is not None and controller not in options):
            continue
        inside = path.removeprefix(top.rstrip("/")) if _is_within(path, top) else ""
        parts = [part for part in inside.split("/") if part and part != ".."]
        found += [Group(mount.joinpath(*parts[:depth]), is_unified) for depth in range(len(parts), -1, -1)]
    return found


def _is_within(path: str, top: str) -> bool:
    """Whether a group is in the part of the tree that is mounted; one that is outside is shown by its dots."""
    return top == "/" or path == top or path.startswith(f"{top}/")


def _read_own_groups(root: Path) -> dict[str, str]:
    """The path of this process's group by controller; that of version 2 has none."""
    found: dict[str, str] = {}
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        found |= dict.fromkeys(controllers.split(","), path)
    return found


def _list_mounts(root: Path) -> Iterator[tuple[Path, str, list[str] | None]]:
    """Where trees are mounted, which group is at the top there, and the controllers; None: version 2."""
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), (after.split() or [""])[0]
        if kind in ("cgroup", "cgroup2") and len(fields) > 4:
            options = None if kind == "cgroup2" else after.split()[-1].split(",")
            yield root / fields[4].lstrip("/"), fields[3], options


def _read_quota(group: Group) -> float | None:
    if group.is_unified:
        quota, _, period = group.read("cpu.max").strip().partition(" ")
    else:
        quota, period = group.read("cpu.cfs_quota_us").strip(), group.read("cpu.cfs_period_us").strip()
    is_limited = quota.isdigit() and period.isdigit() and int(period) > 0
    return int(quota) / int(period) if is_limited else None


def _read_limit(group: Group) -> int | None:
    limit = group.read_number("memory.max" if group.is_unified else "memory.limit_in_bytes")
    return None if limit is None or limit >= NO_LIMIT else limit


def _read_left(group: Group) -> int | None:
    """Memory available below the limit; the page cache can be dropped, and counts as free."""
    limit = _read_limit(group)
    used = group.read_number("memory.current" if group.is_unified else "memory.usage_in_bytes")
    if limit is None or used is None:
        return limit
    name = "inactive_file" if group.is_unified else "total_inactive_file"
    cached = re.search(rf"^{name} (\d+)$", group.read("memory.stat"), re.MULTILINE)
    return max(0, limit - max(0, used - (int(cached[1]) if cached else 0)))


def _find_least(values: Iterable[Number | None]) -> Number | None:
    return min((value for value in values if value is not None), default=None)


def read_text(path: Path) -> str:
    """What a file of the system says; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


RECORDED_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "LD_PRELOAD",
    "MALLOC_CONF",
)
RECORDED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "KMP_", "GOMP_", "RCCL_", "CUDA_MPS_", "FI_", "UCX_")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    name: str
    memory_bytes: int
    driver: str
    has_ecc: bool | None = None
    """Whether its memory corrects errors, which takes some of its bandwidth; None: unknown."""
    has_mig: bool | None = None
    """Whether it is cut into slices."""


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
    topology: str = ""
    """How GPUs and network cards are connected, as `nvidia-smi topo -m` prints it; empty: unknown."""
    has_mps: bool | None = None
    """Whether NVIDIA's MPS shares the GPUs between processes; None: there are none."""


def read_environment(version: str) -> Environment:
    """Look at this machine now."""
    commit, is_dirty = read_git_state(Path.cwd())
    gpus = find_gpus()
    return Environment(
        host=platform.node(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        scalelab=version,
        torch=installed_version("torch"),
        processor=read_processor_name(),
        num_cores=len(usable_cores()),
        num_machine_cores=os.cpu_count() or 1,
        memory_bytes=_read_memory().total,
        gpus=gpus,
        load_average=read_load_average(),
        frequency_governor=_read_line(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        git_commit=commit,
        git_is_dirty=is_dirty,
        variables={
            name: value
            for name, value in sorted(os.environ.items())
            if name in RECORDED_VARIABLES or name.startswith(RECORDED_PREFIXES)
        },
        topology=(run_tool(["nvidia-smi", "topo", "-m"]) or "").strip() if gpus else "",
        has_mps=Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()
        if gpus
        else None,
    )


def installed_version(package: str) -> str | None:
    """The version of an installed package, without importing it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
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


SWITCHES = {"Enabled": True, "Disabled": False}
"""nvidia-smi's words; a GPU without the switch has another."""


def find_gpus() -> tuple[Gpu, ...]:
    """The NVIDIA devices that this process may use, as the driver lists them."""
    if shutil.which("nvidia-smi") is None:
        return ()
    query = [
        "nvidia-smi",
        "--query-gpu=index,name,memory.total,driver_version,ecc.mode.current,mig.mode.current",
        "--format=csv,noheader,nounits",
    ]
    listing = run_tool(query)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    wanted = None if visible is None else [part.strip() for part in visible.split(",") if part.strip()]
    if wanted and all(part.startswith(("GPU-", "MIG-")) for part in wanted):
        wanted = [str(index) for index in range(len(wanted))]  # named by UUID: as many as are named
    found = []
    for line in (listing or "").splitlines():
        fields = [part.strip() for part in line.split(",")]
        if len(fields) not in (4, 6) or not fields[2].isdigit() or (wanted is not None and fields[0] not in wanted):
            continue
        ecc, mig = (SWITCHES.get(word) for word in (*fields[4:], "", "")[:2])
        memory = int(fields[2]) * 2**20
        found.append(Gpu(name=fields[1], memory_bytes=memory, driver=fields[3], has_ecc=ecc, has_mig=mig))
    return tuple(found)


def read_git_state(directory: Path) -> tuple[str | None, bool | None]:
    """The commit that `directory` is at and whether it has uncommitted changes."""
    commit = run_tool(["git", "-C", str(directory), "rev-parse", "HEAD"])
    if not commit:
        return None, None
    status = run_tool(["git", "-C", str(directory), "status", "--porcelain", "--untracked-files=no"])
    return commit.strip(), None if status is None else bool(status.strip())


def read_stolen_seconds() -> tuple[float, float] | None:
    """Processor seconds that the hypervisor gave to others, and all of them, since the host started."""
    if sys.platform != "linux":
        return None
    import psutil

    times = psutil.cpu_times()
    return times.steal, sum(times)


def read_allowed_memory() -> int:
    """Bytes that programs may take in all: the machine's, or fewer where a control group of this process says so."""
    total: int = _read_memory().total
    limit = read_memory_limit()
    return total if limit is None else min(total, limit)


def read_available_memory() -> int:
    """Bytes that programs could still take without others losing theirs, within this process's control groups."""
    available: int = _read_memory().available
    left = read_memory_left()
    return available if left is None else min(available, left)


def _read_memory() -> Any:
    """The machine's memory, whatever this process may take of it."""
    import psutil

    return psutil.virtual_memory()


def count_oom_kills() -> int | None:
    """How many processes the kernel has killed because memory ran out since it started."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        return None
    return None


def run_tool(command: Sequence[str]) -> str | None:
    """What a tool of the system prints; None where it is missing, fails or does not answer."""
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

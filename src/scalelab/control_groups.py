"""What the kernel allows this process: limits of memory and of processor time, by control group.

A process is in one group of a tree, and every group on the way from there to the root may have a limit of its own: a
batch job's stands two or three levels above its tasks, a container's at its root. What counts is the smallest. Which
group it is stands in /proc/self/cgroup, and where the tree is mounted in /proc/self/mountinfo (cgroups(7)):

    version 2   one tree: `memory.max` and `memory.current`, `cpu.max` as quota and period
    version 1   a tree for every controller: `memory.limit_in_bytes`, `cpu.cfs_quota_us` over `cpu.cfs_period_us`

Both may be there at once, each with some of the controllers. A container may see only a part of its tree, mounted as if
it were the root: limits above it are hidden from everybody inside. What cannot be read is no limit that is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

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
        return _read_text(self.directory / name)

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
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        found |= dict.fromkeys(controllers.split(","), path)
    return found


def _list_mounts(root: Path) -> Iterator[tuple[Path, str, list[str] | None]]:
    """Where trees are mounted, which group is at the top there, and the controllers; None: version 2."""
    for line in _read_text(root / "proc/self/mountinfo").splitlines():
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
    """What is free below the limit; cached files that nobody uses are given up first, and count as free."""
    limit = _read_limit(group)
    used = group.read_number("memory.current" if group.is_unified else "memory.usage_in_bytes")
    if limit is None or used is None:
        return limit
    name = "inactive_file" if group.is_unified else "total_inactive_file"
    cached = re.search(rf"^{name} (\d+)$", group.read("memory.stat"), re.MULTILINE)
    return max(0, limit - max(0, used - (int(cached[1]) if cached else 0)))


def _find_least(values: Iterable[Number | None]) -> Number | None:
    return min((value for value in values if value is not None), default=None)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

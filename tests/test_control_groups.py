"""Limits of control groups, in trees of both versions that are made here: the smallest of all ancestors counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalelab.records import environment
from scalelab.records.environment import (
    list_groups,
    read_allowed_memory,
    read_available_memory,
    read_cpu_quota,
    read_memory_left,
    read_memory_limit,
)

UNIFIED = "41 31 0:38 {top} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw"
MEMORY = "35 31 0:32 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
PROCESSOR = "32 31 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
JOB = "/slurm/uid_0/job_7/step_0/task_1"


def lay_out(root: Path, groups: str, mounts: list[str], files: dict[str, str], top: str = "/") -> Path:
    """A machine with this process in these groups, and files below the mounted trees."""
    own = root / "proc/self"
    own.mkdir(parents=True)
    (own / "cgroup").write_text(groups)
    (own / "mountinfo").write_text("\n".join(["23 1 0:2 / /proc rw - proc proc rw", *mounts]).format(top=top))
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_a_limit_of_a_group_further_up_counts(tmp_path: Path) -> None:
    files = {
        "cpu.max": "max 100000\n",
        "slurm/uid_0/job_7/memory.max": "8000\n",
        "slurm/uid_0/job_7/memory.current": "3000\n",
        "slurm/uid_0/job_7/cpu.max": "150000 100000\n",
        "slurm/uid_0/job_7/step_0/memory.max": "max\n",
        "slurm/uid_0/job_7/step_0/task_1/memory.max": "9000\n",
        "slurm/uid_0/job_7/step_0/task_1/memory.current": "1000\n",
        "slurm/uid_0/job_7/step_0/task_1/cpu.max": "400000 100000\n",
    }
    root = lay_out(tmp_path, f"0::{JOB}\n", [UNIFIED], files)
    assert read_memory_limit(root) == 8000
    assert read_memory_left(root) == 5000
    assert read_cpu_quota(root) == 1.5


def test_the_first_version_has_a_tree_for_every_controller(tmp_path: Path) -> None:
    groups = f"4:memory:{JOB}\n2:cpu,cpuacct:/docker\n0::/\n"
    files = {
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/slurm/uid_0/job_7/memory.limit_in_bytes": "8000\n",
        "memory/slurm/uid_0/job_7/memory.usage_in_bytes": "6000\n",
        "memory/slurm/uid_0/job_7/memory.stat": "cache 4000\ntotal_inactive_file 2500\ninactive_file 1\n",
        "memory/slurm/uid_0/job_7/step_0/memory.limit_in_bytes": "9223372036854771712\n",
        "cpu,cpuacct/docker/cpu.cfs_quota_us": "250000\n",
        "cpu,cpuacct/docker/cpu.cfs_period_us": "100000\n",
        "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
    }
    root = lay_out(tmp_path, groups, [MEMORY, PROCESSOR], files)
    assert read_memory_limit(root) == 8000
    assert read_memory_left(root) == 4500, "files that are only cached are given up first"
    assert read_cpu_quota(root) == 2.5


def test_a_tree_that_this_process_is_in_no_group_of_limits_nothing(tmp_path: Path) -> None:
    root = lay_out(tmp_path, "4:memory:/a\n", [UNIFIED, MEMORY, PROCESSOR], {"memory.max": "5000"})
    assert [group.directory.name for group in list_groups("memory", root)] == ["a", "memory"]
    assert list_groups("cpu", root) == []
    assert read_memory_limit(root) is None


def test_both_versions_at_once_are_both_asked(tmp_path: Path) -> None:
    files = {
        "memory/a/memory.limit_in_bytes": "7000",
        "unified/b/memory.max": "6000",
        "unified/b/cpu.max": "50000 100000",
    }
    unified = UNIFIED.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified ")
    root = lay_out(tmp_path, "4:memory:/a\n0::/b\n", [MEMORY, unified], files)
    assert read_memory_limit(root) == 6000
    assert read_cpu_quota(root) == 0.5


def test_a_container_sees_the_part_of_the_tree_that_it_is_in(tmp_path: Path) -> None:
    files = {"memory.max": "5000", "inner/memory.max": "7000"}
    root = lay_out(tmp_path / "a", "0::/docker/c1/inner\n", [UNIFIED], files, top="/docker/c1")
    assert [group.directory.name for group in list_groups("memory", root)] == ["inner", "cgroup"]
    assert read_memory_limit(root) == 5000
    hidden = lay_out(tmp_path / "b", "0::/../other\n", [UNIFIED], files, top="/docker/c1")
    assert read_memory_limit(hidden) == 5000


@pytest.mark.parametrize("text", ["max 100000", "-1", "", "nonsense", "100 0", "100"])
def test_what_is_no_quota_is_none(text: str, tmp_path: Path) -> None:
    assert read_cpu_quota(lay_out(tmp_path, "0::/\n", [UNIFIED], {"cpu.max": text})) is None


def test_without_control_groups_nothing_is_limited(tmp_path: Path) -> None:
    assert read_cpu_quota(tmp_path) is read_memory_limit(tmp_path) is read_memory_left(tmp_path) is None
    damaged = lay_out(tmp_path, "nonsense\n3:\n", ["31 - cgroup2", "x y z"], {})
    assert read_memory_limit(damaged) is None


def test_available_memory_is_what_a_group_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "read_memory_left", lambda: 1000)
    assert read_available_memory() == 1000
    monkeypatch.setattr(environment, "read_memory_left", lambda: None)
    assert read_available_memory() > 1000


def test_allowed_memory_is_no_more_than_a_group_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "read_memory_limit", lambda: None)
    there = read_allowed_memory()
    monkeypatch.setattr(environment, "read_memory_limit", lambda: 1000)
    assert read_allowed_memory() == 1000 < there

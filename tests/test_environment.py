"""What a measurement was taken on: found without torch, and None if it cannot be found out."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import psutil
import pytest

from scalelab.records import environment
from scalelab.records.environment import (
    Environment,
    Gpu,
    count_oom_kills,
    find_gpus,
    installed_version,
    read_environment,
    read_git_state,
    read_load_average,
    read_processor_name,
    read_stolen_seconds,
    usable_cores,
)
from scalelab.records.trial import from_builtins, to_builtins
from tests.records import make_environment


def test_an_environment_survives_json() -> None:
    for found in (make_environment(), read_environment("1.2.3")):
        assert from_builtins(json.loads(json.dumps(to_builtins(found))), Environment) == found


def test_this_machine_is_described() -> None:
    found = read_environment("1.2.3")
    assert found.scalelab == "1.2.3"
    assert found.torch == installed_version("torch")
    assert found.num_cores == len(usable_cores())
    assert 1 <= found.num_cores <= found.num_machine_cores
    assert found.memory_bytes == psutil.virtual_memory().total


def test_only_variables_that_move_a_measurement_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    variables = read_environment("1").variables
    assert variables["OMP_NUM_THREADS"] == "3"
    assert variables["NCCL_DEBUG"] == "INFO"
    assert "AWS_SECRET_ACCESS_KEY" not in variables
    assert list(variables) == sorted(variables)


def test_the_version_of_a_package_is_known_without_importing_it() -> None:
    assert installed_version("psutil") == psutil.__version__
    assert installed_version("no-such-package") is None


def test_usable_cores_are_those_this_process_is_pinned_to() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores() == (min(before),)
    finally:
        os.sched_setaffinity(0, before)
    assert usable_cores() == tuple(sorted(before))


@pytest.mark.parametrize(("counted", "cores"), [(3, (0, 1, 2)), (None, (0,))])
def test_a_system_without_affinity_has_all_its_cores(
    monkeypatch: pytest.MonkeyPatch, counted: int | None, cores: tuple[int, ...]
) -> None:
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: counted)
    assert usable_cores() == cores


@pytest.fixture
def path_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory that programs are looked for in."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return directory


def install(directory: Path, name: str, script: str) -> None:
    (directory / name).write_text(f"#!/bin/sh\n{script}\n")
    (directory / name).chmod(0o755)


TWO_GPUS = "echo '0, NVIDIA H100, 81559, 550.54'; echo '1, NVIDIA H100, 81559, 550.54'; echo '2, Broken, [N/A], 550'"


def test_gpus_are_those_that_the_driver_lists(path_directory: Path) -> None:
    install(path_directory, "nvidia-smi", TWO_GPUS)
    assert find_gpus() == (Gpu(name="NVIDIA H100", memory_bytes=81559 * 2**20, driver="550.54"),) * 2


def test_ecc_slices_and_topology_are_recorded(
    path_directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpus = "echo '0, A100, 40960, 550, Enabled, Disabled'; echo '1, A100, 40960, 550, Disabled, [N/A]'"
    install(path_directory, "nvidia-smi", f'case "$1" in topo) echo "GPU0 X NV12";; *) {gpus};; esac')
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    (tmp_path / "control").touch()
    found = read_environment("0")
    assert [(gpu.has_ecc, gpu.has_mig) for gpu in found.gpus] == [(True, False), (False, None)]
    assert (found.topology, found.has_mps) == ("GPU0 X NV12", True)
    assert found.variables["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path)


@pytest.mark.parametrize(("visible", "num_gpus"), [("1", 1), ("0, 1", 2), ("", 0), ("-1", 0), ("7", 0)])
def test_gpus_that_are_hidden_are_not_counted(
    path_directory: Path, monkeypatch: pytest.MonkeyPatch, visible: str, num_gpus: int
) -> None:
    install(path_directory, "nvidia-smi", TWO_GPUS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert len(find_gpus()) == num_gpus


@pytest.mark.parametrize("script", ["echo 'NVIDIA-SMI has failed'; exit 9", "echo 'No devices were found'", "exit 0"])
def test_a_driver_that_fails_has_no_gpus(path_directory: Path, script: str) -> None:
    install(path_directory, "nvidia-smi", script)
    assert find_gpus() == ()


def test_a_machine_without_driver_has_no_gpus(path_directory: Path) -> None:
    assert find_gpus() == ()


def git(directory: Path, *words: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(directory), *identity, *words], check=True, capture_output=True)


def test_the_commit_and_uncommitted_changes_are_found(tmp_path: Path) -> None:
    git(tmp_path, "init")
    (tmp_path / "file").write_text("a")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "first")
    commit, is_dirty = read_git_state(tmp_path)
    assert commit is not None
    assert len(commit) == 40
    assert is_dirty is False
    (tmp_path / "untracked").write_text("no change of what is measured")
    assert read_git_state(tmp_path) == (commit, False)
    (tmp_path / "file").write_text("b")
    assert read_git_state(tmp_path) == (commit, True)


def test_a_repository_without_commits_has_no_state(tmp_path: Path) -> None:
    git(tmp_path, "init")
    assert read_git_state(tmp_path) == (None, None)


def test_without_git_the_commit_is_unknown(path_directory: Path) -> None:
    assert read_git_state(path_directory) == (None, None)


def test_what_cannot_be_read_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise PermissionError

    monkeypatch.setattr(environment.Path, "read_text", refuse)
    assert count_oom_kills() is None
    assert isinstance(read_processor_name(), str | None)


def test_kills_for_want_of_memory_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.Path, "read_text", lambda _: "oom_kill_disable 7\noom_kill 3\n")
    assert count_oom_kills() == 3
    monkeypatch.setattr(environment.Path, "read_text", lambda _: "nr_free_pages 1\n")
    assert count_oom_kills() is None


def test_stolen_time_is_a_part_of_all_time() -> None:
    times = read_stolen_seconds()
    assert times is not None
    stolen, total = times
    assert 0 <= stolen <= total


def test_a_system_without_load_average_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError

    assert read_load_average() is not None
    monkeypatch.setattr(os, "getloadavg", refuse)
    assert read_load_average() is None

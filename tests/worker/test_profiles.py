"""torch's profiler in a training: it is stopped when threads have finished, and nodes are counted as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalelab.records.settings import TrainingRun
from scalelab.worker.instruments import profiles
from scalelab.worker.instruments.profiles import RankProfiler, count_nodes


@pytest.mark.parametrize(("num_steps", "num_pauses"), [(0, 0), (2, 1), (3, 1), (5, 1)])
def test_threads_finish_before_a_recording_is_stopped_also_by_the_end_of_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_steps: int, num_pauses: int
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it with the first table of its profiler
    pauses: list[None] = []
    monkeypatch.setattr(profiles, "let_threads_finish", lambda: pauses.append(None))
    course = TrainingRun(steps=9, profile_wait=1, profile_warmup=1, profile_active=2)
    profiler = RankProfiler(course, tmp_path / "trace/rank0.json.gz", 0)
    for _ in range(num_steps):
        profiler.advance()
    profiler.close()
    assert len(pauses) == num_pauses
    assert (tmp_path / "trace/rank0.json.gz").exists() == bool(num_pauses)


def test_nodes_are_those_that_torchrun_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GROUP_WORLD_SIZE", raising=False)
    assert count_nodes() == 1
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    assert count_nodes() == 3


def test_without_torchrun_nodes_are_the_hosts_that_ranks_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(names: list[str], own: str) -> None:
        names[:] = [own, own, "another", "another"]

    monkeypatch.delenv("GROUP_WORLD_SIZE", raising=False)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    assert count_nodes() == 2

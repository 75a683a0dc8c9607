"""What a memory limit counts, and how close a rank came to it."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

from scalelab.launch.local import LocalLauncher
from scalelab.records.trial import Status, StepPlan
from scalelab.worker.failure import is_out_of_memory
from scalelab.worker.memory.limit import has_reached_limit, read_data_bytes, read_peak_data_bytes, read_status
from tests.worker.trials import launch, make_trial

PLAN = StepPlan(lead_in_steps=2, clean_steps=1, phase_steps=0, comm_free_steps=0, cycles=1)
LIMIT = 64_000_000


def make_limited(**fields: Any) -> Any:
    defaults = {"strategy": "single", "num_ranks": 1, "plan": PLAN, "allocator": "pages", "memory_limit_bytes": LIMIT}
    return make_trial(**(defaults | fields))


@pytest.mark.ranks
def test_a_rank_says_what_it_took_of_its_limit(launcher: LocalLauncher, tmp_path: Path) -> None:
    small = launch(launcher, make_limited(options={"dim": 256, "depth": 1}, global_batch=16), tmp_path / "small")
    large = launch(launcher, make_limited(options={"dim": 256, "depth": 1}, global_batch=2016), tmp_path / "large")
    taken = [result.ranks[0].limited_bytes or 0 for result in (small, large)]
    assert small.ranks[0].limit_bytes == LIMIT
    # At least four pooled batches of inputs and targets for every sample, and never more than was allowed.
    assert taken[1] - taken[0] > 2000 * 4 * 2 * 256 * 4
    assert taken[1] <= LIMIT


@pytest.mark.ranks
def test_with_pages_of_their_own_launches_take_the_same(launcher: LocalLauncher, tmp_path: Path) -> None:
    trial = make_limited(options={"dim": 128, "depth": 2}, global_batch=256)
    taken = [launch(launcher, trial, tmp_path / str(number)).ranks[0].limited_bytes for number in range(3)]
    assert None not in taken
    assert max(taken) - min(taken) < 256 * 1024  # type: ignore[type-var, operator]


@pytest.mark.ranks
def test_a_limit_that_is_just_too_small_is_out_of_memory(launcher: LocalLauncher, tmp_path: Path) -> None:
    wide = {"options": {"dim": 256, "depth": 1}, "global_batch": 2016}
    taken = launch(launcher, make_limited(**wide), tmp_path / "free").ranks[0].limited_bytes
    assert taken is not None
    ran = launch(launcher, make_limited(**wide, memory_limit_bytes=taken + 1_000_000), tmp_path / "ran")
    failed = launch(launcher, make_limited(**wide, memory_limit_bytes=taken - 1_000_000), tmp_path / "failed")
    assert (ran.status, failed.status) == (Status.COMPLETED, Status.OUT_OF_MEMORY)


def test_the_peak_is_never_below_what_is_there() -> None:
    assert read_peak_data_bytes() >= read_data_bytes() > 0
    assert read_status()["VmPeak"] >= read_status()["VmSize"]


def test_vague_words_are_about_memory_only_where_a_limit_was_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    vague = RuntimeError("could not create a primitive")
    assert not has_reached_limit()
    assert not is_out_of_memory(vague)
    near = int(read_peak_data_bytes() * 1.05)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (near, near))
    assert is_out_of_memory(vague)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4 * near, 4 * near))
    assert not is_out_of_memory(vague)

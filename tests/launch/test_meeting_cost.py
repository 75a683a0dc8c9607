"""A thousand ranks meet: the files that they open grow with the ranks, not with their square."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.meeting import FileCount, meet_all
from scalelab.launch.agreement import end_file, place_file, write_words
from scalelab.launch.rendezvous import SPARE_FILES, allow_connections
from scalelab.launch.stepped import StepWatch
from tests.worker.trials import make_trial

NUM_RANKS = 1024


@pytest.fixture
def many_files() -> Iterator[None]:
    """Both ends of every connection are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 3 * NUM_RANKS:
        pytest.skip(f"this process may open {hard} files at most")
    resource.setrlimit(resource.RLIMIT_NOFILE, (3 * NUM_RANKS, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_a_thousand_ranks_open_a_few_files_each_to_meet() -> None:
    count = FileCount()
    files = {num_ranks: meet_all(num_ranks, count)[1] for num_ranks in (64, NUM_RANKS)}
    assert files[NUM_RANKS] / NUM_RANKS == files[64] / 64, "each rank opens as many as in a small job"
    assert files[NUM_RANKS] <= 2 * NUM_RANKS


def test_the_launcher_opens_every_word_once_however_often_it_looks(tmp_path: Path) -> None:
    trial = make_trial(num_ranks=NUM_RANKS, global_batch=NUM_RANKS)
    for rank in range(NUM_RANKS):
        write_words(place_file(tmp_path, rank), {"launch": "l", "node": "n"})
    end = {"launch": "l", "code": 0, "signal": None, "is_timed_out": False, "has_oom_kill": False}
    write_words(end_file(tmp_path, 0), end)
    watch, count = StepWatch(trial, tmp_path, "l", []), FileCount()
    count.place = str(tmp_path)
    for _ in range(20):
        watch.look()
    assert count.num_files == NUM_RANKS + 1
    for rank in range(1, NUM_RANKS):
        write_words(end_file(tmp_path, rank), end)
    count.num_files = 0
    ends = watch.read_ends("")
    count.place = ""
    assert ends is not None
    assert {one.code for one in ends} == {0}
    assert count.num_files == NUM_RANKS - 1


def test_rank_0_may_open_a_connection_for_every_rank() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        allow_connections(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300 + SPARE_FILES
        allow_connections(10)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300 + SPARE_FILES, "never lowered"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

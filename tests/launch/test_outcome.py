"""How a trial ended, from how its ranks ended."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from scalelab.launch.agreement import log_file
from scalelab.launch.outcome import RankEnd, find_cause
from scalelab.records.trial import Status
from tests.records import make_record


@pytest.mark.parametrize(
    ("limit", "words", "status"),
    [
        (30_000_000, "terminate called without an active exception", Status.OUT_OF_MEMORY),
        (30_000_000, "the script's own words", Status.CRASHED),
        (None, "terminate called without an active exception", Status.CRASHED),
    ],
)
def test_a_rank_that_cannot_start_a_thread_within_its_limit_is_out_of_memory(
    limit: int | None, words: str, status: Status, tmp_path: Path
) -> None:
    log_file(tmp_path, 0).write_text(f"{words}\n")
    trial = make_record(num_ranks=1, memory_limit_bytes=limit)
    end = RankEnd(code=-signal.SIGABRT, was_killed=False)
    blame = find_cause(trial, [end], [None], tmp_path, has_oom_kill=False)
    assert blame is not None
    assert blame.status is status
    assert ("could not start a thread within --memory-limit 30 MB" in blame.reason) == (status is Status.OUT_OF_MEMORY)


def test_a_rank_that_aborts_is_quoted_with_the_exception_that_ended_it(tmp_path: Path) -> None:
    said = "terminate called after throwing an instance of 'gloo::IoException'\n  what():  Connection closed by peer\n"
    log_file(tmp_path, 0).write_text(said)
    end = RankEnd(code=-signal.SIGABRT, was_killed=False)
    blame = find_cause(make_record(num_ranks=1), [end], [None], tmp_path, has_oom_kill=False)
    assert blame is not None
    assert blame.reason.startswith("rank 0 was killed by SIGABRT (Connection closed by peer); see ")

"""DDP's own counters: asked of real ranks, and left out where DDP says nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalelab.launch.local import LocalLauncher
from scalelab.records.trial import Status
from scalelab.worker.instruments.instruments import COUNTERS, NUM_COUNTED_STEPS, make_counters
from tests.worker.trials import launch, make_trial

SAID = {name: 1_000_000 * number for number, name in enumerate(COUNTERS.values(), start=1)}


def test_nanoseconds_become_seconds_step_by_step() -> None:
    counters = make_counters([{**SAID, "rebuilt_bucket_sizes": "1024, 4096"}] * 3)
    assert counters is not None
    assert counters.forward_seconds == (0.001,) * 3
    assert counters.overlap_seconds == (0.004,) * 3
    assert counters.exposed_seconds == pytest.approx([-0.001] * 3)
    assert counters.bucket_bytes == (1024, 4096)


def test_buckets_that_were_never_rebuilt_are_the_first_ones() -> None:
    counters = make_counters([{**SAID, "rebuilt_bucket_sizes": "", "bucket_sizes": "64"}])
    assert counters is not None
    assert counters.bucket_bytes == (64,)


def test_a_counter_that_is_missing_leaves_no_record() -> None:
    assert make_counters([]) is None
    assert make_counters([SAID, {}]) is None


@pytest.mark.ranks
def test_every_rank_of_ddp_is_asked_and_its_buckets_hold_all_gradients(launcher: LocalLauncher, tmp_path: Path) -> None:
    result = launch(launcher, make_trial(instruments=("counters",)), tmp_path)
    assert result.status is Status.COMPLETED, result.reason
    for report in result.ranks:
        assert report.counters is not None
        assert len(report.counters.communication_seconds) == NUM_COUNTED_STEPS
        assert all(seconds >= 0 for seconds in report.counters.communication_seconds)
        assert sum(report.counters.bucket_bytes) == 4 * (report.num_parameters or 0)


@pytest.mark.ranks
def test_the_plain_loop_has_no_counters(launcher: LocalLauncher, tmp_path: Path) -> None:
    result = launch(launcher, make_trial(strategy="single", num_ranks=1, instruments=("counters",)), tmp_path)
    assert result.status is Status.COMPLETED, result.reason
    assert result.ranks[0].counters is None

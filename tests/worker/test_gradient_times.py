"""When gradients are ready: medians over steps, asked of real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalelab.launch.local import LocalLauncher
from scalelab.records.trial import Status
from scalelab.worker.instruments.instruments import make_gradient_times
from tests.worker.trials import launch, make_trial


def test_gradients_come_in_the_order_in_which_they_are_ready() -> None:
    found = make_gradient_times([40, 80], [([0.3, 0.1], 0.4), ([0.5, 0.2], 0.6), ([0.4, 0.15], 0.5)])
    assert found is not None
    assert found.ready_seconds == (0.15, 0.4)
    assert found.payload_bytes == (80, 40)
    assert found.backward_seconds == 0.5


def test_a_parameter_without_a_gradient_is_left_out() -> None:
    found = make_gradient_times([40, 80], [([0.3, None], 0.4)])
    assert found is not None
    assert found.payload_bytes == (40,)
    assert make_gradient_times([40], [([None], 0.4)]) is None


@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "is_seen"), [("ddp", True), ("fsdp-full", False)])
def test_every_rank_with_whole_gradients_tells_all_of_them(
    strategy: str, is_seen: bool, launcher: LocalLauncher, tmp_path: Path
) -> None:
    result = launch(launcher, make_trial(strategy=strategy, instruments=("gradients",)), tmp_path)
    assert result.status is Status.COMPLETED, result.reason
    for report in result.ranks:
        assert (report.gradients is not None) == is_seen
        if report.gradients is not None:
            assert sum(report.gradients.payload_bytes) == 4 * (report.num_parameters or 0)
            assert list(report.gradients.ready_seconds) == sorted(report.gradients.ready_seconds)
            assert 0 < report.gradients.ready_seconds[-1] <= report.gradients.backward_seconds
            assert (report.gradients.core_seconds or 0) > 0

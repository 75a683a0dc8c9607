"""The clock of stalls: it never runs backwards, and says nothing if nothing is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalelab.launch.local import LocalLauncher
from scalelab.records.trial import StepKind, StepPlan
from scalelab.worker import loop as stalls
from scalelab.worker.loop import StallClock
from tests.worker.trials import launch, make_trial


def test_it_reads_nanoseconds_of_the_second_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "schedstat").write_text("7310311 24127077 4\n")
    monkeypatch.setattr(stalls, "SCHEDSTAT", str(tmp_path / "schedstat"))
    with StallClock() as clock:
        assert clock.read() == pytest.approx(0.024127077)
    assert clock.read() is None


def test_where_nobody_counts_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "SCHEDSTAT", str(tmp_path / "nothing"))
    with StallClock() as clock:
        assert clock.read() is None
    with StallClock(is_wanted=False) as clock:
        assert clock.read() is None


@pytest.mark.ranks
def test_phase_timed_steps_carry_their_stalls_and_no_other_step_does(launcher: LocalLauncher, tmp_path: Path) -> None:
    plan = StepPlan(lead_in_steps=1, clean_steps=2, phase_steps=3, comm_free_steps=0, cycles=1)
    result = launch(launcher, make_trial(plan=plan), tmp_path)
    for sample in result.samples:
        stalled = sample.input_stall_seconds, sample.forward_stall_seconds, sample.optimizer_stall_seconds
        if sample.kind is not StepKind.PHASES or not Path(stalls.SCHEDSTAT).exists():
            assert {*stalled, sample.ready_stall_seconds} == {None}
        else:
            assert all(seconds is not None and seconds >= 0 for seconds in stalled)
            assert sample.ready_stall_seconds is not None
            assert sample.ready_stall_seconds <= sample.step_seconds

"""A command that is silent for two seconds says that it works; one that answers sooner does not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from scalelab.cli import app, measuring
from scalelab.runs.scheduler import TrialEnded, TrialStarted
from tests.records import make_record, make_result


def test_what_takes_long_says_so_once_and_what_is_quick_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    has_spoken = threading.Event()
    monkeypatch.setattr(app, "say", lambda words: (said.append(words), has_spoken.set()))
    with app.say_if_slow("quick"):
        pass
    monkeypatch.setattr(app, "SILENT_SECONDS", 0.0)
    with app.say_if_slow("slow"):
        assert has_spoken.wait(60)
    assert said == ["slow"]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What would be said of everything that takes long, with a minus where that is over."""
    found: list[str] = []

    @contextmanager
    def note(words: str) -> Iterator[None]:
        found.append(words)
        try:
            yield
        finally:
            found.append("-")

    monkeypatch.setattr(measuring, "say_if_slow", note)
    monkeypatch.setattr(app, "say_if_slow", note)
    return found


@pytest.mark.parametrize("is_search", [False, True], ids=["planned", "search"])
def test_the_first_trial_or_every_probe_shows_that_it_runs(
    is_search: bool, waits: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with measuring.ProgressReporter(is_search=is_search) as reporter:
        for number in (1, 2):
            trial = make_record(round=number)
            reporter(TrialStarted(trial=trial, number=number, num_trials=2))
            reporter(TrialEnded(result=make_result(trial, wall_seconds=1.0), number=number, num_trials=2))
    assert waits == ([] if is_search else ["[1/2] single-1-r1 is running (loading torch first)", "-"])
    assert capsys.readouterr().err.count(" started\n") == (2 if is_search else 0)


def test_a_trial_that_was_interrupted_is_no_longer_said_to_run(waits: list[str]) -> None:
    with measuring.ProgressReporter() as reporter:
        reporter(TrialStarted(trial=make_record(), number=1, num_trials=1))
    assert waits == ["[1/1] single-1-r1 is running (loading torch first)", "-"]


def test_verbs_without_progress_say_that_they_work(waits: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run_caught(["list", "--limit", "-1"]) == 2
    assert waits == ["scalelab list is working …", "-"]

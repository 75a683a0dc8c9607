"""The trials of a run, one after the other: each result is on disk before the next trial starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from scalelab.errors import LaunchFailed, StorageFull, StoreError
from scalelab.launch.fake import FakeLauncher
from scalelab.records.store import RunStore
from scalelab.records.trial import Cause, Status, Trial, TrialResult
from scalelab.runs.scheduler import Event, Guidance, TrialEnded, TrialStarted, ignore_event, run_trials
from tests.records import make_record, make_store

CONFIGURATIONS = ("single-1", "control")


def start(runs_dir: Path, rounds: int = 3) -> RunStore:
    """Rounds of two configurations, interleaved."""
    trials = [
        make_record(configuration=name, round=number) for number in range(1, rounds + 1) for name in CONFIGURATIONS
    ]
    return make_store(runs_dir, trials=trials)


class WatchedLauncher(FakeLauncher):
    """Looks at the disk whenever a trial starts, and may be interrupted."""

    def __init__(self, store: RunStore, stop_at: str = "", failures: dict[str, Status] | None = None) -> None:
        super().__init__(lambda _: 0.01, failures=failures)
        self.store = store
        self.stop_at = stop_at
        self.seen: list[int] = []

    def launch(self, trial: Trial, directory: Path) -> TrialResult:
        if trial.name == self.stop_at:
            raise KeyboardInterrupt
        self.seen.append(len(RunStore.open(self.store.path).results()[0]))
        assert directory == self.store.trial_directory(trial.name)
        assert (directory / "trial.json").is_file()
        return super().launch(trial, directory)


def test_every_result_is_on_disk_before_the_next_trial_starts(tmp_path: Path) -> None:
    store = start(tmp_path)
    launcher = WatchedLauncher(store)
    results = run_trials(store, launcher, ignore_event)
    assert launcher.seen == [0, 1, 2, 3, 4, 5]
    assert launcher.launched == list(store.record.trials)
    assert results == store.results()[0]


def test_a_run_that_was_interrupted_goes_on_and_repeats_nothing(tmp_path: Path) -> None:
    store = start(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_trials(store, WatchedLauncher(store, stop_at="control-r2"), ignore_event)
    assert len(store.results()[0]) == 3
    again = WatchedLauncher(store)
    results = run_trials(RunStore.open(store.path), again, ignore_event)
    assert again.launched == ["control-r2", "single-1-r3", "control-r3"]
    uninterrupted = start(tmp_path)
    assert results == run_trials(uninterrupted, WatchedLauncher(uninterrupted), ignore_event)


def test_a_complete_run_launches_nothing(tmp_path: Path) -> None:
    store = start(tmp_path)
    first = run_trials(store, WatchedLauncher(store), ignore_event)
    again = WatchedLauncher(store)
    assert run_trials(store, again, ignore_event) == first
    assert again.launched == []


@pytest.mark.parametrize("status", [Status.INVALID, Status.OUT_OF_MEMORY, Status.TIMED_OUT])
def test_a_failure_that_would_come_again_is_not_launched_again(tmp_path: Path, status: Status) -> None:
    store = start(tmp_path)
    launcher = WatchedLauncher(store, failures={"control": status})
    results = run_trials(store, launcher, ignore_event)
    assert [name for name in launcher.launched if name.startswith("control")] == ["control-r1"]
    controls = [result for result in results if result.trial.configuration == "control"]
    assert [result.status for result in controls] == [status, Status.NOT_RUN, Status.NOT_RUN]
    assert controls[1].cause is Cause.REPEATED
    others = [result for result in results if result.trial.configuration != "control"]
    assert [result.status for result in others] == [Status.COMPLETED] * 3


@pytest.mark.parametrize(
    ("num_ranks", "global_batch", "launched"),
    [(2, 8, ["control-r1", "single-1-r1"]), (1, 16, ["control-r1", "single-1-r1", "control-r2", "control-r3"])],
)
def test_a_script_with_another_batch_than_planned_ends_the_study_unless_another_size_may_do(
    tmp_path: Path, num_ranks: int, global_batch: int, launched: list[str]
) -> None:
    class OtherBatchLauncher(FakeLauncher):
        def launch(self, trial: Trial, directory: Path) -> TrialResult:
            result = super().launch(trial, directory)
            is_other = trial.configuration == "single-1"
            return replace(result, status=Status.INVALID, cause=Cause.OTHER_BATCH) if is_other else result

    sizes = {"control": {}, "single-1": {"num_ranks": num_ranks, "strategy": "ddp", "global_batch": global_batch}}
    trials = [
        make_record(configuration=name, round=number, **fields)
        for number in (1, 2, 3)
        for name, fields in sizes.items()
    ]
    launcher = OtherBatchLauncher(lambda _: 0.01)
    results = run_trials(make_store(tmp_path, trials=trials), launcher, ignore_event)
    assert launcher.launched == launched
    assert len(results) == 6


def test_a_crash_is_tried_again_in_every_round(tmp_path: Path) -> None:
    store = start(tmp_path)
    launcher = WatchedLauncher(store, failures={"control": Status.CRASHED})
    results = run_trials(store, launcher, ignore_event)
    assert launcher.launched == list(store.record.trials)
    assert [result.status for result in results] == [Status.COMPLETED, Status.CRASHED] * 3


def test_what_could_not_be_run_gives_its_reason_to_the_later_rounds(tmp_path: Path) -> None:
    store = start(tmp_path)
    results = run_trials(store, WatchedLauncher(store, failures={"control": Status.NOT_RUN}), ignore_event)
    assert {result.reason for result in results[1::2]} == {"simulated by the fake launcher"}


def test_a_failure_found_on_disk_still_saves_the_later_rounds(tmp_path: Path) -> None:
    store = start(tmp_path)
    failures = {"single-1": Status.OUT_OF_MEMORY}
    with pytest.raises(KeyboardInterrupt):
        run_trials(store, WatchedLauncher(store, stop_at="control-r1", failures=failures), ignore_event)
    again = WatchedLauncher(store)
    results = run_trials(store, again, ignore_event)
    assert again.launched == ["control-r1", "control-r2", "control-r3"]
    assert [result.status for result in results[::2]] == [Status.OUT_OF_MEMORY, Status.NOT_RUN, Status.NOT_RUN]


def test_a_damaged_result_is_set_aside_and_measured_again(tmp_path: Path) -> None:
    store = start(tmp_path)
    first = run_trials(store, WatchedLauncher(store), ignore_event)
    directory = store.trial_directory("control-r2")
    (directory / "samples.csv").write_text("cut")
    again = WatchedLauncher(store)
    assert run_trials(store, again, ignore_event) == first
    assert again.launched == ["control-r2"]
    assert (directory / "result.json.damaged").is_file()
    assert store.results() == (first, [])


def test_the_listener_hears_of_every_trial_and_where_its_result_comes_from(tmp_path: Path) -> None:
    store = start(tmp_path, rounds=1)
    heard: list[Event] = []
    results = run_trials(store, WatchedLauncher(store), heard.append)
    assert heard == [
        TrialStarted(trial=results[0].trial, number=1, num_trials=2),
        TrialEnded(result=results[0], number=1, num_trials=2),
        TrialStarted(trial=results[1].trial, number=2, num_trials=2),
        TrialEnded(result=results[1], number=2, num_trials=2),
    ]
    heard.clear()
    run_trials(store, WatchedLauncher(store), heard.append)
    assert heard == [
        TrialEnded(result=result, number=number, num_trials=2, is_from_disk=True)
        for number, result in enumerate(results, start=1)
    ]


@pytest.mark.parametrize("error", [LaunchFailed("no ranks"), StorageFull("no space")])
def test_what_no_trial_is_to_blame_for_ends_the_run_and_leaves_no_result(tmp_path: Path, error: Exception) -> None:
    class BrokenLauncher(FakeLauncher):
        def launch(self, trial: Trial, directory: Path) -> TrialResult:
            raise error

    store = start(tmp_path)
    with pytest.raises(type(error)):
        run_trials(store, BrokenLauncher(lambda _: 0.01), ignore_event)
    assert store.results() == ([], [])


def search_twice(results: Sequence[TrialResult]) -> list[Trial]:
    """Two further trials, one after the other's result."""
    found = [result for result in results if result.trial.configuration.startswith("probe")]
    return [make_record(configuration=f"probe-{len(found) + 1}")] if len(found) < 2 else []


def test_a_search_adds_trials_by_its_results_until_it_is_over(tmp_path: Path) -> None:
    store = start(tmp_path, rounds=1)
    results = run_trials(store, WatchedLauncher(store), ignore_event, Guidance(plan_more=search_twice))
    assert [result.trial.configuration for result in results] == [*CONFIGURATIONS, "probe-1", "probe-2"]
    assert RunStore.open(store.path).record.trials == tuple(result.trial.name for result in results)


def test_a_search_that_was_interrupted_goes_on_where_it_was(tmp_path: Path) -> None:
    store = start(tmp_path, rounds=1)
    guidance = Guidance(plan_more=search_twice)
    with pytest.raises(KeyboardInterrupt):
        run_trials(store, WatchedLauncher(store, stop_at="probe-2-r1"), ignore_event, guidance)
    opened = RunStore.open(store.path)
    again = WatchedLauncher(opened)
    assert len(run_trials(opened, again, ignore_event, guidance)) == 4
    assert again.launched == ["probe-2-r1"]


def test_a_trial_that_is_refused_is_not_launched_and_says_why(tmp_path: Path) -> None:
    store = start(tmp_path, rounds=1)
    launcher = WatchedLauncher(store)
    guidance = Guidance(refuse=lambda trial, results: "larger than what failed" if results else None)
    results = run_trials(store, launcher, ignore_event, guidance)
    assert launcher.launched == ["single-1-r1"]
    assert [(result.status, result.reason) for result in results[1:]] == [(Status.NOT_RUN, "larger than what failed")]


def test_the_same_trial_cannot_be_added_twice(tmp_path: Path) -> None:
    store = start(tmp_path, rounds=1)
    with pytest.raises(StoreError, match="single-1-r1"):
        store.add_trials([make_record(configuration="single-1")])

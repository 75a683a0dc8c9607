"""A Meter in one process: what it records, on a clock that the tests turn by hand."""

from __future__ import annotations

import math
import os
import re
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from scalelab.errors import UsageError
from scalelab.records.samples import parse_samples, render_samples
from scalelab.records.store import RunStore, find_runs
from scalelab.records.trial import Status, StepKind, StepSample, TrialResult
from scalelab.worker.meter import meter as meter_module
from scalelab.worker.meter import step_log as meter_steps
from scalelab.worker.meter.meter import Meter
from scalelab.worker.meter.step_log import MeteredStep, make_configuration, render_steps


class Clock:
    """A clock that stands still unless it is turned."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def turn(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (meter_module, meter_steps):
        monkeypatch.setattr(module, "perf_counter", made)
    return made


def read_result(runs_dir: Path) -> TrialResult:
    """The result of the newest run."""
    store = RunStore.open(find_runs(runs_dir)[-1])
    return store.result(store.record.trials[0])


def load(clock: Clock, num_batches: int, seconds: float = 1.0) -> Iterator[int]:
    """A loader without a length that takes its time."""
    for number in range(num_batches):
        clock.turn(seconds)
        yield number


def fail_in_third_step(runs_dir: Path, error: BaseException) -> None:
    """A training that ends so after two steps."""
    with Meter("my-run", runs_dir=runs_dir) as meter:
        for number in meter.steps(range(10)):
            if number == 2:
                raise error


def test_a_step_lasts_from_one_request_to_the_next(tmp_path: Path, clock: Clock) -> None:
    with Meter("my-run", runs_dir=tmp_path) as meter:
        for _ in meter.steps(load(clock, 3)):
            clock.turn(2.0)
    result = read_result(tmp_path)
    assert result.status is Status.COMPLETED
    assert [(s.step, s.kind, s.step_seconds, s.input_seconds) for s in result.samples] == [
        (number, StepKind.CLEAN, 3.0, 1.0) for number in range(3)
    ]
    assert [s.start_seconds for s in result.samples] == [100.0, 103.0, 106.0]
    assert result.wall_seconds == 9.0
    assert result.first_step_seconds == 0.0


def test_writing_happens_between_steps(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    write = meter_steps.StepLog.write

    def write_slowly(log: meter_steps.StepLog, *, is_last: bool = False) -> None:
        write(log, is_last=is_last)
        clock.turn(50.0)

    monkeypatch.setattr(meter_steps.StepLog, "write", write_slowly)
    with Meter("slow-disk", runs_dir=tmp_path) as meter:
        for _ in meter.steps(load(clock, 4)):
            clock.turn(2.0)
    samples = read_result(tmp_path).samples
    assert {s.step_seconds for s in samples} == {3.0}
    assert samples[1].start_seconds - samples[0].start_seconds == 53.0


def test_what_was_written_is_on_the_disk_before_the_next_step(tmp_path: Path, clock: Clock) -> None:
    seen = []
    with Meter("my-run", runs_dir=tmp_path) as meter:
        for _ in meter.steps(load(clock, 3)):
            (file,) = tmp_path.glob("*/trials/my-run-r1/rank0.csv")
            seen.append(len(file.read_text().splitlines()) - 1)
            clock.turn(2.0)
    assert seen == [0, 1, 2]
    assert not list(tmp_path.glob("*/trials/*/rank0.*"))


def test_many_short_steps_are_written_in_batches(tmp_path: Path, clock: Clock) -> None:
    counts = set()
    with Meter("my-run", runs_dir=tmp_path) as meter:
        for _ in meter.steps(range(2 * meter_steps.MOST_WAITING)):
            (file,) = tmp_path.glob("*/trials/my-run-r1/rank0.csv")
            counts.add(file.stat().st_size)
    assert len(counts) == 2
    assert len(read_result(tmp_path).samples) == 2 * meter_steps.MOST_WAITING


def test_lines_are_those_of_the_samples_file() -> None:
    steps = [MeteredStep(number, 10.0 + number, 10.1 + number, 10.0 + number) for number in range(4)]
    for step in steps:
        step.end = step.begin + 1 / 3
    steps[1].loss = math.nan
    steps[2].phases = [("input", 1.0, 1.5), ("forward", 2.0, 2.25), ("forward", 3.0, 3.25)]
    steps[3].holds_another = True
    text = render_samples(()) + render_steps(7, steps)
    assert render_samples(parse_samples(text)) == text
    assert [s.kind for s in parse_samples(text)] == ["clean", "clean", "phases", "settle"]


def test_phases_are_added_up_and_mark_the_step(tmp_path: Path, clock: Clock) -> None:
    with Meter("my-run", runs_dir=tmp_path) as meter:
        for number in meter.steps(load(clock, 2)):
            if number == 0:
                for phase, seconds in (("input", 0.5), ("forward", 1.0), ("backward", 2.0), ("forward", 1.0)):
                    with meter.phase(phase):
                        clock.turn(seconds)
    phased, clean = read_result(tmp_path).samples
    assert phased.kind is StepKind.PHASES
    assert phased[5:9] == (1.5, 2.0, 2.0, None)
    assert phased.step_seconds == 5.5
    assert clean.kind is StepKind.CLEAN
    assert clean[5:9] == (1.0, None, None, None)


def test_an_unknown_phase_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with Meter("my-run", runs_dir=tmp_path) as meter:
        for _ in meter.steps([1]):
            with pytest.raises(UsageError, match="unknown phase 'exchange': use one of input, forward, backward"):
                meter.phase("exchange")


def test_a_phase_inside_a_phase_is_refused(tmp_path: Path) -> None:
    with Meter("my-run", runs_dir=tmp_path) as meter:
        for _ in meter.steps([1]):
            with (
                meter.phase("forward"),
                pytest.raises(UsageError, match="'backward' starts inside phase 'forward'"),
                meter.phase("backward"),
            ):
                pass


def test_losses_are_kept_with_their_steps(tmp_path: Path) -> None:
    with Meter("my-run", runs_dir=tmp_path) as meter:
        meter.loss(9.0)
        for number in meter.steps(range(3)):
            if number != 1:
                meter.loss(7)
                meter.loss(0.1 * number)
    assert [s.loss for s in read_result(tmp_path).samples] == [0.0, None, 0.2]


def test_what_is_no_loss_is_refused(tmp_path: Path) -> None:
    with Meter("my-run", runs_dir=tmp_path) as meter:
        for _ in meter.steps([1]):
            with pytest.raises(UsageError, match="loss 'low' is not a number"):
                meter.loss("low")


def test_a_step_that_break_ends_is_not_recorded(tmp_path: Path) -> None:
    with Meter("my-run", runs_dir=tmp_path) as meter:
        for number in meter.steps(iter(range(10))):
            if number == 3:
                break
    result = read_result(tmp_path)
    assert result.status is Status.COMPLETED
    assert [s.step for s in result.samples] == [0, 1, 2]


def test_an_error_in_the_body_goes_on_unchanged_and_is_the_reason(tmp_path: Path) -> None:
    error = ValueError("bad batch\nwith details")
    with pytest.raises(ValueError, match="bad batch") as caught:
        fail_in_third_step(tmp_path, error)
    assert caught.value is error
    result = read_result(tmp_path)
    assert result.status is Status.CRASHED
    assert result.reason == "rank 0 raised an error after 2 steps: ValueError: bad batch"
    assert len(result.samples) == 2


def test_an_error_of_the_loader_goes_on_unchanged(tmp_path: Path) -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise OSError(5, "disk on fire")

    with pytest.raises(OSError, match="disk on fire"), Meter("my-run", runs_dir=tmp_path) as meter:
        for _ in meter.steps(broken()):
            pass
    assert "disk on fire" in read_result(tmp_path).reason


@pytest.mark.parametrize(("code", "status"), [(None, Status.COMPLETED), (0, Status.COMPLETED), (1, Status.CRASHED)])
def test_leaving_the_script_is_an_end_unless_its_code_says_otherwise(
    tmp_path: Path, code: int | None, status: Status
) -> None:
    with pytest.raises(SystemExit):
        fail_in_third_step(tmp_path, SystemExit(code))
    assert read_result(tmp_path).status is status


def test_an_interrupted_training_keeps_its_steps(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fail_in_third_step(tmp_path, KeyboardInterrupt())
    result = read_result(tmp_path)
    assert result.reason == "rank 0 raised an error after 2 steps: KeyboardInterrupt"
    assert len(result.samples) == 2


def test_an_empty_loader_makes_a_run_without_steps(tmp_path: Path) -> None:
    with Meter("my-run", runs_dir=tmp_path) as meter:
        assert list(meter.steps([])) == []
    result = read_result(tmp_path)
    assert (result.status, result.samples) == (Status.COMPLETED, ())


def test_a_second_loop_counts_on(tmp_path: Path) -> None:
    with Meter("my-run", runs_dir=tmp_path) as meter:
        for _epoch in range(2):
            for _ in meter.steps([1, 2]):
                pass
    assert [s.step for s in read_result(tmp_path).samples] == [0, 1, 2, 3]


def test_a_loop_inside_a_step_is_counted_once(tmp_path: Path, clock: Clock) -> None:
    with Meter("my-run", runs_dir=tmp_path) as meter:
        for _ in meter.steps(load(clock, 2)):
            for _ in meter.steps(load(clock, 2, seconds=0.5)):
                meter.loss(1.0)
            meter.loss(2.0)
    samples = read_result(tmp_path).samples
    assert [(s.step, s.kind, s.step_seconds, s.loss) for s in samples] == [
        (0, StepKind.SETTLE, 2.0, 2.0),
        (1, StepKind.CLEAN, 0.5, 1.0),
        (2, StepKind.CLEAN, 0.5, 1.0),
        (3, StepKind.SETTLE, 2.0, 2.0),
        (4, StepKind.CLEAN, 0.5, 1.0),
        (5, StepKind.CLEAN, 0.5, 1.0),
    ]


def test_meters_one_after_the_other_make_runs_of_their_own(tmp_path: Path) -> None:
    for name in ("one", "two", "two"):
        with Meter(name, runs_dir=tmp_path) as meter:
            assert list(meter.steps([5])) == [5]
    stores = [RunStore.open(path) for path in find_runs(tmp_path)]
    assert [store.record.fields["label"] for store in stores] == ["one", "two", "two"]
    assert all(store.has_result(store.record.trials[0]) for store in stores)


def test_no_batch_is_kept_alive(tmp_path: Path) -> None:
    class Batch:
        pass

    with Meter("my-run", runs_dir=tmp_path) as meter:
        for batch in meter.steps(Batch() for _ in range(3)):
            alive = weakref.ref(batch)
            del batch
            assert alive() is None


def test_the_run_is_claimed_while_it_is_metered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Meter("my-run", runs_dir=tmp_path) as meter:
        next(meter.steps(range(3)))
        (path,) = find_runs(tmp_path)
        assert RunStore.open(path).is_running()
    assert not RunStore.open(path).is_running()
    assert capsys.readouterr().err == f"Saved to {path}  ·  scalelab show {path}\n"


def test_the_last_run_here_is_called_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with Meter("my-run"):
        pass
    assert re.fullmatch(r"Saved to runs/\S+-my-run  ·  scalelab show last\n", capsys.readouterr().err)


def test_a_script_that_changes_its_directory_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with Meter("my-run") as meter:
        for _ in meter.steps([1]):
            os.chdir("elsewhere")
    assert len(read_result(tmp_path / "runs").samples) == 1
    assert not list((tmp_path / "elsewhere").iterdir())


def test_what_is_known_of_the_process_is_recorded(tmp_path: Path) -> None:
    with Meter("my run, again!", batch_size=8, runs_dir=tmp_path) as meter:
        list(meter.steps([1]))
    result = read_result(tmp_path)
    (rank,) = result.ranks
    assert result.trial.configuration == "my-run-again"
    assert result.trial.global_batch == 8
    assert result.trial.device == "cpu"
    assert rank.peak_memory_bytes is not None
    assert rank.start_memory_bytes is not None
    assert rank.peak_memory_bytes >= rank.start_memory_bytes > 0
    assert rank.involuntary_switches is not None
    assert result.started_at


@pytest.mark.parametrize(("name", "found"), [("a b/c", "a-b-c"), ("../x", "x"), ("control", "control-run")])
def test_a_name_becomes_one_that_a_directory_can_have(name: str, found: str) -> None:
    assert make_configuration(name) == found


def test_arguments_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'…' is not a valid run name"):
        Meter("…")
    with pytest.raises(UsageError, match="batch_size=8 and global_batch=16 are mutually exclusive"):
        Meter("my-run", batch_size=8, global_batch=16)
    with pytest.raises(UsageError, match=r"^batch_size must be at least 1, got 0"):
        Meter("my-run", batch_size=0)
    with pytest.raises(UsageError, match=r"^global_batch must be at least 1, got -8"):
        Meter("my-run", global_batch=-8)
    meter = Meter("my-run", runs_dir=tmp_path)
    with pytest.raises(UsageError, match="inside its with statement"):
        meter.steps([1])
    with meter:
        pass
    with pytest.raises(UsageError, match="was already used"), meter:
        pass


class FakeEvent:
    """An event that passes when the test says so."""

    def __init__(self, clock: Clock, passed: list[bool]) -> None:
        self._time, self._passed = clock.now, passed
        self.waited = False

    def query(self) -> bool:
        return self._passed[0]

    def synchronize(self) -> None:
        self._passed[0] = True

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self._passed[0], "an event was read before it had passed"
        return 1e3 * (other._time - self._time)


def test_events_are_read_only_when_they_have_passed(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = [False]
    monkeypatch.setattr(meter_module, "choose_marks", lambda: lambda: FakeEvent(clock, passed))
    monkeypatch.setattr(meter_module, "read_peak_memory", lambda resident: ("cuda", 5))
    with Meter("gpu", runs_dir=tmp_path) as meter:
        for _ in meter.steps(load(clock, 3)):
            with meter.phase("forward"):
                clock.turn(2.0)
            (file,) = tmp_path.glob("*/trials/gpu-r1/rank0.csv")
            assert len(file.read_text().splitlines()) == 1
    result = read_result(tmp_path)
    assert result.trial.device == "cuda"
    assert result.ranks[0].peak_memory_bytes == 5
    assert result.samples[1] == StepSample(0, 1, StepKind.PHASES, 103.0, 3.0, 1.0, 2.0)

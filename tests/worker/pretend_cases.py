"""What is measured on the pretend accelerator, against what it knows of itself, and mutants that must be noticed.

`python -m tests.worker.pretend_cases` prints as JSON which checks hold, and which mutants some check notices. It runs
in its own process, for a device stays registered with torch until the process ends.
"""

from __future__ import annotations

import inspect
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from scalelab.analysis.quality import find_warmup
from scalelab.cli.doctor.device import judge_paths, list_paths, run_paths
from scalelab.launch.agreement import Assignment
from scalelab.launch.outcome import RankEnd, conclude_trial
from scalelab.records.observations import RankReport
from scalelab.records.trial import Block, Status, StepKind, StepSample, Trial, TrialResult
from scalelab.worker import device as seam
from scalelab.worker import exchange, loop, reading, step, training, worker
from scalelab.worker.doctor import self_test
from scalelab.worker.failure import classify
from scalelab.worker.instruments import instruments
from scalelab.worker.memory import allocator, limit, recording
from scalelab.worker.meter import step_log
from tests.worker import pretend
from tests.worker.pretend import LAUNCH_SECONDS, MACHINE, NAME, fresh_machine
from tests.worker.trials import make_trial

CLOCKED = (loop, exchange, reading, instruments, step_log, self_test)
"""Modules that read the host's clock."""
HOST = SimpleNamespace(time=MACHINE.read)
"""Instead of the module `time`."""


def build(rank: int = 1, **fields: Any) -> training.Training:
    """A small network on the device of a rank, warmed up."""
    settings: dict[str, Any] = {
        "device": NAME,
        "strategy": "single",
        "num_ranks": 1,
        "options": {"dim": 64, "depth": 2},
    }
    trial = make_trial(**(settings | fields))
    device = seam.choose_device(NAME, rank, rank)
    limit.limit_memory(trial, device)
    built = training.build_training(trial, 0, device)
    loop.run_clean_steps(built, 2, [])
    return built


def take(built: training.Training, kind: StepKind, num_steps: int = 3) -> list[StepSample]:
    samples: list[StepSample] = []
    loop.run_block(built, Block(kind, num_steps), 0, Path("unused"), samples)
    return samples


def is_near(value: float | None, expected: float) -> bool:
    """Within a few launches, which the host needs before the first kernel runs."""
    return value is not None and abs(value - expected) <= 4 * LAUNCH_SECONDS


def check_clean_steps_take_as_long_as_their_kernels() -> None:
    built = build()
    before = MACHINE.devices[1].busy_seconds
    samples = take(built, StepKind.CLEAN, 1)
    copied = pretend.KERNEL_SECONDS + 4 / pretend.COPY_BYTES_PER_SECOND  # the loss is read after the clock
    assert is_near(samples[0].step_seconds, MACHINE.devices[1].busy_seconds - before - copied)


def check_work_that_was_queued_before_is_not_of_the_step() -> None:
    built = build()
    usual = take(built, StepKind.CLEAN, 1)[0].step_seconds
    for _ in range(50):
        torch.zeros(4, device=seam.choose_device(NAME, 1, 1)).add_(1)
    assert is_near(take(built, StepKind.CLEAN, 1)[0].step_seconds, usual)


def check_steps_that_run_freely_hide_the_host() -> None:
    """A host that takes as long for a batch as half of the kernels: synchronized steps wait for both in turn."""
    built = build()
    busy = take(built, StepKind.CLEAN, 1)[0].step_seconds
    batches = built.batches

    def come_late() -> Iterator[Any]:
        while True:
            MACHINE.now += busy / 2
            yield next(batches)

    late = training.Training(**{**vars(built), "batches": come_late()})
    clean, free = take(late, StepKind.CLEAN, 4), take(late, StepKind.FREE, 4)
    assert all(is_near(sample.step_seconds, 1.5 * busy) for sample in clean)
    assert all(is_near(sample.step_seconds, busy) for sample in free[1:])
    assert all(one.start_seconds + one.step_seconds == two.start_seconds for one, two in itertools.pairwise(free))
    assert max(MACHINE.devices[1].ends.values()) <= MACHINE.now


def check_cold_kernels_are_left_out_as_warm_up() -> None:
    built = training.build_training(
        make_trial(device=NAME, strategy="single", num_ranks=1), 0, seam.choose_device(NAME, 1, 1)
    )
    times = [sample.step_seconds for sample in take(built, StepKind.CLEAN, 12)]
    warmup = find_warmup([times, times])
    assert warmup.num_steps >= 1
    assert times[0] > times[-1] + pretend.COLD_SECONDS
    assert all(is_near(seconds, times[-1]) for seconds in times[warmup.num_steps :])


def check_phases_add_up_to_their_kernels() -> None:
    built = build()
    clean, found = take(built, StepKind.CLEAN, 1)[0], take(built, StepKind.PHASES, 1)[0]
    parts = [found.input_seconds, found.forward_seconds, found.backward_seconds, found.optimizer_seconds]
    assert all(part is not None and part >= pretend.KERNEL_SECONDS for part in parts)
    assert abs(sum(part or 0 for part in parts) - clean.step_seconds) < 12 * LAUNCH_SECONDS
    assert found.ready_seconds is not None
    whole = sum(part or 0 for part in parts[:3])
    assert is_near(found.ready_seconds, whole) or found.ready_seconds < whole


def check_gradients_are_timed_where_they_are_computed() -> None:
    built = build()
    report = instruments.watch_gradients(make_trial(), built, Path(), RankReport(rank=0))
    assert report.gradients is not None
    times = report.gradients.ready_seconds
    assert all(later - earlier >= pretend.KERNEL_SECONDS / 2 for earlier, later in zip(times, times[2:], strict=False))


def check_every_rank_is_on_its_own_device() -> None:
    trial = make_trial(device=NAME, strategy="single", num_ranks=1)
    for rank in (0, 1):
        assignment = Assignment(directory="", rank=rank, local_rank=rank, cores=(), address="", port=0)
        before = [one.busy_seconds for one in MACHINE.devices]
        built = training.build_training(trial, 0, worker.prepare_process(trial, assignment))
        loop.run_clean_steps(built, 1, [])
        busy = [one.busy_seconds - start for one, start in zip(MACHINE.devices, before, strict=True)]
        assert busy[rank] > 0 == busy[1 - rank]


def check_a_peak_is_that_of_the_step_it_is_recorded_for() -> None:
    built = build()
    big = torch.zeros(1 << 20, device=torch.device(NAME, 1))
    del big
    with tempfile.TemporaryDirectory() as directory:
        trial = make_trial(device=NAME, strategy="single", num_ranks=1)
        report = recording.look_at_memory(trial, built, Path(directory), RankReport(rank=0))
    assert report.memory is not None
    assert report.memory.peak_bytes < 1 << 20, report.memory
    assert 0 <= report.memory.by_category["rest"] < 0.2 * report.memory.peak_bytes, report.memory


def check_the_peak_of_a_rank_is_the_highest_so_far() -> None:
    build()
    big = torch.zeros(1 << 18, device=torch.device(NAME, 1))
    del big
    peak = worker.read_peak_memory(torch.device(NAME, 1))
    assert peak is not None
    assert peak >= 4 << 18 > MACHINE.devices[1].allocated_bytes
    assert (worker.read_peak_memory(torch.device(NAME, 0)) or 0) == 0


def check_a_saved_state_is_what_was_saved() -> None:
    built = build()
    before = [parameter.detach().cpu().clone() for parameter in built.model.parameters()]
    saved = loop.SavedState.copy_of([built.model], built.optimizers)
    assert saved is not None
    saved.restore()
    after = [parameter.detach().cpu() for parameter in built.model.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def check_a_memory_limit_is_a_failure_that_is_named() -> None:
    with pytest.raises(RuntimeError) as raised:
        build(memory_limit_bytes=1024)  # less than the model: an error in backward would end the process
    failure = classify(raised.value, rank=0, num_steps_done=0, workload="mlp")
    assert failure.status is Status.OUT_OF_MEMORY
    trial = make_trial(device=NAME, strategy="single", num_ranks=1)
    watch = limit.LimitWatch(trial, torch.device(NAME, 0))
    kept = torch.zeros(1 << 18, device=torch.device(NAME, 0))
    report = watch.complete(RankReport(rank=0))
    assert (report.limited_bytes, report.limit_bytes) == (kept.nbytes, 1 << 30)


def check_calls_are_timed_until_the_device_is_done() -> None:
    place = torch.device(NAME, 1)
    tensor = torch.zeros(8, device=place)
    message = exchange.MessageBuffers(rank=0, num_ranks=1, whole=tensor, other=tensor)
    exchange._meet, kept = (lambda device: seam.choose_synchronize(device)()), exchange._meet
    try:
        exchange._time_calls(message, lambda one: one.whole.add_(1), 1, place)
        _, seconds = exchange._time_calls(message, lambda one: one.whole.add_(1), 10, place)
    finally:
        exchange._meet = kept
    assert is_near(seconds, 10 * pretend.KERNEL_SECONDS)


def check_a_copy_to_the_device_is_timed_to_its_end() -> None:
    place = torch.device(NAME, 1)
    batch = torch.zeros(1 << 20)
    torch.zeros(1).to(place)
    seam.choose_synchronize(place)()
    before = MACHINE.now
    reading.PassReader._copy_to_device(type("Reader", (), {"device": place})(), (batch,))  # type: ignore[arg-type]
    assert is_near(MACHINE.now - before, pretend.KERNEL_SECONDS + batch.nbytes / pretend.COPY_BYTES_PER_SECOND)


def check_a_meter_times_kernels_and_not_launches() -> None:
    tensor = torch.zeros(8, device=seam.choose_device(NAME, 1, 1))
    mark = step_log.choose_marks()
    begin = mark()
    for _ in range(20):
        tensor.add_(1)
    end = mark()
    assert not step_log.has_passed(end)
    step_log.wait_for(end)
    assert step_log.measure_span(begin, end) >= 20 * pretend.KERNEL_SECONDS


def check_an_injected_delay_starts_when_the_device_is_idle() -> None:
    built = build()
    place = torch.device(NAME, 1)
    delayed = training.Training(**{**vars(built), "delays": {"optimizer": 1e-9}})
    for _ in range(50):
        torch.zeros(4, device=place).add_(1)
    step.hold_up(delayed, "optimizer", True)
    assert max(MACHINE.devices[1].ends.values()) <= MACHINE.now


def check_memory_is_counted_by_stream() -> None:
    place = torch.device(NAME, 0)
    first = torch.zeros(128, device=place)
    MACHINE.devices[0].stream = 1
    second = torch.zeros(256, device=place)
    assert dict(MACHINE.devices[0].allocated) == {0: first.nbytes, 1: second.nbytes}
    driver = seam.find_driver(place)
    assert driver is not None
    assert driver.read_memory(place).allocated_bytes == first.nbytes + second.nbytes
    del second
    assert driver.read_memory(place).allocated_bytes == first.nbytes


def check_work_on_two_devices_at_once_is_refused() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.zeros(2, device=torch.device(NAME, 0)) + torch.zeros(2, device=torch.device(NAME, 1))


@dataclass(frozen=True)
class Mutant:
    """One mistake: a text of a module replaced by another, and the check that notices it."""

    module: ModuleType
    right: str
    wrong: str
    noticed_by: Callable[[], None]


MUTANTS: dict[str, Mutant] = {
    "a clean step ends without synchronising": Mutant(
        loop,
        "        synchronize()\n        raw.append(",
        "        raw.append(",
        check_clean_steps_take_as_long_as_their_kernels,
    ),
    "a clean step starts without synchronising": Mutant(
        loop,
        "        synchronize()\n        start = perf_counter()",
        "        start = perf_counter()",
        check_work_that_was_queued_before_is_not_of_the_step,
    ),
    "every free step waits for the device": Mutant(
        loop,
        "        mark.record()\n",
        "        mark.record()\n        training.synchronize()\n",
        check_steps_that_run_freely_hide_the_host,
    ),
    "free steps are read before the device has done them": Mutant(
        loop,
        "        mark.record()\n    training.synchronize()\n",
        "        mark.record()\n",
        check_steps_that_run_freely_hide_the_host,
    ),
    "the host's clock times free steps": Mutant(
        loop,
        "    driver = find_driver_of(training.model.parameters())\n",
        "    driver = None\n",
        check_steps_that_run_freely_hide_the_host,
    ),
    "a phase ends without synchronising": Mutant(
        loop,
        "        self._synchronize()\n        now = perf_counter()",
        "        now = perf_counter()",
        check_phases_add_up_to_their_kernels,
    ),
    "a copy to the host is read too early": Mutant(
        loop,
        'to("cpu", copy=True)',
        'to("cpu", copy=True, non_blocking=True)',
        check_a_saved_state_is_what_was_saved,
    ),
    "another device is waited for": Mutant(
        seam,
        "partial(driver.synchronize, device)",
        "partial(driver.synchronize, 0)",
        check_clean_steps_take_as_long_as_their_kernels,
    ),
    "every rank is on device 0": Mutant(
        seam,
        "driver.select(local_rank)",
        "driver.select(0)",
        check_every_rank_is_on_its_own_device,
    ),
    "nothing is waited for": Mutant(
        seam,
        "_nothing_to_wait_for if driver is None else partial",
        "_nothing_to_wait_for if driver else partial",
        check_clean_steps_take_as_long_as_their_kernels,
    ),
    "a peak is not reset": Mutant(
        allocator,
        "        self._driver.reset_peaks(self._driver.find_current())\n",
        "",
        check_a_peak_is_that_of_the_step_it_is_recorded_for,
    ),
    "what is allocated now is taken for the peak": Mutant(
        worker,
        "read_memory(device).peak_bytes",
        "read_memory(device).allocated_bytes",
        check_the_peak_of_a_rank_is_the_highest_so_far,
    ),
    "the peak of the current device is taken for every one": Mutant(
        worker,
        "read_memory(device).peak_bytes",
        "read_memory(driver.find_current()).peak_bytes",
        check_the_peak_of_a_rank_is_the_highest_so_far,
    ),
    "a memory limit is not set": Mutant(
        limit,
        "        driver.limit(device, trial.memory_limit_bytes)",
        "        pass",
        check_a_memory_limit_is_a_failure_that_is_named,
    ),
    "the host's clock stamps gradients": Mutant(
        instruments,
        "self._driver = find_driver_of(parameters)",
        "self._driver = None",
        check_gradients_are_timed_where_they_are_computed,
    ),
    "the host's clock stamps a meter's steps": Mutant(
        step_log,
        "    driver = find_used_device()\n    if driver is None:\n        return perf_counter",
        "    return perf_counter",
        check_a_meter_times_kernels_and_not_launches,
    ),
    "an event is read before it has passed": Mutant(
        step_log,
        "        mark.synchronize()",
        "        pass",
        check_a_meter_times_kernels_and_not_launches,
    ),
    "calls end without synchronising": Mutant(
        exchange,
        "    synchronize()\n    return start",
        "    return start",
        check_calls_are_timed_until_the_device_is_done,
    ),
    "a batch is timed before it is copied": Mutant(
        reading,
        "        choose_synchronize(self.device)()\n",
        "",
        check_a_copy_to_the_device_is_timed_to_its_end,
    ),
    "a delay starts while the device computes": Mutant(
        step,
        "        training.synchronize()\n        wait",
        "        wait",
        check_an_injected_delay_starts_when_the_device_is_idle,
    ),
    "only half of the memory is free": Mutant(
        limit,
        "free = self._driver.count_free_bytes(device)",
        "free = (self._driver.count_free_bytes(device) or 0) // 2",
        check_a_memory_limit_is_a_failure_that_is_named,
    ),
}


def swap_names() -> None:
    MACHINE.devices[0].name, MACHINE.devices[1].name = LISTED[::-1]


def throttle() -> None:
    MACHINE.devices[1].speed = 0.5


def slow_link() -> None:
    MACHINE.devices[1].link_speed = 0.1


def hog_memory() -> None:
    MACHINE.devices[0].other_bytes = MACHINE.devices[0].total_bytes // 2


def forget_to_wait() -> None:
    MACHINE.is_forgetful = True


LISTED = ("Pretend A", "Pretend B")
FAULTS: dict[str, tuple[Callable[[], None], str]] = {
    "nothing": (lambda: None, ""),
    "wrong device order": (swap_names, "order"),
    "throttled clock": (throttle, "clock of pretend:1"),
    "slow link": (slow_link, "link to pretend:1"),
    "memory hog": (hog_memory, "memory of pretend:0"),
    "forgotten synchronise": (forget_to_wait, "waiting for pretend:0"),
}
"""What is planted, and the check of the self-test that must find it."""


def find_faults(plant: Callable[[], None]) -> list[str]:
    """The checks of the self-test that fail where something is wrong with the machine."""
    with fresh_machine():
        MACHINE.devices[0].name, MACHINE.devices[1].name = LISTED
        plant()
        return [check.name for check in self_test.run_self_test(NAME, LISTED) if check.is_right is False]


class InProcessLauncher:
    """Runs the one rank of a trial here, where the device is."""

    def check(self) -> None:
        pass

    def launch(self, trial: Trial, directory: Path) -> TrialResult:
        place = Assignment(directory=str(directory), rank=0, local_rank=0, cores=(), address="", port=0)
        code = worker.run_rank(place)
        end = RankEnd(code=code, was_killed=False)
        return conclude_trial(trial, directory, [end], has_oom_kill=False, launched=0.0)

    def close(self) -> None:
        pass


def try_paths() -> dict[str, Any]:
    """The trials of the self-test that one rank can run; torch has no autocast for a device in Python."""
    trials = {name: trial for name, trial in list_paths(NAME, 1).items() if not trial.shape.autocast}
    with fresh_machine():
        results = run_paths(InProcessLauncher(), trials)
        return {check.name: [check.is_right, check.figure] for check in judge_paths(results)}


CHECKS: dict[str, Callable[[], None]] = {
    name.removeprefix("check_").replace("_", " "): found
    for name, found in list(globals().items())
    if name.startswith("check_")
}


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """The module with its mistake: functions and classes of it are replaced where they are used."""
    source = inspect.getsource(mutant.module)
    assert source.count(mutant.right) >= 1, mutant
    names = {"__name__": mutant.module.__name__, "__file__": mutant.module.__file__}
    wrong: dict[str, Any] = dict(names)
    exec(compile(source.replace(mutant.right, mutant.wrong, 1), str(mutant.module.__file__), "exec"), wrong)
    if "perf_counter" in wrong:
        wrong["perf_counter"] = MACHINE.read
    if mutant.module is allocator:
        wrong["time"] = HOST
    if mutant.module is seam:
        wrong["DRIVERS"][NAME] = seam.DRIVERS[NAME]
    own = [name for name, one in wrong.items() if getattr(one, "__module__", "") == mutant.module.__name__]
    places = [m for name, m in list(sys.modules.items()) if name.startswith(("scalelab.worker", "tests.worker"))]
    kept = [(place, name, vars(place)[name]) for place in places for name in own if name in vars(place)]
    originals = {name: vars(mutant.module)[name] for name in own}
    try:
        for place, name, old in kept:
            if old is originals[name]:
                setattr(place, name, wrong[name])
        yield
    finally:
        for place, name, old in kept:
            setattr(place, name, old)


def hold(check: Callable[[], None]) -> str:
    """Empty if a check holds on a fresh machine, else why not."""
    with fresh_machine():
        try:
            check()
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - whatever it is, the mistake was noticed
            return f"{type(error).__name__}: {error}"
    return ""


def find_complaint(mutant: Mutant) -> str:
    """What the check that is to notice it says."""
    with mutated(mutant):
        return hold(mutant.noticed_by)


def main() -> None:
    pretend.install()
    for module in CLOCKED:
        vars(module)["perf_counter"] = MACHINE.read
    vars(allocator)["time"] = HOST
    self_test.DIM, self_test.COPY_BYTES = 8, 1 << 22
    found = {
        "faults": {name: find_faults(plant) for name, (plant, _) in FAULTS.items()},
        "paths": try_paths(),
        "checks": {name: hold(check) for name, check in CHECKS.items()},
        "mutants": {name: find_complaint(mutant) for name, mutant in MUTANTS.items()},
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()

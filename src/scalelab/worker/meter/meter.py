"""`Meter`: two lines turn your own training script into a run that `show`, `compare` and reports read.

    with scalelab.Meter("my-run") as meter:
        for batch in meter.steps(loader):
            ...

Without a loop to wrap, `meter.step()` ends a step: the first call begins the recording, and the process's end closes
it. Ranks are looked for at the first step, because libraries start them late.

A step lasts from asking the loader for its batch to asking for the next one, or for the batch after `accumulate` ones;
the time inside the loader is input wait. A step that `break` or an error ends was never followed by another request
and is not recorded. So is what happens between two loops: evaluation, checkpoints. A loop inside a step of the same
Meter has steps of its own, and the step around them is kept as `settle`, which no average uses: its time would count
twice.

What it must not do decides how it is built. It never changes results: it draws no random number, holds on to no batch
and starts no collective; the only thing kept of the training is a loss, as a number. It never ends the training: when
the ranks cannot meet or the run cannot be written, it says so once and steps continue unrecorded; only arguments that
cannot work are errors. And it costs microseconds: per step three clock readings and one small object; what is slower
happens between two steps, outside what is timed (`step_log.py`).

Limits: on CPU a step's time is the host's, so work that a script leaves running on other threads belongs to the step
that waits for it. On CUDA step times are those of the stream that is current between steps. The input wait is the
host's on both. Accelerators other than CUDA are timed by the host's clock.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import resource
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, TypeVar

import psutil

from scalelab import __version__
from scalelab.errors import StoreError, UsageError
from scalelab.launch.agreement import trace_file
from scalelab.launch.meter_result import (
    MeterOutcome,
    Stay,
    announce,
    assemble_result,
    leave_outcome,
    save_and_tidy,
    wait_for_outcomes,
)
from scalelab.launch.ranks.placement import is_oversubscribed
from scalelab.records.environment import count_cores, read_environment, read_load_average, usable_cores
from scalelab.records.observations import RankReport
from scalelab.records.store import RUNS_DIR, RunStore
from scalelab.records.tasks import Measure
from scalelab.records.trial import PHASES, StepPlan, Trial
from scalelab.worker.meter.ranks import NothingAgreed, RankPlace, agree, find_place, open_rendezvous
from scalelab.worker.meter.step_log import (
    CurrentStep,
    Mark,
    MeteredStep,
    PhaseTimer,
    StepLog,
    StepProfile,
    choose_marks,
    describe_end,
    describe_trouble,
    make_configuration,
    name_script,
    read_peak_memory,
    say_where,
    take_loss,
)

WAIT_SECONDS = 10.0
"""How long rank 0 waits for what the others leave, after its own Meter has ended."""
WAIT_AFTER_FAILURE_SECONDS = 1.0
"""The same when rank 0 failed: the others may wait for it in a collective, and learn of it only when it has gone."""

T = TypeVar("T")

_counts: dict[str, int] = {}
"""How many Meters of each name this process has had: every rank counts alike, so the number identifies them."""


class Meter:
    """Records the steps of a training loop into a run."""

    def __init__(
        self,
        name: str,
        *,
        batch_size: int | None = None,
        global_batch: int | None = None,
        accumulate: int = 1,
        profile_steps: int = 0,
        runs_dir: Path | str = RUNS_DIR,
    ) -> None:
        """Takes the run's name, and what is known about a step.

        `batch_size`: samples of one batch on one rank; or `global_batch`: of a step over all ranks. `accumulate`:
        batches of `steps(loader)` that make one step. `profile_steps`: so many steps are profiled after warm-up.
        """
        if batch_size is not None and global_batch is not None:
            raise UsageError(
                f"batch_size={batch_size} and global_batch={global_batch} are mutually exclusive: give one"
            )
        limits = {"batch_size": (batch_size, 1), "global_batch": (global_batch, 1), "accumulate": (accumulate, 1)}
        for argument, (value, least) in (limits | {"profile_steps": (profile_steps, 0)}).items():
            if value is not None and value < least:
                raise UsageError(f"{argument} must be at least {least}, got {value}")
        self.name = name
        self._configuration = make_configuration(name)
        self._batch_size, self._global_batch = batch_size, global_batch
        self._accumulate, self._profile_steps = accumulate, profile_steps
        self._runs_dir = Path(runs_dir).resolve()  # the script may change its directory
        self._place = RankPlace(0, 1)
        self._store: RunStore | None = None
        self._directory: Path | None = None
        self._log: StepLog | None = None
        self._trial: Trial | None = None
        self._stay = Stay(started_at="", entered_seconds=0.0)
        self._report = RankReport(rank=0)
        self._claim = ExitStack()
        self._is_used = self._is_inside = self._is_begun = self._is_stepped = False
        self._profile: StepProfile | None = None
        self._has_warned = False
        self._num_steps = 0
        self._now = now = CurrentStep()
        self._phases = {phase: PhaseTimer(now, phase) for phase in PHASES}

    def __enter__(self) -> Meter:
        if self._is_used:
            raise UsageError(f"Meter {self.name!r} was already used: create a new Meter for every run")
        with contextlib.suppress(StoreError):  # ranks that a library has not started yet
            self._check_batch(find_place())
        self._is_used = self._is_inside = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._start()
        self._is_inside = False
        if self._directory is None or self._log is None:
            return
        try:
            self._finish(self._directory, self._log, error)
        except Exception as trouble:  # noqa: BLE001 - whatever it is, it must not replace the training's own end
            self._warn(trouble)
        finally:
            self._log = None
            with contextlib.suppress(OSError):
                self._claim.close()

    def close(self) -> None:
        """End the recording that `step` began; the end of the process does it too."""
        if self._is_inside:
            self.__exit__(None, getattr(sys, "last_value", None), None)

    def steps(self, loader: Iterable[T]) -> Iterator[T]:
        """The loader's batches, one step each, or one step for every `accumulate` of them."""
        if not self._is_inside:
            raise UsageError(f"Meter {self.name!r} records only inside its with statement: loop over its steps there")
        return self._record(loader)

    def step(self, *, is_apart: bool = False) -> None:
        """A step ends here, and the next one begins; the first call begins the recording.

        `is_apart`: something else than training happened in it, so averages leave it out.
        """
        now = perf_counter()
        if not self._is_stepped:
            self._begin_stepping()
        log, step = self._log, self._now.step
        if log is None:
            return
        mark = self._now.mark
        is_due = False
        if step is not None:
            step.end = now if mark is perf_counter else mark()
            step.holds_another |= is_apart
            is_due = log.add(step, now)
        self._pause(log, is_due=is_due)
        start = perf_counter()
        self._now.step = self._open_step(start, None, start if mark is perf_counter else mark(), None)

    def _begin_stepping(self) -> None:
        self._is_stepped = True
        if not self._is_inside:
            self.__enter__()
            atexit.register(self.close)
            multiprocessing.util.Finalize(None, self.close, exitpriority=0)  # children of multiprocessing run no atexit
        self._start()
        self._now.mark = choose_marks()

    def _start(self) -> None:
        """Find the ranks and agree on a run with them, once."""
        if self._is_begun:
            return
        self._is_begun = True
        count = _counts[self.name] = _counts.get(self.name, 0) + 1
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        try:
            self._place = place = find_place()
            self._check_batch(place)
            key = f"scalelab/meter/{attempt}/{count}/{self.name}"
            self._begin(Path(agree(place, open_rendezvous(place), key, lambda: str(self._make_run()))))
        except Exception as error:  # noqa: BLE001 - whatever is wrong here, the training can continue without us
            with contextlib.suppress(OSError):
                self._claim.close()
            if not isinstance(error, NothingAgreed):
                self._warn(error)

    def _check_batch(self, place: RankPlace) -> None:
        if self._global_batch is not None and self._global_batch % place.num_ranks:
            raise UsageError(
                f"global_batch={self._global_batch} is not divisible by {place.num_ranks} ranks: use a multiple of"
                f" {place.num_ranks}"
            )

    def loss(self, value: Any) -> None:
        """The loss of the current step, a number or a tensor with one element; of several, the last."""
        if self._now.step is not None:
            self._now.step.loss = take_loss(value)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Times a part of the current step: input, forward, backward or optimizer."""
        if name not in self._phases:
            raise UsageError(f"unknown phase {name!r}: use one of {', '.join(PHASES)}")
        return nullcontext() if self._now.step is None else self._phases[name]

    def _record(self, loader: Iterable[T]) -> Iterator[T]:
        self._start()
        log = self._log
        if log is None:
            yield from loader
            return
        outer = self._now.step
        mark = self._now.mark = choose_marks()
        is_host = mark is perf_counter
        handed_over: list[T] = []  # a batch passes through, so that this frame does not keep it alive
        num_batches = 0
        step: MeteredStep | None = None
        start = perf_counter()
        begin = start if is_host else mark()
        try:
            iterator = iter(loader)
            while True:
                asked = start if step is None else perf_counter()
                try:
                    handed_over.append(next(iterator))
                except StopIteration:
                    return
                if step is None:
                    self._now.step = step = self._open_step(start, perf_counter(), begin, outer)
                else:
                    step.wait(perf_counter() - asked)
                num_batches += 1
                yield handed_over.pop()
                if num_batches % self._accumulate:
                    continue
                start = perf_counter()
                step.end = begin = start if is_host else mark()
                self._now.step = outer
                is_due, step = log.add(step, start), None
                if is_due or self._profile is not None:
                    self._pause(log, is_due=is_due)
                    start = perf_counter()
                    begin = start if is_host else mark()
        finally:
            self._now.step = outer

    def _open_step(self, start: float, ready: float | None, begin: Mark, outer: MeteredStep | None) -> MeteredStep:
        step = MeteredStep(self._num_steps, start, ready, begin)
        step.is_profiled = self._profile is not None and self._profile.is_on
        self._num_steps += 1
        if outer is not None:
            outer.holds_another = True
        return step

    def _pause(self, log: StepLog, *, is_due: bool) -> None:
        """What happens between two steps, outside both."""
        if is_due:
            self._write(log)
        if self._profile is not None:
            self._profile.pass_to(self._num_steps)

    def _write(self, log: StepLog, *, is_last: bool = False) -> None:
        """Write between steps; a write error does not stop training."""
        try:
            log.write(is_last=is_last)
        except Exception as trouble:  # noqa: BLE001 - such as a device that has failed: the training will meet it itself
            self._warn(trouble)
        if log.failure is not None:
            self._warn(log.failure)

    def _make_trial(self) -> Trial:
        num_ranks = self._place.num_ranks
        torch: Any = sys.modules.get("torch")
        threads = 1 if torch is None else torch.get_num_threads()
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
        if self._batch_size is not None:
            self._global_batch = self._batch_size * self._accumulate * num_ranks
        return Trial(
            configuration=self._configuration,
            workload=name_script(),
            strategy="metered",
            num_ranks=num_ranks,
            global_batch=self._global_batch or num_ranks,
            threads_per_rank=threads,
            is_oversubscribed=is_oversubscribed(local_ranks, threads, count_cores()),
            task=Measure(plan=StepPlan(lead_in_steps=0, clean_steps=1, phase_steps=0, comm_free_steps=0)),
        )

    def _make_run(self) -> Path:
        """Rank 0: the run's directory, claimed as long as it is metered; returns the trial's."""
        self._trial = trial = self._make_trial()
        fields = {
            "label": self.name,
            "job": {"workload": trial.workload},
            "num_ranks": trial.num_ranks,
            "global_batch": self._global_batch,
        }
        environment = read_environment(__version__)
        self._store = RunStore.create(
            self._runs_dir,
            study="metered",
            fields=fields,
            trials=[trial],
            environment=environment,
            command=sys.argv,
            label=trial.configuration,
        )
        self._claim.enter_context(self._store.claim())
        return self._store.trial_directory(trial.name)

    def _begin(self, directory: Path) -> None:
        rank = self._place.rank
        self._stay = Stay(
            started_at=datetime.now(UTC).isoformat(), entered_seconds=perf_counter(), load_before=read_load_average()
        )
        self._report = RankReport(
            rank=rank,
            host=socket.gethostname(),
            cores=usable_cores(),
            start_memory_bytes=psutil.Process().memory_info().rss,
            involuntary_switches=resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw,
        )
        announce(directory, rank, self._stay)
        self._log = StepLog(directory, rank)
        self._directory = directory
        if self._profile_steps and "torch" in sys.modules:
            self._profile = StepProfile(trace_file(directory, rank), self._profile_steps)

    def _finish(self, directory: Path, log: StepLog, error: BaseException | None) -> None:
        """Leave the outcome; rank 0 waits for the others', makes the result of them and says where it is."""
        left_seconds = perf_counter()
        if self._profile is not None:
            self._profile.stop()
        self._write(log, is_last=True)
        log.close()
        failure = describe_end(error, self._place.rank, log)
        start_bytes = self._report.start_memory_bytes or 0
        usage = resource.getrusage(resource.RUSAGE_SELF)
        device, peak_bytes = read_peak_memory(max(usage.ru_maxrss * 1024, start_bytes))
        report = replace(
            self._report,
            peak_memory_bytes=peak_bytes,
            involuntary_switches=usage.ru_nivcsw - (self._report.involuntary_switches or 0),
        )
        outcome = MeterOutcome(
            report=report, stay=self._stay, left_seconds=left_seconds, device=device, failure=failure
        )
        leave_outcome(directory, outcome)
        if self._store is None or self._trial is None:
            return
        wait_for_outcomes(
            directory, self._place.num_ranks, WAIT_SECONDS if error is None else WAIT_AFTER_FAILURE_SECONDS
        )
        save_and_tidy(self._store, assemble_result(self._trial, directory))
        self._claim.close()
        print(say_where(self._store.path), file=sys.stderr)  # noqa: T201

    def _warn(self, error: Exception) -> None:
        """Say once why nothing is recorded any more."""
        if not self._has_warned:
            self._has_warned = True
            where = f" on rank {self._place.rank}" if self._place.num_ranks > 1 else ""
            words = describe_trouble(error, self._runs_dir)
            text = f"warning: Meter {self.name!r} stopped recording{where} ({words}); training continues"
            print(text, file=sys.stderr)  # noqa: T201

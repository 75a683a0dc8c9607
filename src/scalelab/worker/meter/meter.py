"""`Meter`: two lines turn your own training script into a run that `show`, `compare` and reports read.

    with scalelab.Meter("my-run") as meter:
        for batch in meter.steps(loader):
            ...

A step lasts from asking the loader for its batch to asking for the next one; the time inside the loader is input
wait. A step that `break` or an error ends was never followed by another request and is not recorded. So is what
happens between two loops: evaluation, checkpoints. A loop inside a step of the same Meter has steps of its own, and
the step around them is kept as `settle`, which no average uses: its time would count twice.

What it must not do decides how it is built. It never changes results: it draws no random number, holds on to no batch
and starts no collective; the only thing kept of the training is a loss, as a number. It never kills a training: when
the ranks cannot meet or the run cannot be written, it says so once and steps go on unrecorded; only arguments that
cannot work are errors. And it costs microseconds: per step three clock readings and one small object; what is slower
happens between two steps, outside what is timed (`meter_steps.py`).

Limits: on CPU a step's time is the host's, so work that a script leaves running on other threads belongs to the step
that waits for it. On CUDA step times are those of the stream that is current between steps. The input wait is the
host's on both. Accelerators other than CUDA are timed by the host's clock.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, TypeVar

import psutil

from scalelab import __version__
from scalelab.errors import ScalelabError, UsageError
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
from scalelab.worker.meter.step_log import (
    Mark,
    MeteredStep,
    NothingAgreed,
    RankPlace,
    StepLog,
    agree,
    choose_marks,
    describe_end,
    find_place,
    make_configuration,
    name_script,
    open_rendezvous,
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
"""How many Meters of each name this process has had: every rank counts alike, so the number tells them apart."""


class Meter:
    """Records the steps of a training loop into a run."""

    def __init__(
        self,
        name: str,
        *,
        batch_size: int | None = None,
        global_batch: int | None = None,
        runs_dir: Path | str = RUNS_DIR,
    ) -> None:
        """Takes the run's name; the samples of a step on one rank or on all, for samples/s; and where runs are."""
        if batch_size is not None and global_batch is not None:
            raise UsageError(
                f"batch_size={batch_size} and global_batch={global_batch} are mutually exclusive: give one"
            )
        for argument, value in (("batch_size", batch_size), ("global_batch", global_batch)):
            if value is not None and value < 1:
                raise UsageError(f"{argument} must be at least 1, got {value}")
        self.name = name
        self._configuration = make_configuration(name)
        self._batch_size, self._global_batch = batch_size, global_batch
        self._runs_dir = Path(runs_dir)
        self._place = RankPlace(0, 1)
        self._store: RunStore | None = None
        self._directory: Path | None = None
        self._log: StepLog | None = None
        self._trial: Trial | None = None
        self._stay = Stay(started_at="", entered_seconds=0.0)
        self._report = RankReport(rank=0)
        self._claim = ExitStack()
        self._is_used = self._is_inside = False
        self._has_warned = False
        self._step: MeteredStep | None = None
        self._num_steps = 0
        self._mark: Callable[[], Mark] = perf_counter
        self._phases = {phase: _PhaseTimer(self, phase) for phase in PHASES}
        self._open_phase: str | None = None

    def __enter__(self) -> Meter:
        if self._is_used:
            raise UsageError(f"Meter {self.name!r} was already used: create a new Meter for every run")
        self._place = place = find_place()
        if self._global_batch is not None and self._global_batch % place.num_ranks:
            raise UsageError(
                f"global_batch={self._global_batch} is not divisible by {place.num_ranks} ranks: use a multiple of"
                f" {place.num_ranks}"
            )
        self._is_used = self._is_inside = True
        count = _counts[self.name] = _counts.get(self.name, 0) + 1
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        try:
            key = f"scalelab/meter/{attempt}/{count}/{self.name}"
            self._begin(Path(agree(place, open_rendezvous(place), key, lambda: str(self._make_run()))))
        except Exception as error:  # noqa: BLE001 - whatever is wrong around the training, it can go on without us
            with contextlib.suppress(OSError):
                self._claim.close()
            if not isinstance(error, NothingAgreed):
                self._warn(error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_inside = False
        if self._directory is None or self._log is None:
            return
        try:
            self._finish(self._directory, self._log, error)
        except Exception as trouble:  # noqa: BLE001 - whatever it is, it must not replace the training's own end
            self._warn(trouble)
        finally:
            with contextlib.suppress(OSError):
                self._claim.close()

    def steps(self, loader: Iterable[T]) -> Iterator[T]:
        """The loader's batches, one step each."""
        if not self._is_inside:
            raise UsageError(f"Meter {self.name!r} records only inside its with statement: loop over its steps there")
        return iter(loader) if self._log is None else self._record(loader, self._log)

    def loss(self, value: Any) -> None:
        """The loss of the current step, a number or a tensor with one element; of several, the last."""
        if self._step is not None:
            self._step.loss = take_loss(value)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Times a part of the current step: input, forward, backward or optimizer."""
        if name not in self._phases:
            raise UsageError(f"unknown phase {name!r}: use one of {', '.join(PHASES)}")
        return nullcontext() if self._step is None else self._phases[name]

    def _record(self, loader: Iterable[T], log: StepLog) -> Iterator[T]:
        outer = self._step
        mark = self._mark = choose_marks()
        is_host = mark is perf_counter
        handed_over: list[T] = []  # a batch passes through, so that this frame does not keep it alive
        start = perf_counter()
        begin = start if is_host else mark()
        try:
            iterator = iter(loader)
            while True:
                try:
                    handed_over.append(next(iterator))
                except StopIteration:
                    return
                self._step = step = MeteredStep(self._num_steps, start, perf_counter(), begin)
                self._num_steps += 1
                if outer is not None:
                    outer.holds_another = True
                yield handed_over.pop()
                start = perf_counter()
                step.end = begin = start if is_host else mark()
                self._step = outer
                if log.add(step, start):
                    self._write(log)
                    start = perf_counter()
                    begin = start if is_host else mark()
        finally:
            self._step = outer

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
            self._global_batch = self._batch_size * num_ranks
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
        """Rank 0: the run's directory, claimed as long as it is metered; gives the trial's."""
        self._trial = trial = self._make_trial()
        fields = {
            "label": self.name,
            "job": {"workload": trial.workload},
            "num_ranks": trial.num_ranks,
            "global_batch": self._global_batch,
        }
        environment = read_environment(__version__)
        self._store = RunStore.create(
            self._runs_dir.resolve(),  # the script may change its directory
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

    def _finish(self, directory: Path, log: StepLog, error: BaseException | None) -> None:
        """Leave the outcome; rank 0 waits for the others', makes the result of them and says where it is."""
        left_seconds = perf_counter()
        self._write(log, is_last=True)
        log.close()
        failure = describe_end(error, self._place.rank, log)
        device = "cpu" if choose_marks() is perf_counter else "cuda"
        start_bytes = self._report.start_memory_bytes or 0
        usage = resource.getrusage(resource.RUSAGE_SELF)
        report = replace(
            self._report,
            peak_memory_bytes=read_peak_memory(device, max(usage.ru_maxrss * 1024, start_bytes)),
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
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        if isinstance(cause, OSError):
            words = f"{cause.strerror}: {cause.filename or self._runs_dir}"
        else:
            words = str(cause) if isinstance(cause, ScalelabError) else f"{type(cause).__name__}: {cause}"
            words = words.partition("\n")[0]
        if not self._has_warned:
            self._has_warned = True
            where = f" on rank {self._place.rank}" if self._place.num_ranks > 1 else ""
            text = f"warning: Meter {self.name!r} stopped recording{where} ({words}); training continues"
            print(text, file=sys.stderr)  # noqa: T201


class _PhaseTimer:
    """Marks the beginning and the end of a phase in the step that is current."""

    __slots__ = ("_begin", "_meter", "_name", "_step")

    def __init__(self, meter: Meter, name: str) -> None:
        self._meter = meter
        self._name = name
        self._step: MeteredStep | None = None
        self._begin: Mark = None

    def __enter__(self) -> None:
        meter = self._meter
        if meter._open_phase is not None:
            raise UsageError(f"phase {self._name!r} starts inside phase {meter._open_phase!r}: end that one first")
        meter._open_phase = self._name
        self._step = meter._step
        self._begin = meter._mark()

    def __exit__(self, *_: object) -> None:
        end = self._meter._mark()
        self._meter._open_phase = None
        step, self._step = self._step, None
        if step is None:
            return
        if step.phases is None:
            step.phases = []
        step.phases.append((self._name, self._begin, end))

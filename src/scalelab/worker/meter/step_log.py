"""The steps that a Meter records, and how they reach the disk during training.

A mark is a point in time: a reading of the host's clock, or on CUDA an event in the stream of kernels, so that nothing
waits for the device. A step is two marks, the host's readings before and after the batch was asked for, the marks of
phases and a loss. Steps are kept as they are and become samples when they are written: once a second, between two
steps, and every 512 steps where a second holds more. On CUDA those are written whose last event has passed. What was
written survives the process; what was not is at most the last second.

torch is never imported here: a script that has not loaded it has neither tensors nor devices.

What a Meter says about the process that it is in: its script, how it ended, what memory it took.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from scalelab.errors import ScalelabError, UsageError
from scalelab.launch.agreement import samples_file
from scalelab.launch.meter_result import MeterFailure
from scalelab.records.samples import COLUMNS, render_samples
from scalelab.records.store import RUNS_DIR, find_runs
from scalelab.records.trial import PHASES, Cause, Status, StepKind

WRITE_SECONDS = 1.0
"""How long a step may wait to be written."""
MOST_WAITING = 512
"""How many steps may wait: writing them is one pause between two steps, of about two milliseconds."""

_CLEAN, _PHASES, _SETTLE, _PROFILED = (
    kind.value for kind in (StepKind.CLEAN, StepKind.PHASES, StepKind.SETTLE, StepKind.PROFILED)
)
PROFILE_AFTER = 10
"""Steps before the first profiled one."""

Mark = Any
"""A float, or a CUDA event."""


class MeteredStep:
    """One step while it runs, and until it is written."""

    __slots__ = ("begin", "end", "holds_another", "is_profiled", "loss", "number", "phases", "start", "waited")

    def __init__(self, number: int, start: float, ready: float | None, begin: Mark) -> None:
        """`ready`: when the batch was there; None: it is not known."""
        self.number = number
        self.start = start
        self.waited = None if ready is None else ready - start
        self.begin = begin
        self.end: Mark = None
        self.phases: list[tuple[str, Mark, Mark]] | None = None
        self.loss: Any = None
        self.holds_another = self.is_profiled = False

    def wait(self, seconds: float) -> None:
        """More time went into waiting for input."""
        self.waited = seconds + (self.waited or 0.0)


class CurrentStep:
    """The step that runs now, and how points in time are marked in it."""

    __slots__ = ("mark", "open_phase", "step")

    def __init__(self) -> None:
        self.step: MeteredStep | None = None
        self.mark: Callable[[], Mark] = perf_counter
        self.open_phase: str | None = None


class PhaseTimer:
    """Marks the beginning and the end of a phase in the step that is current."""

    __slots__ = ("_begin", "_name", "_now", "_step")

    def __init__(self, now: CurrentStep, name: str) -> None:
        self._now = now
        self._name = name
        self._step: MeteredStep | None = None
        self._begin: Mark = None

    def __enter__(self) -> None:
        now = self._now
        if now.open_phase is not None:
            raise UsageError(f"phase {self._name!r} starts inside phase {now.open_phase!r}: end that one first")
        now.open_phase = self._name
        self._step = now.step
        self._begin = now.mark()

    def __exit__(self, *_: object) -> None:
        end = self._now.mark()
        self._now.open_phase = None
        step, self._step = self._step, None
        if step is None:
            return
        if step.phases is None:
            step.phases = []
        step.phases.append((self._name, self._begin, end))


class StepLog:
    """One rank's samples file, extended between steps."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._rank = rank
        self._waiting: list[MeteredStep] = []
        self._last_write = perf_counter()
        self.num_written = 0
        self.failure: OSError | None = None
        """Why nothing is written any more."""
        self._file = samples_file(directory, rank).open("x", encoding="utf-8", newline="")
        self._write(render_samples(()))

    def add(self, step: MeteredStep, now: float) -> bool:
        """Keep a finished step; returns whether it is time to write."""
        self._waiting.append(step)
        return now - self._last_write >= WRITE_SECONDS or len(self._waiting) >= MOST_WAITING

    def write(self, *, is_last: bool = False) -> None:
        """Write the steps whose times are known; the last time, wait for those that are not."""
        steps = self._waiting
        num_known = (
            len(steps) if is_last else next((i for i, s in enumerate(steps) if not has_passed(s.end)), len(steps))
        )
        known, self._waiting = steps[:num_known], steps[num_known:]
        if known and self.failure is None:
            if is_last:
                wait_for(known[-1].end)
            if self._write(render_steps(self._rank, known)):
                self.num_written += len(known)
        self._last_write = perf_counter()

    def close(self) -> None:
        """Let go of the file; what is to be written has been."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _write(self, text: str) -> bool:
        """Whether it arrived; after the first time that it did not, nothing more is tried."""
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            self.failure = error
            return False
        return True


class StepProfile:
    """torch's profiler over `num_steps` steps after the first ten; the trace is written between two steps."""

    def __init__(self, trace: Path, num_steps: int) -> None:
        self._trace, self._end = trace, PROFILE_AFTER + num_steps
        self._profile: Any = None

    @property
    def is_on(self) -> bool:
        return self._profile is not None

    def pass_to(self, number: int) -> None:
        """Step `number` begins here."""
        if number >= self._end:
            self.stop()
            return
        if self._profile is not None:
            self._profile.end()
        elif number == PROFILE_AFTER:
            from scalelab.worker.script.instrumented import ProfiledBlock  # it needs torch

            self._profile = ProfiledBlock(self._trace).__enter__()
        if self._profile is not None:
            self._profile.begin()

    def stop(self) -> None:
        if self._profile is not None:
            profile, self._profile = self._profile, None
            profile.end()
            profile.__exit__()


def render_steps(rank: int, steps: list[MeteredStep]) -> str:
    """Steps as lines of the samples file, as `render_samples` writes them but in half the time."""
    losses = read_losses([step.loss for step in steps])
    return "".join([_render_step(rank, step, loss) for step, loss in zip(steps, losses, strict=True)])


_NOT_WATCHED = "," * (len(COLUMNS) - COLUMNS.index("loss") - 1)
"""What a Meter does not see: the columns behind the loss stay empty."""


def _render_step(rank: int, step: MeteredStep, loss: float | None) -> str:
    forward = backward = optimizer = ""
    if step.phases:
        spans: dict[str, float] = {}
        for name, begin, end in step.phases:
            spans[name] = spans.get(name, 0.0) + measure_span(begin, end)
        if "input" in spans:
            step.wait(spans.pop("input"))
        forward, backward, optimizer = (str(spans.get(name, "")) for name in PHASES[1:])
    kind = _SETTLE if step.holds_another else _PROFILED if step.is_profiled else _PHASES if step.phases else _CLEAN
    seconds = measure_span(step.begin, step.end)
    waited = "" if step.waited is None else step.waited
    return (
        f"{rank},{step.number},{kind},{step.start},{seconds},{waited},{forward},{backward},{optimizer},"
        f"{'' if loss is None else loss}{_NOT_WATCHED}\n"
    )


def choose_marks() -> Callable[[], Mark]:
    """How points in time are marked: by events where an accelerator is in use, by the host's clock elsewhere."""
    driver = find_used_device()
    if driver is None:
        return perf_counter

    def mark() -> Mark:
        event = driver.make_event()
        event.record()
        return event

    return mark


def find_used_device() -> Any:
    """The driver of the accelerator that the script has begun to use; None: it uses none, or no torch."""
    if "torch" not in sys.modules:
        return None
    from scalelab.worker.device import find_used_driver  # it needs torch

    return find_used_driver()


def measure_span(begin: Mark, end: Mark) -> float:
    """Seconds between two marks of one kind."""
    seconds: float = end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3
    return seconds


def has_passed(mark: Mark) -> bool:
    return isinstance(mark, float) or bool(mark.query())


def wait_for(mark: Mark) -> None:
    if not isinstance(mark, float):
        mark.synchronize()


def take_loss(value: Any) -> Any:
    """A loss as it is kept: a number at once where that waits for nothing, else a scalar on the device, copied.

    Copied, because the script may change its tensor in place before the loss is read. Of a tensor that is spread over
    ranks the local part is taken: putting it together would be a collective.
    """
    if isinstance(value, float):
        return value
    if not hasattr(value, "detach"):
        try:
            return float(value)
        except (TypeError, ValueError):
            raise UsageError(f"loss {value!r} is not a number: pass a number or a tensor with one element") from None
    local = value.to_local() if hasattr(value, "to_local") else value
    if local.numel() != 1:
        raise UsageError(f"loss has {local.numel()} elements: pass one, such as loss.mean()")
    return local.item() if local.is_cpu else local.detach().clone().reshape(())


def read_losses(values: list[Any]) -> list[float | None]:
    """The numbers of losses, with one copy from the device for all that are there."""
    on_device = [value for value in values if hasattr(value, "detach")]
    if not on_device:
        return values
    torch: Any = sys.modules["torch"]
    numbers = iter(torch.stack([value.double() for value in on_device]).tolist())
    return [next(numbers) if hasattr(value, "detach") else value for value in values]


def make_configuration(name: str) -> str:
    """A Meter's name as it names a directory; what cannot stand in one becomes a dash."""
    found = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:80]
    if not found:
        raise UsageError(f"{name!r} is not a valid run name: use letters and digits")
    return "control-run" if found == "control" else found


def name_script() -> str:
    """The file that is run, without its directory."""
    return Path(find_script()).name


def find_script() -> str:
    """The path of the file that is run; a word where there is none."""
    return str(getattr(sys.modules.get("__main__"), "__file__", None) or "interactive")


def describe_end(error: BaseException | None, rank: int, log: StepLog) -> MeterFailure | None:
    """Why a rank's Meter ended before training did; None if it did not."""
    num_steps = log.num_written
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        if log.failure is None:
            return None
        reason = f"rank {rank} could record only {num_steps} steps: {log.failure.strerror}"
        return MeterFailure(status=Status.CRASHED, reason=reason)
    words = type(error).__name__ + (f": {text}" if (text := str(error).strip().partition("\n")[0]) else "")
    reason = f"rank {rank} raised an error after {num_steps} steps: {words}"
    if "torch" not in sys.modules:
        return MeterFailure(status=Status.CRASHED, reason=reason)
    from scalelab.worker.failure import format_own_frames, is_lost_peer, is_out_of_memory  # they need torch

    is_full, own = is_out_of_memory(error), format_own_frames(error, f"{find_script()}:main")
    status = Status.OUT_OF_MEMORY if is_full else Status.CRASHED
    cause = Cause.ALLOCATION if is_full else Cause.LOST_PEER if is_lost_peer(error) else Cause.RAISED
    return MeterFailure(status=status, cause=cause, reason=reason, traceback=own)


def describe_trouble(error: Exception, runs_dir: Path) -> str:
    """Why a Meter stops recording, in one line."""
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    if isinstance(cause, OSError):
        return f"{cause.strerror}: {cause.filename or runs_dir}"
    words = str(cause) if isinstance(cause, ScalelabError) else f"{type(cause).__name__}: {cause}"
    return words.partition("\n")[0]


def read_peak_memory(resident_bytes: int) -> tuple[str, int | None]:
    """The kind of the device in use and the highest so far: allocated there by torch, or resident in the process."""
    driver = find_used_device()
    if driver is None:
        return "cpu", resident_bytes
    return driver.kind.name, driver.read_memory(driver.find_current()).peak_bytes


def say_where(path: Path) -> str:
    """The last line: where the run is, and the next useful command."""
    here = Path.cwd()
    short = path.relative_to(here) if path.is_relative_to(here) else path
    name = "last" if find_runs(here / RUNS_DIR)[-1:] == [path] else str(short)
    return f"Saved to {short}  ·  scalelab show {name}"

"""From what the ranks of a metered run leave behind to its result, without torch.

A rank announces itself in `rank<r>.json` when its Meter begins, with its process; it replaces the file by its outcome
when the Meter ends. So an outcome that is missing has one of three reasons, which differ: the rank never
had a Meter, it is still at work, or it died. Rank 0 waits for the others a bounded time, for some may never come. When
rank 0 itself was killed, the first reader of the run puts the result together, once no rank is at work any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from scalelab.errors import DamagedRun, StoreError
from scalelab.launch.agreement import outcome_file, remove_scratch, samples_file
from scalelab.launch.outcome import name_ranks
from scalelab.records.files import read_json, write_json
from scalelab.records.observations import RankReport
from scalelab.records.running import find_holder
from scalelab.records.samples import read_partial_samples
from scalelab.records.store import RunStore
from scalelab.records.trial import Cause, Status, Trial, TrialResult, from_builtins, to_builtins

POLL_SECONDS = 0.02


METER_VARIABLE = "SCALELAB_METER"
"""Holds what `scalelab meter` asks of the processes that it starts."""


@dataclass(frozen=True, kw_only=True)
class MeterRequest:
    """How a process that trains is to be recorded."""

    name: str
    runs_dir: str
    profile_steps: int = 0


def write_request(request: MeterRequest) -> str:
    return json.dumps(to_builtins(request))


def read_request(text: str) -> MeterRequest:
    return from_builtins(json.loads(text), MeterRequest)


@dataclass(frozen=True, kw_only=True)
class Stay:
    """When a rank's Meter started, and on which device."""

    started_at: str
    """UTC, ISO 8601."""
    entered_seconds: float
    """On the host's monotonic clock."""
    load_before: float | None = None


@dataclass(frozen=True, kw_only=True)
class MeterFailure:
    """Why a rank's Meter ended early."""

    status: Status
    reason: str
    traceback: str = ""
    cause: Cause = Cause.RAISED


@dataclass(frozen=True, kw_only=True)
class MeterOutcome:
    """A rank's outcome when its Meter ends."""

    report: RankReport
    stay: Stay
    left_seconds: float
    device: str = "cpu"
    failure: MeterFailure | None = None


def announce(directory: Path, rank: int, stay: Stay) -> None:
    """Say that this process meters as `rank`, and since when."""
    identity = {"pid": os.getpid(), "host": socket.gethostname(), "started": psutil.Process().create_time()}
    write_json(outcome_file(directory, rank), {**identity, "stay": to_builtins(stay)})


def leave_outcome(directory: Path, outcome: MeterOutcome) -> None:
    """Say how it ended; a rank that comes when the result has been written only tidies up."""
    rank = outcome.report.rank
    if (directory / "result.json").exists():
        samples_file(directory, rank).unlink(missing_ok=True)
        outcome_file(directory, rank).unlink(missing_ok=True)
    else:
        write_json(outcome_file(directory, rank), to_builtins(outcome))


def wait_for_outcomes(directory: Path, num_ranks: int, seconds: float) -> None:
    """Until every rank has left its outcome or is known to be dead, at most so long."""
    deadline = time.monotonic() + seconds
    while any(_may_come(directory, rank) for rank in range(num_ranks)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _may_come(directory: Path, rank: int) -> bool:
    file = outcome_file(directory, rank)
    return not file.exists() or find_holder(file) is not None


def assemble_result(trial: Trial, directory: Path) -> TrialResult:
    """The result of what is there: samples as far as they were written, outcomes, and whose failure it was."""
    outcomes = [_read_outcome(outcome_file(directory, rank)) for rank in range(trial.num_ranks)]
    samples = [s for rank in range(trial.num_ranks) for s in read_partial_samples(samples_file(directory, rank))]
    blame = find_blame(directory, outcomes)
    stay = _read_stay(directory, outcomes[0])
    ends = [outcome.left_seconds for outcome in outcomes[:1] if outcome]
    ends += [sample.start_seconds + sample.step_seconds for sample in samples if sample.rank == 0]
    entered = None if stay is None else stay.entered_seconds
    first = min((sample.start_seconds for sample in samples if sample.rank == 0), default=None)
    devices = [outcome.device for outcome in outcomes if outcome is not None and outcome.device != "cpu"]
    return TrialResult(
        trial=replace(trial, device=devices[0] if devices else "cpu"),
        status=blame.status if blame else Status.COMPLETED,
        cause=blame.cause if blame else None,
        reason=blame.reason if blame else "",
        traceback=blame.traceback if blame else "",
        samples=tuple(sorted(samples, key=lambda sample: (sample.rank, sample.step))),
        ranks=tuple(o.report if o else RankReport(rank=rank) for rank, o in enumerate(outcomes)),
        started_at=stay.started_at if stay else "",
        wall_seconds=max(ends) - entered if ends and entered is not None else 0.0,
        first_step_seconds=None if first is None or entered is None else first - entered,
        load_before=stay.load_before if stay else None,
    )


def find_blame(directory: Path, outcomes: Sequence[MeterOutcome | None]) -> MeterFailure | None:
    """An error of a rank's own, else the ranks that left no outcome, else a rank that lost another."""
    failures = [outcome.failure for outcome in outcomes if outcome is not None and outcome.failure is not None]
    own = [failure for failure in failures if failure.cause is not Cause.LOST_PEER]
    silent = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
    if own or not silent:
        return next(iter(own or failures), None)
    absent = [rank for rank in silent if not outcome_file(directory, rank).exists()]
    died = [rank for rank in silent if rank not in absent]
    parts = [f"{name_ranks(died)} did not reach the end of the Meter: killed, or still running"] if died else []
    parts += [f"{name_ranks(absent)} recorded nothing: no Meter was created there"] if absent else []
    return MeterFailure(status=Status.CRASHED, cause=Cause.ENDED, reason="; ".join(parts))


def save_and_tidy(store: RunStore, result: TrialResult) -> None:
    """Store the result, then remove what it was put together from: in this order nothing can be lost."""
    store.save_result(result)
    remove_scratch(store.trial_directory(result.trial.name))


def rescue_result(store: RunStore) -> TrialResult | None:
    """The result of a metered run whose rank 0 did not write one, stored where that can be; None while it runs."""
    (trial,) = store.trials()
    directory = store.trial_directory(trial.name)
    if store.is_running() or any(_is_at_work_here(directory, rank) for rank in range(trial.num_ranks)):
        return None
    try:
        with store.claim():
            if not store.has_result(trial.name):
                save_and_tidy(store, assemble_result(trial, directory))
            return store.result(trial.name)
    except (StoreError, OSError):
        return assemble_result(trial, directory)


def _is_at_work_here(directory: Path, rank: int) -> bool:
    """Whether a rank of this host still meters; of another host's nothing can be known but what rank 0's claim says."""
    holder = find_holder(outcome_file(directory, rank))
    return holder is not None and holder["host"] == socket.gethostname()


def _read_outcome(file: Path) -> MeterOutcome | None:
    try:
        return from_builtins(read_json(file), MeterOutcome)
    except (DamagedRun, ValueError):
        return None


def _read_stay(directory: Path, outcome: MeterOutcome | None) -> Stay | None:
    """Rank 0's, from its outcome or from what it announced."""
    if outcome is not None:
        return outcome.stay
    with contextlib.suppress(DamagedRun, ValueError):
        return from_builtins(read_json(outcome_file(directory, 0)).get("stay"), Stay)
    return None

"""From what the ranks left behind to one result: whose failure it was, and what was measured before it.

What the profiled steps of a trial say: the ranks' traces, read by the parent when the ranks are gone.

The trial has its times already. A trace that is missing or cannot be read, or a disk that is full, leaves the trial
without this, and is not a failure of it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scalelab.errors import ScalelabError, TraceUnreadable
from scalelab.launch.agreement import (
    curve_file,
    ended_file,
    fetches_file,
    flight_file,
    log_file,
    outcome_file,
    quantized_file,
    remove_scratch,
    samples_file,
    trace_file,
    transfers_file,
)
from scalelab.records.files import read_if_whole, read_json
from scalelab.records.observations import CurvePoint, Message, RankReport, TracedOperator, TracedStep
from scalelab.records.quantized import Quantized
from scalelab.records.samples import read_partial_fetches, read_partial_samples, read_partial_transfers
from scalelab.records.store import RunStore
from scalelab.records.tasks import Quantize
from scalelab.records.trial import Cause, Status, Trial, TrialResult, from_builtins
from scalelab.report.findings import Caution, CautionKind
from scalelab.trace.collectives import Collective
from scalelab.trace.files.flight import inspect_flight, read_dumps
from scalelab.trace.job_trace import JobTrace, read_ranks
from scalelab.trace.matching import StepWaiting, sum_by_step
from scalelab.trace.operators import OperatorCounter
from scalelab.trace.rank_trace import RankTrace
from scalelab.units import format_bytes, format_count

MOST_OPERATORS = 1000
"""What is kept of a trace with more names is their longest."""


def add_traced_steps(reports: Sequence[RankReport], directory: Path) -> tuple[RankReport, ...]:
    """The reports, with the steps that the ranks' traces hold."""
    files = [trace_file(directory, report.rank) for report in reports]
    if not files or not all(file.is_file() for file in files):
        return tuple(reports)
    try:
        job = read_ranks(files, counters=[OperatorCounter], counts_work=False)
        traced = summarise_traces(job)
    except ScalelabError:
        return tuple(reports)
    operators = {0: list_operators(job.by_rank[0])} if 0 in job.by_rank else {}
    return tuple(
        replace(report, traced_steps=traced.get(report.rank, ()), traced_operators=operators.get(report.rank, ()))
        for report in reports
    )


def list_operators(trace: RankTrace) -> tuple[TracedOperator, ...]:
    """The operators of a trace that was read with their counter, the longest time themselves first."""
    (operators,) = trace.counted
    return tuple(
        TracedOperator(name=one.name, count=one.count, self_ns=one.self_ns) for one in operators[:MOST_OPERATORS]
    )


def summarise_traces(job: JobTrace) -> dict[int, tuple[TracedStep, ...]]:
    """The steps of every rank, in order."""
    matching, by_rank = job.matching, job.by_rank
    waiting = sum_by_step(matching, by_rank) if matching is not None else {}
    return {rank: _list_steps(trace, waiting.get(rank, {})) for rank, trace in by_rank.items()}


def _list_steps(trace: RankTrace, waiting: dict[int, StepWaiting]) -> tuple[TracedStep, ...]:
    collectives: dict[int, list[Collective]] = {}
    for collective in trace.collectives:
        if collective.step is not None:
            collectives.setdefault(collective.step, []).append(collective)
    found = []
    for step, parts in trace.breakdown.by_step.items():
        matched = waiting.get(step)
        found.append(
            TracedStep(
                span_ns=parts.span_ns,
                compute_ns=parts.compute_ns,
                overlapped_ns=parts.overlapped_ns,
                exposed_ns=parts.exposed_ns,
                copy_ns=parts.copy_ns,
                idle_ns=parts.idle_ns,
                transfer_ns=matched.transfer_ns if matched else None,
                waiting_ns=matched.waiting_ns if matched else None,
                num_matched=matched.num_collectives if matched else None,
                messages=count_messages(collectives.get(step, ())),
            )
        )
    return tuple(found)


def count_messages(collectives: Iterable[Collective]) -> tuple[Message, ...]:
    """By kind; the bytes are those of the collectives whose size was recorded."""
    counts: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for collective in collectives:
        counts[collective.kind] = counts.get(collective.kind, 0) + 1
        if collective.payload_bytes is not None:
            sizes[collective.kind] = sizes.get(collective.kind, 0) + collective.payload_bytes
    return tuple(Message(kind=kind, count=count, payload_bytes=sizes.get(kind)) for kind, count in counts.items())


DUMP_MARK = "most recent call first"
"""The words with which `faulthandler` heads every thread's stack."""


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How the operating system saw a rank end."""

    code: int | None
    """None: unknown, because its server died first."""
    was_killed: bool
    """Whether we ended it ourselves because of another rank or the time limit."""
    is_timed_out: bool = False
    node: str = ""
    """Where it ran, among several nodes; empty: here."""
    words: str = ""
    """What else is known if its exit code is not."""

    @property
    def where(self) -> str:
        return f" on {self.node}" if self.node else ""


@dataclass(frozen=True, kw_only=True)
class Blame:
    """One rank's failure, ranked by how likely it is the cause of the others'."""

    weight: int
    status: Status
    cause: Cause
    reason: str
    traceback: str = ""


def conclude_trial(
    trial: Trial,
    directory: Path,
    ends: Sequence[RankEnd],
    *,
    has_oom_kill: bool,
    launched: float,
    **measured: Any,
) -> TrialResult:
    """Read the ranks' files, find the cause of a failure, and remove the files that the result replaces."""
    files = [read_if_whole(outcome_file(directory, rank)) for rank in range(trial.num_processes)]
    ranks = range(trial.num_processes)
    samples = [s for rank in ranks for s in read_partial_samples(samples_file(directory, rank))]
    transfers = [t for rank in ranks for t in read_partial_transfers(transfers_file(directory, rank))]
    fetches = [f for rank in ranks for f in read_partial_fetches(fetches_file(directory, rank))]
    blame = find_cause(trial, ends, files, directory, has_oom_kill=has_oom_kill)
    first_start = min((s.start_seconds for s in samples if s.start_seconds >= launched), default=None)
    reports = [_read_report(rank, end, file) for rank, (end, file) in enumerate(zip(ends, files, strict=True))]
    lines = read_curve(curve_file(directory))
    result = TrialResult(
        trial=trial,
        status=blame.status if blame else Status.COMPLETED,
        cause=blame.cause if blame else None,
        reason=blame.reason if blame else "",
        traceback=blame.traceback if blame else "",
        samples=tuple(sorted(samples, key=lambda sample: (sample.rank, sample.step))),
        transfers=tuple(transfers),
        fetches=tuple(fetches),
        ranks=add_traced_steps(reports, directory),
        curve=tuple(point for point in lines if not point.is_epoch),
        epochs=tuple(point for point in lines if point.is_epoch),
        quantized=read_quantized(quantized_file(directory)) if isinstance(trial.task, Quantize) else None,
        first_step_seconds=None if first_start is None else first_start - launched,
        **measured,
    )
    if blame is None:
        shutil.rmtree(flight_file(directory, 0).parent, ignore_errors=True)
    if trial.training_run is None or blame is None:  # a training run that was cut short resumes from its own files
        remove_scratch(directory)
    return result


def read_unfinished(trial: Trial, directory: Path) -> TrialResult | None:
    """What a training run has written that was interrupted, or is still at work; None: nothing yet."""
    lines = read_curve(curve_file(directory))
    curve = tuple(point for point in lines if not point.is_epoch)
    if not curve:
        return None
    samples = [s for rank in range(trial.num_processes) for s in read_partial_samples(samples_file(directory, rank))]
    reason = f"interrupted after step {curve[-1].step}, or still running"
    return TrialResult(
        trial=trial,
        status=Status.CRASHED,
        cause=Cause.INTERRUPTED,
        reason=reason,
        samples=tuple(samples),
        curve=curve,
        epochs=tuple(point for point in lines if point.is_epoch),
    )


def find_cause(
    trial: Trial,
    ends: Sequence[RankEnd],
    files: Sequence[dict[str, Any] | None],
    directory: Path,
    *,
    has_oom_kill: bool,
) -> Blame | None:
    """The failure to blame, or None when every rank completed."""
    stuck = [rank for rank, end in enumerate(ends) if end.is_timed_out]
    silent = next((end.words for end in ends if end.code is None and end.node and not end.is_timed_out), "")
    if stuck and silent:  # each node ends its ranks in time and leaves word of it, unless it has died
        reason = f"{silent}; {name_ranks(stuck)} waited for {trial.timeout_seconds:g} s"
        return Blame(weight=9, status=Status.CRASHED, cause=Cause.ENDED, reason=reason)
    if stuck:
        return Blame(
            weight=9,
            status=Status.TIMED_OUT,
            cause=Cause.TIME_LIMIT,
            reason=f"not finished after {trial.timeout_seconds:g} s{describe_hang(directory)}; the stacks of"
            f" {name_ranks(stuck)} are in {directory}/rank*.log",
        )
    blames = [
        _blame_rank(rank, end, file, directory, trial.memory_limit_bytes, has_oom_kill=has_oom_kill)
        for rank, (end, file) in enumerate(zip(ends, files, strict=True))
    ]
    return max((blame for blame in blames if blame), key=lambda blame: blame.weight, default=None)


def describe_hang(directory: Path) -> str:
    """The collective that ranks hang in and who has not called it, by their flight recorders; empty: not known."""
    try:
        groups = inspect_flight(read_dumps(sorted(flight_file(directory, 0).parent.glob("rank_*"))))
    except TraceUnreadable:
        return ""
    group = groups[0] if groups else None
    if group is None or group.stuck is None or not group.waiting:
        return ""
    stuck, others = group.stuck, group.missing
    where = f" ({stuck.sizes} {stuck.dtypes})".replace("()", "") if stuck.sizes else ""
    missing = f", which {name_ranks(others)} {'has' if len(others) == 1 else 'have'} not called" if others else ""
    missing += f" ({name_ranks(group.undumped)} left no record)" if group.undumped else ""
    return f"; {name_ranks(group.waiting)} wait{'s'[: len(group.waiting) == 1]} in {stuck.name}{where}{missing}"


THREAD_WORDS = "terminate called"
"""What the C++ runtime prints where a library cannot start a thread; a script's own abort has words of its own."""


def _blame_rank(
    rank: int,
    end: RankEnd,
    file: dict[str, Any] | None,
    directory: Path,
    limit_bytes: int | None,
    *,
    has_oom_kill: bool,
) -> Blame | None:
    log = log_file(directory, rank)
    failure = file.get("failure") if file else None
    if failure:
        cause = Cause(failure["cause"])
        return Blame(
            weight=1 if cause is Cause.LOST_PEER else 4,
            status=Status(failure["status"]),
            cause=cause,
            reason=failure["reason"],
            traceback=failure["traceback"],
        )
    if end.code == 0 and file:
        return None
    if end.was_killed:
        reason = f"rank {rank} was stopped because another rank failed"
        return Blame(weight=0, status=Status.CRASHED, cause=Cause.LOST_PEER, reason=reason)
    if end.code is None:
        return Blame(weight=2, status=Status.CRASHED, cause=Cause.ENDED, reason=_describe_silence(rank, end))
    if end.code == -signal.SIGKILL and has_oom_kill:
        reason = f"rank {rank}{end.where} was killed by the kernel: out of memory"
        return Blame(weight=5, status=Status.OUT_OF_MEMORY, cause=Cause.ALLOCATION, reason=reason)
    if end.code < 0 and "std::bad_alloc" in _read_tail(log):
        reason = f"rank {rank} ran out of memory (bad_alloc)"
        return Blame(weight=5, status=Status.OUT_OF_MEMORY, cause=Cause.ALLOCATION, reason=reason)
    if end.code == -signal.SIGABRT and limit_bytes is not None and THREAD_WORDS in _read_tail(log):
        reason = (
            f"rank {rank} could not start a thread within --memory-limit {format_bytes(limit_bytes)}: each needs a"
            " stack, and a process group has several; 60MB and more leave room for them"
        )
        return Blame(weight=5, status=Status.OUT_OF_MEMORY, cause=Cause.ALLOCATION, reason=reason)
    how = f"was killed by {_name_signal(-end.code)}" if end.code < 0 else f"exited with code {end.code}"
    reason = f"rank {rank}{end.where} {how}{_quote_exception(log)}; see {log}"
    return Blame(weight=5, status=Status.CRASHED, cause=Cause.ENDED, reason=reason)


def _quote_exception(log: Path) -> str:
    """What C++ said of the exception that nothing caught, as gloo's threads leave them; empty: there was none."""
    found = re.search(r"^\s*what\(\):\s*(\S.{0,199})", _read_tail(log), re.MULTILINE)
    return f" ({found[1].rstrip()})" if found else ""


def _describe_silence(rank: int, end: RankEnd) -> str:
    """The words for a rank with an unknown exit code."""
    return end.words or f"the process that started rank {rank} was killed"


def read_curve(path: Path) -> tuple[CurvePoint, ...]:
    """The lines of a training run; one that was cut is dropped."""
    try:
        lines = path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
    except OSError:
        return ()
    return tuple(from_builtins(json.loads(line), CurvePoint) for line in lines)


def read_quantized(path: Path) -> Quantized | None:
    """What taking the model to int8 has left, as far as it came; None: nothing."""
    found = read_if_whole(path)
    return None if found is None else from_builtins(found, Quantized)


def has_stack_dump(log: Path) -> bool:
    return DUMP_MARK in _read_tail(log, 1 << 20)


def _read_report(rank: int, end: RankEnd, file: dict[str, Any] | None) -> RankReport:
    report = from_builtins(file["report"], RankReport) if file else RankReport(rank=rank)
    return replace(report, exit_code=end.code)


def _read_tail(path: Path, num_bytes: int = 4096) -> str:
    try:
        return path.read_bytes()[-num_bytes:].decode("utf-8", "replace")
    except OSError:
        return ""


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def name_ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(str(rank) for rank in ranks)
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


OUTLIVED = CautionKind("outlived", "processes outlived the ranks that started them and were ended", "note", ("number",))


def warn_of_ended(store: RunStore) -> Iterator[Caution]:
    """What ranks had left running when their trial was over."""
    mark = ended_file(Path()).name
    files = [f"{store.path}/trials/{name}/{mark}" for name in store.record.trials]
    there = [Path(file) for file in files if os.path.exists(file)]  # noqa: PTH110 - a fifth of the time, of each trial
    names = [str(name) for file in there for name in read_json(file).get("processes", ())]
    if names:
        listed = ", ".join(dict.fromkeys(names))
        yield OUTLIVED(
            "",
            f"{format_count(len(names), 'process')} outlived the ranks that started them and were ended: {listed}",
            "stop them in the workload: while they run, they disturb the next trials",
            number=len(names),
        )

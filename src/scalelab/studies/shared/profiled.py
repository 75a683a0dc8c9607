"""What the profiled steps of a study's launches say of communication: `measure/traces.py` made into tables and words.

Every number is, per launch, the median over its profiled steps; its interval is over launches. Profiled steps are few
and slower than clean ones, which is said beside them: what counts is what part of the time goes where.

    exposed      communication while nothing is computed, within the step
    overlapped   communication while something is computed
    transfer     the shortest time that any rank spent in each collective, added up
    waiting      what this rank spent in the same collectives beyond that: it was early

Exposed and overlapped are time that passes: two collectives at once count once, and what is left of one after the
step's end is not counted. Transfer and waiting are added up over collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_over_rounds
from scalelab.records.observations import TracedStep
from scalelab.records.trial import TrialResult
from scalelab.report.document import Column, Table, make_row
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.sweep import INTERVAL_NOTE
from scalelab.units import format_quantity, format_share

Steps = tuple[TracedStep, ...]
Read = Callable[[TracedStep], float | None]

FEW_STEPS = 3
"""Profiled steps of one launch, where a study records some unasked: the first is often slow, the median is not it."""
WORTH_A_WORD = 0.05
"""A rank whose waiting is a larger share of its step is named."""

PARTS: tuple[tuple[str, str, Read], ...] = (
    ("traced_step_seconds", "profiled step", lambda step: step.span_ns / 1e9),
    ("traced_compute_seconds", "compute", lambda step: step.compute_ns / 1e9),
    ("traced_exposed_seconds", "exposed comm", lambda step: step.exposed_ns / 1e9),
    ("traced_overlapped_seconds", "overlapped", lambda step: step.overlapped_ns / 1e9),
    ("traced_transfer_seconds", "transfer", lambda step: _to_seconds(step.transfer_ns)),
    ("traced_waiting_seconds", "waiting", lambda step: _to_seconds(step.waiting_ns)),
    ("traced_idle_seconds", "idle, copies", lambda step: (step.idle_ns + step.copy_ns) / 1e9),
)
"""The columns of the table: key, header, and the number of one step."""
_READ = {key: read for key, _, read in PARTS}


def _to_seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e9


def list_traced(arm: Arm) -> list[TrialResult]:
    """The launches of which every rank's profiled steps are known."""
    return [result for result in arm.completed if _list_steps(result)]


def _list_steps(result: TrialResult) -> list[Steps]:
    """The profiled steps of every rank; nothing unless all ranks have as many."""
    found = [report.traced_steps for report in result.ranks]
    is_whole = len(found) == result.trial.num_processes and len({len(steps) for steps in found}) == 1
    return found if is_whole and found[0] else []


def estimate_traced(arm: Arm, rank: int, key: str) -> Estimate | None:
    """One part of one rank's profiled step."""
    return _estimate([[_READ[key](step) for step in _list_steps(result)[rank]] for result in list_traced(arm)])


def find_traced_step(arm: Arm) -> float | None:
    """The profiled step of the rank with the longest; None where nothing was recorded."""
    steps = [estimate_traced(arm, rank, "traced_step_seconds") for rank in range(arm.trial.num_processes)]
    return max((step.value for step in steps if step is not None), default=None)


def estimate_traced_exposed(arm: Arm) -> Estimate | None:
    """Exposed communication of the rank that waits least, step by step: the others' is partly waiting for it."""
    if arm.trial.num_processes < 2:
        return None
    launches = [zip(*_list_steps(result), strict=True) for result in list_traced(arm)]
    return _estimate([[min(step.exposed_ns for step in ranks) / 1e9 for ranks in steps] for steps in launches])


def _estimate(launches: Sequence[Sequence[float | None]]) -> Estimate | None:
    """The median of the launches' medians, with its interval over launches."""
    known = [[number for number in steps if number is not None] for steps in launches]
    medians = [float(np.median(steps)) for steps in known if steps]
    return estimate_over_rounds(float(np.median(medians)), medians) if medians else None


def has_traces(arm: Arm) -> bool:
    """Whether there is something to say: several ranks, and every rank's steps were recorded."""
    return arm.trial.num_processes > 1 and bool(list_traced(arm))


def make_traced_table(arms: Sequence[Arm], *, title: str = "Communication in the profiled steps") -> Table | None:
    """One row per rank; None where nothing was recorded."""
    shown = [arm for arm in arms if has_traces(arm)]
    if not shown:
        return None
    columns = (
        Column(key="rank", header="rank", align="left"),
        *(Column(key=key, header=header, quantity="seconds") for key, header, _ in PARTS),
        Column(key="traced_bytes", header="sent for", quantity="bytes"),
    )
    rows = [
        make_row(
            f"rank {rank}" if len(shown) == 1 else f"{arm.label}, rank {rank}",
            *(estimate_traced(arm, rank, key) for key, _, _ in PARTS),
            count_bytes(arm, rank),
        )
        for arm in shown
        for rank in range(arm.trial.num_processes)
    ]
    notes = (
        INTERVAL_NOTE,
        "profiled step = compute + exposed comm + idle, copies, step by step; of medians only nearly so",
        "overlapped: communication beside compute",
        "transfer: the shortest time of any rank in each collective, added up; waiting: this rank's time beyond that",
        "sent for: the size of the tensors of the step's collectives, where recorded",
    )
    return Table(title=title, columns=columns, rows=tuple(rows), notes=notes)


def count_bytes(arm: Arm, rank: int) -> int | None:
    """What the collectives of one step are about: the median over steps, the same in every launch."""
    known = [
        step.payload_bytes
        for result in list_traced(arm)
        for step in _list_steps(result)[rank]
        if step.payload_bytes is not None
    ]
    return round(float(np.median(known))) if known else None


def describe_traced(arm: Arm) -> Iterator[str]:
    """What the traces say, in one sentence: exposed and overlapped, transfer, and who waits."""
    exposed = estimate_traced_exposed(arm)
    if exposed is None or not has_traces(arm):
        return
    longest = find_traced_step(arm) or arm.step.value
    transfer = estimate_traced(arm, 0, "traced_transfer_seconds")
    said = (
        f"In the profiled steps, {format_quantity('ratio', longest / arm.step.value)} times as long as clean ones,"
        f" {arm.label} has {format_quantity('seconds', exposed)} of exposed communication"
        f" ({format_share(exposed.value / longest)} of the profiled step)"
    )
    if transfer is not None:
        said += (
            f"; its collectives take {format_quantity('seconds', transfer)} to transfer{_name_waiting(arm, longest)}"
        )
    yield f"{said}."


def _name_waiting(arm: Arm, longest: float) -> str:
    """The rank that waits most, where it is worth a word."""
    found = [(estimate_traced(arm, rank, "traced_waiting_seconds"), rank) for rank in range(arm.trial.num_processes)]
    known = [(waiting, rank) for waiting, rank in found if waiting is not None]
    if not known:
        return ""
    waiting, rank = max(known, key=lambda entry: entry[0].value)
    if waiting.value < WORTH_A_WORD * longest or (waiting.low is not None and waiting.low <= 0):
        return ""
    return f", and rank {rank} waits {format_quantity('seconds', waiting)} in them for others"

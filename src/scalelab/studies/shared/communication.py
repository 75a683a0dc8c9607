"""What communication costs a row, by every method that measures it, and how far the methods agree.

    ablation       a step minus a step without the gradient all-reduce, from the same launch
    phases         from the last gradient of the last rank to the end of backward
    DDP counters   the same by DDP's own clocks: communication less its overlap with backward, of the last rank
    trace          communication in profiled steps while nothing is computed, of the rank that has least of it

All ask what the all-reduce costs. Ablation also saves waiting for a slower rank and what the all-reduce takes from
backward while they overlap, such as memory bandwidth. Phases and counters see only what comes after backward. The trace
also counts gaps between operators, which are not compute, and the profiler slows its steps down.

Of profiled steps, every number is the median over the steps of a launch, with an interval over launches. They are few
and slower than clean steps; what counts is which part of the time goes where:

    exposed      communication while nothing is computed, within the step
    overlapped   communication while something is computed
    transfer     the shortest time that any rank spent in each collective, added up
    waiting      what this rank spent in the same collectives beyond that: it was early

Exposed and overlapped are time that passes: two collectives at once count once, and what is left of one after the
step's end is not counted. Transfer and waiting are added up over collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import ExposedCommunication, communication_by_ablation, estimate_centre, scale_exposed
from scalelab.analysis.stats import estimate_median, estimate_over_rounds, find_median
from scalelab.records.observations import DdpCounters, TracedStep
from scalelab.records.trial import TrialResult
from scalelab.report.document import Table
from scalelab.report.findings import ASIDE, DETAIL, Finding, FindingKind, Known
from scalelab.report.tables import INTERVAL_NOTE, bytes_column, make_table, seconds_column, text_column
from scalelab.studies.shared.arms import Arm, keep_by_arm
from scalelab.studies.shared.breakdown import explain_arm, tabulate_launches
from scalelab.units import format_known, format_quantity, format_share, is_known

Steps = tuple[TracedStep, ...]
Read = Callable[[TracedStep], float | None]

WORTH_A_WORD = 0.05
"""A rank whose waiting is a larger share of its step is named."""

TRACED = FindingKind(
    "traced-communication",
    "Exposed communication in profiled steps, of the profiled step",
    DETAIL,
    ("seconds", "share", "step_ratio", "transfer_seconds"),
)
METHODS = FindingKind(
    "communication-methods",
    "Communication per step by every method, and whether they agree",
    ASIDE,
    ("ablation", "phases", "counters", "trace", "subtraction", "agree"),
)

METHOD_NAMES = {
    "ablation": "ablation",
    "phases": "phases",
    "counters": "DDP counters",
    "trace": "trace",
    "subtraction": "subtraction",
}
REASONS = {
    ("phases", False): "ablation also saves waiting and what the all-reduce takes from backward",
    ("phases", True): "without the all-reduce, ranks lose elsewhere part of what they save",
    ("trace", True): "the profiler slows down what runs between collectives",
    ("trace", False): "a trace does not show what the all-reduce takes from backward while they overlap",
    ("subtraction", True): "it also counts compute that does not shrink",
}
"""Why a method gives more (True) or less than ablation."""

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


def find_ablation(arm: Arm) -> ExposedCommunication | None:
    """By ablation; None on one rank, or where every step exchanged gradients."""
    if arm.trial.num_ranks == 1 or not any(len(steps) for steps in arm.comm_free):
        return None
    return communication_by_ablation(arm.clean, arm.comm_free)


def find_centre(arm: Arm) -> Estimate:
    """The step over launches: consistent with speedups and shares where launches differ widely."""
    return estimate_centre(arm.clean)


def find_exposed(arm: Arm) -> Estimate | None:
    """What the all-reduce adds to a step, in seconds of that step."""
    if find_ablation(arm) is None:
        return None
    return scale_exposed(arm.clean, arm.comm_free, find_centre(arm).value)


def measure_ablation(arm: Arm) -> Estimate | None:
    """The seconds of it."""
    found = find_ablation(arm)
    return None if found is None else found.seconds


def estimate_exposed(arm: Arm) -> Estimate | None:
    """By phases: the exposed part of the rank that waits least, which is the last one, step by step."""
    if explain_arm(arm):
        return None
    launches = [launch for launch in tabulate_launches(arm) if launch is not None and launch.parts is not None]
    per_round = [find_median(launch.parts["exposed"].min(axis=1)) for launch in launches if launch.parts]
    return estimate_over_rounds(find_median(per_round), per_round) if per_round else None


def read_counters(arm: Arm) -> list[DdpCounters]:
    """DDP's counters of every rank, of the launch that recorded them; nothing unless all ranks have them."""
    for result in arm.completed:
        found = [report.counters for report in result.ranks if report.counters is not None]
        if len(found) == arm.trial.num_processes:
            return found
    return []


def estimate_counted(arm: Arm) -> Estimate | None:
    """By DDP's counters: communication that nothing hides, of the rank that waits least, step by step."""
    counters = read_counters(arm)
    if not counters:
        return None
    least = [max(0.0, min(steps)) for steps in zip(*(found.exposed_seconds for found in counters), strict=True)]
    return estimate_median([least])


def list_methods(arm: Arm) -> dict[str, Estimate | None]:
    """Seconds per step by every method that needs no other row."""
    return {
        "ablation": measure_ablation(arm),
        "phases": estimate_exposed(arm),
        "counters": estimate_counted(arm),
        "trace": estimate_traced_exposed(arm),
    }


def compare_methods(arm: Arm, methods: Mapping[str, Estimate | None]) -> Iterator[Finding]:
    """Every method beside the first one known, with the reason where their intervals do not overlap."""
    known: list[tuple[str, Estimate]] = [(name, seconds) for name, seconds in methods.items() if seconds is not None]
    if len(known) < 2:
        return
    (first, reference), *others = known
    said, is_agreed = [], True
    for name, seconds in others:
        text = f"{METHOD_NAMES[name]} {format_known('seconds', seconds)}"
        if do_overlap(reference, seconds):
            said.append(f"{text} (agrees)" if is_known(seconds) else text)
            continue
        is_agreed, is_more = False, seconds.value > reference.value
        why = REASONS.get(("phases" if name == "counters" else name, is_more)) if first == "ablation" else None
        said.append(f"{text} ({'more' if is_more else 'less'}{f': {why}' if why else ''})")
    yield METHODS(
        arm.label,
        f"Communication of {arm.label} per step, by methods that count different things: {METHOD_NAMES[first]}"
        f" {format_known('seconds', reference)}, {', '.join(said)}.",
        weight=None,
        agree=is_agreed,
        **dict[str, Known](known),
    )


def do_overlap(left: Estimate, right: Estimate) -> bool:
    """Whether two intervals share a number; unknown ends share any."""
    if left.low is None or left.high is None or right.low is None or right.high is None:
        return True
    rounding = 1e-9 * max(abs(left.value), abs(right.value))
    return left.low <= right.high + rounding and right.low <= left.high + rounding


@keep_by_arm
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
    medians = [find_median(steps) for steps in known if steps]
    return estimate_over_rounds(find_median(medians), medians) if medians else None


def has_traces(arm: Arm) -> bool:
    """Whether there is something to say: several ranks, and every rank's steps were recorded."""
    return arm.trial.num_processes > 1 and bool(list_traced(arm))


def make_traced_table(arms: Sequence[Arm], *, title: str = "Communication in the profiled steps") -> Table | None:
    """One row per rank; None where nothing was recorded."""
    shown = [(arm, rank) for arm in arms if has_traces(arm) for rank in range(arm.trial.num_processes)]
    if not shown:
        return None
    is_single = len({arm.configuration for arm, _ in shown}) == 1

    def read(key: str) -> Callable[[tuple[Arm, int]], Estimate | None]:
        return lambda row: estimate_traced(*row, key)

    return make_table(
        shown,
        text_column("rank", "rank", lambda row: f"rank {row[1]}" if is_single else f"{row[0].label}, rank {row[1]}"),
        *(seconds_column(key, header, read(key)) for key, header, _ in PARTS),
        bytes_column("traced_bytes", "payload", lambda row: count_bytes(*row)),
        title=title,
        notes=(
            INTERVAL_NOTE,
            "profiled step = compute + exposed comm + idle, copies (each a median, so the sum is approximate)",
            "overlapped: communication during compute",
            "transfer: the shortest time of any rank in each collective, added up; waiting: this rank's time beyond it",
            "payload: the tensors of the step's collectives, where their sizes were recorded",
        ),
    )


def count_bytes(arm: Arm, rank: int) -> int | None:
    """The payload of the collectives of one step: the median over steps, the same in every launch."""
    known = [
        step.payload_bytes
        for result in list_traced(arm)
        for step in _list_steps(result)[rank]
        if step.payload_bytes is not None
    ]
    return round(float(np.median(known))) if known else None


def describe_traced(arm: Arm) -> Iterator[Finding]:
    """What the traces say, in one sentence: exposed communication, transfer, and who waits."""
    exposed = estimate_traced_exposed(arm)
    if exposed is None or not has_traces(arm):
        return
    longest = find_traced_step(arm) or arm.step.value
    transfer = estimate_traced(arm, 0, "traced_transfer_seconds")
    share = f", {format_share(exposed.value / longest)} of the profiled step" if is_known(exposed) else ""
    said = (
        f"Profiled steps of {arm.label} ({format_quantity('ratio', longest / arm.step.value)} times as long as clean"
        f" ones, so not comparable with ablation): exposed communication {format_known('seconds', exposed)}{share}"
    )
    if transfer is not None:
        said += f"; transfer takes {format_known('seconds', transfer)}{_name_waiting(arm, longest)}"
    yield TRACED(
        arm.label,
        f"{said}.",
        seconds=exposed,
        share=exposed.value / longest,
        step_ratio=longest / arm.step.value,
        transfer_seconds=transfer,
    )


def _name_waiting(arm: Arm, longest: float) -> str:
    """The rank that waits most, where it is worth a word."""
    found = [(estimate_traced(arm, rank, "traced_waiting_seconds"), rank) for rank in range(arm.trial.num_processes)]
    known = [(waiting, rank) for waiting, rank in found if waiting is not None]
    if not known:
        return ""
    waiting, rank = max(known, key=lambda entry: entry[0].value)
    if waiting.value < WORTH_A_WORD * longest or (waiting.low is not None and waiting.low <= 0):
        return ""
    return f", and rank {rank} waits {format_quantity('seconds', waiting)} in collectives"

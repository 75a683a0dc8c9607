"""What communication costs, by every way that leads to it, and how far the ways disagree.

    ablation       a step less a step without the gradient exchange, from the same launch
    phases         from the last gradient of the last rank to the end of backward
    DDP counters   the same by DDP's own clocks: communication less its overlap with backward, of the last rank
    trace          communication in profiled steps while nothing is computed, of the rank that has least of it
    subtraction    the step less its ideal on as many ranks

The first four ask what the exchange costs. Ablation also saves waiting for a slower rank and what the exchange costs
backward while it overlaps, such as memory bandwidth. Phases and counters see only what comes after backward. The trace
also sees gaps between operators, which are no computing, and its steps are slowed down by the profiler.
Subtraction needs no instrument and counts everything that keeps ranks from the ideal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import communication_by_ablation
from scalelab.analysis.stats import estimate_median, estimate_over_rounds
from scalelab.records.observations import DdpCounters
from scalelab.report.document import Column, Table, make_row
from scalelab.studies.scaling.answer import ScalingAnswer
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.breakdown import explain_arm, tabulate_launches
from scalelab.studies.shared.profiled import estimate_traced_exposed, find_traced_step
from scalelab.studies.shared.sweep import INTERVAL_NOTE
from scalelab.units import format_quantity


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to the cost of communication."""

    name: str
    seconds: Estimate | None
    counts: str
    """What it counts."""
    step_seconds: float
    """The step that its share is of."""


def estimate_exposed(arm: Arm) -> Estimate | None:
    """By phases: the exposed part of the rank that waits least, which is the last one, step by step."""
    if explain_arm(arm):
        return None
    launches = [launch for launch in tabulate_launches(arm) if launch is not None and launch.parts is not None]
    per_round = [float(np.median(launch.parts["exposed"].min(axis=1))) for launch in launches if launch.parts]
    return estimate_over_rounds(float(np.median(per_round)), per_round) if per_round else None


def read_counters(arm: Arm) -> list[DdpCounters]:
    """What DDP said on every rank of the launch in which it was asked; nothing unless all ranks answered."""
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


def list_methods(answer: ScalingAnswer, arm: Arm) -> list[Method]:
    """Every way, with its number where it has one."""
    exposed, step = answer.exposed(arm), arm.step.value
    ideal = "T_N − T_1/N" if answer.is_strong else "T_N − T_1"
    return [
        Method(
            name="ablation",
            seconds=exposed.seconds if exposed else None,
            counts="what a step without the exchange saves: exchange, waiting, what it takes from backward",
            step_seconds=step,
        ),
        Method(
            name="phases",
            seconds=estimate_exposed(arm),
            counts="from the last rank's last gradient on",
            step_seconds=step,
        ),
        Method(
            name="DDP counters",
            seconds=estimate_counted(arm),
            counts="the same by DDP's clocks, in one launch",
            step_seconds=step,
        ),
        Method(
            name="trace",
            seconds=estimate_traced_exposed(arm),
            counts="collectives beside which nothing is computed, in profiled steps",
            step_seconds=find_traced_step(arm) or step,
        ),
        Method(
            name="subtraction",
            seconds=answer.excess(arm),
            counts=f"{ideal}: all that keeps ranks from the ideal",
            step_seconds=step,
        ),
    ]


def make_communication_table(answer: ScalingAnswer, arm: Arm) -> Table:
    """The ways side by side."""
    columns = (
        Column(key="method", header="communication by", align="left"),
        Column(key="seconds", header="a step", quantity="seconds"),
        Column(key="share", header="of the step", quantity="share"),
        Column(key="counts", header="what it counts", align="left"),
    )
    rows = tuple(
        make_row(method.name, method.seconds, _find_share(method), method.counts)
        for method in list_methods(answer, arm)
    )
    title = f"Communication of {arm.label}, by every way to it"
    notes = (INTERVAL_NOTE, "of the step: of a clean one; by trace, of the profiled step, which is longer")
    return Table(title=title, columns=columns, rows=rows, notes=notes)


def _find_share(method: Method) -> Estimate | None:
    return method.seconds.map(lambda seconds: seconds / method.step_seconds) if method.seconds else None


def measure_ablation(arm: Arm) -> Estimate | None:
    """By ablation; None on one rank, or where no step left the exchange out."""
    if arm.trial.num_ranks == 1 or not any(len(steps) for steps in arm.comm_free):
        return None
    return communication_by_ablation(arm.clean, arm.comm_free).seconds


def compare_ways(answer: ScalingAnswer, arm: Arm) -> Iterator[str]:
    """How far phases and counters are from ablation, and what the difference is."""
    ways = {method.name: method.seconds for method in list_methods(answer, arm)}
    ablation, phases, counted = ways["ablation"], ways["phases"], ways["DDP counters"]
    if phases is None:
        return
    clocks = f"{format_quantity('seconds', phases)} by phases"
    if counted is not None:
        clocks += f", {format_quantity('seconds', counted)} by DDP's counters"
    if ablation is None:
        yield f"Communication after backward: {clocks}."
    elif do_overlap(ablation, phases):
        yield f"Seen from the clocks it is {clocks}: no contradiction to ablation."
    elif ablation.value > phases.value:
        yield (
            f"Seen from the clocks it is {clocks}: less than by ablation, which also saves waiting and what the"
            " exchange takes from backward while they overlap."
        )
    else:
        yield (
            f"Seen from the clocks it is {clocks}: more than by ablation, so that a step without exchange loses"
            " elsewhere a part of what it saves, as ranks do that then compute at the same time."
        )


def compare_trace(arm: Arm, ablation: Estimate | None) -> Iterator[str]:
    """Whether the trace agrees with ablation and with DDP's counters, and what lies between them."""
    traced = estimate_traced_exposed(arm)
    others = {"ablation": ablation, "DDP's counters": estimate_counted(arm)}
    known = {name: seconds for name, seconds in others.items() if seconds is not None}
    if traced is None or not known:
        return
    verdicts = {name: _judge_trace(traced, seconds) for name, seconds in known.items()}
    said = [f"{name} {format_quantity('seconds', known[name])}, {verdict}" for name, verdict in verdicts.items()]
    words = f"Against that exposed communication of the trace: {'; '.join(said)}"
    if "the trace has more" in verdicts.values():
        words += ". The profiler slows down what runs between collectives, and gaps in it are not computing"
    elif "the trace has less" in verdicts.values():
        words += ". What the exchange takes from backward while they overlap is not in a trace"
    yield f"{words}."


def _judge_trace(traced: Estimate, other: Estimate) -> str:
    if do_overlap(traced, other):
        return "no contradiction"
    return "the trace has less" if traced.value < other.value else "the trace has more"


def do_overlap(left: Estimate, right: Estimate) -> bool:
    """Whether two intervals share a number; unknown ends share any."""
    if left.low is None or left.high is None or right.low is None or right.high is None:
        return True
    return left.low <= right.high and right.low <= left.high

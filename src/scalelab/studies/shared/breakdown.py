"""Where the time of every rank goes, as a table: the parts of `analysis/breakdown.py` for the rows of a study.

The rows of charts of a step in parts: of every rank where they are known, of every configuration by phase.

What part of a step a phase takes, from the steps whose phases were timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from scalelab.analysis.breakdown import LARGEST_REST, PARTS, LaunchSteps, RankBreakdown, break_down, tabulate_steps
from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_location
from scalelab.records.trial import PHASES, StepKind, Trial, TrialResult
from scalelab.report.charts.curves import plot_parts
from scalelab.report.document import Cell, Chart, Column, Table, make_cell, make_row
from scalelab.report.findings import Caution
from scalelab.strategies.catalogue import SHARDED
from scalelab.studies.shared.arms import Arm, count_rest, describe_failures, describe_status, join_words
from scalelab.studies.shared.sweep import INTERVAL_NOTE
from scalelab.units import format_share

HEADERS = {"exposed": "exposed comm"}
"""Parts whose name alone would not do."""


def waits_for_buffers(result: TrialResult) -> bool:
    """Whether ranks get rank 0's buffers before every forward, and the model has some."""
    trial = result.trial
    if trial.strategy != "ddp" or trial.num_ranks == 1 or not trial.spreading.broadcast_buffers or spans_hosts(result):
        return False
    return any(report.buffer_bytes for report in result.ranks)


def spans_hosts(result: TrialResult) -> bool:
    """Whether its ranks ran on several hosts, whose clocks cannot be compared."""
    return len({report.host for report in result.ranks if report.host}) > 1


def tabulate_launches(arm: Arm) -> list[LaunchSteps | None]:
    """The phase-timed steps of every completed launch."""
    return [
        tabulate_steps(result.samples, result.trial.num_processes, waits_for_buffers=waits_for_buffers(result))
        for result in arm.completed
    ]


def break_arm(arm: Arm) -> list[RankBreakdown] | None:
    """Every rank's step in parts; None where they cannot be told apart (`explain_missing` says why)."""
    if not arm.is_measured or explain_arm(arm):
        return None
    return break_down(tabulate_launches(arm), [_read_clean(arm, result) for result in arm.completed])


def _read_clean(arm: Arm, result: TrialResult) -> list[list[float]]:
    """Each rank's clean steps of one launch, after the warm-up."""
    steps: list[list[float]] = [[] for _ in range(result.trial.num_processes)]
    for sample in result.samples:
        if sample.kind is StepKind.CLEAN:
            steps[sample.rank].append(sample.step_seconds)
    return [times[arm.num_dropped :] for times in steps]


def explain_strategy(trial: Trial) -> str:
    """Why a strategy's steps have no parts; empty: they have."""
    if trial.strategy in SHARDED:
        return (
            f"{trial.strategy} exchanges in forward and in backward: no moment is known from which on a rank only waits"
        )
    if trial.strategy == "dp":
        return "dp is one process: its replicas are not timed one by one"
    return ""


def explain_arm(arm: Arm) -> str:
    """Why a row's steps have no parts, whatever was timed; empty: they have."""
    if any(spans_hosts(result) for result in arm.completed):
        return "its ranks are on several hosts, whose clocks cannot be compared"
    if arm.trial.accumulation > 1 and any(waits_for_buffers(result) for result in arm.completed):
        return "its buffers are sent in the first of several passes, and passes are not timed one by one"
    return explain_strategy(arm.trial)


def explain_missing(arm: Arm) -> str:
    """Why a row has no parts."""
    return explain_arm(arm) or "it has no parts: its phases or its last gradients were not timed"


def make_breakdown_table(arm: Arm, *, title: str = "") -> Table:
    """One row per rank; every part is – where they cannot be told apart, with the reason below."""
    columns = (
        Column(key="rank", header="rank", align="left"),
        Column(key="step_seconds", header="step", quantity="seconds"),
        *(Column(key=f"{part}_seconds", header=HEADERS.get(part, part), quantity="seconds") for part in PARTS),
        Column(key="rest_seconds", header="rest", quantity="seconds"),
        Column(key="rest_share", header="of the step", quantity="share"),
    )
    found = break_arm(arm)
    if found is None:
        rows = tuple(
            (make_cell(f"rank {rank}"), *(Cell() for _ in columns[1:])) for rank in range(arm.trial.num_processes)
        )
        return Table(title=title, columns=columns, rows=rows, notes=(explain_missing(arm),))
    rows = tuple(
        make_row(
            f"rank {parts.rank}",
            parts.step,
            *(parts.parts.get(part) for part in PARTS),
            parts.rest,
            parts.rest_share,
        )
        for parts in found
    )
    notes = (
        INTERVAL_NOTE,
        "step = input + compute + exposed comm + waiting + stalled + rest",
        "waiting: for the last rank's gradients; exposed comm: the exchange after that, with nothing to compute",
        "stalled: its core was given to other programs; rest: what phase-timed steps do not explain of clean ones",
    )
    return Table(title=title, columns=columns, rows=rows, notes=notes)


def warn_of_rest(arm: Arm) -> Iterator[Caution]:
    """Parts that do not add up to the step explain less than they seem to."""
    unexplained = [parts for parts in break_arm(arm) or () if not parts.is_explained]
    if unexplained:
        worst = max(unexplained, key=lambda parts: abs(parts.rest_share))
        yield Caution(
            message=f"{arm.label}: the parts of a step leave {format_share(worst.rest_share)} of it unexplained on rank"
            f" {worst.rank}, more than {format_share(LARGEST_REST)}",
            next_step="close other programs, or raise --phase-steps and --rounds",
        )


ORDER = ("compute", "exposed", "waiting", "input", "stalled")
assert set(ORDER) == set(PARTS)
MOST_RANKS = 16
MOST_BARS = 24
SLIVER = 0.002
"""A part that is shorter than this part of the longest is less than a pixel."""


def plot_rank_parts(arm: Arm) -> Chart | None:
    """Every rank's step; None where its parts cannot be told apart."""
    found = break_arm(arm)
    if not found:
        return None
    rows: list[dict[str, Any]] = []
    for parts in found[:MOST_RANKS]:
        place = {"bar": f"rank {parts.rank}", "key": arm.label}
        rows += [
            place | {"series": HEADERS.get(part, part), "seconds": parts.parts[part]}
            for part in ORDER
            if part in parts.parts
        ]
        rows.append(place | {"series": "rest", "seconds": parts.rest})
    drawn, slivers = drop_slivers(rows)
    said = ["The parts of a clean step; a rest below zero reaches to the left."]
    if len(found) > MOST_RANKS:
        said.append(count_rest(len(found) - MOST_RANKS, "rank", "in the table only"))
    return plot_parts(
        title=f"A step of {arm.label}, rank by rank",
        rows=drawn,
        name="",
        caption=join_words(*said, slivers, "Intervals are in the table."),
    )


def drop_slivers(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Without parts that no bar would show, and a sentence that names them."""
    longest: dict[str, float] = {}
    for row in rows:
        longest[row["series"]] = max(longest.get(row["series"], 0.0), abs(row["seconds"].value))
    slivers = [name for name, seconds in longest.items() if seconds < SLIVER * max(longest.values())]
    words = f"Too short to be drawn: {', '.join(slivers)}." if slivers else ""
    return [row for row in rows if row["series"] not in slivers], words


def plot_phases(arms: Iterable[Arm]) -> Chart | None:
    """The phases of every configuration whose steps were timed phase by phase; None where none was."""
    known = list(arms)
    timed = [arm for arm in known if arm.is_measured and arm.phase("forward") is not None]
    if not timed:
        return None
    rows = [
        {"bar": arm.label, "series": phase, "seconds": found, "key": arm.label}
        for arm in timed[:MOST_BARS]
        for phase in PHASES
        if (found := arm.phase(phase)) is not None
    ]
    failed = [
        {"bar": arm.label, "status": describe_status(arm), "key": arm.label} for arm in known if not arm.is_measured
    ]
    said = ["Medians of steps that were timed phase by phase; backward holds the gradient exchange."]
    if len(timed) > MOST_BARS:
        said.append(count_rest(len(timed) - MOST_BARS, "configuration", "not drawn"))
    drawn, slivers = drop_slivers(rows)
    said += [slivers, *describe_failures((row["bar"], row["status"]) for row in failed)]
    return plot_parts(title="Phases of a step", rows=drawn, name="", caption=join_words(*said), failed=failed)


def estimate_phase_share(arm: Arm, phase: str) -> Estimate | None:
    """The phase's seconds over those of all phases, launch by launch; None where none were timed."""
    shares = [share for result in arm.completed if (share := read_phase_share(result, phase)) is not None]
    return estimate_location(shares) if shares else None


def read_phase_share(result: TrialResult, phase: str) -> float | None:
    """The same of one launch, over all its timed steps and ranks."""
    totals = dict.fromkeys(PHASES, 0.0)
    for sample in result.samples:
        if sample.kind is StepKind.PHASES:
            for name in PHASES:
                totals[name] += getattr(sample, f"{name}_seconds") or 0.0
    whole = sum(totals.values())
    return totals[phase] / whole if whole else None

"""Where the time of every rank goes, as a table: the parts of `analysis/breakdown.py` for the rows of a study."""

from __future__ import annotations

from collections.abc import Iterator

from scalelab.analysis.breakdown import LARGEST_REST, PARTS, LaunchSteps, RankBreakdown, break_down, tabulate_steps
from scalelab.report.document import Caution, Cell, Column, Table, make_cell, make_row
from scalelab.strategies.catalogue import FSDP
from scalelab.studies.arms import Arm
from scalelab.studies.sweep import INTERVAL_NOTE
from scalelab.trial import StepKind, Trial, TrialResult
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
    if trial.strategy in FSDP and trial.strategy != "fsdp-none":
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

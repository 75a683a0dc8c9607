"""The rows of charts of a step in parts: of every rank where they are known, of every configuration by phase."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from scalelab.analysis.breakdown import PARTS
from scalelab.report.charts.breakdown import plot_parts
from scalelab.report.document import Chart
from scalelab.studies.arms import Arm
from scalelab.studies.breakdown_table import HEADERS, break_arm
from scalelab.studies.status import count_rest, describe_failures, find_status, join_words
from scalelab.trial import PHASES

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
    failed = [{"bar": arm.label, "status": find_status(arm), "key": arm.label} for arm in known if not arm.is_measured]
    said = ["Medians of steps that were timed phase by phase; backward holds the gradient exchange."]
    if len(timed) > MOST_BARS:
        said.append(count_rest(len(timed) - MOST_BARS, "configuration", "not drawn"))
    drawn, slivers = drop_slivers(rows)
    said += [slivers, *describe_failures((row["bar"], row["status"]) for row in failed)]
    return plot_parts(title="Phases of a step", rows=drawn, name="", caption=join_words(*said), failed=failed)

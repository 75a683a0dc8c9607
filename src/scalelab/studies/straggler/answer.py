"""What the measured times of a row say about its ranks: which is slow, in which phase, by how much, who waits.

Everything here comes from samples. What a trial was told to delay is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from scalelab.analysis.breakdown import LaunchSteps, RankBreakdown
from scalelab.analysis.estimate import Estimate
from scalelab.analysis.straggler import SMALLEST_EXCESS, Excess, find_excesses, find_slow_ranks
from scalelab.records.trial import PHASES
from scalelab.report.document import Column, Table, make_row
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.breakdown import break_arm, tabulate_launches
from scalelab.studies.shared.sweep import INTERVAL_NOTE
from scalelab.units import format_quantity, format_share

MOST_NAMED = 3
"""How many slow ranks are named after the slowest; the others are counted."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The ranks of one row, compared with each other."""

    arm: Arm

    @cached_property
    def launches(self) -> list[LaunchSteps]:
        return [launch for launch in tabulate_launches(self.arm) if launch is not None]

    @cached_property
    def excesses(self) -> list[Excess]:
        """Every rank in every phase, the largest excess first; nothing where nothing can be compared."""
        launches = self.launches
        return find_excesses(launches) if self.arm.is_measured else []

    @cached_property
    def slow(self) -> list[Excess]:
        return find_slow_ranks(self.excesses)

    @property
    def main(self) -> Excess | None:
        """The largest that is certain."""
        return self.slow[0] if self.slow else None

    @cached_property
    def breakdown(self) -> list[RankBreakdown]:
        """Every rank's step in parts; nothing where they cannot be told apart."""
        return break_arm(self.arm) or []

    @property
    def longest_waiting(self) -> RankBreakdown | None:
        """The rank that waits most for others."""
        return max(self.breakdown, key=lambda parts: parts.parts["waiting"].value, default=None)

    @property
    def missing_phases(self) -> bool:
        """Whether forward and backward could not be looked at."""
        return bool(self.excesses) and not any(excess.phase == "backward" for excess in self.excesses)


def name_slow_rank(diagnosis: Diagnosis) -> Iterator[str]:
    """The main finding: who is slow, where, by how much; or that nobody is; or that it cannot be told."""
    excesses, main = diagnosis.excesses, diagnosis.main
    if not excesses:
        return
    if main is not None:
        yield (
            f"Rank {main.rank} is slow in {main.phase}: {format_quantity('seconds', main.seconds)} a step longer than"
            f" rank {main.other}, {format_share(main.share.value)} of the step."
        )
        yield from _name_others(diagnosis.slow[1:])
        return
    largest = max(excesses, key=lambda excess: excess.share.high or excess.share.value)
    who = f"rank {largest.rank} in {largest.phase}, {format_quantity('seconds', largest.seconds)} a step"
    if largest.share.high is None or largest.share.high >= SMALLEST_EXCESS:
        yield (
            f"Whether a rank is slow is unresolved: {who} ({format_quantity('share', largest.share)} of it) may reach"
            f" {format_share(SMALLEST_EXCESS)}, or may be nothing."
        )
    else:
        where = " in input or optimizer, all that could be compared" if diagnosis.missing_phases else ""
        yield (
            f"No rank is slow{where}: the largest excess is that of {who}, {format_share(largest.share.value)} of it"
            f" and surely below {format_share(SMALLEST_EXCESS)}."
        )


def _name_others(slow: list[Excess]) -> Iterator[str]:
    if not slow:
        return
    named = [
        f"rank {excess.rank} in {excess.phase}, {format_quantity('seconds', excess.seconds)} longer than rank"
        f" {excess.other}"
        for excess in slow[:MOST_NAMED]
    ]
    more = f", and {len(slow) - MOST_NAMED} more" if len(slow) > MOST_NAMED else ""
    yield f"Slow as well: {'; '.join(named)}{more}."


def name_waiting(diagnosis: Diagnosis) -> Iterator[str]:
    """What the slow rank costs the others: they wait for it."""
    waits = [
        f"rank {parts.rank} {format_quantity('seconds', parts.parts['waiting'])}"
        f" ({format_share(parts.share('waiting').value)} of its step)"
        for parts in diagnosis.breakdown
    ]
    if len(waits) > 1:
        yield f"Waiting for others in every step: {', '.join(waits)}."


def make_own_time_table(diagnosis: Diagnosis, *, title: str = "") -> Table:
    """Each rank's own time in each phase, and its excess over the rank that it is compared with."""
    columns = (
        Column(key="phase", header="phase", align="left"),
        Column(key="rank", header="rank", align="left"),
        Column(key="own_seconds", header="own time", quantity="seconds"),
        Column(key="other", header="against", align="left"),
        Column(key="excess_seconds", header="excess", quantity="seconds"),
        Column(key="excess_share", header="of the step", quantity="share"),
        Column(key="is_slow", header="slow", align="left"),
    )
    rows = tuple(
        make_row(
            excess.phase,
            f"rank {excess.rank}",
            _centre_own([launch.own[excess.phase][:, excess.rank] for launch in diagnosis.launches]),
            f"rank {excess.other}",
            excess.seconds,
            excess.share,
            "slow" if excess.is_alarm else "no",
        )
        for excess in sorted(diagnosis.excesses, key=lambda excess: (PHASES.index(excess.phase), excess.rank))
    )
    notes = (
        INTERVAL_NOTE,
        "own time: the median, without waiting for others and without the time in which other programs had the core",
        f"slow: the interval of the excess excludes zero, and it is at least {format_share(SMALLEST_EXCESS)} of the"
        " step without stalls: the slowest rank's own time and the exposed exchange",
    )
    return Table(title=title, columns=columns, rows=rows, notes=notes)


def _centre_own(launches: list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]]) -> Estimate:
    return Estimate(value=float(np.median(np.concatenate(launches))))

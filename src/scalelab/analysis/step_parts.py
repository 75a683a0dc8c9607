"""Where a rank's step goes (step = input + compute + exposed communication + waiting + stalled + rest); slow ranks.

From phase-timed steps, and the moment at which every rank had computed its last gradient. Ranks of a host share a
clock, so moments can be compared. For rank r and one step:

    backward compute   ready_r − input_r − forward_r, up to the last gradient
    gap                the rest of backward: the rank only waits, for others or for messages
    waiting            of the gap, until the last rank has its gradients: min(gap_r, max_q ready_q − ready_r)
    exposed            the rest of the gap: the gradient all-reduce runs and nothing is computed
    compute            forward, backward compute and optimizer
    stalled            of input and compute, while the kernel had given the rank's core to other programs

Waiting is Scalasca's "wait at N × N": an all-to-all operation cannot end before the last rank arrives (Geimer et al.
2010, "The Scalasca performance toolset architecture"). If DDP broadcasts buffers from rank 0 before forward, the others
wait there too: max(0, enter_0 − enter_r), with the moments at which forward was entered.

The parts add up to a phase-timed step exactly. Each launch gives their means over the middle half of its steps by
length: means add up, and the middle half has no outliers. The rest is the difference to the clean step, which carries
no instrument: extra clock readings, and how blocks of steps differ.

A slow rank is found from each rank's own time in a phase, without waiting and stalls: otherwise a slow rank would make
all others look slow in the phase in which they wait for it.

    other          the rank to compare with: of all other ranks, the lower median by own time; so two slow ranks of
                   four, or of three, are both found. Of two ranks it is the other one
    excess         lower quartile of the rank's own times in a launch, minus that of the other
    over rounds    their Hodges–Lehmann centre with its interval (`stats.py`)

The lower quartile is used because disturbances only make steps longer: a delay in every step moves the quartile like
the median, and a shared machine moves it far less. A rank that is late in fewer than three of four steps is therefore
not called slow; its lateness shows as waiting of the others. A rank is slow if the interval excludes zero and the
excess is at least `SMALLEST_EXCESS` of the step without stalls (`find_quiet_step`).

Limits: hosts whose clocks differ cannot be compared. In a model with buffers, a rank 0 that is late inside forward
looks as if all were. A strategy that communicates in forward, such as FSDP, has no moment after which it only waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import (
    FEWEST_STEPS,
    Floats,
    estimate_location,
    estimate_median,
    estimate_over_rounds,
    find_median,
)
from scalelab.records.trial import PHASES, StepKind, StepSample

PARTS = ("input", "compute", "exposed", "waiting", "stalled")
"""What a step is made of, besides the rest."""

LARGEST_REST = 0.05
"""A rest above this share of the step means that the parts do not explain it."""

_TIMES = ("input", "forward", "backward", "optimizer", "ready")
_STALLS = ("input_stall", "forward_stall", "ready_stall", "optimizer_stall")


@dataclass(frozen=True, kw_only=True)
class LaunchSteps:
    """The phase-timed steps of one launch: arrays with a row per step and a column per rank."""

    start: Floats
    step: Floats
    times: Mapping[str, Floats]
    """input, forward, backward, optimizer and ready; NaN where it was not timed."""
    stalls: Mapping[str, Floats] | None
    """The same without backward; None if not counted."""
    waits_for_buffers: bool = False
    """Whether ranks get rank 0's buffers before every forward."""

    @property
    def is_ready_known(self) -> bool:
        return bool(np.isfinite(self.times["ready"]).all())

    @cached_property
    def buffer_waiting(self) -> Floats:
        """How long each rank waits in forward for rank 0's buffers."""
        if not self.waits_for_buffers:
            return np.zeros_like(self.start)
        enter = self.start + self.times["input"]
        return np.clip(enter[:, :1] - enter, 0.0, self.times["forward"])

    @cached_property
    def own(self) -> dict[str, Floats]:
        """What each phase takes a rank of itself: without waiting for others, and without stalls where they are known.

        Without the moment of the last gradient, forward and backward may contain waiting and are left out.
        """
        times, stalls = self.times, self.stalls
        found = {"input": times["input"], "optimizer": times["optimizer"]}
        if self.is_ready_known:
            found["forward"] = times["forward"] - self.buffer_waiting
            found["backward"] = times["ready"] - times["input"] - times["forward"]
        if stalls is not None:
            taken = {name: stalls[f"{name}_stall"] for name in ("input", "forward", "optimizer")}
            taken["backward"] = stalls["ready_stall"] - taken["input"] - taken["forward"]
            found = {name: np.maximum(seconds - taken[name], 0.0) for name, seconds in found.items()}
        return found

    @cached_property
    def parts(self) -> dict[str, Floats] | None:
        """Every part of every step on every rank; None if the last gradient was not timed."""
        if not self.is_ready_known:
            return None
        times, own = self.times, self.own
        gap = np.maximum(times["backward"] - (times["ready"] - times["input"] - times["forward"]), 0.0)
        ready = self.start + times["ready"]
        waiting = np.minimum(gap, ready.max(axis=1, keepdims=True) - ready)
        compute = own["forward"] + own["backward"] + own["optimizer"]
        in_gap = gap + self.buffer_waiting
        return {
            "input": own["input"],
            "compute": compute,
            "exposed": gap - waiting,
            "waiting": waiting + self.buffer_waiting,
            "stalled": self.step - own["input"] - compute - in_gap,
        }

    @cached_property
    def middle(self) -> list[int]:
        """The numbers of the steps of the middle half, by the time of their slowest rank."""
        order = np.argsort(self.step.max(axis=1)).tolist()
        cut = len(order) // 4
        return [int(number) for number in order[cut : len(order) - cut]]


_FIRST = StepSample._fields.index("start_seconds")
_PLACES = {name: place for place, name in enumerate(StepSample._fields[_FIRST:])}


def tabulate_steps(samples: Iterable[StepSample], num_ranks: int, *, waits_for_buffers: bool) -> LaunchSteps | None:
    """The phase-timed steps that every rank completed; None without one."""
    by_step: dict[int, dict[int, StepSample]] = {}
    for sample in samples:
        if sample.kind is StepKind.PHASES and sample.optimizer_seconds is not None:
            by_step.setdefault(sample.step, {})[sample.rank] = sample
    complete = [found for _, found in sorted(by_step.items()) if len(found) == num_ranks]
    if not complete:
        return None

    by_rank = [found[rank] for found in complete for rank in range(num_ranks)]
    numbers = np.array([sample[_FIRST:] for sample in by_rank], dtype=np.float64)

    def read(name: str) -> Floats:
        return numbers[:, _PLACES[f"{name}_seconds"]].reshape(-1, num_ranks)

    stalls = {name: read(name) for name in _STALLS}
    are_counted = all(np.isfinite(values).all() for values in stalls.values())
    return LaunchSteps(
        start=read("start"),
        step=read("step"),
        times={name: read(name) for name in _TIMES},
        stalls=stalls if are_counted else None,
        waits_for_buffers=waits_for_buffers,
    )


@dataclass(frozen=True, kw_only=True)
class RankBreakdown:
    """The parts of one rank's step, in seconds, over all rounds."""

    rank: int
    step: Estimate
    """Its clean step."""
    parts: Mapping[str, Estimate]
    """By name; without `stalled` where the kernel does not count it."""
    rest: Estimate
    """What is left of the clean step."""

    @property
    def rest_share(self) -> float:
        return self.rest.value / self.step.value

    @property
    def is_explained(self) -> bool:
        return abs(self.rest_share) <= LARGEST_REST

    def share(self, part: str) -> Estimate:
        """A part over the step; the step's own uncertainty is left out."""
        return self.parts[part].map(lambda seconds: seconds / self.step.value)


def break_down(
    launches: Sequence[LaunchSteps | None], clean: Sequence[Sequence[Sequence[float]]]
) -> list[RankBreakdown] | None:
    """Every rank's step in parts. `clean` holds each rank's clean steps by launch: `clean[launch][rank]`.

    None if the last gradient was not timed, or nothing was.
    """
    pairs = [
        (launch, steps) for launch, steps in zip(launches, clean, strict=True) if launch is not None and all(steps)
    ]
    if not pairs or any(launch.parts is None for launch, _ in pairs):
        return None
    return [_break_down_rank(rank, pairs) for rank in range(pairs[0][0].start.shape[1])]


def _break_down_rank(rank: int, pairs: Sequence[tuple[LaunchSteps, Sequence[Sequence[float]]]]) -> RankBreakdown:
    are_stalls_known = all(launch.stalls is not None for launch, _ in pairs)
    names = [name for name in PARTS if name != "stalled" or are_stalls_known]
    means = {name: np.array([_average_middle(launch, name, rank) for launch, _ in pairs]) for name in names}
    steps = np.array([find_median(clean[rank]) for _, clean in pairs])
    parts = {name: _centre(values) for name, values in means.items()}
    step = _centre(steps)
    left = steps - np.sum(list(means.values()), axis=0)
    rest = estimate_over_rounds(step.value - sum(part.value for part in parts.values()), left)
    return RankBreakdown(rank=rank, step=step, parts=parts, rest=rest)


def _average_middle(launch: LaunchSteps, part: str, rank: int) -> float:
    assert launch.parts is not None
    return float(launch.parts[part][launch.middle, rank].mean())


def _centre(values: Floats) -> Estimate:
    """The median over launches, with the arms of their centre."""
    return estimate_over_rounds(float(np.median(values)), values)


SMALLEST_EXCESS = 0.03
"""A smaller share of the step is what two cores of one machine may differ by."""

QUARTILE = 0.25


@dataclass(frozen=True, kw_only=True)
class Excess:
    """By how much one rank's own time in a phase is longer than another's."""

    rank: int
    other: int
    """The rank that it is compared with."""
    phase: str
    seconds: Estimate
    share: Estimate
    """Of the step without stalls."""

    @property
    def is_alarm(self) -> bool:
        return self.seconds.is_above(0) and self.share.value >= SMALLEST_EXCESS


def find_quiet_step(launches: Sequence[LaunchSteps]) -> float:
    """The step without stalls: the slowest rank's own time, and the exposed communication after it.

    The lower quartile of a launch, the median over launches. Without the moment of the last gradient it is the step.
    """
    quiet = []
    for launch in launches:
        steps = launch.step.max(axis=1)
        if launch.parts is not None:
            own = launch.parts["input"] + launch.parts["compute"]
            steps = own.max(axis=1) + launch.parts["exposed"].min(axis=1)
        quiet.append(np.quantile(steps, QUARTILE))
    return float(np.median(quiet))


def find_excesses(launches: Sequence[LaunchSteps]) -> list[Excess]:
    """Every rank in every phase whose own time is known, the largest excess first; nothing for one rank."""
    if not launches or launches[0].start.shape[1] < 2:
        return []
    step_seconds = find_quiet_step(launches)
    phases = [phase for phase in PHASES if all(phase in launch.own for launch in launches)]
    found = [
        _compare(launches, phase, rank, step_seconds) for phase in phases for rank in range(launches[0].start.shape[1])
    ]
    return sorted(found, key=lambda excess: -excess.seconds.value)


def find_slow(excesses: Sequence[Excess]) -> list[Excess]:
    """The excesses that are certain and large enough, the largest first."""
    return [excess for excess in excesses if excess.is_alarm]


def _compare(launches: Sequence[LaunchSteps], phase: str, rank: int, step_seconds: float) -> Excess:
    own = [launch.own[phase] for launch in launches]
    levels = np.array([np.quantile(times, QUARTILE, axis=0) for times in own])
    other = _choose_other(np.median(levels, axis=0), rank)
    seconds = _estimate_excess(own, levels, rank, other)
    return Excess(
        rank=rank,
        other=other,
        phase=phase,
        seconds=seconds,
        share=seconds.map(lambda value: value / step_seconds),
    )


def _choose_other(levels: Floats, rank: int) -> int:
    """The lower median of the other ranks."""
    others = sorted((float(level), number) for number, level in enumerate(levels) if number != rank)
    return others[(len(others) - 1) // 2][1]


def _estimate_excess(own: Sequence[Floats], levels: Floats, rank: int, other: int) -> Estimate:
    """Over rounds; of a single launch, from how its steps differ one by one, which cannot see how launches differ."""
    if len(own) > 1:
        return estimate_location(levels[:, rank] - levels[:, other])
    differences = own[0][:, rank] - own[0][:, other]
    value = float(levels[0, rank] - levels[0, other])
    if len(differences) < FEWEST_STEPS:
        return Estimate(value=value)
    middle = estimate_median([list(differences)])
    return middle.map(lambda end: end - middle.value + value)

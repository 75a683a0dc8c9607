"""How busy every device of a configuration was, what it held, and whether strategies train the same thing.

A device is a GPU, or on CPU the cores of a rank, or of a replica of emulated `dp`. Memory of a rank on CPU is the
growth of its resident set since before the workload was built; that of a replica of emulated `dp` is the sum of its
tensors, because replicas share one process. On GPUs both are the most that torch allocated.

Strategies take the same batches from the same weights, so losses are equal up to the order of summation. Steps are
matched by their place in the training: other kinds of steps may run between them. After steps without communication
the batches differ, and nothing is compared from there on.

A device was busy over time with a mean, a spread, idle stretches, and tenths of the time. Every number weighs an
interval by its length. Launches, not intervals, are what a confidence interval counts, as with step times: intervals of
one launch resemble each other.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_location, estimate_over_rounds
from scalelab.records.observations import DeviceLoad
from scalelab.records.settings import find_kind
from scalelab.records.strategies import find_strategy
from scalelab.records.trial import StepKind, TrialResult
from scalelab.studies.shared.arms import Arm

IDLE = 0.1
"""An interval in which a device was busy for less than this share of it counts as idle."""
NUM_SLICES = 10


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What was seen of one device in one launch, and the stretch of time that counts."""

    loads: Sequence[DeviceLoad]
    start_seconds: float
    end_seconds: float

    @property
    def counted(self) -> list[DeviceLoad]:
        """The intervals that lie wholly within the stretch."""
        return [
            load
            for load in self.loads
            if load.seconds - load.interval_seconds >= self.start_seconds and load.seconds <= self.end_seconds
        ]


@dataclass(frozen=True, kw_only=True)
class Utilization:
    """One device over all launches."""

    busy: Estimate
    """The mean over time."""
    low: float
    """The 5th percentile of the intervals."""
    high: float
    """The 95th."""
    idle: Estimate
    """The share of time in intervals in which it hardly did anything."""
    slices: tuple[float | None, ...]
    """The mean of every tenth of the time, over launches; None if no interval fell into it."""


def describe_utilization(launches: Sequence[Launch]) -> Utilization | None:
    """One device; None if no interval counts, as in a launch that is shorter than two looks."""
    counted = [launch.counted for launch in launches]
    every = [load for loads in counted for load in loads]
    if not every:
        return None
    low, high = np.quantile([load.busy for load in every], [0.05, 0.95])
    return Utilization(
        busy=_estimate_share(_weigh_busy(every), [_weigh_busy(loads) for loads in counted if loads]),
        low=float(low),
        high=float(high),
        idle=_estimate_share(_weigh_idle(every), [_weigh_idle(loads) for loads in counted if loads]),
        slices=slice_time(launches),
    )


def slice_time(launches: Sequence[Launch]) -> tuple[float | None, ...]:
    """The mean of each of so many equal parts of the time; an interval counts where its middle lies."""
    parts: list[list[DeviceLoad]] = [[] for _ in range(NUM_SLICES)]
    for launch in launches:
        length = launch.end_seconds - launch.start_seconds
        for load in launch.counted:
            middle = load.seconds - load.interval_seconds / 2 - launch.start_seconds
            parts[min(NUM_SLICES - 1, int(NUM_SLICES * middle / length))].append(load)
    return tuple(_weigh_busy(part) if part else None for part in parts)


def _estimate_share(value: float, per_launch: Sequence[float]) -> Estimate:
    """The interval of a share ends at 0 and at 1."""
    return estimate_over_rounds(value, per_launch).map(lambda end: min(1.0, max(0.0, end)))


def _weigh_busy(loads: Sequence[DeviceLoad]) -> float:
    return float(np.average([load.busy for load in loads], weights=[load.interval_seconds for load in loads]))


def _weigh_idle(loads: Sequence[DeviceLoad]) -> float:
    weights = [load.interval_seconds for load in loads]
    return float(np.average([load.busy < IDLE for load in loads], weights=weights))


OTHERS = "other programs"
TOGETHER = "all replicas"


@dataclass(frozen=True, kw_only=True)
class DeviceSummary:
    """One device of one configuration, over all rounds."""

    name: str
    utilization: Utilization | None
    """None: it was not observed, or not for long enough."""
    memory: Estimate | None


def list_devices(arm: Arm) -> list[DeviceSummary]:
    """In the order of their numbers; the process that all replicas of an emulated dp share comes last."""
    trial = arm.trial
    kind = "gpu" if find_kind(trial.device).is_accelerator else "replica" if trial.is_emulated else "rank"
    memories = [memory for memory in map(read_memory, arm.completed) if memory]
    devices = [
        DeviceSummary(
            name=f"{kind} {number}",
            utilization=describe_utilization(list_launches(arm, f"{kind} {number}")),
            memory=estimate_location([memory[number] for memory in memories]) if memories else None,
        )
        for number in range(trial.num_ranks)
    ]
    if trial.is_emulated:
        together = describe_utilization(list_launches(arm, TOGETHER))
        devices.append(DeviceSummary(name=TOGETHER, utilization=together, memory=None))
    return devices


def read_memory(result: TrialResult) -> list[float]:
    """What each device held in one round; empty unless that is known of every one."""
    trial = result.trial
    if "replicas" in find_strategy(trial.strategy).instruments:
        found: list[float] = list(map(float, result.ranks[0].replica_bytes)) if result.ranks else []
    else:
        starts = [0 if find_kind(trial.device).is_accelerator else rank.start_memory_bytes for rank in result.ranks]
        pairs = zip((rank.peak_memory_bytes for rank in result.ranks), starts, strict=True)
        found = [float(peak - start) for peak, start in pairs if peak is not None and start is not None]
    return found if len(found) == trial.num_ranks else []


def find_excess(arm: Arm) -> Estimate | None:
    """By how much device 0 holds more than the mean of the others, round by round; None with one device."""
    memories = [memory for memory in map(read_memory, arm.completed) if len(memory) > 1]
    if not memories:
        return None
    return estimate_location([memory[0] - statistics.fmean(memory[1:]) for memory in memories])


def list_launches(arm: Arm, device: str) -> list[Launch]:
    """What was observed of a device, from the first clean step that counts to the last."""
    launches = []
    for result in arm.completed:
        clean = [s for s in result.samples if s.kind is StepKind.CLEAN]
        counted = sorted({sample.step for sample in clean})[arm.num_dropped :]
        within = [sample for sample in clean if counted and sample.step >= counted[0]]
        # A rank's own steps, where it has some: ranks of other nodes have other clocks.
        within = [sample for sample in within if device in (f"rank {sample.rank}", f"gpu {sample.rank}")] or within
        if within:
            launches.append(
                Launch(
                    loads=[load for load in result.loads if load.device == device],
                    start_seconds=min(sample.start_seconds for sample in within),
                    end_seconds=max(sample.start_seconds + sample.step_seconds for sample in within),
                )
            )
    return launches


SAME = 1e-3
SAME_IN_16_BITS = 5e-2
"""Relative differences that another order of summation gives after some dozen steps."""


@dataclass(frozen=True, kw_only=True)
class LossPath:
    """The losses of one configuration that can be compared, in the order of the training."""

    losses: tuple[float, ...]

    def find_difference(self, reference: LossPath) -> float | None:
        """The largest difference of a step, relative to the reference; None if there is no common finite one."""
        pairs = zip(self.losses, reference.losses, strict=False)
        known = [(ours, theirs) for ours, theirs in pairs if math.isfinite(ours) and math.isfinite(theirs)]
        return max((abs(ours - theirs) / (abs(theirs) or 1.0) for ours, theirs in known), default=None)


def read_loss_path(arm: Arm) -> LossPath:
    """Of the first round that completed: rounds that differ are a warning of their own."""
    return LossPath(losses=tuple(_list_losses(arm.completed[0])) if arm.completed else ())


def _list_losses(result: TrialResult) -> list[float]:
    first = min((sample.step for sample in result.samples if sample.kind is StepKind.COMM_FREE), default=math.inf)
    return [loss for _, loss in takewhile(lambda entry: entry[0] < first, result.losses().items())]


def find_loss_difference(arms: Sequence[Arm], reference: Arm) -> tuple[float, str] | None:
    """The largest difference of any step of any other configuration, and whose it is; None if none is known."""
    base = read_loss_path(reference)
    found = [(read_loss_path(arm).find_difference(base), arm.label) for arm in arms if arm is not reference]
    return max(((difference, label) for difference, label in found if difference is not None), default=None)


def is_same_training(difference: float, dtype: str) -> bool:
    """Whether losses differ by no more than another order of summation explains."""
    return difference <= (SAME_IN_16_BITS if dtype in ("bfloat16", "float16", "float8") else SAME)

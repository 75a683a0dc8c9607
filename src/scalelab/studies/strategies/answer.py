"""What is known of every device of a configuration: how busy it was, and what it held.

A device is a GPU, or on a CPU the cores of a rank, or of a replica of emulated `dp`.

Memory of a rank on a CPU is by how much its resident set rose above what it was before the workload was built; that of
a replica of emulated `dp` is its tensors added up, because replicas share one process. On GPUs both are what torch
allocated at most.

Do the strategies train the same thing? Their losses, step by step, against the reference's.

Strategies take the same batches from the same weights, so that losses are equal up to the order in which numbers are
added. Steps are matched by their place in the training: other kinds of steps may run between them. After steps without
communication batches have moved on differently, and nothing is compared from there on.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_location
from scalelab.analysis.utilization import Launch, Utilization, describe_utilization
from scalelab.records.trial import StepKind, TrialResult
from scalelab.report.document import Column, Table, make_row
from scalelab.report.findings import Caution
from scalelab.studies.shared.arms import Arm
from scalelab.units import format_share

OTHERS = "other programs"
TOGETHER = "all replicas"
MOST_OTHERS = 0.05
"""A share of the cores' time above which what other programs do is said."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device of one configuration, over all rounds."""

    name: str
    utilization: Utilization | None
    """None: it was not looked at, or not for long enough."""
    memory: Estimate | None


def list_devices(arm: Arm) -> list[Device]:
    """In the order of their numbers; the process that all replicas of an emulated dp share comes last."""
    trial = arm.trial
    kind = "gpu" if trial.device == "cuda" else "replica" if trial.is_emulated else "rank"
    memories = [memory for memory in map(read_memory, arm.completed) if memory]
    devices = [
        Device(
            name=f"{kind} {number}",
            utilization=describe_utilization(list_launches(arm, f"{kind} {number}")),
            memory=estimate_location([memory[number] for memory in memories]) if memories else None,
        )
        for number in range(trial.num_ranks)
    ]
    if trial.is_emulated:
        together = describe_utilization(list_launches(arm, TOGETHER))
        devices.append(Device(name=TOGETHER, utilization=together, memory=None))
    return devices


def read_memory(result: TrialResult) -> list[float]:
    """What each device held in one round; nothing where that is not known of every one."""
    trial = result.trial
    if trial.strategy == "dp":
        found: list[float] = list(map(float, result.ranks[0].replica_bytes)) if result.ranks else []
    else:
        starts = [0 if trial.device == "cuda" else rank.start_memory_bytes for rank in result.ranks]
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
    """What was seen of a device, from the first clean step that counts to the last."""
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


def warn_of_devices(arms: Sequence[Arm]) -> Iterator[Caution]:
    """Where utilisation is not known, or is not that of the training alone."""
    unknown = [arm for arm in arms if all(device.utilization is None for device in list_devices(arm))]
    blind = [arm for arm in unknown if not any(result.loads for result in arm.completed)]
    short = [arm for arm in unknown if arm not in blind]
    if blind:
        on_gpu = any(arm.trial.device == "cuda" for arm in blind)
        yield Caution(
            message=f"nothing here could look at how busy the devices of {_name(blind)} were",
            next_step="pip install 'scalelab[gpu]'" if on_gpu else "use --launcher local",
        )
    if short:
        yield Caution(
            message=f"the launches of {_name(short)} are too short to say how busy their devices were",
            next_step="use more --steps: devices are looked at 20 times a second",
        )
    yield from _warn_of_others(arms)


def _warn_of_others(arms: Sequence[Arm]) -> Iterator[Caution]:
    found = [(describe_utilization(list_launches(arm, OTHERS)), arm.label) for arm in arms]
    shares = [(seen.busy.value, label) for seen, label in found if seen is not None and seen.busy.value > MOST_OTHERS]
    if shares:
        named = ", ".join(f"{format_share(share)} under {label}" for share, label in shares)
        yield Caution(
            message=f"other programs used the cores of the ranks too: {named}",
            next_step="close them: ranks that wait for a core seem to idle",
        )


def _name(arms: Sequence[Arm]) -> str:
    return ", ".join(arm.label for arm in arms)


SAME = 1e-3
SAME_IN_16_BITS = 5e-2
"""Relative differences up to here are what another order of adding gives after some dozen steps."""


@dataclass(frozen=True, kw_only=True)
class LossPath:
    """The losses of one configuration that can be compared, in the order of the training."""

    losses: tuple[float, ...]

    def find_difference(self, reference: LossPath) -> float | None:
        """The largest difference of a step, relative to the reference; None where there is no common finite one."""
        pairs = zip(self.losses, reference.losses, strict=False)
        known = [(ours, theirs) for ours, theirs in pairs if math.isfinite(ours) and math.isfinite(theirs)]
        return max((abs(ours - theirs) / (abs(theirs) or 1.0) for ours, theirs in known), default=None)


def read_losses(arm: Arm) -> LossPath:
    """Of the first round that completed: all rounds train the same, or are warned of."""
    return LossPath(losses=tuple(_list_losses(arm.completed[0])) if arm.completed else ())


def _list_losses(result: TrialResult) -> list[float]:
    first = min((sample.step for sample in result.samples if sample.kind is StepKind.COMM_FREE), default=math.inf)
    return [loss for _, loss in takewhile(lambda entry: entry[0] < first, result.losses().items())]


def make_loss_table(arms: Sequence[Arm], reference: Arm | None) -> Table:
    """First and last loss of every strategy, and how far any step is from the reference's."""
    columns = (
        Column(key="run", header="run", align="left"),
        Column(key="first_loss", header="first loss", quantity="loss"),
        Column(key="last_loss", header="last loss", quantity="loss"),
        Column(key="largest_difference", header="largest difference", quantity="share"),
    )
    base = read_losses(reference) if reference is not None and reference.is_measured else None
    rows = []
    for arm in arms:
        path = read_losses(arm)
        first, last = (path.losses[0], path.losses[-1]) if path.losses else (None, None)
        difference = path.find_difference(base) if base is not None and arm is not reference else None
        rows.append(make_row(arm.label, first, last, difference))
    return Table(columns=columns, rows=tuple(rows), notes=("differences are relative to the first row's losses",))


def describe_losses(arms: Sequence[Arm], reference: Arm) -> str | None:
    """Whether all strategies trained the same thing."""
    base = read_losses(reference)
    found = [(read_losses(arm).find_difference(base), arm.label) for arm in arms if arm is not reference]
    known = [(difference, label) for difference, label in found if difference is not None]
    if not known:
        return None
    largest, label = max(known)
    if largest == 0:
        return f"All strategies had the very same losses as the {reference.label}."
    size = f"at most {largest:.1e} of the loss, {label}"
    if largest <= (SAME_IN_16_BITS if reference.trial.dtype in ("bfloat16", "float16") else SAME):
        return f"All strategies trained the same: losses differ by {size}, as adding in another order does."
    return (
        f"The strategies did not train the same: losses differ by {size}. Dropout draws other masks on every rank, and"
        " batch norm looks at a rank's own samples; without either, something is wrong."
    )

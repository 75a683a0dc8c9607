"""What only accelerators have: steps that run freely, host-bound time, clocks, power, energy, other tenants.

Clean steps are synchronized with the device at both edges, so the host starts every step with an empty queue. In steps
that run freely it queues the next step while the device computes. Where the device waits for the host either way,
both take as long; the difference, host-bound time, is what the host takes per step that running ahead would hide:

    host-bound = synchronized step − freely running step

Sensors are read while the ranks run (`launch/gpus.py`); what counts is what they say between the first clean step after
warm-up and the last. Energy of a step is the mean power of all GPUs then, times the median step: that of the boards
alone, without the hosts and their cooling.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_difference, estimate_median, estimate_positive_over_rounds
from scalelab.records.observations import DeviceLoad
from scalelab.records.trial import StepKind, TrialResult
from scalelab.report.document import Section
from scalelab.report.findings import DETAIL, REASON, Caution, CautionKind, Finding, FindingKind
from scalelab.report.tables import INTERVAL_NOTE, Field, make_column, make_table, seconds_column, text_column
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.work import count_tokens, has_tokens
from scalelab.units import format_known, format_quantity, format_share

MOST_MOVED = 0.05
"""A clock that moves by more moves step times by as much, where kernels are bound by it."""

HOST_BOUND = FindingKind(
    "host-bound",
    "How much longer a synchronized step takes than a free-running one",
    REASON,
    ("host_seconds", "free_step_seconds"),
    free=("host_seconds",),
)
ENERGY = FindingKind(
    "energy", "Energy of all GPUs per step, and per token or sample", DETAIL, ("step_joules", "unit_joules", "watts")
)
CLOCK_MOVED = CautionKind(
    "clock-moved", "The clock of a GPU moved by more than 5 % during clean steps", "noise", ("low_hertz", "high_hertz")
)
SLOWED = CautionKind("gpu-slowed", "The driver held a GPU's clock down during clean steps", "noise", ("share",))
SHARED_GPU = CautionKind("shared-gpu", "Another process used a GPU of the run", "wrong-work", ("processes",))


def measure_host_bound(arm: Arm) -> Estimate | None:
    """Seconds per step; None if no step ran freely."""
    return estimate_difference(arm.clean, arm.free) if arm.is_measured and any(map(len, arm.free)) else None


def select_loads(result: TrialResult, num_dropped: int) -> list[DeviceLoad]:
    """What sensors of GPUs said between the first clean step after warm-up and the last."""
    gpus = [load for load in result.loads if load.device.startswith("gpu ")]
    if not gpus:
        return []
    clean = sorted(s.start_seconds for s in result.samples if s.kind is StepKind.CLEAN and s.rank == 0)[num_dropped:]
    if not clean:
        return []
    return [load for load in gpus if clean[0] <= load.seconds <= clean[-1]]


def group_loads(arm: Arm) -> dict[str, list[DeviceLoad]]:
    """By GPU, over all rounds."""
    found: dict[str, list[DeviceLoad]] = {}
    for result in arm.completed:
        for load in select_loads(result, arm.num_dropped):
            found.setdefault(load.device, []).append(load)
    return found


def add_power(loads: Sequence[DeviceLoad]) -> float | None:
    """The mean power of every GPU, added up; None: unknown of some."""
    watts: dict[str, list[float]] = {load.device: [] for load in loads}
    for load in loads:
        if load.power_watts is not None:
            watts[load.device].append(load.power_watts)
    known = [statistics.fmean(values) for values in watts.values() if values]
    return sum(known) if known and len(known) == len(watts) == len({load.device for load in loads}) else None


def measure_energy(arm: Arm) -> Estimate | None:
    """Joules of one step on all GPUs; None if power is unknown."""
    per_round = []
    for result in arm.completed:
        steps = list(result.step_seconds(StepKind.CLEAN).values())[arm.num_dropped :]
        watts = add_power(select_loads(result, arm.num_dropped))
        if watts and steps:
            per_round.append(watts * statistics.median(steps))
    if not per_round:
        return None
    return estimate_positive_over_rounds(statistics.median(per_round), per_round)


def spread_clock(loads: Sequence[DeviceLoad]) -> tuple[float, float] | None:
    """Between which values a clock lay nine times of ten."""
    clocks = [load.clock_hertz for load in loads if load.clock_hertz is not None]
    if not clocks:
        return None
    low, high = np.percentile(clocks, [5, 95])
    return float(low), float(high)


def make_device_sections(arms: Iterable[Arm]) -> Iterator[Section]:
    """A table of what only accelerators have; nothing if there is nothing of it."""
    known = [arm for arm in arms if arm.is_measured and (any(map(len, arm.free)) or any(group_loads(arm)))]
    if not known:
        return

    def read_loads(arm: Arm) -> list[DeviceLoad]:
        return [load for loads in group_loads(arm).values() for load in loads]

    def number_column(key: str, header: str, read: Any) -> Field[Arm]:
        return make_column("number", key, header, read, shows_interval=False)

    table = make_table(
        known,
        text_column("run", "run", lambda arm: arm.label),
        seconds_column("step_seconds", "synchronized step", lambda arm: arm.step),
        seconds_column("free_step_seconds", "freely running", find_free_step),
        seconds_column("host_seconds", "host-bound", measure_host_bound, domain="signed"),
        number_column("clock_megahertz", "SM clock [MHz]", lambda arm: find_clock(read_loads(arm))),
        number_column("watts", "power [W]", lambda arm: add_power(read_loads(arm))),
        number_column("celsius", "hottest [°C]", lambda arm: find_hottest(read_loads(arm))),
        number_column("step_joules", "energy [J/step]", measure_energy),
        notes=(
            INTERVAL_NOTE,
            "host-bound: synchronized less freely running; power and energy: of all GPUs, boards only",
        ),
    )
    yield Section(heading="Accelerators", tables=(table,))


def find_free_step(arm: Arm) -> Estimate | None:
    return estimate_median(arm.free) if any(map(len, arm.free)) else None


def find_clock(loads: Sequence[DeviceLoad]) -> float | None:
    clocks = [load.clock_hertz for load in loads if load.clock_hertz is not None]
    return statistics.median(clocks) / 1e6 if clocks else None


def find_hottest(loads: Sequence[DeviceLoad]) -> float | None:
    return max((load.temperature_celsius for load in loads if load.temperature_celsius is not None), default=None)


def name_device_findings(arms: Iterable[Arm]) -> Iterator[Finding]:
    """Host-bound time and energy of every row that has them."""
    for arm in arms:
        host, free = measure_host_bound(arm), find_free_step(arm)
        if host is not None and free is not None:
            is_seen = host.is_above(0)
            said = f"takes {format_known('seconds', host)}" if is_seen else "does not take measurably"
            text = (
                f"{arm.label}: a step that waits for the device {said} longer than one that runs freely"
                f" ({format_quantity('seconds', free)})."
            )
            yield HOST_BOUND(arm.label, text, host_seconds=host, free_step_seconds=free)
        energy = measure_energy(arm)
        if energy is not None:
            unit = "token" if has_tokens(arm) else "sample"
            each = energy.map(lambda joules, arm=arm: joules / count_tokens(arm))  # type: ignore[misc]
            text = (
                f"{arm.label}: {format_quantity('number', energy)} J per step,"
                f" {format_quantity('number', each)} J per {unit} (GPUs alone)."
            )
            watts = energy.value / arm.step.value
            yield ENERGY(arm.label, text, step_joules=energy, unit_joules=each, watts=watts)


def look_at_devices(arms: Iterable[Arm]) -> Iterator[Caution]:
    """Clocks that moved or were held down, and other tenants: the worst GPU of every row."""
    for arm in arms:
        by_gpu = group_loads(arm)
        yield from _name_moved_clock(arm, by_gpu)
        slowed = {gpu: [one for one in loads if one.slowed] for gpu, loads in by_gpu.items()}
        worst = max(slowed, key=lambda gpu: len(slowed[gpu]) / len(by_gpu[gpu]), default="")
        if worst and slowed[worst]:
            share = len(slowed[worst]) / len(by_gpu[worst])
            reasons = sorted({reason for load in slowed[worst] for reason in load.slowed})
            yield SLOWED(
                arm.label,
                f"{arm.label}: {worst} was slowed by {', '.join(reasons)} in {format_share(share)} of its readings",
                "cool it or raise its power limit (nvidia-smi -pl), or lock clocks below it (nvidia-smi -lgc)",
                share=share,
            )
        others = max((load.num_others or 0 for loads in by_gpu.values() for load in loads), default=0)
        if others:
            yield SHARED_GPU(
                arm.label,
                f"{arm.label}: {others} other process{'es'[: 2 * (others > 1)]} used a GPU of the run",
                "end it, or use other GPUs (CUDA_VISIBLE_DEVICES)",
                processes=others,
            )


def _name_moved_clock(arm: Arm, by_gpu: dict[str, list[DeviceLoad]]) -> Iterator[Caution]:
    ends = {gpu: found for gpu, loads in by_gpu.items() if (found := spread_clock(loads)) is not None}
    worst = min(ends, key=lambda gpu: ends[gpu][0] / ends[gpu][1], default="")
    if worst and ends[worst][0] < (1 - MOST_MOVED) * ends[worst][1]:
        low, high = ends[worst]
        yield CLOCK_MOVED(
            arm.label,
            f"{arm.label}: the clock of {worst} moved between {low / 1e6:.0f} and {high / 1e6:.0f} MHz",
            "lock it (nvidia-smi -lgc), let the GPU warm up, or raise --rounds",
            low_hertz=low,
            high_hertz=high,
        )

"""A plan: layouts of a job on N devices, ranked by step time, and what the whole training run takes.

The interval of a step comes from drawing the shares of `Efficiency` around their fitted values, and a remainder. On the
layouts they were fitted to (A100s), two thirds of predicted steps are off by 7 % or less; on other devices the speed of
matrix products is known less well. Where the software decides (pipelines without rounds, and ZeRO-3 over more replicas
than plans were checked on) and is not given, the interval reaches up to a step by DeepSpeed.

A whole training run takes longer than its steps, by `GOODPUT`; if the layout was searched, its interval reaches up to
one that takes `MOST_OVER_FASTEST` as long.

Model FLOPs utilization (MFU) counts operations without recomputing, over the devices' peak (Chowdhery et al. 2022,
appendix B). Energy is that of the devices at their limit, without hosts, network and cooling.

The linear rule (`analysis.growth`) divides the throughput of a small model on one device by the ratio of parameter
counts. A plan for N devices differs from it by three factors, whose product is exactly the ratio of the two times:

    devices      N instead of one
    operations   6 per parameter and token in the rule; a plan counts attention and logits, but not embeddings
    speed        operations per second of one device: measured for the small model; planned after recomputation,
                 communication, pipelining and restarts, in its own data type on its own device
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from scalelab.analysis.estimate import Estimate, Prediction, enclose
from scalelab.analysis.growth import Extrapolation, extrapolate_training
from scalelab.checks import check_positive
from scalelab.errors import UsageError
from scalelab.predict.footprint import Footprint, Kernels, find_footprint, is_possible
from scalelab.predict.layout_cost import Efficiency, StepCost, time_step
from scalelab.predict.layouts import Asked, Layout, PlannedJob, find_obstacle, list_layouts
from scalelab.units import format_bytes, format_count

NUM_DRAWS = 200
SEED = 20190417
SPREADS = {"gemm": 0.05, "memory": 0.10, "link": 0.15, "node": 0.30, "launch_seconds": 0.30}
"""Relative standard deviations of what is got of a device."""
REMAINDER_SPREAD = 0.08
OTHER_DEVICE_SPREAD = 0.12
"""Of products on devices that nothing was found on."""
FOUND_ON = ("a100-80gb", "a100-40gb")
DEEPSPEED_NODE_SPREAD, DEEPSPEED_SPREAD = 0.45, 0.14
"""Of the links that DeepSpeed's ZeRO-3 gets, and of the remainder with its pipelines: what the rows that its numbers
were found on scatter."""
CHECKED_SHARDS = 128
"""The most replicas over which ZeRO-3 without a pipeline was scored."""
NUM_RANKED = 8
GOODPUT, LEAST_GOODPUT, MOST_GOODPUT = 0.90, 0.80, 0.97
"""Share of the time of a long run that goes to steps: the rest is failures, restarts, checkpoints and evaluation. More
than 90 % with Llama 3 405B (Llama team 2024, section 3.3.4); 80 and 97 % are assumed as bounds."""
MOST_OVER_FASTEST = 1.36
"""What was really run took at most so many times as long as the fastest layout of a plan, in nine of ten of 169 jobs
(Narayanan 2021, Korthikanti 2022, llm-foundry, Megatron-Core, torchtitan; the fastest published row of each)."""
SECONDS_PER_HOUR = 3600.0
SECONDS_PER_DAY = 86_400.0


@dataclass(frozen=True, kw_only=True)
class PlannedLayout:
    """A layout that fits, with its step."""

    layout: Layout
    cost: StepCost
    footprint: Footprint
    step: Prediction
    """Seconds."""
    mfu: Prediction


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What was found for one number of devices."""

    job: PlannedJob
    num_devices: int
    ranked: tuple[PlannedLayout, ...]
    """Fastest first."""
    num_fitting: int
    num_too_large: int
    """Layouts that the shape allows and memory does not."""
    obstacles: Mapping[str, str]
    """Reasons by what was refused."""

    @property
    def best(self) -> PlannedLayout:
        return self.ranked[0]


@dataclass(frozen=True, kw_only=True)
class Totals:
    """A whole training run."""

    num_steps: float
    days: Prediction
    device_hours: Prediction
    kilowatt_hours: Prediction | None
    dollars: Prediction | None


def make_plan(
    job: PlannedJob,
    num_devices: int,
    asked: Asked | None = None,
    *,
    efficiency: Efficiency | None = None,
    num_ranked: int = NUM_RANKED,
) -> TrainingPlan:
    """Feasible layouts, the fastest first; raises `UsageError` with the reason where there is none."""
    efficiency = efficiency or Efficiency()
    fitting: list[tuple[float, Layout, StepCost, Footprint]] = []
    least: tuple[float, Layout] | None = None
    num_too_large = 0
    tight: list[tuple[Layout, Footprint]] = []
    for layout in list_layouts(job, num_devices, asked):
        footprint = find_footprint(job, layout, Kernels())
        if least is None or footprint.device_bytes < least[0]:
            least = (footprint.device_bytes, layout)
        if footprint.device_bytes > job.device.memory_bytes:
            num_too_large += 1
            if is_possible(job, layout):
                tight.append((layout, footprint))
            continue
        cost = time_step(job, layout, efficiency)
        fitting.append((cost.seconds, layout, cost, footprint))
    if not fitting:  # the allocator's reserve does not make a layout impossible
        costs = [(time_step(job, layout, efficiency), layout, footprint) for layout, footprint in tight]
        fitting = [(cost.seconds, layout, cost, footprint) for cost, layout, footprint in costs]
        num_too_large -= len(tight)
    if not fitting:
        raise UsageError(explain_none(job, num_devices, asked or Asked(), least))
    fitting.sort(key=lambda found: (found[0], found[3].device_bytes))
    ranked = tuple(
        _enclose(job, layout, cost, footprint, efficiency) for _, layout, cost, footprint in fitting[:num_ranked]
    )
    return TrainingPlan(
        job=job, num_devices=num_devices, ranked=ranked, num_fitting=len(fitting), num_too_large=num_too_large,
        obstacles=list_obstacles(job, num_devices),
    )  # fmt: skip


def rank_divisions(job: PlannedJob, num_devices: int, asked: Asked, memory_bytes: float) -> list[Layout]:
    """The fastest layout of every tensor × pipeline × data division whose devices hold no more than that together."""
    best: dict[tuple[int, int, int, int], tuple[float, Layout]] = {}
    for layout in list_layouts(job, num_devices, asked):
        if find_footprint(job, layout, Kernels()).total_bytes * num_devices > memory_bytes:
            continue
        seconds = time_step(job, layout, Efficiency()).seconds
        division = (layout.tensor, layout.pipeline, layout.data, layout.zero)
        if division not in best or seconds < best[division][0]:
            best[division] = (seconds, layout)
    return [layout for _, layout in sorted(best.values(), key=lambda found: found[0])]


def explain_none(job: PlannedJob, num_devices: int, asked: Asked, least: tuple[float, Layout] | None) -> str:
    """Why nothing fits."""
    if least is not None:
        return (
            f"nothing fits: the smallest layout on {format_count(num_devices, 'device')} ({least[1].words}) needs"
            f" {format_bytes(least[0])} per device, {job.device.name} has {format_bytes(job.device.memory_bytes)}: use"
            " more or larger devices, or a smaller model"
        )
    layout = asked.complete(num_devices)
    if layout is None:
        return (
            f"--devices must be a multiple of --tensor × --pipeline ({asked.tensor or 1} × {asked.pipeline or 1}), got"
            f" {num_devices}"
        )
    obstacle = find_obstacle(job, layout)
    if obstacle is not None:
        return f"impossible layout: {obstacle}"
    return f"a global batch of {job.global_batch} cannot be split over {num_devices} devices: use a multiple"


def list_obstacles(job: PlannedJob, num_devices: int) -> dict[str, str]:
    """Usual tensor and pipeline sizes that do not work, and why."""
    found = {}
    for name in ("tensor", "pipeline"):
        for size in (2, 4, 8, 16, 32, 64, 128):
            if num_devices % size:
                continue
            layout = Layout(tensor=size) if name == "tensor" else Layout(pipeline=size)
            obstacle = find_obstacle(job, layout)
            if obstacle is not None:
                found[f"{name} {size}"] = obstacle
            elif name == "tensor" and size > job.device.per_node:
                found[f"{name} {size}"] = f"exceeds the {job.device.per_node} devices of a node; not searched"
    return found


def _enclose(
    job: PlannedJob, layout: Layout, cost: StepCost, footprint: Footprint, efficiency: Efficiency
) -> PlannedLayout:
    step = enclose_step(job, layout, efficiency)
    useful = job.model.count_operations(job.global_batch) / (layout.num_devices * job.device.peak(job.dtype))
    return PlannedLayout(
        layout=layout, cost=cost, footprint=footprint, step=step, mfu=step.map(lambda seconds: useful / seconds)
    )


def is_checked(layout: Layout) -> bool:
    """Whether plans were scored on layouts like this."""
    return layout.zero < 3 or layout.pipeline > 1 or layout.num_shards <= CHECKED_SHARDS


def enclose_step(job: PlannedJob, layout: Layout, efficiency: Efficiency) -> Prediction:
    """The seconds of a step with their interval."""
    step = _draw_step(job, layout, efficiency)
    has_plain_stages = layout.pipeline > 1 and layout.interleave == 1
    is_known = job.is_deepspeed is not None or job.device.name.startswith("tpu-")
    if is_known or (is_checked(layout) and not has_plain_stages):
        return step
    return replace(step, high=max(step.high, _draw_step(replace(job, is_deepspeed=True), layout, efficiency).high))


def _draw_step(job: PlannedJob, layout: Layout, efficiency: Efficiency) -> Prediction:
    generator = np.random.default_rng(SEED)
    spreads, rest = dict(SPREADS), REMAINDER_SPREAD
    if job.device.name not in FOUND_ON:
        spreads["gemm"] = OTHER_DEVICE_SPREAD
    if job.gathers_matrices(layout):
        spreads["node"] = DEEPSPEED_NODE_SPREAD
    if job.is_deepspeed and layout.pipeline > 1:
        rest = DEEPSPEED_SPREAD
    drawn = []
    for _ in range(NUM_DRAWS):
        factors = {name: float(np.exp(spread * generator.standard_normal())) for name, spread in spreads.items()}
        remainder = float(np.exp(rest * generator.standard_normal()))
        drawn.append(time_step(job, layout, efficiency.scale(**factors)).seconds * remainder)
    return enclose(time_step(job, layout, efficiency).seconds, drawn)


def sum_training(plan: TrainingPlan, num_tokens: float, planned: PlannedLayout | None = None) -> Totals:
    """The whole training run in one of the layouts, by default the fastest, with what is lost between steps."""
    check_positive("tokens", num_tokens)
    step, device = (planned or plan.best).step, plan.job.device
    most = MOST_OVER_FASTEST if plan.num_fitting > 1 else 1.0
    step = Prediction(value=step.value / GOODPUT, low=step.low / MOST_GOODPUT, high=step.high * most / LEAST_GOODPUT)
    num_steps = num_tokens / plan.job.tokens
    hours = step.map(lambda seconds: seconds * num_steps * plan.num_devices / SECONDS_PER_HOUR)
    watts, price = device.watts, device.price
    return Totals(
        num_steps=num_steps,
        days=step.map(lambda seconds: seconds * num_steps / SECONDS_PER_DAY),
        device_hours=hours,
        kilowatt_hours=None if watts is None else hours.map(lambda number: number * watts / 1000),
        dollars=None if price is None else hours.map(lambda number: number * price),
    )


def sweep_devices(
    job: PlannedJob, sizes: Sequence[int], asked: Asked | None = None
) -> tuple[list[TrainingPlan], dict[int, str]]:
    """The fastest layout for every number of devices; and why there is none, where there is none."""
    plans, refused = [], {}
    for size in sorted(set(sizes)):
        try:
            plans.append(make_plan(job, size, asked, num_ranked=1))
        except UsageError as error:
            refused[size] = str(error)
    return plans, refused


def find_last_paying(plans: Sequence[TrainingPlan]) -> int | None:
    """The last device count that pays: up to it, every size gains more than half of the ideal over the one before."""
    last = plans[0].num_devices if plans else None
    for before, after in itertools.pairwise(plans):
        gain = before.best.step.value / after.best.step.value
        if gain < 1 + (after.num_devices / before.num_devices - 1) / 2:
            return last
        last = after.num_devices
    return last


RULE_OPERATIONS = 6
"""Per parameter and token, forward and backward (Kaplan et al. 2020)."""


@dataclass(frozen=True, kw_only=True)
class SmallRun:
    """A small model measured on one device."""

    tokens_per_second: float
    num_parameters: float

    def __post_init__(self) -> None:
        check_positive("measured_rate", self.tokens_per_second)
        check_positive("measured_parameters", self.num_parameters)


@dataclass(frozen=True, kw_only=True)
class LinearRuleGap:
    """The linear rule and a plan for the same training run."""

    linear: Extrapolation
    """On one device."""
    devices: float
    operations: float
    """The rule's operations over the plan's."""
    speed: float
    """The plan's operations per second and device over the rule's."""

    @property
    def ratio(self) -> float:
        """The rule's time over the plan's."""
        return self.devices * self.operations * self.speed


def compare_linear(plan: TrainingPlan, totals: Totals, small: SmallRun, num_tokens: float) -> LinearRuleGap:
    """How the plan's time comes from the rule's."""
    model = plan.job.model
    linear = extrapolate_training(
        Estimate(value=small.tokens_per_second),
        small.num_parameters,
        target_parameters=model.active_parameters,
        target_tokens=num_tokens,
    )
    by_rule = RULE_OPERATIONS * model.active_parameters
    counted = model.count_operations(1) / model.sequence
    seconds = totals.days.value * SECONDS_PER_DAY
    planned_speed = counted * num_tokens / seconds / plan.num_devices
    return LinearRuleGap(
        linear=linear,
        devices=plan.num_devices,
        operations=by_rule / counted,
        speed=planned_speed / (RULE_OPERATIONS * small.num_parameters * small.tokens_per_second),
    )

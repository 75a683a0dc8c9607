"""The document of `scalelab plan`: a training that nobody has run, laid over devices that one may not have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from scalelab.predict.footprint import CATEGORIES
from scalelab.predict.linear import Difference, SmallRun, compare_linear
from scalelab.predict.planning import FOUND_ON, Plan, Totals, find_last_paying, sum_training
from scalelab.report.document import Caution, Chart, Document, Section
from scalelab.studies.planned_tables import (
    PART_WORDS,
    make_layout_table,
    make_linear_table,
    make_memory_table,
    make_obstacle_table,
    make_parts_table,
    make_sweep_chart,
    make_sweep_table,
    make_totals_table,
)
from scalelab.studies.predicted_charts import plot_planned_memory, plot_planned_times
from scalelab.units import format_bytes, format_quantity, format_share

MANY_DAYS = 365
"""From here on a plan is one that nobody would carry out."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The same job on other numbers of devices."""

    plans: Sequence[Plan]
    refused: Mapping[int, str]


def describe_plan(plan: Plan, num_tokens: float, small: SmallRun, sweep: Sweep | None = None) -> Document:
    """Layouts, the fastest one in parts, the whole training, and the linear rule beside it."""
    totals = sum_training(plan, num_tokens)
    difference = compare_linear(plan, totals, small, num_tokens)
    job, best = plan.job, plan.best
    times, memory = draw_best(plan)
    sections = [
        Section(paragraphs=(describe_model(plan),), tables=(make_layout_table(plan, num_tokens),)),
        Section(heading="The whole training", tables=(make_totals_table(totals),)),
        Section(heading="Where the step of the fastest goes", tables=(make_parts_table(best),), charts=times),
        Section(heading="What a device holds in it", tables=(make_memory_table(best.footprint),), charts=memory),
        Section(
            heading="Beside the linear rule",
            paragraphs=(describe_small(small),),
            tables=(make_linear_table(totals, difference),),
        ),
    ]
    if sweep is not None and sweep.plans:
        table = make_sweep_table(sweep.plans, sweep.refused, num_tokens)
        chart = make_sweep_chart(sweep.plans, sweep.refused, num_tokens)
        sections.append(Section(heading="More and fewer devices", tables=(table,), charts=(chart,)))
    if plan.obstacles:
        sections.append(Section(heading="What cannot be", tables=(make_obstacle_table(plan.obstacles),)))
    return Document(
        title="Plan",
        question="How would this training be laid out, and how long would it take?",
        setting=f"{job.model.words} · {job.dtype} · {plan.num_devices} × {job.device.words} · batch {job.global_batch}",
        sections=tuple(sections),
        summary=tuple(summarise(plan, totals, difference, sweep)),
        cautions=tuple(find_cautions(plan, totals)),
        environment=(("device", job.device.source),),
    )


def draw_best(plan: Plan) -> tuple[tuple[Chart, ...], tuple[Chart, ...]]:
    """Where the step and the memory of the fastest layout go."""
    best = plan.best
    times = plot_planned_times({words: getattr(best.cost, name) for name, words in PART_WORDS.items()})
    memory = plot_planned_memory(
        {name: best.footprint.by_category[name] for name in CATEGORIES}, plan.job.device.memory_bytes
    )
    return (times,) if times else (), (memory,) if memory else ()


def describe_model(plan: Plan) -> str:
    model = plan.job.model
    per_token = model.count_operations(1) / model.sequence
    return (
        f"The model has {format_quantity('number', model.num_parameters)} parameters. A token costs"
        f" {per_token:.3g} operations without recomputing, {per_token / model.num_parameters:.2f} per parameter:"
        " products forward and backward, attention and logits counted."
    )


def describe_small(small: SmallRun) -> str:
    return (
        f"The rule starts from {format_quantity('number', small.tokens_per_second)} tokens/s of a model of"
        f" {format_quantity('number', small.num_parameters)} parameters on one device, and assumes that nothing but the"
        " number of parameters matters."
    )


def summarise(plan: Plan, totals: Totals, difference: Difference, sweep: Sweep | None) -> Iterator[str]:
    """The fastest layout, the training, and why the linear rule says otherwise."""
    best, days = plan.best, totals.days
    yield (
        f"{format_quantity('number', days.value)} days ({format_quantity('number', days.low)} to"
        f" {format_quantity('number', days.high)}) on {plan.num_devices} × {plan.job.device.name}, as"
        f" {best.layout.words}, at an MFU of {format_share(best.mfu.value)}."
    )
    lost = {
        "the pipeline bubble": best.cost.bubble, "tensor-parallel all-reduces": best.cost.tensor,
        "gradients and shards": best.cost.data, "work between products": best.cost.moves,
    }  # fmt: skip
    most = max(lost, key=lambda name: lost[name])
    yield (
        f"Matrix products take {format_share(best.cost.products / best.cost.seconds)} of a step; the largest of the"
        f" rest is {most} with {format_share(lost[most] / best.cost.seconds)}."
    )
    linear = difference.linear
    yield (
        f"The linear rule says {format_quantity('number', linear.days.value)} days"
        f" ({format_quantity('number', linear.years.value)} years) on one device,"
        f" {format_quantity('number', difference.ratio)} times the plan's: the plan has {plan.num_devices} devices, and"
        f" each does {difference.speed:.2g} times the operations per second that the small model got; counting"
        f" attention and logits changes the work by {abs(1 / difference.operations - 1):.1%}."
    )
    if sweep is not None and sweep.plans:
        yield describe_sweep(sweep)


def describe_sweep(sweep: Sweep) -> str:
    last, largest = find_last_paying(sweep.plans), sweep.plans[-1].num_devices
    if last == largest:
        return f"Up to {largest} devices, more of them pay: each row brings more than half of what its devices promise."
    devices = "1 device" if last == 1 else f"{last} devices"
    return f"Beyond {devices} more stop paying: the next row brings less than half of what its devices promise."


def find_cautions(plan: Plan, totals: Totals) -> Iterator[Caution]:
    job = plan.job
    if job.device.name not in FOUND_ON and job.device.reach == 1:
        yield Caution(
            message=f"how much of its peak {job.device.name} reaches was taken from A100s: its interval is wider",
            next_step="measure a model on it with scalelab run throughput, and scale --device-peak by what it reaches",
        )
    margin = 1 - plan.best.footprint.device_bytes / job.device.memory_bytes
    if margin < 0.05:
        yield Caution(
            message=f"the fastest layout leaves {format_share(max(margin, 0.0))} of"
            f" {format_bytes(job.device.memory_bytes)} free",
            next_step="take the next that needs less, or confirm it with scalelab run max-batch on the device",
        )
    if totals.days.value > MANY_DAYS:
        yield Caution(
            message=f"{format_quantity('number', totals.days.value)} days is longer than devices stay in service, and"
            " failures, restarts and checkpoints are not counted",
            next_step="look at more devices with --sweep-devices, or train fewer tokens",
        )

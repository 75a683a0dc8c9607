"""The document of `scalelab plan`: memory, step time, days and cost of a training run that has not been launched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from scalelab.answers.prediction.report import PREDICTION_NOTE, draw_fan
from scalelab.predict.footprint import CATEGORIES, FREE_SHARE, Kernels, keep_block
from scalelab.predict.layouts import PlannedJob
from scalelab.predict.planning import (
    CHECKED_SHARDS,
    FOUND_ON,
    LinearRuleGap,
    PlannedLayout,
    SmallRun,
    Totals,
    TrainingPlan,
    compare_linear,
    find_last_paying,
    is_checked,
    sum_training,
)
from scalelab.report.charts.axes import Axis
from scalelab.report.charts.column_charts import PREDICTED
from scalelab.report.charts.plot import plot_bars, plot_parts
from scalelab.report.document import Chart, Document, Section, Table
from scalelab.report.findings import DETAIL, MAIN, REASON, Caution, CautionKind, Finding, FindingKind, select
from scalelab.report.tables import (
    bytes_column,
    count_column,
    make_column,
    make_table,
    rate_column,
    ratio_column,
    seconds_column,
    share_column,
    text_column,
)
from scalelab.studies.strategies.planned import PLAN_RANKING
from scalelab.units import format_bytes, format_count, format_quantity, format_share

COST = FindingKind(
    "cost",
    "How long a planned training run takes, and what it uses, with 80 % intervals",
    MAIN,
    ("days", "device_hours", "kilowatt_hours", "dollars", "mfu", "step_seconds", "device_bytes"),
)
STEP_PARTS = FindingKind(
    "step-breakdown",
    "Share of matrix products in a step, and the largest other part",
    REASON,
    ("products_share", "part", "part_share"),
)
SATURATION = FindingKind(
    "diminishing-returns", "Devices beyond which more gain less than half of the ideal", REASON, ("num_devices",)
)
LINEAR_RULE = FindingKind(
    "linear-rule", "The plan against a linear extrapolation from a small model", DETAIL, ("days", "ratio", "speed")
)
UNCALIBRATED = CautionKind("uncalibrated-device", "The efficiency of the device is assumed, not measured", "note")
UNCHECKED = CautionKind("unchecked-layout", "The layout is beyond those that plans were checked on", "note")
TIGHT_MEMORY = CautionKind("tight-memory", "The fastest layout leaves little free memory", "note", ("free_share",))
TOO_LONG = CautionKind("too-long", "The training run would take more than a year", "note", ("days",))

PART_WORDS = {
    "products": "matrix products",
    "moves": "norms, GELU, dropout and loss",
    "launches": "kernel launches",
    "tensor": "tensor-parallel all-reduce",
    "context": "context-parallel keys and values",
    "experts": "expert-parallel all-to-all",
    "bubble": "pipeline bubble",
    "stage_sends": "pipeline sends",
    "data": "exposed gradient and shard communication",
    "optimizer": "optimizer",
}
MOMENTS = {
    "loss": "at the start of backward",
    "first block": "in the first block of backward",
    "last block": "in the last block of backward",
    "optimizer": "in the optimizer step",
}
MANY_DAYS = 365


@dataclass(frozen=True, kw_only=True)
class PlanSweep:
    """The same job on other device counts."""

    plans: Sequence[TrainingPlan]
    refused: Mapping[int, str]


def describe_plan(plan: TrainingPlan, num_tokens: float, small: SmallRun, sweep: PlanSweep | None = None) -> Document:
    """Layouts, the whole training run, the fastest layout in parts, and the linear rule beside it."""
    totals = sum_training(plan, num_tokens)
    difference = compare_linear(plan, totals, small, num_tokens)
    job, best = plan.job, plan.best
    parts, memory = make_parts_table(best), make_memory_table(job, best)
    sections = [
        Section(paragraphs=(describe_model(plan),), tables=(make_layout_table(plan, num_tokens),)),
        Section(heading="Whole training run", tables=(make_totals_table(totals),)),
        Section(heading="Step of the fastest layout", tables=(parts,), charts=(draw_times(parts),)),
        Section(
            heading="Memory of the fastest layout",
            tables=(memory,),
            charts=(draw_memory(memory, job.device.memory_bytes),),
        ),
        Section(
            heading="Linear rule",
            paragraphs=(describe_small(small),),
            tables=(make_linear_table(totals, difference),),
        ),
    ]
    if sweep is not None and sweep.plans:
        table = make_sweep_table(sweep, num_tokens)
        chart = draw_fan(table, {"days": PREDICTED}, "Days", caption=f" {describe_sweep(sweep.plans)}")
        sections.append(Section(heading="Other device counts", tables=(table,), charts=(chart,)))
    if plan.obstacles:
        sections.append(Section(heading="Impossible layouts", tables=(make_obstacle_table(plan.obstacles),)))
    return Document(
        title="Plan",
        question="Which layout is fastest, and how long would the training run take?",
        setting=f"{job.model.words} · {job.dtype} · {plan.num_devices} × {job.device.words}"
        f" · global batch {job.global_batch}",
        sections=tuple(sections),
        findings=tuple(summarise(plan, totals, small, difference, sweep)),
        cautions=tuple(find_cautions(plan, totals)),
        environment=(("device", job.device.source),),
    )


def add_confirmation(document: Document, measured: Document) -> Document:
    """The plan with what a `layouts` study measured here of its best layouts."""
    tables = tuple(table for section in measured.sections[:2] for table in section.tables)
    words = f"The best layouts that fit on this machine, as measured here: {measured.setting}."
    first, *others = document.sections
    return replace(
        document,
        sections=(first, Section(heading="Confirmed here", paragraphs=(words,), tables=tables), *others),
        findings=(*document.findings, *select(measured.findings, PLAN_RANKING)),
        cautions=(*document.cautions, *measured.cautions),
    )


def make_layout_table(plan: TrainingPlan, num_tokens: float) -> Table:
    has_rounds = any(one.layout.interleave > 1 for one in plan.ranked)
    return make_table(
        plan.ranked,
        count_column("tensor", "TP", lambda one: one.layout.tensor),
        count_column("pipeline", "PP", lambda one: one.layout.pipeline),
        *([count_column("interleave", "rounds", lambda one: one.layout.interleave)] if has_rounds else []),
        *([count_column("context", "CP", lambda one: one.layout.context)] if plan.best.layout.context > 1 else []),
        *([count_column("expert", "EP", lambda one: one.layout.expert)] if plan.job.model.num_experts > 1 else []),
        count_column("data", "DP", lambda one: one.layout.data),
        count_column("zero", "ZeRO", lambda one: one.layout.zero),
        count_column("micro_batch", "micro-batch", lambda one: one.layout.micro_batch),
        text_column("checkpointing", "checkpointing", lambda one: one.layout.checkpointing),
        seconds_column("step_seconds", "step", lambda one: one.step),
        share_column("mfu", "MFU", lambda one: one.mfu, shows_interval=False),
        bytes_column("device_bytes", "memory", lambda one: one.footprint.device_bytes),
        make_column(
            "number", "days", "days", lambda one: sum_training(plan, num_tokens, one).days, shows_interval=False
        ),
        notes=(
            PREDICTION_NOTE,
            f"fastest first; {plan.num_fitting} of"
            f" {format_count(plan.num_fitting + plan.num_too_large, 'layout')} fit in memory",
            f"memory: per device, with its context and {format_share(FREE_SHARE)} for the allocator",
        ),
    )


def make_parts_table(planned: PlannedLayout) -> Table:
    """The parts of a layout's step, and the step."""
    seconds = {words: getattr(planned.cost, name) for name, words in PART_WORDS.items()}
    return make_share_table(seconds, "step", "seconds", "share of step")


def make_memory_table(job: PlannedJob, planned: PlannedLayout) -> Table:
    footprint = planned.footprint
    parts = {name: footprint.by_category[name] for name in CATEGORIES}
    kept, whole = keep_block(job, planned.layout, Kernels())
    notes = (
        f"at the peak, {MOMENTS[footprint.moment]}",
        f"activations of a block per micro-batch: {format_bytes(kept)}, without checkpointing {format_bytes(whole)}",
    )
    return make_share_table(parts, "allocated", "bytes", "share of allocated", *notes)


def make_share_table(parts: Mapping[str, float], total: str, quantity: str, header: str, *notes: str) -> Table:
    """The parts of a sum that are not zero, with their shares, and the sum."""
    everything = sum(parts.values())
    rows = [(words, value) for words, value in parts.items() if value] + [(total, everything)]
    read_value = seconds_column if quantity == "seconds" else bytes_column
    return make_table(
        rows,
        text_column("part" if quantity == "seconds" else "category", "part", lambda row: row[0]),
        read_value(quantity, "time" if quantity == "seconds" else "per device", lambda row: row[1]),
        share_column("share", header, lambda row: row[1] / everything),
        notes=notes,
    )


def make_totals_table(totals: Totals) -> Table:
    energy = totals.kilowatt_hours
    return make_table(
        [totals],
        make_column("number", "steps", "steps", lambda one: round(one.num_steps)),
        make_column("number", "days", "days", lambda one: one.days),
        rate_column("device_hours", "device-hours", lambda one: one.device_hours),
        rate_column("watt_hours", "Wh", lambda _: None if energy is None else energy.map(lambda kwh: kwh * 1000)),
        rate_column("dollars", "dollars", lambda one: one.dollars),
        notes=(
            PREDICTION_NOTE,
            "energy: devices at their power limit, without hosts and cooling; dollars: at the hourly price",
        ),
    )


def make_linear_table(totals: Totals, difference: LinearRuleGap) -> Table:
    """The linear rule and the plan, and the factors between."""
    days = difference.linear.days.value
    after_devices = days / difference.devices
    after_operations = after_devices / difference.operations
    rows = (
        ("linear rule, 1 device", days, None),
        ("the planned number of devices", after_devices, difference.devices),
        ("counted operations, not 6 per parameter", after_operations, difference.operations),
        ("the planned operations/s per device", totals.days.value, difference.speed),
    )
    return make_table(
        rows,
        text_column("what", "", lambda row: row[0]),
        make_column("number", "days", "days", lambda row: row[1]),
        make_column("number", "factor", "divided by", lambda row: row[2]),
        notes=("each row is the one above, divided by its factor",),
    )


def make_obstacle_table(obstacles: Mapping[str, str]) -> Table:
    return make_table(
        obstacles.items(),
        text_column("layout", "layout", lambda row: row[0]),
        text_column("reason", "reason", lambda row: row[1]),
    )


def make_sweep_table(sweep: PlanSweep, num_tokens: float) -> Table:
    plans = {plan.num_devices: plan for plan in sweep.plans}
    totals = {size: sum_training(plan, num_tokens) for size, plan in plans.items()}
    before = dict(zip(list(plans)[1:], plans.values(), strict=False))

    sizes: list[int] = sorted({*plans, *sweep.refused})

    def count(size: int) -> int:
        return size

    def find_status(size: int) -> str | None:
        return None if size in plans else "does not fit"

    def gain(size: int) -> float | None:
        return before[size].best.step.value / plans[size].best.step.value if size in before else None

    def name_layout(size: int) -> str:
        layout = plans[size].best.layout
        return f"{layout.tensor}·{layout.pipeline}·{layout.data}·{layout.zero}"

    return make_table(
        sizes,
        count_column("devices", "devices", count),
        seconds_column("step_seconds", "step", lambda size: plans[size].best.step),
        make_column("number", "days", "days", lambda size: totals[size].days),
        share_column("mfu", "MFU", lambda size: plans[size].best.mfu, shows_interval=False),
        rate_column("device_hours", "device-hours", lambda size: totals[size].device_hours, shows_interval=False),
        ratio_column("gain", "gain", gain),
        text_column("layout", "layout", name_layout),
        status=find_status,
        notes=(
            PREDICTION_NOTE,
            "gain: step of the row above / step of this row",
            "layout: tensor · pipeline · data · ZeRO stage",
        ),
    )


def draw_times(table: Table) -> Chart:
    return plot_parts(
        title="Step breakdown",
        rows=[{"bar": "one step", "series": row[0].value, "seconds": row[1].value} for row in table.rows[:-1]],
        caption="The parts add up to the step of the fastest layout.",
    )


def draw_memory(table: Table, device_bytes: float) -> Chart:
    """Memory of a device at the peak."""
    *parts, (_, total, _) = table.rows
    free = device_bytes - float(total.value or 0.0)
    rows = [{"bar": "one device", "series": row[0].value, "bytes": row[1].value} for row in parts]
    rows += [{"bar": "one device", "series": "free", "bytes": free}] if free > 0 else []
    return plot_bars(
        title="Memory of a device",
        x=Axis(field="bytes", title="memory", quantity="bytes"),
        y=Axis(field="bar", title="", quantity="text"),
        rows=rows,
        caption="Free memory is needed for the device context and the allocator.",
    )


def describe_model(plan: TrainingPlan) -> str:
    model = plan.job.model
    per_token, active = model.count_operations(1) / model.sequence, model.active_parameters
    used = f" (a token uses {format_quantity('number', active)})" if model.num_experts > 1 else ""
    return (
        f"The model has {format_quantity('number', model.num_parameters)} parameters{used}. A token costs"
        f" {per_token:.3g} operations without recomputation ({per_token / active:.2f} per parameter): forward and"
        " backward matrix products, attention and logits included."
    )


def describe_small(small: SmallRun) -> str:
    return (
        f"The rule scales {format_quantity('number', small.tokens_per_second)} tokens/s of a model with"
        f" {format_quantity('number', small.num_parameters)} parameters on one device by the parameter count alone."
    )


def summarise(
    plan: TrainingPlan, totals: Totals, small: SmallRun, difference: LinearRuleGap, sweep: PlanSweep | None
) -> Iterator[Finding]:
    """The training run, its step, whether more devices pay, and why the linear rule differs."""
    best, days = plan.best, totals.days
    low, middle, high = (format_quantity("number", value) for value in (days.low, days.value, days.high))
    yield COST(
        best.layout.words,
        f"{middle} days (80 % interval {low} to {high}) on {plan.num_devices} × {plan.job.device.name} at"
        f" {format_share(best.mfu.value)} MFU and {format_bytes(best.footprint.device_bytes)} per device, with"
        f" {best.layout.words}.",
        days=days,
        device_hours=totals.device_hours,
        kilowatt_hours=totals.kilowatt_hours,
        dollars=totals.dollars,
        mfu=best.mfu,
        step_seconds=best.step,
        device_bytes=best.footprint.device_bytes,
    )
    parts = {name: getattr(best.cost, name) / best.cost.seconds for name in PART_WORDS}
    products = parts.pop("products")
    part = max(parts, key=lambda name: parts[name])
    yield STEP_PARTS(
        best.layout.words,
        f"Matrix products take {format_share(products)} of a step; the largest other part is {PART_WORDS[part]}, with"
        f" {format_share(parts[part])}.",
        products_share=products,
        part=part,
        part_share=parts[part],
    )
    if sweep is not None and sweep.plans:
        yield SATURATION("", describe_sweep(sweep.plans), num_devices=find_last_paying(sweep.plans))
    linear = difference.linear
    yield LINEAR_RULE(
        "",
        f"Linear rule, for comparison: {format_quantity('number', small.tokens_per_second)} tokens/s of a model with"
        f" {format_quantity('number', small.num_parameters)} parameters on 1 device, scaled by parameters alone, gives"
        f" {format_quantity('number', linear.days.value)} days. The plan is {difference.ratio:.3g} times as fast:"
        f" {difference.devices:.3g} × the devices, {difference.speed:.2g} × the operations/s of each,"
        f" {difference.operations:.2g} × for the operations that the rule does not count.",
        days=linear.days,
        ratio=difference.ratio,
        speed=difference.speed,
    )


def describe_sweep(plans: Sequence[TrainingPlan]) -> str:
    last, largest = find_last_paying(plans), plans[-1].num_devices
    if last is None or last == largest:
        return f"Adding devices pays up to {largest}: each row gains more than half of the ideal."
    return f"Beyond {format_count(last, 'device')}, the next row gains less than half of the ideal."


def find_cautions(plan: TrainingPlan, totals: Totals) -> Iterator[Caution]:
    device = plan.job.device
    if device.name not in FOUND_ON and device.reach == 1:
        text = f"the efficiency of {device.name} is assumed to be that of an A100: its interval is wider"
        advice = "measure a model on it with `scalelab run throughput` and scale --device-peak accordingly"
        yield UNCALIBRATED(device.name, text, advice)
    if not is_checked(plan.best.layout):
        engine = "DeepSpeed" if plan.job.gathers_matrices(plan.best.layout) else "FSDP"
        text = f"ZeRO-3 was checked up to {CHECKED_SHARDS} replicas; it is planned as {engine} runs it"
        advice = "set --deepspeed True or False, and --node-link to what an all-gather over all nodes gets (nccl-tests)"
        yield UNCHECKED(plan.best.layout.words, text, advice)
    margin = max(0.0, 1 - plan.best.footprint.device_bytes / device.memory_bytes)
    if margin < 0.05:
        text = f"the fastest layout leaves {format_share(margin)} of {format_bytes(device.memory_bytes)} free"
        advice = "choose a layout that needs less, or check it with `scalelab run max-batch` on the device"
        yield TIGHT_MEMORY(plan.best.layout.words, text, advice, free_share=margin)
    if totals.days.value > MANY_DAYS:
        text = f"{format_quantity('number', totals.days.value)} days is more than a year"
        yield TOO_LONG("", text, "try more devices (--sweep-devices) or fewer tokens", days=totals.days)

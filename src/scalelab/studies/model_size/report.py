"""The numbers, tables and sentences that answer `model-size`.

    gradient bytes         4·P in float32: what every rank hands to the exchange in a step
    operations per rank    operations of one sample × samples per rank; 6·P·B for the multilayer perceptron
    bytes per operation    their quotient: the same for every size of the perceptron at the same batch

What dominates is read off the clocks of the ranks (`analysis/breakdown.py`), not inferred from these.

The figures of `model-size`: speedups, a heat map of sizes and ranks, and what a step is made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from scalelab.analysis.breakdown import PARTS, RankBreakdown
from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import ExposedCommunication, communication_by_ablation
from scalelab.report.charts.amounts import plot_amounts, read_number
from scalelab.report.charts.columns import make_value_axis, read_columns
from scalelab.report.charts.grid import plot_grid
from scalelab.report.charts.plot import Axis, Row, plot_bars
from scalelab.report.document import Chart, Column, Table, make_cell, make_row
from scalelab.studies.dimensions import describe_cell
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.breakdown import HEADERS, break_arm
from scalelab.studies.shared.communication import compare_trace, estimate_counted, estimate_exposed
from scalelab.studies.shared.profiled import describe_traced, estimate_traced_exposed
from scalelab.studies.shared.sweep import (
    INTERVAL_NOTE,
    INTERVALS,
    SweepColumn,
    describe_status,
    divide_by_ranks,
    explain_marks,
    find_marks,
    keep_charts,
    make_sweep_table,
    measure_speedup,
    samples_column,
    step_column,
)
from scalelab.studies.shared.work import count_operations, count_parameters
from scalelab.units import format_bytes, format_quantity, format_share

WORDS = {"compute": "computation", "exposed": "communication", "waiting": "waiting", "input": "input"}
"""What a part is called where it dominates."""
BYTES_PER_ELEMENT = {"float16": 2, "bfloat16": 2, "float64": 8}
"""Of a gradient, where the model is cast; 4 otherwise."""


@dataclass(frozen=True, kw_only=True)
class SizeAnswer:
    """The arms of the study by size and number of ranks."""

    arms: Mapping[str, Arm]
    strategy: str
    sizes: tuple[str, ...]
    ranks: tuple[int, ...]

    def find(self, size: str, num_ranks: int) -> Arm | None:
        """The arm, if it was measured."""
        arm = self.arms.get(f"size{self.sizes.index(size) + 1}-{self.strategy}-{num_ranks}")
        return arm if arm is not None and arm.is_measured else None

    def base_of(self, arm: Arm) -> Arm | None:
        """The same size on one rank; the control is of the first size."""
        size, dash, _ = arm.configuration.partition("-")
        number = int(size.removeprefix("size")) if dash else 1
        return self.find(self.sizes[number - 1], 1)

    def speedup(self, arm: Arm) -> Estimate | float | None:
        return measure_speedup(arm, self.base_of(arm))

    def efficiency(self, arm: Arm) -> Estimate | float | None:
        return divide_by_ranks(self.speedup(arm), arm)

    def exposed(self, arm: Arm) -> ExposedCommunication | None:
        """By ablation; nothing is exchanged on one rank."""
        if arm.trial.num_ranks == 1 or not any(len(steps) for steps in arm.comm_free):
            return None
        return communication_by_ablation(arm.clean, arm.comm_free)

    @property
    def spread(self) -> list[Arm]:
        """The rows with more than one rank, size by size."""
        found = [self.find(size, n) for size in self.sizes for n in self.ranks if n > 1]
        return [arm for arm in found if arm is not None]


def count_gradient_bytes(arm: Arm) -> int | None:
    """What one rank hands to the exchange: every parameter's gradient, in the model's data type."""
    num_parameters = count_parameters(arm)
    if num_parameters is None:
        return None
    dtype = "float32" if arm.trial.shape.autocast else arm.trial.dtype
    return num_parameters * BYTES_PER_ELEMENT.get(dtype, 4)


def count_rank_operations(arm: Arm) -> float | None:
    """Floating-point operations of one rank in a step; None for a workload of the user's own."""
    operations = count_operations(arm)
    return None if operations is None else operations * arm.trial.batch_per_rank


def find_dominant(breakdown: list[RankBreakdown] | None) -> tuple[str, float, bool] | None:
    """The largest part of a step, its share as the mean over ranks, and whether it is more than half everywhere.

    Stalls are the machine's and not the model's: they do not compete.
    """
    if not breakdown:
        return None
    shares = {name: [ranks.share(name) for ranks in breakdown] for name in WORDS}
    means = {name: sum(share.value for share in found) / len(found) for name, found in shares.items()}
    name = max(means, key=lambda part: means[part])
    is_sure = all(share.low is not None and share.low > 0.5 for share in shares[name])
    return name, means[name], is_sure


def make_size_table(answer: SizeAnswer) -> Table:
    """Step, speedup and what communication costs, for every size on every number of ranks."""
    columns = [
        step_column(),
        samples_column(),
        SweepColumn(
            column=Column(key="speedup", header="speedup", quantity="ratio"), read=lambda arm: answer.speedup(arm)
        ),
        SweepColumn(
            column=Column(key="efficiency", header="efficiency", quantity="share", shows_interval=False),
            read=lambda arm: answer.efficiency(arm),
        ),
        SweepColumn(
            column=Column(key="exposed_seconds", header="exposed comm", quantity="seconds"),
            read=lambda arm: found.seconds if (found := answer.exposed(arm)) else None,
        ),
        SweepColumn(
            column=Column(key="exposed_share", header="of the step", quantity="share"),
            read=lambda arm: found.share if (found := answer.exposed(arm)) else None,
        ),
    ]
    notes = (
        "speedup: over one rank of the same size",
        "exposed comm: a step less a step without the gradient exchange",
    )
    return make_sweep_table(answer.arms.values(), columns, name_header="size × ranks", notes=notes)


def make_work_table(answer: SizeAnswer) -> Table:
    """What every row sends and computes in a step."""

    def divide(arm: Arm) -> float | None:
        sent, operations = count_gradient_bytes(arm), count_rank_operations(arm)
        return None if sent is None or not operations else sent / operations

    columns = [
        SweepColumn(column=Column(key="num_parameters", header="parameters", quantity="count"), read=count_parameters),
        SweepColumn(
            column=Column(key="gradient_bytes", header="gradient bytes", quantity="bytes"), read=count_gradient_bytes
        ),
        SweepColumn(
            column=Column(key="rank_operations", header="operations per rank", quantity="rate"),
            read=count_rank_operations,
        ),
        SweepColumn(column=Column(key="bytes_per_operation", header="bytes/operation", quantity="number"), read=divide),
    ]
    return make_sweep_table(answer.spread, columns, name_header="size × ranks")


def make_part_table(answer: SizeAnswer) -> Table:
    """The parts of a step, as means over ranks, what dominates, and communication by the clocks."""
    columns = (
        Column(key="run", header="size × ranks", align="left"),
        *(Column(key=f"{part}_share", header=HEADERS.get(part, part), quantity="share") for part in PARTS),
        Column(key="dominant", header="largest part", align="left"),
        Column(key="phases_seconds", header="comm by phases", quantity="seconds"),
        Column(key="counted_seconds", header="comm by DDP counters", quantity="seconds"),
        Column(key="traced_exposed_seconds", header="comm by trace", quantity="seconds"),
    )
    rows = []
    for arm in answer.spread:
        breakdown = break_arm(arm) or []
        dominant = find_dominant(breakdown)
        shares = [_average_share(breakdown, part) for part in PARTS]
        rows.append(
            make_row(
                make_cell(arm.label, mark=find_marks(arm)),
                *shares,
                WORDS[dominant[0]] if dominant else None,
                estimate_exposed(arm),
                estimate_counted(arm),
                estimate_traced_exposed(arm),
            )
        )
    notes = (INTERVAL_NOTE, "shares of the step are means over ranks", *explain_marks(answer.spread))
    return Table(columns=columns, rows=tuple(rows), notes=notes)


def _average_share(breakdown: list[RankBreakdown], part: str) -> float | None:
    found = [ranks.share(part).value for ranks in breakdown if part in ranks.parts]
    return sum(found) / len(found) if found else None


def summarise_sizes(answer: SizeAnswer) -> Iterator[str]:
    """The findings, the main one first."""
    most = answer.ranks[-1]
    largest = [arm for arm in answer.spread if arm.trial.num_ranks == most]
    for arm in largest:
        yield from _name_dominant(arm)
        yield from describe_traced(arm)
        exposed = answer.exposed(arm)
        yield from compare_trace(arm, exposed.seconds if exposed else None)
    yield from _compare_shares(answer, largest)
    yield from _name_intensity(largest)
    for arm in largest:
        speedup = answer.speedup(arm)
        if isinstance(speedup, Estimate):
            yield f"{arm.label}: {format_quantity('ratio', speedup)} times as fast as on one rank."


def _name_dominant(arm: Arm) -> Iterator[str]:
    dominant = find_dominant(break_arm(arm))
    if dominant is None:
        return
    name, share, is_sure = dominant
    how = "dominates" if is_sure else "is the largest part"
    yield f"{arm.label}: {WORDS[name]} {how}, {format_share(share)} of the step."


def _compare_shares(answer: SizeAnswer, largest: list[Arm]) -> Iterator[str]:
    """Whether the share of communication falls with the size, from the ablation of both."""
    known = [(arm, exposed.share) for arm in largest if (exposed := answer.exposed(arm)) is not None]
    if len(known) < 2:
        return
    ordered = sorted(known, key=lambda pair: count_parameters(pair[0]) or 0)
    (small, before), (large, after) = ordered[0], ordered[-1]
    if before.low is None or before.high is None or after.low is None or after.high is None:
        verdict = "unresolved"
    elif after.high < before.low:
        verdict = "less for the larger model"
    elif after.low > before.high:
        verdict = "more for the larger model"
    else:
        verdict = "no difference that these intervals resolve"
    yield (
        f"Exposed communication: {format_quantity('share', before)} of the step of {small.label},"
        f" {format_quantity('share', after)} of {large.label}: {verdict}."
    )


def _name_intensity(largest: list[Arm]) -> Iterator[str]:
    """Bytes and operations side by side: whether sizes alone could have told."""
    found = [(arm, count_gradient_bytes(arm), count_rank_operations(arm)) for arm in largest]
    known = [(arm, sent, work) for arm, sent, work in found if sent and work]
    if len(known) < 2:
        return
    ratios = [sent / work for _, sent, work in known]
    said = ", ".join(
        f"{arm.label} {format_bytes(sent)} and {format_quantity('rate', work)} operations" for arm, sent, work in known
    )
    spread = max(ratios) / min(ratios)
    verdict = (
        "bytes and operations grow together, so that sizes alone say nothing of which dominates"
        if spread < 1.1
        else f"bytes per operation differ by a factor of {spread:.2g}"
    )
    yield f"A rank exchanges and computes in a step: {said}; {verdict}."


def draw_sizes(answer: SizeAnswer) -> tuple[Chart, ...]:
    return keep_charts(_draw_grid(answer), _draw_speedups(answer))


def _draw_grid(answer: SizeAnswer) -> Chart | None:
    """Sizes down, ranks across: the step of each."""
    rows: list[Row] = [
        {
            "size": size.replace(",", " "),
            "ranks": str(count),
            **describe_cell(answer.arms.get(f"size{number}-{answer.strategy}-{count}")),
        }
        for number, size in enumerate(answer.sizes, start=1)
        for count in answer.ranks
    ]
    return plot_grid(
        title="Step by size and ranks",
        x=Axis(field="ranks", title="ranks", quantity="text"),
        y=Axis(field="size", title="", quantity="text"),
        value=Axis(field="step_seconds", title="step", quantity="seconds"),
        rows=rows,
        extra={"reason": "reason"},
        caption="Numbers are medians; their 95 % intervals are in the table.",
    )


def _draw_speedups(answer: SizeAnswer) -> Chart | None:
    """Of every row on several ranks, over one rank of the same size."""
    rows: list[Row] = [
        {
            "name": arm.label,
            "speedup": answer.speedup(arm) if arm.is_measured else None,
            "series": "",
            "key": arm.label,
            "status": "" if arm.is_measured else describe_status(arm),
        }
        for arm in answer.arms.values()
        if arm.trial.num_ranks > 1
    ]
    return plot_amounts(
        title="Speedup over one rank of the same size",
        x=Axis(field="speedup", title="speedup", quantity="ratio", from_zero=False),
        rows=rows,
        reference=1.0,
        caption=f"{INTERVALS} Left of the dashed line more ranks are slower than one.",
    )


def draw_parts(table: Table, answer: SizeAnswer) -> tuple[Chart, ...]:
    """The parts of a step, as shares of it."""
    columns = {f"{part}_share": HEADERS.get(part, part) for part in PARTS}
    every: list[Row] = [*read_columns(table, columns, [arm.label for arm in answer.spread])]
    rows = [row for row in every if read_number(row, "value") is not None]
    names = list(dict.fromkeys(str(row["name"]) for row in rows))
    if len(names) < 2:
        return ()
    for name in names:
        own = [row for row in rows if row["name"] == name]
        rest = 1.0 - sum(read_number(row, "value") or 0.0 for row in own)
        rows.append({"name": name, "key": own[0]["key"], "series": "rest", "value": rest})
    failed = {str(row["name"]): row for row in every if row["name"] not in names and row["status"]}
    chart = plot_bars(
        title="What a step is made of",
        x=make_value_axis(table, next(iter(columns)), "share of the step"),
        y=Axis(field="name", title="", quantity="text"),
        rows=rows,
        failed=list(failed.values()),
        has_labels=True,
        caption="Means over ranks; pieces are in the order of the legend. Each is measured by itself: a rest below"
        " zero, to the left, is by how much they exceed the step.",
    )
    return (chart,)

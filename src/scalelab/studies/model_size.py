"""Model size: does a larger model wait less for communication?

The usual answer, "small models are communication-bound and large ones compute-bound", does not follow from size alone.
One data-parallel step all-reduces the gradients, 4·P bytes for P parameters in float32, and computes with every
parameter on every sample: 6·P·B FLOPs for a multilayer perceptron and a batch B. Both grow with P, so bytes per FLOP
stay 4 / (6·B) for every size. The batch decides, and how fast the machine does either at that size. So each size is
measured on each number of ranks, and its row says what dominated.

    gradient bytes   4·P in float32: what every rank hands to the all-reduce in a step
    FLOPs per rank   FLOPs of one sample × samples per rank
    bytes per FLOP   their quotient

What dominates is read off the clocks of the ranks (`analysis/step_parts.py`), not inferred from these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.step_parts import PARTS, RankBreakdown
from scalelab.checks import check_at_least, read_flag
from scalelab.errors import UsageError
from scalelab.records.strategies import ParallelStrategy, find_strategy
from scalelab.records.trial import Option, Trial, TrialResult
from scalelab.report import tables
from scalelab.report.charts.column_charts import INTERVALS, draw_columns, draw_stacks, keep_charts
from scalelab.report.charts.grid import plot_grid
from scalelab.report.charts.plot import Axis, Row
from scalelab.report.document import Chart, Document, Section, Table
from scalelab.report.findings import DETAIL, MAIN, REASON, Finding, FindingKind
from scalelab.studies.dimensions import describe_cell
from scalelab.studies.scaling.answer import SPEEDUP
from scalelab.studies.shared import communication as comm
from scalelab.studies.shared.arms import Arm, find_measured, group_arms
from scalelab.studies.shared.breakdown import HEADERS, break_arm, make_breakdown_table, warn_of_rest
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import FEW_STEPS, Configuration, Sampling, Study, check_ranks
from scalelab.studies.shared.sweep import (
    describe_measurement,
    divide_by_ranks,
    find_sweep_cautions,
    make_sweep_table,
    measure_speedup,
    plan_sweep,
)
from scalelab.studies.shared.variations import parse_options
from scalelab.studies.shared.work import count_if_own, count_operations, count_parameters, parameters_column
from scalelab.units import format_bytes, format_known, format_quantity, format_share

DOMINANT = FindingKind("dominant-part", "The largest part of a step, as the mean over ranks", MAIN, ("part", "share"))
EXPOSED_BY_SIZE = FindingKind(
    "exposed-communication-by-size",
    "Exposed communication as a share of the step, for the smallest and the largest model",
    REASON,
    ("smallest", "largest", "verdict"),
)
INTENSITY = FindingKind("bytes-per-flop", "How far bytes per FLOP of the sizes differ", DETAIL, ("ratio",))

WORDS = {"compute": "computation", "exposed": "communication", "waiting": "waiting", "input": "input"}
"""What a part is called where it dominates."""
BYTES_PER_ELEMENT = {"float16": 2, "bfloat16": 2, "float8": 2, "float64": 8}
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
        return find_measured(self.arms, f"size{self.sizes.index(size) + 1}-{self.strategy}-{num_ranks}")

    def base_of(self, arm: Arm) -> Arm | None:
        """The same size on one rank; the control is of the first size."""
        size, dash, _ = arm.configuration.partition("-")
        number = int(size.removeprefix("size")) if dash else 1
        return self.find(self.sizes[number - 1], 1)

    def speedup(self, arm: Arm) -> Estimate | float | None:
        return measure_speedup(arm, self.base_of(arm))

    def efficiency(self, arm: Arm) -> Estimate | float | None:
        return divide_by_ranks(self.speedup(arm), arm)

    @property
    def spread(self) -> list[Arm]:
        """The rows with more than one rank, size by size."""
        found = [self.find(size, n) for size in self.sizes for n in self.ranks if n > 1]
        return [arm for arm in found if arm is not None]


def count_gradient_bytes(arm: Arm) -> int | None:
    """What one rank hands to the all-reduce: every parameter's gradient, in the model's data type."""
    num_parameters = count_parameters(arm)
    if num_parameters is None:
        return None
    dtype = "float32" if arm.trial.shape.autocast else arm.trial.dtype
    return num_parameters * BYTES_PER_ELEMENT.get(dtype, 4)


def count_rank_operations(arm: Arm) -> float | None:
    """FLOPs of one rank in a step; None for a workload of the user's own."""
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
    is_sure = all(share.is_above(0.5) for share in shares[name])
    return name, means[name], is_sure


def find_rate(arm: Arm) -> Estimate:
    return comm.find_centre(arm).map(lambda seconds: arm.step_samples / seconds)


def make_size_table(answer: SizeAnswer) -> Table:
    """Step, speedup and what communication costs, for every size on every number of ranks."""
    columns: list[tables.Field[Arm]] = [
        tables.seconds_column("step_seconds", "step", comm.find_centre),
        tables.rate_column("samples_per_second", "samples/s", find_rate, shows_interval=False, is_detail=True),
        tables.ratio_column("speedup", "speedup", answer.speedup),
        tables.share_column("efficiency", "efficiency", answer.efficiency, shows_interval=False, is_detail=True),
        tables.seconds_column("exposed_seconds", "exposed comm", comm.find_exposed),
        tables.share_column(
            "exposed_share", "of the step", lambda arm: found.share if (found := comm.find_ablation(arm)) else None
        ),
    ]
    notes = (
        "speedup: over one rank of the same size",
        tables.PAIRED_NOTE,
        "exposed comm: a step minus a step without the gradient all-reduce",
        "every number is the centre of those of the launches, not the median of all steps",
    )
    return make_sweep_table(answer.arms.values(), columns, name_header="size × ranks", notes=notes)


def make_work_table(answer: SizeAnswer) -> Table:
    """What every row sends and computes in a step."""

    def divide(arm: Arm) -> float | None:
        sent, operations = count_gradient_bytes(arm), count_rank_operations(arm)
        return None if sent is None or not operations else sent / operations

    columns: list[tables.Field[Arm]] = [
        parameters_column(),
        tables.bytes_column("gradient_bytes", "gradient bytes", count_gradient_bytes),
        tables.rate_column("rank_operations", "FLOPs per rank", count_rank_operations),
        tables.make_column("number", "bytes_per_operation", "bytes/FLOP", divide),
    ]
    return make_sweep_table(answer.spread, columns, name_header="size × ranks")


def make_part_table(answer: SizeAnswer) -> Table:
    """The parts of a step, as means over ranks, what dominates, and communication by the clocks."""

    def part_column(part: str) -> tables.Field[Arm]:
        return tables.share_column(f"{part}_share", HEADERS.get(part, part), lambda arm: _average_share(arm, part))

    def read_dominant(arm: Arm) -> str | None:
        dominant = find_dominant(break_arm(arm))
        return WORDS[dominant[0]] if dominant else None

    columns: list[tables.Field[Arm]] = [
        *(part_column(part) for part in PARTS),
        tables.text_column("dominant", "largest part", read_dominant),
        tables.seconds_column("phases_seconds", "comm by phases", comm.estimate_exposed),
        tables.seconds_column("counted_seconds", "comm by DDP counters", comm.estimate_counted),
        tables.seconds_column("traced_exposed_seconds", "comm by trace", comm.estimate_traced_exposed),
    ]
    notes = ("shares of the step are means over ranks",)
    return make_sweep_table(answer.spread, columns, name_header="size × ranks", notes=notes)


def _average_share(arm: Arm, part: str) -> float | None:
    found = [ranks.share(part).value for ranks in break_arm(arm) or () if part in ranks.parts]
    return sum(found) / len(found) if found else None


def find_findings(answer: SizeAnswer) -> Iterator[Finding]:
    fair = [arm for arm in answer.spread if not arm.trial.is_oversubscribed] or answer.spread
    most = max((arm.trial.num_ranks for arm in fair), default=0)
    largest = [arm for arm in fair if arm.trial.num_ranks == most]
    for arm in largest:
        yield from _name_dominant(arm)
    yield from _compare_shares(largest)
    for arm in largest:
        speedup, efficiency = answer.speedup(arm), answer.efficiency(arm)
        if isinstance(speedup, Estimate) and isinstance(efficiency, Estimate):
            text = f"{arm.label}: speedup over 1 rank {format_known('ratio', speedup)}."
            yield SPEEDUP(arm.label, text, weight=REASON, speedup=speedup, efficiency=efficiency)
    yield from _name_intensity(largest)
    for arm in largest:
        yield from comm.describe_traced(arm)
        yield from comm.compare_methods(
            arm, {name: seconds for name, seconds in comm.list_methods(arm).items() if name != "phases"}
        )


def _name_dominant(arm: Arm) -> Iterator[Finding]:
    dominant = find_dominant(break_arm(arm))
    if dominant is None:
        return
    name, share, is_sure = dominant
    how = "dominates" if is_sure else "is the largest part"
    text = f"{arm.label}: {WORDS[name]} {how}, {format_share(min(1.0, share))} of the step."
    yield DOMINANT(arm.label, text, part=name, share=share)


def _compare_shares(largest: list[Arm]) -> Iterator[Finding]:
    """Whether the share of communication falls with the size, from the ablation of both."""
    known = [(arm, exposed.share) for arm in largest if (exposed := comm.find_ablation(arm)) is not None]
    if len(known) < 2:
        return
    ordered = sorted(known, key=lambda pair: count_parameters(pair[0]) or 0)
    (small, before), (large, after) = ordered[0], ordered[-1]
    verdict = "more" if after.value > before.value else "less"
    if comm.do_overlap(before, after):
        verdict = "unresolved"
    words = "the intervals overlap" if verdict == "unresolved" else f"{verdict} for the larger model"
    yield EXPOSED_BY_SIZE(
        large.label,
        f"Exposed communication, as a share of the step: {format_known('share', before)} for {small.label},"
        f" {format_known('share', after)} for {large.label}; {words}.",
        smallest=before,
        largest=after,
        verdict=verdict,
    )


def _name_intensity(largest: list[Arm]) -> Iterator[Finding]:
    """Bytes and FLOPs side by side: whether sizes alone would have predicted it."""
    found = [(arm, count_gradient_bytes(arm), count_rank_operations(arm)) for arm in largest]
    known = [(arm, sent, work) for arm, sent, work in found if sent and work]
    if len(known) < 2:
        return
    ratios = [sent / work for _, sent, work in known]
    said = ", ".join(
        f"{arm.label} {format_bytes(sent)} and {format_quantity('rate', work)}" for arm, sent, work in known
    )
    spread = max(ratios) / min(ratios)
    verdict = (
        "both grow together, so size alone does not decide which dominates"
        if spread < 1.1
        else f"bytes per FLOP differ by a factor of {spread:.2g}"
    )
    text = f"Gradient bytes and FLOPs per rank and step: {said}; {verdict}."
    yield INTENSITY("", text, ratio=spread)


def draw_grid(answer: SizeAnswer) -> Chart | None:
    """Sizes down, ranks across: the step of each."""
    rows: list[Row] = [
        {
            "size": size.replace(",", " "),
            "ranks": str(count),
            **describe_cell(arm := answer.arms.get(f"size{number}-{answer.strategy}-{count}")),
            **({"step_seconds": comm.find_centre(arm)} if arm is not None and arm.is_measured else {}),
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
        caption="Numbers are those of the table, which has their 95 % intervals.",
    )


def draw_parts(table: Table) -> tuple[Chart, ...]:
    """The parts of a step, as shares of it."""
    chart = draw_stacks(
        table,
        {f"{part}_share": HEADERS.get(part, part) for part in PARTS},
        title="What a step is made of",
        axis_title="share of the step",
        rest="rest",
        caption="Means over ranks, in the order of the legend. Each part is measured alone: a negative rest, to the"
        " left, is by how much they exceed the step.",
    )
    return keep_charts(chart)


@dataclass(frozen=True, kw_only=True)
class ModelSize(Study):
    """Every model size at every world size, with the same global batch."""

    sizes: tuple[str, ...] = ("dim=256,depth=2", "dim=1024,depth=2")
    """Workload options of each size, as option=value,option=value; the others stay as given."""
    ranks: tuple[int, ...] = (1, 2)
    """World sizes to measure; one rank is always measured."""
    global_batch: int = 64
    """Samples per step, over all ranks."""
    strategy: ParallelStrategy = "ddp"
    """How training is distributed."""
    job: Job = field(default_factory=lambda: Job(workload="mlp"))
    sampling: Sampling = field(default_factory=lambda: Sampling(profile_steps=FEW_STEPS))

    def __post_init__(self) -> None:
        check_at_least("global_batch", self.global_batch, 1)
        check_ranks(self.ranks, self.global_batch)
        if not self.sizes or len(set(self.sizes)) < len(self.sizes):
            raise UsageError(f"--sizes {' '.join(self.sizes)} needs at least one size, each once")

    @property
    def all_ranks(self) -> list[int]:
        return sorted({1, *self.ranks})

    def _read_size(self, text: str) -> dict[str, Option]:
        return read_flag("sizes", text, lambda words: parse_options(words, self.job.workload))

    def plan(self) -> list[Trial]:
        return plan_sweep(self.job, self.sampling, list(self._configure()))

    def _configure(self) -> Iterator[Configuration]:
        has_counters = "counters" in find_strategy(self.strategy).instruments
        for number, text in enumerate(self.sizes, start=1):
            job = replace(self.job, options={**self.job.options, **self._read_size(text)})
            for num_ranks in self.all_ranks:
                yield Configuration(
                    name=f"size{number}-{self.strategy}-{num_ranks}",
                    strategy=self.strategy,
                    num_ranks=num_ranks,
                    global_batch=self.global_batch,
                    job=job,
                    label=f"{text.replace(',', ' ')} × {num_ranks}",
                    instruments=(*(("counters",) if has_counters and num_ranks > 1 else ()), *count_if_own(job)),
                )

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        arms = group_arms(results, self.sampling.warmup)
        answer = SizeAnswer(arms=arms, strategy=self.strategy, sizes=self.sizes, ranks=tuple(self.all_ranks))
        words = (self.strategy, self.job.dtype, f"global batch {self.global_batch}")
        label = self.job.workload if self.job.built_in is not None else self.job.label
        largest = [arm for arm in (answer.find(size, answer.ranks[-1]) for size in self.sizes) if arm is not None]
        parts = tuple(
            make_breakdown_table(arm, title=f"Every rank of {arm.label}") for arm in largest if arm.trial.num_ranks > 1
        )
        table = make_size_table(answer)
        speedups = draw_columns(
            table,
            ["speedup"],
            title="Speedup over one rank of the same size",
            reference=1.0,
            from_zero=False,
            caption=f"{INTERVALS} Left of the dashed line, more ranks are slower than 1 rank.",
        )
        sections = [
            Section(tables=(table,), charts=keep_charts(draw_grid(answer), speedups)),
            Section(heading="Bytes and operations", tables=(make_work_table(answer),)),
        ]
        if parts:
            traced = comm.make_traced_table([arm for arm in largest if comm.has_traces(arm)])
            whole = make_part_table(answer)
            shown = (whole, *parts, *((traced,) if traced else ()))
            sections.append(Section(heading="Where the time goes", tables=shown, charts=draw_parts(whole)))
        return Document(
            title=self.title,
            question=self.question,
            setting=describe_measurement(self.job, self.sampling, arms.values(), *words, label=label),
            sections=tuple(sections),
            findings=tuple(find_findings(answer)),
            cautions=(
                *find_sweep_cautions(arms, answer.find(self.sizes[0], 1)),
                *(caution for arm in largest for caution in warn_of_rest(arm)),
            ),
        )

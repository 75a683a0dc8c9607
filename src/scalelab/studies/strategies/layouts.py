"""Layouts: every mesh of so many ranks that a model can be split over, measured side by side.

A mesh gives ranks to pipeline stages (pp), replicas (dp), shards (fsdp) and pieces of layers (tp):
`records/strategy.py`. All layouts train the same model on the same global batch from the same weights. What they send
is counted in one step, by axis; how long the stages of a pipeline stand still is timed in further steps, beside the
bubble of theory, which assumes stages that take equally long and messages that take no time.

A mesh that does not divide the model or the batch is left out, with the reason. Of a model that `plan` knows, its step
for every mesh is shown next to the measured one (`planned.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from scalelab.analysis.estimate import Estimate, confine
from scalelab.analysis.stats import estimate_location
from scalelab.analysis.traffic import count_members, count_wire_bytes
from scalelab.checks import check_at_least
from scalelab.errors import UsageError
from scalelab.records.refusals import check_strategy
from scalelab.records.strategies import choose_of_mesh, find_strategy
from scalelab.records.strategy import AXES, STAGES_PER_RANK, Mesh, PipelineTimes, list_meshes, parse_mesh
from scalelab.records.trial import Trial, TrialResult
from scalelab.report.charts.column_charts import draw_columns, keep_charts
from scalelab.report.document import Chart, Document, Section, Table
from scalelab.report.findings import DETAIL, REASON, Caution, CautionKind, Finding, FindingKind
from scalelab.report.tables import Field, bytes_column, make_column, make_table, text_column
from scalelab.studies.shared.arms import Arm, group_arms, read_counted
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import LINK, Configuration, Sampling, Study, plan_link
from scalelab.studies.shared.sweep import (
    CONTROL,
    Sweep,
    describe_measurement,
    find_sweep_cautions,
    make_sweep_table,
    memory_column,
    name_fastest,
    plan_sweep,
    relative_column,
    samples_column,
    step_column,
)
from scalelab.studies.strategies.planned import (
    ALONE,
    compare_plan,
    list_alone,
    read_shape,
    time_phases,
)
from scalelab.units import format_bytes, format_count, format_known, format_share
from scalelab.workloads.source import defines, is_in_library
from scalelab.workloads.workload import Divisible

LEAST_MEMORY = FindingKind("least-memory", "The layout with the lowest peak memory per rank", REASON, ("bytes",))
BUBBLE = FindingKind(
    "pipeline-bubble", "Share of a pipeline's schedule in which ranks do not compute", REASON, ("idle", "theory")
)
LEAST_SENT = FindingKind("least-sent", "The layout that sends least per step", DETAIL, ("wire_bytes",))
LEFT_OUT = CautionKind("layouts-left-out", "Layouts that cannot run, with the reason", "wrong-work", ("layouts",))
LISTED_AXES = tuple(axis for axis in AXES if axis != "cp")
"""Of meshes that are tried without being asked for: cp runs on GPUs only."""
SENT_NOTE = "sent: the least that rank 0 puts on the wire in a step"
IDLE_NOTE = (
    "idle: share of the schedule without computing, mean over ranks, ± over the watched steps of one launch; bubble:"
    " (p − 1)/(v·m + p − 1)"
)


@dataclass(frozen=True, kw_only=True)
class Layouts(Study):
    """Measure every mesh of pipeline stages, replicas, shards and split layers that the model allows."""

    ranks: int = 2
    """Ranks of every layout."""
    global_batch: int = 16
    """Samples per step, over all ranks."""
    meshes: tuple[str, ...] = ()
    """Only these meshes, such as dp=2,tp=2; the first is the reference. Default: all that fit."""
    job: Job = field(default_factory=Job)
    sampling: Sampling = field(default_factory=lambda: Sampling(phase_steps=0, comm_free_steps=0))

    def __post_init__(self) -> None:
        check_at_least("ranks", self.ranks, 2)
        check_at_least("global_batch", self.global_batch, 1)
        if self.job.spreading.mesh:
            raise UsageError(
                f"--mesh {self.job.spreading.mesh}: this study measures every mesh of --ranks: leave it out"
            )
        for text in self.meshes:
            if parse_mesh(text).num_ranks != self.ranks:
                raise UsageError(f"--meshes {text} has {parse_mesh(text).num_ranks} ranks, not --ranks {self.ranks}")
        if self.job.script is not None:
            raise UsageError("layouts splits a model that build() returns, and a script has its own: use --workload")

    def sort_meshes(self) -> tuple[list[Mesh], dict[str, str]]:
        """The meshes that can run, replicas alone first, and why others cannot."""
        fitting, left_out = [], {}
        listed = list_meshes(self.ranks, list_axes(self.job))
        for mesh in map(parse_mesh, self.meshes) if self.meshes else listed:
            reason = find_obstacle(self.job, mesh, self.global_batch)
            if reason is None:
                fitting.append(mesh)
            else:
                left_out[mesh.text] = reason
        if not self.meshes:
            fitting.sort(key=lambda mesh: (len(mesh.axes), mesh.axes != ("dp",)))
        return fitting, left_out

    def plan(self) -> list[Trial]:
        meshes, left_out = self.sort_meshes()
        if not meshes:
            raise UsageError(f"no mesh of {self.ranks} ranks fits: {'; '.join(left_out.values())}")
        rows = [self._configure(mesh) for mesh in meshes]
        trials = plan_sweep(self.job, self.sampling, rows)
        if read_shape(self.job) is None:
            return trials
        trials = plan_sweep(self.job, self.sampling, [*rows, *list_alone(self.job, trials)])
        return [*map(time_phases, trials), *plan_link(self.job, self.sampling, self.ranks)]

    def find_notes(self) -> list[str]:
        return [caution.message for caution in warn_of_left_out(self.sort_meshes()[1])]

    def _configure(self, mesh: Mesh) -> Configuration:
        strategy = choose_of_mesh(mesh)
        record, spreading = find_strategy(strategy), self.job.spreading
        if record.axes:
            spreading = replace(spreading, mesh=mesh.text)
        return Configuration(
            name=name_mesh(mesh),
            label=mesh.text,
            strategy=strategy,
            num_ranks=self.ranks,
            global_batch=self.global_batch,
            job=replace(self.job, spreading=spreading),
            instruments=("messages", *record.instruments) if mesh.pp > 1 else ("messages",),
        )

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        meshes, left_out = self.sort_meshes()
        every = group_arms([one for one in results if one.trial.configuration != LINK], self.sampling.warmup)
        arms = {name: arm for name, arm in every.items() if name not in ALONE}
        sweep = Sweep(arms=arms, reference=arms.get(name_mesh(meshes[0])) if meshes else None)
        table = make_sweep_table(
            arms.values(), tuple(list_columns(sweep)), name_header="layout", notes=(SENT_NOTE, IDLE_NOTE)
        )
        sections = [Section(tables=(table,), charts=keep_charts(*draw_charts(table)))]
        if sweep.measured:
            sections.append(Section(heading="Sent per step by axis", tables=(make_axis_table(sweep.measured),)))
        if left_out:
            sections.append(Section(heading="Left out", tables=(make_obstacle_table(left_out),)))
        shown = [arm for name, arm in arms.items() if name != CONTROL]
        planned, ranked, doubts = compare_plan(self.job, self.global_batch, every, shown, results)
        sections[1:1] = planned
        setting = describe_measurement(
            self.job, self.sampling, arms.values(), f"{self.ranks} ranks", f"global batch {self.global_batch}"
        )
        return Document(
            title=self.title,
            question=self.question,
            setting=setting,
            sections=tuple(sections),
            findings=(*name_fastest(sweep, "layout"), *ranked, *explain_costs(sweep.measured)),
            cautions=(*find_sweep_cautions(arms, sweep.reference), *doubts, *warn_of_left_out(left_out)),
        )


UNPLANNED = Divisible(
    tp=(1, "plan for tensor parallelism (write parallelize(model, mesh) beside build)"),
    pp=(1, "plan for a pipeline (write split(model, num_stages) beside build)"),
)
"""Of a user's own model without such functions."""


def describe_left_out(left_out: Mapping[str, str]) -> str:
    """The layouts that cannot run, by reason."""
    reasons: dict[str, list[str]] = {}
    for mesh, reason in left_out.items():
        reasons.setdefault(reason.rpartition(": ")[2], []).append(mesh)
    return "; ".join(f"{' · '.join(meshes)}: {reason}" for reason, meshes in reasons.items())


def warn_of_left_out(left_out: Mapping[str, str]) -> Iterator[Caution]:
    if left_out:
        text = f"{format_count(len(left_out), 'layout')} left out: {describe_left_out(left_out)}"
        yield LEFT_OUT("", text, "change the model, its plan, --ranks or --global-batch-size", layouts=len(left_out))


def list_axes(job: Job) -> tuple[str, ...]:
    """The axes that meshes are made of: that of experts only for a model that has some."""
    sizes: Divisible = getattr(job.built_in, "divisible", Divisible())
    return tuple(axis for axis in LISTED_AXES if axis != "ep" or sizes.ep != Divisible.ep)


def name_mesh(mesh: Mesh) -> str:
    """A mesh as the name of a configuration."""
    return mesh.text.replace("=", "").replace(",", "-")


def find_obstacle(job: Job, mesh: Mesh, global_batch: int) -> str | None:
    """Why a mesh cannot run: the model, the batch or the strategy; None: it can, as far as is known before a launch."""
    found = find_model_obstacle(job, mesh)
    if found is not None:
        return found
    if global_batch % mesh.num_data_ranks:
        return f"{mesh.num_data_ranks} data ranks do not divide the global batch of {global_batch}"
    spreading = replace(job.spreading, mesh=mesh.text if find_strategy(choose_of_mesh(mesh)).axes else None)
    try:
        trial = Trial(
            configuration="one",
            workload=job.workload,
            strategy=choose_of_mesh(mesh),
            num_ranks=mesh.num_ranks,
            global_batch=global_batch,
            shape=job.shape,
            spreading=spreading,
        )
        check_strategy(trial)
    except UsageError as error:
        return str(error)
    return None


def find_model_obstacle(job: Job, mesh: Mesh) -> str | None:
    """What of a model an axis does not divide; of a user's own, whether it has functions that split it."""
    stages = mesh.pp * STAGES_PER_RANK[job.spreading.pipeline_schedule] if mesh.pp > 1 else 1
    sizes: Divisible | None = getattr(job.built_in, "divisible", None)
    if sizes is None:
        is_own = job.built_in is None
        has_tp, has_pp, has_plan = (
            is_own and defines(job.workload, name) for name in ("parallelize", "split", "_tp_plan")
        )
        has_tp = has_tp or has_plan or is_in_library(job.workload)  # the ranks say where a library's model has none
        anything = (0, "")
        missing = UNPLANNED if is_own else Divisible()
        sizes = Divisible(tp=anything if has_tp else missing.tp, pp=anything if has_pp else missing.pp)
    return sizes.find_obstacle(mesh.tp, stages, mesh.ep)


def list_columns(sweep: Sweep) -> Iterator[Field[Arm]]:
    first = "" if sweep.reference is None else sweep.reference.label
    yield step_column()
    yield relative_column(sweep.reference, f"× {first}")
    yield samples_column()
    yield memory_column()
    yield bytes_column("wire_bytes", "sent", count_wire)
    yield make_column("share", "idle_share", "idle", read_idle)
    yield make_column("share", "bubble_share", "bubble", read_bubble)


def sum_by_axis(arm: Arm) -> dict[str, float] | None:
    """Bytes that rank 0 puts on the wire in a step, by axis; a strategy without a mesh has one."""
    report, mesh = read_counted(arm), arm.trial.mesh
    if report is None:
        return None
    own = "fsdp" if find_strategy(arm.trial.strategy).shards else "dp"
    found: dict[str, float] = {}
    for message in report.messages:
        members = count_members(message.purpose, message.axis, arm.trial.num_ranks, mesh.sizes)
        sent = count_wire_bytes(message.kind, message.payload_bytes or 0, members)
        found[message.axis or own] = found.get(message.axis or own, 0.0) + (sent or 0.0)
    return found


def count_wire(arm: Arm) -> int | None:
    sent = sum_by_axis(arm)
    return None if sent is None else round(sum(sent.values()))


def list_pipelines(arm: Arm) -> list[PipelineTimes]:
    """What the ranks of a pipeline were watched at, in the first round."""
    reports = [rank.pipeline for rank in arm.reports]
    return [one for one in reports if one is not None]


def read_idle(arm: Arm) -> Estimate | None:
    """The idle share of a step, mean over ranks, with its interval over the watched steps of one launch."""
    shares = [one.idle_shares for one in list_pipelines(arm)]
    steps = [statistics.fmean(step) for step in zip(*shares, strict=False)]
    return confine(estimate_location(steps), "part") if steps else None


def read_bubble(arm: Arm) -> float | None:
    return next((one.bubble for one in list_pipelines(arm)), None)


def make_axis_table(arms: Sequence[Arm]) -> Table:
    """What rank 0 sends over every axis."""

    def read_axis(axis: str) -> Field[Arm]:
        return bytes_column(f"{axis}_bytes", axis, lambda arm: (sum_by_axis(arm) or {}).get(axis))

    return make_table(
        list(arms),
        text_column("run", "layout", lambda arm: arm.label),
        *map(read_axis, LISTED_AXES),
        notes=(SENT_NOTE,),
    )


def make_obstacle_table(left_out: Mapping[str, str]) -> Table:
    return make_table(
        list(left_out.items()),
        text_column("run", "layout", lambda row: row[0]),
        text_column("reason", "reason", lambda row: row[1]),
    )


def draw_charts(table: Table) -> Iterable[Chart | None]:
    yield draw_columns(table, ["step_seconds"], title="Step time by layout")
    yield draw_columns(table, ["peak_memory_bytes"], title="Peak memory per rank by layout")


def explain_costs(arms: Sequence[Arm]) -> Iterator[Finding]:
    """Which layout needs least memory and sends least, and how long pipelines stand still."""
    memory = {arm.label: arm.peak_memory_bytes for arm in arms if arm.peak_memory_bytes is not None}
    if len(memory) > 1:
        label = min(memory, key=lambda name: memory[name])
        text = f"{label} needs the least memory: {format_bytes(memory[label])} per rank at its peak."
        yield LEAST_MEMORY(label, text, bytes=memory[label])
    for arm in arms:
        idle, theory = read_idle(arm), read_bubble(arm)
        if idle is not None and theory is not None:
            text = (
                f"Ranks of {arm.label} are idle for {format_known('share', idle)} of the schedule; the theoretical"
                f" bubble is {format_share(theory)}."
            )
            yield BUBBLE(arm.label, text, idle=idle, theory=theory)
    sent = {arm.label: total for arm in arms if (total := count_wire(arm)) is not None}
    if len(sent) > 1:
        label = min(sent, key=lambda name: sent[name])
        yield LEAST_SENT(
            label, f"{label} sends the least: {format_bytes(sent[label])} per step.", wire_bytes=sent[label]
        )

"""`plan` beside what `layouts` measured: its step for every mesh, its error, and whether it ranks meshes right.

Besides the meshes, the study measures one rank alone, with the most and with the fewest samples that any mesh puts
through at once, and an all-reduce on two ranks by size. From these alone (`predict/calibration.py`) the machine becomes
a device of `plan`. Only transformers have a plan, so only `gpt2` has these trials.

`scalelab predict RUN` of such a run takes the same device to other numbers of ranks: the step that `plan` gives for a
mesh is multiplied by measured over planned of the meshes with the same axes that were run; of axes that none of them
has, by the geometric mean of all. How far such a factor f carries to other sizes is not known: its logarithm is given a
standard deviation of half of itself, or that of all factors where the axes were not measured, beside plan's own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scalelab.analysis.estimate import Prediction
from scalelab.analysis.link import fit_links
from scalelab.errors import UsageError
from scalelab.predict.calibration import Calibrated, MeasuredRank, calibrate, correlate_ranks
from scalelab.predict.layouts import Layout
from scalelab.predict.network_model import find_hop
from scalelab.predict.transformer_shape import Transformer
from scalelab.records.strategies import find_strategy
from scalelab.records.strategy import Mesh
from scalelab.records.tasks import Measure
from scalelab.records.trial import Trial, TrialResult
from scalelab.report.document import Document, Section, Table
from scalelab.report.findings import MAIN, REASON, Caution, CautionKind, Finding, FindingKind
from scalelab.report.tables import (
    count_column,
    make_table,
    rate_column,
    ratio_column,
    seconds_column,
    share_column,
    text_column,
)
from scalelab.studies.shared.arms import Arm, group_arms
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import LINK, Configuration
from scalelab.units import format_quantity, format_share
from scalelab.workloads.gpt2_options import Gpt2Options

if TYPE_CHECKING:
    from scalelab.studies.strategies.layouts import Layouts

ALONE = ("one-rank", "one-rank-few")
PHASE_STEPS = 4

PLAN_RANKING = FindingKind(
    "plan-ranking",
    "Measured place of the layout that plan ranks first, and the error of planned steps",
    REASON,
    ("place", "num_layouts", "correlation", "median_error"),
)
UNPLANNED = CautionKind("no-plan-beside", "plan could not be calibrated, so it is not shown beside the measurement")
PLAN_NOTE = "planned: by `plan`, calibrated by one rank and a 2-rank all-reduce on this machine; ± is its 80 % interval"


def read_shape(job: Job) -> Transformer | None:
    """The model as `plan` describes it; None if it knows no such model."""
    options: object = job.built_in
    if not isinstance(options, Gpt2Options):
        return None
    shape = options.shape
    return Transformer(
        num_layers=shape.num_layers,
        width=shape.width,
        num_heads=shape.num_heads,
        vocabulary=shape.vocabulary,
        sequence=options.num_tokens,
        num_positions=shape.context,
    )


def name_size(model: Transformer) -> Gpt2Options | None:
    """The workload that trains a planned model; None: scalelab has none of its shape."""
    for size in ("tiny", "small", "large"):
        options = Gpt2Options(size=size, dropout=0.0, vocabulary=model.vocabulary)
        shape = options.shape
        sizes = (shape.num_layers, shape.width, shape.num_heads, 4 * shape.width, shape.num_heads)
        is_alike = model.is_tied and model.has_biases and not model.is_gated
        wanted = (model.num_layers, model.width, model.num_heads, model.inner, model.kv_heads)
        if is_alike and wanted == sizes and model.sequence <= shape.context:
            return replace(options, sequence=model.sequence)
    return None


def name_mesh_of(layout: Layout) -> Mesh | None:
    """The mesh that runs a planned layout; None: no mesh shards only gradients or the optimizer state."""
    if layout.zero in (1, 2) and layout.data > 1:
        return None
    axis = "fsdp" if layout.zero == 3 else "dp"
    return Mesh(pp=layout.pipeline, tp=layout.tensor, **{axis: layout.data})


def count_pass(trial: Trial) -> int:
    """Samples that go through the model, or a stage of it, at once."""
    return trial.batch_per_rank // trial.num_micro_batches if trial.mesh.pp > 1 else trial.batch_per_pass


def list_alone(job: Job, trials: Iterable[Trial]) -> list[Configuration]:
    """One rank alone with the most and the fewest samples of a pass of any of these trials."""
    passes = {count_pass(trial) for trial in trials}
    alone = replace(job, spreading=type(job.spreading)(), shape=replace(job.shape, micro_batch=None))
    return [
        Configuration(
            name=name, label=f"1 rank, batch {batch}", strategy="single", num_ranks=1, global_batch=batch, job=alone
        )
        for name, batch in zip(ALONE, sorted({min(passes), max(passes)}, reverse=True), strict=False)
    ]


def time_phases(trial: Trial) -> Trial:
    """The trial with its phases timed, where it is one rank alone: the optimizer's is needed."""
    if trial.configuration not in ALONE or not isinstance(trial.task, Measure):
        return trial
    plan = replace(trial.task.plan, phase_steps=max(PHASE_STEPS, trial.task.plan.phase_steps))
    return replace(trial, task=Measure(plan=plan))


def describe_layout(trial: Trial) -> Layout:
    """A trial as a layout of `plan`, which knows no replicas of shards: all data ranks shard then."""
    mesh: Mesh = trial.mesh
    strategy = find_strategy(trial.strategy, trial.num_ranks)
    shards_all = mesh.fsdp > 1 if strategy.axes else "parameters" in strategy.shards
    shards_optimizer = not strategy.axes and "optimizer" in strategy.shards
    zero = 3 if shards_all else 1 if shards_optimizer else 0
    return Layout(tensor=mesh.tp, pipeline=mesh.pp, data=mesh.num_data_ranks, micro_batch=count_pass(trial), zero=zero)


def measure_machine(arms: Mapping[str, Arm], results: Sequence[TrialResult]) -> MeasuredRank:
    """What one rank alone and the link show; `UsageError` with the reason where something is missing."""
    alone = [arms[name] for name in ALONE if name in arms and arms[name].is_measured]
    if not alone:
        raise UsageError("one rank alone was not measured")
    optimizer = alone[0].phase("optimizer")
    link = next((fit for fit in fit_links(results) if fit.operation == "all_reduce" and fit.num_ranks == 2), None)
    if optimizer is None or link is None:
        raise UsageError("the optimizer phase of one rank or the link between two was not measured")
    return MeasuredRank(
        steps={arm.trial.global_batch: arm.step.value for arm in alone},
        optimizer_seconds=optimizer.value,
        link=find_hop(link.line),
        num_cores=count_shared(arms.values()),
    )


def count_shared(arms: Iterable[Arm]) -> float | None:
    """Cores that ranks share, in those of one rank; None: they do not share any, or it was not recorded."""
    crowded = next((arm for arm in arms if arm.trial.is_oversubscribed and arm.completed), None)
    if crowded is None:
        return None
    cores = {core for rank in crowded.completed[0].ranks for core in rank.cores}
    return len(cores) / (crowded.trial.threads_per_rank or 1) if cores else None


@dataclass(frozen=True, kw_only=True)
class PlannedArm:
    """A layout that was measured, and what plan says of it."""

    arm: Arm
    step: Prediction

    @property
    def error(self) -> float:
        return self.step.value / self.arm.step.value - 1


def calibrate_plan(
    job: Job, global_batch: int, arms: Mapping[str, Arm], results: Sequence[TrialResult]
) -> Calibrated | None:
    """Plan for this machine; None if plan does not know the model, or nothing was measured for it."""
    model = read_shape(job)
    if model is None or not any(name in arms for name in ALONE):
        return None
    return calibrate(model, measure_machine(arms, results), dtype=job.dtype, global_batch=global_batch)


def plan_arms(calibrated: Calibrated, arms: Iterable[Arm]) -> list[PlannedArm]:
    """Every measured layout with its plan, the fastest by plan first."""
    found = [
        PlannedArm(arm=arm, step=calibrated.predict(describe_layout(arm.trial))) for arm in arms if arm.is_measured
    ]
    return sorted(found, key=lambda one: one.step.value)


def place_measured(planned: Sequence[PlannedArm]) -> dict[str, int]:
    """From 1, the place of every layout by its measured step."""
    ranked = sorted(planned, key=lambda one: one.arm.step.value)
    return {one.arm.label: place for place, one in enumerate(ranked, start=1)}


def make_plan_table(planned: Sequence[PlannedArm]) -> Table:
    """The fastest by plan first."""
    places = place_measured(planned)
    order = {one.arm.label: place for place, one in enumerate(planned, start=1)}
    return make_table(
        list(planned),
        text_column("run", "layout", lambda one: one.arm.label),
        seconds_column("planned_seconds", "planned", lambda one: one.step),
        seconds_column("measured_seconds", "measured", lambda one: one.arm.step),
        share_column("error", "error", lambda one: one.error),
        count_column("planned_place", "planned place", lambda one: order[one.arm.label]),
        count_column("measured_place", "measured place", lambda one: places[one.arm.label]),
        notes=(PLAN_NOTE, "error: planned over measured, less 1"),
    )


def rank_plan(planned: Sequence[PlannedArm]) -> Iterator[Finding]:
    """Where plan's best was measured, and how far its steps are off."""
    if len(planned) < 2:
        return
    best, places = planned[0], place_measured(planned)
    errors = [one.error for one in planned]
    median = statistics.median(map(abs, errors))
    rho = correlate_ranks([one.step.value for one in planned], [one.arm.step.value for one in planned])
    order = "" if rho is None else f"; rank correlation {rho:.2f}"
    yield PLAN_RANKING(
        best.arm.label,
        f"plan ranks {best.arm.label} first; measured, it is {name_place(places[best.arm.label])} of"
        f" {len(planned)}{order}. Planned step times are off by {format_share(median)} in the median"
        f" ({format_share(min(errors))} to {format_share(max(errors))}).",
        place=places[best.arm.label],
        num_layouts=len(planned),
        correlation=rho,
        median_error=median,
    )


def name_place(place: int) -> str:
    return {1: "1st", 2: "2nd", 3: "3rd"}.get(place, f"{place}th")


def compare_plan(
    job: Job, global_batch: int, arms: Mapping[str, Arm], shown: Iterable[Arm], results: Sequence[TrialResult]
) -> tuple[list[Section], list[Finding], list[Caution]]:
    """The section, finding or caution about `plan`; nothing if plan does not know the model."""
    try:
        calibrated = calibrate_plan(job, global_batch, arms, results)
    except UsageError as error:
        return [], [], [UNPLANNED("", f"plan is not shown: {error}", "run it again with more --rounds")]
    if calibrated is None:
        return [], [], []
    planned = plan_arms(calibrated, shown)
    if not planned:
        return [], [], []
    section = Section(heading="Plan beside measured", tables=(make_plan_table(planned),))
    return [section], list(rank_plan(planned)), []


PREDICTED_LAYOUT = FindingKind(
    "predicted-layout",
    "Predicted fastest layout on a number of ranks that was not run, with an 80 % interval",
    MAIN,
    ("num_ranks", "step_seconds", "factor"),
)
UNMEASURED_AXES = CautionKind("unmeasured-axes", "Layouts with axes that the run did not measure have wider intervals")
OWN_CORES = CautionKind("assumed-cores", "Every added rank is assumed to have its own core")
PER_SIDE = 1.2816
"""Standard deviations from the middle to the end of an 80 % interval."""
CARRIES = 0.5
"""The standard deviation of a factor's logarithm, over itself."""


@dataclass(frozen=True, kw_only=True)
class PredictedLayout:
    """A mesh on a number of ranks that was not run."""

    trial: Trial
    step: Prediction
    factor: float
    is_measured: bool
    """Whether a mesh with the same axes was."""


def predict_layouts(
    study: Layouts, results: Sequence[TrialResult], ranks: Sequence[int], source: str, cores: int | None
) -> Document:
    """The layouts of every asked number of ranks, fastest first."""
    arms = group_arms([one for one in results if one.trial.configuration != LINK], study.sampling.warmup)
    calibrated = calibrate_plan(study.job, study.global_batch, arms, results)
    if calibrated is None:
        raise UsageError(f"{source} has no plan beside it: predict needs layouts of gpt2, measured by this version")
    if cores is not None:
        calibrated = replace(calibrated, num_cores=float(cores))
    planned = plan_arms(calibrated, [arm for name, arm in arms.items() if name not in ALONE])
    if not planned:
        raise UsageError(f"{source} measured no layout: run scalelab resume {source}")
    counts = ranks or (2 * study.ranks,)
    found = [one for count in counts for one in predict_meshes(replace(study, ranks=count), calibrated, planned)]
    tables = tuple(make_table_of([one for one in found if one.trial.num_ranks == count], study) for count in counts)
    return Document(
        title="Predicted layouts",
        question="Which layout should be fastest on a number of ranks that was not run?",
        setting=f"from {source}: {study.job.label} · {study.ranks} ranks · global batch {study.global_batch}",
        sections=tuple(Section(tables=(table,)) for table in tables),
        findings=tuple(name_best([one for one in found if one.trial.num_ranks == count]) for count in counts),
        cautions=tuple(find_doubts(found, calibrated)),
    )


def predict_meshes(study: Layouts, calibrated: Calibrated, planned: Sequence[PlannedArm]) -> list[PredictedLayout]:
    """Every mesh of the study's ranks, fastest first."""
    known: dict[tuple[str, ...], list[float]] = {}
    for one in planned:
        known.setdefault(one.arm.trial.mesh.axes, []).append(math.log(one.arm.step.value / one.step.value))
    every = [value for values in known.values() for value in values]
    trials = {trial.label: trial for trial in study.plan() if trial.num_ranks == study.ranks and trial.round == 1}
    found = []
    for label, trial in trials.items():
        if label == "control":
            continue
        own = known.get(trial.mesh.axes)
        centre = statistics.fmean(own or every)
        spread = CARRIES * abs(centre) if own else statistics.pstdev(every)
        step = scale_prediction(calibrated.predict(describe_layout(trial)), centre, spread)
        found.append(PredictedLayout(trial=trial, step=step, factor=math.exp(centre), is_measured=own is not None))
    return sorted(found, key=lambda one: one.step.value)


def scale_prediction(step: Prediction, centre: float, spread: float) -> Prediction:
    """The step times a factor whose logarithm has this mean and standard deviation."""
    low, high = (math.log(end / step.value) / PER_SIDE for end in (step.low, step.high))
    value = step.value * math.exp(centre)
    return replace(
        step,
        value=value,
        low=value * math.exp(-PER_SIDE * math.hypot(low, spread)),
        high=value * math.exp(PER_SIDE * math.hypot(high, spread)),
    )


def make_table_of(found: Sequence[PredictedLayout], study: Layouts) -> Table:
    return make_table(
        list(found),
        text_column("run", "layout", lambda one: one.trial.label),
        count_column("ranks", "ranks", lambda one: one.trial.num_ranks),
        seconds_column("step_seconds", "step", lambda one: one.step),
        rate_column("samples_per_second", "samples/s", lambda one: one.step.map(lambda s: study.global_batch / s)),
        ratio_column("factor", "factor", lambda one: one.factor),
        notes=(
            "± is the 80 % interval of the prediction",
            "factor: measured over planned of the measured layouts with the same axes; of others, of all",
        ),
    )


def name_best(found: Sequence[PredictedLayout]) -> Finding:
    best = found[0]
    rivals = [one.trial.label for one in found[1:] if one.step.low < best.step.high]
    tail = f"; {len(rivals)} others may be as fast" if rivals else ""
    return PREDICTED_LAYOUT(
        best.trial.label,
        f"On {best.trial.num_ranks} ranks {best.trial.label} should be fastest:"
        f" {format_quantity('seconds', best.step)} per step{tail}.",
        num_ranks=best.trial.num_ranks,
        step_seconds=best.step,
        factor=best.factor,
    )


def find_doubts(found: Sequence[PredictedLayout], calibrated: Calibrated) -> list[Caution]:
    unknown = [one for one in found if not one.is_measured]
    doubts = []
    if unknown:
        doubts.append(
            UNMEASURED_AXES(
                ", ".join(one.trial.label for one in unknown),
                f"{format_share(len(unknown) / len(found))} of the layouts have axes that the run did not measure",
                "measure them with `scalelab run layouts --ranks 4` or more",
            )
        )
    if calibrated.num_cores is None:
        doubts.append(
            OWN_CORES("", "every added rank is assumed to have its own core", "use --cores for a shared host")
        )
    return doubts

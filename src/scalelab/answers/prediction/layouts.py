"""`scalelab predict RUN` of a run of `layouts`: every mesh of another number of ranks, by `plan` and its errors here.

`plan`, calibrated by one rank and the link (`predict/calibration.py`), gives the step of a mesh that was not run. It is
multiplied by measured over planned of the meshes with the same axes that were run; of axes that none of them has, by
the geometric mean of all. How far such a factor f carries to other sizes is not known: its logarithm is given a
standard deviation of half of itself, or that of all factors where the axes were not measured, beside plan's own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scalelab.analysis.estimate import Prediction
from scalelab.errors import UsageError
from scalelab.predict.calibration import Calibrated
from scalelab.records.trial import Trial, TrialResult
from scalelab.report.document import Document, Section, Table
from scalelab.report.findings import MAIN, Caution, CautionKind, Finding, FindingKind
from scalelab.report.tables import count_column, make_table, rate_column, ratio_column, seconds_column, text_column
from scalelab.studies.shared.arms import group_arms
from scalelab.studies.shared.study import LINK
from scalelab.studies.strategies.layouts import Layouts
from scalelab.studies.strategies.planned import ALONE, PlannedArm, calibrate_plan, describe_layout, plan_arms
from scalelab.units import format_quantity, format_share

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

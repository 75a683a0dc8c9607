"""A scaling study's answer as a document."""

from __future__ import annotations

from collections.abc import Sequence

from scalelab.report.document import Caution, Chart, Document, Section, Table
from scalelab.studies.breakdown_charts import plot_phases, plot_rank_parts
from scalelab.studies.breakdown_table import make_breakdown_table, warn_of_rest
from scalelab.studies.cautions import find_cautions
from scalelab.studies.communication import make_communication_table
from scalelab.studies.profiled import make_traced_table
from scalelab.studies.scaling import ScalingAnswer
from scalelab.studies.scaling_charts import plot_scaling
from scalelab.studies.scaling_tables import make_law_table, make_main_table, make_time_table
from scalelab.studies.scaling_words import summarise_scaling
from scalelab.studies.study import Job, Sampling
from scalelab.studies.sweep import warn_of_control


def conclude_scaling(
    answer: ScalingAnswer,
    *,
    title: str,
    question: str,
    job: Job,
    sampling: Sampling,
    batch: str,
    ranks: Sequence[int] = (),
) -> Document:
    """Main table, where the time goes, the laws; the findings; what to be careful about. `ranks`: those planned."""
    sections = [Section(tables=(make_main_table(answer),), charts=plot_scaling(answer, ranks))]
    if answer.spread or answer.plain:
        tables = (make_time_table(answer), *_break_down_largest(answer))
        sections.append(Section(heading="Where the time goes", tables=tables, charts=_draw_times(answer)))
    laws = make_law_table(answer)
    if laws is not None:
        sections.append(Section(heading="Laws of scaling", tables=(laws,)))
    return Document(
        title=title,
        question=question,
        setting=describe_setting(answer, job, sampling, batch),
        sections=tuple(sections),
        summary=summarise_scaling(answer),
        cautions=(
            *_warn_of_control(answer),
            *find_cautions(answer.arms.values()),
            *(warn_of_rest(answer.largest) if answer.largest else ()),
            *_warn_of_extrapolation(answer),
        ),
    )


def _break_down_largest(answer: ScalingAnswer) -> tuple[Table, ...]:
    """Every rank of the largest fair row, and its communication by every way to it."""
    arm = answer.largest
    if arm is None:
        return ()
    tables = []
    if arm.trial.plan.phase_steps:
        tables.append(make_breakdown_table(arm, title=f"Every rank of {arm.label}"))
    traced = make_traced_table([arm], title=f"Communication in the profiled steps of {arm.label}")
    if traced is not None:
        tables.append(traced)
    if arm.trial.strategy == "ddp" and tables:
        tables.append(make_communication_table(answer, arm))
    return tuple(tables)


def _draw_times(answer: ScalingAnswer) -> tuple[Chart, ...]:
    """The phases of all rows, and every rank of the largest fair one."""
    ranks = plot_rank_parts(answer.largest) if answer.largest else None
    return tuple(chart for chart in (ranks, plot_phases(answer.arms.values())) if chart is not None)


def describe_setting(answer: ScalingAnswer, job: Job, sampling: Sampling, batch: str) -> str:
    """What was measured, in one line."""
    arms = list(answer.arms.values())
    device = arms[0].trial.device if arms else job.found_device
    threads = arms[0].trial.threads_per_rank if arms else job.threads_per_rank
    backend = "threads" if answer.strategy == "dp" else "nccl" if device == "cuda" else "gloo"
    dropped = arms[0].num_dropped if arms else "–"
    how = "as told" if sampling.warmup is not None else "as found"
    cores = f"{threads} core{'s' if threads != 1 else ''} per rank"
    launches = f"{sampling.launches} × {sampling.steps} steps, the first {dropped} dropped {how}"
    return " · ".join([job.label, answer.strategy, job.dtype, backend, batch, cores, launches])


def _warn_of_control(answer: ScalingAnswer) -> tuple[Caution, ...]:
    ratio = answer.control_ratio
    return () if ratio is None else tuple(warn_of_control(ratio, "plain loop"))


def _warn_of_extrapolation(answer: ScalingAnswer) -> tuple[Caution, ...]:
    usl = answer.usl
    if usl is None or usl.peak_ranks is None or usl.peak_ranks <= usl.largest_ranks:
        return ()
    return (
        Caution(
            message=f"the peak at {usl.peak_ranks:.0f} ranks lies beyond the {usl.largest_ranks} that were measured:"
            " it is an extrapolation",
            next_step="measure more ranks before relying on it",
        ),
    )

"""A scaling study's answer as a document.

The tables of a scaling study.

The rows of a scaling study's charts: both bases, every round, the laws, and what failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from scalelab.analysis.speedup import karp_flatt
from scalelab.analysis.stats import pair_medians
from scalelab.records.trial import PHASES
from scalelab.report.charts.scaling import Law, plot_efficiency, plot_speedup
from scalelab.report.document import Cell, Chart, Column, Document, Section, Table, make_cell, make_row
from scalelab.report.findings import Caution, as_findings
from scalelab.studies.scaling.answer import ScalingAnswer
from scalelab.studies.scaling.findings import summarise_scaling
from scalelab.studies.shared.arms import Arm, describe_failures, describe_status
from scalelab.studies.shared.breakdown import make_breakdown_table, plot_phases, plot_rank_parts, warn_of_rest
from scalelab.studies.shared.cautions import find_cautions
from scalelab.studies.shared.communication import make_communication_table
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.profiled import make_traced_table
from scalelab.studies.shared.sampling import Sampling
from scalelab.studies.shared.sweep import INTERVAL_NOTE, explain_marks, find_marks, warn_of_control


def make_main_table(answer: ScalingAnswer) -> Table:
    """Step time, throughput, speedup and efficiency against both bases, and what communication costs."""
    strategy = answer.strategy
    name = "speedup" if answer.is_strong else "scaled speedup"
    columns = (
        Column(key="run", header="run", align="left"),
        Column(key="step_seconds", header="step", quantity="seconds"),
        Column(key="samples_per_second", header="samples/s", quantity="rate", shows_interval=False),
        Column(key="speedup", header=name, quantity="ratio"),
        Column(key="efficiency", header="efficiency", quantity="share", shows_interval=False),
        Column(key="speedup_over_one_rank", header=f"over {strategy} × 1", quantity="ratio"),
        Column(key="efficiency_over_one_rank", header="efficiency", quantity="share", shows_interval=False),
        Column(key="exposed_share", header="exposed comm", quantity="share"),
    )
    rows = tuple(_make_main_row(answer, arm, len(columns)) for arm in answer.arms.values())
    base = answer.base
    reference = f"{name} and the first efficiency are over the {base.label}" if base else "no reference was measured"
    return Table(columns=columns, rows=rows, notes=(INTERVAL_NOTE, reference, *explain_marks(answer.arms.values())))


def _make_main_row(answer: ScalingAnswer, arm: Arm, num_columns: int) -> tuple[Cell, ...]:
    name = make_cell(arm.label, mark=find_marks(arm))
    if not arm.is_measured:
        status = arm.failure.status.replace("_", " ") if arm.failure else "not run yet"
        return (name, make_cell(status), *(Cell() for _ in range(num_columns - 2)))
    exposed = answer.exposed(arm)
    is_base, is_one_rank = arm is answer.base, arm is answer.one_rank
    return make_row(
        name,
        arm.step,
        arm.step.map(lambda seconds: arm.trial.global_batch / seconds),
        1.0 if is_base else answer.speedup(arm, answer.base),
        1.0 if is_base else answer.efficiency(arm, answer.base),
        1.0 if is_one_rank else _over_one_rank(answer, arm, is_speedup=True),
        1.0 if is_one_rank else _over_one_rank(answer, arm, is_speedup=False),
        exposed.share if exposed and arm.trial.num_ranks > 1 else None,
    )


def _over_one_rank(answer: ScalingAnswer, arm: Arm, *, is_speedup: bool) -> Cell:
    if arm.trial.strategy == "single":
        return Cell()
    find = answer.speedup if is_speedup else answer.efficiency
    return make_cell(find(arm, answer.one_rank))


def make_time_table(answer: ScalingAnswer) -> Table:
    """Where a step's time goes, and communication by both methods."""
    ideal = "T_N − T_1/N" if answer.is_strong else "T_N − T_1"
    columns = (
        Column(key="run", header="run", align="left"),
        *(Column(key=f"{phase}_seconds", header=phase, quantity="seconds") for phase in PHASES),
        Column(key="exposed_seconds", header="comm by ablation", quantity="seconds"),
        Column(key="excess_seconds", header="comm by subtraction", quantity="seconds"),
        Column(key="skew_seconds", header="start skew", quantity="seconds"),
        Column(key="peak_memory_bytes", header="peak memory", quantity="bytes"),
    )
    rows = []
    for arm in answer.arms.values():
        if not arm.is_measured:
            continue
        exposed = answer.exposed(arm)
        rows.append(
            make_row(
                make_cell(arm.label, mark=find_marks(arm)),
                *(arm.phase(phase) for phase in PHASES),
                exposed.seconds if exposed else None,
                answer.excess(arm),
                arm.start_skew_seconds,
                arm.peak_memory_bytes,
            )
        )
    notes = (
        INTERVAL_NOTE,
        "phases: medians of steps timed phase by phase; backward includes the gradient exchange",
        "ablation: a step less a step without the gradient exchange, in the same launch",
        f"subtraction: {ideal}, with T_1 of {answer.strategy} × 1; it also counts computation that does not shrink",
    )
    return Table(columns=columns, rows=tuple(rows), notes=notes)


def make_law_table(answer: ScalingAnswer) -> Table | None:
    """Measured speedup beside the laws fitted to it; None with a single number of ranks."""
    fit = answer.amdahl or answer.gustafson
    if fit is None:
        return None
    law = "Amdahl" if answer.is_strong else "Gustafson"
    columns = (
        Column(key="ranks", header="ranks", quantity="count"),
        Column(key="ideal", header="ideal", quantity="ratio"),
        Column(key="measured", header="measured", quantity="ratio"),
        Column(key="law", header=f"{law} fit", quantity="ratio"),
        Column(key="usl", header="USL fit", quantity="ratio"),
        Column(key="karp_flatt", header="Karp–Flatt", quantity="share"),
    )
    rows = []
    for arm in answer.fair:
        n = arm.trial.num_ranks
        speedup = answer.speedup(arm, answer.one_rank)
        serial = karp_flatt(speedup, n) if speedup and speedup.value > 1 and answer.is_strong else None
        law_speedup = 1.0 if n == 1 else fit.predict_speedup(n) if fit.serial_fraction.value < 1 else None
        usl = answer.usl.predict_speedup(n) if answer.usl else None
        rows.append(make_row(n, float(n), 1.0 if n == 1 else speedup, law_speedup, usl, serial))
    return Table(columns=columns, rows=tuple(rows), notes=_explain_laws(answer, law))


def _explain_laws(answer: ScalingAnswer, law: str) -> tuple[str, ...]:
    notes = [
        INTERVAL_NOTE,
        f"all over {answer.strategy} × 1; fitted to these rows, for diagnosis and not for prediction",
    ]
    fit = answer.amdahl or answer.gustafson
    if len(answer.fair) == 2 and fit is not None and fit.residual_ratio < 1e-6:
        notes.append(f"two sizes determine the {law} fit exactly: it cannot be checked against them")
    if answer.usl is None:
        notes.append("the universal scalability law (USL) needs three sizes")
    if len(answer.fair) < len(answer.spread):
        notes.append("oversubscribed runs are left out: sharing cores is another regime")
    return tuple(notes)


OVERSUBSCRIBED = "ranks share cores"
Made = dict[str, Any]


def plot_scaling(answer: ScalingAnswer, planned: Sequence[int]) -> tuple[Chart, ...]:
    """Speedup and efficiency over both bases; nothing where none was measured on more than one rank."""
    bases = list_bases(answer)
    rows = [
        row for name, base in bases.items() for arm in answer.spread for row in make_points(answer, arm, name, base)
    ]
    if not any(row["ranks"] > 1 for row in rows):
        return ()
    raw = [row for name, base in bases.items() for arm in answer.spread for row in make_rounds(answer, arm, name, base)]
    failed = list(list_failed(answer, planned, next(iter(bases))))
    laws = find_laws(answer)
    caption = write_caption(answer, failed)
    reach = max((arm.trial.num_ranks for arm in answer.fair), default=None)
    name = "speedup" if answer.is_strong else "scaled speedup"
    return (
        plot_speedup(rows=rows, raw=raw, laws=laws, failed=failed, reach=reach, name=name, caption=caption),
        plot_efficiency(rows=rows, raw=raw, laws=laws, failed=failed, reach=reach, caption=caption),
    )


def list_bases(answer: ScalingAnswer) -> dict[str, Arm]:
    """What speedups refer to, by the name of the series."""
    words = {"the plain loop": answer.plain, f"{answer.strategy} × 1": answer.one_rank}
    return {f"over {name}": arm for name, arm in words.items() if arm is not None}


def make_points(answer: ScalingAnswer, arm: Arm, name: str, base: Arm) -> Iterator[Made]:
    """One point; the base itself is 1 without an interval."""
    is_base = arm is base
    speedup, efficiency = answer.speedup(arm, base), answer.efficiency(arm, base)
    if not is_base and speedup is None:
        return
    yield describe_place(arm, name) | {
        "speedup": 1.0 if is_base else speedup,
        "efficiency": 1.0 if is_base else efficiency,
    }


def describe_place(arm: Arm, name: str) -> Made:
    trial = arm.trial
    note = OVERSUBSCRIBED if trial.is_oversubscribed else f"{trial.num_hosts} hosts" if trial.num_hosts > 1 else ""
    regime = f"{name} {trial.strategy} {note}"
    return {"series": name, "ranks": trial.num_ranks, "regime": regime, "note": note or "–", "key": arm.label}


def make_rounds(answer: ScalingAnswer, arm: Arm, name: str, base: Arm) -> Iterator[Made]:
    """The same of every round alone."""
    if arm is base:
        return
    times = pair_medians([base.clean, arm.clean])
    num_ranks = arm.trial.num_ranks
    place = describe_place(arm, name)
    for before, after in times.T:
        speedup = float(before / after) * (1 if answer.is_strong else num_ranks)
        yield place | {"speedup": speedup, "efficiency": speedup / num_ranks, "note": "one round"}


def find_laws(answer: ScalingAnswer) -> dict[str, Law]:
    """The fits, as speedups over one rank of the strategy."""
    laws: dict[str, Law] = {}
    fit = answer.amdahl or answer.gustafson
    if fit is not None and fit.serial_fraction.value < 1:
        laws["Amdahl" if answer.is_strong else "Gustafson"] = lambda num_ranks: fit.predict_speedup(num_ranks).value
    usl = answer.usl
    if usl is not None:
        laws["USL"] = usl.predict_speedup
    return laws


def list_failed(answer: ScalingAnswer, planned: Sequence[int], series: str) -> Iterator[Made]:
    """The numbers of ranks that were to be measured and were not."""
    of_strategy = {arm.trial.num_ranks: arm for arm in answer.arms.values() if arm.trial.strategy == answer.strategy}
    for num_ranks in sorted({*planned, *of_strategy}):
        arm = of_strategy.get(num_ranks)
        if arm is None or not arm.is_measured:
            label = arm.label if arm else f"{answer.strategy} × {num_ranks}"
            yield {"series": series, "ranks": num_ranks, "key": label, "status": describe_status(arm), "note": "–"}


def write_caption(answer: ScalingAnswer, failed: Sequence[Made]) -> str:
    """What is drawn, and what is not."""
    said = ["Bars are 95 % confidence intervals, faint points single rounds."]
    laws = find_laws(answer)
    if laws:
        names = " and ".join(laws)
        said.append(
            f"{names}: fitted to {answer.strategy} on ranks with cores of their own, over {answer.strategy} × 1."
        )
    if any(arm.trial.is_oversubscribed for arm in answer.spread):
        said.append("Ranks that share cores are another regime: no line leads to them.")
    bases = [arm for arm in answer.arms.values() if arm.trial.strategy != answer.strategy and not arm.is_measured]
    missing = [*((row["key"], row["status"]) for row in failed), *((arm.label, describe_status(arm)) for arm in bases)]
    return " ".join([*said, *describe_failures(missing)])


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
        findings=as_findings(summarise_scaling(answer)),
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

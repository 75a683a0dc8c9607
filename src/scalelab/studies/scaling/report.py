"""A scaling study's answer as a document: the tables, the charts, and what to be careful about."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import karp_flatt
from scalelab.analysis.stats import pair_medians
from scalelab.records.settings import find_kind
from scalelab.records.strategies import find_strategy
from scalelab.records.trial import PHASES
from scalelab.report.charts.column_charts import Law, plot_efficiency, plot_speedup
from scalelab.report.document import Chart, Document, Section, Table
from scalelab.report.findings import MAIN, Caution, CautionKind, Finding, FindingKind
from scalelab.report.tables import (
    INTERVAL_NOTE,
    PAIRED_NOTE,
    Field,
    count_column,
    make_table,
    ratio_column,
    seconds_column,
    share_column,
    text_column,
)
from scalelab.studies.scaling.answer import ScalingAnswer, find_findings
from scalelab.studies.shared.accelerators import make_device_sections, name_device_findings
from scalelab.studies.shared.arms import Arm, describe_failures, describe_status
from scalelab.studies.shared.breakdown import make_breakdown_table, plot_phases, plot_rank_parts, warn_of_rest
from scalelab.studies.shared.cautions import EXTRAPOLATED, find_cautions
from scalelab.studies.shared.communication import METHOD_NAMES, find_traced_step, make_traced_table
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.step_charts import thin
from scalelab.studies.shared.study import Sampling, Study
from scalelab.studies.shared.sweep import (
    describe_measurement,
    make_sweep_table,
    memory_column,
    samples_column,
    step_column,
    warn_of_control,
)
from scalelab.units import format_count, format_times

UNEQUAL_WORK = CautionKind(
    "unequal-work", "Rows of a script take different numbers of samples per step than the study plans", "wrong-work"
)
COPIES = FindingKind(
    "separate-models", "Ranks of a script each train their own model: their combined throughput", MAIN, ("ratio",)
)
COUNTED = {
    "ablation": "a step minus a step without the all-reduce: all-reduce, waiting, what it takes from backward",
    "phases": "from the last rank's last gradient on",
    "counters": "the same by DDP's clocks, in one launch",
    "trace": "collectives that do not overlap with compute, in profiled steps",
    "subtraction": "every loss against ideal scaling",
}
"""What each method counts."""


def make_main_table(answer: ScalingAnswer) -> Table:
    """Step time, throughput, speedup and efficiency against both bases, and what communication costs."""
    base, one_rank = answer.base, answer.one_rank

    def over_one_rank(arm: Arm, estimate: Estimate | None) -> Estimate | float | None:
        return 1.0 if arm is one_rank else None if find_strategy(arm.trial.strategy).is_plain else estimate

    def read_exposed(arm: Arm) -> Estimate | None:
        exposed = answer.exposed(arm)
        return exposed.share if exposed and arm.trial.num_ranks > 1 else None

    name, over = "speedup" if answer.is_strong else "scaled speedup", f"over {answer.strategy} × 1"
    plain = " (no process group)" if base is answer.plain else ""
    reference = (
        f"{name} and efficiency: over {'the ' if plain else ''}{base.label}{plain}"
        if base
        else "no reference was measured"
    )
    columns: list[Field[Arm]] = [
        step_column(),
        samples_column(),
        ratio_column("speedup", name, lambda arm: 1.0 if arm is base else answer.speedup(arm, base)),
        share_column(
            "efficiency",
            "efficiency",
            lambda arm: 1.0 if arm is base else answer.efficiency(arm, base),
            shows_interval=False,
        ),
        ratio_column(
            "speedup_over_one_rank",
            over,
            lambda arm: over_one_rank(arm, answer.speedup(arm, one_rank)),
            is_detail=True,
        ),
        share_column(
            "efficiency_over_one_rank",
            f"efficiency {over}",
            lambda arm: over_one_rank(arm, answer.efficiency(arm, one_rank)),
            shows_interval=False,
            is_detail=True,
        ),
        share_column("exposed_share", "exposed comm", read_exposed),
    ]
    return make_sweep_table(answer.arms.values(), columns, notes=(reference, PAIRED_NOTE))


def make_time_table(answer: ScalingAnswer) -> Table:
    """Where a step's time goes, and communication by both methods."""
    ideal = "T_N − T_1/N" if answer.is_strong else "T_N − T_1"

    def phase_column(phase: str) -> Field[Arm]:
        return seconds_column(f"{phase}_seconds", phase, lambda arm: arm.phase(phase))

    columns: list[Field[Arm]] = [
        *(phase_column(phase) for phase in PHASES),
        seconds_column(
            "exposed_seconds",
            "comm by ablation",
            lambda arm: exposed.seconds if (exposed := answer.exposed(arm)) else None,
        ),
        seconds_column("excess_seconds", "comm by subtraction", answer.excess),
        seconds_column("skew_seconds", "start skew", lambda arm: arm.start_skew_seconds),
        memory_column(),
    ]
    notes = (
        "phases: medians of steps timed phase by phase; backward includes the gradient all-reduce",
        "ablation: a step minus a step without the gradient all-reduce, in the same launch",
        f"subtraction: {ideal}, with T_1 of {answer.strategy} × 1; it also counts compute that does not shrink",
    )
    return make_sweep_table([arm for arm in answer.arms.values() if arm.is_measured], columns, notes=notes)


def make_methods_table(answer: ScalingAnswer, arm: Arm) -> Table:
    """Communication by every method."""
    methods = answer.list_methods(arm)

    def find_share(name: str) -> Estimate | None:
        seconds = methods[name]
        step = (find_traced_step(arm) if name == "trace" else None) or arm.step.value
        return None if seconds is None else seconds.map(lambda value: value / step)

    return make_table(
        methods,
        text_column("method", "communication by", lambda name: METHOD_NAMES[name]),
        seconds_column("seconds", "a step", lambda name: methods[name]),
        share_column("share", "of the step", find_share),
        text_column("counts", "what it counts", lambda name: COUNTED[name]),
        title=f"Communication of {arm.label}, by every method",
        notes=(INTERVAL_NOTE, "of the step: of a clean one; by trace, of the profiled step, which is longer"),
    )


def make_law_table(answer: ScalingAnswer) -> Table | None:
    """Measured speedup beside the laws fitted to it; None with a single number of ranks."""
    fit = answer.amdahl or answer.gustafson
    if fit is None:
        return None
    law, usl = "Amdahl" if answer.is_strong else "Gustafson", answer.usl

    def read_speedup(arm: Arm) -> Estimate | float | None:
        return 1.0 if arm.trial.num_ranks == 1 else answer.speedup(arm, answer.one_rank)

    def read_law(arm: Arm) -> Estimate | float | None:
        n = arm.trial.num_ranks
        return 1.0 if n == 1 else fit.predict_speedup(n) if fit.serial_fraction.value < 1 else None

    def read_serial(arm: Arm) -> Estimate | None:
        speedup = answer.speedup(arm, answer.one_rank)
        is_known = speedup is not None and speedup.value > 1 and answer.is_strong
        return karp_flatt(speedup, arm.trial.num_ranks) if speedup and is_known else None

    notes = [INTERVAL_NOTE, f"all over {answer.strategy} × 1; fitted to these rows to explain them, not to predict"]
    if len(answer.fair) == 2 and fit.residual_ratio < 1e-6:
        notes.append(f"two sizes determine the {law} fit exactly: they cannot check it")
    if usl is None:
        notes.append("the universal scalability law (USL) needs three sizes")
    if len(answer.fair) < len(answer.spread):
        notes.append("oversubscribed rows are left out: these laws do not hold for ranks that share cores")
    return make_table(
        answer.fair,
        count_column("ranks", "ranks", lambda arm: arm.trial.num_ranks),
        ratio_column("ideal", "ideal", lambda arm: float(arm.trial.num_ranks)),
        ratio_column("measured", "measured", read_speedup),
        ratio_column("law", f"{law} fit", read_law),
        ratio_column("usl", "USL fit", lambda arm: usl.predict_speedup(arm.trial.num_ranks) if usl else None),
        share_column("karp_flatt", "Karp–Flatt", read_serial),
        notes=notes,
    )


OVERSUBSCRIBED = "ranks share cores"
Made = dict[str, Any]
MOST_ROUNDS = 100
"""Rounds of one configuration that are drawn beside its median."""


def plot_scaling(answer: ScalingAnswer, planned: Sequence[int]) -> tuple[Chart, ...]:
    """Speedup and efficiency over both bases; nothing where none was measured on more than one rank."""
    bases = list_bases(answer)
    rows = [
        row for name, base in bases.items() for arm in answer.spread for row in make_points(answer, arm, name, base)
    ]
    if not any(row["ranks"] > 1 for row in rows):
        return ()
    raw = [row for name, base in bases.items() for arm in answer.spread for row in make_rounds(arm, name, base)]
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


def make_rounds(arm: Arm, name: str, base: Arm) -> Iterator[Made]:
    """The same of every round alone; of very many, some, evenly chosen."""
    if arm is base:
        return
    times = thin(list(pair_medians([base.clean, arm.clean]).T), MOST_ROUNDS)
    num_ranks, samples, base_samples = arm.trial.num_ranks, arm.step_samples, base.step_samples
    place = describe_place(arm, name)
    for before, after in times:
        speedup = float(before / after) * samples / base_samples
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
        why = ": the fit does not hold for them" if laws else ", which share cores"
        said.append(f"No line leads to oversubscribed ranks{why}.")
    bases = [arm for arm in answer.arms.values() if arm.trial.strategy != answer.strategy and not arm.is_measured]
    missing = [*((row["key"], row["status"]) for row in failed), *((arm.label, describe_status(arm)) for arm in bases)]
    return " ".join([*said, *describe_failures(missing)])


def conclude_scaling(study: Study, answer: ScalingAnswer, batch: str, ranks: Sequence[int]) -> Document:
    """Main table, where the time goes, the laws; the findings; what to be careful about. `ranks`: those planned."""
    sections = [Section(tables=(make_main_table(answer),), charts=plot_scaling(answer, ranks))]
    if answer.spread or answer.plain:
        tables = (make_time_table(answer), *_break_down_largest(answer))
        sections.append(Section(heading="Where the time goes", tables=tables, charts=_draw_times(answer)))
    laws = make_law_table(answer)
    if laws is not None:
        sections.append(Section(heading="Scaling laws", tables=(laws,)))
    arms = [arm for arm in answer.arms.values() if arm.is_measured]
    sections += make_device_sections(arms)
    return Document(
        title=study.title,
        question=study.question,
        setting=_describe_setting(answer, study.job, study.sampling or Sampling(), batch),
        sections=tuple(sections),
        findings=(*_find_findings(answer), *name_device_findings(arms)),
        cautions=(
            *(warn_of_control(*answer.controlled) if answer.controlled else ()),
            *_warn_of_work(answer),
            *find_cautions(answer.arms.values()),
            *(warn_of_rest(answer.largest) if answer.largest else ()),
            *_warn_of_extrapolation(answer),
        ),
    )


def _find_findings(answer: ScalingAnswer) -> Iterator[Finding]:
    """Ranks that each train their own model have no speedup, so only that is said."""
    alone = [arm for arm in answer.spread if arm.is_alone]
    yield from (_describe_copies(answer, arm) for arm in alone)
    if not alone:
        yield from find_findings(answer)


def _describe_copies(answer: ScalingAnswer, arm: Arm) -> Finding:
    """What ranks that send each other nothing do together; it is not a speedup."""
    num_ranks, over = arm.trial.num_ranks, answer.compare_work(arm, answer.base)
    rate = f"; together they did {format_times(over)} the work per second of one" if over is not None else ""
    text = (
        f"The {num_ranks} ranks trained {num_ranks} separate models, not one: they sent each other nothing through"
        f" torch.distributed{rate}. How training scales is unknown."
    )
    return COPIES(arm.label, text, ratio=over)


def _break_down_largest(answer: ScalingAnswer) -> Iterator[Table]:
    """Every rank of the largest row with cores of its own, and its communication by every method."""
    arm = answer.largest
    if arm is None:
        return
    has_phases = arm.trial.step_plan is not None and arm.trial.step_plan.phase_steps > 0
    traced = make_traced_table([arm], title=f"Communication in the profiled steps of {arm.label}")
    if has_phases:
        yield make_breakdown_table(arm, title=f"Every rank of {arm.label}")
    if traced is not None:
        yield traced
    if find_strategy(arm.trial.strategy).can_skip_communication and (traced is not None or has_phases):
        yield make_methods_table(answer, arm)


def _draw_times(answer: ScalingAnswer) -> tuple[Chart, ...]:
    """The phases of all rows, and every rank of the largest fair one."""
    ranks = plot_rank_parts(answer.largest) if answer.largest else None
    return tuple(chart for chart in (ranks, plot_phases(answer.arms.values())) if chart is not None)


def _describe_setting(answer: ScalingAnswer, job: Job, sampling: Sampling, batch: str) -> str:
    arms = list(answer.arms.values())
    device = arms[0].trial.device if arms else job.found_device
    backend = "threads" if find_strategy(answer.strategy).has_replicas else find_kind(device).backend
    return describe_measurement(job, sampling, arms, answer.strategy, job.dtype, backend, batch)


def _warn_of_work(answer: ScalingAnswer) -> Iterator[Caution]:
    """A script whose rows take other samples per step than the study compares."""
    if answer.has_planned_work:
        return
    taken = ", ".join(f"{arm.label} takes {arm.step_samples}{_count_passes(arm)}" for arm in answer.spread)
    yield UNEQUAL_WORK(
        "",
        f"rows differ in samples per step: {taken}; speedup compares samples/s, and no law is fitted",
        "let the placeholders or the script divide the batch by the ranks, not both",
    )


def _count_passes(arm: Arm) -> str:
    passes = next((one.num_passes for one in arm.scripts if one.num_passes), None)
    return "" if passes is None else f" in {format_count(passes, 'pass')}"


def _warn_of_extrapolation(answer: ScalingAnswer) -> Iterator[Caution]:
    usl = answer.usl
    if usl is not None and usl.peak_ranks is not None and usl.peak_ranks > usl.largest_ranks:
        yield EXTRAPOLATED(
            "",
            f"the USL peak at {usl.peak_ranks:.0f} ranks is an extrapolation: {usl.largest_ranks} were measured",
            "measure more ranks before relying on it",
            ranks=usl.peak_ranks,
            largest_ranks=usl.largest_ranks,
        )

"""The tables of a scaling study."""

from __future__ import annotations

from scalelab.analysis.speedup import karp_flatt
from scalelab.report.document import Cell, Column, Table, make_cell, make_row
from scalelab.studies.arms import Arm
from scalelab.studies.scaling import ScalingAnswer
from scalelab.studies.sweep import INTERVAL_NOTE, explain_marks, find_marks
from scalelab.trial import PHASES


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

"""The numbers, tables and sentences that answer `imbalance`.

The model of a step with one slow rank is the maximum over ranks: T = max_r (own time of r) + exchange. A delay d on one
rank of a balanced job therefore adds to the step in full, T(d) = T + d, as a serial part does in Amdahl's law.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.scaling_laws import add_delay
from scalelab.analysis.stats import estimate_difference, estimate_median, estimate_ratio, judge
from scalelab.records.settings import Perturbation
from scalelab.report.charts.axes import Axis
from scalelab.report.charts.plot import plot_bars
from scalelab.report.document import Chart, Column, Table, make_row
from scalelab.report.findings import Caution
from scalelab.studies.shared.arms import Arm, describe_status
from scalelab.studies.shared.breakdown import explain_strategy, waits_for_buffers
from scalelab.studies.shared.sweep import (
    INTERVAL_NOTE,
    SweepColumn,
    compare_steps,
    make_sweep_table,
    samples_column,
    step_column,
)
from scalelab.studies.straggler.answer import Diagnosis, name_slow_rank, name_waiting
from scalelab.units import format_interval, format_quantity, format_share

PLAIN, UNDISTURBED, DISTURBED = "as it is", "undisturbed", "disturbed"


@dataclass(frozen=True, kw_only=True)
class ImbalanceAnswer:
    """The rows of the study, and what can be asked of them."""

    arms: Mapping[str, Arm]
    perturbation: Perturbation
    """What was injected: for the model, never for the diagnosis."""

    @cached_property
    def looked_at(self) -> Arm | None:
        """The row that is diagnosed: the disturbed one, or the only one."""
        if self.perturbation.seconds:
            return self.arms.get(DISTURBED)
        return next(iter(self.arms.values()), None)

    @cached_property
    def undisturbed(self) -> Arm | None:
        arm = self.arms.get(UNDISTURBED)
        return arm if arm is not None and arm.is_measured else None

    @cached_property
    def disturbed(self) -> Arm | None:
        arm = self.arms.get(DISTURBED)
        return arm if arm is not None and arm.is_measured else None

    @cached_property
    def diagnoses(self) -> dict[str, Diagnosis]:
        return {name: Diagnosis(arm=arm) for name, arm in self.arms.items()}

    @property
    def diagnosis(self) -> Diagnosis:
        """Of the row that is looked at."""
        assert self.looked_at is not None
        return self.diagnoses[self.looked_at.configuration]

    @cached_property
    def cost(self) -> Estimate | None:
        """By how much a disturbed step is longer, round by round."""
        if self.disturbed is None or self.undisturbed is None:
            return None
        return estimate_difference(self.disturbed.clean, self.undisturbed.clean)

    @cached_property
    def model_seconds(self) -> Estimate | None:
        """The undisturbed step with the delay added."""
        if self.undisturbed is None:
            return None
        return estimate_median(add_delay(self.undisturbed.clean, self.perturbation.seconds))

    @cached_property
    def distance(self) -> Estimate | None:
        """The measured step over the model's, round by round."""
        if self.disturbed is None or self.undisturbed is None:
            return None
        return estimate_ratio(self.disturbed.clean, add_delay(self.undisturbed.clean, self.perturbation.seconds))


def make_imbalance_table(answer: ImbalanceAnswer) -> Table:
    """Step, what the imbalance makes of it, and the diagnosis of every row."""

    def read_main(arm: Arm, name: str) -> str | Estimate | None:
        diagnosis = answer.diagnoses[arm.configuration]
        main = diagnosis.main
        if name == "seconds" or name == "share":
            return None if main is None else main.seconds if name == "seconds" else main.share
        if main is None:
            return "none" if diagnosis.excesses else None
        return f"rank {main.rank}" if name == "rank" else main.phase

    def read_waiting(arm: Arm) -> Estimate | None:
        longest = answer.diagnoses[arm.configuration].longest_waiting
        return None if longest is None else longest.parts["waiting"]

    columns = [
        step_column(),
        samples_column(),
        SweepColumn(
            column=Column(key="step_ratio", header="× undisturbed", quantity="ratio"),
            read=lambda arm: compare_steps(arm, answer.undisturbed),
        ),
        SweepColumn(
            column=Column(key="slow_rank", header="slow rank", align="left"), read=lambda a: read_main(a, "rank")
        ),
        SweepColumn(
            column=Column(key="slow_phase", header="phase", align="left"), read=lambda a: read_main(a, "phase")
        ),
        SweepColumn(
            column=Column(key="excess_seconds", header="excess", quantity="seconds"),
            read=lambda arm: read_main(arm, "seconds"),
        ),
        SweepColumn(
            column=Column(key="excess_share", header="of the step", quantity="share"),
            read=lambda arm: read_main(arm, "share"),
        ),
        SweepColumn(column=Column(key="waiting_seconds", header="waiting", quantity="seconds"), read=read_waiting),
    ]
    notes = ("waiting: of the rank that waits most",)
    return make_sweep_table(answer.arms.values(), columns, notes=notes)


def make_model_table(answer: ImbalanceAnswer) -> Table:
    """The measured step beside the undisturbed one with the delay added."""
    columns = (
        Column(key="model", header="model", align="left"),
        Column(key="model_seconds", header="step by the model", quantity="seconds"),
        Column(key="measured_seconds", header="measured step", quantity="seconds"),
        Column(key="distance", header="measured / model", quantity="ratio"),
        Column(key="verdict", header="verdict", align="left"),
    )
    row = make_row(
        f"undisturbed + {answer.perturbation.delay}",
        answer.model_seconds,
        answer.disturbed.step if answer.disturbed else None,
        answer.distance,
        judge(answer.distance).value if answer.distance else None,
    )
    return Table(columns=columns, rows=(row,), notes=(INTERVAL_NOTE,))


def plot_model(answer: ImbalanceAnswer) -> Chart | None:
    """The disturbed step beside the model's, and the undisturbed one below which neither can be."""
    if answer.undisturbed is None or answer.model_seconds is None:
        return None
    model = f"model: undisturbed + {answer.perturbation.delay}"
    steps = {UNDISTURBED: answer.undisturbed.step, model: answer.model_seconds}
    rows: list[dict[str, Any]] = [{"bar": name, "seconds": step, "key": name} for name, step in steps.items()]
    failed = []
    if answer.disturbed is not None:
        rows.append({"bar": DISTURBED, "seconds": answer.disturbed.step, "key": DISTURBED})
    else:
        failed.append({"bar": DISTURBED, "status": describe_status(answer.arms.get(DISTURBED))})
    return plot_bars(
        title="Against the model",
        x=Axis(field="seconds", title="step time", quantity="seconds"),
        y=Axis(field="bar", title="", quantity="text"),
        rows=rows,
        failed=failed,
        is_stacked=False,
        caption="Thin lines are 95 % confidence intervals.",
    )


def summarise_imbalance(answer: ImbalanceAnswer) -> Iterator[str]:
    """The findings, the main one first."""
    if answer.looked_at is None or not answer.looked_at.is_measured:
        return
    diagnosis = answer.diagnosis
    yield from name_slow_rank(diagnosis)
    yield from name_waiting(diagnosis)
    if not answer.perturbation.seconds:
        yield from _name_gain(diagnosis)
        return
    yield from _compare_with_injected(answer)
    yield from _name_cost(answer)
    yield from _name_distance(answer)
    if answer.undisturbed is not None:
        quiet = next(name_slow_rank(answer.diagnoses[UNDISTURBED]), "")
        if quiet:
            yield f"Without the delay: {quiet[0].lower()}{quiet[1:]}"


def _name_gain(diagnosis: Diagnosis) -> Iterator[str]:
    main = diagnosis.main
    if main is not None:
        yield (
            f"A step takes as long as its slowest rank: were rank {main.rank} as fast as rank {main.other} there, a"
            f" step would be up to {format_quantity('seconds', main.seconds.value)} shorter."
        )


def _compare_with_injected(answer: ImbalanceAnswer) -> Iterator[str]:
    """The diagnosis beside what was injected, which it did not know."""
    told, main = answer.perturbation, answer.diagnosis.main
    injected = f"{told.delay} were injected into {told.delay_phase} of rank {told.delay_rank}"
    if main is None:
        yield f"{injected}; that was not found."
    elif (main.rank, main.phase) == (told.delay_rank, told.delay_phase):
        error = main.seconds.value / told.seconds - 1
        yield f"{injected}: rank and phase were found, and the delay is off by {format_share(error)}."
    else:
        yield f"{injected}; the diagnosis is another."


def _name_cost(answer: ImbalanceAnswer) -> Iterator[str]:
    if answer.cost is None or answer.disturbed is None:
        return
    ratio = compare_steps(answer.disturbed, answer.undisturbed)
    times = f"{format_interval('ratio', ratio)} times" if isinstance(ratio, Estimate) else "–"
    yield f"The imbalance costs {format_quantity('seconds', answer.cost)} a step: {times} the undisturbed one."


def _name_distance(answer: ImbalanceAnswer) -> Iterator[str]:
    if answer.distance is None or answer.model_seconds is None or answer.disturbed is None:
        return
    yield (
        f"Model, the undisturbed step plus the delay: {format_quantity('seconds', answer.model_seconds)}; measured:"
        f" {format_quantity('seconds', answer.disturbed.step)}, {format_interval('ratio', answer.distance)} times the"
        f" model, {judge(answer.distance)}."
    )


def warn_of_limits(answer: ImbalanceAnswer) -> Iterator[Caution]:
    """What the diagnosis cannot see here."""
    arm = answer.looked_at
    if arm is None or not arm.is_measured:
        return
    if answer.diagnosis.missing_phases:
        reason = explain_strategy(arm.trial) or "the last gradients were not timed"
        yield Caution(
            message=f"only input and optimizer were compared: {reason}",
            next_step="use --strategy ddp to look at forward and backward too",
        )
    if any(waits_for_buffers(result) for result in arm.completed):
        yield Caution(
            message="ranks wait in forward for rank 0's buffers: if rank 0 is late inside forward, all seem to be",
            next_step="measure again with --no-broadcast-buffers",
        )
    if len(arm.completed) < 2:
        yield Caution(
            message="one launch cannot tell a slow rank from a slow core",
            next_step="use --rounds 8",
        )

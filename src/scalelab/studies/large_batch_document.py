"""The answer of `large-batch` as a document: the tables and the warnings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from scalelab.analysis.location import FEWEST_FOR_SIGNED_RANK
from scalelab.analysis.noise_scale import NoiseScale
from scalelab.report.document import Caution, Cell, Chart, Column, Document, Section, Table, make_cell, make_row
from scalelab.studies.large_batch_arms import (
    LABELS,
    LARGE,
    NOISE,
    SMALL,
    LearningArm,
    centre,
    compare_accuracy,
    find_noise_scales,
)
from scalelab.studies.large_batch_words import summarise_large_batch
from scalelab.studies.learning_charts import plot_epochs
from scalelab.units import format_learning_rate, format_share

SEEDS_NOTE = "± is a 95 % confidence interval over seeds, its longer arm"
DIVERGED = "‡"
DIVERGED_NOTE = f"{DIVERGED} the loss of a training became NaN, infinite or ten times its first"
STILL_RISING = 0.02
"""An accuracy that rose by more than this in the last epoch has not arrived."""
LITTLE_LEARNT = 0.5


def conclude_large_batch(arms: Mapping[str, LearningArm], *, question: str, setting: str, num_epochs: int) -> Document:
    """Where each way to train arrives, how it got there, and how noisy its gradients are."""
    compared = {name: arm for name, arm in arms.items() if name != NOISE}
    scales = find_noise_scales(arms.get(NOISE), num_epochs)
    sections = [
        Section(tables=(make_end_table(compared, num_epochs),)),
        Section(heading="The trainings", tables=(make_training_table(compared, num_epochs),)),
        Section(
            heading="By epoch",
            tables=(
                make_epoch_table("Accuracy on the test data", "accuracy", compared, LearningArm.accuracies),
                make_epoch_table("Loss on the test data", "loss", compared, LearningArm.test_losses),
            ),
            charts=_draw_epochs(compared),
        ),
    ]
    if scales:
        sections.append(Section(heading="Gradient noise", tables=(make_noise_table(scales),)))
    return Document(
        title="Large batch",
        question=question,
        setting=setting,
        sections=tuple(sections),
        summary=summarise_large_batch(arms, scales, num_epochs),
        cautions=tuple(_find_cautions(arms, scales, num_epochs)),
    )


def _draw_epochs(arms: Mapping[str, LearningArm]) -> tuple[Chart, ...]:
    charts = (
        plot_epochs("Accuracy on the test data", "accuracy", arms, LearningArm.accuracies),
        plot_epochs("Loss on the test data", "loss", arms, LearningArm.test_losses),
    )
    return tuple(chart for chart in charts if chart is not None)


def make_end_table(arms: Mapping[str, LearningArm], num_epochs: int) -> Table:
    """Where each arrives after the last epoch."""
    columns = (
        Column(key="run", header="run", align="left"),
        Column(key="accuracy", header="accuracy", quantity="accuracy"),
        Column(key="over_small", header="over small", quantity="accuracy", note=_explain(SMALL)),
        Column(key="over_large", header="over large", quantity="accuracy", note=_explain(LARGE)),
    )
    rows = tuple(_make_end_row(arm, arms, num_epochs, len(columns)) for arm in arms.values())
    marks = (DIVERGED_NOTE,) if any(arm.diverged for arm in arms.values()) else ()
    return Table(columns=columns, rows=rows, notes=(SEEDS_NOTE, *marks))


def make_training_table(arms: Mapping[str, LearningArm], num_epochs: int) -> Table:
    """What each did to get there."""
    columns = (
        Column(key="run", header="run", align="left"),
        Column(key="global_batch", header="batch", quantity="count"),
        Column(key="learning_rate", header="learning rate"),
        Column(key="num_updates", header="updates", quantity="count"),
        Column(key="train_loss", header="train loss", quantity="loss"),
        Column(key="training_seconds", header="training", quantity="seconds"),
    )
    rows = tuple(
        make_row(
            arm.label,
            arm.trial.global_batch,
            None if arm.learning_rate is None else format_learning_rate(arm.learning_rate),
            arm.num_updates,
            centre(arm, arm.train_losses(num_epochs)),
            arm.training_seconds,
        )
        for arm in arms.values()
    )
    return Table(columns=columns, rows=rows, notes=(SEEDS_NOTE,))


def _explain(name: str) -> str:
    return f"accuracy less that of the {LABELS[name]} with the same seed, in points of percent"


def _make_end_row(
    arm: LearningArm, arms: Mapping[str, LearningArm], num_epochs: int, num_columns: int
) -> tuple[Cell, ...]:
    name = make_cell(arm.label, mark=DIVERGED if arm.diverged else "")
    if not arm.completed:
        status = arm.failure.status.words if arm.failure else "not run yet"
        return (name, make_cell(status), *(Cell() for _ in range(num_columns - 2)))
    return make_row(
        name,
        centre(arm, arm.accuracies(num_epochs)),
        compare_accuracy(arm, arms.get(SMALL), num_epochs),
        compare_accuracy(arm, arms.get(LARGE), num_epochs),
    )


def make_epoch_table(
    title: str,
    key: Literal["accuracy", "loss"],
    arms: Mapping[str, LearningArm],
    read: Callable[[LearningArm, int], Mapping[int, float]],
) -> Table:
    """One row per epoch, one column per way to train."""
    columns = (
        Column(key="epoch", header="epoch", quantity="count"),
        *(Column(key=f"{name}_{key}", header=LABELS[name], quantity=key) for name in arms),
    )
    epochs = sorted({epoch for arm in arms.values() for epoch in arm.epochs})
    rows = tuple(make_row(epoch, *(centre(arm, read(arm, epoch)) for arm in arms.values())) for epoch in epochs)
    return Table(title=title, columns=columns, rows=rows, notes=(SEEDS_NOTE,))


def make_noise_table(scales: Mapping[int | None, NoiseScale]) -> Table:
    """How gradient and noise change as the training goes on."""
    columns = (
        Column(key="epoch", header="epoch", quantity="count"),
        Column(key="gradient_square", header="G²", quantity="number"),
        Column(key="noise_trace", header="tr Σ", quantity="number"),
        Column(key="noise_batch", header="noise scale", quantity="number"),
    )
    rows = tuple(
        make_row("all" if epoch is None else epoch, scale.gradient_square, scale.noise_trace, scale.batch)
        for epoch, scale in scales.items()
    )
    notes = (
        "± is a 95 % confidence interval, its longer arm; – where the gradient cannot be told from its noise",
        "G²: the squared norm of the gradient without noise; noise scale: tr Σ / G², in samples",
    )
    return Table(columns=columns, rows=rows, notes=notes)


def _find_cautions(
    arms: Mapping[str, LearningArm], scales: Mapping[int | None, NoiseScale], num_epochs: int
) -> Iterator[Caution]:
    for arm in arms.values():
        yield from _name_failure(arm)
    yield from _name_few_seeds(arms)
    yield from _name_unfinished(arms, num_epochs)
    whole = scales.get(None)
    if whole is not None and (whole.batch is None or whole.batch.low is None):
        yield Caution(
            message="the gradient cannot be told from its noise over the whole training, so that the noise scale has no"
            " upper end",
            next_step="use a larger --small-batch, more --epochs or more --seeds",
        )


def _name_failure(arm: LearningArm) -> Iterator[Caution]:
    failure = arm.failure
    if failure is not None:
        num_failed = len(arm.results) - len(arm.completed)
        yield Caution(
            message=f"{arm.label} {failure.status.words} in {num_failed} of {len(arm.results)} trainings:"
            f" {failure.reason}",
            next_step=f"{failure.status.advice}; its logs are in trials/{failure.trial.name}",
        )


def _name_few_seeds(arms: Mapping[str, LearningArm]) -> Iterator[Caution]:
    fewest = min((len(arm.completed) for arm in arms.values() if arm.completed), default=FEWEST_FOR_SIGNED_RANK)
    if fewest >= FEWEST_FOR_SIGNED_RANK:
        return
    if fewest == 1:
        message = "one seed: a difference cannot be told from the luck of its first weights"
    else:
        message = f"{fewest} seeds: intervals assume that seeds differ as a normal distribution does"
    yield Caution(message=message, next_step=f"use --seeds {FEWEST_FOR_SIGNED_RANK}")


def _name_unfinished(arms: Mapping[str, LearningArm], num_epochs: int) -> Iterator[Caution]:
    """Trainings that have not arrived are compared in speed, not in where they end."""
    rising = []
    for arm in (arm for name, arm in arms.items() if name != NOISE):
        change = compare_epochs(arm, num_epochs)
        if change is not None and change > STILL_RISING:
            rising.append(f"{arm.label} by {format_share(change)}")
    if rising:
        yield Caution(
            message=f"accuracy still rose in the last epoch: {', '.join(rising)} (points of percent); this compares how"
            " fast they learn, not where they end",
            next_step=f"use --epochs {4 * num_epochs}",
        )
    small = arms.get(SMALL)
    reached = centre(small, small.accuracies(num_epochs)) if small else None
    if reached is not None and reached.value < LITTLE_LEARNT:
        rate = "a smaller" if small and small.diverged else "a larger"
        yield Caution(
            message="the small batch itself learnt little, so that there is little to lose",
            next_step=f"use {rate} --lr, or more --epochs",
        )


def compare_epochs(arm: LearningArm, num_epochs: int) -> float | None:
    """What the last epoch added to the accuracy, on average."""
    last, before = (centre(arm, arm.accuracies(epoch)) for epoch in (num_epochs, num_epochs - 1))
    return None if last is None or before is None else last.value - before.value

"""The answer of `large-batch` as a document: the tables and the warnings.

The answer of `large-batch` in words: what the large batch lost, what won it back, where batches stop paying.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.learning import Change, NoiseScale, judge_change, predict_samples_ratio, predict_updates_ratio
from scalelab.analysis.stats import FEWEST_FOR_SIGNED_RANK
from scalelab.report.document import Cell, Chart, Column, Document, Section, Table, make_cell, make_row
from scalelab.report.findings import Caution, as_findings
from scalelab.studies.large_batch.answer import (
    LABELS,
    LARGE,
    NOISE,
    SCALED,
    SMALL,
    WARMED,
    LearningArm,
    centre,
    compare_accuracy,
    find_noise_scales,
)
from scalelab.studies.shared.learning_charts import plot_epochs
from scalelab.units import format_interval, format_learning_rate, format_quantity, format_share


def summarise_large_batch(
    arms: Mapping[str, LearningArm], scales: Mapping[int | None, NoiseScale], num_epochs: int
) -> tuple[str, ...]:
    """The findings, the main one first."""
    return tuple(_find_sentences(arms, scales, num_epochs))


def _find_sentences(
    arms: Mapping[str, LearningArm], scales: Mapping[int | None, NoiseScale], num_epochs: int
) -> Iterator[str]:
    yield from _describe_loss(arms, num_epochs)
    for name, cure, before in ((SCALED, "Linear scaling", LARGE), (WARMED, "Warm-up on top of it", SCALED)):
        yield from _describe_cure(arms, name, cure, before, num_epochs)
    yield from _describe_divergence(arms)
    yield from _describe_noise(arms, scales)


def _describe_loss(arms: Mapping[str, LearningArm], num_epochs: int) -> Iterator[str]:
    small, large = arms.get(SMALL), arms.get(LARGE)
    change = compare_accuracy(large, small, num_epochs)
    if small is None or large is None or change is None:
        return
    words = {
        Change.LOST: f"the large batch lost {_say_points(change, -1)}",
        Change.GAINED: f"the large batch gained {_say_points(change)}",
        Change.NO_DIFFERENCE: "no difference",
        Change.UNRESOLVED: f"whether that is a loss is unresolved ({_say_interval(change)})",
    }[judge_change(change)]
    yield (
        f"After {num_epochs} epoch{'s'[: num_epochs > 1]} at the same learning rate, {_say_accuracy(small, num_epochs)}"
        f" and {_say_accuracy(large, num_epochs)} of the test images were right: {words}."
    )


def _describe_cure(
    arms: Mapping[str, LearningArm], name: str, cure: str, before: str, num_epochs: int
) -> Iterator[str]:
    """What a cure added to what was there before it, and how far that is from the small batch."""
    arm, large, small = arms.get(name), arms.get(LARGE), arms.get(SMALL)
    won = compare_accuracy(arm, arms.get(before), num_epochs)
    left = compare_accuracy(arm, small, num_epochs)
    if arm is None or won is None or left is None:
        return
    effect = {
        Change.GAINED: f"won {_say_points(won)}",
        Change.LOST: f"lost another {_say_points(won, -1)}",
        Change.NO_DIFFERENCE: "made no difference",
        Change.UNRESOLVED: f"made no difference that is resolved ({_say_interval(won)})",
    }[judge_change(won)]
    rest = {
        Change.LOST: f"{_say_points(left, -1)} below the small batch",
        Change.GAINED: f"{_say_points(left)} above the small batch",
        Change.NO_DIFFERENCE: "no different from the small batch",
        Change.UNRESOLVED: f"not resolved from the small batch ({_say_interval(left)})",
    }[judge_change(left)]
    lost = compare_accuracy(large, small, num_epochs)
    if lost is not None and judge_change(lost) is Change.LOST:
        whole = judge_change(compare_accuracy(arm, large, num_epochs) or won)
        rest += _judge_recovery(whole, judge_change(left))
    rate = "" if arm.learning_rate is None else f" (learning rate {format_learning_rate(arm.learning_rate)})"
    yield f"{cure}{rate} {effect}: {_say_accuracy(arm, num_epochs)} right, {rest}."


def _judge_recovery(over_large: Change, over_small: Change) -> str:
    """Whether what the large batch lost is back, in words."""
    if over_small in (Change.NO_DIFFERENCE, Change.GAINED):
        return "; the loss is recovered"
    if over_small is Change.LOST:
        return "; the loss is recovered in part" if over_large is Change.GAINED else "; the loss is not recovered"
    return ""


def _describe_divergence(arms: Mapping[str, LearningArm]) -> Iterator[str]:
    for name, arm in arms.items():
        if arm.diverged and name != NOISE:
            yield (
                f"{arm.label} diverged in {len(arm.diverged)} of {len(arm.completed)} trainings: the loss became NaN,"
                " infinite or more than ten times its first."
            )


def _describe_noise(arms: Mapping[str, LearningArm], scales: Mapping[int | None, NoiseScale]) -> Iterator[str]:
    small, large = arms.get(SMALL), arms.get(LARGE)
    whole = scales.get(None)
    if whole is None or whole.batch is None or small is None or large is None:
        return
    by_epoch = [(epoch, scale.batch) for epoch, scale in scales.items() if epoch is not None and scale.batch]
    course = ""
    if len(by_epoch) > 1:
        (first, begin), (last, end) = by_epoch[0], by_epoch[-1]
        course = f"; {_say_batch(begin)} in epoch {first}, {_say_batch(end)} in epoch {last}"
    places = f"{_place_batch(small, whole.batch)}, {_place_batch(large, whole.batch)}"
    yield f"The gradient noise scale is {_say_batch(whole.batch)} samples{course}: {places}."
    if whole.batch.low is None:
        return
    b, big = small.trial.global_batch, large.trial.global_batch
    samples, updates = (predict(whole.batch, big, b) for predict in (predict_samples_ratio, predict_updates_ratio))
    yield (
        f"Prediction, not measured: at the best learning rate of each, batch {big} would need"
        f" {format_interval('ratio', samples)} times the samples of batch {b} for the same loss, in"
        f" {format_interval('ratio', updates)} of its updates."
    )


def _place_batch(arm: LearningArm, scale: Estimate) -> str:
    """Where a batch lies against the noise scale."""
    batch = arm.trial.global_batch
    low, high = scale.low, scale.high
    if low is None or high is None:
        return f"batch {batch} cannot be placed"
    if batch < low:
        return f"batch {batch} lies below it, where a larger batch saves updates at little cost in samples"
    if batch > high:
        return f"batch {batch} lies above it, where a larger batch costs samples and saves few updates"
    return f"batch {batch} is about there"


def _say_accuracy(arm: LearningArm, num_epochs: int) -> str:
    reached = format_quantity("accuracy", centre(arm, arm.accuracies(num_epochs)))
    updates = "" if arm.num_updates is None else f", {arm.num_updates} updates"
    return f"{reached} (batch {arm.trial.global_batch}{updates})"


def _say_points(change: Estimate, sign: int = 1) -> str:
    """A difference in accuracy as points of percent."""
    return format_quantity("accuracy", change.map(lambda value: sign * value)).replace(" %", " points")


def _say_interval(change: Estimate) -> str:
    if change.low is None or change.high is None:
        return f"a difference of {_say_points(change)} without an interval"
    low, value, high = (f"{100 * number:+.1f}".replace("-", "−") for number in (change.low, change.value, change.high))
    return f"{value} points, {low} to {high}"


def _say_batch(scale: Estimate) -> str:
    """A noise scale with its ends: its interval is far from symmetric."""
    if scale.low is None or scale.high is None:
        return f"about {scale.value:.0f} (no upper end)"
    return f"{scale.value:.0f} ({scale.low:.0f} to {scale.high:.0f})"


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
        findings=as_findings(summarise_large_batch(arms, scales, num_epochs)),
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

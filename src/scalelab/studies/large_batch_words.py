"""The answer of `large-batch` in words: what the large batch lost, what won it back, where batches stop paying."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.learning import Change, judge_change
from scalelab.analysis.noise_scale import NoiseScale, predict_samples_ratio, predict_updates_ratio
from scalelab.studies.large_batch_arms import (
    LARGE,
    NOISE,
    SCALED,
    SMALL,
    WARMED,
    LearningArm,
    centre,
    compare_accuracy,
)
from scalelab.units import format_interval, format_learning_rate, format_quantity


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

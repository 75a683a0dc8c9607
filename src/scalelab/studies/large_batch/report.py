"""The answer of large-batch: what the large batch lost, what wins it back, and where larger batches stop paying."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.learning import (
    AccuracyChange,
    NoiseScale,
    judge_change,
    predict_samples_ratio,
    predict_updates_ratio,
)
from scalelab.analysis.stats import FEWEST_FOR_SIGNED_RANK
from scalelab.report.charts.axes import Axis
from scalelab.report.charts.column_charts import keep_charts, plot_curves
from scalelab.report.document import Chart, Section, Table, make_cell
from scalelab.report.findings import DETAIL, MAIN, REASON, Caution, CautionKind, Finding, FindingKind
from scalelab.report.tables import Field, count_column, make_column, make_table, seconds_column, text_column
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
    find_tests,
)
from scalelab.studies.shared.arms import describe_failures, join_words
from scalelab.studies.shared.cautions import UNTRAINED, name_failure
from scalelab.studies.shared.losses import ACCURACY as ACCURACY_AXIS
from scalelab.studies.shared.losses import LOSS as LOSS_AXIS
from scalelab.units import (
    format_count,
    format_interval,
    format_known,
    format_learning_rate,
    format_points,
    format_quantity,
    format_share,
)

Arms = Mapping[str, LearningArm]
Scales = Mapping[int | None, NoiseScale]
ReadEpoch = Callable[[LearningArm, int], Mapping[int, float]]

SEEDS_NOTE = "± is the 95 % CI half-width over seeds (the larger side)"
DIVERGED_MARK = "‡"
DIVERGED_NOTE = f"{DIVERGED_MARK} the loss of a seed became NaN, infinite or ten times its first"
STILL_RISING = 0.02
"""Accuracy that rose by more than this in the last epoch has not converged."""
LITTLE_LEARNT = 0.5

LOSS = FindingKind(
    "batch-accuracy", "Accuracy of the large batch against the small", MAIN, ("small", "large", "change", "verdict")
)
REMEDY = FindingKind(
    "remedy", "What scaling or warm-up recovers", REASON, ("gain", "over_small", "learning_rate", "recovery")
)
DIVERGED = FindingKind("diverged", "Training runs whose loss diverged", REASON, ("diverged", "runs"))
NOISE_SCALE = FindingKind("noise-scale", "Gradient noise scale, in samples", REASON, ("noise_batch",))
PREDICTION = FindingKind(
    "noise-scale-prediction",
    "What the noise scale predicts for the large batch",
    DETAIL,
    ("samples_ratio", "updates_ratio"),
)

NO_SCALE = CautionKind("no-noise-scale", "The gradient cannot be separated from its noise", "noise")
FEW_SEEDS = CautionKind("few-seeds", "Intervals rest on few seeds", "noise", ("seeds",))
NOT_CONVERGED = CautionKind("not-converged", "Accuracy still rose in the last epoch", "note", ("rise",))


def make_sections(arms: Arms, scales: Scales, num_epochs: int) -> Iterator[Section]:
    """Where each way to train ends, how it got there, and how noisy its gradients are."""
    compared = {name: arm for name, arm in arms.items() if name != NOISE}
    yield Section(tables=(make_end_table(compared, num_epochs),))
    yield Section(heading="Training runs", tables=(make_training_table(compared, num_epochs),))
    accuracy, loss = "Test accuracy", "Test loss"
    yield Section(
        heading="By epoch",
        tables=(
            make_epoch_table(accuracy, "accuracy", compared, LearningArm.accuracies),
            make_epoch_table(loss, "loss", compared, LearningArm.test_losses),
        ),
        charts=keep_charts(
            plot_epochs(accuracy, "accuracy", compared, LearningArm.accuracies),
            plot_epochs(loss, "loss", compared, LearningArm.test_losses),
        ),
    )
    if scales:
        yield Section(heading="Gradient noise", tables=(make_noise_table(scales),))


def make_end_table(arms: Arms, num_epochs: int) -> Table:
    """Where each ends after the last epoch."""

    def compare_column(key: str, header: str, reference: str) -> Field[LearningArm]:
        note = f"accuracy less that of the {LABELS[reference]} with the same seed, in points"
        return make_column(
            "accuracy", key, header, lambda arm: compare_accuracy(arm, arms.get(reference), num_epochs), note=note
        )

    marks = (DIVERGED_NOTE,) if any(arm.diverged for arm in arms.values()) else ()
    return make_table(
        arms.values(),
        text_column("run", "run", lambda arm: make_cell(arm.label, mark=DIVERGED_MARK if arm.diverged else "")),
        make_column("accuracy", "accuracy", "accuracy", lambda arm: centre(arm, arm.accuracies(num_epochs))),
        compare_column("over_small", "over small", SMALL),
        compare_column("over_large", "over large", LARGE),
        notes=(SEEDS_NOTE, *marks),
        status=lambda arm: arm.status,
    )


def make_training_table(arms: Arms, num_epochs: int) -> Table:
    """How each was trained."""
    return make_table(
        arms.values(),
        text_column("run", "run", lambda arm: arm.label),
        count_column("global_batch", "batch", lambda arm: arm.trial.global_batch),
        make_column(
            "text",
            "learning_rate",
            "learning rate",
            lambda arm: None if arm.learning_rate is None else format_learning_rate(arm.learning_rate),
        ),
        count_column("num_updates", "updates", lambda arm: arm.num_updates),
        make_column("loss", "train_loss", "train loss", lambda arm: centre(arm, arm.train_losses(num_epochs))),
        seconds_column("training_seconds", "training", lambda arm: arm.training_seconds),
        notes=(SEEDS_NOTE,),
    )


def make_epoch_table(title: str, key: Literal["accuracy", "loss"], arms: Arms, read: ReadEpoch) -> Table:
    """One row per epoch, one column per way to train."""

    def arm_column(name: str, arm: LearningArm) -> Field[int]:
        return make_column(key, f"{name}_{key}", LABELS[name], lambda epoch: centre(arm, read(arm, epoch)))

    first: Field[int] = count_column("epoch", "epoch", int)
    epochs = sorted({epoch for arm in arms.values() for epoch in arm.epochs})
    columns = [arm_column(name, arm) for name, arm in arms.items()]
    return make_table(epochs, first, *columns, title=title, notes=(SEEDS_NOTE,))


def plot_epochs(title: str, key: Literal["accuracy", "loss"], arms: Arms, read: ReadEpoch) -> Chart | None:
    """Every way to train by epoch: the centre over seeds with its interval, every seed as a faint line."""
    rows: list[dict[str, Any]] = []
    singles: list[dict[str, Any]] = []
    for arm in arms.values():
        for epoch in arm.epochs:
            found = centre(arm, read(arm, epoch))
            rows += [{"series": arm.label, "epoch": epoch, key: found, "key": arm.label}] if found else []
        singles += [
            {"series": arm.label, "epoch": epoch, key: value, "training": f"{arm.label} {seed}"}
            for seed, result in arm.completed.items()
            for epoch, point in find_tests(result).items()
            if (value := getattr(point, key)) is not None and len(arm.completed) > 1
        ]
    if len(rows) < 2:
        return None
    failed = [(arm.label, arm.failure.status.words) for arm in arms.values() if arm.failure and not arm.completed]
    gone = [arm.label for arm in arms.values() if arm.diverged]
    caption = join_words(
        "Bands are 95 % CIs over seeds, faint lines single seeds.",
        f"Diverged in some seed: {', '.join(gone)}." if gone else "",
        *describe_failures(failed),
    )
    x = Axis(field="epoch", title="epoch", quantity="count", from_zero=False)
    y = ACCURACY_AXIS if key == "accuracy" else LOSS_AXIS
    return plot_curves(title=title, x=x, y=y, rows=rows, singles=singles, caption=caption)


def make_noise_table(scales: Scales) -> Table:
    """How gradient and noise change during training."""
    return make_table(
        scales.items(),
        count_column("epoch", "epoch", lambda row: "all" if row[0] is None else row[0]),
        make_column("number", "gradient_square", "G²", lambda row: row[1].gradient_square),
        make_column("number", "noise_trace", "tr Σ", lambda row: row[1].noise_trace),
        make_column("number", "noise_batch", "noise scale", lambda row: row[1].batch),
        notes=(
            "± is the 95 % CI half-width (the larger side); – where the gradient cannot be separated from its noise",
            "G²: squared norm of the gradient without noise; noise scale: tr Σ / G², in samples",
        ),
    )


def summarise_large_batch(arms: Arms, scales: Scales, num_epochs: int) -> Iterator[Finding]:
    """The findings, the main one first."""
    yield from _describe_loss(arms, num_epochs)
    yield from _describe_remedy(arms, SCALED, "Linear scaling", LARGE, num_epochs)
    yield from _describe_remedy(arms, WARMED, "Warm-up on top of it", SCALED, num_epochs)
    yield from _describe_divergence(arms)
    yield from _describe_noise(arms, scales)


def _describe_loss(arms: Arms, num_epochs: int) -> Iterator[Finding]:
    small, large = arms.get(SMALL), arms.get(LARGE)
    change = compare_accuracy(large, small, num_epochs)
    if small is None or large is None or change is None:
        return
    verdict = judge_change(change)
    words = {
        AccuracyChange.LOST: f"the large batch lost {_format_points(change, -1)}",
        AccuracyChange.GAINED: f"the large batch gained {_format_points(change)}",
        AccuracyChange.NO_DIFFERENCE: "no difference",
        AccuracyChange.UNRESOLVED: f"unresolved ({_format_change(change)})",
    }[verdict]
    yield LOSS(
        large.label,
        f"After {format_count(num_epochs, 'epoch')} at the same learning rate, test accuracy is"
        f" {_format_accuracy(small, num_epochs)} and {_format_accuracy(large, num_epochs)}: {words}.",
        small=centre(small, small.accuracies(num_epochs)),
        large=centre(large, large.accuracies(num_epochs)),
        change=change,
        verdict=str(verdict),
    )


def _describe_remedy(arms: Arms, name: str, remedy: str, before: str, num_epochs: int) -> Iterator[Finding]:
    """What a remedy added to what was there before it, and how far that is from the small batch."""
    arm, large, small = arms.get(name), arms.get(LARGE), arms.get(SMALL)
    gain = compare_accuracy(arm, arms.get(before), num_epochs)
    left = compare_accuracy(arm, small, num_epochs)
    if arm is None or gain is None or left is None:
        return
    effect = {
        AccuracyChange.GAINED: f"won {_format_points(gain)}",
        AccuracyChange.LOST: f"lost another {_format_points(gain, -1)}",
        AccuracyChange.NO_DIFFERENCE: "made no difference",
        AccuracyChange.UNRESOLVED: f"made no resolved difference ({_format_change(gain)})",
    }[judge_change(gain)]
    rest = {
        AccuracyChange.LOST: f"{_format_points(left, -1)} below the small batch",
        AccuracyChange.GAINED: f"{_format_points(left)} above the small batch",
        AccuracyChange.NO_DIFFERENCE: "no different from the small batch",
        AccuracyChange.UNRESOLVED: f"not resolved from the small batch ({_format_change(left)})",
    }[judge_change(left)]
    lost, over_large = compare_accuracy(large, small, num_epochs), compare_accuracy(arm, large, num_epochs)
    recovery = _judge_recovery(lost, over_large, left)
    rate = arm.learning_rate
    said = "" if rate is None else f" (learning rate {format_learning_rate(rate)})"
    tail = f"; the loss is {recovery}" if recovery else ""
    yield REMEDY(
        arm.label,
        f"{remedy}{said} {effect}: {_format_accuracy(arm, num_epochs)}, {rest}{tail}.",
        gain=gain,
        over_small=left,
        learning_rate=rate,
        recovery=recovery or None,
    )


def _judge_recovery(lost: Estimate | None, over_large: Estimate | None, over_small: Estimate) -> str:
    """Whether what the large batch lost is back; empty if it lost nothing, or that is unresolved."""
    if lost is None or judge_change(lost) is not AccuracyChange.LOST:
        return ""
    verdict = judge_change(over_small)
    if verdict in (AccuracyChange.NO_DIFFERENCE, AccuracyChange.GAINED):
        return "recovered"
    if verdict is AccuracyChange.LOST:
        is_better = over_large is not None and judge_change(over_large) is AccuracyChange.GAINED
        return "recovered in part" if is_better else "not recovered"
    return ""


def _describe_divergence(arms: Arms) -> Iterator[Finding]:
    for name, arm in arms.items():
        if arm.diverged and name != NOISE:
            yield DIVERGED(
                arm.label,
                f"{arm.label} diverged in {len(arm.diverged)} of {len(arm.completed)} training runs: the loss became"
                " NaN, infinite or more than ten times its first.",
                diverged=len(arm.diverged),
                runs=len(arm.completed),
            )


def _describe_noise(arms: Arms, scales: Scales) -> Iterator[Finding]:
    small, large, whole = arms.get(SMALL), arms.get(LARGE), scales.get(None)
    if whole is None or whole.batch is None or small is None or large is None:
        return
    by_epoch = [(epoch, scale.batch) for epoch, scale in scales.items() if epoch is not None and scale.batch]
    over_time = ""
    if len(by_epoch) > 1:
        ends = [choose(by_epoch, key=lambda pair: pair[1].value) for choose in (min, max)]
        said = " and ".join(f"{_format_scale(scale)} in epoch {epoch}" for epoch, scale in ends)
        over_time = f", by epoch between {said}"
    places = f"{_place_batch(small, whole.batch)}, {_place_batch(large, whole.batch)}"
    text = f"The gradient noise scale is {_format_scale(whole.batch)} samples{over_time}; {places}."
    yield NOISE_SCALE("", text, noise_batch=whole.batch)
    if whole.batch.low is None:
        return
    b, big = small.trial.global_batch, large.trial.global_batch
    samples, updates = (predict(whole.batch, big, b) for predict in (predict_samples_ratio, predict_updates_ratio))
    yield PREDICTION(
        f"batch {big}",
        f"Predicted, not measured: at the best learning rate of each, batch {big} needs"
        f" {format_interval('ratio', samples)} times the samples of batch {b} for the same loss, in"
        f" {format_interval('ratio', updates)} of its updates.",
        samples_ratio=samples,
        updates_ratio=updates,
    )


def _place_batch(arm: LearningArm, scale: Estimate) -> str:
    """Where a batch lies against the noise scale."""
    batch = arm.trial.global_batch
    if scale.low is None or scale.high is None:
        return f"batch {batch} cannot be placed"
    if batch < scale.low:
        return f"batch {batch} is below it, where a larger batch saves updates at little cost in samples"
    if batch > scale.high:
        return f"batch {batch} is above it, where a larger batch costs samples and saves few updates"
    return f"batch {batch} is close to it"


def _format_accuracy(arm: LearningArm, num_epochs: int) -> str:
    found = centre(arm, arm.accuracies(num_epochs))
    reached = format_known("accuracy", found) if found else "unknown"
    updates = "" if arm.num_updates is None else f", {format_count(arm.num_updates, 'update')}"
    return f"{reached} (batch {arm.trial.global_batch}{updates})"


def _format_points(change: Estimate, sign: int = 1) -> str:
    """A difference in accuracy as points."""
    return format_quantity("accuracy", change.map(lambda value: sign * value)).removesuffix(" %") + " points"


def _format_change(change: Estimate) -> str:
    if change.low is None or change.high is None:
        return f"{_format_points(change)}, without an interval"
    low, value, high = (format_points(number, 1) for number in (change.low, change.value, change.high))
    return f"{value} points, {low} to {high}"


def _format_scale(scale: Estimate) -> str:
    """A noise scale with its ends: its interval is far from symmetric."""
    if scale.low is None or scale.high is None:
        return f"about {scale.value:.0f} (no upper end)"
    return f"{scale.value:.0f} ({scale.low:.0f} to {scale.high:.0f})"


def find_learning_cautions(arms: Arms, scales: Scales, num_epochs: int) -> Iterator[Caution]:
    """What failed, what is too short, and what rests on too few seeds."""
    for arm in arms.values():
        yield from name_failure(arm.label, arm.results, is_measured=bool(arm.completed))
    compared = [len(arm.completed) for name, arm in arms.items() if arm.completed and name != NOISE]
    fewest = min(compared, default=FEWEST_FOR_SIGNED_RANK)
    if fewest < FEWEST_FOR_SIGNED_RANK:
        luck, normal = "a difference may come from the initial weights", "intervals assume normally distributed seeds"
        words = f"{format_count(fewest, 'seed')}: {luck if fewest == 1 else normal}"
        yield FEW_SEEDS("", words, f"use --seeds {FEWEST_FOR_SIGNED_RANK}", seeds=fewest)
    yield from _name_unfinished(arms, num_epochs)
    whole = scales.get(None)
    if whole is not None and (whole.batch is None or whole.batch.low is None):
        yield NO_SCALE(
            "",
            "the gradient cannot be separated from its noise over the whole training: the noise scale has no upper end",
            "use a larger --small-batch, more --epochs or more --seeds",
        )


def _name_unfinished(arms: Arms, num_epochs: int) -> Iterator[Caution]:
    """Training that has not converged compares speed of learning, not final accuracy."""
    compared = [arm for name, arm in arms.items() if name != NOISE]
    rises = {arm.label: change for arm in compared if (change := compare_epochs(arm, num_epochs)) is not None}
    rising = {label: change for label, change in rises.items() if change > STILL_RISING}
    if rising:
        named = ", ".join(f"{label} by {format_share(change)}" for label, change in rising.items())
        yield NOT_CONVERGED(
            ", ".join(rising),
            f"accuracy still rose in the last epoch: {named} (points); this compares how fast they learn, not where"
            " they end",
            f"use --epochs {4 * num_epochs}",
            rise=max(rising.values()),
        )
    small = arms.get(SMALL)
    reached = centre(small, small.accuracies(num_epochs)) if small else None
    if reached is not None and reached.value < LITTLE_LEARNT:
        rate = "a smaller" if small and small.diverged else "a larger"
        yield UNTRAINED(
            LABELS[SMALL],
            "the small batch itself learned little: there is little to lose",
            f"use {rate} --lr, or more --epochs",
            accuracy=reached,
        )


def compare_epochs(arm: LearningArm, num_epochs: int) -> float | None:
    """What the last epoch added to the accuracy, on average."""
    last, before = (centre(arm, arm.accuracies(epoch)) for epoch in (num_epochs, num_epochs - 1))
    return None if last is None or before is None else last.value - before.value

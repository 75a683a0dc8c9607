"""R5: what a large batch costs, and what a larger rate and a warm-up win back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_location
from scalelab.recipes.evidence import (
    Compared,
    keep_tables,
    make_beside_table,
    quote,
    say_wide,
)
from scalelab.recipes.feasibility import choose
from scalelab.recipes.recipe import Answer, Main, Outcome, Outcomes, Row, Size, pair_questions
from scalelab.recipes.resnet import published
from scalelab.recipes.resnet.training import count_updates, describe_updates, list_epochs, make_job
from scalelab.records.settings import Optimization
from scalelab.records.trial import Status, Trial
from scalelab.report.findings import select
from scalelab.studies.large_batch.answer import NOISE, SCALED, WARMED
from scalelab.studies.large_batch.report import NOISE_SCALE, REMEDY
from scalelab.studies.large_batch.study import LargeBatch
from scalelab.studies.shared.job import DIGITS_IMAGES
from scalelab.units import format_interval, format_points, format_share

SMALL_BATCH = 32
SMALL_LARGE = DIGITS_IMAGES // (published.TRAIN_IMAGES // (published.LARGE_RANKS * published.LARGE_BATCH))
"""R5 in small: a quarter of the published small batch, and as many updates per epoch as the published large one."""
SMALL_RATE = published.BASE_RATE * SMALL_BATCH / published.BASE_BATCH
"""R5 and R6 in small: the published rate belongs to batches of 128, so by linear scaling a quarter of it."""
FACTORS = (
    f"; large over small batch is {SMALL_LARGE / SMALL_BATCH:g}, not"
    f" {published.LARGE_RANKS * published.LARGE_BATCH / published.BASE_BATCH:g}"
)
LAGGING = 10
"""R5: so many times the updates that running averages reach back, and they no longer lag behind the weights."""
REMEDIES = {SCALED: "linear scaling", WARMED: "with warm-up"}
MINIMA = (
    " The report's second reason, sharper minima, is about test images and was not measured; here training images fare"
    " worse, which fewer updates can explain."
)
BESIDE = "warm-up over scaling"
NUM_CLASSES = 10
"""Of CIFAR-10 and of digits."""
NEAR_CHANCE = 0.005
"""An accuracy as near to chance is called so, however narrow its interval."""
KEPT, UNFINISHED = 0.9, 0.05
"""R5: what an update keeps of batch norm's running averages (momentum 0.1 in torch), and how much left still counts."""


@dataclass(frozen=True, kw_only=True)
class ShortLargeBatch(LargeBatch):
    """With the gradient noise of the first seed only, whose passes take longest: blocks of its steps give intervals."""

    def plan(self) -> list[Trial]:
        return [trial for trial in super().plan() if trial.configuration != NOISE or trial.round == 1]


def make_r5(size: Size) -> Row:
    if size == "full":
        study = LargeBatch(
            small_batch=published.BASE_BATCH,
            large_batch=published.LARGE_RANKS * published.LARGE_BATCH,
            epochs=published.LARGE_EPOCHS,
            warmup_epochs=3.0,
            ranks=published.LARGE_RANKS,
            job=make_job(size),
        )
    else:
        study = ShortLargeBatch(
            small_batch=SMALL_BATCH,
            large_batch=SMALL_LARGE,
            epochs=published.LARGE_EPOCHS,
            job=make_job(size, optimization=Optimization(lr=SMALL_RATE)),
        )
    return Row(
        id="R5",
        title="Large batch",
        parts={"learning": study},
        conclude=partial(answer_r5, size),
        num_tables=0,
        reason=choose(
            size, small=f"1 rank takes the whole batch; full size has {published.LARGE_RANKS}{FACTORS}", full=""
        ),
    )


def answer_r5(size: Size, outcomes: Outcomes) -> Answer:
    outcome = outcomes.get("learning")
    seeds = read_seeds(outcome, is_test=False)
    test_seeds, setting = read_seeds(outcome, is_test=True), read_setting(outcome)
    trained, tested = average_seeds(seeds), average_seeds(test_seeds)
    printed = f"{100 * published.LARGE_ACCURACY:.2f} %"
    there = {
        "large": (published.LARGE_ACCURACY, printed),
        "small": (published.SMALL_BATCH_PERCENT / 100, f"often above {published.SMALL_BATCH_PERCENT:g} %"),
    }
    lines = [Compared(label, found, *there.get(name, (None, ""))) for name, (label, found) in trained.items()]
    tests = [Compared(label, found, None) for label, found in tested.values()]
    tested_only = quote(outcome, REMEDY.name)  # remedies by test accuracy, which the answers tell from training
    rest = [said for said in quote(outcome) if said not in tested_only]
    _, large = trained.get("large", ("", None))
    main = Main("accuracy", "training accuracy, large batch", large, published.LARGE_ACCURACY, printed)
    first, test_gains = list(describe_training(trained, setting)), compare_seeds(test_seeds)
    remedies = list_remedies(trained, compare_seeds(seeds), test_gains, is_brief=True)
    return Answer(
        main=main if large else None,
        lead=f"{first[0]} Remedies: {', '.join(remedies)}." if first and remedies else "",
        tables=keep_tables(
            make_beside_table(
                "accuracy",
                lines,
                title="Training accuracy, mean of the last epoch",
                size=size,
                notes=(f"published: 4 × 2048 on CIFAR-10, one seed, training loss {published.LARGE_LOSS}",),
            ),
            make_beside_table("accuracy", tests, title="Test accuracy after the last epoch", size=size),
            list_epochs(outcome),
        ),
        sentences=(*first, *rest),
        questions=pair_questions(
            "resnet",
            "R5",
            answer_learning(
                trained,
                count_updates(outcome),
                find_noise(outcome),
                tested,
                compare_seeds(seeds),
                setting,
                test_gains,
            ),
        ),
    )


class Batches(NamedTuple):
    """Both batches and the learning rates of the large one."""

    small: int
    large: int
    rate: float | None
    scaled_rate: float | None
    warmup_epochs: float


def read_setting(outcome: Outcome | None) -> Batches | None:
    """None where either batch was not trained."""
    trials = {one.trial.configuration: one.trial for one in (outcome.results if outcome else ())}
    if not {"small", "large"} <= set(trials):
        return None
    rate, scaled = trials["large"].optimization.lr, None
    if SCALED in trials and trials[SCALED].optimization.lr is not None:
        grown = trials[SCALED].global_batch / (
            trials[SCALED].optimization.lr_base_batch or trials["small"].global_batch
        )
        scaled = (trials[SCALED].optimization.lr or 0.0) * grown
    warmup = trials[WARMED].optimization.lr_warmup_epochs if WARMED in trials else 0.0
    return Batches(trials["small"].global_batch, trials["large"].global_batch, rate, scaled, warmup)


def describe_training(trained: Mapping[str, tuple[str, Estimate]], setting: Batches | None = None) -> Iterator[str]:
    """What the question asks: training accuracy with both batches, and what the large one loses."""
    if {"small", "large"} <= set(trained):
        (_, small), (_, large) = trained["small"], trained["large"]
        rate = f", {setting.rate:g}" if setting and setting.rate else ""
        images = f"{setting.large} and {setting.small} images; " if setting else ""
        yield (
            f"Training accuracy in the last epoch is {say_wide('accuracy', large)} with the large batch and"
            f" {say_wide('accuracy', small)} with the small one at the same learning rate{rate} ({images}published:"
            f" {100 * published.LARGE_ACCURACY:.2f} %, small often above {published.SMALL_BATCH_PERCENT:g} %)."
        )


def find_noise(outcome: Outcome | None) -> tuple[Estimate, int] | None:
    """The gradient noise scale and the large batch; None where the scale or its interval is unknown."""
    if outcome is None or outcome.document is None:
        return None
    large = next((one.trial.global_batch for one in outcome.results if one.trial.configuration == "large"), None)
    for finding in select(outcome.document.findings, NOISE_SCALE):
        scale = finding.values.get("noise_batch")
        if large is not None and isinstance(scale, Estimate) and scale.high is not None:
            return scale, large
    return None


def answer_learning(
    trained: Mapping[str, tuple[str, Estimate]],
    updates: Mapping[str, int],
    noise: tuple[Estimate, int] | None = None,
    tested: Mapping[str, tuple[str, Estimate]] | None = None,
    gains: Mapping[str, Estimate] | None = None,
    setting: Batches | None = None,
    test_gains: Mapping[str, Estimate] | None = None,
) -> dict[str, str]:
    """What a large batch costs, and what scaling the rate and warming it up bring back."""
    if not {"small", "large"} <= set(trained):
        return {}
    _, large = trained["large"]
    scaled = f"{published.BASE_RATE} × {published.LARGE_RANKS} × {published.LARGE_BATCH} / {published.BASE_BATCH}"
    return {
        "accuracy": f"{' '.join(describe_training(trained, setting))} The large batch makes fewer updates in as many"
        f" epochs{describe_updates(updates)}.{explain_test(large, tested or {}, updates)}"
        f"{MINIMA if large.value < trained['small'][1].value else ''}",
        "remedies": f"By linear scaling of the rate with the batch (published: {scaled} = {published.SCALED_RATE}) and"
        f" gradual warm-up over the first epochs (Goyal et al. 2017).{describe_rates(setting)}"
        f"{judge_remedies(large, trained, gains or {}, test_gains or {})}"
        f"{describe_tests(tested or {}, test_gains or {})}"
        f"{explain_lag(trained, tested or {}, updates, gains or {})}{explain_remedies(gains or {}, updates, noise)}",
    }


def describe_rates(setting: Batches | None) -> str:
    """What both remedies did to the learning rate here."""
    if setting is None or not setting.rate or not setting.scaled_rate:
        return ""
    warmup = f", with warm-up over {setting.warmup_epochs:g} epochs" if setting.warmup_epochs else ""
    return f" Here it grows from {setting.rate:g} to {setting.scaled_rate:g}{warmup}."


def describe_tests(tested: Mapping[str, tuple[str, Estimate]], gains: Mapping[str, Estimate]) -> str:
    """What the remedies do to test images, against the large batch alone, seed by seed."""
    said = list_remedies(tested, gains)
    if not said or "large" not in tested:
        return ""
    return f" Test accuracy: unchanged rate {say_wide('accuracy', tested['large'][1])}, {', '.join(said)}."


def explain_test(large: Estimate, tested: Mapping[str, tuple[str, Estimate]], updates: Mapping[str, int]) -> str:
    """Why test images fare worse after few updates: evaluation normalizes by averages that are still unfinished."""
    _, found = tested.get("large", ("", None))
    if found is None or "large" not in updates or found.value >= large.value:
        return ""
    left = KEPT ** updates["large"]
    if left < UNFINISHED:
        return ""
    return (
        f" Of test images it is only {say_wide('accuracy', found)}{name_chance(found)}, presumably because"
        " training normalizes by its batch, evaluation by batch norm's running averages, which after"
        f" {updates['large']} updates still consist to {format_share(left)} of their initial values"
        f" ({KEPT}^{updates['large']})."
    )


def name_chance(accuracy: Estimate) -> str:
    """`, not distinguishable from chance, 10 %`, where the interval includes chance or nearly does, and little else."""
    chance = 1 / NUM_CLASSES
    is_chance = accuracy.holds(chance) or abs(accuracy.value - chance) < NEAR_CHANCE
    is_narrow = accuracy.ends[1] <= 2 * chance
    return f", not distinguishable from chance, {format_share(chance)}" if is_chance and is_narrow else ""


def explain_lag(
    trained: Mapping[str, tuple[str, Estimate]],
    tested: Mapping[str, tuple[str, Estimate]],
    updates: Mapping[str, int],
    gains: Mapping[str, Estimate],
) -> str:
    """Why a remedy that helps training may not show on test images: averages of batch norm lag behind the weights."""
    reach = round(1 / (1 - KEPT))
    num = updates.get("large", 0)
    behind = [
        words.removeprefix("with ")
        for name, words in REMEDIES.items()
        if name in trained and name in tested and (tested[name][1].high or 1.0) < (trained[name][1].low or 0.0)
    ]
    is_helped = any(judge_gain(gain) == HELPS for name, gain in gains.items() if name in REMEDIES)
    if not behind or not is_helped or not 0 < num < LAGGING * reach:
        return ""
    averaged = f"the last {reach} of {num} updates" if num > reach else f"all {num} updates"
    return (
        f" Test images lag behind training images with {' and '.join(behind)}, presumably because batch norm's running"
        f" averages over about {averaged} normalize them, in which a large rate moves the weights away from what was"
        " averaged; this was not tested."
    )


def list_remedies(
    reached: Mapping[str, tuple[str, Estimate]],
    gains: Mapping[str, Estimate],
    test_gains: Mapping[str, Estimate] | None = None,
    *,
    is_brief: bool = False,
) -> list[str]:
    """The accuracy under each remedy, and what it gains; `test_gains`: these are of training images."""

    def judge_both(name: str) -> str:
        verdict, test = judge_gain(gains[name]), (test_gains or {}).get(name)
        is_only = verdict == HELPS and test is not None and judge_gain(test) != HELPS
        points = "" if is_brief else f"{format_gain(gains[name])}: "
        return f"{points}{verdict}{' on training images only' if is_only else ''}"

    return [
        f"{words} {say_wide('accuracy', reached[name][1])} ({judge_both(name)})"
        for name, words in REMEDIES.items()
        if name in reached and name in gains
    ]


def judge_remedies(
    large: Estimate,
    trained: Mapping[str, tuple[str, Estimate]],
    gains: Mapping[str, Estimate],
    test_gains: Mapping[str, Estimate],
) -> str:
    """What each remedy brings against the large batch alone, seed by seed."""
    said = list_remedies(trained, gains, test_gains)
    if not said:
        return ""
    helped = [name for name in REMEDIES if name in gains and judge_gain(gains[name]) == HELPS]
    why = " The larger rate makes up for the fewer updates: each takes a step as long as several small ones."
    return (
        f" Training accuracy: unchanged rate {say_wide('accuracy', large)}, {', '.join(said)}; differences are taken"
        " seed by seed."
        f"{why if helped else ''}{compare_warmup(gains.get(BESIDE))}"
    )


def compare_warmup(gain: Estimate | None) -> str:
    """What warm-up adds to scaling alone, from the same seeds."""
    if gain is None:
        return ""
    verdict = {HELPS: "it helps", WORSE: "it costs accuracy here"}.get(judge_gain(gain), "no difference is resolved")
    return f" Warm-up against scaling alone: {format_gain(gain)}, so {verdict}."


HELPS, WORSE = "helps", "worse"


def judge_gain(gain: Estimate) -> str:
    if gain.low is None or gain.high is None:
        return "no interval"
    return HELPS if gain.low > 0 else WORSE if gain.high < 0 else "no difference resolved"


def format_gain(gain: Estimate) -> str:
    """`+12.3 ± 4.5 points`."""
    width = "" if gain.half_width is None else f" ± {100 * gain.half_width:.1f}"
    return f"{format_points(gain.value, 1)}{width} points"


def explain_remedies(
    gains: Mapping[str, Estimate], updates: Mapping[str, int], noise: tuple[Estimate, int] | None
) -> str:
    """Why no remedy helped: too few updates, or a batch above the gradient noise scale (McCandlish et al. 2018)."""
    own = [gain for name, gain in gains.items() if name in REMEDIES]
    if not own or any(judge_gain(gain) == HELPS for gain in own):
        return ""
    is_worse = any(judge_gain(gain) == WORSE for gain in own)
    few = "few for a large rate to settle" if is_worse else "few for either to take effect"
    why = f" Why not: {updates['large']} updates are {few}." if "large" in updates else ""
    if noise is None:
        return why
    scale, batch = noise
    if scale.high is None or batch <= scale.high:
        return why
    return (
        f"{why} And batch {batch} is above the gradient noise scale of {format_interval('number', scale)} samples:"
        " above it, a larger batch hardly improves the gradient, so a rate that grows with the batch becomes unstable."
    )


Seeds = Mapping[str, tuple[str, dict[int, float]]]
"""The label of every way to train and its accuracy at the end by seed, by configuration."""


def read_seeds(outcome: Outcome | None, *, is_test: bool) -> Seeds:
    """Of the last test, or of all training steps of the last epoch; before 0.2 only of those that were logged."""
    found: dict[str, tuple[str, dict[int, float]]] = {}
    for result in outcome.results if outcome else ():
        lines = result.epochs[-1:] if result.epochs and not is_test else result.curve
        points = [point for point in lines if point.is_evaluation == is_test and point.accuracy is not None]
        last = points[-1:] if is_test else [point for point in points if point.epoch > points[-1].epoch - 1]
        known = [point.accuracy for point in last if point.accuracy is not None]
        if result.status is Status.COMPLETED and known and not result.trial.instruments:
            _, seeds = found.setdefault(result.trial.configuration, (result.trial.label, {}))
            seeds[result.trial.round] = sum(known) / len(known)
    return found


def average_seeds(found: Seeds) -> dict[str, tuple[str, Estimate]]:
    return {name: (label, estimate_location(list(seeds.values()))) for name, (label, seeds) in found.items()}


def compare_seeds(found: Seeds) -> dict[str, Estimate]:
    """What every remedy gains over the large batch alone, and warm-up over scaling alone; both from the same seed."""
    _, large = found.get("large", ("", {}))
    pairs = {name: [found[name][1][seed] - large[seed] for seed in found[name][1] if seed in large] for name in found}
    both = [found[name][1] if name in found else {} for name in (SCALED, WARMED)]
    pairs[BESIDE] = [both[1][seed] - both[0][seed] for seed in both[1] if seed in both[0]]
    return {name: estimate_location(gains) for name, gains in pairs.items() if name in (*REMEDIES, BESIDE) and gains}

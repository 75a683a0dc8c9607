"""R5 and R6: what a large batch and batch norm of single ranks do to what is learnt, and what DDP sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_location
from scalelab.answers.train import TrainStudy
from scalelab.recipes.evidence import (
    UNTOLD,
    Compared,
    compare_estimates,
    find_completed,
    keep_tables,
    make_beside_table,
    quote,
    say,
)
from scalelab.recipes.feasibility import choose, choose_ranks, make_sampling
from scalelab.recipes.recipe import Answer, Main, Outcome, Outcomes, Row, Size, pair_questions
from scalelab.recipes.resnet import published
from scalelab.recipes.resnet.epochs import make_job
from scalelab.records.observations import CurvePoint
from scalelab.records.settings import TrainingRun
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.document import Table
from scalelab.report.findings import select
from scalelab.report.tables import count_column, make_column, make_table, seconds_column, text_column
from scalelab.studies.comm_volume import BUFFERS, CommVolume
from scalelab.studies.large_batch.answer import NOISE, SCALED, WARMED
from scalelab.studies.large_batch.report import NOISE_SCALE
from scalelab.studies.large_batch.study import LargeBatch
from scalelab.units import format_interval, format_share

NORM_SEEDS = 3
REMEDIES = {SCALED: "linear scaling", WARMED: "with warm-up"}
KEPT, UNFINISHED = 0.9, 0.05
"""R5: what an update keeps of batch norm's running averages (momentum 0.1 in torch), and how much left still counts."""
NORM_BATCH = 512
"""R6: images per rank of the published claim."""
SMALL_SPREAD = 0.05
"""R6: variances of ranks that differ by less normalize alike."""
WORTH_SYNCHRONIZING = 0.01
"""R6: gains in accuracy below one point do not pay for synchronizing batch norm."""


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
        study = ShortLargeBatch(epochs=published.LARGE_EPOCHS, job=make_job(size))
    return Row(id="R5", title="Large batch", parts={"learning": study}, conclude=partial(answer_r5, size), num_tables=0)


def answer_r5(size: Size, outcomes: Outcomes) -> Answer:
    outcome = outcomes.get("learning")
    trained, tested = read_last_accuracies(outcome, is_test=False), read_last_accuracies(outcome, is_test=True)
    printed = f"{100 * published.LARGE_ACCURACY:.2f} %"
    there = {
        "large": (published.LARGE_ACCURACY, printed),
        "small": (published.SMALL_BATCH_PERCENT / 100, f"often above {published.SMALL_BATCH_PERCENT:g} %"),
    }
    lines = [Compared(label, found, *there.get(name, (None, ""))) for name, (label, found) in trained.items()]
    tests = [Compared(label, found, None) for label, found in tested.values()]
    _, large = trained.get("large", ("", None))
    main = Main("accuracy", "training accuracy, large batch", large, published.LARGE_ACCURACY, printed)
    return Answer(
        main=main if large else None,
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
        sentences=quote(outcome),
        questions=pair_questions(
            "resnet", "R5", answer_learning(trained, count_updates(outcome), find_noise(outcome), tested)
        ),
    )


def list_epochs(outcome: Outcome | None) -> Table | None:
    """Every epoch of the large batch, as the lab's log has it: time, mean training loss, training accuracy."""
    found = [result for result in (outcome.results if outcome else ()) if result.trial.configuration == "large"]
    epochs = next((result.epochs for result in found if result.epochs), ())
    if not epochs:
        return None
    there = published.LARGE_EPOCH_LINES

    def read(place: int) -> Callable[[CurvePoint], str | None]:
        return lambda point: there[number][place] if (number := round(point.epoch)) in there else None

    return make_table(
        epochs,
        count_column("epoch", "epoch", lambda point: round(point.epoch)),
        seconds_column("epoch_seconds", "time", lambda point: point.seconds),
        make_column("loss", "loss", "loss", lambda point: point.loss),
        make_column("accuracy", "accuracy", "accuracy", lambda point: point.accuracy),
        text_column("published_seconds", "published time [s]", read(0), align="right"),
        text_column("published_loss", "loss", read(1), align="right"),
        text_column("published_accuracy", "accuracy", read(2), align="right"),
        title="Epoch by epoch, large batch",
        notes=("training images, before each update; first seed; published: 4 × 2048 on CIFAR-10",),
    )


def find_noise(outcome: Outcome | None) -> tuple[Estimate, int] | None:
    """The gradient noise scale and the large batch; None where the scale or its interval is unknown."""
    if outcome is None or outcome.document is None or not isinstance(outcome.study, LargeBatch):
        return None
    for finding in select(outcome.document.findings, NOISE_SCALE):
        scale = finding.values.get("noise_batch")
        if isinstance(scale, Estimate) and scale.high is not None:
            return scale, outcome.study.large_batch
    return None


def answer_learning(
    trained: Mapping[str, tuple[str, Estimate]],
    updates: Mapping[str, int],
    noise: tuple[Estimate, int] | None = None,
    tested: Mapping[str, tuple[str, Estimate]] | None = None,
) -> dict[str, str]:
    """What a large batch costs, and what scaling the rate and warming it up bring back."""
    if not {"small", "large"} <= set(trained):
        return {}
    (_, small), (_, large) = trained["small"], trained["large"]
    rate = f"{published.BASE_RATE} × {published.LARGE_RANKS} × {published.LARGE_BATCH} / {published.BASE_BATCH}"
    return {
        "accuracy": f"{say('accuracy', large)} of training images were classified correctly in the last epoch with the"
        f" large batch, {say('accuracy', small)} with the small one. At the same rate, the large batch makes fewer"
        f" updates in as many epochs{describe_updates(updates)}.{explain_test(large, tested or {}, updates)}",
        "remedies": f"By linear scaling of the rate with the batch (published: {rate} = {published.SCALED_RATE}) and"
        f" gradual warm-up over the first epochs (Goyal et al. 2017).{judge_remedies(large, trained)}"
        f"{explain_remedies(large, trained, updates, noise)}",
    }


def explain_test(large: Estimate, tested: Mapping[str, tuple[str, Estimate]], updates: Mapping[str, int]) -> str:
    """Why test images fare worse after few updates: evaluation normalizes by averages that are still unfinished."""
    _, found = tested.get("large", ("", None))
    if found is None or "large" not in updates or found.value >= large.value:
        return ""
    left = KEPT ** updates["large"]
    if left < UNFINISHED:
        return ""
    return (
        f" Of test images it is only {say('accuracy', found)}: training normalizes by its batch, evaluation by running"
        f" averages of batch norm, which after {updates['large']} updates still consist to {format_share(left)}"
        f" of their initial values ({KEPT}^{updates['large']})."
    )


def describe_updates(updates: Mapping[str, int]) -> str:
    """`: 10 instead of 225`; empty where one is unknown."""
    return f": {updates['large']} instead of {updates['small']}" if {"small", "large"} <= set(updates) else ""


def judge_remedies(large: Estimate, trained: Mapping[str, tuple[str, Estimate]]) -> str:
    """What each remedy brings against the large batch alone, by intervals."""
    words = {1: "helps", 0: "no gain beyond its interval", -1: "worse"}
    said = [
        f"{REMEDIES[name]} {say('accuracy', trained[name][1])} ({words[compare_estimates(trained[name][1], large)]})"
        for name in REMEDIES
        if name in trained
    ]
    if not said:
        return ""
    return f" Here, of training images right: unchanged rate {say('accuracy', large)}, {', '.join(said)}."


def explain_remedies(
    large: Estimate,
    trained: Mapping[str, tuple[str, Estimate]],
    updates: Mapping[str, int],
    noise: tuple[Estimate, int] | None,
) -> str:
    """Why no remedy helped: too few updates, or a batch above the gradient noise scale (McCandlish et al. 2018)."""
    if any(compare_estimates(trained[name][1], large) > 0 for name in REMEDIES if name in trained):
        return ""
    why = f" Why not: {updates['large']} updates are few for either to take effect." if "large" in updates else ""
    if noise is None:
        return why
    scale, batch = noise
    if scale.high is None or batch <= scale.high:
        return why
    return (
        f"{why} And batch {batch} is above the gradient noise scale of {format_interval('number', scale)} samples:"
        " above it, a larger batch hardly improves the gradient, so a rate that grows with the batch becomes unstable."
    )


def count_updates(outcome: Outcome | None) -> dict[str, int]:
    """Of the first seed of every way to train."""
    found = [result for result in (outcome.results if outcome else ()) if result.status is Status.COMPLETED]
    return {result.trial.configuration: len(result.losses()) for result in reversed(found)}


def read_last_accuracies(outcome: Outcome | None, *, is_test: bool) -> dict[str, tuple[str, Estimate]]:
    """The label of every way to train and its accuracy at the end, over seeds, by configuration.

    Of the last test, or of all training steps of the last epoch; before 0.2 only of those that were logged.
    """
    found: dict[str, tuple[str, list[float]]] = {}
    for result in outcome.results if outcome else ():
        lines = result.epochs[-1:] if result.epochs and not is_test else result.curve
        points = [point for point in lines if point.is_evaluation == is_test and point.accuracy is not None]
        last = points[-1:] if is_test else [point for point in points if point.epoch > points[-1].epoch - 1]
        known = [point.accuracy for point in last if point.accuracy is not None]
        if result.status is Status.COMPLETED and known and not result.trial.instruments:
            found.setdefault(result.trial.configuration, (result.trial.label, []))[1].append(sum(known) / len(known))
    return {name: (label, estimate_location(values)) for name, (label, values) in found.items()}


def make_r6(size: Size) -> Row:
    study = CommVolume(
        strategies=("ddp",),
        ranks=choose_ranks(size, published.LARGE_RANKS),
        batch_per_rank=choose(size, small=2, full=512),
        job=make_job(size, is_counted=True),
        sampling=make_sampling(size, rounds=2, steps=4, phase_steps=0),
    )
    kinds = [(kind, seed) for seed in range(NORM_SEEDS) for kind in ("local", "synced")]
    norms = {f"{kind}{seed}": make_norm_training(size, kind, seed) for kind, seed in kinds}
    return Row(
        id="R6",
        title="What DDP sends",
        parts={"messages": study, **norms},
        conclude=partial(answer_r6, size),
        num_tables=1,
        shows=("messages",),
    )


@dataclass(frozen=True, kw_only=True)
class NormTraining(TrainStudy):
    """A training run after which the batch statistics of ranks are compared."""

    def plan(self) -> list[Trial]:
        return [replace(trial, instruments=("norms",)) for trial in super().plan()]


def make_norm_training(size: Size, kind: str, seed: int) -> NormTraining:
    """Local or synchronized batch norm, with 512 images per rank; in small with 16."""
    ranks = choose_ranks(size, published.LARGE_RANKS)
    job = make_job(size, seed=seed)
    return NormTraining(
        ranks=ranks,
        global_batch=ranks * choose(size, small=16, full=512),
        course=TrainingRun(epochs=choose(size, small=3, full=published.LARGE_EPOCHS), log_every=10**6, keep=0),
        job=replace(job, spreading=replace(job.spreading, sync_batch_norm=kind == "synced")),
    )


def answer_r6(size: Size, outcomes: Outcomes) -> Answer:
    outcome = outcomes.get("messages")
    sent = sum_bytes(outcome, "gradients")
    if not sent:
        return Answer(sentences=quote(outcome))
    printed = f"{published.GRADIENT_BYTES:,}"
    table = make_beside_table(
        "count",
        [Compared("gradient bytes per step", sent, published.GRADIENT_BYTES, printed)],
        title="What every rank passes to the all-reduce",
        size=size,
        notes=("counted, not timed",),
        is_ratio=True,
    )
    verdict = "exactly" if sent == published.GRADIENT_BYTES else "not"
    sentence = f"DDP all-reduces {say('count', sent)} bytes of gradients per step, {verdict} the published {printed}."
    return Answer(
        main=Main("count", "gradient bytes per step", sent, published.GRADIENT_BYTES, printed, is_ratio=True),
        tables=keep_tables(table),
        sentences=(sentence, *quote(outcome)),
        questions=pair_questions("resnet", "R6", answer_buffers(outcome) | answer_norms(outcomes)),
        charts=outcome.document.sections[0].charts[:1] if outcome and outcome.document else (),
    )


def answer_buffers(outcome: Outcome | None) -> dict[str, str]:
    gradients, buffers = (sum_bytes(outcome, purpose) for purpose in ("gradients", "buffers"))
    if not gradients or buffers is None:
        return {}
    cost = " ".join(quote(outcome, BUFFERS.name))
    return {
        "buffers": f"{'Yes' if buffers else 'No'}: {buffers:,} bytes of buffers beside {gradients:,} of gradients,"
        f" {format_share(buffers / (buffers + gradients))} of what a step sends. They are copied from rank 0 before"
        f" every forward, not averaged.{f' {cost}' if cost else ''}"
    }


def answer_norms(outcomes: Outcomes) -> dict[str, str]:
    """Local against synchronized batch norm: statistics of a step, and test accuracy seed by seed."""
    differences, spreads, accuracies = [], [], []
    trial = None
    for seed in range(NORM_SEEDS):
        local, synced = (find_completed(outcomes.get(f"{kind}{seed}")) for kind in ("local", "synced"))
        scores = [read_test_accuracy(result) for result in (local, synced)]
        if local is None or scores[0] is None or scores[1] is None:
            continue
        trial = local.trial
        differences.append(scores[1] - scores[0])
        accuracies.append(scores[0])
        spreads += [rank.norms for rank in local.ranks[:1] if rank.norms is not None]
    if trial is None:
        return {}
    gain, level = estimate_location(differences), estimate_location(accuracies)
    apart, verdict = "", judge_accuracy(gain)
    if spreads:
        mean, variance = (sum(one[place] for one in spreads) / len(spreads) for place in (0, 1))
        at_published = variance * (trial.batch_per_rank / NORM_BATCH) ** 0.5
        verdict = verdict or judge_statistics(at_published)
        apart = (
            f" In a step after training, the batch means of ranks are {mean:.3f} standard deviations apart and their"
            f" variances {format_share(variance)} (root mean square over {spreads[0].num_channels} channels). Both"
            f" shrink as 1/√n, so at {NORM_BATCH} images per rank variances differ by about"
            f" {format_share(at_published)}."
        )
    verdict = verdict or UNTOLD
    change = f"{100 * gain.value:+.1f}".replace("-", "−")
    width = "" if gain.half_width is None else f" ± {100 * gain.half_width:.1f}"
    return {
        "enough": f"{verdict}. With {trial.batch_per_rank} images per rank on {trial.num_ranks} ranks, test accuracy is"
        f" {say('accuracy', level)} with local batch norm and changes by {change}{width} points with"
        f" synchronized batch norm, over {len(differences)} seeds.{apart}"
    }


def judge_accuracy(gain: Estimate) -> str:
    """Whether gradients alone suffice, by what synchronizing gains in accuracy; empty where that does not decide."""
    if gain.low is None or gain.high is None:
        return ""
    return "No, by accuracy" if gain.low > 0 else "Yes, by accuracy" if gain.high < WORTH_SYNCHRONIZING else ""


def judge_statistics(spread: float) -> str:
    """The same by how far the batch variances of ranks are apart at the published batch."""
    if spread < SMALL_SPREAD:
        return "Yes, by the statistics: a rank normalizes almost as all ranks together would; accuracy does not decide"
    return "No, by the statistics: ranks normalize differently; accuracy does not decide"


def read_test_accuracy(result: TrialResult | None) -> float | None:
    """After the last epoch."""
    points = [point.accuracy for point in result.curve if point.is_evaluation] if result else []
    return points[-1] if points else None


def sum_bytes(outcome: Outcome | None, purpose: str) -> int | None:
    """Of the first rank that counted its messages, under plain DDP."""
    for result in outcome.results if outcome else ():
        for rank in result.ranks:
            known = [message for message in rank.messages if message.purpose == purpose]
            if rank.messages and all(message.payload_bytes is not None for message in known):
                return sum(message.payload_bytes or 0 for message in known)
    return None

"""The resnet recipe: DDP on CIFAR-10.

R1, R5, R6 and R7: batch size, large batch, what DDP sends, loader and optimizers. R2 to R4 are in `epochs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import Verdict, estimate_location, estimate_median, judge
from scalelab.answers.train import TrainStudy
from scalelab.recipes.evidence import (
    UNTOLD,
    Compared,
    divide_steps,
    find_arm,
    find_completed,
    find_too_large,
    is_out_of_memory,
    keep_tables,
    list_arms,
    make_beside_table,
    quote,
    say,
    scale,
)
from scalelab.recipes.feasibility import choose, choose_ranks, make_sampling
from scalelab.recipes.recipe import Answer, Main, Outcome, Outcomes, Recipe, Row, Size, pair_questions
from scalelab.recipes.resnet import published
from scalelab.recipes.resnet.epochs import QUARTER, choose_batch, count_steps, make_epoch_rows, make_job, make_main
from scalelab.recipes.resnet.published import make_checks
from scalelab.records.settings import Optimization, TrainingRun
from scalelab.records.trial import Status, StepKind, Trial, TrialResult
from scalelab.studies.batch_size import BatchSize
from scalelab.studies.comm_volume import BUFFERS, CommVolume
from scalelab.studies.large_batch.study import LargeBatch
from scalelab.studies.loader_workers import LoaderWorkers
from scalelab.studies.optimizers import OptimizerName, Optimizers
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.job import Job
from scalelab.units import format_share

SMALL_LIMIT = "600MB"
"""What a rank may allocate in small, so that the largest batch does not fit."""
NORM_SEEDS = 3
WORTH_SYNCHRONIZING = 0.01
"""R6: gains in accuracy below one point do not pay for synchronizing batch norm."""


def make_rows(size: Size) -> Sequence[Row]:
    return (make_r1(size), *make_epoch_rows(size), make_r5(size), make_r6(size), make_r7(size))


def make_r1(size: Size) -> Row:
    asked = (*published.COMPUTE_SECONDS, published.OUT_OF_MEMORY_BATCH)
    study = BatchSize(
        batches=tuple(choose_batch(size, batch) for batch in asked),
        job=make_job(size, memory_limit=choose(size, small=SMALL_LIMIT, full=None)),
        sampling=make_sampling(size, rounds=3, steps=4, phase_steps=2),
    )
    return Row(
        id="R1",
        title="Batch on one device",
        parts={"batches": study},
        conclude=partial(answer_r1, size),
        expects=partial(is_out_of_memory, study.batches[-1]),
    )


def answer_r1(size: Size, outcomes: Outcomes) -> Answer:
    outcome = outcomes.get("batches")
    lines = []
    is_small = any(arm.trial.options.get("data") == "digits" for arm in list_arms(outcome))
    for batch, seconds in published.COMPUTE_SECONDS.items():
        own = choose_batch("small" if is_small else "full", batch)
        arm = find_arm(outcome, global_batch=own)
        computing = scale(measure_computing(arm), count_steps(arm)) if arm else None
        lines.append(Compared(f"batch {own}", computing, seconds, f"{seconds:.3f} s"))
    notes = (QUARTER,) if is_small else ()
    table = make_beside_table("seconds", lines, title="An epoch without loading, from steps", size=size, notes=notes)
    sentences = []
    if outcome is not None and list_arms(outcome):
        failed = find_too_large(outcome)
        largest = max(arm.trial.global_batch for arm in list_arms(outcome))
        limit = f"{failed.trial.global_batch} runs out of memory" if failed else "none runs out of memory"
        sentences.append(
            f"The largest batch that ran is {largest}; {limit} (published: {published.OUT_OF_MEMORY_BATCH} does)."
        )
    return Answer(
        main=make_main("seconds", "epoch", lines),
        tables=keep_tables(table),
        sentences=(*sentences, *quote(outcome)[:2]),
        questions=pair_questions("resnet", "R1", answer_batches(list_arms(outcome))),
    )


def answer_batches(arms: Sequence[Arm]) -> dict[str, str]:
    """Whether throughput grows from the smallest batch to the next, and whether it still does after that."""
    ordered = sorted(arms, key=lambda arm: arm.trial.global_batch)
    gains = []
    for before, arm in pairwise(ordered):
        factor = arm.trial.global_batch / before.trial.global_batch
        gain = scale(divide_steps(before, arm), factor)
        if gain is not None:
            gains.append((f"{before.trial.global_batch} → {arm.trial.global_batch}", gain))
    if len(gains) < 2:
        return {}
    words = {Verdict.SLOWER: "It grows", Verdict.FASTER: "It falls", Verdict.NO_DIFFERENCE: "It stays the same"}
    said = [f"{words.get(judge(gain), UNTOLD)}: images/s {say('ratio', gain)} ({what})" for what, gain in gains]
    per_image = ordered[0].step.value / ordered[0].trial.global_batch
    return {
        "grows": f"{said[0]}. A step has a cost that does not grow with its images (kernel launches, Python, the"
        f" optimizer); at batch {ordered[0].trial.global_batch} an image takes {say('seconds', per_image)} in all.",
        "flattens": f"{'; '.join(said[1:])}. Once every core or multiprocessor is busy, time per image is that of its"
        " arithmetic and memory traffic, whatever the batch.",
    }


def measure_computing(arm: Arm | None) -> Estimate | None:
    """A step without loading its batch, from the steps timed phase by phase."""
    if arm is None:
        return None
    rounds = [
        [
            sample.step_seconds - sample.input_seconds
            for sample in result.samples
            if sample.kind is StepKind.PHASES and sample.input_seconds is not None
        ]
        for result in arm.completed
    ]
    return estimate_median(rounds) if any(rounds) else None


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
        study = LargeBatch(epochs=published.LARGE_EPOCHS, job=make_job(size))
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
        ),
        sentences=quote(outcome),
        questions=pair_questions("resnet", "R5", answer_learning(trained)),
    )


def answer_learning(trained: Mapping[str, tuple[str, Estimate]]) -> dict[str, str]:
    """What a large batch costs, and what scaling the rate and warming it up bring back."""
    if not {"small", "large"} <= set(trained):
        return {}
    (small_label, small), (large_label, large) = trained["small"], trained["large"]
    others = ", ".join(f"{say('accuracy', found)} with {label}" for label, found in list(trained.values())[2:])
    rate = f"{published.BASE_RATE} × {published.LARGE_RANKS} × {published.LARGE_BATCH} / {published.BASE_BATCH}"
    return {
        "accuracy": f"{say('accuracy', large)} of training images in the last epoch with {large_label},"
        f" {say('accuracy', small)} with {small_label}. At the same rate, the large batch makes fewer updates in as"
        " many epochs.",
        "remedies": "Linear scaling multiplies the rate by the growth of the batch (published:"
        f" {rate} = {published.SCALED_RATE}); gradual warm-up raises it over the first epochs, while directions still"
        f" change too fast for such steps (Goyal et al. 2017).{f' Here: {others}.' if others else ''}",
    }


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
        course=TrainingRun(epochs=published.LARGE_EPOCHS, log_every=10**6, keep=0),
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
    verdict = UNTOLD
    if gain.low is not None and gain.high is not None:
        verdict = "No" if gain.low > 0 else "Yes" if gain.high < WORTH_SYNCHRONIZING else UNTOLD
    apart = ""
    if spreads:
        mean, variance = (sum(one[place] for one in spreads) / len(spreads) for place in (0, 1))
        apart = (
            f" In a step after training, the batch means of ranks are {mean:.3f} standard deviations apart and their"
            f" variances {format_share(variance)} (root mean square over {spreads[0].num_channels} channels); both"
            " shrink as one over the square root of the images per rank."
        )
    width = "" if gain.half_width is None else f" ± {100 * gain.half_width:.1f}"
    return {
        "enough": f"{verdict}. With {trial.batch_per_rank} images per rank on {trial.num_ranks} ranks, test accuracy is"
        f" {say('accuracy', level)} with local batch norm and changes by {100 * gain.value:+.1f}{width} points with"
        f" synchronized batch norm, over {len(differences)} seeds.{apart}"
    }


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


@dataclass(frozen=True, kw_only=True)
class PublishedOptimizers(Optimizers):
    """The study with the published settings for sgd, and for nesterov, which differs in its momentum only."""

    def _choose_optimizer(self, name: OptimizerName) -> Job:
        if name not in ("sgd", "nesterov"):
            return super()._choose_optimizer(name)
        wanted = Optimization(
            optimizer=name, lr=published.BASE_RATE, momentum=published.MOMENTUM, weight_decay=published.WEIGHT_DECAY
        )
        return replace(self.job, optimization=wanted)


def make_r7(size: Size) -> Row:
    batch = choose(size, small=64, full=published.BASE_BATCH)
    job = make_job(size)
    unset = {name: value for name, value in job.options.items() if name != "workers"}
    workers = LoaderWorkers(
        workers=choose(size, small=(0, 1, 2), full=(0, 1, 2, 4, 8, 16)),
        batch_per_rank=batch,
        job=replace(job, options=unset),
        sampling=make_sampling(size),
    )
    optimizers = PublishedOptimizers(batch_per_rank=batch, job=job, sampling=make_sampling(size))
    parts = {"workers": workers, "optimizers": optimizers}
    return Row(id="R7", title="Loader workers and optimizers", parts=parts, conclude=answer_r7, num_tables=1)


def answer_r7(outcomes: Outcomes) -> Answer:
    loading = [arm for arm in list_arms(outcomes.get("workers")) if arm.phase("input") is not None]
    split = [
        f"{arm.label}: {say('seconds', arm.phase('input'))} loading, {say('seconds', measure_computing(arm))} training"
        for arm in loading
    ]
    sentences = [*quote(outcomes.get("workers"))[:2], *quote(outcomes.get("optimizers"))[:2]]
    if list_arms(outcomes.get("optimizers")):
        sentences.append(
            f"sgd and nesterov use the published settings (lr {published.BASE_RATE}, momentum {published.MOMENTUM},"
            f" weight decay {published.WEIGHT_DECAY}); the others use torch's defaults."
        )
    if split:
        sentences.append(f"A step by number of workers: {'; '.join(split)}.")
    main = Main("seconds", f"loading a batch, {loading[0].label}", loading[0].phase("input")) if loading else None
    return Answer(main=main, sentences=tuple(sentences))


RESNET = Recipe(
    name="resnet",
    title="DDP on CIFAR-10",
    assignment="a course's homework 5, part A: six questions",
    make_rows=make_rows,
    make_checks=make_checks,
)

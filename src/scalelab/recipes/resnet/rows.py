"""The resnet recipe: DDP on CIFAR-10.

R1, R5, R6 and R7: batch size, large batch, what DDP sends, loader and optimizers. R2 to R4 are in `epochs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_location, estimate_median
from scalelab.recipes.evidence import (
    Compared,
    find_arm,
    find_too_large,
    keep_tables,
    list_arms,
    make_beside_table,
    quote,
    say,
    scale,
)
from scalelab.recipes.feasibility import choose, choose_ranks, make_sampling
from scalelab.recipes.published import pair_questions
from scalelab.recipes.recipe import Answer, Main, Outcome, Outcomes, Recipe, Row, Size
from scalelab.recipes.resnet import published
from scalelab.recipes.resnet.epochs import make_epoch_rows, make_job, make_main
from scalelab.recipes.resnet.published import count_epoch_steps, make_checks
from scalelab.records.settings import Optimization
from scalelab.records.trial import Status, StepKind
from scalelab.studies.batch_size import BatchSize
from scalelab.studies.comm_volume import CommVolume
from scalelab.studies.large_batch.study import LargeBatch
from scalelab.studies.loader_workers import LoaderWorkers
from scalelab.studies.optimizers import OptimizerName, Optimizers
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.job import Job

SMALL_LIMIT = "600MB"
"""What a rank may allocate in small, so that the largest batch does not fit."""


def make_rows(size: Size) -> Sequence[Row]:
    return (make_r1(size), *make_epoch_rows(size), make_r5(size), make_r6(size), make_r7(size))


def make_r1(size: Size) -> Row:
    study = BatchSize(
        batches=(*published.COMPUTE_SECONDS, published.OUT_OF_MEMORY_BATCH),
        job=make_job(size, memory_limit=choose(size, small=SMALL_LIMIT, full=None)),
        sampling=make_sampling(size, rounds=3, steps=4, phase_steps=2),
    )
    return Row(id="R1", title="Batch on one device", parts={"batches": study}, conclude=partial(answer_r1, size))


def answer_r1(size: Size, outcomes: Outcomes) -> Answer:
    outcome = outcomes.get("batches")
    lines = []
    for batch, seconds in published.COMPUTE_SECONDS.items():
        computing = scale(measure_computing(find_arm(outcome, global_batch=batch)), count_epoch_steps(1, batch))
        lines.append(Compared(f"batch {batch}", computing, seconds, f"{seconds:.3f} s"))
    table = make_beside_table(
        "seconds", lines, title="An epoch of 50,000 images without loading, from steps", size=size
    )
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
    )


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

    Of the last test, or the mean over the training steps of the last epoch.
    """
    found: dict[str, tuple[str, list[float]]] = {}
    for result in outcome.results if outcome else ():
        points = [point for point in result.curve if point.is_evaluation == is_test and point.accuracy is not None]
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
    return Row(id="R6", title="What DDP sends", parts={"messages": study}, conclude=partial(answer_r6, size))


def answer_r6(size: Size, outcomes: Outcomes) -> Answer:
    outcome = outcomes.get("messages")
    sent = sum_gradient_bytes(outcome)
    if sent is None:
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
    )


def sum_gradient_bytes(outcome: Outcome | None) -> int | None:
    """Of the first rank that counted its messages, under plain DDP."""
    for result in outcome.results if outcome else ():
        for rank in result.ranks:
            known = [message for message in rank.messages if message.purpose == "gradients"]
            if known and all(message.payload_bytes is not None for message in known):
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


RESNET = Recipe(name="resnet", title="DDP on CIFAR-10", make_rows=make_rows, make_checks=make_checks)

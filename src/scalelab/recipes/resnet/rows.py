"""R1, R5, R6 and R7: the batch, the large batch, what is sent, and what feeds and updates the model.

In small, lenet stands for ResNet-18 where times matter: a step of ResNet-18 takes seconds on a core. What is sent does
not depend on speed, and is counted on ResNet-18 itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_location, estimate_median
from scalelab.recipes.evidence import Compared, find_arm, keep_tables, list_arms, make_beside_table, quote, say, scale
from scalelab.recipes.feasibility import choose, choose_ranks, make_sampling
from scalelab.recipes.recipe import Finding, Outcome, Outcomes, Row, Size
from scalelab.recipes.resnet import published
from scalelab.recipes.resnet.checks import count_epoch_steps
from scalelab.records.settings import Optimization
from scalelab.records.trial import Option, Status, StepKind
from scalelab.studies.batch_size import BatchSize
from scalelab.studies.comm_volume import CommVolume
from scalelab.studies.large_batch.study import LargeBatch
from scalelab.studies.loader_workers import LoaderWorkers
from scalelab.studies.optimizers import OptimizerName, Optimizers
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.job import Job

SMALL_LIMIT = "600MB"
"""What a rank may allocate in small, so that the largest batch does not fit."""
LOADER_WORKERS = 2


def make_job(size: Size, *, is_counted: bool = False, **fields: Any) -> Job:
    """ResNet-18 on CIFAR-10 with two loader workers; in small, lenet on random images without any.

    What is counted and not timed is ResNet-18 in both sizes, on random images.
    """
    images: dict[str, Option] = {"data": "cifar10", "workers": LOADER_WORKERS}
    return Job(
        workload="resnet18" if is_counted or size == "full" else "lenet",
        options={} if is_counted or size == "small" else images,
        threads_per_rank=choose(size, small=1, full=None),
        timeout=choose(size, small="5min", full="1h"),
        **fields,
    )


def make_r1(size: Size) -> Row:
    study = BatchSize(
        batches=(*published.COMPUTE_SECONDS, published.OUT_OF_MEMORY_BATCH),
        job=make_job(size, memory_limit=choose(size, small=SMALL_LIMIT, full=None)),
        sampling=make_sampling(size, rounds=3, steps=4, phase_steps=2),
    )
    return Row(
        id="R1",
        title="Batch on one device",
        parts={"batches": study},
        conclude=partial(find_r1, size),
    )


def find_r1(size: Size, outcomes: Outcomes) -> Finding:
    outcome = outcomes.get("batches")
    lines = []
    for batch, seconds in published.COMPUTE_SECONDS.items():
        computing = measure_computing(find_arm(outcome, global_batch=batch))
        lines.append(
            Compared(f"batch {batch}", scale(computing, count_epoch_steps(1, batch)), seconds, f"{seconds:.3f} s")
        )
    table = make_beside_table("seconds", lines, title="An epoch of 50,000 images without loading, by steps", size=size)
    answers = []
    if outcome is not None and list_arms(outcome):
        failed = [arm for arm in outcome.arms.values() if arm.failure and arm.failure.status is Status.OUT_OF_MEMORY]
        largest = max(arm.trial.global_batch for arm in list_arms(outcome))
        limit = f"{failed[0].trial.global_batch} is out of memory" if failed else "none of them was out of memory"
        answers.append(
            f"The largest batch that ran is {largest}, and {limit}; published: {published.OUT_OF_MEMORY_BATCH} is."
        )
    return Finding(tables=keep_tables(table), answers=(*answers, *quote(outcome)[:2]))


def measure_computing(arm: Arm | None) -> Estimate | None:
    """A step without taking its batch, from the steps that were timed phase by phase."""
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
    return Row(id="R5", title="Large batch", parts={"learning": study}, conclude=partial(find_r5, size), num_tables=0)


def find_r5(size: Size, outcomes: Outcomes) -> Finding:
    outcome = outcomes.get("learning")
    accuracies = read_last_accuracies(outcome)
    lines = [
        Compared(
            label,
            found,
            published.LARGE_ACCURACY if label == "large batch" else None,
            f"{100 * published.LARGE_ACCURACY:.2f} %",
        )
        for label, found in accuracies.items()
    ]
    table = make_beside_table(
        "accuracy",
        lines,
        title="Accuracy after the last epoch",
        size=size,
        notes=(f"published: 4 × 2048 on CIFAR-10, one seed, loss {published.LARGE_LOSS}; in small, ours are digits",),
    )
    return Finding(tables=keep_tables(table), answers=quote(outcome))


def read_last_accuracies(outcome: Outcome | None) -> dict[str, Estimate]:
    """The accuracy of the last test of every way to train, over seeds."""
    found: dict[str, list[float]] = {}
    for result in outcome.results if outcome else ():
        tests = [point.accuracy for point in result.curve if point.is_evaluation and point.accuracy is not None]
        if result.status is Status.COMPLETED and tests and not result.trial.instruments:
            found.setdefault(result.trial.label, []).append(tests[-1])
    return {label: estimate_location(values) for label, values in found.items()}


def make_r6(size: Size) -> Row:
    study = CommVolume(
        strategies=("ddp",),
        ranks=choose_ranks(size, published.LARGE_RANKS),
        batch_per_rank=choose(size, small=2, full=512),
        job=make_job(size, is_counted=True),
        sampling=make_sampling(size, rounds=2, steps=4, phase_steps=0),
    )
    return Row(id="R6", title="What DDP sends", parts={"messages": study}, conclude=partial(find_r6, size))


def find_r6(size: Size, outcomes: Outcomes) -> Finding:
    outcome = outcomes.get("messages")
    sent = sum_gradient_bytes(outcome)
    table = make_beside_table(
        "count",
        [Compared("bytes of gradients per step", sent, published.GRADIENT_BYTES, f"{published.GRADIENT_BYTES:,}")],
        title="What every rank hands to the all-reduce",
        size=size,
        notes=("counted, not timed",),
        is_ratio=True,
    )
    answers = []
    if sent is not None:
        verdict = "exactly" if sent == published.GRADIENT_BYTES else "not"
        answers.append(
            f"DDP hands {say('count', sent)} bytes of gradients to its all-reduces in a step, {verdict} the"
            f" {say('count', published.GRADIENT_BYTES)} that were published."
        )
    return Finding(tables=keep_tables(table), answers=(*answers, *quote(outcome)))


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
    """The study with the published numbers for sgd, and for nesterov, which is the same with another momentum."""

    def _choose_optimizer(self, name: OptimizerName) -> Job:
        if name not in ("sgd", "nesterov"):
            return super()._choose_optimizer(name)
        wanted = Optimization(
            optimizer=name,
            lr=published.BASE_RATE,
            momentum=published.MOMENTUM,
            weight_decay=published.WEIGHT_DECAY,
        )
        return replace(self.job, optimization=wanted)


def make_r7(size: Size) -> Row:
    batch = choose(size, small=64, full=published.BASE_BATCH)
    job = make_job(size)
    workers = {name: value for name, value in job.options.items() if name != "workers"}
    return Row(
        id="R7",
        title="Loader workers and optimizers",
        parts={
            "workers": LoaderWorkers(
                workers=choose(size, small=(0, 1, 2), full=(0, 1, 2, 4, 8, 16)),
                batch_per_rank=batch,
                job=Job(
                    workload=job.workload,
                    options=workers,
                    threads_per_rank=job.threads_per_rank,
                    timeout=job.timeout,
                ),
                sampling=make_sampling(size),
            ),
            "optimizers": PublishedOptimizers(batch_per_rank=batch, job=job, sampling=make_sampling(size)),
        },
        conclude=find_r7,
        num_tables=1,
    )


def find_r7(outcomes: Outcomes) -> Finding:
    answers = [*quote(outcomes.get("workers"))[:2], *quote(outcomes.get("optimizers"))[:2]]
    split = [
        f"{arm.label}: {say('seconds', arm.phase('input'))} to load, {say('seconds', measure_computing(arm))} to train"
        for arm in list_arms(outcomes.get("workers"))
        if arm.phase("input") is not None
    ]
    if list_arms(outcomes.get("optimizers")):
        answers.append(
            f"sgd and nesterov have the published numbers ({published.BASE_RATE}, momentum {published.MOMENTUM}, decay"
            f" {published.WEIGHT_DECAY}); the others torch's own, as none were published for them."
        )
    if split:
        answers.append(f"The split of a step, by workers: {'; '.join(split)}.")
    return Finding(answers=tuple(answers))

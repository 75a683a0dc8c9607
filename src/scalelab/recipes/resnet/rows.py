"""The resnet recipe: DDP on CIFAR-10.

R1 and R7: batch size, loader and optimizers. R2 to R4 are in `epochs`, R5 and R6 in `learning`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import Verdict, estimate_median, judge
from scalelab.recipes.evidence import (
    UNTOLD,
    Compared,
    describe_limit,
    divide_steps,
    explain_limit,
    find_arm,
    is_out_of_memory,
    keep_tables,
    list_arms,
    make_beside_table,
    quote,
    say,
    scale,
)
from scalelab.recipes.feasibility import choose, make_sampling
from scalelab.recipes.recipe import Answer, Main, Outcomes, Recipe, Row, Size, pair_questions
from scalelab.recipes.resnet import published
from scalelab.recipes.resnet.epochs import (
    ONE_RUN,
    QUARTER,
    choose_batch,
    count_steps,
    make_epoch_rows,
    make_job,
    make_main,
    make_timed,
    read_second_epoch,
)
from scalelab.recipes.resnet.learning import make_r5, make_r6
from scalelab.recipes.resnet.published import make_checks
from scalelab.records.settings import Optimization
from scalelab.records.trial import StepKind
from scalelab.report.document import Table
from scalelab.studies.batch_size import BatchSize
from scalelab.studies.loader_workers import LoaderWorkers
from scalelab.studies.optimizers import OptimizerName, Optimizers
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.job import Job
from scalelab.units import format_quantity

SMALL_LIMIT = "600MB"
"""What a rank may allocate in small, so that the largest batch does not fit."""


def make_rows(size: Size) -> Sequence[Row]:
    return (make_r1(size), *make_epoch_rows(size), make_r5(size), make_r6(size), make_r7(size))


def make_r1(size: Size) -> Row:
    asked = (*published.COMPUTE_SECONDS, published.OUT_OF_MEMORY_BATCH)
    study = BatchSize(
        batches=tuple(choose_batch(size, batch) for batch in asked),
        job=make_job(size, memory_limit=choose(size, small=SMALL_LIMIT, full=None)),
        sampling=make_sampling(size, rounds=5, steps=4, phase_steps=2),
    )
    return Row(
        id="R1",
        title="Batch on one device",
        parts={"batches": study, **{f"timed{batch}": make_timed(size, batch) for batch in published.COMPUTE_SECONDS}},
        conclude=partial(answer_r1, size),
        expects=partial(is_out_of_memory, study.batches[-1]),
        shows=("batches",),
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
        largest = max(arm.trial.global_batch for arm in list_arms(outcome))
        limit = describe_limit(outcome) or "none runs out of memory"
        sentences.append(
            f"The largest batch that ran is {largest}; {limit} (published: batch {published.OUT_OF_MEMORY_BATCH} runs"
            " out of memory)."
        )
        sentences += explain_limit(outcome)
    return Answer(
        main=make_main("seconds", "epoch", lines),
        tables=keep_tables(*compare_timed(size, outcomes), table),
        sentences=(*sentences, *quote(outcome)[:2]),
        questions=pair_questions("resnet", "R1", answer_batches(list_arms(outcome), read_timed(size, outcomes))),
    )


def compare_timed(size: Size, outcomes: Outcomes) -> Iterator[Table | None]:
    """Epoch 2 of a training run, without and with loading."""
    epochs = {batch: read_second_epoch(outcomes.get(f"timed{batch}")) for batch in published.COMPUTE_SECONDS}
    parts = {"compute_seconds": published.COMPUTE_SECONDS, "seconds": published.EPOCH_SECONDS[1]}
    for name, there in parts.items():
        lines = [
            Compared(f"batch {choose_batch(size, batch)}", getattr(epoch, name, None), seconds, f"{seconds:.3f} s")
            for batch, epoch in epochs.items()
            if (seconds := there.get(batch)) is not None
        ]
        title = f"Epoch 2 {'without' if name == 'compute_seconds' else 'with'} loading, timed"
        yield make_beside_table("seconds", lines, title=title, size=size, notes=(ONE_RUN,))


def read_timed(size: Size, outcomes: Outcomes) -> dict[int, float]:
    """Epoch 2 without loading, by batch."""
    epochs = {batch: read_second_epoch(outcomes.get(f"timed{batch}")) for batch in published.COMPUTE_SECONDS}
    known = {choose_batch(size, batch): epoch.compute_seconds for batch, epoch in epochs.items() if epoch}
    return {batch: seconds for batch, seconds in known.items() if seconds is not None}


def name_timed(epochs: Mapping[int, float], batches: Sequence[int]) -> str:
    """` Epoch 2 without loading took 7.41 s at batch 8, 4.80 s at 32 (timed once).`; empty where it was not timed."""
    said = [f"{say('seconds', epochs[batch])} at batch {batch}" for batch in batches if batch in epochs]
    return f" Epoch 2 without loading took {', '.join(said)} (timed once)." if said else ""


def answer_batches(arms: Sequence[Arm], timed: Mapping[int, float]) -> dict[str, str]:
    """Whether throughput grows from the smallest batch to the next, and whether it still does after that."""
    ordered = sorted(arms, key=lambda arm: arm.trial.global_batch)
    gains = []
    for before, arm in pairwise(ordered):
        factor = arm.trial.global_batch / before.trial.global_batch
        gain = scale(divide_steps(before, arm), factor)
        if gain is not None:
            gains.append((f"from batch {before.trial.global_batch} to {arm.trial.global_batch}", gain))
    if len(gains) < 2:
        return {}
    words = {Verdict.SLOWER: "It grows", Verdict.FASTER: "It falls", Verdict.NO_DIFFERENCE: "It stays the same"}
    verdicts = [words.get(judge(gain), UNTOLD) for _, gain in gains]
    times = [f"{format_quantity('ratio', gain)} times the images/s {what}" for what, gain in gains]
    later = "; ".join(  # neighbours with one verdict share it
        f"{verdict}: {', '.join(said for _, said in group)}"
        for verdict, group in groupby(zip(verdicts[1:], times[1:], strict=True), key=lambda pair: pair[0])
    )
    batches = [arm.trial.global_batch for arm in ordered]
    per_image = ordered[0].step.value / ordered[0].trial.global_batch
    return {
        "grows": f"{verdicts[0]}: {times[0]}.{name_timed(timed, batches[:2])} A step has a cost that does not grow with"
        f" its images (kernel launches, Python, the optimizer); at batch {batches[0]} an image takes"
        f" {say('seconds', per_image)} in all.",
        "flattens": f"{later}.{name_timed(timed, batches[1:])} Once every core or multiprocessor is busy, time per"
        " image is that of its arithmetic and memory traffic, whatever the batch.",
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
        sampling=make_sampling(size, rounds=3),
    )
    optimizers = PublishedOptimizers(batch_per_rank=batch, job=job, sampling=make_sampling(size, rounds=3))
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

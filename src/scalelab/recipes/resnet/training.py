"""The training run in both sizes, and its second epoch timed as a whole, as published. R7: its loader and optimizers.

In small, a narrow ResNet-18 trains on real images where times or accuracy matter, with a quarter of the published
batches (of 8192 an eighth): CIFAR-10 where its files are, else digits, whose 1,442 images hold no larger global batch.
What DDP sends does not depend on speed, and is counted on ResNet-18 itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_median
from scalelab.answers.train import TrainStudy
from scalelab.data.cifar10 import check_cifar10
from scalelab.errors import UsageError
from scalelab.recipes.evidence import (
    find_completed,
    list_arms,
    list_completed,
    quote,
    say,
)
from scalelab.recipes.feasibility import choose, make_sampling, make_sized_job
from scalelab.recipes.recipe import Answer, Main, Outcome, Outcomes, Row, Size
from scalelab.recipes.resnet import published
from scalelab.records.observations import CurvePoint
from scalelab.records.settings import Optimization, TrainingRun
from scalelab.records.trial import Option, StepKind
from scalelab.report.document import Table
from scalelab.report.tables import count_column, make_column, make_table, seconds_column, text_column
from scalelab.studies.loader_workers import LoaderWorkers
from scalelab.studies.optimizers import OptimizerName, Optimizers
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.job import Job
from scalelab.workloads.image_options import DEFAULT_PATH, NUM_TRAIN_FILES

LOADER_WORKERS = 2
SMALL_WIDTH = 4
"""Channels of the first stage in small, instead of 64."""
SMALL_BATCHES = {32: 8, 128: 32, 512: 128, 2048: 512, 8192: 1024}
"""In small, by the published one; digits hold no 2048."""
ONE_RUN = "one run each, no interval; a last partial batch is dropped"


def make_job(size: Size, *, is_counted: bool = False, **fields: Any) -> Job:
    """ResNet-18 on CIFAR-10 with two loader workers; in small a narrow one without any, on digits if need be.

    What is counted and not timed is ResNet-18 in both sizes, on random images.
    """
    images: dict[str, Option] = {"data": "cifar10", "workers": LOADER_WORKERS}
    if size == "small":
        images = {"data": find_images(), "width": SMALL_WIDTH}
    return make_sized_job(size, workload="resnet18", options={} if is_counted else images, **fields)


def find_images() -> str:
    """CIFAR-10 where it was fetched to, else digits."""
    try:
        check_cifar10(Path(DEFAULT_PATH), NUM_TRAIN_FILES)
    except UsageError:
        return "digits"
    return "cifar10"


def choose_batch(size: Size, batch: int) -> int:
    """Per device, by the published one."""
    return choose(size, small=SMALL_BATCHES.get(batch, batch), full=batch)


def name_batch(own: int, published_batch: int) -> str:
    """`batch 8 (for 32)`; once where they are the same."""
    return f"batch {own}" if own == published_batch else f"batch {own} (for {published_batch})"


def make_timed(size: Size, batch: int, num_devices: int = 1) -> TrainStudy:
    """Two epochs, of which the second is read, as published."""
    return TrainStudy(
        ranks=num_devices,
        global_batch=num_devices * choose_batch(size, batch),
        course=TrainingRun(epochs=2, log_every=10**6, evaluate_every=10**6, keep=0),
        job=make_job(size),
    )


def read_second_epoch(outcome: Outcome | None) -> CurvePoint | None:
    """The second epoch of a training run: its time with and without loading."""
    result = find_completed(outcome)
    return result.epochs[1] if result is not None and len(result.epochs) > 1 else None


class TimedEpoch(NamedTuple):
    """The second epoch of a training run; of digits, epochs of more devices drop more of the last images."""

    what: str
    seconds: float | None
    images: int | None
    printed: str

    @property
    def image_seconds(self) -> float | None:
        return self.seconds / self.images if self.seconds and self.images else None


def read_epoch(
    outcome: Outcome | None, who: str, size: Size, batch: int, there: float, *, is_loading: bool = True
) -> TimedEpoch:
    result, epoch = find_completed(outcome), read_second_epoch(outcome)
    what = f"{who}{name_batch(choose_batch(size, batch), batch)}"
    if result is None or epoch is None:
        return TimedEpoch(what, None, None, f"{there:.3f} s")
    images = (epoch.step - result.epochs[0].step) * result.trial.global_batch
    return TimedEpoch(what, epoch.seconds if is_loading else epoch.compute_seconds, images, f"{there:.3f} s")


def make_timed_table(lines: Sequence[TimedEpoch], title: str, *notes: str) -> Table | None:
    """Beside the published ones, with the time of an image: epochs differ in their images."""
    table = make_table(
        lines,
        text_column("what", "what", lambda line: line.what),
        seconds_column("ours", "ours", lambda line: line.seconds),
        count_column("images", "images", lambda line: line.images),
        seconds_column("image_seconds", "per image", lambda line: line.image_seconds),
        text_column("published", "published", lambda line: line.printed, align="right"),
        title=title,
        notes=notes or (ONE_RUN,),
    )
    return table if any(line.seconds is not None for line in lines) else None


def time_images(size: Size, outcomes: Outcomes) -> dict[int, float]:
    """The time of an image without loading in the timed epochs, by our batch."""
    found = time_computing(size, outcomes)
    return {batch: epoch.image_seconds for batch, epoch in found.items() if epoch.image_seconds is not None}


def time_computing(size: Size, outcomes: Outcomes) -> dict[int, TimedEpoch]:
    """Epoch 2 without loading, by our batch."""
    return {
        choose_batch(size, batch): read_epoch(outcomes.get(f"timed{batch}"), "", size, batch, there, is_loading=False)
        for batch, there in published.COMPUTE_SECONDS.items()
    }


def time_loading(size: Size, outcomes: Outcomes) -> Table | None:
    """Epoch 2 with loading, on one device."""
    lines = [
        read_epoch(outcomes.get(f"timed{batch}"), "", size, batch, there)
        for batch, there in published.ONE_DEVICE_SECONDS.items()
    ]
    return make_timed_table(lines, "Epoch 2 with loading, timed")


def compare_timed_images(timed: Mapping[int, float], gains: Mapping[tuple[int, int], Estimate]) -> str:
    """What epochs timed as a whole take per image, and whether some lie outside the intervals of steps."""
    known = [batch for batch in sorted({batch for pair in gains for batch in pair}) if batch in timed]
    if len(known) < 2:
        return ""
    listed = ", ".join(f"{1e3 * timed[batch]:.2f}" for batch in known)
    apart = [
        pair
        for pair, gain in gains.items()
        if set(pair) <= set(known) and not gain.holds(timed[pair[0]] / timed[pair[1]])
    ]
    why = (
        " Where they differ from that, load came in between: each is one run, and only steps took turns."
        if apart
        else ""
    )
    return f" Epochs timed as a whole take {listed} ms per image at batch {', '.join(map(str, known))}.{why}"


def count_updates(outcome: Outcome | None) -> dict[str, int]:
    """Of the first seed of every way to train."""
    return {result.trial.configuration: len(result.losses()) for result in reversed(list_completed(outcome))}


def describe_updates(updates: Mapping[str, int]) -> str:
    """`: 10 instead of 225`; empty where one is unknown."""
    return f": {updates['large']} instead of {updates['small']}" if {"small", "large"} <= set(updates) else ""


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
        notes=("training images, before each update; first seed",),
    )


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
    return Row(
        id="R7",
        title="Loader workers and optimizers",
        parts=parts,
        conclude=answer_r7,
        num_tables=1,
        is_extra=True,
    )


def answer_r7(outcomes: Outcomes) -> Answer:
    loading = [arm for arm in list_arms(outcomes.get("workers")) if arm.phase("input") is not None]
    split = [
        f"{arm.label}: {say('seconds', arm.phase('input'))} loading, {say('seconds', measure_computing(arm))} training"
        for arm in loading
    ]
    sentences = [*quote(outcomes.get("workers"))[:2], *quote(outcomes.get("optimizers"))[:1]]
    if list_arms(outcomes.get("optimizers")):
        sentences.append(
            f"sgd and nesterov use the published settings (lr {published.BASE_RATE}, momentum {published.MOMENTUM},"
            f" weight decay {published.WEIGHT_DECAY}); the others use torch's defaults."
        )
    if split:
        sentences.append(f"A step by number of workers: {'; '.join(split)}.")
    main = Main("seconds", f"loading a batch, {loading[0].label}", loading[0].phase("input")) if loading else None
    return Answer(main=main, sentences=tuple(sentences))

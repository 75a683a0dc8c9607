"""Large batch: the same epochs with a batch that is many times as large, and what wins the accuracy back.

Four ways to train, each from the same seeds: the small batch; the large batch at the same learning rate; the large
batch at a rate that has grown as the batch has (linear scaling); and that with a warm-up (Goyal et al. 2017, "Accurate,
Large Minibatch SGD"). All see every sample equally often, so the large batch makes as many times fewer updates. That
is the point of it, and the reason for what it loses.

A fifth training, the small batch cut into passes, reads how noisy the gradients are, which predicts from which batch
on a larger one is wasted. It is a training of its own, on one rank, so that the others carry no instrument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from scalelab.checks import check_at_least, check_not_negative, flag
from scalelab.errors import UsageError
from scalelab.records.settings import Course, Optimization
from scalelab.records.trial import Trial, TrialResult
from scalelab.report.document import Document
from scalelab.studies.large_batch.answer import LABELS, LARGE, NOISE, SCALED, SMALL, WARMED, group_learning
from scalelab.studies.large_batch.report import conclude_large_batch
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.real_images import name_images, put_on_images
from scalelab.studies.shared.sampling import Configuration, Sampling, plan_rounds
from scalelab.studies.shared.study import Study
from scalelab.studies.shared.sweep import MaybeStrategy, choose_strategy, describe_placement

LENET_LR = 0.01
"""lenet's own rate is for a batch of 4: with larger ones it learns nothing in a few epochs."""
NOISE_PASSES = 4
"""Into how many passes the small batch is cut, if it can be: the more, the better noise is told from gradient."""
NO_LINES = 10**9
"""Steps between two lines of a training whose lines nobody reads."""


@dataclass(frozen=True, kw_only=True)
class LargeBatch(Study):
    """Trains on real images: lenet on the digits, or CIFAR-10 with --data cifar10, and repeats it over seeds."""

    name: ClassVar[str] = "large-batch"
    title: ClassVar[str] = "Large batch"
    question: ClassVar[str] = "What does a large batch cost in accuracy, and what wins it back?"

    small_batch: int = 32
    """Samples per step, over all ranks, that the learning rate is meant for."""
    large_batch: int = 512
    """Samples per step, over all ranks, of the others."""
    epochs: int = 5
    """Passes over the training data, the same for all."""
    warmup_epochs: float = 2.0
    """Epochs over which the scaled learning rate rises. 0: nothing is trained with a warm-up."""
    seeds: int = 3
    """Trainings of each: with --seed, with the one after it, and so on."""
    ranks: int = 1
    """Ranks to train on."""
    strategy: MaybeStrategy = None
    """How the training is spread: single, dp, ddp, fsdp-full, fsdp-grad-op, fsdp-none or fsdp2. None: single on one
    rank, ddp on more."""
    job: Job = field(default_factory=lambda: Job(workload="lenet", timeout="6h"))

    def __post_init__(self) -> None:
        for name in ("small_batch", "epochs", "seeds", "ranks"):
            check_at_least(name, getattr(self, name), 1)
        check_not_negative("warmup_epochs", self.warmup_epochs)
        if self.large_batch <= self.small_batch:
            raise UsageError(
                f"--large-batch {self.large_batch} is not larger than --small-batch {self.small_batch}: use more"
            )
        if self.warmup_epochs > self.epochs:
            raise UsageError(
                f"--warmup-epochs {self.warmup_epochs:g} does not end within --epochs {self.epochs}: use fewer"
            )
        for name in ("small_batch", "large_batch"):
            if getattr(self, name) % self.ranks:
                raise UsageError(
                    f"{flag(name)} {getattr(self, name)} cannot be divided over {self.ranks} ranks: use a multiple"
                )
        _check_optimization(self.job.optimization)

    @property
    def trained_job(self) -> Job:
        """The job on real images, with a learning rate that moves."""
        job = put_on_images(self.job, "has no test images, so that accuracy cannot be told")
        wanted = job.optimization
        if job.workload == "lenet" and wanted.lr is None and wanted.optimizer is None:
            return replace(job, optimization=replace(wanted, lr=LENET_LR))
        return job

    @property
    def noise_batch(self) -> int | None:
        """Samples of one pass of the training that looks at noise; None: the small batch cannot be cut."""
        most = self.small_batch // NOISE_PASSES or 1
        found = next(size for size in range(most, 0, -1) if self.small_batch % size == 0)
        return found if found < self.small_batch else None

    def plan(self) -> list[Trial]:
        job = self.trained_job
        trials = plan_rounds(job, Sampling(rounds=self.seeds), self._list_configurations(job))
        return [self._make_training(trial, job.seed + trial.round - 1) for trial in trials]

    def _list_configurations(self, job: Job) -> list[Configuration]:
        wanted = job.optimization
        scaled = replace(wanted, lr_scaling="batch", lr_base_batch=self.small_batch)
        ways = {SMALL: (self.small_batch, wanted), LARGE: (self.large_batch, wanted)}
        ways[SCALED] = (self.large_batch, scaled)
        if self.warmup_epochs:
            ways[WARMED] = (self.large_batch, replace(scaled, lr_warmup_epochs=self.warmup_epochs))
        found = [
            Configuration(
                name=name,
                strategy=choose_strategy(self.strategy, self.ranks),
                num_ranks=self.ranks,
                global_batch=batch,
                job=_fit_passes(replace(job, optimization=optimization), batch // self.ranks),
                label=LABELS[name],
            )
            for name, (batch, optimization) in ways.items()
        ]
        if self.noise_batch is not None:
            cut = replace(job, shape=replace(job.shape, micro_batch=self.noise_batch))
            found.append(
                Configuration(
                    name=NOISE,
                    strategy="single",
                    num_ranks=1,
                    global_batch=self.small_batch,
                    job=cut,
                    label=LABELS[NOISE],
                )
            )
        return found

    def _make_training(self, trial: Trial, seed: int) -> Trial:
        """A training from its own seed instead of a measurement."""
        is_noise = trial.configuration == NOISE
        course = Course(epochs=self.epochs, log_every=1 if is_noise else NO_LINES, keep=0)
        return replace(trial, seed=seed, course=course, instruments=("gradient_noise",) if is_noise else ())

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        return conclude_large_batch(
            group_learning(results),
            question=self.question,
            setting=self._describe_setting(),
            num_epochs=self.epochs,
        )

    def _describe_setting(self) -> str:
        job = self.trained_job
        seeds = f"{self.seeds} seed{'s'[: self.seeds > 1]}"
        epochs = f"{self.epochs} epoch{'s'[: self.epochs > 1]}"
        batches = f"batch {self.small_batch} against {self.large_batch}"
        place = describe_placement(self.strategy, self.ranks)
        return " · ".join([job.label, name_images(job), place, job.dtype, batches, epochs, seeds])


def _fit_passes(job: Job, batch_per_rank: int) -> Job:
    """A --micro-batch is for the batches that do not fit at once: the others stay whole."""
    micro = job.shape.micro_batch
    if micro is None or micro < batch_per_rank:
        return job
    return replace(job, shape=replace(job.shape, micro_batch=None))


def _check_optimization(optimization: Optimization) -> None:
    """Refuse what the study itself varies."""
    for name in ("lr_scaling", "lr_warmup", "lr_warmup_epochs"):
        value = getattr(optimization, name)
        if value != getattr(Optimization(), name):
            raise UsageError(
                f"{flag(name)} {value} cannot be given here: this study trains with and without it; use --warmup-epochs"
            )

"""Large batch: the same epochs with a batch that is many times as large, and what wins the accuracy back.

Four ways to train, each from the same seeds: the small batch; the large batch at the same learning rate; the large
batch at a learning rate scaled with the batch (linear scaling); and that with a warm-up (Goyal et al. 2017, "Accurate,
Large Minibatch SGD"). All see every sample equally often, so the large batch makes fewer updates. That is the point of
it, and the reason for what it loses.

A fifth training run, the small batch cut into micro-batches, measures how noisy the gradients are, which predicts from
which batch on a larger one is wasted. It runs separately, on one rank, so that the others carry no instrument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from scalelab.checks import check_at_least, check_not_negative, flag
from scalelab.errors import UsageError
from scalelab.records.settings import Optimization, TrainingRun
from scalelab.records.strategies import PLAIN, StrategyName, choose_strategy
from scalelab.records.tasks import Train
from scalelab.records.trial import Trial, TrialResult
from scalelab.report.document import Document
from scalelab.studies.large_batch.answer import (
    LABELS,
    LARGE,
    NOISE,
    SCALED,
    SMALL,
    WARMED,
    find_noise_scales,
    group_learning,
)
from scalelab.studies.large_batch.report import find_learning_cautions, make_sections, summarise_large_batch
from scalelab.studies.shared.job import Job, name_images, put_on_images
from scalelab.studies.shared.study import Configuration, Sampling, Study, plan_rounds
from scalelab.studies.shared.sweep import describe_placement
from scalelab.units import format_count

LENET_LR = 0.01
"""lenet's default learning rate is for a batch of 4: with larger ones it learns nothing in a few epochs."""
NOISE_PASSES = 4
"""Micro-batches that the small batch is cut into, if possible: more separate noise from gradient better."""
NO_LINES = 10**9
"""Steps between two lines of the training log: none."""


@dataclass(frozen=True, kw_only=True)
class LargeBatch(Study):
    """Train on real images (lenet on the digits, or --data cifar10) with a small and a large batch, over seeds."""

    quick_fields: ClassVar[Mapping[str, Any]] = {"seeds": 2, "epochs": 2, "warmup_epochs": 1.0}
    quick_cost: ClassVar[str] = "accuracies are of short training and hardly have intervals"

    small_batch: int = 32
    """Global batch size that the learning rate was tuned for."""
    large_batch: int = 512
    """Global batch size of the other runs."""
    epochs: int = 5
    """Epochs, the same for all."""
    warmup_epochs: float = 2.0
    """Epochs over which the scaled learning rate rises. 0: no run with warm-up."""
    seeds: int = 3
    """Training runs per configuration, with seeds from --seed up."""
    ranks: int = 1
    """Ranks to train on."""
    strategy: StrategyName | None = None
    """How training is distributed. None: single on one rank, ddp on more."""
    job: Job = field(default_factory=lambda: Job(workload="lenet", timeout="6h"))

    def __post_init__(self) -> None:
        for name in ("small_batch", "epochs", "seeds", "ranks"):
            check_at_least(name, getattr(self, name), 1)
        check_not_negative("warmup_epochs", self.warmup_epochs)
        if self.large_batch <= self.small_batch:
            raise UsageError(
                f"--large-batch {self.large_batch} is not larger than --small-batch {self.small_batch}: raise it"
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
        job = put_on_images(self.job, "has no test images, so there is no accuracy")
        wanted = job.optimization
        if job.workload == "lenet" and wanted.lr is None and wanted.optimizer is None:
            return replace(job, optimization=replace(wanted, lr=LENET_LR))
        return job

    @property
    def noise_batch(self) -> int | None:
        """Micro-batch of the run that measures noise; None: the small batch cannot be cut."""
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
                    strategy=PLAIN,
                    num_ranks=1,
                    global_batch=self.small_batch,
                    job=cut,
                    label=LABELS[NOISE],
                )
            )
        return found

    def _make_training(self, trial: Trial, seed: int) -> Trial:
        """A training run with its own seed instead of a measurement."""
        is_noise = trial.configuration == NOISE
        run = TrainingRun(epochs=self.epochs, log_every=1 if is_noise else NO_LINES, keep=0)
        return replace(trial, seed=seed, task=Train(run=run), instruments=("gradient_noise",) if is_noise else ())

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        arms = group_learning(results)
        scales = find_noise_scales(arms.get(NOISE), self.epochs)
        return Document(
            title=self.title,
            question=self.question,
            setting=self._describe_setting(),
            sections=tuple(make_sections(arms, scales, self.epochs)),
            findings=tuple(summarise_large_batch(arms, scales, self.epochs)),
            cautions=tuple(find_learning_cautions(arms, scales, self.epochs)),
        )

    def _describe_setting(self) -> str:
        job = self.trained_job
        batches = f"batch {self.small_batch} against {self.large_batch}"
        lengths = [format_count(self.epochs, "epoch"), format_count(self.seeds, "seed")]
        place = describe_placement(self.strategy, self.ranks)
        return " · ".join([job.label, name_images(job), place, job.dtype, batches, *lengths])


def _fit_passes(job: Job, batch_per_rank: int) -> Job:
    """--micro-batch is for batches that do not fit at once: the others stay whole."""
    micro = job.shape.micro_batch
    if micro is None or micro < batch_per_rank:
        return job
    return replace(job, shape=replace(job.shape, micro_batch=None))


def _check_optimization(optimization: Optimization) -> None:
    """Reject what the study itself varies."""
    for name in ("lr_scaling", "lr_warmup", "lr_warmup_epochs"):
        value = getattr(optimization, name)
        if value != getattr(Optimization(), name):
            raise UsageError(
                f"{flag(name)} {value} is set by this study, which trains with and without it: use --warmup-epochs"
            )

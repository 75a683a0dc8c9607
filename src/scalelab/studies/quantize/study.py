"""Quantize: a trained convolutional network is taken to int8; what that costs, what it gains, which layer is to blame.

One trial trains the workload, unless it comes trained, and quantizes it in the same process (`quantize/pipeline.py`):
ranges from training samples, integers, a simulation that is exact, an ONNX model that is run, torch's own integer
kernels beside it. The rank leaves predictions and times as they are; everything that is said of them is derived here.

Nothing is trained again after rounding: this is post-training quantization.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from scalelab.checks import check_at_least, check_one_of, flag
from scalelab.errors import UsageError
from scalelab.ranks.affinity import default_threads_per_rank
from scalelab.records.environment import count_cores
from scalelab.records.settings import (
    CalibrationMethod,
    Course,
    KernelProfile,
    LabBias,
    LabRange,
    MaybeFloat,
    MaybeInt,
    Quantization,
)
from scalelab.records.trial import Trial, TrialResult
from scalelab.report.document import Document
from scalelab.report.findings import as_findings
from scalelab.studies.quantize.answer import compare_stages, find_latencies
from scalelab.studies.quantize.findings import find_cautions, summarise
from scalelab.studies.quantize.report import add_charts, make_sections
from scalelab.studies.shared.job import Job, check_gpus, describe_trial_fields
from scalelab.studies.shared.real_images import name_images, put_on_images
from scalelab.studies.shared.study import Study

LAB = "lab"
ONLY_WITH_LAB = ("lab_peak", "lab_bias", "lab_range")
ONLY_WITHOUT_LAB = ("mixed", "profile", "per_tensor", "round_logits", "tested")
DEFAULT_EPOCHS = 10
LENET_LR = 0.01
LENET_OWN_BATCH = 8
"""lenet's own learning rate is for batches of 4: with larger ones than these it learns nothing in a few epochs."""
LINES = 100
"""Steps between two lines of the training."""


@dataclass(frozen=True, kw_only=True)
class Quantize(Study):
    """Takes a trained network to int8: trains lenet on the digits first, or takes trained weights with --weights."""

    name: ClassVar[str] = "quantize"
    title: ClassVar[str] = "Quantization"
    question: ClassVar[str] = "What does int8 cost in accuracy and gain in size and speed, and which layer is to blame?"

    epochs: MaybeInt = None
    """Passes over the training data before. 0: the model is quantized as build() gives it. None: 10, or 0 with
    --weights."""
    global_batch: int = 32
    """Samples of a training step."""
    weights: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Trained weights: a state_dict that torch.save wrote."""
    calibration: CalibrationMethod = "mse"
    """How the range of every layer's result is found: the largest number seen, so many deviations, a percentile, the
    least squared error, the least entropy lost; lab: the chained scales of the laboratory, rounded without a zero
    point."""
    samples: int = 512
    """Training samples that ranges are found on."""
    per_tensor: bool = False
    """One scale for all weights of a layer. Otherwise each output channel has its own."""
    round_logits: bool = False
    """Round the logits to a byte as well, as other tools do: now and then two classes then have the same."""
    profile: KernelProfile = "onnxruntime"
    """Whose kernels are simulated: they round in different ways."""
    mixed: MaybeFloat = None
    """Keep the worst layers in float until at most so many points of accuracy are lost, for example 0.2."""
    tested: MaybeInt = None
    """Test samples that every layer is tried alone on. None: as many as take about a minute."""
    lab_peak: int = 127
    """Only with --calibration lab: what the largest activation becomes, 127, or 255 as published, which saturates."""
    lab_bias: LabBias = "scaled"
    """Only with --calibration lab: a bias as an int32 at the scale of the sums, as it is, or left out."""
    lab_range: LabRange = "max"
    """Only with --calibration lab: weights are scaled by their largest, or by three deviations."""
    job: Job = field(default_factory=lambda: Job(workload="lenet", timeout="6h"))

    def __post_init__(self) -> None:
        check_at_least("global_batch", self.global_batch, 1)
        if self.epochs is not None:
            check_at_least("epochs", self.epochs, 0)
        check_one_of("lab_peak", str(self.lab_peak), ("127", "255"))
        assert self.quantization is not None  # what it refuses is refused now
        if self.job.dtype not in ("float32", "tf32") and not self.job.shape.autocast:
            raise UsageError(f"--dtype {self.job.dtype} cannot be quantized: use float32, or add --autocast")
        self._check_lab()

    def _check_lab(self) -> None:
        """Refuse what is not read with the chosen calibration."""
        is_lab = self.calibration == LAB
        unread = ONLY_WITHOUT_LAB if is_lab else ONLY_WITH_LAB
        with_or_not = "with" if is_lab else "without"
        for name in unread:
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise UsageError(f"{flag(name)} is not read {with_or_not} --calibration lab: leave it out")

    @property
    def num_epochs(self) -> int:
        """Of the training before."""
        return self.epochs if self.epochs is not None else 0 if self.weights else DEFAULT_EPOCHS

    @property
    def quantization(self) -> Quantization:
        return Quantization(
            method=self.calibration,
            num_samples=self.samples,
            is_per_tensor=self.per_tensor,
            rounds_logits=self.round_logits,
            profile=self.profile,
            mixed_points=self.mixed,
            num_tested=self.tested,
            weights=str(Path(self.weights).expanduser().absolute()) if self.weights else "",
            lab_peak=self.lab_peak,
            lab_bias=self.lab_bias,
            lab_range=self.lab_range,
        )

    @property
    def trained_job(self) -> Job:
        """The job on real images, with a learning rate that suits the batch."""
        job = put_on_images(self.job, "has no images")
        wanted = job.optimization
        if job.workload != "lenet" or self.global_batch <= LENET_OWN_BATCH or wanted.lr is not None or wanted.optimizer:
            return job
        return replace(job, optimization=replace(wanted, lr=LENET_LR))

    def plan(self) -> list[Trial]:
        job = self.trained_job
        if self.weights and not Path(self.weights).expanduser().is_file():
            raise UsageError(f"--weights {self.weights} is no file: give a state_dict that torch.save wrote")
        if job.found_device == "cuda" and not job.is_elsewhere:
            check_gpus(1)
        epochs = self.num_epochs
        return [
            Trial(
                configuration="quantize",
                strategy="single",
                num_ranks=1,
                global_batch=self.global_batch,
                threads_per_rank=job.threads_per_rank or choose_threads(job),
                course=Course(epochs=epochs, log_every=LINES, keep=0) if epochs else None,
                quantization=self.quantization,
                **describe_trial_fields(job, "single"),
            )
        ]

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        quantized = next((result.quantized for result in results if result.quantized), None)
        cautions = tuple(find_cautions(results, quantized, self.quantization))
        document = Document(
            title=self.title, question=self.question, setting=self._describe_setting(), cautions=cautions
        )
        if quantized is None or not quantized.stages:
            return document
        answers, latencies = compare_stages(quantized), find_latencies(quantized)
        return replace(
            document,
            sections=tuple(add_charts(make_sections(quantized, answers, latencies), quantized, answers, latencies)),
            findings=as_findings(summarise(quantized, answers, latencies)),
        )

    def _describe_setting(self) -> str:
        job = self.trained_job
        epochs = self.num_epochs
        trained = f"{epochs} epoch{'s'[: epochs > 1]}" if epochs else "as given"
        scales = "per tensor" if self.per_tensor or self.calibration == LAB else "per channel"
        ranges = f"int8 by {self.calibration} of {self.samples} samples, weights {scales}"
        return " · ".join([job.label, name_images(job), trained, ranges])


def choose_threads(job: Job) -> int:
    """lenet is so small that threads wait for each other: on a busy machine, two took six times as long as one."""
    return 1 if job.workload == "lenet" else default_threads_per_rank(1, count_cores())

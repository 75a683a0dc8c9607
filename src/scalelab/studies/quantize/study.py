"""Quantize: post-training int8 quantization of a convolutional network: its cost, its gain, the layer to blame.

One trial trains the workload, unless it comes trained, and quantizes it in the same process (`quantize/pipeline.py`):
ranges from training samples, integers, an exact simulation, an ONNX model that is run, and torch's own integer
kernels. The rank stores raw predictions and times; everything else is derived here. Nothing is retrained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro

from scalelab.checks import check_at_least, check_one_of, flag
from scalelab.errors import UsageError
from scalelab.launch.ranks.placement import default_threads_per_rank
from scalelab.records.environment import count_cores
from scalelab.records.settings import MaybeFloat, MaybeInt, TrainingRun
from scalelab.records.strategies import PLAIN
from scalelab.records.tasks import CalibrationMethod, KernelProfile, LabBias, LabRange, Quantization, Quantize
from scalelab.records.trial import Trial, TrialResult
from scalelab.report.document import Document
from scalelab.studies.quantize.answer import compare_stages, find_latencies
from scalelab.studies.quantize.findings import find_cautions, summarise
from scalelab.studies.quantize.report import make_sections
from scalelab.studies.shared.job import Job, check_devices, describe_trial_fields, name_images, put_on_images
from scalelab.studies.shared.study import Study
from scalelab.units import format_count

LAB = "lab"
ONLY_WITH_LAB = ("lab_peak", "lab_bias", "lab_range")
ONLY_WITHOUT_LAB = ("mixed", "profile", "per_tensor", "round_logits", "tested")
DEFAULT_EPOCHS = 10
LENET_LR = 0.01
LENET_OWN_BATCH = 8
"""lenet's default learning rate is for batches of 4: with larger ones than this it learns nothing in a few epochs."""
LINES = 100
"""Steps between two lines of the training log."""


@dataclass(frozen=True, kw_only=True)
class QuantizeStudy(Study):
    """Quantize a network to int8: train lenet on the digits first, or use trained --weights."""

    quick_fields: ClassVar[Mapping[str, Any]] = {"tested": 100}
    quick_cost: ClassVar[str] = "the ranking of the layers is coarse"

    epochs: MaybeInt = None
    """Epochs to train before quantizing. 0: quantize the model as build() returns it. None: 10, or 0 with --weights."""
    global_batch: int = 32
    """Samples per training step."""
    weights: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Trained weights: a state_dict saved by torch.save."""
    calibration: CalibrationMethod = "mse"
    """How the range of every layer's output is chosen: the largest value seen, a number of deviations, a percentile,
    least squared error, least entropy; lab: the chained scales of the laboratory, without a zero point."""
    samples: int = 512
    """Training samples to calibrate on."""
    per_tensor: bool = False
    """One scale for all weights of a layer instead of one per output channel."""
    round_logits: bool = False
    """Also round the logits to int8, as other tools do; two classes may then tie."""
    profile: KernelProfile = "onnxruntime"
    """Whose kernels are simulated: they round differently."""
    mixed: MaybeFloat = None
    """Keep the worst layers in float until at most this many points of accuracy are lost, for example 0.2."""
    tested: MaybeInt = None
    """Test samples for quantizing each layer alone. None: as many as take about a minute."""
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
        assert self.settings is not None  # what it refuses is refused now
        if self.job.dtype not in ("float32", "tf32") and not self.job.shape.autocast:
            raise UsageError(f"--dtype {self.job.dtype} cannot be quantized: use float32, or add --autocast")
        self._check_lab()

    def _check_lab(self) -> None:
        """Reject flags that the chosen calibration does not read."""
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
    def settings(self) -> Quantization:
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
            raise UsageError(f"--weights {self.weights} is not a file: give a state_dict saved by torch.save")
        check_devices(job, 1)
        epochs = self.num_epochs
        run = TrainingRun(epochs=epochs, log_every=LINES, keep=0) if epochs else None
        return [
            Trial(
                configuration="quantize",
                strategy=PLAIN,
                num_ranks=1,
                global_batch=self.global_batch,
                threads_per_rank=job.threads_per_rank or choose_threads(job),
                task=Quantize(settings=self.settings, run=run),
                **describe_trial_fields(job, PLAIN),
            )
        ]

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        quantized = next((result.quantized for result in results if result.quantized), None)
        cautions = tuple(find_cautions(results, quantized, self.settings))
        document = Document(
            title=self.title, question=self.question, setting=self._describe_setting(), cautions=cautions
        )
        if quantized is None or not quantized.stages:
            return document
        answers, latencies = compare_stages(quantized), find_latencies(quantized)
        return replace(
            document,
            sections=tuple(make_sections(quantized, answers, latencies)),
            findings=tuple(summarise(quantized, answers, latencies)),
        )

    def _describe_setting(self) -> str:
        job = self.trained_job
        epochs = self.num_epochs
        trained = format_count(epochs, "epoch") if epochs else "as given"
        scales = "per tensor" if self.per_tensor or self.calibration == LAB else "per channel"
        ranges = f"int8 by {self.calibration} of {self.samples} samples, weights {scales}"
        return " · ".join([job.label, name_images(job), trained, ranges])


def choose_threads(job: Job) -> int:
    """lenet is so small that threads wait for each other: on a busy machine, two took six times as long as one."""
    return 1 if job.workload == "lenet" else default_threads_per_rank(1, count_cores())

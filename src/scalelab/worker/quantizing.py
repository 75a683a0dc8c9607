"""Quantize a trained model in the rank's process: choose the samples that calibrate and test it.

Built-in image workloads are calibrated on the first stored training images without augmentation, so ranges do not
depend on how long was trained or on the batch size. A user's workload is calibrated on its next batches. It is tested
on its test batches; without any, on the training batches after those, and then only agreement is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scalelab.data.order import Sequential
from scalelab.errors import UsageError
from scalelab.launch.agreement import quantized_file
from scalelab.quantize.capture import unwrap
from scalelab.quantize.held_out import HeldOut, split_batch, take_samples
from scalelab.quantize.lab.chain import LabSettings
from scalelab.quantize.lab.stages import run_lab
from scalelab.quantize.pipeline import Pipeline, Task
from scalelab.records.files import write_json
from scalelab.records.quantized import Quantized
from scalelab.records.tasks import Quantization
from scalelab.records.trial import Trial, to_builtins
from scalelab.worker.batches.drawn import ImageFetch, SampleBatches
from scalelab.worker.models.networks import load_images, normalise_by_half
from scalelab.worker.training import Training
from scalelab.workloads.catalogue import BUILT_IN
from scalelab.workloads.image_options import ImageOptions

BATCH = 64
"""Samples per batch."""
WITHOUT_TEST = 512
"""Training samples used to measure agreement if there are no test batches."""
MOST_SKIPPED = 100_000
"""Batches after which endless data without samples is given up."""


def quantize_training(trial: Trial, settings: Quantization, training: Training, directory: Path) -> None:
    """Quantize the trained model to int8; results are written to the trial's directory as they come."""
    model = unwrap(training.model).cpu().eval()
    calibration = list(take_samples(calibration_batches(trial, training), settings.num_samples))
    if not calibration:
        raise UsageError("there are no calibration samples: return non-empty batches from build()")

    def leave(record: Quantized) -> None:
        write_json(quantized_file(directory), to_builtins(record))

    if settings.method == "lab":
        leave(run_lab(model, calibration, list_pairs(training), make_lab_settings(settings), directory))
        return
    task = Task(
        model=model,
        calibration=calibration,
        test=find_test(training, calibration),
        settings=settings,
        directory=directory,
        seed=trial.seed,
    )
    Pipeline(task, leave).run()


def load_weights(model: nn.Module, file: str) -> None:
    """Load trained weights from a file, if one is given; a mismatch raises an error that lists the differences."""
    if not file:
        return
    advice = "save it with torch.save(model.state_dict(), …)"
    try:
        found: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UsageError(f"--weights {file} cannot be read ({type(error).__name__}): {advice}") from error
    state = find_state(found)
    if state is None:
        raise UsageError(f"--weights {file} holds a {type(found).__name__}, not a state_dict: {advice}")
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        words = " ".join(line.strip() for line in str(error).splitlines()[1:3])
        raise UsageError(f"--weights {file} does not match the model: {words}") from error


def find_state(found: Any) -> dict[str, torch.Tensor] | None:
    """A state_dict, or the one inside a training checkpoint; names without DDP's prefix."""
    if not isinstance(found, dict):
        return None
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(found.get(key), dict):
            found = found[key]
    if not found or not all(isinstance(value, torch.Tensor) for value in found.values()):
        return None
    return {str(name).removeprefix("module."): value for name, value in found.items()}


def make_lab_settings(settings: Quantization) -> LabSettings:
    return LabSettings(
        peak=settings.lab_peak,
        bias=settings.lab_bias,
        weight_range=settings.lab_range,
        samples=settings.num_samples,
    )


def calibration_batches(trial: Trial, training: Training) -> Iterator[torch.Tensor]:
    """Training images, as stored for a built-in image workload."""
    options = BUILT_IN[trial.workload](**trial.options) if trial.workload in BUILT_IN else None
    if isinstance(options, ImageOptions) and options.data != "synthetic":
        images = load_images(options, "train")
        if trial.workload == "lenet":
            images = normalise_by_half(images)
        batches: Iterable[Any] = SampleBatches(
            ImageFetch(images, augment=False),
            len(images),
            batch_size=min(BATCH, len(images)),
            rank=0,
            num_ranks=1,
            seed=trial.seed,
            order=Sequential(),
            is_test=True,
        )
    else:
        batches = training.batches
    for number, batch in enumerate(batches):
        if number >= MOST_SKIPPED:
            return
        yield split_batch(batch, number)[0].detach().cpu()


def find_test(training: Training, calibration: Iterable[torch.Tensor]) -> HeldOut:
    """The test batches; without any, the training batches after calibration."""
    if training.test_batches is not None:
        return HeldOut(training.test_batches)
    following = (split_batch(batch)[0].detach().cpu() for batch in training.batches)
    images = list(take_samples(following, WITHOUT_TEST))
    # A short list of training batches starts over.
    seen = set(list_contents(calibration))
    num_seen = sum(content in seen for content in list_contents(images))
    told = f"{sum(map(len, images))} training samples following the calibration samples"
    return HeldOut(images, told=told + (f", {num_seen} of them also used for calibration" if num_seen else ""))


def list_contents(batches: Iterable[torch.Tensor]) -> Iterator[bytes]:
    """The values of every sample, to detect duplicates."""
    return (sample.contiguous().numpy().tobytes() for images in batches for sample in images)


def list_pairs(training: Training) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Test batches as pairs of images and classes."""
    found = [split_batch(batch) for batch in training.test_batches or ()]
    if not found or not all(labels for _, labels in found):
        raise UsageError(
            "--calibration lab needs labelled test samples: return test_batches of (image, label) pairs from build()"
        )
    return [(images, torch.tensor(labels)) for images, labels in found]

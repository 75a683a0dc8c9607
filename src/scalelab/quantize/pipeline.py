"""Take a trained model to int8 and record what that costs.

`quantize_model` is the recipe: capture, calibrate, quantize. `scalelab run quantize` and the int8 benchmarks both call
it. `Pipeline` runs it and then every stage that a report needs:

    predict      the class of every test sample, in float and by exact integers
    diagnose     each layer alone in int8, and alone in float
    mixed        layers kept in float (--mixed)
    histograms   weights and outputs, with the chosen ranges
    eager        torch's own integer kernels
    export       float32.onnx and int8.onnx, executed by onnxruntime
    time         latencies of all runtimes, interleaved
    kernels      what really ran, layer by layer

A failure in the recipe or the predictions is an error; a later stage that fails leaves a remark. The record is saved
after every stage, so a process that dies in a kernel keeps what it had.

`--mixed` is greedy: keep the layer with the most noise in float, then the next, until at most so many right predictions
are lost; then give back each one that is not needed. A smaller set may exist. A layer in float still rounds its output,
so only weights are saved; a range that clips needs another --calibration.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scalelab.errors import ScalelabError, UsageError
from scalelab.quantize.calibrate import Calibration, calibrate
from scalelab.quantize.capture import capture_network
from scalelab.quantize.diagnosis import (
    IMAGES,
    LayerDiagnosis,
    choose_num_tested,
    count_multiply_adds,
    count_right,
    count_tied,
    diagnose,
    list_histograms,
    make_rounding,
)
from scalelab.quantize.eager import make_eager
from scalelab.quantize.export import Run, export_models, list_sizes, name_kernels
from scalelab.quantize.held_out import HeldOut, check_finite
from scalelab.quantize.network import WEIGHTED, CapturedNetwork, QuantizedNetwork, run_float
from scalelab.quantize.scales import list_remarks, quantize_network
from scalelab.quantize.sessions import Call, one_thread, time_runtimes
from scalelab.quantize.simulate import simulate_logits
from scalelab.records.quantized import SMALL_NET, LayerReport, Quantized, Stage
from scalelab.records.tasks import Quantization

NUM_CHECKED_FOR_TIES = 256
MIXED_CHUNK = 64

CountRight = Callable[[tuple[str, ...]], int]
"""Right predictions with these layers in float."""
Leave = Callable[[Quantized], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedModel:
    """A module in int8, and what it was made from."""

    network: CapturedNetwork
    calibration: Calibration
    quantized: QuantizedNetwork


def quantize_model(model: nn.Module, batches: Sequence[torch.Tensor], settings: Quantization) -> QuantizedModel:
    """Quantize a module in eval mode, on the CPU; `batches`: calibration images as in training."""
    if settings.method == "lab":
        raise UsageError("--calibration lab has its own stages: use run_lab")
    for number, images in enumerate(batches):
        check_finite(images, f"calibration batch {number}")
    example = next((images[:2] for images in batches if len(images)), None)
    if example is None:
        raise UsageError("there are no calibration samples: pass at least one batch; a few hundred samples are usual")
    network = capture_network(model, example)
    check_logits(network, example)
    calibration = calibrate(network, batches, settings.method)
    quantized = quantize_network(network, calibration, settings)
    return QuantizedModel(network=network, calibration=calibration, quantized=quantized)


def check_logits(network: CapturedNetwork, example: torch.Tensor) -> None:
    shape = tuple(run_float(network, example)[network.output].shape)
    if len(shape) != 2 or shape[1] < 2:
        raise UsageError(f"the model returns shape {shape}: it must return one row of class scores per sample")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The layers kept in float, in the order chosen."""

    names: tuple[str, ...]
    num_lost: int
    """Right predictions of float minus those left."""
    is_within: bool


def rank_by_noise(layers: Sequence[LayerReport]) -> list[str]:
    """The weighted layers, most noise in the logits first."""
    weighted = [layer for layer in layers if layer.op in WEIGHTED and layer.output_sqnr is not None]
    return [layer.name for layer in sorted(weighted, key=lambda layer: layer.output_sqnr or 0.0)]


def choose_float_layers(ranked: Sequence[str], correct_float: int, most_lost: float, count_right: CountRight) -> Choice:
    """Keep layers until at most `most_lost` predictions are lost; give back those not needed."""
    kept: list[str] = []
    lost = correct_float - count_right(())
    for name in ranked:
        if lost <= most_lost:
            break
        kept.append(name)
        lost = correct_float - count_right(tuple(kept))
    if lost > most_lost:
        return Choice(names=tuple(kept), num_lost=lost, is_within=False)
    for name in kept[:-1]:
        fewer = [other for other in kept if other != name]
        left = correct_float - count_right(tuple(fewer))
        if left <= most_lost:
            kept, lost = fewer, left
    return Choice(names=tuple(kept), num_lost=lost, is_within=True)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to quantize, on which samples, how, and where models are written."""

    model: nn.Module
    """Trained, in eval mode, on the CPU."""
    calibration: Sequence[torch.Tensor]
    """Batches of training images."""
    test: HeldOut
    settings: Quantization
    directory: Path
    seed: int = 0


class Pipeline:
    """`record` is what is known so far."""

    def __init__(self, task: Task, leave: Leave) -> None:
        self._task, self._leave = task, leave
        self.record = Quantized(labels=task.test.labels, stages=(), tested_on=task.test.told)

    def run(self) -> Quantized:
        """All stages."""
        task = self._task
        made = quantize_model(task.model, task.calibration, task.settings)
        with one_thread() if is_small(made.network) else nullcontext():
            self._describe(made)
            self._go_through(made.network, made.calibration, made.quantized)
        return self.record

    def _go_through(self, network: CapturedNetwork, calibration: Calibration, quantized: QuantizedNetwork) -> None:
        task = self._task
        self._predict("float", "float", task.model)
        self._predict("int8", "int8", partial(self._simulate, quantized))
        diagnosis = self._try("the diagnosis of layers", partial(self._diagnose, network, quantized))
        if task.settings.mixed_points is not None and diagnosis is not None:
            quantized = self._mix(network, calibration, diagnosis)
        runtimes: dict[str, Run] = {"eager-float32": task.model}
        with self._optional("histograms"):
            self._add(histograms=list_histograms(quantized, calibration))
        with self._optional("int8 by torch"):
            self._use_torch(quantized, runtimes)
        with self._optional("int8 by onnxruntime"):
            self._use_onnxruntime(network, quantized, runtimes)
        with self._optional("latency"):
            self._time(runtimes)
        if self.record.sizes:
            with self._optional("the table of kernels"):
                self._look_at_kernels()

    def _add(self, **fields: Any) -> None:
        self.record = replace(self.record, **fields)
        self._leave(self.record)

    def _remark(self, words: str) -> None:
        self._add(remarks=(*self.record.remarks, words))

    @contextmanager
    def _optional(self, stage: str) -> Iterator[None]:
        """A stage that may fail: a remark says what is missing and why."""
        try:
            yield
        except ScalelabError as error:
            self._remark(f"{stage} is missing: {error}")
        except Exception as error:  # noqa: BLE001 - whatever it is, what was found before it is kept
            traceback.print_exc()
            words = str(error).splitlines()[0] if str(error) else "no message"
            self._remark(f"{stage} is missing: it failed ({type(error).__name__}: {words}); see the rank's log")

    def _try(self, stage: str, find: Callable[[], LayerDiagnosis]) -> LayerDiagnosis | None:
        found: list[LayerDiagnosis] = []
        with self._optional(stage):
            found.append(find())
        return found[0] if found else None

    def _describe(self, made: QuantizedModel) -> None:
        settings, num_samples = self._task.settings, made.calibration.num_samples
        scales = "layer" if settings.is_per_tensor else "output channel"
        told = f"{settings.method} over {num_samples} training samples, one weight scale per {scales}"
        self._add(calibration=told, num_calibrated=num_samples)
        for remark in list_remarks(made.network, made.calibration):
            self._remark(f"{remark}.")

    def _simulate(self, quantized: QuantizedNetwork, images: torch.Tensor) -> torch.Tensor:
        return simulate_logits(quantized, images, profile=self._task.settings.profile)

    def _predict(self, name: str, title: str, predict: Run, note: str = "") -> None:
        stage = Stage(name=name, title=title, predictions=self._task.test.predict(predict), note=note)
        self._add(stages=(*self.record.stages, stage))

    def _diagnose(self, network: CapturedNetwork, quantized: QuantizedNetwork) -> LayerDiagnosis:
        test = self._task.test
        num_tested = choose_num_tested(network, test.num_samples, self._task.settings.num_tested)
        diagnosis = diagnose(network, quantized, *test.choose(num_tested))
        layers = tuple(
            replace(layer, tied_outputs=self._count_ties(quantized)) if layer.name == network.output else layer
            for layer in diagnosis.layers
        )
        self._add(layers=layers, correct_float=diagnosis.correct_float, correct_int8=diagnosis.correct_int8)
        self._remark_on_layers()
        return diagnosis

    def _count_ties(self, quantized: QuantizedNetwork) -> int:
        """Samples with a tied largest logit, among some of the test samples."""
        logits = self._simulate(quantized, self._task.test.choose(NUM_CHECKED_FOR_TIES)[0])
        return count_tied(logits)

    def _remark_on_layers(self) -> None:
        dead = [f"{layer.name} {layer.dead_outputs}" for layer in self.record.layers if layer.dead_outputs]
        if dead:
            self._remark(
                f"Output channels constant over all samples: {', '.join(dead)}. They are dead in float too, or"
                " too small for their layer's grid."
            )
        tied = next((layer.tied_outputs for layer in self.record.layers if layer.tied_outputs), None)
        if tied:
            num_checked = min(NUM_CHECKED_FOR_TIES, self._task.test.num_samples)
            self._remark(
                f"In {tied} of {num_checked} samples two classes share the largest logit; the first one counts."
            )

    def _mix(self, network: CapturedNetwork, calibration: Calibration, diagnosis: LayerDiagnosis) -> QuantizedNetwork:
        """Keep layers in float until the bound holds on the tested samples."""
        points = self._task.settings.mixed_points
        if diagnosis.correct_float is None or points is None:
            raise UsageError(
                "--mixed needs labelled test samples: return test_batches of (image, label) pairs from build()"
            )
        num_tested = next(layer.num_tested for layer in diagnosis.layers if layer.num_tested)
        images, labels = self._task.test.choose(num_tested)

        def count(kept: tuple[str, ...]) -> int:
            rounding = make_rounding(network, quantize_network(network, calibration, self._task.settings, kept))
            num_right = 0
            for start in range(0, len(images), MIXED_CHUNK):
                part = slice(start, start + MIXED_CHUNK)
                with torch.no_grad():
                    logits = rounding.run({IMAGES: images[part]}, rounding.grids)[network.output]
                num_right += count_right(logits, None if labels is None else labels[part])
            return num_right

        choice = choose_float_layers(
            rank_by_noise(diagnosis.layers), diagnosis.correct_float, points / 100 * num_tested, count
        )
        return self._keep(network, calibration, choice)

    def _keep(self, network: CapturedNetwork, calibration: Calibration, choice: Choice) -> QuantizedNetwork:
        quantized = quantize_network(network, calibration, self._task.settings, choice.names)
        layers = tuple(replace(layer, is_float=layer.name in choice.names) for layer in self.record.layers)
        self._add(kept_float=choice.names, layers=layers)
        if not choice.is_within:
            self._remark(
                f"--mixed {self._task.settings.mixed_points:g} cannot be met: with {len(choice.names)} layers in float"
                f" {choice.num_lost} samples are still lost to the rounding of outputs: try another"
                " --calibration."
            )
        elif not choice.names:
            self._remark(f"--mixed {self._task.settings.mixed_points:g} is met with all layers in int8.")
        if choice.names:
            note = f"{', '.join(choice.names)} in float"
            self._predict("mixed", "int8, mixed", partial(self._simulate, quantized), note)
        return quantized

    def _use_torch(self, quantized: QuantizedNetwork, runtimes: dict[str, Run]) -> None:
        eager = make_eager(quantized)
        self._predict("eager", "int8 by torch", eager)
        runtimes["eager-int8"] = eager
        for remark in eager.remarks:
            self._remark(f"torch: {remark}")

    def _use_onnxruntime(self, network: CapturedNetwork, quantized: QuantizedNetwork, runtimes: dict[str, Run]) -> None:
        sessions = export_models(network, quantized, self._task.directory)
        self._add(sizes=list_sizes(self._task.directory))
        self._predict("onnxruntime", "int8 by onnxruntime", sessions["onnxruntime-int8"])
        runtimes.update(sessions)

    def _time(self, runtimes: dict[str, Run]) -> None:
        """Every batch size; the record lists float before int8."""
        settings = self._task.settings
        names = sorted(runtimes, key=lambda name: (name.startswith("eager"), name))
        for batch in settings.batches:
            images = self._task.test.choose(batch)[0]
            images = torch.cat([images] * -(-batch // len(images)))[:batch].contiguous()
            calls: dict[str, Call] = {name: partial(runtimes[name], images) for name in names}
            with one_thread(), torch.inference_mode():
                timings = time_runtimes(calls, batch=batch, num_rounds=settings.num_rounds, seed=self._task.seed)
            self._add(timings=(*self.record.timings, *timings))

    def _look_at_kernels(self) -> None:
        layers, remarks = name_kernels(self._task.directory, self.record.layers, self._task.test.choose(1)[0])
        self._add(layers=layers)
        for remark in remarks:
            self._remark(remark)


def is_small(network: CapturedNetwork) -> bool:
    """Whether one thread is faster than several."""
    return sum(count_multiply_adds(network, network.input_shape).values()) < SMALL_NET

"""The lab from beginning to end: every stage predicts a class for every test image.

    float               the model as trained
    weights             Q2: integer weights in float arithmetic; without biases the logits are the float model's times
                        Π n_w, up to the rounding of weights
    dequantized         the same with weights divided by their scale again
    weights-3sigma      Q2 with the other range
    weights-raw-bias    Q5 as first published: unscaled biases beside sums that are Π n_w times too large
    weights-no-bias     the same without biases
    int8                Q4 and Q5: integers only
    int8-255            the same with the other K
    int8-accumulators   as int8, with the int32 sums of the last layer as logits: shows what rounding them costs

All stages see a batch before the next one is read, so the test set is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from scalelab.errors import UsageError
from scalelab.quantize.capture import capture_network, unwrap
from scalelab.quantize.export import FLOAT_FILE, INT8_FILE, export_float_onnx
from scalelab.quantize.held_out import take_samples
from scalelab.quantize.lab.chain import (
    BiasRule,
    LabLayer,
    LabNetwork,
    LabSettings,
    check_chain,
    export_lab,
    run_integers,
    run_to_sums,
    scale_network,
)
from scalelab.quantize.lab.observe import (
    Observed,
    Tallies,
    observe_activations,
    observe_weights,
    report_histograms,
    report_layers,
)
from scalelab.quantize.network import CapturedNetwork, Layer, run_float
from scalelab.quantize.sessions import open_session, run_session
from scalelab.records.quantized import Quantized, Stage

BATCH = 250
"""Test images per batch."""

Run = Callable[[torch.Tensor], torch.Tensor]
"""From images to logits."""


@dataclass(frozen=True, kw_only=True)
class LabStage:
    """A stage to run."""

    name: str
    title: str
    run: Run
    note: str = ""


@dataclass(kw_only=True)
class Findings:
    """Accumulated over the test set."""

    labels: list[int] = field(default_factory=list)
    predictions: dict[str, list[int]] = field(default_factory=dict)
    tallies: Tallies = field(default_factory=Tallies)
    num_logits: int = 0
    num_different: int = 0
    """Logits of the exported file that differ from the simulation."""


def run_lab(
    model: nn.Module,
    calibration: Iterable[torch.Tensor],
    test_batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    settings: LabSettings | None = None,
    directory: Path | None = None,
) -> Quantized:
    """Q1 to Q5 of a trained chain of layers. `directory`: where the integer network is exported and run."""
    settings = settings or LabSettings()
    model = unwrap(model)
    batches = take_images(calibration, settings.samples)
    network = capture_network(model, batches[0])
    check_chain(model, network)
    observed = observe_weights(network.layers) | observe_activations(model, network.layers, batches)
    lab = scale_network(network, observed, settings)
    exported, sizes, missing = export(network, lab, directory) if directory is not None else (None, (), "")
    ways = list_ways(model, network, observed, settings)
    with torch.no_grad():
        found = run_ways(ways, network, lab, test_batches, exported)
    stages = (
        Stage(name=way.name, title=way.title, predictions=tuple(found.predictions[way.name]), note=way.note)
        for way in ways
    )
    num_images = sum(len(images) for images in batches)
    return Quantized(
        labels=tuple(found.labels),
        stages=tuple(stages),
        layers=report_layers(lab, found.tallies),
        histograms=report_histograms(lab, observed, settings),
        sizes=sizes,
        calibration=f"the largest activation {settings.observed} ReLU of {num_images} images becomes {settings.peak}",
        num_calibrated=num_images,
        compared_logits=found.num_logits or None,
        different_logits=found.num_different if found.num_logits else None,
        remarks=(*make_remarks(lab, found), *describe_lacks(settings, num_images, missing)),
    )


def export(
    network: CapturedNetwork, lab: LabNetwork, directory: Path
) -> tuple[Run | None, tuple[tuple[str, int], ...], str]:
    """The exported network, its file sizes, and the reason if there is none."""
    try:
        sizes = (
            (FLOAT_FILE, export_float_onnx(network, directory / FLOAT_FILE)),
            (INT8_FILE, export_lab(lab, directory / INT8_FILE)),
        )
        return partial(run_session, open_session(directory / INT8_FILE)), sizes, ""
    except UsageError as error:
        return None, (), f"Nothing was exported: {error}."


def take_images(calibration: Iterable[torch.Tensor], most: int) -> list[torch.Tensor]:
    taken = [images.float() for images in take_samples(calibration, most)]
    if not taken:
        raise UsageError("there are no calibration images: pass at least one batch")
    return taken


def regroup(
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]], size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same samples in batches of at least `size`."""
    images: list[torch.Tensor] = []
    labels: list[torch.Tensor] = []
    for some, classes in batches:
        images.append(some.float())
        labels.append(classes)
        if sum(map(len, images)) >= size:
            yield torch.cat(images), torch.cat(labels)
            images, labels = [], []
    if images:
        yield torch.cat(images), torch.cat(labels)


def run_ways(
    ways: Iterable[LabStage],
    network: CapturedNetwork,
    lab: LabNetwork,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    exported: Run | None,
) -> Findings:
    found = Findings()
    for images, labels in regroup(batches, BATCH):
        found.labels += labels.tolist()
        for way in ways:
            found.predictions.setdefault(way.name, []).extend(way.run(images).argmax(1).tolist())
        exact = run_float(network, images)
        logits = run_integers(lab, images, partial(found.tallies.count_layer, exact))
        found.tallies.count_alone(network, lab, images, exact[network.output])
        found.tallies.count_ties(logits)
        if exported is not None:
            found.num_logits += logits.numel()
            found.num_different += int((exported(images) != logits).sum())
    if not found.labels:
        raise UsageError("there are no test images to compare predictions on")
    return found


def list_ways(model: nn.Module, network: CapturedNetwork, observed: Observed, settings: LabSettings) -> list[LabStage]:
    other_range = settings.other_range
    lab, ranged, peaked = (
        scale_network(network, observed, chosen)
        for chosen in (
            settings,
            replace(settings, weight_range=other_range),
            replace(settings, peak=settings.other_peak),
        )
    )
    ways = [
        LabStage(name="float", title="float", run=model),
        LabStage(
            name="weights",
            title="integer weights",
            run=partial(run_weights, network, lab, "scaled"),
            note="in float arithmetic; activations are not rounded",
        ),
        LabStage(
            name="dequantized",
            title="weights, dequantized",
            run=partial(run_dequantized, network, lab),
            note="integer weights, dequantized",
        ),
        LabStage(
            name=f"weights-{other_range}",
            title=f"integer weights at {describe_range(other_range)}",
            run=partial(run_weights, network, ranged, "scaled"),
        ),
    ]
    if any(layer.bias is not None for layer in network.layers):
        ways += list_bias_ways(network, lab)
    return ways + list_integer_ways(lab, peaked, settings)


def list_bias_ways(network: CapturedNetwork, lab: LabNetwork) -> list[LabStage]:
    return [
        LabStage(
            name="weights-raw-bias",
            title="integer weights, bias unscaled",
            run=partial(run_weights, network, lab, "raw"),
            note="unscaled bias added to scaled sums",
        ),
        LabStage(
            name="weights-no-bias",
            title="integer weights, no bias",
            run=partial(run_weights, network, lab, "none"),
        ),
    ]


def list_integer_ways(lab: LabNetwork, other: LabNetwork, settings: LabSettings) -> list[LabStage]:
    has_bias = any(one.layer.bias is not None for one in lab.layers)
    bias = {"scaled": " + bias", "raw": " + unscaled bias", "none": ", no bias"}[settings.bias] if has_bias else ""
    title = f"weights + activations{bias}"
    return [
        LabStage(name="int8", title=title, run=partial(run_integers, lab), note=f"integers only, K = {settings.peak}"),
        LabStage(
            name=f"int8-{settings.other_peak}",
            title=f"{title}, K = {settings.other_peak}",
            run=partial(run_integers, other),
        ),
        LabStage(
            name="int8-accumulators",
            title=f"{title}, int32 logits",
            run=partial(run_to_sums, lab),
            note="the sums of the last layer, not rounded to int8",
        ),
    ]


def describe_range(weight_range: str) -> str:
    return "127 / 3σ" if weight_range == "3sigma" else "127 / max"


def run_weights(network: CapturedNetwork, lab: LabNetwork, rule: BiasRule, images: torch.Tensor) -> torch.Tensor:
    """Integer weights in float arithmetic; a scaled bias is multiplied by the n_w up to its layer."""
    layers, product = [], 1.0
    for one in lab.layers:
        product *= one.weight_scale
        layers.append(give_integers(one, product, rule))
    return run_float(replace(network, layers=tuple(layers)), images)[network.output]


def give_integers(one: LabLayer, product: float, rule: BiasRule) -> Layer:
    if one.weight is None:
        return one.layer
    bias = None if one.layer.bias is None or rule == "none" else one.layer.bias
    if bias is not None and rule == "scaled":
        bias = bias * product
    return replace(one.layer, weight=one.weight.float(), bias=bias)


def run_dequantized(network: CapturedNetwork, lab: LabNetwork, images: torch.Tensor) -> torch.Tensor:
    layers = tuple(
        one.layer if one.weight is None else replace(one.layer, weight=one.weight.float() / one.weight_scale)
        for one in lab.layers
    )
    return run_float(replace(network, layers=layers), images)[network.output]


def make_remarks(lab: LabNetwork, found: Findings) -> Iterator[str]:
    yield (
        f"{found.tallies.num_tied:,} of {len(found.labels):,} test images have their largest int8 logit in two classes"
        " or more; the first one counts."
    )
    if found.num_logits:
        yield (
            f"{INT8_FILE} in onnxruntime: {found.num_different or 'no'} logits differ from the simulation, of"
            f" {found.num_logits:,}."
        )
    for one in lab.layers:
        tally = found.tallies.by_layer.get(one.name)
        if tally is not None and tally.channels.num_dead:
            yield f"{tally.channels.num_dead} outputs of {one.name} are constant over all test images."


def describe_lacks(settings: LabSettings, num_images: int, missing: str) -> Iterator[str]:
    if num_images < settings.samples:
        yield f"Only {num_images} of the {settings.samples} requested calibration images were available."
    if missing:
        yield missing

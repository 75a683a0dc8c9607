"""What int8 costs in accuracy by default, on networks that the defaults were not chosen on.

The defaults of `scalelab run quantize` (`quantize_model` with `Quantization()`) were chosen on networks trained with
part of CIFAR-10 (quantize/calibrate.py), so their figures there are a winner's. Here networks are trained on all of it
from other seeds (rigs/trained.py): `lenet` from three, a residual network of 20 layers from one. The first 512 training
images calibrate, onnxruntime executes all 10,000 test images. The baseline is onnxruntime's `quantize_static` on the
same images: QDQ, per channel, uint8 by int8, min–max.

    points lost                     at most 0.15 by lenet, mean of the seeds; 0.3 by resnet20
    more than quantize_static       at most 0.1 points, lenet and resnet20

    python benchmarks/int8_accuracy.py DATA_DIR --weights DIR

`DATA_DIR` is the --out of `scalelab data fetch cifar10`. Without it the digits are used, and no bar is judged: one of
their 355 test images is 0.28 points. `--weights` stores trained weights and reuses them.

Negative points lost were gained. ± of a network is Newcombe's interval for pairs. That of a mean over seeds counts
every test image once, with the mean of its changes; ± over seeds is Student's, and wide with three of them.

**Ties.** Where logits are bytes, as with `quantize_static`, classes can share the largest one, and the first is taken.
The figures are repeated with every tie shared evenly among its classes. Bars are held by what is taken.

Limits: the test images are those that the defaults were chosen on; only the networks are new. So few epochs leave
networks less accurate than they could be.
"""

from __future__ import annotations

import argparse
import functools
import logging
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from int8 import quantize_statically
from rich.console import Console
from rich.table import Table
from rigs.trained import LENET, RESNET20, Subject, find_network, find_options
from scipy.special import ndtri
from torch import nn

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.paired import PairedCounts, count_pairs, estimate_paired_difference, measure_agreement
from scalelab.analysis.stats import TAIL, Floats, find_t_quantile
from scalelab.errors import ScalelabError
from scalelab.quantize.export import FLOAT_FILE, INT8_FILE, export_models
from scalelab.quantize.pipeline import quantize_model
from scalelab.quantize.sessions import open_session, run_session
from scalelab.records.tasks import Quantization
from scalelab.units import format_quantity
from scalelab.worker.batches.drawn import normalise
from scalelab.worker.models.networks import load_images, normalise_by_half
from scalelab.workloads.image_options import ImageOptions

FIRST_SEED = 11
NUM_CALIBRATED = Quantization().num_samples
TEST_BATCH = 250
MOST_LOST = {"lenet": 0.15, "resnet20": 0.3}
MOST_MORE_THAN_STATIC = 0.1
FLOAT, DEFAULTS, STATIC = "float32", "int8, defaults", "int8, quantize_static"

Run = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Form:
    """What one form of a network says of every test image."""

    predictions: list[int]
    """The class with the largest logit; of several, the first."""
    num_ties: int
    """Images with several."""
    right: Floats
    """1 where the class is right, otherwise 0."""
    right_evenly: Floats
    """The same with ties shared out: a third where the right class is one of three."""


@dataclass(frozen=True, kw_only=True)
class Tested:
    """One trained network in all of its forms."""

    subject: Subject
    seed: int
    labels: list[int]
    forms: dict[str, Form]

    def count(self, form: str, reference: str) -> PairedCounts:
        counts = count_pairs(self.forms[form].predictions, self.forms[reference].predictions, self.labels)
        assert counts is not None
        return counts

    def find_losses(self, form: str, reference: str, is_even: bool = False) -> Floats:
        """For every test image what the reference gets for it less what the form gets."""
        ours, theirs = self.forms[form], self.forms[reference]
        losses: Floats = theirs.right_evenly - ours.right_evenly if is_even else theirs.right - ours.right
        return losses


def load_tensors(subject: Subject, options: ImageOptions, split: Literal["train", "test"], most: int | None) -> Any:
    """The first images as they are stored, without augmentation, and their classes."""
    found = load_images(options, split)
    if subject.is_half:
        found = normalise_by_half(found)
    images = normalise(torch.from_numpy(found.images[:most]), found.mean, found.std)
    return images, torch.from_numpy(found.labels[:most])


def examine(subject: Subject, seed: int, options: ImageOptions, weights: Path | None) -> Tested:
    """Train a network, take it to int8 in both ways, and test all forms."""
    model = find_network(subject, seed, options, weights)
    calibration, _ = load_tensors(subject, options, "train", NUM_CALIBRATED)
    images, labels = load_tensors(subject, options, "test", None)
    forms = {FLOAT: run_form(model, images, labels)}
    with tempfile.TemporaryDirectory() as directory:
        for name, path in write_int8(model, calibration, Path(directory)).items():
            forms[name] = run_form(functools.partial(run_session, open_session(path)), images, labels)
    return Tested(subject=subject, seed=seed, labels=labels.tolist(), forms=forms)


def write_int8(model: nn.Module, calibration: torch.Tensor, directory: Path) -> dict[str, Path]:
    """The int8 models as files, from the same images."""
    made = quantize_model(model, [calibration], Quantization())
    export_models(made.network, made.quantized, directory)
    files = {DEFAULTS: directory / INT8_FILE, STATIC: directory / "static.onnx"}
    quantize_statically(directory / FLOAT_FILE, files[STATIC], calibration)
    return files


def run_form(run: Run, images: torch.Tensor, labels: torch.Tensor) -> Form:
    with torch.no_grad():
        logits = torch.cat([run(batch) for batch in images.split(TEST_BATCH)])
    is_largest = logits == logits.amax(dim=1, keepdim=True)
    num_largest = is_largest.sum(dim=1)
    predictions = logits.argmax(dim=1)
    return Form(
        predictions=predictions.tolist(),
        num_ties=int((num_largest > 1).sum()),
        right=(predictions == labels).double().numpy(),
        right_evenly=(is_largest.gather(1, labels[:, None])[:, 0] / num_largest.double()).numpy(),
    )


def show(tests: Sequence[Tested]) -> None:
    heads = ("network", "seed", "form", "accuracy", "points lost", "won", "lost", "same class", "ties")
    table = Table(*heads, box=None)
    for test in tests:
        for name, form in test.forms.items():
            counts = test.count(name, FLOAT)
            cells = [test.subject.name, str(test.seed), name, format_quantity("accuracy", counts.accuracy)]
            same = measure_agreement(form.predictions, test.forms[FLOAT].predictions)
            lost = format_points(to_points_lost(estimate_paired_difference(counts)))
            compared = [lost, str(counts.won), str(counts.lost), format_quantity("accuracy", same)]
            table.add_row(*cells, *(compared if name != FLOAT else [""] * len(compared)), str(form.num_ties))
    Console(width=130).print(table)


def to_points_lost(difference: Estimate) -> Estimate:
    return difference.map(lambda gained: 0.0 - 100 * gained)


def format_points(points: Estimate) -> str:
    """Two digits; without ± where there is no interval."""
    arm = "" if points.half_width is None else f" ± {points.half_width:.2f}"
    return f"{points.value:.2f}{arm}".replace("-", "−")


def find_mean_loss(tests: Sequence[Tested], form: str, reference: str) -> Estimate:
    """Points that a form loses against another, mean of the seeds, with the interval over test images."""
    if len(tests) == 1:
        return to_points_lost(estimate_paired_difference(tests[0].count(form, reference)))
    return average([test.find_losses(form, reference) for test in tests])


def find_even_loss(tests: Sequence[Tested], form: str, reference: str) -> Estimate:
    """The same with ties shared out."""
    return average([test.find_losses(form, reference, is_even=True) for test in tests])


def average(losses: Sequence[Floats]) -> Estimate:
    """In points, every image once; losses that are the same for every image have no interval."""
    by_image = 100 * np.mean(losses, axis=0)
    arm = float(ndtri(1 - TAIL)) * float(by_image.std(ddof=1)) / math.sqrt(len(by_image))
    value = float(by_image.mean())
    return Estimate(value=value, low=value - arm, high=value + arm) if arm else Estimate(value=value)


def find_seed_arm(tests: Sequence[Tested], form: str, reference: str) -> float | None:
    """Student's arm of the mean, over seeds; None with one, or where all lose the same."""
    losses = [100 * float(test.find_losses(form, reference).mean()) for test in tests]
    if len(set(losses)) < 2:
        return None
    return find_t_quantile(len(losses) - 1) * float(np.std(losses, ddof=1)) / math.sqrt(len(losses))


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A figure in points that may be so large at most."""

    words: str
    points: Estimate
    most: float

    @property
    def holds(self) -> bool:
        return self.points.value <= self.most + 1e-9  # a bar that is met to the image holds, whatever the last bit says

    def explain(self) -> str:
        """What is to be said of one that does not hold."""
        excess, arm = self.points.value - self.most, self.points.half_width
        beside = "" if arm is None else f", {'less' if excess <= arm else 'more'} than its ±"
        return f"missed: {self.words} {format_points(self.points)} points, {excess:.2f} over {self.most:g}{beside}"


def compare_means(tests: Sequence[Tested]) -> list[Bar]:
    """Print the means of a network over its seeds; returns what is held to a bar."""
    name = tests[0].subject.name
    seeds = "1 seed" if len(tests) == 1 else f"mean of {len(tests)} seeds"
    print(f"\n{name}, {seeds}, {len(tests[0].labels)} test images:")
    for form, reference in ((DEFAULTS, FLOAT), (STATIC, FLOAT), (DEFAULTS, STATIC)):
        points, over_seeds = find_mean_loss(tests, form, reference), find_seed_arm(tests, form, reference)
        spread = "" if over_seeds is None else f" (over seeds ± {over_seeds:.2f})"
        even = format_points(find_even_loss(tests, form, reference))
        print(f"  {form} loses {format_points(points)} points against {reference}{spread}; ties shared out: {even}")
    lost, beside = find_mean_loss(tests, DEFAULTS, FLOAT), find_mean_loss(tests, DEFAULTS, STATIC)
    return [
        Bar(words=f"{name} loses", points=lost, most=MOST_LOST[name]),
        Bar(words=f"{name} against quantize_static", points=beside, most=MOST_MORE_THAN_STATIC),
    ]


def judge(bars: Sequence[Bar], is_judged: bool) -> int:
    figures = ", ".join(f"{bar.words} {format_points(bar.points)}" for bar in bars)
    limits = ", ".join(f"{bar.most:g}" for bar in bars)
    print()
    if not is_judged:
        for bar in bars:
            print(f"not judged: {bar.words} at most {bar.most:g} points: needs CIFAR-10, give its directory")
        print(f"int8_accuracy: on digits, not judged: {figures} points (bars {limits} on CIFAR-10)")
        return 0
    missed = [bar for bar in bars if not bar.holds]
    for bar in missed:
        print(bar.explain())
    print(f"int8_accuracy: {len(bars) - len(missed)} of {len(bars)} hold: {figures} points (bars {limits})")
    return 1 if missed else 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path, nargs="?", help="with the files of CIFAR-10; without it: digits")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of lenet (default: 3)")
    parser.add_argument("--weights", type=Path, help="where trained weights are kept, and taken from")
    given = parser.parse_args()
    if given.seeds < 1:
        parser.error(f"--seeds {given.seeds} trains nothing: use 1 or more")
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    tests: dict[str, list[Tested]] = {}
    try:
        for subject, num_seeds in ((LENET, given.seeds), (RESNET20, 1)):
            options = find_options(subject, given.directory)
            options.check()
            seeds = range(FIRST_SEED, FIRST_SEED + num_seeds)
            tests[subject.name] = [examine(subject, seed, options, given.weights) for seed in seeds]
    except ScalelabError as error:
        print(f"int8_accuracy: not run: {error}")
        return 1
    show([test for each in tests.values() for test in each])
    bars = [bar for each in tests.values() for bar in compare_means(each)]
    return judge(bars, is_judged=given.directory is not None)


if __name__ == "__main__":
    sys.exit(main())

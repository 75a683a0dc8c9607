"""What int8 gains, and what it costs to stay in torch: five ways to run the same network on one thread, interleaved.

`resnet18` has random weights and matching batch norm statistics: speed does not depend on what was learned. All
runtimes get the same images and, where they quantize, the same calibration images; the int8 network is that of
`quantize_model` with default settings. onnxruntime's `quantize_static` has its best setting for x86: QDQ, per channel,
uint8 by int8. Every round visits all runtimes in a random order after an untimed call (a fixed order without one once
turned 0.73 times as long into 1.77 times); ratios are taken round by round. Times are CPU times, which on one thread
are latencies without what other programs take.

    float32 / exported              at least 2.8 times as fast at batch 1, 3.0 at batch 64
    exported / quantize_static      at most 1.05 as long, at both batch sizes
    eager / exported                at most 1.6 at batch 1, 1.15 at batch 64
    size                            resnet18 3.9 times smaller, lenet 3.4 times

`lenet` has no bar for speed: it shows a network that int8 cannot help, and why. Its arithmetic at resnet18's rate is a
small part of its time; the rest is overhead per node, and a first convolution whose few channels leave most lanes of a
kernel empty. OpenVINO (with NNCF) and torchao are timed too if installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_ratio
from scalelab.quantize.diagnosis import count_multiply_adds
from scalelab.quantize.eager import make_eager
from scalelab.quantize.export import export_float_onnx, export_onnx
from scalelab.quantize.pipeline import QuantizedModel, quantize_model
from scalelab.quantize.sessions import open_session, profile_layers
from scalelab.records.environment import usable_cores
from scalelab.records.tasks import Quantization
from scalelab.units import format_quantity, format_seconds
from scalelab.worker.models.networks import Lenet, Resnet18

BATCHES = (1, 64)
ROUNDS = {"resnet18": {1: 60, 64: 10}, "lenet": {1: 40, 64: 30}}
NUM_CALIBRATED = 32
LEAST_SECONDS = 0.01
"""What the calls of one timing fill together."""
MOST_OF_STATIC = {1: 1.05, 64: 1.05}
LEAST_GAIN = {1: 2.8, 64: 3.0}
MOST_OF_EAGER = {1: 1.6, 64: 1.15}
LEAST_SMALLER = {"resnet18": 3.9, "lenet": 3.4}
WORTH_A_WORD = 1.1
"""Less than this many times as fast is no gain."""

FLOAT, STATIC, EXPORTED, EAGER, TORCH = (
    "onnxruntime float32",
    "onnxruntime quantize_static",
    "onnxruntime, exported here",
    "torch int8, eager",
    "torch float32, eager",
)

Call = Callable[[], object]
Predict = Callable[[torch.Tensor], Call]
"""From a batch to a call that computes it, with everything prepared that is not computing."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A network with its files and what runs it."""

    name: str
    quantization: QuantizedModel
    images: torch.Tensor
    float_bytes: int
    int8_bytes: int
    num_nodes: dict[str, int]
    """What onnxruntime executes, by runtime, when it has merged what it can."""
    files: dict[str, Path]
    runtimes: dict[str, Predict]

    @property
    def multiply_adds(self) -> int:
        network = self.quantization.network
        return sum(count_multiply_adds(network, network.input_shape).values())


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of every runtime, round by round, at one batch size."""

    seconds: dict[str, list[list[float]]]

    def compare(self, numerator: str, denominator: str) -> Estimate:
        return estimate_ratio(self.seconds[numerator], self.seconds[denominator])

    def find_middle(self, runtime: str) -> float:
        rounds = sorted(seconds for (seconds,) in self.seconds[runtime])
        return rounds[len(rounds) // 2]


def make_resnet18() -> nn.Module:
    """Random weights, and batch norms that have seen what these make of random images."""
    torch.manual_seed(0)
    model = Resnet18()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        for _ in range(2):
            model(torch.randn(32, 3, 32, 32))
    return model.eval()


def make_lenet() -> nn.Module:
    torch.manual_seed(0)
    return Lenet().eval()


def make_subject(name: str, model: nn.Module, directory: Path) -> Subject:
    images = torch.randn(max(BATCHES), 3, 32, 32, generator=torch.Generator().manual_seed(1))
    quantization = quantize_model(model, [images[:NUM_CALIBRATED]], Quantization())
    files = {kind: directory / f"{name}-{kind}.onnx" for kind in (FLOAT, STATIC, EXPORTED)}
    float_bytes = export_float_onnx(quantization.network, files[FLOAT])
    int8_bytes = export_onnx(quantization.quantized, files[EXPORTED])
    quantize_statically(files[FLOAT], files[STATIC], images[:NUM_CALIBRATED])
    runtimes = {kind: make_session(path) for kind, path in files.items()}
    runtimes[EAGER] = prepare(make_eager(quantization.quantized))
    runtimes[TORCH] = prepare(model)
    runtimes.update(make_peers(files[FLOAT], model, images[:NUM_CALIBRATED]))
    return Subject(
        name=name,
        quantization=quantization,
        images=images,
        float_bytes=float_bytes,
        int8_bytes=int8_bytes,
        num_nodes={kind: count_nodes(path) for kind, path in files.items()},
        files=files,
        runtimes=runtimes,
    )


def prepare(model: nn.Module) -> Predict:
    return lambda images: lambda: model(images)


def make_session(path: Path) -> Predict:
    session = open_session(path)

    def prepare_session(images: torch.Tensor) -> Call:
        given = {"images": images.numpy()}
        return lambda: session.run(["logits"], given)

    return prepare_session


def quantize_statically(source: Path, target: Path, images: torch.Tensor) -> None:
    """onnxruntime's own int8, at its best on x86."""
    package: Any = importlib.import_module("onnxruntime.quantization")

    class Images(package.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.batches = iter([{"images": image[None].numpy()} for image in images])

        def get_next(self) -> dict[str, Any] | None:
            return next(self.batches, None)

    package.quantize_static(
        str(source),
        str(target),
        Images(),
        quant_format=package.QuantFormat.QDQ,
        per_channel=True,
        activation_type=package.QuantType.QUInt8,
        weight_type=package.QuantType.QInt8,
    )


def count_nodes(path: Path) -> int:
    """Nodes that are executed: those of the graph as onnxruntime has rewritten it."""
    onnx, onnxruntime = (importlib.import_module(name) for name in ("onnx", "onnxruntime"))
    options: Any = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(path.with_suffix(".optimized.onnx"))
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return len(onnx.load(options.optimized_model_filepath).graph.node)


def profile(path: Path, images: torch.Tensor) -> dict[str, float]:
    return {kernel.layer: kernel.seconds for kernel in profile_layers(path, images, num_runs=50)}


def make_peers(source: Path, model: nn.Module, images: torch.Tensor) -> Iterator[tuple[str, Predict]]:
    """What else is installed."""
    for peer, packages, make in PEERS:
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if missing:
            SKIPPED[peer] = f"{' and '.join(missing)} not installed"
            continue
        try:
            yield peer, make(source, model, images)
        except Exception as error:  # noqa: BLE001 - a peer that fails is no failure of ours
            SKIPPED[peer] = f"failed: {str(error).strip().splitlines()[0]}"


def make_openvino(source: Path, _: nn.Module, images: torch.Tensor) -> Predict:
    """NNCF's static quantization, executed by OpenVINO."""
    nncf, openvino = (importlib.import_module(name) for name in ("nncf", "openvino"))
    nncf.set_log_level(logging.ERROR)
    batches = [{"images": image[None].numpy()} for image in images]
    quantized = nncf.quantize(openvino.Core().read_model(str(source)), nncf.Dataset(batches), subset_size=len(batches))
    settings = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.Core().compile_model(quantized, "CPU", settings)

    def prepare_request(images: torch.Tensor) -> Call:
        request, given = compiled.create_infer_request(), {"images": images.numpy()}
        return lambda: request.infer(given)

    return prepare_request


def make_torchao(_: Path, model: nn.Module, images: torch.Tensor) -> Predict:
    """torchao's static quantization of an exported program, compiled by inductor, which needs a C++ compiler."""
    pt2e = importlib.import_module("torchao.quantization.pt2e.quantize_pt2e")
    x86 = importlib.import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    any_batch = torch.export.Dim("batch", min=1, max=1024)
    program = torch.export.export(model, (images[:2],), dynamic_shapes=({0: any_batch},)).module()
    observed = pt2e.prepare_pt2e(program, quantizer)
    observed(images)
    converted = pt2e.convert_pt2e(observed)
    inductor: Any = importlib.import_module("torch._inductor.config")
    inductor.freezing = True
    compiled: Any = torch.compile(converted, dynamic=False)
    with torch.no_grad():
        compiled(images[:1])
    return lambda batch: lambda: run_without_gradient(compiled, batch)


def run_without_gradient(model: Callable[[torch.Tensor], object], images: torch.Tensor) -> object:
    """Compiled programs refuse tensors of the inference mode that others are timed in."""
    with torch.inference_mode(False), torch.no_grad():
        return model(images)


PEERS: tuple[tuple[str, tuple[str, ...], Callable[[Path, nn.Module, torch.Tensor], Predict]], ...] = (
    ("OpenVINO, by NNCF", ("nncf", "openvino"), make_openvino),
    ("torchao, compiled", ("torchao",), make_torchao),
)
SKIPPED: dict[str, str] = {}


def measure(subject: Subject, batch: int) -> Times:
    """Processor time per call: on one thread that is the latency, less what other programs took of the core."""
    images = subject.images[:batch].contiguous()
    calls = {name: prepare_call(images) for name, prepare_call in subject.runtimes.items()}
    times: dict[str, list[list[float]]] = {name: [] for name in calls}
    order, shuffler = list(calls), random.Random(0)
    with torch.inference_mode():
        counts = {name: count_calls(call) for name, call in calls.items()}
        for _ in range(ROUNDS[subject.name][batch]):
            shuffler.shuffle(order)
            for name in order:
                calls[name]()
                start = time.process_time()
                for _ in range(counts[name]):
                    calls[name]()
                times[name].append([(time.process_time() - start) / counts[name]])
    return Times(seconds=times)


def count_calls(call: Call) -> int:
    """As many as fill a timing: first calls are left out, they pay for what later ones find ready."""
    for _ in range(3):
        start = time.process_time()
        call()
        seconds = time.process_time() - start
    return max(1, round(LEAST_SECONDS / max(seconds, 1e-6)))


def show(subject: Subject, times: dict[int, Times]) -> None:
    heads = [head for batch in BATCHES for head in (f"batch {batch}", "times exported")]
    table = Table(subject.name, *heads, "executed nodes", box=None)
    for name in subject.runtimes:
        cells = []
        for batch in BATCHES:
            ratio = times[batch].compare(name, EXPORTED)
            told = "1.00" if name == EXPORTED else format_quantity("ratio", ratio)
            cells += [format_seconds(times[batch].find_middle(name)), told]
        table.add_row(name, *cells, str(subject.num_nodes.get(name, "–")))
    Console(width=120).print(table)
    print(
        f"size: {subject.float_bytes:,} bytes in float32, {subject.int8_bytes:,} in int8,"
        f" {subject.float_bytes / subject.int8_bytes:.2f} times smaller\n"
    )


def explain_lenet(lenet: Subject, small: Times, resnet18: Subject, large: Times, batch: int) -> str:
    """Whether int8 gains anything, and what its time goes into instead of arithmetic."""
    gain = small.compare(FLOAT, EXPORTED)
    verdict = "no gain" if gain.value < WORTH_A_WORD else "a gain"
    layers = {name: profile(lenet.files[name], lenet.images[:batch]) for name in (FLOAT, EXPORTED)}
    total = sum(layers[EXPORTED].values())
    # What the products alone would take: at the rate of a network of large layers in the same runtime.
    arithmetic = lenet.multiply_adds * large.find_middle(EXPORTED) / resnet18.multiply_adds
    # Flattening computes nothing: what it takes is what a node costs.
    nodes = lenet.num_nodes[EXPORTED] * layers[EXPORTED]["flatten_1"]
    slowest = max(layers[EXPORTED], key=lambda layer: layers[EXPORTED][layer])
    return (
        f"lenet, batch {batch}: {verdict}, {format_quantity('ratio', gain)} times as fast as float32. Of"
        f" {format_seconds(total)} by the profile, arithmetic at resnet18's rate is {arithmetic / total:.0%},"
        f" {lenet.num_nodes[EXPORTED]} nodes that compute nothing would take {nodes / total:.0%}; {slowest} alone takes"
        f" {format_seconds(layers[EXPORTED][slowest])}, in float32 {format_seconds(layers[FLOAT][slowest])}: kernels"
        " multiply 4 channels by 16 and more at once, and it has 3 by 6"
    )


def list_bars(resnet18: Subject, lenet: Subject, times: dict[int, Times]) -> list[tuple[str, float, str, float]]:
    """What is held to what: words, the figure, at least or at most, the bar."""
    bars = []
    for batch, found in times.items():
        at = f"at batch {batch}"
        bars += [
            (f"resnet18 over float32 {at}", found.compare(FLOAT, EXPORTED).value, "≥", LEAST_GAIN[batch]),
            (f"exported / quantize_static {at}", found.compare(EXPORTED, STATIC).value, "≤", MOST_OF_STATIC[batch]),
            (f"eager / exported {at}", found.compare(EAGER, EXPORTED).value, "≤", MOST_OF_EAGER[batch]),
        ]
    for subject in (resnet18, lenet):
        smaller = subject.float_bytes / subject.int8_bytes
        bars.append((f"{subject.name} smaller", smaller, "≥", LEAST_SMALLER[subject.name]))
    return bars


def main() -> int:
    os.sched_setaffinity(0, usable_cores()[:1])
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as directory:
        subjects = {
            name: make_subject(name, model, Path(directory))
            for name, model in (("resnet18", make_resnet18()), ("lenet", make_lenet()))
        }
        times = {name: {batch: measure(subject, batch) for batch in BATCHES} for name, subject in subjects.items()}
        resnet18, lenet = subjects["resnet18"], subjects["lenet"]
        reasons = [
            explain_lenet(lenet, times["lenet"][batch], resnet18, times["resnet18"][batch], batch) for batch in BATCHES
        ]
    for name, subject in subjects.items():
        show(subject, times[name])
    for peer, why in SKIPPED.items():
        print(f"skipped: {peer}: {why}")
    for remark in make_eager(resnet18.quantization.quantized).remarks:
        print(f"remark: {remark}")
    print(*reasons, sep="\n")
    bars = list_bars(resnet18, lenet, times["resnet18"])
    missed = [bar for bar in bars if (bar[1] < bar[3] if bar[2] == "≥" else bar[1] > bar[3])]
    for words, figure, sign, bar in missed:
        print(f"missed: {words} {figure:.2f} (bar {sign} {bar:g})")
    told = ", ".join(f"{words} {figure:.2f} ({sign} {bar:g})" for words, figure, sign, bar in bars)
    print(f"\nint8: {len(bars) - len(missed)} of {len(bars)} bars hold: {told} (bar all)")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Run an exported model in onnxruntime, see which kernels really ran, and time several runtimes side by side.

onnxruntime decides when a session is made whether a layer runs in int8, by rewriting the graph; a layer that fits no
rule silently runs in float, correct and slow. So the profile of a real run is read. Its nodes keep the layer names of
the export, with suffixes of the rewriting.

On x86 without VNNI the fast uint8 × int8 kernels add pairs of products in int16, which saturates. Sessions there ask
for exact kernels (`x64quantprecision`), which convert weights to uint8 first and are slower.

Runtimes are timed interleaved. Whatever is timed first pays for cold caches, and a machine that slows down penalises
what comes last: a fixed order without a warm-up call once turned 0.73 times as long into 1.77 times. So every round
visits all runtimes in a random order; each makes one untimed call and then as many as fill a few milliseconds. A round
gives the mean per runtime, and runtimes are compared round by round.
"""

from __future__ import annotations

import importlib
import json
import random
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from scalelab.errors import UsageError
from scalelab.quantize.eager_kernels import has_vnni
from scalelab.records.quantized import Timing

Model = Path | str | bytes
INTEGER_KERNELS = ("QLinear", "QGemm", "ConvInteger", "MatMulInteger", "DynamicQuantize")
"""Prefixes of kernels that multiply integers."""
WEIGHTED_OPERATORS = ("Conv", "Gemm", "MatMul", "QLinearConv", "QGemm")
ERRORS_ONLY = 3


@dataclass(frozen=True, kw_only=True)
class LayerKernel:
    """What ran for one layer."""

    layer: str
    kernel: str
    """The operator of the node that computes it."""
    seconds: float
    """Of one run: the sum over its nodes of their medians, conversions included."""
    is_weighted: bool = False
    is_float: bool = False
    """Whether its weights were multiplied in float."""
    is_fallback: bool = False
    """Whether that was unintended: the weights are stored as integers."""
    is_requantized: bool = False
    """Whether onnxruntime quantized float weights by itself."""


def load_package(name: str) -> Any:
    """Import `onnx` or `onnxruntime`, or say what to install."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"an int8 model needs {error.name}, which is not installed: pip install 'scalelab[quantize]'"
        ) from error


def open_session(model: Model, *, is_optimized: bool = True, profile: Path | None = None) -> Any:
    """An onnxruntime session on one CPU thread; `profile`: prefix of the profile's file name."""
    onnxruntime = load_package("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = ERRORS_ONLY
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if is_optimized else levels.ORT_DISABLE_ALL
    if not has_vnni():
        options.add_session_config_entry("session.x64quantprecision", "1")
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    source = model if isinstance(model, bytes) else str(model)
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run_session(session: Any, images: torch.Tensor) -> torch.Tensor:
    """The logits of a batch."""
    (logits,) = session.run(["logits"], {"images": images.to(torch.float32).contiguous().numpy()})
    return torch.from_numpy(logits)


def profile_layers(
    model: Model, images: torch.Tensor, *, is_optimized: bool = True, num_runs: int = 10
) -> tuple[LayerKernel, ...]:
    """The kernel and time of every layer; a first run warms up and is not counted."""
    with tempfile.TemporaryDirectory(prefix="scalelab-") as directory:
        prefix = Path(directory) / "profile"
        session = open_session(model, is_optimized=is_optimized, profile=prefix)
        for _ in range(num_runs + 1):
            run_session(session, images)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    return read_kernels(events, load_graph(model), num_runs)


def read_kernels(events: list[dict[str, Any]], graph: Any, num_runs: int) -> tuple[LayerKernel, ...]:
    """The kernels of every layer, from the events of a profile of `num_runs` plus one warm-up run."""
    layers = list_layers(graph)
    durations: dict[str, list[float]] = defaultdict(list)
    kernels: dict[str, str] = {}
    for event in events:
        if event.get("cat") != "Node" or not event["name"].endswith("_kernel_time"):
            continue
        node = event["name"].removesuffix("_kernel_time")
        name = find_layer(node, layers)
        if name is not None:
            durations[node].append(event["dur"] / 1e6)
            if "/" not in node or node.endswith("_nchwc"):
                kernels[name] = event["args"]["op_name"]
    seconds: dict[str, float] = defaultdict(float)
    for node, times in durations.items():
        seconds[str(find_layer(node, layers))] += median(times[-num_runs:])
    weights = find_weights(graph)
    return tuple(make_kernel(name, kernels.get(name, ""), seconds[name], weights.get(name)) for name in layers)


def make_kernel(name: str, kernel: str, seconds: float, has_integer_weight: bool | None) -> LayerKernel:
    is_float = has_integer_weight is not None and not kernel.startswith(INTEGER_KERNELS)
    return LayerKernel(
        layer=name,
        kernel=kernel,
        seconds=seconds,
        is_weighted=has_integer_weight is not None,
        is_float=is_float,
        is_fallback=is_float and bool(has_integer_weight),
        is_requantized=has_integer_weight is False and not is_float,
    )


def list_fallbacks(kernels: tuple[LayerKernel, ...]) -> tuple[str, ...]:
    """A remark for every layer with integer weights that ran in float, or the other way round."""
    requantized = tuple(
        f"layer {kernel.layer} is kept in float but runs in int8 ({kernel.kernel}): onnxruntime quantized it"
        for kernel in kernels
        if kernel.is_requantized
    )
    return requantized + tuple(
        f"layer {kernel.layer} is stored in int8 but runs in float ({kernel.kernel or 'no kernel'}): "
        f"onnxruntime did not fuse it with its Quantize and Dequantize nodes"
        for kernel in kernels
        if kernel.is_fallback
    )


def find_layer(node: str, layers: list[str]) -> str | None:
    """The layer of a node: onnxruntime adds `fused` and `_token_4`, we add what follows a slash."""
    plain = re.sub(r"_token_\d+$", "", node.removeprefix("fused ").split("/")[0])
    return plain if plain in layers else None


def list_layers(graph: Any) -> list[str]:
    """The layers of an exported model: nodes without a slash in their names."""
    return [node.name for node in graph.graph.node if "/" not in node.name]


def find_weights(graph: Any) -> dict[str, bool]:
    """For every layer with weights, whether they are stored as integers."""
    makers = {node.output[0]: node.op_type for node in graph.graph.node}
    integers = {}
    for node in graph.graph.node:
        if "/" not in node.name and node.op_type in WEIGHTED_OPERATORS:
            is_operator = node.op_type.startswith("Q")
            integers[node.name] = is_operator or makers.get(node.input[1]) == "DequantizeLinear"
    return integers


def load_graph(model: Model) -> Any:
    onnx = load_package("onnx")
    return onnx.load_model_from_string(model) if isinstance(model, bytes) else onnx.load(str(model))


Call = Callable[[], object]

LEAST_SECONDS = 0.01
"""Minimum length of one timing, far above the clock's resolution."""
MOST_CALLS = 200


def time_runtimes(runtimes: Mapping[str, Call], *, batch: int, num_rounds: int, seed: int = 0) -> list[Timing]:
    """Time every runtime in `num_rounds` rounds; a call computes one batch."""
    counts = {name: _count_calls(call) for name, call in runtimes.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runtimes}
    order, draw = list(runtimes), random.Random(seed)
    for _ in range(num_rounds):
        draw.shuffle(order)
        for name in order:
            call, count = runtimes[name], counts[name]
            call()
            start = perf_counter()
            for _ in range(count):
                call()
            seconds[name].append((perf_counter() - start) / count)
    return [Timing(runtime=name, batch=batch, seconds=tuple(found)) for name, found in seconds.items()]


def _count_calls(call: Call) -> int:
    """Calls per timing, estimated after two warm-up calls."""
    call()
    call()
    start = perf_counter()
    call()
    once = max(perf_counter() - start, 1e-9)
    return min(MOST_CALLS, max(1, round(LEAST_SECONDS / once)))


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread, like the onnxruntime sessions."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

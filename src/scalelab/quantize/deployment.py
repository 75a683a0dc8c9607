"""The models that users take away: written, opened again, executed, and asked which kernels ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from scalelab.quantize.export import export_float_onnx, export_onnx
from scalelab.quantize.network import Network, QuantizedNetwork
from scalelab.quantize.sessions import LayerKernel, list_fallbacks, open_session, profile_layers, run_session
from scalelab.records.quantized import LayerReport

FLOAT_FILE, INT8_FILE = "float32.onnx", "int8.onnx"
Run = Callable[[torch.Tensor], torch.Tensor]


def export_models(network: Network, quantized: QuantizedNetwork, directory: Path) -> dict[str, Run]:
    """Write both models and open them, each on one thread; gives what executes them, by the name of the runtime."""
    export_float_onnx(network, directory / FLOAT_FILE)
    export_onnx(quantized, directory / INT8_FILE)
    files = {"onnxruntime-float32": FLOAT_FILE, "onnxruntime-int8": INT8_FILE}
    return {name: partial(run_session, open_session(directory / file)) for name, file in files.items()}


def list_sizes(directory: Path) -> tuple[tuple[str, int], ...]:
    """The bytes of what was stored."""
    return tuple((name, (directory / name).stat().st_size) for name in (FLOAT_FILE, INT8_FILE))


def name_kernels(
    directory: Path, layers: Sequence[LayerReport], images: torch.Tensor
) -> tuple[tuple[LayerReport, ...], tuple[str, ...]]:
    """The layers with the kernel that ran in int8 and the times of both models, and what fell back to float."""
    found = profile_layers(directory / INT8_FILE, images)
    int8 = {kernel.layer: kernel for kernel in found}
    floats = {kernel.layer: kernel for kernel in profile_layers(directory / FLOAT_FILE, images)}
    told = tuple(_add_kernel(layer, int8.get(layer.name), floats.get(layer.name)) for layer in layers)
    return told, list_fallbacks(found)


def _add_kernel(layer: LayerReport, int8: LayerKernel | None, before: LayerKernel | None) -> LayerReport:
    kernel = "" if int8 is None else "float" if int8.is_float else int8.kernel
    return replace(
        layer,
        kernel=kernel,
        seconds=None if int8 is None or not int8.kernel else int8.seconds,
        float_seconds=before.seconds or None if before is not None else None,
    )

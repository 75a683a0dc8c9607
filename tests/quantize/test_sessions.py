"""Tests of what onnxruntime really ran: kernels by layer, times, fall-backs to float."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from scalelab.quantize.eager_kernels import has_vnni
from scalelab.quantize.export import export_float_onnx, export_onnx
from scalelab.quantize.network import CapturedNetwork
from scalelab.quantize.sessions import (
    LayerKernel,
    list_fallbacks,
    load_graph,
    open_session,
    profile_layers,
    read_kernels,
    run_session,
)
from tests.quantize.integer_nets import make_images, make_network
from tests.quantize.onnx_integers import read_integers

onnx = pytest.importorskip("onnx", reason="sessions need scalelab[quantize]")
pytest.importorskip("onnxruntime", reason="sessions need scalelab[quantize]")

WEIGHTED = ("stem", "block.conv", "block.short", "hidden", "head")


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    export_onnx(make_network(0), tmp_path / "int8.onnx")
    return tmp_path / "int8.onnx"


def index_kernels(kernels: tuple[LayerKernel, ...]) -> dict[str, LayerKernel]:
    return {kernel.layer: kernel for kernel in kernels}


def test_every_layer_runs_by_an_integer_kernel_of_its_own(exported: Path) -> None:
    kernels = index_kernels(profile_layers(exported, make_images(0), num_runs=3))
    assert list(kernels) == [layer.name for layer in make_network(0).layers]
    names = {name: kernel.kernel for name, kernel in kernels.items()}
    assert names["stem"] == names["block.conv"] == names["block.short"] == "QLinearConv"
    assert names["hidden"] == names["head"] == "QGemm"
    assert names["add"] == "QLinearAdd"
    assert names["mean"] == "QLinearGlobalAveragePool"
    assert names["smooth"] == "QLinearAveragePool"
    assert names["max"].endswith("MaxPool")
    assert [name for name, kernel in kernels.items() if kernel.is_weighted] == list(WEIGHTED)
    assert not any(kernel.is_float for kernel in kernels.values())
    assert all(kernel.seconds > 0 for kernel in kernels.values() if kernel.layer != "flatten")
    assert list_fallbacks(tuple(kernels.values())) == ()


def test_layers_that_fall_back_to_float_are_told(exported: Path) -> None:
    kernels = profile_layers(exported, make_images(0), is_optimized=False, num_runs=1)
    assert [kernel.layer for kernel in kernels if kernel.is_fallback] == list(WEIGHTED)
    remarks = list_fallbacks(kernels)
    assert len(remarks) == len(WEIGHTED)
    assert remarks[0].startswith("layer stem is stored in int8 but runs in float (Conv)")


def test_one_layer_that_onnxruntime_does_not_merge_is_told_apart_from_the_others(exported: Path) -> None:
    """A linear layer whose weights have no zero point is merged by no rule."""
    if not has_vnni():
        pytest.skip("without VNNI onnxruntime gives weights that have no zero point one that it then refuses")
    model = onnx.load(str(exported))
    for node in model.graph.node:
        if node.name == "hidden/wf":
            del node.input[2]
    kernels = profile_layers(model.SerializeToString(), make_images(0), num_runs=1)
    assert [kernel.layer for kernel in kernels if kernel.is_fallback] == ["hidden"]
    (remark,) = list_fallbacks(kernels)
    assert "layer hidden is stored in int8 but runs in float" in remark


def test_a_float_layer_that_onnxruntime_quantizes_is_told() -> None:
    kernel = LayerKernel(layer="conv2", kernel="QLinearConv", seconds=1.0, is_weighted=True, is_requantized=True)
    (remark,) = list_fallbacks((kernel,))
    assert remark.startswith("layer conv2 is kept in float but runs in int8 (QLinearConv)")


def test_a_float_model_has_float_kernels_and_no_fall_back(tmp_path: Path) -> None:
    network = make_network(0)
    layers = []
    for quantized in network.layers:
        layer = quantized.layer
        weight = None if quantized.weight is None else quantized.weight.to(torch.float32)
        layers.append(type(layer)(**{**vars(layer), "weight": weight}))
    export_float_onnx(CapturedNetwork(layers=tuple(layers), input_shape=network.input_shape), tmp_path / "float.onnx")
    kernels = index_kernels(profile_layers(tmp_path / "float.onnx", make_images(0), num_runs=1))
    assert all(kernels[name].is_float and kernels[name].kernel for name in WEIGHTED)
    assert list_fallbacks(tuple(kernels.values())) == ()


def test_the_first_run_is_left_out_and_the_rest_is_a_median(exported: Path) -> None:
    def make_event(node: str, op: str, microseconds: int) -> dict[str, Any]:
        return {"cat": "Node", "name": f"{node}_kernel_time", "dur": microseconds, "args": {"op_name": op}}

    events = [make_event("stem_token_3", "QLinearConv", value) for value in (9_000, 30, 10, 20)]
    events += [make_event("stem/relu", "Clip", value) for value in (500, 1, 2, 3)]
    events += [{"cat": "Session", "name": "model_run", "dur": 1}, make_event("Transpose", "Transpose", 7)]
    kernels = index_kernels(read_kernels(events, load_graph(exported), num_runs=3))
    assert kernels["stem"].kernel == "QLinearConv"
    assert kernels["stem"].seconds == pytest.approx(22e-6)
    assert kernels["head"].kernel == ""
    assert kernels["head"].is_fallback


def test_seeing_integers_changes_no_result(exported: Path) -> None:
    images = make_images(1)
    logits = run_session(open_session(exported), images)
    assert torch.equal(read_integers(exported, images)["logits"], logits)
    assert torch.equal(read_integers(exported.read_bytes(), images)["logits"], logits)

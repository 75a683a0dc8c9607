"""The exported network gives every logit of the simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scalelab.quantize.lab.chain import LabSettings, export_lab, run_integers
from scalelab.quantize.sessions import open_session, run_session
from scalelab.worker.models.networks import Lenet
from tests.quantize.lab.chains import make_images, make_lab, make_plain

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


def run_exported(path: Path, images: torch.Tensor, is_optimized: bool = True) -> torch.Tensor:
    return run_session(open_session(path, is_optimized=is_optimized), images)


@pytest.mark.parametrize("is_optimized", [True, False])
@pytest.mark.parametrize("peak", [127, 255])
@pytest.mark.parametrize("bias", ["none", "last", "all"])
def test_every_logit_of_lenet_is_the_same(tmp_path: Path, bias: str, peak: int, is_optimized: bool) -> None:
    torch.manual_seed(0)
    model = Lenet(bias).eval()
    images = 2 * torch.rand(120, 3, 32, 32) - 1
    lab = make_lab(model, images[:40], LabSettings(peak=peak))
    export_lab(lab, tmp_path / "lab.onnx")
    logits = run_exported(tmp_path / "lab.onnx", images, is_optimized)
    wanted = run_integers(lab, images)
    assert len(wanted.unique()) > 20, "logits that could differ"
    assert torch.equal(logits, wanted)


@pytest.mark.parametrize("settings", [LabSettings(), LabSettings(weight_range="3sigma"), LabSettings(bias="raw")])
def test_every_kind_of_layer_is_exported(tmp_path: Path, settings: LabSettings) -> None:
    model, images = make_plain(), make_images(200)
    lab = make_lab(model, images[:20], settings)
    export_lab(lab, tmp_path / "lab.onnx")
    assert torch.equal(run_exported(tmp_path / "lab.onnx", images), run_integers(lab, images))


def test_a_single_image_is_a_batch_too(tmp_path: Path) -> None:
    lab = make_lab(make_plain(), make_images())
    export_lab(lab, tmp_path / "lab.onnx")
    assert run_exported(tmp_path / "lab.onnx", make_images(1)).shape == (1, 5)


def test_products_are_integer_operations_on_bytes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(300, 5)).eval()
    export_lab(make_lab(model, make_images()), tmp_path / "lab.onnx")
    graph: Any = onnx.load(str(tmp_path / "lab.onnx")).graph
    kinds = [node.op_type for node in graph.node]
    assert kinds.count("ConvInteger") == kinds.count("MatMulInteger") == 1
    assert not {"Conv", "Gemm", "MatMul"} & set(kinds)
    stored = {tensor.name: tensor.data_type for tensor in graph.initializer}
    assert stored["0/w"] == stored["3/w"] == onnx.TensorProto.UINT8
    assert stored["0/b"] == stored["3/b"] == onnx.TensorProto.INT32

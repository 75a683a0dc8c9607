"""Tests of the export: integers of every layer equal to the simulation's, sizes, what is written, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scalelab.errors import NotWritable, UsageError
from scalelab.quantize import sessions
from scalelab.quantize.capture import capture_network
from scalelab.quantize.export import _add_kernel, export_float_onnx, export_onnx
from scalelab.quantize.network import CapturedNetwork, Grid, QuantizedNetwork, run_float
from scalelab.quantize.pipeline import quantize_model
from scalelab.quantize.scales import quantize_network
from scalelab.quantize.sessions import LayerKernel, open_session, profile_layers, run_session
from scalelab.quantize.simulate import compute_integers, find_profile, simulate_logits
from scalelab.records.quantized import LayerReport
from scalelab.records.tasks import Quantization
from scalelab.worker.models.networks import Lenet, Resnet18
from tests.quantize.integer_nets import make_images, make_network
from tests.quantize.onnx_integers import read_integers
from tests.quantize.simulated import simulate

onnx = pytest.importorskip("onnx", reason="the exports need scalelab[quantize]")
pytest.importorskip("onnxruntime", reason="the exports need scalelab[quantize]")

Results = dict[str, torch.Tensor]
Trained = tuple[CapturedNetwork, QuantizedNetwork, torch.Tensor, Results]


def count_differing(
    network: QuantizedNetwork, images: torch.Tensor, path: Path, simulated: Results | None = None
) -> dict[str, int]:
    """By layer, the integers that onnxruntime gives differently than the simulation."""
    export_onnx(network, path)
    theirs, ours = read_integers(path, images), simulated or simulate(network, images)
    assert theirs.keys() == ours.keys()
    assert all(theirs[name].dtype == ours[name].dtype for name in ours)
    return {name: int((theirs[name] != ours[name]).sum()) for name in ours}


def make_trained(model: nn.Module, seed: int) -> Trained:
    """A module with statistics in its norms, quantized by the default recipe; images that saturate now and then."""
    torch.manual_seed(seed)
    images = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        model.train()
        model(images)
    quantization = quantize_model(model.eval(), [images[:2]], Quantization())
    loud = 1.2 * images[2:]
    return quantization.network, quantization.quantized, loud, simulate(quantization.quantized, loud)


def quantize_mixed(model: nn.Module, images: torch.Tensor, keep_float: tuple[str, ...]) -> QuantizedNetwork:
    made = quantize_model(model, [images], Quantization())
    return quantize_network(made.network, made.calibration, keep_float=keep_float)


@pytest.fixture(scope="module")
def lenet() -> Trained:
    torch.manual_seed(0)
    return make_trained(Lenet("all"), 1)


@pytest.fixture(scope="module")
def resnet18() -> Trained:
    torch.manual_seed(0)
    return make_trained(Resnet18(), 2)


@pytest.mark.parametrize("per_channel", [True, False])
def test_no_integer_of_any_layer_differs_from_onnxruntime(tmp_path: Path, per_channel: bool) -> None:
    for seed in range(16):
        network = make_network(seed, per_channel=per_channel, relu_zero_point=128 * (seed % 2))
        differing = count_differing(network, make_images(seed), tmp_path / "int8.onnx")
        assert not any(differing.values()), (seed, differing)


def test_no_integer_of_lenet_differs_from_onnxruntime(lenet: Trained, tmp_path: Path) -> None:
    differing = count_differing(*lenet[1:3], tmp_path / "int8.onnx", lenet[3])
    assert len(differing) == len(lenet[1].layers) + 1
    assert not any(differing.values()), differing


def test_no_integer_of_resnet18_differs_from_onnxruntime(resnet18: Trained, tmp_path: Path) -> None:
    differing = count_differing(*resnet18[1:3], tmp_path / "int8.onnx", resnet18[3])
    assert len(differing) == len(resnet18[1].layers) + 1
    assert not any(differing.values()), differing


@pytest.mark.parametrize("rounds_logits", [True, False])
@pytest.mark.parametrize("per_channel", [True, False])
def test_logits_are_those_of_onnxruntime_rounded_or_not(tmp_path: Path, rounds_logits: bool, per_channel: bool) -> None:
    torch.manual_seed(5)
    images = torch.randn(40, 3, 32, 32)
    settings = Quantization(rounds_logits=rounds_logits, is_per_tensor=not per_channel)
    quantized = quantize_model(Lenet("last").eval(), [images[:8]], settings).quantized
    ours = simulate(quantized, images)
    differing = count_differing(quantized, images, tmp_path / "int8.onnx", ours)
    assert not any(differing.values()), differing
    last = quantized.layers[-1]
    steps = ours["logits"] / last.output.scale
    assert last.is_unrounded is not rounds_logits
    assert bool(((steps - steps.round()).abs() < 1e-3).all()) is rounds_logits


def test_a_last_layer_in_float_that_is_not_rounded_gives_its_numbers(tmp_path: Path) -> None:
    torch.manual_seed(6)
    images = torch.randn(8, 3, 32, 32)
    quantized = quantize_mixed(Lenet("all").eval(), images, ("fc3",))
    export_onnx(quantized, tmp_path / "mixed.onnx")
    assert not [kernel for kernel in profile_layers(tmp_path / "mixed.onnx", images) if kernel.is_requantized]
    logits = run_session(open_session(tmp_path / "mixed.onnx"), images)
    assert torch.allclose(logits, simulate_logits(quantized, images), rtol=1e-5, atol=1e-6)


def test_without_rewriting_a_qdq_file_runs_in_float_and_is_a_tie_away_at_most(
    resnet18: Trained, tmp_path: Path
) -> None:
    """Layer by layer from the same integers: float32 sums are rounded, so that ties may fall to the other side."""
    _, network, images, _ = resnet18
    export_onnx(network, tmp_path / "int8.onnx")
    theirs = read_integers(tmp_path / "int8.onnx", images[:1], is_optimized=False)
    num_differing = 0
    for layer in network.layers[1:-1]:
        sources = [network.find(name).output for name in layer.layer.inputs]
        inputs = [theirs[name] for name in layer.layer.inputs]
        ours = compute_integers(layer, inputs, sources, find_profile("onnxruntime"))
        distance = (ours.to(torch.int16) - theirs[layer.name].to(torch.int16)).abs()
        assert int(distance.max()) <= 1, layer.name
        num_differing += int((distance > 0).sum())
    assert num_differing < 1e-3 * sum(tensor.numel() for tensor in theirs.values())


def test_int8_files_are_as_much_smaller_as_weights_let_them_be(
    lenet: Trained, resnet18: Trained, tmp_path: Path
) -> None:
    for (network, quantized, _, _), least in ((lenet, 3.4), (resnet18, 3.9)):
        before = export_float_onnx(network, tmp_path / "float.onnx")
        after = export_onnx(quantized, tmp_path / "int8.onnx")
        assert (tmp_path / "int8.onnx").stat().st_size == after
        assert before / after >= least


def test_the_float_export_gives_the_results_of_the_network(lenet: Trained, resnet18: Trained, tmp_path: Path) -> None:
    for network, _, images, _ in (lenet, resnet18):
        export_float_onnx(network, tmp_path / "float.onnx")
        logits = run_session(open_session(tmp_path / "float.onnx"), images)
        expected = run_float(network, images)[network.output]
        assert torch.allclose(logits, expected, atol=1e-4 * float(expected.abs().max()))


def test_nodes_are_called_as_layers_and_any_batch_can_be_run(lenet: Trained, tmp_path: Path) -> None:
    _, quantized, images, _ = lenet
    export_onnx(quantized, tmp_path / "int8.onnx")
    model = onnx.load(str(tmp_path / "int8.onnx"))
    names = {node.name for node in model.graph.node}
    assert {layer.name for layer in quantized.layers} <= names
    assert {node.op_type for node in model.graph.node if node.name.startswith("conv1")} >= {"Conv", "QuantizeLinear"}
    session = open_session(tmp_path / "int8.onnx")
    alone = torch.cat([run_session(session, images[number : number + 1]) for number in range(len(images))])
    assert torch.equal(alone, run_session(session, images))


def test_layers_that_are_kept_in_float_have_float_weights_and_are_not_quantized_again(tmp_path: Path) -> None:
    torch.manual_seed(3)
    images = torch.randn(8, 3, 32, 32)
    quantized = quantize_mixed(Lenet("all").eval(), images, ("conv2", "fc1"))
    export_onnx(quantized, tmp_path / "mixed.onnx")
    weights = {tensor.name: tensor.data_type for tensor in onnx.load(str(tmp_path / "mixed.onnx")).graph.initializer}
    assert weights["conv2/w"] == weights["fc1/w"] == onnx.TensorProto.FLOAT
    assert weights["conv1/w"] == onnx.TensorProto.INT8
    theirs, ours = read_integers(tmp_path / "mixed.onnx", images), simulate(quantized, images)
    for name in ("conv2", "fc1"):
        # Quantized again by onnxruntime, one in twelve integers would be another.
        assert (theirs[name] != ours[name]).float().mean() < 0.01


def test_a_captured_module_is_exported_with_the_paths_of_its_modules(tmp_path: Path) -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4 * 225, 5)).eval()
    network = capture_network(model, torch.randn(2, 3, 32, 32))
    export_float_onnx(network, tmp_path / "float.onnx")
    images = torch.randn(3, 3, 32, 32)
    expected = model(images).detach()
    assert torch.allclose(run_session(open_session(tmp_path / "float.onnx"), images), expected, atol=1e-5)


def test_a_pooling_on_another_grid_than_its_input_is_refused(tmp_path: Path) -> None:
    network = make_network(0)
    layers = tuple(replace(layer, output=Grid(scale=0.5)) if layer.name == "max" else layer for layer in network.layers)
    with pytest.raises(UsageError, match=r"layer max \(max_pool\) has a different grid than its input"):
        export_onnx(replace(network, layers=layers), tmp_path / "int8.onnx")
    assert not list(tmp_path.iterdir())


def test_a_model_that_gives_nothing_finite_is_not_written(lenet: Trained, tmp_path: Path) -> None:
    network = lenet[0]
    head = network.layers[-1]
    assert head.weight is not None
    broken = replace(head, weight=torch.full_like(head.weight, torch.nan))
    with pytest.raises(UsageError, match="non-finite"):
        export_float_onnx(replace(network, layers=(*network.layers[:-1], broken)), tmp_path / "float.onnx")
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotWritable, match="absent"):
        export_onnx(make_network(0), tmp_path / "absent" / "int8.onnx")


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_a_missing_package_is_named_with_what_to_install(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = sessions.importlib.import_module

    def import_module(name: str) -> Any:
        if name.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return found(name)

    monkeypatch.setattr(sessions.importlib, "import_module", import_module)
    with pytest.raises(UsageError, match=rf"needs {package}, .*: pip install 'scalelab\[quantize\]'"):
        export_onnx(make_network(0), tmp_path / "int8.onnx")


QGEMM, GEMM = (LayerKernel(layer="fc", kernel=kernel, seconds=2.0) for kernel in ("QGemm", "Gemm"))


@pytest.mark.parametrize(
    ("int8", "before", "expected"),
    [
        (None, None, ("", None, None)),
        (replace(QGEMM, kernel=""), replace(GEMM, seconds=0.0), ("", None, None)),
        (QGEMM, replace(GEMM, seconds=3.0), ("QGemm", 2.0, 3.0)),
        (replace(GEMM, is_float=True), None, ("float", 2.0, None)),
    ],
)
def test_a_layer_has_the_kernels_and_times_of_both_models_if_they_ran(
    int8: LayerKernel | None, before: LayerKernel | None, expected: tuple[str, float | None, float | None]
) -> None:
    found = _add_kernel(LayerReport(name="fc", op="linear"), int8, before)
    assert (found.kernel, found.seconds, found.float_seconds) == expected

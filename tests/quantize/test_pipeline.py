"""The whole way of a small network: every stage leaves its part, and one that fails takes nothing with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scalelab.errors import UsageError
from scalelab.quantize import pipeline as module
from scalelab.quantize.capture import capture_network
from scalelab.quantize.held_out import HeldOut
from scalelab.quantize.pipeline import Pipeline, Task, check_logits
from scalelab.quantize.sessions import one_thread
from scalelab.records.quantized import Quantized
from scalelab.records.tasks import Quantization
from scalelab.records.trial import from_builtins, to_builtins
from tests.quantize.nets import Small, make_net

QUICK = Quantization(num_samples=16, num_rounds=2, batches=(1, 4))


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


def make_task(directory: Path, settings: Quantization = QUICK, model: nn.Module | None = None, **fields: Any) -> Task:
    """A network on random images whose classes are those that it gives in float."""
    model = model or make_net(Small)
    images = torch.randn(48, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        labels = model(images).argmax(1)
    batches = list(zip(images.split(16), labels.split(16), strict=True))
    return Task(
        model=model,
        calibration=fields.get("calibration", [images[:16]]),
        test=HeldOut(fields.get("test", batches)),
        settings=settings,
        directory=directory,
    )


def run(task: Task) -> tuple[Quantized, list[Quantized]]:
    left: list[Quantized] = []
    return Pipeline(task, left.append).run(), left


def test_every_stage_leaves_its_part(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    record, left = run(make_task(tmp_path))
    assert [stage.name for stage in record.stages] == ["float", "int8", "eager", "onnxruntime"]
    assert record.stages[0].predictions == record.labels
    agreement = sum(a == b for a, b in zip(record.stages[1].predictions, record.labels, strict=True))
    assert agreement >= 44
    assert record.stages[3].predictions == record.stages[1].predictions
    assert dict(record.sizes)["int8.onnx"] == (tmp_path / "int8.onnx").stat().st_size
    assert {timing.runtime for timing in record.timings} == {
        "onnxruntime-float32", "onnxruntime-int8", "eager-float32", "eager-int8",
    }  # fmt: skip
    assert {(timing.batch, len(timing.seconds)) for timing in record.timings} == {(1, 2), (4, 2)}
    assert record.num_calibrated == 16
    assert record.correct_float == 48
    weighted = [layer for layer in record.layers if layer.num_weights]
    assert [layer.name for layer in weighted] == ["conv1", "conv2", "conv3", "head"]
    assert all(layer.kernel and layer.seconds for layer in weighted)
    assert record.layers[-1].tied_outputs is not None
    kinds = {(histogram.layer, histogram.kind) for histogram in record.histograms}
    assert {("conv1", "weights"), ("conv1", "after"), ("input", "after")} <= kinds
    assert left[-1] == record
    assert from_builtins(to_builtins(record), Quantized) == record


def test_counts_of_histograms_add_up_to_all_numbers(tmp_path: Path) -> None:
    record, _ = run(make_task(tmp_path))
    weights = {histogram.layer: histogram for histogram in record.histograms if histogram.kind == "weights"}
    assert sum(weights["conv1"].counts) == 8 * 3 * 9
    after = {histogram.layer: histogram for histogram in record.histograms if histogram.kind == "after"}
    assert sum(after["input"].counts) == 16 * 3 * 16 * 16
    assert after["input"].chosen_high is not None
    assert 0.9 < after["input"].chosen_high / after["input"].largest < 1.01
    assert (after["head"].chosen_low, after["head"].chosen_high) == (None, None), "logits are not rounded"


@pytest.mark.parametrize(
    "stage", ["make_eager", "export_models", "diagnose", "time_runtimes", "name_kernels", "list_histograms"]
)
def test_a_late_stage_that_fails_is_a_remark_and_the_others_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(module, stage, fail)
    record, _ = run(make_task(tmp_path))
    assert [remark for remark in record.remarks if "RuntimeError: no kernel for this" in remark]
    assert {"float", "int8"} <= {one.name for one in record.stages}
    if stage != "time_runtimes":
        assert record.timings
    if stage == "export_models":
        assert not record.sizes
        assert {timing.runtime for timing in record.timings} == {"eager-float32", "eager-int8"}


def test_without_onnxruntime_a_remark_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("importlib.import_module", find_nothing)
    record, _ = run(make_task(tmp_path))
    (remark,) = [remark for remark in record.remarks if "onnx" in remark]
    assert "pip install 'scalelab[quantize]'" in remark
    assert [stage.name for stage in record.stages] == ["float", "int8", "eager"]


def make_net_with_outlier() -> nn.Module:
    """A weight of a thousand on a channel that is always zero: nothing to float, everything to a scale per tensor."""
    model = make_net(Small)
    assert isinstance(model, Small)
    with torch.no_grad():
        for layer in (model.norm1, model.conv2):
            layer.weight[5] = 0
            layer.bias[5] = 0  # type: ignore[index]
        model.conv3.weight[0, 5, 0, 0] = 1000.0
    return model


def test_mixed_keeps_a_bad_layer_in_float_and_wins_its_samples_back(tmp_path: Path) -> None:
    settings = replace(QUICK, is_per_tensor=True, mixed_points=0.0)
    record, _ = run(make_task(tmp_path, settings, make_net_with_outlier()))
    found = {stage.name: stage for stage in record.stages}
    pairs = {name: zip(found[name].predictions, record.labels, strict=True) for name in ("int8", "mixed")}
    lost = {name: sum(mine != true for mine, true in both) for name, both in pairs.items()}
    assert lost["int8"] > 10 > lost["mixed"]
    assert record.kept_float[0] == "conv3"
    assert {layer.name for layer in record.layers if layer.is_float} == set(record.kept_float)


def test_a_bound_that_holds_by_itself_keeps_nothing_in_float(tmp_path: Path) -> None:
    record, _ = run(make_task(tmp_path, replace(QUICK, mixed_points=50.0)))
    assert record.kept_float == ()
    assert "--mixed 50 is met with all layers in int8." in record.remarks


def test_without_classes_agreement_is_all_there_is(tmp_path: Path) -> None:
    images = torch.randn(8, 3, 16, 16)
    record, _ = run(make_task(tmp_path, test=[images]))
    assert record.labels == ()
    assert len(record.stages[1].predictions) == 8
    assert record.correct_float is None
    with pytest.raises(UsageError, match="--mixed needs labelled test samples"):
        run(make_task(tmp_path, replace(QUICK, mixed_points=1.0), test=[images]))


def test_results_that_are_no_class_scores_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 3)).eval()
    task = replace(make_task(tmp_path), model=model)
    with pytest.raises(UsageError, match="one row of class scores per sample"):
        run(task)


@pytest.mark.parametrize("num_classes", [1, 2])
def test_two_classes_are_enough_and_one_is_not(num_classes: int) -> None:
    images = torch.randn(2, 3, 4, 4)
    network = capture_network(nn.Sequential(nn.Flatten(), nn.Linear(48, num_classes)).eval(), images)
    with nullcontext() if num_classes == 2 else pytest.raises(UsageError, match=r"returns shape \(2, 1\)"):
        check_logits(network, images)


def test_an_unsupported_module_is_named_with_its_path(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.SiLU(), nn.Flatten(), nn.Linear(2 * 14 * 14, 4)).eval()
    with pytest.raises(UsageError, match=r"1 is nn\.SiLU"):
        run(replace(make_task(tmp_path), model=model))


@pytest.mark.parametrize(
    ("value", "words"), [(float("nan"), "NaN"), (1.0, "every value of the calibration images is 1")]
)
def test_calibration_on_samples_that_say_nothing_is_refused(tmp_path: Path, value: float, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run(make_task(tmp_path, calibration=[torch.full((4, 3, 16, 16), value)]))


def test_a_channel_without_weights_is_remarked(tmp_path: Path) -> None:
    model = make_net(Small)
    assert isinstance(model, Small)
    with torch.no_grad():
        model.conv2.weight[3] = 0
    record, _ = run(make_task(tmp_path, model=model))
    assert "conv2: channel 3 has only zero weights." in record.remarks


def test_logits_that_are_rounded_to_a_byte_tie_now_and_then(tmp_path: Path) -> None:
    """Classes whose weights hardly differ."""
    model = make_net(Small)
    assert isinstance(model, Small)
    with torch.no_grad():
        model.head.bias.zero_()
        model.head.weight[1:] = model.head.weight[0] * (1 + 1e-4 * torch.arange(1, len(model.head.weight))[:, None])
    tied = {
        rounds: run(make_task(tmp_path, replace(QUICK, rounds_logits=rounds), model))[0].layers[-1].tied_outputs
        for rounds in (True, False)
    }
    assert tied[True] == 48
    assert tied[False] is not None
    assert tied[False] < 48


def test_the_number_of_threads_is_as_before(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    run(make_task(tmp_path))
    assert torch.get_num_threads() == 2

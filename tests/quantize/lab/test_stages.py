"""The lab from beginning to end, on lenet that has learnt the digits."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

from scalelab.errors import UsageError
from scalelab.quantize.capture import capture_network
from scalelab.quantize.lab.chain import LabSettings
from scalelab.quantize.lab.stages import regroup, run_dequantized, run_lab, run_weights, take_images
from scalelab.records.quantized import Quantized
from tests.quantize.lab.chains import load_half, make_images, make_lab, make_plain, train_lenet


def measure_accuracy(quantized: Quantized) -> dict[str, float]:
    num = len(quantized.labels)
    return {
        stage.name: sum(a == b for a, b in zip(stage.predictions, quantized.labels, strict=True)) / num
        for stage in quantized.stages
    }


def measure_agreement(quantized: Quantized, one: str, other: str) -> float:
    found = {stage.name: stage.predictions for stage in quantized.stages}
    return sum(a == b for a, b in zip(found[one], found[other], strict=True)) / len(quantized.labels)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    images, labels = load_half("test")
    batches = zip(images.split(4), labels.split(4), strict=True)
    return run_lab(
        train_lenet("last"), load_half("train")[0].split(50), batches, LabSettings(), tmp_path_factory.mktemp("lab")
    )


def test_every_stage_gives_a_class_for_every_test_image(digits: Quantized) -> None:
    assert [stage.name for stage in digits.stages] == [
        "float",
        "weights",
        "dequantized",
        "weights-3sigma",
        "weights-raw-bias",
        "weights-no-bias",
        "int8",
        "int8-255",
        "int8-accumulators",
    ]
    num_images = len(load_half("test")[1])
    assert {len(stage.predictions) for stage in digits.stages} == {num_images} == {len(digits.labels)}
    assert digits.num_calibrated == 400


def test_integers_lose_little_and_dequantized_weights_less(digits: Quantized) -> None:
    accuracy = measure_accuracy(digits)
    assert accuracy["float"] > 0.85
    assert accuracy["float"] - accuracy["int8"] <= 0.01
    assert accuracy["float"] - accuracy["dequantized"] <= 0.005
    assert measure_agreement(digits, "int8", "float") >= 0.97


def test_integer_weights_are_the_dequantized_ones_times_a_factor(digits: Quantized) -> None:
    assert measure_agreement(digits, "weights", "dequantized") == 1.0


def test_logits_of_integer_weights_are_those_of_dequantized_ones_times_all_scales() -> None:
    model, images = make_plain(), make_images()
    network, lab = capture_network(model, images[:2]), make_lab(model, images)
    factor = math.prod(one.weight_scale for one in lab.layers)
    found = run_weights(network, lab, "scaled", images)
    torch.testing.assert_close(found / factor, run_dequantized(network, lab, images), rtol=1e-4, atol=1e-5)
    assert factor > 1


def test_an_unscaled_bias_is_as_good_as_none(digits: Quantized) -> None:
    assert measure_agreement(digits, "weights-raw-bias", "weights-no-bias") == 1.0


def test_255_agrees_less_than_127(digits: Quantized) -> None:
    assert measure_agreement(digits, "int8-255", "float") < measure_agreement(digits, "int8", "float")


def test_the_export_gives_every_logit(digits: Quantized) -> None:
    num_logits = 10 * len(digits.labels)
    assert f"no logits differ from the simulation, of {num_logits:,}." in " ".join(digits.remarks)
    sizes = dict(digits.sizes)
    assert sizes["float32.onnx"] / sizes["int8.onnx"] > 3.4


def test_layers_are_reported_with_steps_and_noise(digits: Quantized) -> None:
    assert [layer.name for layer in digits.layers] == ["conv1", "conv2", "fc1", "fc2", "fc3"]
    assert sum(layer.multiply_adds for layer in digits.layers) == 28**2 * 450 + 10**2 * 2400 + 48000 + 10080 + 840
    for layer in digits.layers:
        assert layer.scale is not None
        histogram = next(one for one in digits.histograms if (one.layer, one.kind) == (layer.name, "after"))
        assert layer.scale == pytest.approx(max(-histogram.least, histogram.largest) / 127, rel=1e-6)
        assert layer.sqnr is not None
        assert layer.sqnr > 20
        assert layer.output_sqnr is not None
        assert layer.output_sqnr > 20
        assert layer.clipped_share is not None
        assert layer.clipped_share < 0.01
    assert [layer.tied_outputs is None for layer in digits.layers] == [True] * 4 + [False]


def test_histograms_are_of_weights_and_of_results_before_and_after_relu(digits: Quantized) -> None:
    kinds = [(one.layer, one.kind) for one in digits.histograms]
    assert kinds[0] == ("input", "after")
    assert kinds[1:4] == [("conv1", "weights"), ("conv1", "before"), ("conv1", "after")]
    assert len(kinds) == 1 + 3 * 5
    after = digits.histograms[3]
    assert (after.least, after.chosen_low) == (0, 0)


def test_the_published_peak_can_be_the_chosen_one() -> None:
    images = make_images(60)
    model = make_plain()
    batches = [(images, torch.zeros(60, dtype=torch.long))]
    quantized = run_lab(model, [images], batches, LabSettings(peak=255, weight_range="3sigma"))
    names = [stage.name for stage in quantized.stages]
    assert "int8-127" in names
    assert "weights-max" in names
    other = run_lab(model, [images], batches, LabSettings(weight_range="3sigma"))
    found = [{stage.name: stage.predictions for stage in one.stages} for one in (quantized, other)]
    assert found[0]["int8"] == found[1]["int8-255"]
    assert found[0]["int8-127"] == found[1]["int8"]
    clipped = [layer.clipped_share or 0.0 for layer in quantized.layers]
    assert max(clipped) > 0.01
    assert quantized.sizes == ()


def test_a_network_without_biases_has_no_stages_of_them() -> None:
    images = make_images(20)
    quantized = run_lab(make_plain(bias=False), [images], [(images, torch.zeros(20, dtype=torch.long))])
    assert not [stage.name for stage in quantized.stages if "bias" in stage.name]
    assert any("Only 20 of the 400 requested calibration images" in words for words in quantized.remarks)


def test_a_dead_output_is_named() -> None:
    model, images = make_plain(bias=False), make_images(20)
    with torch.no_grad():
        model.get_submodule("4").weight[3] = 0.0
    quantized = run_lab(model, [images], [(images, torch.zeros(20, dtype=torch.long))])
    (layer,) = (layer for layer in quantized.layers if layer.name == "4")
    assert layer.dead_outputs is not None
    assert layer.dead_outputs >= 1
    assert any("outputs of 4 are constant" in words for words in quantized.remarks)


def test_a_weight_far_beyond_the_others_puts_the_blame_on_its_layer() -> None:
    model, images = make_plain(bias=False), make_images(60)
    with torch.no_grad():
        model.get_submodule("4").weight[2, 5] *= 100
    quantized = run_lab(model, [images], [(images, torch.zeros(60, dtype=torch.long))])
    heard = {layer.name: layer.output_sqnr for layer in quantized.layers if layer.output_sqnr is not None}
    assert min(heard, key=heard.__getitem__) == "4"


def test_without_onnx_the_rest_is_still_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    images = make_images(20)
    quantized = run_lab(make_plain(), [images], [(images, torch.zeros(20, dtype=torch.long))], directory=tmp_path)
    assert any("Nothing was exported: an int8 model needs onnx" in words for words in quantized.remarks)
    assert not list(tmp_path.iterdir())


def test_no_images_are_refused() -> None:
    images = make_images(20)
    with pytest.raises(UsageError, match="no calibration images"):
        run_lab(make_plain(), [images[:0]], [(images, torch.zeros(20, dtype=torch.long))])
    with pytest.raises(UsageError, match="no test images"):
        run_lab(make_plain(), [images], [])
    with pytest.raises(UsageError, match="training mode"):
        run_lab(make_plain().train(), [images], [])


def test_exactly_as_many_images_are_taken_as_were_asked_for() -> None:
    taken = take_images(iter([torch.zeros(3, 1), torch.zeros(0, 1), torch.ones(3, 1), torch.ones(9, 1)]), 5)
    assert torch.cat(taken).flatten().tolist() == [0, 0, 0, 1, 1]


def test_batches_are_put_together_in_their_order() -> None:
    batches = [(torch.full((2, 1), float(number)), torch.full((2,), number)) for number in range(5)]
    found = list(regroup(batches, 4))
    assert [len(images) for images, _ in found] == [4, 4, 2]
    assert torch.cat([labels for _, labels in found]).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]

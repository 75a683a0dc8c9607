"""The same scales to the last bit, however the samples come; what is no calibration is said to be none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from scalelab.errors import UsageError
from scalelab.quantize import calibrate as calibration
from scalelab.quantize.calibrate import Calibration, OutputRecorder, calibrate
from scalelab.quantize.capture import capture_network
from scalelab.quantize.network import CapturedNetwork, QuantizedNetwork, run_float
from scalelab.quantize.scales import quantize_network
from tests.quantize.nets import Small, draw_images, make_net

NUM_SAMPLES = 66


@pytest.fixture(scope="module")
def network() -> CapturedNetwork:
    return capture_network(make_net(Small), draw_images(2))


@pytest.fixture(scope="module")
def whole(network: CapturedNetwork) -> Calibration:
    return calibrate(network, [draw_images(NUM_SAMPLES)])


def assert_same_scales(first: Calibration, second: Calibration, network: CapturedNetwork) -> None:
    assert first.histograms == second.histograms
    assert first.num_samples == second.num_samples
    one, other = (quantize_network(network, replace(each, method="entropy")) for each in (first, second))
    assert list_scales(one) == list_scales(other)


def list_scales(quantized: QuantizedNetwork) -> list[float]:
    return [layer.output.scale for layer in quantized.layers]


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_scales_do_not_depend_on_the_batch_size(network: CapturedNetwork, whole: Calibration, batch_size: int) -> None:
    found = calibrate(network, draw_images(NUM_SAMPLES).split(batch_size))
    assert_same_scales(found, whole, network)


def test_scales_do_not_depend_on_the_order(network: CapturedNetwork, whole: Calibration) -> None:
    order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(1))
    assert_same_scales(calibrate(network, draw_images(NUM_SAMPLES)[order].split(16)), whole, network)


def test_scales_do_not_depend_on_how_images_lie_in_memory(network: CapturedNetwork, whole: Calibration) -> None:
    images = draw_images(NUM_SAMPLES).to(memory_format=torch.channels_last)
    assert_same_scales(calibrate(network, [images]), whole, network)


def test_layers_with_a_grid_of_their_own_are_counted_in_full(network: CapturedNetwork, whole: Calibration) -> None:
    assert "max_pool_1" not in whole.histograms
    results = run_float(network, draw_images(NUM_SAMPLES))
    for name, histogram in whole.histograms.items():
        assert histogram.num_values == results[name].numel()
        assert histogram.largest == pytest.approx(float(results[name].max()), rel=1e-5)


def test_counting_in_small_portions_changes_nothing(network: CapturedNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [draw_images(6)]
    expected = calibrate(network, images).histograms
    monkeypatch.setattr(calibration, "BUFFER_VALUES", 1)
    assert calibrate(network, images).histograms == expected


def test_no_more_than_a_buffer_waits_to_be_counted() -> None:
    recorder = OutputRecorder(names=["a"])
    for _ in range(5):
        recorder.record({"a": torch.zeros(1 << 19)})
        assert recorder.num_waiting["a"] < 1 << 20
    assert recorder.finish()["a"].num_values == 5 << 19


@pytest.mark.parametrize(("value", "words"), [(float("nan"), "NaN"), (float("inf"), "infinite numbers")])
def test_a_batch_that_is_not_finite_is_named_with_the_layer(network: CapturedNetwork, value: float, words: str) -> None:
    batches = list(draw_images(6).split(2))
    batches[1][1, 0, 3, 3] = value
    with pytest.raises(UsageError, match=f"calibration batch 1 produces {words} in layer input"):
        calibrate(network, batches)


def test_an_overflow_inside_is_named_with_its_layer(network: CapturedNetwork) -> None:
    layers = [
        replace(layer, weight=layer.weight * 1e38 if layer.weight is not None else None) for layer in network.layers
    ]
    overflowing = replace(network, layers=tuple(layers))
    with pytest.raises(UsageError, match=r"calibration batch 0 produces .* in layer conv1: the model overflows there"):
        calibrate(overflowing, [draw_images(2) * 100])


@pytest.mark.parametrize("batches", [[], [torch.zeros(0, 3, 32, 32)]])
def test_no_samples_are_no_calibration(network: CapturedNetwork, batches: list[torch.Tensor]) -> None:
    with pytest.raises(UsageError, match="there are no calibration samples"):
        calibrate(network, batches)


def test_constant_images_are_no_calibration(network: CapturedNetwork) -> None:
    with pytest.raises(UsageError, match=r"every value of the calibration images is 0\.5"):
        calibrate(network, [torch.full((4, 3, 32, 32), 0.5)])


def test_images_of_another_shape_are_refused(network: CapturedNetwork) -> None:
    with pytest.raises(UsageError, match=r"batch 0 has shape \(2, 1, 28, 28\): it must be .*samples, 3, 32, 32"):
        calibrate(network, [torch.zeros(2, 1, 28, 28)])


def test_an_unknown_method_is_refused_with_the_known_ones(network: CapturedNetwork) -> None:
    with pytest.raises(UsageError, match="unknown calibration method 'mean'"):
        calibrate(network, [draw_images(2)], "mean")  # type: ignore[arg-type]


def test_scales_do_not_depend_on_the_number_of_threads(network: CapturedNetwork) -> None:
    found = []
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            found.append(calibrate(network, [draw_images(4)]))
            assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
    assert found[0].ranges == found[1].ranges

"""The lab's forward pass: exact integers, rounded and clamped, with guards."""

from __future__ import annotations

import pytest
import torch

from scalelab.errors import ScalelabError
from scalelab.quantize.lab.chain import (
    LabLayer,
    LabNetwork,
    LabSettings,
    add_products,
    check_integers,
    run_integers,
    run_layers,
    run_to_sums,
)
from scalelab.quantize.network import Layer, run_float
from tests.quantize.lab.chains import make_images, make_lab, make_plain, observe


def make_line(output_scale: float, has_relu: bool = False, bias: int | None = None) -> LabLayer:
    """One weight, 1."""
    return LabLayer(
        layer=Layer(name="fc", op="linear", inputs=("input",), weight=torch.ones(1, 1), has_relu=has_relu),
        scale=1.0,
        weight=torch.ones(1, 1, dtype=torch.int8),
        output_scale=output_scale,
        bias=None if bias is None else torch.tensor([bias], dtype=torch.int32),
    )


def give(one: LabLayer, *integers: float) -> list[float]:
    return [float(number) for number in run_layers((one,), torch.tensor(integers).reshape(-1, 1))]


def test_halves_are_rounded_to_even() -> None:
    assert give(make_line(0.5), 1, 3, 5, -1, -3) == [0, 2, 2, 0, -2]


def test_results_are_clamped_to_int8() -> None:
    assert give(make_line(3.0), 100, -100, 42) == [127, -128, 126]
    assert give(make_line(3.0, has_relu=True), 100, -100, 42) == [127, 0, 126]


def test_a_bias_is_added_before_the_scale() -> None:
    assert give(make_line(0.01, bias=10_000), 0, 100) == [100, 101]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (0.5, "fc received 0.5, which is not an integer: round"),
        (float("nan"), "fc received nan, which is not an integer"),
        (128.0, r"fc received 128, which is not an int8: clamp the output of the previous layer to \[-128, 127\]"),
        (-129.0, "fc received -129, which is not an int8"),
        (float("inf"), "fc received inf, which is not an int8"),
    ],
)
def test_a_layer_input_that_is_no_int8_raises(wrong: float, words: str) -> None:
    with pytest.raises(ScalelabError, match=words):
        give(make_line(1.0), 1, wrong)


def test_what_an_int8_can_be_passes_the_guard() -> None:
    check_integers("fc", torch.tensor([-128.0, 0.0, 127.0]))


def test_the_guard_stands_before_every_layer() -> None:
    lab = make_lab(make_plain(), make_images())
    for number, one in enumerate(lab.layers):
        if one.weight is None:
            continue
        shape = (1, 2, 12, 12) if one.layer.op == "conv" else (1, one.weight.shape[1])
        with pytest.raises(ScalelabError, match=f"{one.name} received 300"):
            run_layers(lab.layers[number:], torch.full(shape, 300.0))


def test_sums_are_what_int64_gives() -> None:
    lab = make_lab(make_plain(), make_images())
    last = lab.layers[-1]
    assert last.weight is not None
    assert last.bias is not None
    integers = torch.randint(-128, 128, (64, 8), generator=torch.Generator().manual_seed(0))
    wanted = integers.long() @ last.weight.long().t() + last.bias.long()
    assert torch.equal(add_products(last, integers.float()).long(), wanted)


def test_integers_stand_for_the_float_results() -> None:
    """Within the noise of rounding: a few steps of the last layer's scale."""
    model, images = make_plain(), make_images()
    network, _ = observe(model, images)
    lab = make_lab(model, images)
    logits = run_integers(lab, images)
    assert torch.equal(logits, logits.round())
    assert logits.abs().max() <= 128
    wanted = run_float(network, images)[network.output]
    assert (logits / lab.layers[-1].scale - wanted).abs().max() < 5 / lab.layers[-1].scale
    sums = run_to_sums(lab, images)
    assert torch.equal(torch.round(sums * lab.layers[-1].output_scale), logits)


def count_saturated(lab: LabNetwork, images: torch.Tensor) -> list[float]:
    found: list[float] = []
    run_integers(lab, images, lambda _one, _scaled, integers: found.append((integers == 127).double().mean().item()))
    return found


def test_255_saturates_what_127_does_not() -> None:
    model, images = make_plain(), make_images()
    plain = count_saturated(make_lab(model, images), images)
    doubled = count_saturated(make_lab(model, images, LabSettings(peak=255)), images)
    assert all(share < 0.02 for share in plain)
    assert all(more > 2 * share for more, share in zip(doubled[:2], plain, strict=False))

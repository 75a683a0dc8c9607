"""Tests of the profiles qnnpack and fbgemm against torch's own int8 kernels, integer by integer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from scalelab.errors import UnknownName
from scalelab.quantize.eager_kernels import sums_exactly
from scalelab.quantize.network import QuantizedNetwork
from tests.quantize.integer_nets import make_images, make_network
from tests.quantize.torch_engines import count_differences, list_engines, use_engine

SEEDS = range(16)


def require_engine(name: str) -> None:
    if name not in list_engines():
        pytest.skip(f"this torch has no engine {name}, only {', '.join(list_engines()) or 'none'}")


def limit_weights(network: QuantizedNetwork) -> QuantizedNetwork:
    """Weights of which two products with bytes fit in 16 bits, so that no kernel saturates."""
    layers = (
        layer if layer.weight is None else replace(layer, weight=layer.weight.clamp(-64, 64))
        for layer in network.layers
    )
    return replace(network, layers=tuple(layers))


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("engine", ["qnnpack", "fbgemm"])
def test_the_profile_of_an_engine_gives_the_integers_of_its_kernels(engine: str, per_channel: bool) -> None:
    require_engine(engine)
    for seed in SEEDS:
        network = make_network(seed, per_channel=per_channel, relu_zero_point=128 * (seed % 2), has_pools=False)
        if engine == "fbgemm" and not sums_exactly():
            network = limit_weights(network)
        differences = count_differences(network, make_images(seed, 8), engine)
        assert set(differences) == {"stem", "block.conv", "block.short", "hidden", "head"}
        assert not any(differences.values()), (seed, differences)


def test_a_profile_of_another_engine_is_told_apart() -> None:
    """The comparison can fail: fbgemm's rule does not give qnnpack's integers for all of these ties."""
    require_engine("qnnpack")
    from scalelab.quantize.simulate import compute_integers, find_profile
    from tests.quantize.simulated import simulate
    from tests.quantize.torch_engines import run_kernel

    num_different = 0
    for seed in SEEDS:
        network, images = make_network(seed, has_pools=False), make_images(seed, 8)
        results, layer = simulate(network, images), network.find("stem")
        source = network.find("input").output
        theirs = run_kernel("qnnpack", layer, results["input"], source)
        ours = compute_integers(layer, [results["input"]], [source], find_profile("fbgemm"))
        num_different += int((theirs != ours).sum())
    assert num_different > 0


def test_the_engine_that_was_set_is_put_back() -> None:
    before = torch.backends.quantized.engine
    for engine in list_engines():
        with use_engine(engine):
            assert torch.backends.quantized.engine == engine
        assert torch.backends.quantized.engine == before


def test_an_engine_that_torch_does_not_have_is_refused() -> None:
    with pytest.raises(UnknownName, match="int8 engine of this torch 'tflite'"), use_engine("tflite"):
        pass

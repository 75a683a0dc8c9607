"""Networks of integers that are made directly, without a float network before: every kind of layer, and many ties."""

from __future__ import annotations

import math

import torch

from scalelab.quantize.network import Grid, Layer, QuantizedLayer, QuantizedNetwork

NUM_CHANNELS = 8
INPUT_SHAPE = (4, 9, 9)


class IntegerNets:
    """Makes layers one after the other; scales are such that sums often end half way between two integers."""

    def __init__(self, seed: int, *, per_channel: bool = True, relu_zero_point: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.per_channel, self.relu_zero_point = per_channel, relu_zero_point
        scale = 0.01 + 0.02 * self.draw_fraction()
        self.layers = [QuantizedLayer(layer=Layer(name="input", op="input"), output=self.make_grid(scale, False))]

    def draw_fraction(self) -> float:
        return float(torch.rand(1, generator=self.random))

    def make_grid(self, scale: float, has_relu: bool) -> Grid:
        scale = float(torch.tensor(scale, dtype=torch.float32))
        return Grid(scale=scale, zero_point=self.relu_zero_point if has_relu else 128)

    def find(self, name: str) -> QuantizedLayer:
        return next(layer for layer in self.layers if layer.name == name)

    def add_weighted(self, layer: Layer, shape: tuple[int, ...], has_bias: bool = True) -> None:
        """Random int8 weights; scales of powers of two around a random one, so that many channels have ties."""
        weight = torch.randint(-127, 128, shape, generator=self.random, dtype=torch.int8)
        count = shape[0] if self.per_channel else 1
        base = 0.001 + 0.002 * self.draw_fraction()
        powers = torch.randint(-1, 2, (count,), generator=self.random)
        scales = torch.full((count,), base, dtype=torch.float32) * 2.0**powers
        scales[1::4] *= 1.1
        source = self.find(layer.inputs[0]).output.scale
        spread = math.sqrt(math.prod(shape[1:])) * 73 * 73
        step = 2.0 ** round(math.log2(spread / 80)) * (1 + 2.0**-23 * (int(3 * self.draw_fraction()) - 1))
        bias = torch.randint(-20_000, 20_000, (shape[0],), generator=self.random, dtype=torch.int32)
        self.layers.append(
            QuantizedLayer(
                layer=layer,
                output=self.make_grid(source * base * step, layer.has_relu),
                weight=weight,
                weight_scale=scales,
                bias=bias if has_bias else None,
            )
        )

    def add_other(self, layer: Layer, factor: float | None = None) -> None:
        """A layer without weights; its grid is that of its input, or one of its own by `factor`."""
        grid = self.find(layer.inputs[0]).output
        if factor is not None:
            grid = self.make_grid(grid.scale * factor, layer.has_relu or grid.zero_point == 0)
        self.layers.append(QuantizedLayer(layer=layer, output=grid))

    def finish(self) -> QuantizedNetwork:
        return QuantizedNetwork(layers=tuple(self.layers), input_shape=INPUT_SHAPE)


def make_network(
    seed: int, *, per_channel: bool = True, relu_zero_point: int = 0, has_pools: bool = True
) -> QuantizedNetwork:
    """A residual block with everything around it that a layer can be."""
    made = IntegerNets(seed, per_channel=per_channel, relu_zero_point=relu_zero_point)
    width = NUM_CHANNELS
    made.add_weighted(
        Layer(name="stem", op="conv", inputs=("input",), padding=(1, 1), has_relu=True), (width, INPUT_SHAPE[0], 3, 3)
    )
    grouped = Layer(name="block.conv", op="conv", inputs=("stem",), stride=(2, 2), padding=(1, 1), groups=2)
    made.add_weighted(grouped, (width, width // 2, 3, 3), has_bias=False)
    made.add_weighted(Layer(name="block.short", op="conv", inputs=("stem",), stride=(2, 2)), (width, width, 1, 1))
    made.add_other(Layer(name="add", op="add", inputs=("block.conv", "block.short"), has_relu=True), 0.75)
    name = "add"
    if has_pools:
        made.add_other(
            Layer(name="smooth", op="average_pool", inputs=(name,), kernel=(3, 3), stride=(1, 1), padding=(1, 1)), 0.7
        )
        made.add_other(Layer(name="max", op="max_pool", inputs=("smooth",), kernel=(2, 2), stride=(2, 2)))
        made.add_other(Layer(name="mean", op="average_pool", inputs=("max",)), 0.8)
        name = "mean"
    made.add_other(Layer(name="flatten", op="flatten", inputs=(name,)))
    num_inputs = width if has_pools else width * 25
    made.add_weighted(Layer(name="hidden", op="linear", inputs=("flatten",), has_relu=True), (33, num_inputs))
    made.add_weighted(Layer(name="head", op="linear", inputs=("hidden",)), (10, 33))
    return made.finish()


def make_images(seed: int, num_images: int = 3, shape: tuple[int, ...] = INPUT_SHAPE) -> torch.Tensor:
    """Numbers that fill the grid of the input and leave it on both sides."""
    return 1.5 * torch.randn(num_images, *shape, generator=torch.Generator().manual_seed(1000 + seed))

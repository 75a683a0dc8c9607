"""A quantized network as a torch module that computes with bytes: for those who stay in torch.

`make_eager(quantized)` gives a module that takes float32 images and gives float32 logits, like the model that it was
made from. In between everything is uint8, channels last, on torch's own int8 kernels (`eager_kernels.py`), on as many
threads as torch has. Its integers are those of the profile `onednn` (`eager_rounding.py`), which is not onnxruntime's:
about one in a million lies so near a tie that the two round it apart, and what follows may then differ by a step.

The module is made for images of the network's size and batches of any. It has no parameters and cannot be trained.
Packed weights are in a layout of this processor's, so what is pickled, copied or saved is the quantized network, and
the weights are packed anew where it is loaded.

Without VNNI, int8 on x86 is slow or inexact, and a layer that is kept in float costs the way to float and back;
`remarks` says which of these holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from scalelab.errors import UsageError
from scalelab.quantize.eager_kernels import (
    Kernel,
    Shape,
    make_add,
    make_average,
    make_conv,
    make_flatten,
    make_float,
    make_input,
    make_linear,
    make_max,
    make_output,
    make_relu,
    probe_kernels,
)
from scalelab.quantize.network import Grid, Op, QuantizedLayer, QuantizedNetwork
from scalelab.quantize.run_float import compute_layer

MAKERS: dict[Op, Callable[[QuantizedLayer, Grid, Shape], Kernel]] = {
    "conv": make_conv,
    "linear": make_linear,
    "average_pool": make_average,
    "max_pool": make_max,
    "flatten": make_flatten,
    "relu": make_relu,
}


def make_eager(quantized: QuantizedNetwork) -> EagerNetwork:
    """The network on torch's own integer kernels."""
    return EagerNetwork(quantized)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One layer on its way: where its inputs are, and which of them nobody needs after it."""

    name: str
    run: Kernel
    inputs: tuple[int, ...]
    released: tuple[int, ...]


class EagerNetwork(nn.Module):
    """Images in, logits out, bytes in between. `remarks` says what is slow or inexact about it here."""

    def __init__(self, quantized: QuantizedNetwork) -> None:
        super().__init__()
        for layer in quantized.layers:
            check_grid(layer)
        self.remarks = (*probe_kernels(), *remark_on_float(quantized))
        self._quantized = quantized
        self._finish = make_output(quantized.layers[-1].output)
        self._steps = tuple(make_steps(quantized))
        self.eval()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Float32 logits of a batch of images."""
        self._check(images)
        values: list[Any] = [None] * len(self._steps)
        with torch.no_grad():
            values[0] = self._steps[0].run(images)
            for number, step in enumerate(self._steps[1:], 1):
                values[number] = step.run(*[values[source] for source in step.inputs])
                for source in step.released:
                    values[source] = None
            return self._finish(values[-1])

    def run_integers(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """The integers of every layer by name, for comparisons: the same kernels, but nothing is overwritten."""
        self._check(images)
        found: list[torch.Tensor] = []
        with torch.no_grad():
            for step in self._steps:
                inputs = [found[source].clone() for source in step.inputs] if step.inputs else [images]
                found.append(step.run(*inputs))
        return {step.name: integers for step, integers in zip(self._steps, found, strict=True)}

    def _check(self, images: torch.Tensor) -> None:
        if tuple(images.shape[1:]) != self._quantized.input_shape:
            raise UsageError(
                f"images of the shape {tuple(images.shape)}: this int8 module is packed for batches of"
                f" {self._quantized.input_shape}, quantize a network of the other size for them"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return make_eager, (self._quantized,)

    def extra_repr(self) -> str:
        num_float = sum(layer.is_float for layer in self._quantized.layers)
        return f"{len(self._steps)} layers, {num_float} in float"


def make_steps(quantized: QuantizedNetwork) -> Iterator[Step]:
    places = {layer.name: place for place, layer in enumerate(quantized.layers)}
    last_uses = find_last_uses(quantized)
    shapes = find_shapes(quantized)
    for place, layer in enumerate(quantized.layers):
        names = layer.layer.inputs
        released = tuple(places[name] for name in set(names) if last_uses[name] == place)
        kernel = choose_kernel(quantized, layer, shapes, is_overwritten=can_overwrite(names, released, places))
        yield Step(name=layer.name, run=kernel, inputs=tuple(places[name] for name in names), released=released)


def can_overwrite(names: tuple[str, ...], released: tuple[int, ...], places: dict[str, int]) -> bool:
    """Whether a layer may put its result where its first input was."""
    return len(set(names)) == 2 and places[names[0]] in released


def choose_kernel(
    quantized: QuantizedNetwork, layer: QuantizedLayer, shapes: dict[str, Shape], is_overwritten: bool
) -> Kernel:
    what = layer.layer
    if what.op == "input":
        return make_input(layer.output)
    sources = [quantized.find(name).output for name in what.inputs]
    if layer.is_float:
        return make_float(layer, sources)
    if what.op == "add":
        return make_add(layer, sources, shapes[what.inputs[0]], is_overwritten)
    return MAKERS[what.op](layer, sources[0], shapes[what.inputs[0]])


def find_last_uses(quantized: QuantizedNetwork) -> dict[str, int]:
    """The last layer that reads the memory of each, by number. A flattened result may be the memory of its input."""
    uses: dict[str, int] = {}
    for place, layer in enumerate(quantized.layers):
        uses.update(dict.fromkeys(layer.layer.inputs, place))
    uses.setdefault(quantized.output, len(quantized.layers))
    for layer in reversed(quantized.layers):
        if layer.layer.op == "flatten":
            source = layer.layer.inputs[0]
            uses[source] = uses[layer.name] = max(uses[source], uses[layer.name])
    return uses


def find_shapes(quantized: QuantizedNetwork) -> dict[str, Shape]:
    """Of every layer's result, without the batch: seen on a batch of no images."""
    found: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for layer in quantized.layers:
            inputs = [found[name] for name in layer.layer.inputs] or [torch.empty(0, *quantized.input_shape)]
            found[layer.name] = compute_layer(layer.layer, inputs)
    return {name: tuple(result.shape[1:]) for name, result in found.items()}


def check_grid(layer: QuantizedLayer) -> None:
    grid = layer.output
    if (grid.low, grid.high) != (0, 255) or not 0 <= grid.zero_point <= 255:
        raise UsageError(
            f"layer {layer.name} has integers from {grid.low} to {grid.high}: torch's kernels take bytes from 0 to 255,"
            " use the simulation or the exported file"
        )


def remark_on_float(quantized: QuantizedNetwork) -> tuple[str, ...]:
    names = [layer.name for layer in quantized.layers if layer.is_float]
    if not names:
        return ()
    return (f"in float32, with the way there and back: {', '.join(names)}",)

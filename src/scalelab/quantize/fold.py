"""Layers that disappear into others: batch norms into what comes before them, ReLUs into what they follow.

A batch norm in eval mode is one factor and one shift per channel. After a convolution or a linear layer it changes
their weights and bias, w' = w · f and b' = b · f + shift, and is gone (Jacob et al. 2018, section 3.2). After anything
else it stays, as the 1×1 convolution of each channel by itself that it is. All of it is computed in float64 and rounded
once.

A ReLU belongs to the convolution, linear layer or addition whose result nothing else uses: kernels clamp before they
round, and no integers are spent on negative numbers. Max pooling and flattening commute with it, so it moves ahead of
them, and a ReLU after a ReLU is dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from scalelab.quantize.network import Layer, Op
from scalelab.quantize.operations import Call

FUSING: tuple[Op, ...] = ("conv", "linear", "add")
TRANSPARENT: tuple[Op, ...] = ("max_pool", "flatten")


def merge_layers(layers: Sequence[Layer], norms: Mapping[str, Call], output: str) -> tuple[Layer, ...]:
    """The layers that are left, the one with the result last. `norms`: those that are batch norms."""
    merged = fuse_relus(fold_norms(drop_unused(layers, output), norms))
    return tuple(round_weights(layer) for layer in merged)


def drop_unused(layers: Sequence[Layer], output: str) -> list[Layer]:
    """Only the input and what leads to the result, which is last then."""
    needed, kept = {output}, []
    for layer in reversed(layers):
        if layer.name in needed or layer.op == "input":
            needed.update(layer.inputs)
            kept.append(layer)
    return kept[::-1]


def fold_norms(layers: Sequence[Layer], norms: Mapping[str, Call]) -> list[Layer]:
    """Without the batch norms that can be folded; what they are folded into keeps its name."""
    uses, renamed = count_uses(layers), dict[str, str]()
    folded: dict[str, Layer] = {}
    for unfolded in layers:
        layer = rename_inputs(unfolded, renamed)
        if layer.name not in norms:
            folded[layer.name] = layer
            continue
        before = folded[layer.inputs[0]]
        if before.is_weighted and uses[unfolded.inputs[0]] == 1:
            folded[before.name] = fold_norm(before, layer)
            renamed[layer.name] = before.name
        elif len(norms[layer.name].inputs[0]) == 4:
            folded[layer.name] = layer
        else:
            raise norms[layer.name].refuse("which does not follow a linear layer of its own: move it behind one")
    return list(folded.values())


def fold_norm(layer: Layer, norm: Layer) -> Layer:
    """A convolution or linear layer that does what `norm`, a factor and a shift per channel, did after it."""
    assert layer.weight is not None
    assert norm.weight is not None
    assert norm.bias is not None
    factor = norm.weight.flatten()
    weight = layer.weight * factor.reshape(-1, *[1] * (layer.weight.dim() - 1))
    bias = norm.bias if layer.bias is None else layer.bias * factor + norm.bias
    return replace(layer, weight=weight, bias=bias)


def fuse_relus(layers: Sequence[Layer]) -> list[Layer]:
    """Without the ReLUs that can belong to another layer."""
    uses, renamed = count_uses(layers), dict[str, str]()
    fused: dict[str, Layer] = {}
    for unfused in layers:
        layer = rename_inputs(unfused, renamed)
        target = find_relu_target(layer, fused, uses) if layer.op == "relu" else None
        if target is None:
            fused[layer.name] = layer
            continue
        fused[target] = replace(fused[target], has_relu=fused[target].op in FUSING)
        renamed[layer.name] = layer.inputs[0]
        uses[layer.inputs[0]] += uses[layer.name] - 1
    return list(fused.values())


def find_relu_target(relu: Layer, fused: Mapping[str, Layer], uses: Counter[str]) -> str | None:
    """The layer that a ReLU can belong to: behind poolings, with no other use of anything on the way."""
    name = relu.inputs[0]
    if is_positive(fused[name], fused):
        return name
    while uses[name] == 1:
        if fused[name].op in FUSING:
            return name
        if fused[name].op not in TRANSPARENT:
            return None
        name = fused[name].inputs[0]
    return None


def is_positive(layer: Layer, fused: Mapping[str, Layer]) -> bool:
    """Whether a layer gives no negative numbers because of a ReLU before."""
    while layer.op in TRANSPARENT or layer.op == "average_pool":
        layer = fused[layer.inputs[0]]
    return layer.has_relu or layer.op == "relu"


def count_uses(layers: Sequence[Layer]) -> Counter[str]:
    return Counter(name for layer in layers for name in layer.inputs)


def rename_inputs(layer: Layer, renamed: Mapping[str, str]) -> Layer:
    return replace(layer, inputs=tuple(renamed.get(name, name) for name in layer.inputs))


def round_weights(layer: Layer) -> Layer:
    """With parameters in float32."""
    weight, bias = (
        None if tensor is None else tensor.to(torch.float32).contiguous() for tensor in (layer.weight, layer.bias)
    )
    return replace(layer, weight=weight, bias=bias)

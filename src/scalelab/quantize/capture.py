"""Capture a user's module as a network: traced once, read call by call, checked against the module itself.

torch.fx records the calls of `forward`; one run on an example gives the shapes. The captured network must reproduce the
module's output on that example, so a misread argument, an in-place change of a tensor still in use or a hook that
changes results is an error here and not a bad accuracy later.

Batch norms in eval mode are one factor and one shift per channel. After a convolution or linear layer they fold into
its weights, w' = w · f and b' = b · f + shift (Jacob et al. 2018, section 3.2); elsewhere they become a depthwise 1×1
convolution. Folding is done in float64 and rounded once.

A ReLU belongs to the convolution, linear layer or addition whose only reader it is: kernels clamp before they round.
Max pooling and flatten commute with it, so it moves ahead of them; a ReLU after a ReLU is dropped.

Limits: one tensor in, one out; no data-dependent branches; a module called twice becomes two layers, the second named
`name#2`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from scalelab.errors import UsageError
from scalelab.quantize.network import CapturedNetwork, Layer, Op, run_float
from scalelab.quantize.operations import (
    FUNCTIONS,
    METHODS,
    PLAIN_NAMES,
    SUPPORTED,
    ReadCall,
    Shape,
    TracedCall,
    read_function,
    read_module,
)

FUSING: tuple[Op, ...] = ("conv", "linear", "add")
TRANSPARENT: tuple[Op, ...] = ("max_pool", "flatten")


def merge_layers(layers: Sequence[Layer], norms: Mapping[str, TracedCall], output: str) -> tuple[Layer, ...]:
    """The remaining layers, output last. `norms`: the batch norms among them."""
    merged = fuse_relus(fold_norms(drop_unused(layers, output), norms))
    return tuple(round_weights(layer) for layer in merged)


def drop_unused(layers: Sequence[Layer], output: str) -> list[Layer]:
    """Only the input and what the output depends on."""
    needed, kept = {output}, []
    for layer in reversed(layers):
        if layer.name in needed or layer.op == "input":
            needed.update(layer.inputs)
            kept.append(layer)
    return kept[::-1]


def fold_norms(layers: Sequence[Layer], norms: Mapping[str, TracedCall]) -> list[Layer]:
    """Fold batch norms where possible; the layer they fold into keeps its name."""
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
            raise norms[layer.name].refuse("which does not follow its own linear layer: move it after one")
    return list(folded.values())


def fold_norm(layer: Layer, norm: Layer) -> Layer:
    """The layer with `norm`, a factor and a shift per channel, folded in."""
    assert layer.weight is not None
    assert norm.weight is not None
    assert norm.bias is not None
    factor = norm.weight.flatten()
    weight = layer.weight * factor.reshape(-1, *[1] * (layer.weight.dim() - 1))
    bias = norm.bias if layer.bias is None else layer.bias * factor + norm.bias
    return replace(layer, weight=weight, bias=bias)


def fuse_relus(layers: Sequence[Layer]) -> list[Layer]:
    """Move ReLUs into the layers they follow."""
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
    """The layer a ReLU can move into: past poolings, if nothing on the way has another reader."""
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
    """Whether an earlier ReLU makes its output non-negative."""
    while layer.op in TRANSPARENT or layer.op == "average_pool":
        layer = fused[layer.inputs[0]]
    return layer.has_relu or layer.op == "relu"


def count_uses(layers: Sequence[Layer]) -> Counter[str]:
    return Counter(name for layer in layers for name in layer.inputs)


def rename_inputs(layer: Layer, renamed: Mapping[str, str]) -> Layer:
    return replace(layer, inputs=tuple(renamed.get(name, name) for name in layer.inputs))


def round_weights(layer: Layer) -> Layer:
    """Parameters in float32."""
    weight, bias = (
        None if tensor is None else tensor.to(torch.float32).contiguous() for tensor in (layer.weight, layer.bias)
    )
    return replace(layer, weight=weight, bias=bias)


TOLERANCE = 1e-3
"""Allowed difference from the module, relative to its largest output: folding rounds the last bits."""


def capture_network(model: nn.Module, example: torch.Tensor) -> CapturedNetwork:
    """The layers of a module in eval mode. `example`: a typical batch."""
    model = unwrap(model)
    check_model(model, example)
    traced = trace(model)
    shapes, expected = run_example(traced, example)
    network = CapturedNetwork(layers=GraphReader(traced, shapes).read_layers(), input_shape=tuple(example.shape[1:]))
    check_results(network, example, expected)
    return network


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DDP and torch.compile wrappers."""
    while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) or hasattr(model, "_orig_mod"):
        inner = model._orig_mod if hasattr(model, "_orig_mod") else model.module
        assert isinstance(inner, nn.Module)
        model = inner
    return model


def check_model(model: nn.Module, example: torch.Tensor) -> None:
    training = [(path, module) for path, module in model.named_modules() if module.training]
    if training:
        where = training[0][0] or type(model).__name__
        raise UsageError(f"{where} is in training mode: call model.eval() before quantizing, so batch norms stay fixed")
    for path, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise UsageError(f"{path} is {parameter.dtype}, but quantizing needs float32: call model.float() first")
        if not torch.isfinite(parameter).all():
            raise UsageError(f"{path} has non-finite weights: check the training run")
    if example.dim() < 2 or len(example) == 0 or not example.is_floating_point():
        raise UsageError(
            f"the example is {example.dtype} of shape {tuple(example.shape)}: use a batch of at least one sample,"
            " as float32 and normalised as in training"
        )
    if not torch.isfinite(example).all():
        raise UsageError("the example has non-finite values: check how its images are read and normalised")


def trace(model: nn.Module) -> fx.GraphModule:
    try:
        graph = fx.Tracer().trace(model)
    except Exception as error:
        why = (str(error) or repr(error)).splitlines()[0]
        raise UsageError(
            f"{type(model).__name__}.forward cannot be traced ({why}): its control flow must not depend on tensor"
            " values; remove branches and loops over tensors"
        ) from error
    return fx.GraphModule(model, graph)


class ShapeRun(fx.Interpreter):
    """Run the traced module and record every tensor's shape."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced)
        # Otherwise an error imports half a compiler to write a log, which sets an environment variable.
        self.extra_traceback = False
        self.shapes: dict[fx.Node, Shape] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            self.shapes[n] = tuple(result.shape)
        return result


def run_example(traced: fx.GraphModule, example: torch.Tensor) -> tuple[dict[fx.Node, Shape], torch.Tensor]:
    """All shapes, and the output."""
    check_inputs(traced)
    device = next((parameter.device for parameter in traced.parameters()), torch.device("cpu"))
    run = ShapeRun(traced)
    with torch.no_grad():
        try:
            result = run.run(example.to(device, torch.float32).clone())
        except RuntimeError as error:
            raise UsageError(
                f"the model fails on an example of shape {tuple(example.shape)}: {str(error).splitlines()[0]}"
            ) from error
    if not isinstance(result, torch.Tensor):
        raise UsageError(f"the model returns a {type(result).__name__}: it must return one tensor, the logits")
    return run.shapes, result.cpu()


def check_inputs(traced: fx.GraphModule) -> None:
    names = [node.name for node in traced.graph.nodes if node.op == "placeholder" and not node.args]
    if len(names) != 1:
        raise UsageError(f"forward takes {len(names)} arguments ({', '.join(names)}): it must take one batch of images")


@dataclass
class GraphReader:
    """Reads the calls of a traced module into layers."""

    traced: fx.GraphModule
    shapes: dict[fx.Node, Shape]
    layers: list[Layer] = field(default_factory=list)
    norms: dict[str, TracedCall] = field(default_factory=dict)
    owners: dict[fx.Node, str] = field(default_factory=dict)
    """The layer that produced a tensor."""

    def read_layers(self) -> tuple[Layer, ...]:
        output = ""
        for node in self.traced.graph.nodes:
            if node.op == "output":
                output = self.owners[node.args[0]]
            elif node.op == "placeholder" and not node.args:
                self.append(node, Layer(name=self.make_name("input"), op="input"))
            elif node in self.shapes:
                self.read_node(node)
        return merge_layers(self.layers, self.norms, output)

    def read_node(self, node: fx.Node) -> None:
        if node.op in ("get_attr", "placeholder"):
            return
        sources = [source for source in (*node.args, *node.kwargs.values()) if isinstance(source, fx.Node)]
        tensors = [source for source in sources if source in self.shapes]
        call = self.describe(node, tensors)
        reading = self.read_call(node, call)
        inputs = tuple(self.find_owner(source, call) for source in tensors)
        if reading.layer is None:
            self.owners[node] = inputs[0]
            return
        self.append(node, replace(reading.layer, inputs=inputs))
        if reading.is_norm:
            self.norms[reading.layer.name] = call
        if reading.flattens:
            self.append(node, Layer(name=self.make_name("flatten_1"), op="flatten", inputs=(reading.layer.name,)))
        if reading.is_inplace:
            self.owners[tensors[0]] = self.owners[node]

    def read_call(self, node: fx.Node, call: TracedCall) -> ReadCall:
        if node.op == "call_module":
            return read_module(self.traced.get_submodule(str(node.target)), call)
        kind = METHODS.get(str(node.target)) if node.op == "call_method" else FUNCTIONS.get(node.target)
        if kind is None:
            raise call.refuse(f"which has no int8 kernel here: supported are {SUPPORTED}")
        return read_function(kind, node.args, dict(node.kwargs), call)

    def describe(self, node: fx.Node, tensors: Iterable[fx.Node]) -> TracedCall:
        if node.op == "call_module":
            module = self.traced.get_submodule(str(node.target))
            name, what = self.make_name(str(node.target), "#"), f"{node.target} is {name_type(module)}"
        else:
            word = name_function(node)
            name = self.make_name(f"{PLAIN_NAMES.get(word, word.strip('_'))}_1")
            what = f"forward calls {word}{find_place(node)}"
        shapes = tuple(self.shapes[source] for source in tensors)
        return TracedCall(name=name, what=what, inputs=shapes, output=self.shapes[node])

    def append(self, node: fx.Node, layer: Layer) -> None:
        self.layers.append(layer)
        self.owners[node] = layer.name

    def find_owner(self, node: fx.Node, call: TracedCall) -> str:
        if node not in self.owners:
            raise call.refuse(f"with {node.target}: constants and parameters must be part of a Conv2d or Linear")
        return self.owners[node]

    def make_name(self, wanted: str, joint: str = "_") -> str:
        """A name not taken by any layer or, for a generated one, any module."""
        taken = {layer.name for layer in self.layers}
        if joint == "_":
            taken |= {name for name, _ in self.traced.named_modules()}
        stem = wanted.removesuffix("_1") if joint == "_" else wanted
        names = (wanted if number == 1 else f"{stem}{joint}{number}" for number in range(1, len(taken) + 3))
        return next(name for name in names if name not in taken)


def name_type(module: nn.Module) -> str:
    kind = type(module)
    return f"nn.{kind.__name__}" if kind.__module__.startswith("torch.nn") else kind.__qualname__


def name_function(node: fx.Node) -> str:
    if node.op == "call_method":
        word = str(node.target)
        return METHODS.get(word, word) if METHODS.get(word) != "nothing" else word
    known = FUNCTIONS.get(node.target)
    return known or str(getattr(node.target, "__name__", node.target))


def find_place(node: fx.Node) -> str:
    """The module before a function call, for error messages."""
    before = node
    while before.op != "call_module":
        sources = before.all_input_nodes
        if not sources:
            return ""
        before = sources[0]
    return f" after {before.target}"


def check_results(network: CapturedNetwork, example: torch.Tensor, expected: torch.Tensor) -> None:
    found = run_float(network, example.cpu())[network.output]
    if found.shape != expected.shape:
        raise UsageError(
            f"the captured network returns {tuple(found.shape)}, the model {tuple(expected.shape)}:"
            " the model must return one row of numbers per sample"
        )
    size = float(expected.abs().max())
    distance = float((found - expected).abs().max())
    if not distance <= TOLERANCE * max(size, 1e-6):
        raise UsageError(
            f"the captured network differs from the model by {distance:.3g} in outputs of up to {size:.3g}: look for"
            " in-place changes to tensors still in use, and for hooks that change outputs"
        )

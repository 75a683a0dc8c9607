"""Convert a call of a traced module into a layer; a call without an int8 kernel raises an error that names it.

Modules and functions that do the same are read into the same arguments. Shapes come from a run on an example: whether
`view(len(x), -1)` flattens or `ceil_mode` matters is observed, not guessed. Layers are returned without inputs and with
float64 weights; `capture.py` connects and folds them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from scalelab.errors import UsageError
from scalelab.quantize.network import Layer

Shape = tuple[int, ...]
Arguments = dict[str, Any]

SUPPORTED = "Conv2d, Linear, BatchNorm2d, ReLU, max_pool2d, avg_pool2d, adaptive_avg_pool2d, mean, flatten, +, Dropout"
NOTHING_MODULES = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)

FUNCTIONS: dict[Any, str] = {
    operator.add: "add",
    operator.iadd: "add",
    torch.add: "add",
    torch.relu: "relu",
    torch.relu_: "relu_",
    functional.relu: "relu",
    functional.relu_: "relu_",
    functional.max_pool2d: "max_pool2d",
    torch.max_pool2d: "max_pool2d",
    functional.avg_pool2d: "avg_pool2d",
    functional.adaptive_avg_pool2d: "adaptive_avg_pool2d",
    torch.mean: "mean",
    torch.flatten: "flatten",
    torch.reshape: "flatten",
    torch.squeeze: "flatten",
    functional.dropout: "dropout",
    functional.dropout2d: "dropout",
    torch.dropout: "dropout",
}
METHODS = {
    "add": "add",
    "add_": "add_",
    "relu": "relu",
    "relu_": "relu_",
    "mean": "mean",
    "flatten": "flatten",
    "view": "flatten",
    "reshape": "flatten",
    "squeeze": "flatten",
    "contiguous": "nothing",
    "clone": "nothing",
    "detach": "nothing",
}
PARAMETERS: dict[str, tuple[str, ...]] = {
    "max_pool2d": ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"),
    "avg_pool2d": (
        "input",
        "kernel_size",
        "stride",
        "padding",
        "ceil_mode",
        "count_include_pad",
        "divisor_override",
    ),
    "adaptive_avg_pool2d": ("input", "output_size"),
    "mean": ("input", "dim", "keepdim"),
    "dropout": ("input", "p", "training"),
    "relu": ("input", "inplace"),
    "add": ("input", "other", "alpha"),
}
"""Names of positional arguments, for functions whose arguments matter."""


@dataclass(frozen=True, kw_only=True)
class TracedCall:
    """One call in the traced module."""

    name: str
    """The path of its module, or a generated name."""
    what: str
    """For errors: `stage1.0.act is nn.SiLU`, `forward calls torch.cat`."""
    inputs: tuple[Shape, ...]
    """Shapes of its input tensors."""
    output: Shape

    def refuse(self, why: str) -> UsageError:
        return UsageError(f"{self.what}, {why}")


@dataclass(frozen=True, kw_only=True)
class ReadCall:
    """What a call computes. Without a layer it passes its input on."""

    layer: Layer | None = None
    is_norm: bool = False
    """Whether it is a batch norm, written as a depthwise 1×1 convolution."""
    flattens: bool = False
    """Whether the two dimensions of size one are dropped."""
    is_inplace: bool = False
    """Whether it overwrites its input."""


def read_module(module: nn.Module, call: TracedCall) -> ReadCall:
    """The layer of a torch.nn module."""
    if isinstance(module, NOTHING_MODULES):
        return ReadCall()
    for kind, read in MODULES.items():
        if isinstance(module, kind):
            return read(module, call)
    if isinstance(module, (nn.ReLU6, nn.SiLU, nn.GELU, nn.Hardswish, nn.LeakyReLU, nn.ELU, nn.Mish, nn.PReLU)):
        raise call.refuse("which has no int8 kernel here: train with nn.ReLU instead, then quantize")
    raise call.refuse(f"which has no int8 kernel here: replace it with one of {SUPPORTED}, or remove it from the model")


def read_function(kind: str, positional: tuple[Any, ...], keywords: Arguments, call: TracedCall) -> ReadCall:
    """The layer of a function or method; `kind`: a value of FUNCTIONS or METHODS."""
    if kind == "nothing":
        return ReadCall()
    plain = kind.removesuffix("_")
    arguments = dict(zip(PARAMETERS.get(plain, ()), positional, strict=False)) | keywords
    reading = READERS[plain](arguments, call)
    if plain != kind or arguments.get("inplace"):
        return ReadCall(layer=reading.layer, is_inplace=True)
    return reading


def read_conv(module: nn.Conv2d, call: TracedCall) -> ReadCall:
    require_dims(call, 4)
    if module.padding_mode != "zeros":
        raise call.refuse(f"padding_mode {module.padding_mode!r} has no int8 kernel: use padding_mode='zeros'")
    layer = Layer(
        name=call.name,
        op="conv",
        weight=copy_double(module.weight),
        bias=copy_optional(module.bias),
        stride=make_pair(module.stride),
        padding=read_conv_padding(module, call),
        dilation=make_pair(module.dilation),
        groups=module.groups,
    )
    return ReadCall(layer=layer)


def read_conv_padding(module: nn.Conv2d, call: TracedCall) -> tuple[int, int]:
    """Zeros on each side; `same` must be symmetric."""
    if module.padding == "valid":
        return (0, 0)
    if not isinstance(module.padding, str):
        return make_pair(module.padding)
    totals = [dilation * (size - 1) for dilation, size in zip(module.dilation, module.kernel_size, strict=True)]
    if any(total % 2 for total in totals):
        raise call.refuse("padding='same' is not symmetric for its kernel: use an odd kernel size or explicit padding")
    return (totals[0] // 2, totals[1] // 2)


def read_linear(module: nn.Linear, call: TracedCall) -> ReadCall:
    require_dims(call, 2)
    weight, bias = copy_double(module.weight), copy_optional(module.bias)
    return ReadCall(layer=Layer(name=call.name, op="linear", weight=weight, bias=bias))


def read_norm(module: nn.BatchNorm1d | nn.BatchNorm2d, call: TracedCall) -> ReadCall:
    """y = (x − mean) · γ / √(variance + ε) + β, per channel (Ioffe and Szegedy 2015)."""
    if module.running_mean is None or module.running_var is None:
        raise call.refuse("it depends on the batch without running statistics: train with track_running_stats=True")
    if len(call.inputs[0]) == 3:
        raise call.refuse("over sequences has no int8 kernel here")
    factor = (copy_double(module.running_var) + module.eps).rsqrt()
    if module.weight is not None:
        factor = factor * copy_double(module.weight)
    shift = -copy_double(module.running_mean) * factor
    if module.bias is not None:
        shift = shift + copy_double(module.bias)
    weight = factor.reshape(-1, 1, 1, 1)
    layer = Layer(name=call.name, op="conv", weight=weight, bias=shift, groups=len(factor))
    return ReadCall(layer=layer, is_norm=True)


def read_relu(module: nn.ReLU, call: TracedCall) -> ReadCall:
    return ReadCall(layer=Layer(name=call.name, op="relu"), is_inplace=module.inplace)


def read_max_pool(arguments: Arguments, call: TracedCall) -> ReadCall:
    require_dims(call, 4)
    if arguments.get("return_indices"):
        raise call.refuse("return_indices=True has no int8 kernel: leave it out")
    return ReadCall(layer=read_pool("max_pool", arguments, call))


def read_average_pool(arguments: Arguments, call: TracedCall) -> ReadCall:
    require_dims(call, 4)
    layer = read_pool("average_pool", arguments, call)
    if arguments.get("divisor_override") is not None:
        raise call.refuse("divisor_override has no int8 kernel: leave it out")
    if layer.padding != (0, 0) and not arguments.get("count_include_pad", True):
        raise call.refuse(
            "count_include_pad=False with padding has no int8 kernel: use count_include_pad=True or padding=0"
        )
    if layer.kernel == call.inputs[0][2:] and layer.padding == (0, 0):
        return ReadCall(layer=Layer(name=call.name, op="average_pool"))
    return ReadCall(layer=layer)


def read_pool(op: Any, arguments: Arguments, call: TracedCall) -> Layer:
    """A pooling with a kernel; an effective `ceil_mode` is an error."""
    kernel = make_pair(arguments["kernel_size"])
    stride = make_pair(arguments.get("stride") or kernel)
    padding, dilation = make_pair(arguments.get("padding", 0)), make_pair(arguments.get("dilation", 1))
    sizes = tuple(
        (size + 2 * padding[axis] - dilation[axis] * (kernel[axis] - 1) - 1) // stride[axis] + 1
        for axis, size in enumerate(call.inputs[0][2:])
    )
    if sizes != call.output[2:]:
        raise call.refuse("ceil_mode=True enlarges its output, which has no int8 kernel: use ceil_mode=False")
    return Layer(name=call.name, op=op, kernel=kernel, stride=stride, padding=padding, dilation=dilation)


def read_adaptive_pool(_: Arguments, call: TracedCall) -> ReadCall:
    """Global, or over equal parts of the image."""
    require_dims(call, 4)
    height, width = call.inputs[0][2:]
    rows, columns = call.output[2:]
    if (rows, columns) == (1, 1):
        return ReadCall(layer=Layer(name=call.name, op="average_pool"))
    if height % rows or width % columns:
        raise call.refuse(
            f"{height} × {width} does not divide into {rows} × {columns} equal parts: use avg_pool2d with a kernel"
        )
    kernel = (height // rows, width // columns)
    return ReadCall(layer=Layer(name=call.name, op="average_pool", kernel=kernel, stride=kernel))


def read_mean(arguments: Arguments, call: TracedCall) -> ReadCall:
    dims = arguments.get("dim")
    axes = {dim % 4 for dim in ((dims,) if isinstance(dims, int) else dims or ())}
    if len(call.inputs[0]) != 4 or axes != {2, 3}:
        raise call.refuse("mean has an int8 kernel only over height and width: use mean(dim=(2, 3))")
    return ReadCall(layer=Layer(name=call.name, op="average_pool"), flattens=not arguments.get("keepdim"))


def read_flatten(_: Arguments, call: TracedCall) -> ReadCall:
    """A reshape to (samples, features)."""
    before, after = call.inputs[0], call.output
    if after == before:
        return ReadCall()
    if len(after) != 2 or after[0] != before[0]:
        raise call.refuse(f"which reshapes {before} to {after}: only flatten(1) is supported")
    return ReadCall(layer=Layer(name=call.name, op="flatten"))


def read_add(arguments: Arguments, call: TracedCall) -> ReadCall:
    if len(call.inputs) != 2:
        raise call.refuse("adding a number to a tensor has no int8 kernel: use a bias")
    if call.inputs[0] != call.inputs[1] or arguments.get("alpha", 1) != 1:
        raise call.refuse(f"shapes {call.inputs[0]} and {call.inputs[1]}: only tensors of the same shape can be added")
    return ReadCall(layer=Layer(name=call.name, op="add"))


def read_dropout(arguments: Arguments, call: TracedCall) -> ReadCall:
    if arguments.get("training", True):
        raise call.refuse("training=True keeps it random in eval mode: use nn.Dropout or training=self.training")
    return ReadCall()


READERS: dict[str, Callable[[Arguments, TracedCall], ReadCall]] = {
    "add": read_add,
    "relu": lambda _, call: ReadCall(layer=Layer(name=call.name, op="relu")),
    "max_pool2d": read_max_pool,
    "avg_pool2d": read_average_pool,
    "adaptive_avg_pool2d": read_adaptive_pool,
    "mean": read_mean,
    "flatten": read_flatten,
    "dropout": read_dropout,
}
MODULES: dict[type[nn.Module], Callable[[Any, TracedCall], ReadCall]] = {
    nn.Conv2d: read_conv,
    nn.Linear: read_linear,
    nn.BatchNorm2d: read_norm,
    nn.BatchNorm1d: read_norm,
    nn.ReLU: read_relu,
    nn.MaxPool2d: lambda module, call: read_max_pool(vars(module), call),
    nn.AvgPool2d: lambda module, call: read_average_pool(vars(module), call),
    nn.AdaptiveAvgPool2d: lambda module, call: read_adaptive_pool(vars(module), call),
    nn.Flatten: lambda module, call: read_flatten(vars(module), call),
}
PLAIN_NAMES = {"max_pool2d": "max_pool", "avg_pool2d": "average_pool", "adaptive_avg_pool2d": "average_pool"} | {
    "mean": "average_pool"
}
"""Layer names of functions, where they differ from the function's."""


def require_dims(call: TracedCall, num_dims: int) -> None:
    if len(call.inputs[0]) != num_dims:
        wanted = "(samples, channels, height, width)" if num_dims == 4 else "(samples, features): flatten before it"
        raise call.refuse(f"which receives a tensor of shape {call.inputs[0]}; it must be {wanted}")


def copy_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.float64)


def copy_optional(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else copy_double(tensor)


def make_pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return (value, value)
    first, second = (*value, *value) if len(value) == 1 else value
    return (int(first), int(second))

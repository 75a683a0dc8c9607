"""How many operations and bytes matrix products, convolutions and attention take, from recorded shapes and types.

A multiplication with its addition is two operations. Bytes are those of the inputs and the output, each moved once.

    m×k by k×n, b times       2 b m n k
    convolution               2 × outputs × (input channels / groups) × kernel; backward: twice that
    attention                 4 b h s t d for s queries, t keys and heads of d; half of it if causal (and s = t);
                              backward: 2.5 times that (five products instead of two, Dao et al. 2022)

Shapes are in the trace with `record_shapes=True`. What cannot be read gives no work, never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, NamedTuple

import msgspec

from scalelab.trace.collectives import find_element_bytes
from scalelab.trace.files.events import Arguments

DTYPES = {"float": "float32", "c10::half": "float16", "c10::bfloat16": "bfloat16", "double": "float64"}
LARGEST = 10**18
"""A shape with more operations is broken."""
Shapes = Sequence[Any]


class Work(NamedTuple):
    """What one call takes."""

    operator: str
    shape: str
    dtype: str
    num_operations: float
    num_bytes: float


class _Amount(NamedTuple):
    num_operations: float
    num_elements: float


def _multiply(first: int, shapes: Shapes, _: Sequence[Any]) -> _Amount:
    """A product of the inputs `first` and the next, batched or not."""
    *batch, m, k = shapes[first]
    n, b = shapes[first + 1][-1], prod(batch)
    if shapes[first + 1][-2] != k:
        raise ValueError("shapes do not fit")
    return _Amount(2 * b * m * n * k, b * (m * k + k * n + m * n))


def _apply_linear(shapes: Shapes, _: Sequence[Any]) -> _Amount:
    *batch, k = shapes[0]
    n, m = shapes[1][0], prod(batch)
    return _Amount(2 * m * n * k, m * k + k * n + m * n)


def _convolve(shapes: Shapes, concrete: Sequence[Any]) -> _Amount:
    (batch, _, *size), (channels, own, *kernel) = shapes[0], shapes[1]
    stride, padding, dilation = (_read_list(concrete[place]) for place in (3, 4, 5))
    if str(concrete[6]).lower() in ("true", "1"):
        raise ValueError("transposed")
    steps = zip(size, kernel, stride, padding, dilation, strict=True)
    outputs = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in steps]
    written = batch * channels * prod(outputs)
    return _Amount(2 * written * own * prod(kernel), prod(shapes[0]) + prod(shapes[1]) + written)


def _convolve_back(shapes: Shapes, _: Sequence[Any]) -> _Amount:
    written, read, (_, own, *kernel) = prod(shapes[0]), prod(shapes[1]), shapes[2]
    return _Amount(4 * written * own * prod(kernel), 2 * (written + read + prod(shapes[2])))


def _attend(first: int, causal: int, shapes: Shapes, concrete: Sequence[Any], *, is_backward: bool = False) -> _Amount:
    """Queries at `first`, then keys and values, as batch × heads × length × width."""
    (batch, heads, queries, width), keys = shapes[first], shapes[first + 1][2]
    is_causal = len(concrete) > causal and str(concrete[causal]).lower() in ("true", "1") and queries == keys
    amount = 4 * batch * heads * queries * keys * width * (0.5 if is_causal else 1.0)
    moved = 2 * prod(shapes[first]) + 2 * prod(shapes[first + 1])
    return _Amount(amount * (2.5 if is_backward else 1.0), moved * (2 if is_backward else 1))


FORMULAS: dict[str, Callable[[Shapes, Sequence[Any]], _Amount]] = {
    "aten::mm": partial(_multiply, 0),
    "aten::_scaled_mm": partial(_multiply, 0),
    "aten::bmm": partial(_multiply, 0),
    "aten::addmm": partial(_multiply, 1),
    "aten::baddbmm": partial(_multiply, 1),
    "aten::linear": _apply_linear,
    "aten::convolution": _convolve,
    "aten::convolution_backward": _convolve_back,
    "aten::_scaled_dot_product_flash_attention": partial(_attend, 0, 4),
    "aten::_scaled_dot_product_efficient_attention": partial(_attend, 0, 6),
    "aten::_scaled_dot_product_cudnn_attention": partial(_attend, 0, 6),
    "aten::_scaled_dot_product_flash_attention_backward": partial(_attend, 1, 11, is_backward=True),
    "aten::_scaled_dot_product_efficient_attention_backward": partial(_attend, 1, 11, is_backward=True),
}
_TYPED = {"aten::addmm": 1, "aten::baddbmm": 1}
"""The input whose type counts, if it is not the first."""


def _read_list(text: Any) -> list[int]:
    found = msgspec.json.decode(str(text).encode())
    if not isinstance(found, list):
        raise TypeError(text)
    return [int(one) for one in found]


def _decode(raw: msgspec.Raw) -> list[Any]:
    found = msgspec.json.decode(raw)
    return found if isinstance(found, list) else []


def read_work(name: str, args: Arguments) -> Work | None:
    """The work of one call; None: its formula or its shapes are not known."""
    formula = FORMULAS.get(name)
    if formula is None:
        return None
    try:
        shapes, types = _decode(args.input_dims), _decode(args.input_types)
        amount = formula(shapes, _decode(args.concrete_inputs))
        kind = str(types[_TYPED.get(name, 0)])
        element_bytes = find_element_bytes(kind)
    except (ValueError, TypeError, IndexError, msgspec.DecodeError, RecursionError, OverflowError):
        return None
    if element_bytes is None or not 0 < amount.num_operations <= LARGEST:
        return None
    shown = " ".join("×".join(map(str, one)) for one in shapes[:4] if isinstance(one, list) and one)
    dtype = "float8" if "float8" in kind.lower() else DTYPES.get(kind.lower(), kind)
    return Work(name, shown[:80], dtype, float(amount.num_operations), float(amount.num_elements * element_bytes))


@dataclass
class Works:
    """Distinct calls by number."""

    found: list[Work] = field(default_factory=list)
    _numbers: dict[tuple[str, bytes, bytes, bytes], int] = field(default_factory=dict)

    def number(self, name: str, args: Arguments) -> int:
        key = (name, bytes(args.input_dims), bytes(args.input_types), bytes(args.concrete_inputs))
        known = self._numbers.get(key)
        if known is None:
            work = read_work(name, args) if len(self.found) < MOST_WORKS else None
            known = self._numbers[key] = len(self.found) if work is not None else -1
            if work is not None:
                self.found.append(work)
        return known


MOST_WORKS = 10_000

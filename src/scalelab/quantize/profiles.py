"""Whose arithmetic is simulated: a profile states how kernels round and holds the functions that do.

A simulation that is right "but for rounding" cannot be told from one with a mistake, so each profile is held against
its kernels integer by integer. All start from the same exact sums (`integer_ops.py`); their arithmetic from there on is
in `rounding.py`.

    lab           the assignment's: one factor per layer, in float32, rounded once. It has no kernel of its own.
    onnxruntime   what onnxruntime runs on x86: QLinearConv, QGemm, QLinearAdd, QLinearGlobalAveragePool
    qnnpack       torch's engine of that name on x86
    fbgemm        torch's engine of that name

Limits. The profiles are those of x86 with FMA; on ARM, onnxruntime adds with fixed-point multipliers instead. Without
VNNI, x86 kernels for uint8 × int8 add pairs of products in int16, which saturates for large weights: sessions ask
onnxruntime for its slower, exact kernels there, torch has none. Of qnnpack and fbgemm, convolutions and linear layers
are compared with the engine; addition and pooling are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from scalelab.errors import UnknownName
from scalelab.quantize import rounding
from scalelab.quantize.network import Grid, Layer, QuantizedLayer
from scalelab.quantize.rounding import scale_to_numbers


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The arithmetic of one family of kernels, in words and as functions."""

    name: str
    sentence: str
    rounding: str
    """What is rounded, and how."""
    multiplier: str
    """The factor from the sum to the result, and its type."""
    bias: str
    relu: str
    addition: str
    averaging: str
    scale: Callable[[torch.Tensor, QuantizedLayer, Grid], torch.Tensor]
    """From the sums of a weighted layer, and the grid of its input, to float32 steps of its own grid."""
    add: Callable[[list[torch.Tensor], list[Grid], Grid, bool], torch.Tensor]
    """Two tensors of integers, their grids, the grid of the result, and whether there is a ReLU."""
    average: Callable[[Layer, torch.Tensor, Grid, Grid], torch.Tensor]
    to_logits: Callable[[torch.Tensor, QuantizedLayer, Grid], torch.Tensor] = scale_to_numbers
    """From the sums of a last layer that is not rounded to the numbers that they stand for."""


HALF_TO_EVEN = "half to even, after the result was held to the range of its grid"
AT_ZERO_POINT = "the lower end of the range is the zero point; rounding and clamping commute, so none comes first"
INTEGER_BIAS = "int32, added to the integer sum"

PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            name="lab",
            sentence="round and clamp as the assignment does",
            rounding=HALF_TO_EVEN + ", as torch.round",
            multiplier="float32 of s_x·s_w/s_y, which is computed in float64",
            bias=INTEGER_BIAS,
            relu=AT_ZERO_POINT,
            addition="numbers are added in float32 and divided by s_y",
            averaging="float32 of the integer sum times s_x/(s_y·n)",
            scale=rounding.scale_once,
            add=rounding.add_numbers,
            average=rounding.average_sums,
        ),
        Profile(
            name="onnxruntime",
            sentence="onnxruntime's kernels on x86",
            rounding=HALF_TO_EVEN,
            multiplier="(s_x·s_w)/s_y in float32, times float32 of the sum",
            bias=INTEGER_BIAS,
            relu=AT_ZERO_POINT,
            addition="second input first, by fused multiply-adds on a constant of zero points; then rounded",
            averaging="whole images: float32 of the integer sum times s_x/(s_y·n); windows: float32 sums of numbers",
            scale=rounding.scale_by_quotient,
            add=rounding.add_fused,
            average=rounding.average_windows,
        ),
        Profile(
            name="qnnpack",
            sentence="torch's qnnpack on x86",
            rounding=HALF_TO_EVEN,
            multiplier="(s_w·s_x)·(1/s_y) in float32, times float32 of the sum",
            bias=INTEGER_BIAS,
            relu=AT_ZERO_POINT,
            addition="numbers are added in float32 and multiplied by 1/s_y: not qnnpack's own, which is in fixed point",
            averaging="float32 of the integer sum times s_x/(s_y·n)",
            scale=rounding.scale_by_inverse,
            add=rounding.add_by_inverse,
            average=rounding.average_sums,
        ),
        Profile(
            name="fbgemm",
            sentence="torch's fbgemm",
            rounding=HALF_TO_EVEN,
            multiplier="(s_x·s_w)/s_y in float32, times the sum and bias in float32",
            bias="float32, divided by s_x·s_w and added to float32 of the sum; fused with one scale for all channels",
            relu=AT_ZERO_POINT,
            addition="numbers are added in float32 and multiplied by 1/s_y",
            averaging="float32 of the integer sum times s_x/(s_y·n)",
            scale=rounding.scale_with_float_bias,
            add=rounding.add_by_inverse,
            average=rounding.average_sums,
        ),
    )
}


def find_profile(name: str) -> Profile:
    if name not in PROFILES:
        raise UnknownName("kernel profile", name, PROFILES)
    return PROFILES[name]

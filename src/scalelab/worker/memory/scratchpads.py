"""Memory that kernels take while they run, beyond their results, on a processor.

On a processor with bfloat16 kernels torch hands matrix products of that type to oneDNN, which takes a scratchpad from
torch's allocator while it runs. Its size follows from oneDNN's blocking: the processor, the caches, the threads and the
layout of the matrices. There is no formula to copy and torch does not expose the query, so every distinct product is
run once, for real, on matrices of at most 2048 rows and columns (8 MB in bfloat16); blocks hardly grow beyond that.
Convolutions of every type take memory too: oneDNN reorders images, gradients and weights into its own layouts, or torch
unfolds the images. That grows with the batch, a + b · batch, so a convolution is run with its batch, or with two small
ones where it has more than 16 MB.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import _disable_current_modes

from scalelab.worker.memory.allocator import read_event_tree

PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
}
"""The operators that torch may hand to oneDNN's matrix product."""
CONVOLUTIONS = {torch.ops.aten.convolution.default: (0,), torch.ops.aten.convolution_backward.default: (0, 1)}
"""With the arguments whose first dimension is the batch."""
MOST_CONVOLVED = 2**24
"""Bytes of such arguments up to which a convolution is run as it is."""
MOST_MEASURED = (64, 2048, 2048)
"""Batch, rows and columns up to which a product is run to see its scratchpad."""

Operand = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and type of a matrix."""


def has_kernels(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies matrices of this type on this processor: the question that torch's dispatch asks."""
    if not (torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()):
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def shorten_operand(tensor: torch.Tensor) -> Operand:
    """Its layout, or that of a smaller one with its dimensions in the same order."""
    short = tensor[tuple(slice(most) for most in MOST_MEASURED[3 - tensor.dim() :])]
    strides = tensor.stride() if short.shape == tensor.shape else torch.empty_like(short).stride()
    return tuple(short.shape), strides, tensor.dtype


def describe_call(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What decides how much a call takes while it runs; None: it takes nothing."""
    if func in PRODUCTS and has_kernels(args[0].dtype):
        return func, *(shorten_operand(operand) for operand in args)
    return (func, *(_describe(arg) for arg in args)) if func in CONVOLUTIONS else None


def measure_call(func: Any, args: tuple[Any, ...], num_threads: int) -> int:
    """What a matrix product or a convolution takes beyond its results while it runs."""
    if func in PRODUCTS:
        return measure_scratchpad(func, [shorten_operand(operand) for operand in args], num_threads)
    batched = CONVOLUTIONS[func]
    batch = int(args[0].shape[0])
    sample_bytes = sum(args[index].nbytes for index in batched) // max(batch, 1)
    small = max(MOST_CONVOLVED // (2 * max(sample_bytes, 1)), 1)
    if batch <= 2 * small:
        return _measure_batch(func, args, batch, num_threads)
    first, second = (_measure_batch(func, args, size, num_threads) for size in (small, 2 * small))
    return int(first + (second - first) / small * (batch - small) + 0.5)


def _measure_batch(func: Any, args: tuple[Any, ...], batch: int, num_threads: int) -> int:
    """The same of a convolution of so many samples."""
    places = [index for index, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
    short = [args[index][:batch] if index in CONVOLUTIONS[func] else args[index] for index in places]

    def call(*real: torch.Tensor) -> Any:
        given = dict(zip(places, real, strict=True))
        return func(*(given.get(index, arg) for index, arg in enumerate(args)))

    return measure_scratchpad(call, [_describe(tensor) for tensor in short], num_threads)


def _describe(arg: Any) -> Any:
    return (tuple(arg.shape), arg.stride(), arg.dtype) if isinstance(arg, torch.Tensor) else str(arg)


def measure_scratchpad(func: Any, operands: Iterable[Operand], num_threads: int) -> int:
    """What an operator takes beyond its result while it runs, on real operands and as many threads as a rank has."""
    before = torch.get_num_threads()
    with _disable_current_modes():
        real = [torch.empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in operands]
        torch.set_num_threads(num_threads)
        try:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                kept = func(*real)  # not released before the profile ends
        finally:
            torch.set_num_threads(before)
    del kept
    events, _ = read_event_tree(profiler.profiler.kineto_results.experimental_event_tree())
    alive = list(itertools.accumulate((event.num_bytes for event in events), initial=0))
    return max(alive) - alive[-1]

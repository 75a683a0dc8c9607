"""Which layers to keep in float so that int8 costs no more than a bound.

The layers are gone through by what they do to the answer, the worst first, as the diagnosis ranks them. One more is
kept in float until the samples that are lost, less those that are won, are within the bound; a layer that brings
nothing is given back at the end, so that what stays in float is needed. That is greedy: a smaller set may exist, and
finding it would take as many runs as there are sets.

A layer in float still has its result rounded, because the layers that read it take integers: weights are what is
saved. A range that clips is none of that, and needs another way to choose ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scalelab.quantize.network import WEIGHTED
from scalelab.quantized import LayerReport

CountRight = Callable[[tuple[str, ...]], int]
"""Right predictions with these layers in float."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The layers that are kept in float, in the order in which they were chosen."""

    names: tuple[str, ...]
    num_lost: int
    """Right predictions of float less those that are left."""
    is_within: bool
    num_tried: int


def rank_by_noise(layers: Sequence[LayerReport]) -> list[str]:
    """The layers that can be kept in float, those first that make most noise in the answer."""
    weighted = [layer for layer in layers if layer.op in WEIGHTED and layer.output_sqnr is not None]
    return [layer.name for layer in sorted(weighted, key=lambda layer: layer.output_sqnr or 0.0)]


def choose_float_layers(ranked: Sequence[str], correct_float: int, most_lost: float, count_right: CountRight) -> Choice:
    """Keep one layer after the other until at most `most_lost` predictions are lost; give back what is not needed."""
    kept: list[str] = []
    lost = correct_float - count_right(())
    num_tried = 1
    for name in ranked:
        if lost <= most_lost:
            break
        kept.append(name)
        lost = correct_float - count_right(tuple(kept))
        num_tried += 1
    if lost > most_lost:
        return Choice(names=tuple(kept), num_lost=lost, is_within=False, num_tried=num_tried)
    for name in kept[:-1]:
        fewer = [other for other in kept if other != name]
        left = correct_float - count_right(tuple(fewer))
        num_tried += 1
        if left <= most_lost:
            kept, lost = fewer, left
    return Choice(names=tuple(kept), num_lost=lost, is_within=True, num_tried=num_tried)

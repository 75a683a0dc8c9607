"""Which layers to keep in float so that int8 costs no more than a bound.

The layers are gone through by what they do to the answer, the worst first, as the diagnosis ranks them. One more is
kept in float until the samples that are lost, less those that are won, are within the bound; a layer that brings
nothing is given back at the end, so that what stays in float is needed. That is greedy: a smaller set may exist, and
finding it would take as many runs as there are sets.

A layer in float still has its result rounded where the next one is in int8, because that one takes integers. Where a
range is what is wrong, its layer and the ones that read it must both be in float; so layers that read the result of one
that was kept come next in line if keeping it alone did not help.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scalelab.quantize.network import WEIGHTED, Network
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


def put_readers_next(ranked: Sequence[str], network: Network) -> list[str]:
    """The worst first, each followed by the layers with weights that read its result."""
    readers = {name: find_readers(network, name) for name in ranked}
    order: list[str] = []
    for name in ranked:
        order += [found for found in (name, *readers[name]) if found not in order and found in ranked]
    return order


def find_readers(network: Network, name: str) -> list[str]:
    """The layers with weights that take the result of one, through whatever passes it on."""
    found: list[str] = []
    waiting = [name]
    while waiting:
        source = waiting.pop()
        for layer in network.layers:
            if source in layer.inputs:
                if layer.is_weighted:
                    found.append(layer.name)
                else:
                    waiting.append(layer.name)
    return list(dict.fromkeys(found))

"""Layers kept in float: as few as the bound needs, the worst first."""

from __future__ import annotations

from scalelab.quantize.pipeline import choose_float_layers, rank_by_noise
from scalelab.records.quantized import LayerReport


def count_with(costs: dict[str, int], kept: tuple[str, ...]) -> int:
    """Right predictions where each layer in int8 loses some of a hundred."""
    return 100 - sum(cost for name, cost in costs.items() if name not in kept)


def test_nothing_is_kept_where_the_bound_holds_already() -> None:
    choice = choose_float_layers(["a", "b"], 100, 2, lambda kept: count_with({"a": 1, "b": 1}, kept))
    assert (choice.names, choice.is_within) == ((), True)


def test_the_worst_layer_is_enough() -> None:
    choice = choose_float_layers(["a", "b", "c"], 100, 2, lambda kept: count_with({"a": 9, "b": 1, "c": 1}, kept))
    assert choice.names == ("a",)
    assert choice.num_lost == 2


def test_a_layer_that_brought_nothing_is_given_back() -> None:
    choice = choose_float_layers(["a", "b", "c"], 100, 0, lambda kept: count_with({"b": 5}, kept))
    assert choice.names == ("b",)
    assert choice.is_within


def test_a_bound_that_cannot_be_held_is_told() -> None:
    choice = choose_float_layers(["a", "b"], 100, 0, lambda kept: 90)
    assert (choice.names, choice.is_within, choice.num_lost) == (("a", "b"), False, 10)


def test_layers_are_ranked_by_their_noise_in_the_answer_and_only_those_with_weights() -> None:
    layers = [
        LayerReport(name="input", op="input", output_sqnr=1.0),
        LayerReport(name="a", op="conv", output_sqnr=40.0),
        LayerReport(name="b", op="linear", output_sqnr=20.0),
        LayerReport(name="dead", op="conv"),
    ]
    assert rank_by_noise(layers) == ["b", "a"]

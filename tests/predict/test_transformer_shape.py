"""Parameters and operations of transformers: exact where they are known."""

from dataclasses import replace

import pytest

from scalelab.errors import UsageError
from scalelab.predict.transformer_shape import (
    GPT2_LARGE,
    GPT2_SMALL,
    KNOWN_MODELS,
    LLAMA3_8B,
    Transformer,
    choose_shape,
)
from scalelab.workloads.gpt2_options import Gpt2Options

TRILLION = Transformer(num_layers=128, width=25600, num_heads=160, vocabulary=51200, sequence=2048)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2-small", 124_439_808),
        ("gpt2-large", 774_030_080),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
        ("gpt2-tiny", 4 * (12 * 128**2 + 13 * 128) + (512 + 64) * 128 + 2 * 128),
    ],
)
def test_known_models_have_their_published_parameters(name, parameters):
    assert KNOWN_MODELS[name].num_parameters == parameters


@pytest.mark.parametrize(("model", "size"), [(GPT2_SMALL, "small"), (GPT2_LARGE, "large")])
def test_parameters_and_operations_are_those_of_the_workload(model, size):
    options = Gpt2Options(size=size)
    assert model.num_parameters == options.count_parameters()
    assert model.count_operations(1) == pytest.approx(options.flops_per_sample())


def test_an_output_matrix_of_its_own_costs_parameters_and_no_operations():
    untied = replace(GPT2_SMALL, is_tied=False)
    assert untied.num_parameters - GPT2_SMALL.num_parameters == 50257 * 768
    assert untied.count_operations(8) == GPT2_SMALL.count_operations(8)


def test_recomputing_everything_gives_the_published_formula():
    layers, width, sequence, vocabulary = 128, 25600, 2048, 51200
    formula = 96 * 3072 * sequence * layers * width**2
    formula *= 1 + sequence / (6 * width) + vocabulary / (16 * layers * width)
    assert TRILLION.count_operations(3072, "full") == pytest.approx(formula)


def test_recomputing_adds_operations_in_order():
    counts = [LLAMA3_8B.count_operations(1, kind) for kind in ("none", "selective", "full")]
    assert counts == sorted(counts)
    assert counts[2] < counts[0] * 4 / 3


def test_ranks_that_share_a_block_share_its_operations():
    whole = sum(product.operations for product in TRILLION.list_products(1))
    part = sum(product.operations for product in TRILLION.list_products(1, 8))
    assert part == pytest.approx(whole / 8)


@pytest.mark.parametrize("wanted", [1e8, 1e9, 7e9, 7e10, 1.75e11, 1e12])
def test_a_chosen_shape_has_about_the_parameters_and_can_be_split(wanted):
    model = choose_shape(wanted)
    assert model.num_parameters == pytest.approx(wanted, rel=0.1)
    assert model.num_layers % 2 == 0
    assert model.width // model.num_heads == 128


def test_a_trillion_has_the_published_shape():
    model = choose_shape(1e12)
    assert (model.num_layers, model.width) == (128, 25600)


def test_a_chosen_shape_has_the_usual_vocabulary_and_context():
    assert (choose_shape(1e9).vocabulary, choose_shape(1e9).sequence) == (51_200, 2048)
    assert choose_shape(1_000_000).num_layers >= 2


@pytest.mark.parametrize("wanted", [0, -1e9, float("nan"), float("inf"), 1000])
def test_no_number_of_parameters_is_refused(wanted):
    with pytest.raises(UsageError, match="--parameters"):
        choose_shape(wanted)


def test_heads_must_divide_the_width():
    with pytest.raises(UsageError, match=r"--width must be a multiple of --heads \(3\), got 100"):
        Transformer(num_layers=2, width=100, num_heads=3, vocabulary=10, sequence=8)
    with pytest.raises(UsageError, match=r"--kv-heads \(3\)"):
        replace(LLAMA3_8B, num_kv_heads=3)


def test_a_shape_follows_from_the_parameters_by_hand():
    """By the rule 1.7e9 parameters have (1.7e9 / (12 · 96²))^⅓ = 24.9 layers, and layers grow with the power 0.77/3.

    0.9e9 have 21.1, so 22; their width solves 12 · 22 · d² + (51200 + 2048) · d = 0.9e9: 1748, so 14 heads of 128.
    """
    found = choose_shape(0.9e9)
    assert (found.num_layers, found.width, found.num_heads) == (22, 14 * 128, 14)
    assert (choose_shape(1.7e9).num_layers, found.vocabulary, found.sequence) == (24, 51_200, 2048)


def test_a_table_of_tokens_leaves_a_quarter_of_the_parameters_to_the_blocks():
    """1e9 parameters have 21.7 layers by the rule, so 22: √(1e9 / 4 / (12 · 22)) = 973, so 8 heads of 128."""
    found = choose_shape(1e9, vocabulary=10_000_000)
    assert (found.num_layers, found.width) == (22, 8 * 128)


def test_two_experts_have_a_router_and_twice_the_layer():
    one = Transformer(num_layers=2, width=8, num_heads=2, vocabulary=16, sequence=4)
    two = replace(one, num_experts=2)
    assert two.block_parameters - one.block_parameters == 8 * 2 + one.expert_parameters
    assert (one.routed_parameters, two.routed_parameters) == (0, 2 * one.expert_parameters)


@pytest.mark.parametrize(
    ("kind", "again"), [("none", 0), ("attention", 512), ("selective", 6144 // 2), ("full", 6144 + 512)]
)
def test_operations_are_three_forwards_and_what_is_recomputed(kind, again):
    """A block's linear layers: 2 · 4 tokens · (8 · 24 + 8 · 8 + 2 · 8 · 32); attention 2 · 2 · 4 · 4 · 8."""
    model = Transformer(num_layers=2, width=8, num_heads=2, vocabulary=16, sequence=4)
    assert model.count_operations(1, kind) == 3 * (2 * (6144 + 512) + 1024) + 2 * again

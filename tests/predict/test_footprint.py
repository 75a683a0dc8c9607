"""Memory of one rank: by torch's tracker, by published rows, and by what sharding must do."""

from dataclasses import replace

import pytest

from scalelab.predict.devices import find_device
from scalelab.predict.footprint import (
    CATEGORIES,
    Footprint,
    Kernels,
    _count_in_flight,
    _keep_edges,
    find_footprint,
    gather_units,
    is_possible,
    keep_block,
)
from scalelab.predict.layouts import Layout, PlannedJob
from scalelab.predict.transformer_shape import GPT2_LARGE, GPT2_SMALL, LLAMA3_8B, LLAMA3_405B, MIXTRAL_8X7B, Transformer

GIBI = 2**30
SMALL = PlannedJob(model=GPT2_SMALL, device=find_device("h100-sxm"), dtype="float32", global_batch=8)
LARGE = PlannedJob(model=GPT2_LARGE, device=find_device("h100-sxm"), global_batch=64)


def total(job, layout, kernels=None):
    return find_footprint(job, layout, kernels).total_bytes


@pytest.mark.parametrize(
    ("job", "batch", "kernels", "tracked"),
    [
        (SMALL, 8, Kernels(), 12.079),
        (SMALL, 8, Kernels(keeps_logits=False), 10.545),
        (SMALL, 2, Kernels(), 4.063),
        (replace(SMALL, dropout=0.1, has_fused_attention=False), 8, Kernels(mask_bytes=4), 26.16),
    ],
    ids=["plain", "logits released", "batch 2", "a CPU's dropout and attention"],
)
def test_gpt2_small_is_what_torchs_tracker_counts(job, batch, kernels, tracked):
    found = find_footprint(replace(job, global_batch=batch), Layout(micro_batch=batch), kernels)
    assert found.total_bytes / GIBI == pytest.approx(tracked, rel=0.002)
    assert found.moment == "loss"


@pytest.mark.parametrize(
    ("model", "batch", "tracked", "moment"),
    [
        (GPT2_SMALL, 8, 7.854, "loss"),
        (GPT2_SMALL, 1, 2.334, "optimizer"),
        (GPT2_LARGE, 4, 12.780, "optimizer"),
        (replace(GPT2_SMALL, vocabulary=512), 8, 1.773, "last block"),
    ],
)
def test_recomputed_blocks_are_what_torchs_tracker_counts(model, batch, tracked, moment):
    job = replace(SMALL, model=model, global_batch=batch)
    found = find_footprint(job, Layout(micro_batch=batch, checkpointing="full"))
    assert found.total_bytes / GIBI == pytest.approx(tracked, rel=0.005)
    assert found.moment == moment


@pytest.mark.parametrize(
    ("zero", "data", "batch", "measured"),
    [(0, 1, 4, 25.0), (0, 1, 16, 68.7), (0, 2, 4, 28.4), (0, 2, 16, 72.2), (3, 2, 4, 21.0), (3, 2, 16, 63.8)],
)
def test_gpt2_tiny_is_what_ranks_measured(zero, data, batch, measured):
    """MB of single, ddp and fsdp-full, as `scalelab run memory` measures them on a CPU."""
    model = Transformer(num_layers=4, width=128, num_heads=4, vocabulary=512, sequence=64)
    job = replace(SMALL, model=model, global_batch=batch * data, dropout=0.1, has_fused_attention=False)
    kernels = Kernels(mask_bytes=4, keeps_logits=False)
    found = total(job, Layout(micro_batch=batch, data=data, zero=zero), kernels)
    assert found / 1e6 == pytest.approx(measured, rel=0.025)


def test_categories_are_all_there_and_not_negative():
    for zero in (0, 1, 2, 3):
        found = find_footprint(LARGE, Layout(data=8, micro_batch=8, zero=zero)).by_category
        assert set(found) == set(CATEGORIES)
        assert min(found.values()) >= 0


def test_each_stage_of_zero_takes_less():
    sizes = [total(LARGE, Layout(data=8, micro_batch=1, zero=zero)) for zero in (0, 1, 2, 3)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4


def test_states_of_sixteen_bits_are_sixteen_bytes_a_parameter():
    found = find_footprint(replace(LARGE, global_batch=1), Layout(micro_batch=1))
    states = found.by_category["parameters"] + found.by_category["optimizer"]
    assert states == pytest.approx(14 * GPT2_LARGE.num_parameters)


def test_shards_shrink_with_replicas():
    job = replace(LARGE, global_batch=1024)
    few, many = (
        find_footprint(job, Layout(data=data, micro_batch=1, zero=3)).by_category["optimizer"] for data in (8, 64)
    )
    assert few == pytest.approx(8 * many)


def test_recomputing_more_keeps_less():
    kept = [
        find_footprint(LARGE, Layout(data=8, micro_batch=8, checkpointing=kind)).by_category["activations"]
        for kind in ("none", "selective", "full")
    ]
    assert kept == sorted(kept, reverse=True)
    assert kept[2] < kept[0] / 4


def test_tensor_parallel_ranks_divide_the_model():
    one, four = (
        find_footprint(LARGE, Layout(tensor=split, micro_batch=4)).by_category["optimizer"] for split in (1, 4)
    )
    assert one == pytest.approx(4 * four)


def test_the_first_stage_holds_a_micro_batch_for_every_stage():
    model = Transformer(num_layers=32, width=4096, num_heads=32, vocabulary=1000, sequence=2048)
    job = PlannedJob(model=model, device=find_device("a100-80gb"), global_batch=64)
    alone = find_footprint(job, Layout(micro_batch=1)).by_category["activations"]
    staged = find_footprint(job, Layout(pipeline=8, micro_batch=1)).by_category["activations"]
    assert staged == pytest.approx(alone, rel=0.02)  # an eighth of the blocks, eight times


def test_fewer_micro_batches_than_stages_are_not_held_twice():
    model = Transformer(num_layers=32, width=4096, num_heads=32, vocabulary=1000, sequence=2048)
    job = PlannedJob(model=model, device=find_device("a100-80gb"), global_batch=2)
    staged = find_footprint(job, Layout(pipeline=8, micro_batch=1)).by_category["activations"]
    many = find_footprint(replace(job, global_batch=64), Layout(pipeline=8, micro_batch=1)).by_category["activations"]
    assert many == pytest.approx(4 * staged)


@pytest.mark.parametrize(("batch", "published"), [(8, 16104), (16, 30224), (32, 58438)])
def test_a_published_sweep_of_batches_is_met(batch, published):
    job = replace(SMALL, dropout=0.1, global_batch=batch)
    kernels = Kernels(has_fused_gelu=False, keeps_gradients=True)
    assert total(job, Layout(micro_batch=batch), kernels) / 2**20 == pytest.approx(published, rel=0.05)


LLAMA = PlannedJob(model=LLAMA3_8B, device=find_device("h100-sxm"), global_batch=64)
KORTHIKANTI = [("none", False, 1.0), ("none", True, 0.6204), ("attention", False, 0.5653), ("attention", True, 0.1849)]
"""Activations of a block of GPT-3 over eight tensor-parallel ranks, as shares of those without recomputing or sequence
parallelism (Korthikanti et al. 2022, figure 7): (34/8 + 10)/23, 13/23 and 34/8/23 of s·b·h."""


@pytest.mark.parametrize(("kind", "is_split", "share"), KORTHIKANTI)
def test_activations_shrink_as_korthikanti_says(kind, is_split, share):
    model = Transformer(num_layers=96, width=12288, num_heads=96, vocabulary=51200, sequence=2048)
    job = PlannedJob(
        model=model, device=find_device("a100-80gb"), dtype="float16", global_batch=64, has_fused_attention=False,
        dropout=0.1,
    )  # fmt: skip
    layout = Layout(tensor=8, checkpointing=kind, has_split_sequence=is_split)
    none = keep_block(job, Layout(tensor=8), Kernels())[0]
    assert keep_block(job, layout, Kernels())[0] / none == pytest.approx(share, rel=0.01)


def test_full_recomputing_keeps_the_input_of_a_block_split_with_its_sequence():
    whole, split = (
        keep_block(LLAMA, Layout(tensor=8, checkpointing="full", has_split_sequence=is_split), Kernels())[0]
        for is_split in (False, True)
    )
    assert split == whole / 8


def test_context_parallelism_divides_activations_and_shares_states():
    one, two = (find_footprint(LLAMA, Layout(data=4 // parts, context=parts, zero=3)) for parts in (1, 2))
    assert two.by_category["parameters"] == one.by_category["parameters"]
    assert two.by_category["activations"] == pytest.approx(one.by_category["activations"] / 2)


def test_a_pipeline_under_fsdp_holds_its_stage_gathered_with_its_gradients():
    found = find_footprint(LLAMA, Layout(pipeline=2, data=4, zero=3, checkpointing="full"))
    assert found.by_category["buckets"] > (2 + 4) * 16 * LLAMA3_8B.block_parameters


def test_a_fused_loss_leaves_one_copy_of_the_logits():
    found = find_footprint(LLAMA, Layout(micro_batch=8), Kernels(keeps_logits=False, has_fused_loss=True))
    assert found.by_category["logits"] <= 8 * 8192 * 128256 * 2
    assert is_possible(LLAMA, Layout(data=8, zero=3, checkpointing="full"))
    assert not is_possible(LLAMA, Layout())


def test_an_allocator_and_a_device_have_more_than_is_allocated():
    footprint = Footprint(by_category={"parameters": 6e9, "activations": 4e9}, moment="loss")
    assert footprint.total_bytes == 10e9
    assert footprint.reserved_bytes == pytest.approx(12.1e9)  # 21 % more
    assert footprint.device_bytes == pytest.approx(11.75e9)  # 10 % more, and CUDA's context


GPT_530B = Transformer(num_layers=105, width=20480, num_heads=128, vocabulary=51200, sequence=2048)
LLAMA_405B = replace(LLAMA, model=LLAMA3_405B, device=find_device("h100-sxm"), global_batch=2048)


def test_layouts_that_ran_are_possible():
    """530B by ZeRO-3 on 640 A100s (Narayanan et al. 2021, table 2); Llama 3 405B (2024, table 4)."""
    old = PlannedJob(
        model=GPT_530B, device=find_device("a100-80gb"), dtype="float16", global_batch=2560,
        has_fused_attention=False, dropout=0.1,
    )  # fmt: skip
    assert is_possible(old, Layout(data=640, micro_batch=4, zero=3, checkpointing="full"))
    split = Layout(tensor=8, pipeline=16, data=64, interleave=8, zero=3, has_split_sequence=True)
    assert is_possible(LLAMA_405B, split)
    assert not is_possible(LLAMA_405B, replace(split, micro_batch=2))


def test_gathering_by_matrices_needs_less_room_than_by_blocks():
    layout = Layout(data=8, zero=3, checkpointing="full")
    by_blocks, by_matrices = (
        find_footprint(LLAMA, layout, Kernels(gathers_matrices=fine)).by_category["buckets"] for fine in (False, True)
    )
    assert 0 < by_matrices < by_blocks


def test_recomputed_norms_and_gates_keep_what_products_gave():
    kept = keep_block(LLAMA, Layout(), Kernels(recomputes_pointwise=True))[0]
    tokens, model = LLAMA3_8B.sequence, LLAMA3_8B
    numbers = 2 * model.width + 2 * model.width + 2 * model.kv_width + 2 * model.inner
    assert kept == pytest.approx(2 * tokens * numbers, rel=0.01)


def test_expert_parallelism_divides_what_a_rank_holds_of_its_experts():
    job = replace(LLAMA, model=MIXTRAL_8X7B)
    alone, spread = (find_footprint(job, Layout(data=8, expert=expert, zero=1)).by_category for expert in (1, 8))
    routed = 32 * MIXTRAL_8X7B.routed_parameters
    assert alone["parameters"] - spread["parameters"] == pytest.approx(2 * routed * 7 / 8)
    assert alone["optimizer"] == pytest.approx(spread["optimizer"])  # ZeRO-1 has as many shards of it either way
    assert alone["activations"] == spread["activations"]


TINY = replace(LARGE, model=Transformer(num_layers=2, width=8, num_heads=2, vocabulary=16, sequence=4), global_batch=8)
ONE = 4 * 8 * 2
"""Bytes of a tiny activation: 4 tokens of width 8 in 16 bits."""
STATISTICS = 2 * 2 * 4 * 4 + 4 * 2 * 4
"""Two norms with mean and deviation of every token, and attention's sums by head, in 32 bits."""


@pytest.mark.parametrize(
    ("changes", "kernels", "kept"),
    [
        ({}, Kernels(), 4 * ONE + 4 * ONE + 2 * 4 * ONE + STATISTICS),
        ({}, Kernels(has_fused_gelu=False), 4 * ONE + 4 * ONE + 5 * 4 * ONE + STATISTICS),
        ({}, Kernels(recomputes_pointwise=True), 2 * ONE + 4 * ONE + 4 * ONE + STATISTICS),
        ({"dropout": 0.1}, Kernels(), (4 + 1) * ONE + 4 * ONE + 8 * ONE + STATISTICS),
        ({"has_fused_attention": False}, Kernels(), 8 * ONE + 4 * 2 * 4 * 2 + 8 * ONE + STATISTICS),
        ({"has_fused_attention": False, "dropout": 0.1}, Kernels(), 9 * ONE + 4 * 2 * 4 * 5 + 8 * ONE + STATISTICS),
    ],
    ids=["plain", "gelu in five kernels", "compiled", "dropout", "scores kept", "scores and their masks"],
)
def test_a_block_keeps_what_its_backward_needs(changes, kernels, kept):
    job = replace(TINY, **changes)
    assert keep_block(job, Layout(), kernels) == pytest.approx((kept, kept))


def test_a_gate_and_experts_keep_what_they_add():
    gated = replace(TINY, model=replace(TINY.model, is_gated=True))
    assert keep_block(gated, Layout(), Kernels())[0] == 8 * ONE + 4 * 4 * ONE + STATISTICS
    experts = replace(TINY, model=replace(TINY.model, num_experts=4, experts_per_token=2))
    assert keep_block(experts, Layout(), Kernels())[0] == (4 + 2 * 2) * ONE + 4 * ONE + 2 * 8 * ONE + STATISTICS


def test_ranks_that_split_a_block_keep_their_parts():
    split = Layout(tensor=2, micro_batch=3, has_split_sequence=True)
    norms, heads = 2 * 2 * 12 / 2 * 4, 12 * 2 / 2 * 4
    kept = 3 * (4 * ONE / 2 + 4 * ONE / 2 + 8 * ONE / 2) + norms + heads
    assert keep_block(TINY, split, Kernels())[0] == pytest.approx(kept)
    whole = 3 * (4 * ONE + 4 * ONE / 2 + 8 * ONE / 2) + 2 * norms + heads
    assert keep_block(TINY, replace(split, has_split_sequence=False), Kernels())[0] == pytest.approx(whole)
    assert keep_block(TINY, replace(split, checkpointing="full"), Kernels())[0] == 3 * ONE / 2
    selective = 3 * (2 * ONE / 2 + (ONE + ONE + ONE) / 2 + 4 * ONE / 2)
    assert keep_block(TINY, replace(split, checkpointing="selective"), Kernels())[0] == selective


def test_recomputed_attention_keeps_everything_but_its_scores():
    plain = replace(TINY, has_fused_attention=False)
    kept, whole = keep_block(plain, Layout(checkpointing="attention"), Kernels())
    assert whole - kept == 4 * 2 * 4 * 2
    assert keep_block(TINY, Layout(checkpointing="attention"), Kernels())[0] == keep_block(TINY, Layout(), Kernels())[0]


@pytest.mark.parametrize(
    ("layout", "has_logits", "count"),
    [
        (Layout(), True, 1),
        (Layout(pipeline=4), True, 1),
        (Layout(pipeline=4), False, 4),
        (Layout(pipeline=4, interleave=2), False, 4 * (1 + 3 / 8)),
        (Layout(pipeline=4, interleave=2), True, 4 * (1 + 3 / 8)),
        (Layout(pipeline=4, micro_batch=4), False, 2),  # there are only two
    ],
)
def test_a_stage_holds_as_many_micro_batches_as_its_schedule_says(layout, has_logits, count):
    """Of 1F1B as many as stages; interleaved p(1 + (p − 1)/(p·v)) (Korthikanti et al. 2022, section 4.2.3)."""
    assert _count_in_flight(TINY, layout, has_logits=has_logits) == pytest.approx(count)


def test_around_the_blocks_are_a_mask_a_norm_and_the_batch():
    job, kernels = replace(TINY, dropout=0.1), Kernels()
    batch = 2 * 8 * 4
    ends = {
        (first, last): _keep_edges(job, Layout(), kernels, has_embeddings=first, has_logits=last)
        for first in (True, False)
        for last in (True, False)
    }
    mask, norm = 4 * 8 * kernels.mask_bytes, 2 * ONE
    assert ends == {(True, True): mask + norm + batch, (True, False): mask + batch, (False, True): norm + batch,
                    (False, False): batch}  # fmt: skip


@pytest.mark.parametrize("split", [1, 2])
def test_tensor_parallel_ranks_divide_the_logits(split):
    """16 bits that forward keeps, and three copies of 32 bits in the loss."""
    job = replace(TINY, model=replace(TINY.model, vocabulary=2**16))
    found = find_footprint(job, Layout(micro_batch=8, tensor=split))
    assert found.moment == "loss"
    assert found.by_category["logits"] == pytest.approx(8 * 4 * 2**16 / split * (2 + 3 * 4))


@pytest.mark.parametrize(
    ("layout", "kernels", "gathered"),
    [
        (Layout(data=4, zero=1), Kernels(), (0, 0)),
        (Layout(data=1, zero=3), Kernels(), (0, 0)),
        (Layout(data=2, zero=2), Kernels(), (0, 100 * 2)),
        (Layout(data=2, zero=3), Kernels(), (10 * 2, (10 + 200) * 2 + 100 * 4)),
        (Layout(data=2, zero=3, pipeline=2), Kernels(), ((3 * 100 + 10) * 6, (3 * 100 + 10) * 6)),
        (Layout(data=2, zero=3, tensor=2), Kernels(gathers_matrices=True), (2 * 128 * 2, 128 * 6)),
    ],
)
def test_zero_gathers_what_its_stage_says(layout, kernels, gathered):
    """Blocks of 100 parameters, 10 around them."""
    assert gather_units(TINY, layout, kernels, 100.0, 10.0, 3) == pytest.approx(gathered)


def test_deepspeed_keeps_short_gradients_beside_long_ones():
    layout = Layout(tensor=2, data=4, zero=1, micro_batch=2)
    job = replace(LARGE, has_float32_gradients=True)
    plain, beside = (
        find_footprint(replace(job, is_deepspeed=known), layout).by_category["gradients"] for known in (False, True)
    )
    assert beside / plain == pytest.approx(6 / 4)
    short = replace(job, has_float32_gradients=False)
    assert total(replace(short, is_deepspeed=True), layout) == total(short, layout)


def test_deepspeed_gathers_two_matrices_at_a_time():
    layout = Layout(data=8, zero=3)
    job = replace(LARGE, is_deepspeed=True)
    largest = GPT2_LARGE.width * GPT2_LARGE.vocabulary
    assert gather_units(job, layout, Kernels(), 1.0, 1.0, 36) == (2 * largest * 2, largest * (2 * 2 + 2))
    assert gather_units(LARGE, layout, Kernels(), 1.0, 1.0, 36) == (2.0, (1 + 2) * 2.0 + 4.0)


def test_blooms_ranks_hold_what_was_published():
    """176B on 384 A100s: about 60 GB a device, by its authors."""
    model = Transformer(num_layers=70, width=14336, num_heads=112, vocabulary=250880, sequence=2048)
    job = PlannedJob(
        model=model, device=find_device("a100-80gb"), global_batch=2048, has_fused_attention=False,
        has_float32_gradients=True, is_deepspeed=True,
    )  # fmt: skip
    layout = Layout(tensor=4, pipeline=12, data=8, micro_batch=2, zero=1, checkpointing="full")
    assert find_footprint(job, layout).device_bytes == pytest.approx(60e9, rel=0.03)


def test_gradients_that_are_reduced_where_they_lie_need_no_buckets():
    """52B on 64 V100s of 32 GiB as it was really run (bigscience, 2021): the buckets of DDP would not fit."""
    plain, lean = (
        find_footprint(LARGE, Layout(data=4), Kernels(reduces_in_place=told)).by_category["buckets"]
        for told in (False, True)
    )
    assert (plain, lean) == (2 * GPT2_LARGE.num_parameters, 0)
    model = Transformer(num_layers=64, width=8192, num_heads=32, vocabulary=50304, sequence=1024)
    job = PlannedJob(
        model=model, device=find_device("v100"), dtype="float16", global_batch=1024, has_fused_attention=False,
        dropout=0.1,
    )  # fmt: skip
    assert is_possible(job, Layout(tensor=4, pipeline=8, data=2, micro_batch=4, checkpointing="full"))

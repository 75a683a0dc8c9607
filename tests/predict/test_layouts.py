"""Which layouts there are, and how long their steps take."""

import math
from dataclasses import replace

import pytest

from scalelab.errors import UsageError
from scalelab.predict.devices import find_device
from scalelab.predict.layout_cost import Efficiency, _Machine, pass_stage, time_step
from scalelab.predict.layouts import Asked, Layout, PlannedJob, find_obstacle, list_divisors, list_layouts
from scalelab.predict.transformer_shape import GPT2_SMALL, MIXTRAL_8X7B, Transformer

MODEL = Transformer(num_layers=32, width=4096, num_heads=32, vocabulary=51200, sequence=2048)
JOB = PlannedJob(model=MODEL, device=find_device("a100-80gb"), global_batch=512)
SHARES = Efficiency()


def seconds(layout, job=JOB):
    return time_step(job, layout, SHARES).seconds


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout(tensor=3), "32 heads cannot be split over tensor 3"),
        (Layout(pipeline=33), "32 layers cannot be split over pipeline 33"),
        (Layout(context=3), "half of a sequence of 2048 cannot be split over context 3"),
        (Layout(context=0), "must be ≥ 1"),
        (Layout(pipeline=8, interleave=8), "pipeline 8 × 8 rounds"),
        (Layout(data=7), "a global batch of 512 cannot be split over data 7"),
        (Layout(pipeline=2, data=2, zero=2), "use ZeRO-1 or 3"),
        (Layout(pipeline=4, interleave=2, micro_batch=256), "a multiple of pipeline 4 micro-batches, not 2"),
        (Layout(zero=4), "must be 0, 1, 2 or 3, got 4"),
        (Layout(tensor=0), "must be ≥ 1"),
    ],
)
def test_an_impossible_layout_says_why(layout, reason):
    assert reason in (find_obstacle(JOB, layout) or "")


def test_a_plain_layout_has_no_obstacle():
    assert find_obstacle(JOB, Layout(tensor=8, pipeline=4, data=16, micro_batch=2)) is None


def test_every_listed_layout_uses_all_devices_and_is_possible():
    found = list(list_layouts(JOB, 64))
    assert len(found) > 100
    assert len(set(found)) == len(found)
    assert all(layout.num_devices == 64 and find_obstacle(JOB, layout) is None for layout in found)
    assert all(layout.tensor <= JOB.device.per_node for layout in found)


def test_what_is_asked_for_is_held():
    found = list(list_layouts(JOB, 64, Asked(tensor=4, zero=1, checkpointing="full")))
    assert {(layout.tensor, layout.zero, layout.checkpointing) for layout in found} == {(4, 1, "full")}


def test_no_devices_are_refused():
    with pytest.raises(UsageError, match="--devices must be ≥ 1, got 0"):
        list(list_layouts(JOB, 0))


def test_divisors_are_complete():
    assert list_divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert list_divisors(36, 6) == [1, 2, 3, 4, 6]


def test_no_layout_beats_the_peak():
    useful = MODEL.count_operations(JOB.global_batch) / (64 * JOB.device.peak("bfloat16"))
    assert all(useful / seconds(layout) < SHARES.gemm for layout in list_layouts(JOB, 64))


def test_the_parts_add_up_to_the_step():
    cost = time_step(JOB, Layout(tensor=4, pipeline=4, data=4, micro_batch=1), SHARES)
    parts = [getattr(cost, name) for name in cost.__dataclass_fields__]
    assert cost.seconds == pytest.approx(sum(parts))
    assert min(parts) >= 0


@pytest.mark.parametrize("rounds", [1, 4])
def test_the_bubble_is_the_share_that_theory_says(rounds):
    job = replace(JOB, model=replace(MODEL, vocabulary=16))  # logits are on the last stage alone
    cost = time_step(job, Layout(pipeline=8, data=8, micro_batch=1, interleave=rounds), SHARES)
    work = cost.products + cost.moves + cost.launches + cost.stage_sends
    assert cost.bubble == pytest.approx(7 / 64 / rounds * work, rel=0.01)


def test_recomputing_blocks_costs_a_third_of_the_products():
    plain, again = (
        time_step(JOB, Layout(data=8, micro_batch=4, checkpointing=kind), SHARES).products for kind in ("none", "full")
    )
    assert again / plain == pytest.approx(4 / 3, rel=0.03)


def test_small_matrices_are_slower():
    small = replace(JOB, model=GPT2_SMALL)
    rate = {
        name: job.model.count_operations(512) / seconds(Layout(data=8, micro_batch=8), job)
        for name, job in (("small", small), ("large", JOB))
    }
    assert rate["small"] < 0.8 * rate["large"]


def test_a_slower_link_costs_whoever_uses_it():
    slow = replace(JOB, device=replace(JOB.device, node_rate=1e9))
    wide, inside = Layout(data=64, micro_batch=2, zero=3), Layout(tensor=8, micro_batch=2)
    assert seconds(wide, slow) > 2 * seconds(wide)
    assert seconds(inside, slow) == pytest.approx(seconds(inside))


def test_tensor_parallelism_within_a_node_beats_one_across_nodes():
    job = replace(JOB, global_batch=64)
    costs = [time_step(job, Layout(tensor=split, micro_batch=2), SHARES).tensor for split in (8, 16)]
    assert costs[1] > 1.5 * costs[0]


def test_layers_that_do_not_divide_make_the_fullest_stage_slower():
    even, uneven = (time_step(JOB, Layout(pipeline=stages), SHARES) for stages in (8, 7))
    assert Layout(pipeline=7).count_blocks(JOB.model) == 5
    assert uneven.products > even.products


def test_a_last_stage_with_a_block_less_has_room_for_the_logits():
    even, uneven = (replace(JOB, model=replace(MODEL, num_layers=layers)) for layers in (32, 31))
    layout = Layout(pipeline=4, micro_batch=2)
    full, spared = time_step(even, layout, SHARES), time_step(uneven, layout, SHARES)
    assert spared.bubble == pytest.approx(full.bubble)
    assert spared.products < full.products


def test_126_blocks_are_interleaved_over_16_stages_and_48_heads_split_12_ways():
    llama = replace(JOB, model=replace(MODEL, num_layers=126))
    rounds = {layout.interleave for layout in list_layouts(llama, 128, Asked(tensor=8, pipeline=16, zero=0))}
    assert rounds == {1, 2, 4, 8}
    wide = replace(MODEL, width=18432, num_heads=48)
    palm = replace(JOB, model=wide, device=find_device("tpu-v4"), global_batch=2048)
    found = list(list_layouts(palm, 6144, Asked(pipeline=1, zero=3, checkpointing="full")))
    assert all(layout.has_split_sequence for layout in found if layout.tensor == 12)  # by width: 2048 has no twelfth
    assert find_obstacle(palm, Layout(tensor=12, data=512, has_split_sequence=True)) is None


def test_overlapping_hides_part_of_tensor_parallel_communication():
    plain, beside = (
        time_step(replace(JOB, has_tensor_overlap=overlaps), Layout(tensor=8), SHARES) for overlaps in (False, True)
    )
    assert 0 < beside.tensor < plain.tensor
    assert beside.products == plain.products


def test_recomputing_attention_costs_its_two_products_and_nothing_else():
    job = replace(JOB, has_fused_attention=False)
    none, attention, full = (
        time_step(job, Layout(checkpointing=kind), SHARES) for kind in ("none", "attention", "full")
    )
    assert none.products < attention.products < full.products
    assert attention.moves == none.moves
    fused = [time_step(JOB, Layout(checkpointing=kind), SHARES) for kind in ("none", "attention")]
    assert fused[0] == fused[1]


def test_eight_bits_speed_up_linear_layers_less_than_twofold():
    job = replace(JOB, device=find_device("h100-sxm"))
    kinds = [replace(job, dtype=dtype) for dtype in ("bfloat16", "float8")]
    half, eight = (time_step(kind, Layout(micro_batch=4), SHARES) for kind in kinds)
    assert half.products / 2 < eight.products < half.products
    assert eight.moves == half.moves


def test_operators_of_their_own_move_more_bytes_and_multiply_the_same():
    fused, eager = (time_step(replace(JOB, is_eager=is_eager), Layout(), SHARES) for is_eager in (False, True))
    assert eager.moves > 1.5 * fused.moves
    assert eager.products == fused.products


def test_context_parallelism_divides_the_products_and_hides_keys_behind_attention():
    job = replace(JOB, model=replace(JOB.model, sequence=131072), global_batch=1)
    one, four = (time_step(job, Layout(context=parts), SHARES) for parts in (1, 4))
    assert four.products == pytest.approx(one.products / 4, rel=0.02)
    assert (one.context, four.context) == (0, 0)
    across = replace(job, device=replace(job.device, per_node=1, node_rate=1e9))
    assert time_step(across, Layout(context=4), SHARES).context > 0


def test_thirty_two_bit_gradients_take_twice_as_long_to_reduce():
    job = replace(JOB, has_overlap=False)
    half, single = (
        time_step(replace(job, has_float32_gradients=is_single), Layout(data=64), SHARES).data
        for is_single in (False, True)
    )
    assert single == pytest.approx(2 * half, rel=0.05)


def test_sequence_parallelism_comes_with_tensor_parallelism_unless_refused():
    split = {layout.has_split_sequence for layout in list_layouts(JOB, 8, Asked(tensor=4))}
    refused = {layout.has_split_sequence for layout in list_layouts(JOB, 8, Asked(tensor=4, has_split_sequence=False))}
    alone = {layout.has_split_sequence for layout in list_layouts(JOB, 8, Asked(tensor=1))}
    assert (split, refused, alone) == ({True}, {False}, {False})


def test_the_trillion_row_is_met_without_its_efficiency():
    model = Transformer(num_layers=128, width=25600, num_heads=160, vocabulary=51200, sequence=2048)
    job = PlannedJob(
        model=model, device=find_device("a100-80gb"), dtype="float16", global_batch=3072, has_fused_attention=False
    )
    layout = Layout(tensor=8, pipeline=64, data=6, micro_batch=1, checkpointing="full")
    published = model.count_operations(3072, "full") / (163e12 * 3072)
    assert seconds(layout, job) == pytest.approx(published, rel=0.1)


def reduce_by_hand(ranks, payload_bytes, rate, latency):
    return (
        2 * (ranks - 1) / ranks * payload_bytes / rate + min(2 * (ranks - 1), 2 * math.ceil(math.log2(ranks))) * latency
    )


def test_an_all_reduce_over_nodes_takes_both_of_its_parts():
    """16 replicas of tensor 2 on nodes of 8: rings of 4 inside, then 4 nodes through a link that 2 groups share."""
    machine, device = _Machine(JOB, SHARES), JOB.device
    layout = Layout(tensor=2, data=16)
    inside = reduce_by_hand(4, 1e9, device.link_rate * SHARES.link, SHARES.link_latency)
    between = reduce_by_hand(4, 1e9, device.node_rate * SHARES.node / 2, SHARES.node_latency)
    assert machine.spread(layout, 1e9) == pytest.approx(inside + between)
    whole = reduce_by_hand(8, 1e9, device.link_rate * SHARES.link, SHARES.link_latency)
    nodes = reduce_by_hand(2, 1e9, device.node_rate * SHARES.node, SHARES.node_latency)
    assert machine.reduce(8, 1e9) == pytest.approx(whole)
    assert machine.reduce(16, 1e9) == pytest.approx(whole + nodes)


def test_the_forward_of_a_stage_is_products_moves_and_all_reduces():
    machine, layout = _Machine(JOB, SHARES), Layout(tensor=8, data=2, micro_batch=4)
    passage = pass_stage(JOB, layout, machine)
    products = MODEL.list_products(4, 8, 1)
    linear = math.fsum(machine.multiply(product, is_linear=True) for product in products[:4])
    attended, attended_back = machine.attend(products[4:])
    moved, reduced = machine.move_block(layout), 2 * machine.reduce(8, machine.activation_bytes(layout))
    forward = linear + attended + moved + reduced
    assert forward > machine.launch_seconds
    assert passage.forward == pytest.approx(32 * forward)
    assert passage.tensor == pytest.approx(32 * 2 * reduced)
    head = 3 * machine.multiply(MODEL.output_product(4, 8, 1))
    assert passage.products == pytest.approx(32 * (3 * linear + attended + attended_back) + head)
    assert passage.launches == 0


def test_small_blocks_take_what_their_launches_take():
    job = replace(JOB, model=replace(MODEL, width=64, num_heads=2, sequence=64))
    machine = _Machine(job, SHARES)
    passage = pass_stage(job, Layout(data=2), machine)
    assert passage.forward == pytest.approx(32 * SHARES.launch_seconds)
    assert passage.blocks == pytest.approx(32 * 3 * SHARES.launch_seconds)


def test_replicas_expose_what_backward_leaves_and_never_less_than_a_block():
    machine, layout = _Machine(JOB, SHARES), Layout(data=16)
    passage = pass_stage(JOB, layout, machine)
    reduced = machine.spread(layout, 1e6 * JOB.gradient_bytes)
    assert machine.exchange(layout, passage, (1e6, 0.0), 1) == pytest.approx(reduced / 32)
    huge = machine.spread(layout, 1e13 * JOB.gradient_bytes)
    backward = passage.seconds - passage.forward
    assert machine.exchange(layout, passage, (1e13, 0.0), 1) == pytest.approx(huge - backward)
    assert machine.exchange(Layout(data=1), passage, (1e13, 0.0), 1) == 0


def test_keys_and_values_that_attention_does_not_hide_are_part_of_the_forward():
    device = replace(JOB.device, link_rate=JOB.device.link_rate / 1000)
    job, layout = replace(JOB, device=device), Layout(context=4, data=2)
    machine = _Machine(job, SHARES)
    passage = pass_stage(job, layout, machine)
    products = MODEL.list_products(1, 1, 4)
    linear = math.fsum(machine.multiply(product, is_linear=True) for product in products[:4])
    attended, attended_back = machine.attend(products[4:])
    hop = 2 * MODEL.sequence / 4 * MODEL.kv_width * job.item_bytes / machine.inside.bytes_per_second
    passed = 3 * (hop + SHARES.link_latency)
    assert machine.pass_keys(layout) == pytest.approx(passed)
    assert passed > attended
    assert passage.forward == pytest.approx(32 * (linear + machine.move_block(layout) + passed))
    assert passage.context == pytest.approx(32 * (passed - attended + 2 * passed - attended_back))


@pytest.mark.parametrize(("is_fused", "is_eager"), [(True, False), (False, False), (True, True)])
def test_bytes_between_products_are_those_of_norms_copies_gelu_and_scores(is_fused, is_eager):
    layout = Layout(tensor=8, context=2, micro_batch=2, has_split_sequence=True)
    job = replace(JOB, has_fused_attention=is_fused, is_eager=is_eager)
    machine = _Machine(job, SHARES)
    tokens, split, item = 2 * 2048 / 2, 8, 2
    whole = tokens * 4096 * item
    moved = 11 * whole / 8 + 8 * whole / split + tokens * 16384 * 2 * item / split
    moved *= 2.67 if is_eager else 1
    scores = 0 if is_fused else tokens * 32 / split * 2048
    assert machine.move_block(layout) == pytest.approx((moved + 9 * scores) / (2.039e12 * 0.915), rel=1e-12)


MOE = replace(JOB, model=MIXTRAL_8X7B, device=find_device("h100-sxm"), global_batch=256)


def test_a_token_costs_what_its_experts_do():
    dense = replace(MIXTRAL_8X7B, num_experts=1, experts_per_token=1)
    double = replace(dense, feedforward=2 * dense.inner)
    assert MIXTRAL_8X7B.num_parameters == pytest.approx(46.7e9, rel=1e-3)  # published
    assert MIXTRAL_8X7B.active_parameters == pytest.approx(12.9e9, rel=2e-3)
    assert MIXTRAL_8X7B.count_operations(4) == pytest.approx(double.count_operations(4))
    shared = replace(MIXTRAL_8X7B, experts_per_token=1, shared_experts=1)
    assert shared.count_operations(4) == pytest.approx(double.count_operations(4))
    assert dense.active_parameters == dense.num_parameters


def test_expert_ranks_multiply_larger_matrices_and_send_tokens():
    alone, spread = (time_step(MOE, Layout(data=8, expert=expert, zero=1), SHARES) for expert in (1, 8))
    assert spread.products < alone.products
    assert alone.experts == 0 < spread.experts
    across = time_step(MOE, Layout(data=64, expert=8, tensor=1, zero=1), SHARES)
    apart = time_step(replace(MOE, device=replace(MOE.device, per_node=2)), Layout(data=64, expert=8, zero=1), SHARES)
    assert apart.experts > 1.5 * across.experts
    beside = time_step(replace(MOE, has_tensor_overlap=True), Layout(data=8, expert=8, zero=1), SHARES)
    assert beside.experts == pytest.approx(spread.experts / 2)


def test_routed_experts_are_reduced_over_their_own_replicas():
    """8 experts on 8 ranks are not replicated at all: only the rest is reduced."""
    one, all_ = (time_step(replace(MOE, has_overlap=False), Layout(data=8, expert=e), SHARES).data for e in (1, 8))
    dense = MIXTRAL_8X7B.num_parameters - 32 * MIXTRAL_8X7B.routed_parameters
    assert all_ / one == pytest.approx(dense / MIXTRAL_8X7B.num_parameters, rel=0.02)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout(data=16, expert=16), "8 experts cannot be split over expert 16"),
        (Layout(data=2, expert=4), "expert 4 must divide data × context (2)"),
        (Layout(data=4, expert=0), "must be ≥ 1"),
    ],
)
def test_experts_that_cannot_be_spread_say_why(layout, reason):
    assert reason in (find_obstacle(MOE, layout) or "")


def test_expert_parallelism_is_searched():
    found = list_layouts(MOE, 16, Asked(tensor=1, pipeline=1, zero=1, micro_batch=1, checkpointing="full"))
    assert {layout.expert for layout in found} == {1, 2, 4, 8}
    assert {layout.expert for layout in list_layouts(JOB, 16, Asked(tensor=1, pipeline=1))} == {1}


def test_the_parts_that_are_asked_for_leave_the_rest_to_replicas():
    found = Asked(tensor=2, pipeline=3, context=4, zero=1).complete(48)
    assert found == Layout(tensor=2, pipeline=3, context=4, data=2, zero=1, has_split_sequence=True)
    assert Asked(tensor=2, pipeline=3, context=4).complete(36) is None
    assert Asked().complete(6) == Layout(data=6)


def test_words_leave_out_what_is_not_split():
    plain = Layout(tensor=2, data=4).words
    assert plain == "tensor 2 · pipeline 1 · data 4 (replicas) · micro-batch 1 · no activation checkpointing"
    rich = Layout(tensor=2, pipeline=2, interleave=3, context=2, expert=2, zero=3, data=2, has_split_sequence=True)
    assert rich.words == (
        "tensor 2 with sequence parallelism · pipeline 2 × 3 rounds · context 2 · expert 2 · data 2 (ZeRO-3/FSDP) ·"
        " micro-batch 1 · no activation checkpointing"
    )


@pytest.mark.parametrize(
    ("job", "layout", "is_so"),
    [
        ({"is_deepspeed": True}, Layout(data=2, zero=3), True),
        ({"is_deepspeed": True}, Layout(data=2, tensor=2, zero=3), True),
        ({"is_deepspeed": True}, Layout(data=2, zero=2), False),
        ({"is_deepspeed": True}, Layout(zero=3), False),
        ({"is_deepspeed": True}, Layout(data=2, pipeline=2, zero=3), False),
        ({"dtype": "float16", "has_fused_attention": False}, Layout(data=2, zero=3), True),
        ({"dtype": "float16", "has_fused_attention": False}, Layout(data=2, tensor=2, zero=3), False),
        ({"dtype": "float16", "has_fused_attention": False, "is_deepspeed": False}, Layout(data=2, zero=3), False),
        ({"dtype": "float16"}, Layout(data=2, zero=3), False),
        ({"has_fused_attention": False}, Layout(data=2, zero=3), False),
    ],
)
def test_zero_3_is_deepspeeds_if_told_or_if_it_is_that_of_2021(job, layout, is_so):
    assert replace(JOB, **job).gathers_matrices(layout) is is_so


def test_attention_is_recomputed_by_itself_only_where_it_keeps_scores():
    kinds = [
        {layout.checkpointing for layout in list_layouts(replace(JOB, has_fused_attention=is_fused), 1)}
        for is_fused in (True, False)
    ]
    assert kinds == [{"none", "selective", "full"}, {"none", "attention", "selective", "full"}]

"""The seconds of a layout, on a device whose numbers are round: every part is the one that is computed by hand."""

from dataclasses import fields, replace

import pytest

from scalelab.predict.devices import Accelerator
from scalelab.predict.layout_cost import (
    Efficiency,
    StepCost,
    _Machine,
    _Passage,
    local_parameters,
    pass_stage,
    time_step,
)
from scalelab.predict.layouts import Layout, PlannedJob
from scalelab.predict.network_model import FsdpUnit, overlap_units
from scalelab.predict.transformer_shape import Product, Transformer

ENDLESS = 1e40
IDEAL = Efficiency(
    gemm=1.0,
    tile=0.0,
    depth=0.0,
    memory=1.0,
    link=1.0,
    link_latency=0.0,
    node=1.0,
    node_latency=0.0,
    launch_seconds=0.0,
)
DEVICE = Accelerator(
    name="round", peaks={"bfloat16": 1e6}, memory_bytes=1e12, memory_rate=ENDLESS, link_rate=1e4, per_node=4,
    node_rate=4e3, watts=1.0, price=None, source="made up",
)  # fmt: skip
MODEL = Transformer(num_layers=2, width=8, num_heads=2, vocabulary=16, sequence=4)
JOB = PlannedJob(model=MODEL, device=DEVICE, global_batch=8)
LINEAR = 2 * 4 * (8 * 24 + 8 * 8 + 2 * 8 * 32)
"""Operations of a block's linear layers for one sample: 4 tokens, 2 for each weight."""
ATTENTION = 2 * (2 * 4 * 4 * 8)
HEAD = 2 * 4 * 16 * 8


def on(job=JOB, **changes):
    return replace(job, device=replace(job.device, **changes))


def test_the_shares_are_those_that_were_fitted():
    """benchmarks/plan.py repeats the fits; a share that is changed by hand changes every plan."""
    assert Efficiency() == Efficiency(
        gemm=0.759, tile=162.0, depth=61.4, memory=0.915, link=0.71, link_latency=12e-6, node=0.869, node_latency=20e-6,
        launch_seconds=0.5e-3,
    )  # fmt: skip
    assert Efficiency(gemm=0.5).scale(gemm=0.5, tile=2.0) == Efficiency(gemm=0.25, tile=324.0)


def test_fused_attention_skips_what_is_masked_and_computes_scores_again():
    products = MODEL.list_products(1)[-2:]
    assert _Machine(JOB, IDEAL).attend(products) == pytest.approx((ATTENTION / 2 / 0.3e6, 2.5 * ATTENTION / 2 / 0.3e6))
    plain = _Machine(replace(JOB, has_fused_attention=False), IDEAL)
    assert plain.attend(products) == pytest.approx((ATTENTION / 1e6, 2 * ATTENTION / 1e6))


def test_a_product_takes_its_operations_or_its_bytes():
    product = Product(rows=2, columns=3, depth=5, repeats=7)
    shares = replace(IDEAL, gemm=0.5, tile=2.0, depth=5.0)
    got = 0.5 * 2 / (2 + 2) * 3 / (3 + 2) * 5 / (5 + 5)
    assert _Machine(JOB, shares).multiply(product) == pytest.approx(2 * 2 * 3 * 5 * 7 / (1e6 * got))
    bound = _Machine(on(memory_rate=1e3), shares)
    assert bound.multiply(product) == pytest.approx((2 * 5 + 5 * 3 + 2 * 3) * 7 * 2 / 1e3)
    twice = _Machine(on(peaks={"bfloat16": 1e6, "float16": 2 * 312e12}), shares)  # needs matrices twice as large
    got = 0.5 * 2 / (2 + 4) * 3 / (3 + 4) * 5 / (5 + 10)
    assert twice.multiply(product) == pytest.approx(2 * 2 * 3 * 5 * 7 / (1e6 * got))


def test_only_linear_layers_have_eight_bits_and_pay_for_casting():
    job = replace(on(peaks={"bfloat16": 1e6, "float8": 2e6}, reach=0.5), dtype="float8")
    machine = _Machine(job, IDEAL)
    assert (machine.peak, machine.linear_peak) == pytest.approx((0.5e6, 0.76e6))
    half = _Machine(on(reach=0.5), IDEAL)
    assert (half.peak, half.linear_peak) == (0.5e6, 0.5e6)


@pytest.mark.parametrize(
    ("kind", "again"),
    [("none", 0.0), ("attention", 0.0), ("selective", LINEAR / 2), ("full", LINEAR + ATTENTION / 0.6)],
)
def test_products_are_forward_backward_and_what_is_recomputed(kind, again):
    cost = time_step(JOB, Layout(checkpointing=kind), IDEAL)
    block = 3 * LINEAR + 3.5 * ATTENTION / 0.6 + again
    assert cost.products == pytest.approx(8 * (2 * block + 3 * HEAD) / 1e6)


def test_recomputed_attention_that_is_not_fused_is_multiplied_again():
    cost = time_step(replace(JOB, has_fused_attention=False), Layout(checkpointing="attention"), IDEAL)
    assert cost.products == pytest.approx(8 * (2 * (3 * LINEAR + 4 * ATTENTION) + 3 * HEAD) / 1e6)


@pytest.mark.parametrize(("kind", "passes"), [("none", 3), ("selective", 4), ("full", 4)])
def test_backward_moves_twice_the_bytes_and_logits_six_times_theirs(kind, passes):
    job = on(peaks={"bfloat16": ENDLESS}, memory_rate=1e3)
    layout = Layout(micro_batch=2, checkpointing=kind)
    machine = _Machine(job, IDEAL)
    passage = pass_stage(job, layout, machine)
    logits = 6 * (2 * 4) * 16 * 4 / 1e3
    assert passage.moves == pytest.approx(2 * machine.move_block(layout) * passes + logits)


@pytest.mark.parametrize(("kind", "passes"), [("none", 3), ("full", 4)])
def test_kernels_of_an_endless_device_take_their_launches(kind, passes):
    passage_job = on(peaks={"bfloat16": ENDLESS})
    cost = time_step(passage_job, Layout(checkpointing=kind), replace(IDEAL, launch_seconds=0.25))
    assert cost.launches == pytest.approx(8 * 2 * passes * 0.25)
    assert cost.seconds == pytest.approx(cost.launches)


def test_launches_hide_behind_what_forward_and_backward_take():
    job, layout = on(memory_rate=1e4), Layout(tensor=2)
    machine = _Machine(job, replace(IDEAL, launch_seconds=10.0))
    products = MODEL.list_products(1, 2)
    linear = sum(machine.multiply(product, is_linear=True) for product in products[:-2])
    attended, attended_back = machine.attend(products[-2:])
    moved, reduced = machine.move_block(layout), 2 * machine.reduce(2, 4 * 8 * 2)
    forward, backward = linear + attended + moved + reduced, 2 * linear + attended_back + 2 * moved + reduced
    passage = pass_stage(job, layout, machine)
    assert passage.launches == pytest.approx(2 * (10.0 - forward + 20.0 - backward))
    assert passage.forward == pytest.approx(2 * 10.0)
    assert passage.blocks == pytest.approx(2 * 30.0)


MOE = replace(JOB, model=replace(MODEL, num_experts=4, experts_per_token=2))


def test_tokens_go_to_the_ranks_of_their_experts_inside_a_node_and_to_other_nodes():
    """2 of 4 experts, tensor 2 on nodes of 4: two expert ranks on each of two nodes."""
    shares = replace(IDEAL, link_latency=1.0, node_latency=10.0)
    machine = _Machine(MOE, shares)
    layout = Layout(tensor=2, data=4, expert=4, has_split_sequence=True)
    one = 4 * 8 * 2 / 2
    inside = 2 * one * (1 / 2) / 1e4 + 1.0
    away = 1 * (1 - (1 - 1 / 2) ** 2)
    assert machine.route_tokens(layout) == pytest.approx(inside + away * one / (4e3 / 4) + 10.0)
    near = Layout(data=4, expert=4)
    assert machine.route_tokens(near) == pytest.approx(2 * (4 * 8 * 2) * (3 / 4) / 1e4 + 1.0)
    assert machine.route_tokens(Layout(data=4)) == 0
    plain, again = (pass_stage(MOE, replace(near, checkpointing=kind), machine) for kind in ("none", "full"))
    assert plain.experts == pytest.approx(2 * 2 * 2 * machine.route_tokens(near))
    assert again.experts == pytest.approx(1.5 * plain.experts)


def test_experts_of_two_tokens_move_their_tokens_four_times():
    machine, layout = _Machine(on(MOE, memory_rate=1e3), IDEAL), Layout(tensor=2)
    whole = 4 * 8 * 2
    inner = 4 * 2 * 32 * 2 * 2 / 2
    assert machine.move_block(layout) == pytest.approx((11 * whole + 8 * whole / 2 + inner + 4 * 2 * whole) / 1e3)


def test_a_stage_sends_inside_a_node_while_its_neighbour_is_there():
    shares = replace(IDEAL, link_latency=1.0, node_latency=10.0)
    machine = _Machine(JOB, shares)
    bytes_ = 4 * 8 * 2
    assert machine.send_stage(Layout(pipeline=2)) == pytest.approx(2 * (bytes_ / 1e4 + 1.0))
    assert machine.send_stage(Layout(pipeline=2, tensor=2, interleave=3)) == pytest.approx(
        2 * 3 * (bytes_ / 2 / 1e4 + 1.0)
    )
    filled = Layout(pipeline=2, tensor=2, data=2)  # of 4 devices: the next stage is on another node
    assert machine.send_stage(filled) == pytest.approx(2 * (bytes_ / 2 / (4e3 / 4) + 10.0))
    cost = time_step(JOB, replace(filled, micro_batch=2), shares)
    assert cost.stage_sends == pytest.approx(2 * machine.send_stage(replace(filled, micro_batch=2)))


def test_a_stage_holds_its_blocks_and_an_end():
    block, table, norm = MODEL.block_parameters, (16 + 4) * 8, 16
    assert local_parameters(JOB, Layout()) == (2 * block + table + norm, 0)
    assert local_parameters(JOB, Layout(pipeline=2, tensor=2)) == ((block + table) / 2, 0)
    untied = replace(JOB, model=replace(MODEL, num_positions=0, is_tied=False))
    assert local_parameters(untied, Layout(pipeline=2)) == (untied.model.block_parameters + 16 * 8, 0)
    routed = 4 * MOE.model.expert_parameters
    rest = 2 * (MOE.model.block_parameters - routed) + table + norm
    assert local_parameters(MOE, Layout(tensor=2, data=4, expert=4)) == (rest / 2, 2 * routed / 8)


@pytest.mark.parametrize(("zero", "shards"), [(0, 1), (1, 4)])
def test_the_optimizer_moves_34_bytes_for_every_parameter_of_a_rank(zero, shards):
    job = on(memory_rate=1e3)
    cost = time_step(job, Layout(data=4, zero=zero), IDEAL)
    assert cost.optimizer == pytest.approx(MODEL.num_parameters / shards * 34 / 1e3)


def test_the_optimizer_shards_experts_over_the_replicas_that_have_them():
    cost = time_step(on(MOE, memory_rate=1e3), Layout(data=4, expert=2, zero=1), IDEAL)
    assert cost.optimizer == pytest.approx(MOE.model.num_parameters / 4 * 34 / 1e3)


def test_a_block_less_makes_room_for_part_of_the_logits():
    job = replace(JOB, model=replace(MODEL, num_layers=3, vocabulary=1024))
    machine = _Machine(job, IDEAL)
    passage = pass_stage(job, Layout(pipeline=2), machine)
    block, head = (3 * LINEAR + 3.5 * ATTENTION / 0.6) / 1e6, 3 * 2 * 4 * 1024 * 8 / 1e6
    assert head > block
    assert passage.products == pytest.approx(2 * block + head - block)
    assert passage.blocks == pytest.approx(2 * block)
    even = pass_stage(replace(job, model=replace(job.model, num_layers=4)), Layout(pipeline=2), machine)
    assert even.products == pytest.approx(2 * block + head)


def test_the_bubble_is_the_passage_of_the_other_stages_and_their_sends():
    job = replace(JOB, model=replace(MODEL, num_layers=4))
    layout = Layout(pipeline=2, interleave=2)
    machine = _Machine(job, IDEAL)
    passage = pass_stage(job, layout, machine)
    cost = time_step(job, layout, IDEAL)
    assert cost.bubble == pytest.approx((passage.blocks + machine.send_stage(layout)) / 2)


def test_shards_send_half_of_an_all_reduce_of_gradients_and_half_of_one_of_parameters():
    job = replace(JOB, has_overlap=False, has_float32_gradients=True)
    machine, layout = _Machine(job, IDEAL), Layout(data=4, zero=1)
    passage = pass_stage(job, layout, machine)
    whole = 2 * 3 / 4 * 1000 / 1e4
    assert machine.exchange(layout, passage, (1000.0, 0.0), 1) == pytest.approx(0.5 * 4 * whole + 0.5 * 2 * whole)
    beside = _Machine(replace(job, has_overlap=True), IDEAL)
    backward = passage.seconds - passage.forward
    parts = [(0.5 * 4 * whole, backward), (0.5 * 2 * whole, passage.forward)]
    least = sum(max(seconds - room, seconds / 2) for seconds, room in parts)
    assert beside.exchange(layout, passage, (1000.0, 0.0), 1) == pytest.approx(least)


def test_gathering_every_block_goes_around_all_nodes():
    """8 shards on two nodes of 4, nothing to hide behind: per block two gathers and a scatter, of latencies alone."""
    job = replace(on(peaks={"bfloat16": ENDLESS}, link_rate=ENDLESS, node_rate=ENDLESS), global_batch=16)
    cost = time_step(job, Layout(data=8, zero=3), replace(IDEAL, link_latency=1.0, node_latency=100.0))
    half = (4 * 1.0 + 2 * 100.0) / 2
    around = 2 * 100.0 + (7 - 4) * 1.0
    assert cost.data == pytest.approx(2 * 2 * 3 * (half + around))


def test_blocks_are_gathered_beside_the_compute_of_one_block_each():
    job = on(peaks={"bfloat16": 2e5})
    machine, layout = _Machine(job, IDEAL), Layout(data=4, zero=3)
    passage = pass_stage(job, layout, machine)
    gather = 0.5 * 2 * 3 / 4 * 500 * 2 / 1e4  # half of an all-reduce of one of two blocks, 16 bits
    unit = FsdpUnit(passage.forward / 2, (passage.seconds - passage.forward) / 2, 1.0)
    parts = overlap_units([unit, unit], lambda _: gather, lambda _: gather)
    exposed = sum(part.exposed_seconds for part in parts)
    assert 0 < exposed < 6 * gather
    assert machine.exchange(layout, passage, (1000.0, 0.0), 3) == pytest.approx(3 * exposed)


def test_deepspeed_gathers_matrix_by_matrix_beside_nothing():
    """8 shards on two nodes of 4: per block two gathers and a scatter of four matrices, each around the whole ring."""
    job = replace(JOB, global_batch=16, is_deepspeed=True)
    shares = replace(IDEAL, link_latency=1.0, node_latency=100.0)
    machine, layout = _Machine(job, shares), Layout(data=8, zero=3)
    passage = pass_stage(job, layout, machine)
    around = 2 * 100.0 + (7 - 4) * 1.0
    latency = (4 * 1.0 + 2 * 100.0) / 2  # of the all-reduces whose halves are taken
    sent = 500 * 2 * (3 / 4 / 1e4 + 1 / 2 / (0.18 * 4e3))
    assert machine.exchange(layout, passage, (1000.0, 0.0), 2) == pytest.approx(
        2 * 2 * 3 * (sent + latency + 4 * around)
    )
    gated = replace(job, model=replace(MODEL, is_gated=True), has_float32_gradients=True)
    machine = _Machine(gated, shares)
    assert machine.exchange(layout, passage, (1000.0, 0.0), 1) == pytest.approx(
        2 * ((2 + 2) * sent + 3 * latency + 3 * 5 * around)
    )


def test_a_stage_of_deepspeeds_pipeline_stalls():
    shares, layout = replace(IDEAL, node_latency=10.0), Layout(pipeline=2)
    plain, stalled = (time_step(replace(JOB, is_deepspeed=known), layout, shares) for known in (None, True))
    blocks = pass_stage(JOB, layout, _Machine(JOB, shares)).blocks
    assert stalled.stage_sends - plain.stage_sends == pytest.approx(8 * 0.13 * blocks)
    assert stalled.bubble - plain.bubble == pytest.approx(0.13 * blocks)
    whole = [time_step(replace(JOB, is_deepspeed=known), Layout(), shares) for known in (None, True)]
    assert whole[0] == whole[1]


def test_two_ranks_are_enough_to_share_experts_or_a_sequence():
    shares = replace(IDEAL, link_latency=1.0)
    assert _Machine(MOE, shares).route_tokens(Layout(data=2, expert=2)) == pytest.approx(2 * 64 * (1 / 2) / 1e4 + 1.0)
    assert _Machine(JOB, shares).pass_keys(Layout(context=2)) == pytest.approx(2 * 2 * 8 * 2 / 1e4 + 1.0)


def test_ranks_of_a_sequence_pass_the_keys_of_their_heads_inside_a_node_or_through_their_part_of_its_link():
    machine = _Machine(JOB, replace(IDEAL, link_latency=1.0, node_latency=10.0))
    keys = 2 * 4 * 8 * 2
    near, far = Layout(tensor=2, context=2), Layout(tensor=2, context=4)  # on nodes of 4
    assert machine.pass_keys(near) == pytest.approx(keys / 2 / 2 / 1e4 + 1.0)
    assert machine.pass_keys(far) == pytest.approx(3 * (keys / 4 / 2 / (4e3 / 4) + 10.0))


def test_replicas_that_fill_nodes_have_the_link_of_a_node_to_themselves():
    machine = _Machine(JOB, IDEAL)
    assert machine.spread(Layout(data=8), 1000.0) == pytest.approx(2 * 3 / 4 * 1000 / 1e4 + 2 * 1 / 2 * 1000 / 4e3)
    half = machine.spread(Layout(tensor=2, data=4), 1000.0)  # two groups of a node share its link
    assert half == pytest.approx(2 * 1 / 2 * 1000 / 1e4 + 2 * 1 / 2 * 1000 / (4e3 / 2))


def test_a_block_less_makes_room_for_what_the_logits_move_too():
    job = replace(on(peaks={"bfloat16": ENDLESS}, memory_rate=1e3), model=replace(MODEL, num_layers=3, vocabulary=4096))
    machine, layout = _Machine(job, IDEAL), Layout(pipeline=2)
    passage = pass_stage(job, layout, machine)
    even = pass_stage(replace(job, model=replace(job.model, num_layers=4)), layout, machine)
    logits, both = 6 * 4 * 4096 * 4 / 1e3, even.seconds - even.blocks
    spare = passage.blocks / 2 / both
    assert 0 < spare < 1
    assert passage.seconds == pytest.approx(passage.blocks / 2 + both)
    assert passage.moves - even.moves == pytest.approx(-spare * logits)


def test_a_step_is_the_sum_of_its_parts():
    names = [one.name for one in fields(StepCost)]
    assert StepCost(**{name: 2.0**place for place, name in enumerate(names)}).seconds == 2 ** len(names) - 1


def test_ranks_that_fill_a_node_send_through_their_part_of_its_link():
    machine = _Machine(JOB, IDEAL)
    assert machine.spread(Layout(tensor=4, data=2), 1000.0) == pytest.approx(2 * 1 / 2 * 1000 / (4e3 / 4))


def test_a_passage_takes_the_sum_of_all_but_its_shares():
    passage = _Passage(
        products=1.0, moves=2.0, tensor=4.0, context=8.0, experts=16.0, launches=32.0, forward=64.0, blocks=128.0
    )
    assert passage.seconds == 63.0

"""What a rank holds at the moment of its peak, category by category, of a model that fits on a page."""

from dataclasses import replace

import pytest

from scalelab.predict.devices import find_device
from scalelab.predict.footprint import Kernels, find_footprint, keep_block
from scalelab.predict.layouts import Layout, PlannedJob
from scalelab.predict.transformer_shape import MIXTRAL_8X7B, Transformer

MODEL = Transformer(num_layers=4, width=8, num_heads=2, vocabulary=2**12, sequence=4)
JOB = PlannedJob(model=MODEL, device=find_device("h100-sxm"), global_batch=8)
BATCH = 2 * 8 * 4
"""Bytes of the tokens and targets of a sample."""
EDGES = 2 * (4 * 8) * 2 + BATCH
"""The last norm's input and output in 16 bits, and the batch."""


def test_at_the_loss_nothing_is_gathered_and_nothing_is_worked_on():
    job = replace(JOB, global_batch=8)
    found = find_footprint(job, Layout(micro_batch=8))
    block = keep_block(job, Layout(micro_batch=8), Kernels())[0]
    assert found.moment == "loss"
    assert found.by_category == pytest.approx(
        {
            "parameters": 2 * MODEL.num_parameters,
            "gradients": 0.0,
            "optimizer": 12 * MODEL.num_parameters,
            "activations": 4 * block + 8 * EDGES,
            "logits": 8 * 4 * 2**12 * (2 + 3 * 4),
            "buckets": 0.0,
            "workspace": 0.0,
        }
    )


def test_the_first_stage_updates_while_the_other_micro_batches_wait():
    """Four stages: three micro-batches wait. The largest matrix is the table of tokens, twice in 32 bits."""
    layout, kernels = Layout(pipeline=4), Kernels(keeps_logits=False)
    found = find_footprint(JOB, layout, kernels)
    parameters = MODEL.block_parameters + MODEL.embedding_parameters
    block = keep_block(JOB, layout, kernels)[0]
    assert found.moment == "optimizer"
    assert found.by_category == pytest.approx(
        {
            "parameters": 2 * parameters,
            "gradients": 2 * parameters,
            "optimizer": 12 * parameters,
            "activations": 3 * (block + BATCH),
            "logits": 0.0,
            "buckets": 0.0,
            "workspace": 2 * 4 * 2**12 * 8,
        }
    )


@pytest.mark.parametrize(("zero", "shards"), [(0, 1), (1, 2)])
def test_tensor_parallel_ranks_and_shards_divide_the_largest_matrix_of_the_update(zero, shards):
    layout = Layout(tensor=2, data=2, zero=zero)
    found = find_footprint(JOB, layout, Kernels(keeps_logits=False, has_fused_loss=True, reduces_in_place=True))
    assert found.moment == "optimizer"
    assert found.by_category["workspace"] == 2 * 4 * 2**12 * 8 / 2 / shards


NARROW = replace(JOB, model=replace(MODEL, vocabulary=16), dtype="float32")


def test_the_last_block_of_backward_has_all_gradients_and_room_for_those_of_activations():
    """Of 16 samples activations outweigh the tables. A recomputed block is whole beside its input."""
    job, layout = replace(NARROW, global_batch=16), Layout(micro_batch=16, checkpointing="full")
    found = find_footprint(job, layout)
    kept, whole = keep_block(job, layout, Kernels())
    assert found.moment == "last block"
    assert found.by_category["gradients"] == pytest.approx(4 * job.model.num_parameters)
    assert found.by_category["activations"] == pytest.approx(kept + whole)
    assert found.by_category["logits"] == 16 * 4 * 16 * 4
    assert found.by_category["workspace"] == 3 * (16 * 4 * 8 * 4)


def test_gradients_of_earlier_micro_batches_exist_all_the_time():
    job = replace(JOB, global_batch=16)
    once, twice, kept = (
        find_footprint(job, Layout(micro_batch=size), kernels).by_category["gradients"]
        for size, kernels in ((16, Kernels()), (8, Kernels()), (16, Kernels(keeps_gradients=True)))
    )
    assert (once, twice, kept) == (0, 2 * MODEL.num_parameters, 2 * MODEL.num_parameters)


def test_replicas_have_buckets_for_the_gradients_of_experts_too():
    job = replace(JOB, model=MIXTRAL_8X7B)
    found = find_footprint(job, Layout(data=2)).by_category
    assert found["buckets"] == pytest.approx(2 * MIXTRAL_8X7B.num_parameters)
    assert find_footprint(job, Layout()).by_category["buckets"] == 0
    spread = find_footprint(job, Layout(data=2, expert=2)).by_category
    routed = 32 * MIXTRAL_8X7B.routed_parameters
    assert spread["buckets"] == pytest.approx(2 * (MIXTRAL_8X7B.num_parameters - routed / 2))


@pytest.mark.parametrize(("zero", "gradients", "parameters"), [(1, 1, 1), (2, 4, 1), (3, 4, 4)])
def test_each_stage_of_zero_divides_one_thing_more(zero, gradients, parameters):
    found = find_footprint(replace(JOB, global_batch=64), Layout(data=4, zero=zero)).by_category
    sizes = {1: (2, 2, 12), 2: (2, 2, 12), 3: (4, 4, 8)}[zero]  # sharded parameters are kept in 32 bits
    assert found["parameters"] == pytest.approx(sizes[0] * MODEL.num_parameters / parameters)
    assert found["gradients"] == pytest.approx(sizes[1] * MODEL.num_parameters / gradients)
    assert found["optimizer"] == pytest.approx(sizes[2] * MODEL.num_parameters / 4)


def test_the_first_block_of_backward_has_all_activations_and_nothing_again():
    job, layout = replace(NARROW, global_batch=16), Layout(micro_batch=16)
    found = find_footprint(job, layout, Kernels(keeps_logits=False, has_fused_loss=True))
    kept = keep_block(job, layout, Kernels())[0]
    assert found.moment == "first block"
    assert found.by_category["activations"] == 4 * kept + 16 * (2 * 4 * 8 * 4 + BATCH)
    rest = job.model.embedding_parameters + job.model.head_parameters
    assert found.by_category["gradients"] == pytest.approx(4 * rest)

"""A step on a mesh: perfect splitting divides, a bubble is that of theory, and what two ranks show is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scalelab.predict.network_model import SEND, Gradient, LinkSpeed, NetworkModel
from scalelab.predict.scaled_job import ScaledJob, predict_step, scale_out, settle_on_two
from scalelab.predict.split_step import (
    MeshPass,
    PerSampleCost,
    Splitting,
    arrange,
    count_exchanges,
    count_micro_batches,
    count_reduced_bytes,
    find_slot_seconds,
    fit_line_by_batch,
    is_meshed,
    shard_pass,
    split_pass,
)
from scalelab.records.strategy import Mesh
from scalelab.records.trial import Trial

FAST = NetworkModel(inside=LinkSpeed(latency_seconds=0, bytes_per_second=1e15))
SLOW = NetworkModel(inside=LinkSpeed(latency_seconds=1e-4, bytes_per_second=1e8))
JOB = ScaledJob(
    phases={"forward": PerSampleCost(per_sample=0.001), "backward": PerSampleCost(per_sample=0.002)},
    gradients=tuple(Gradient((number + 1) / 8, 1e6) for number in range(8)),
    network=FAST,
    splitting=Splitting(num_reductions=16, reduced_bytes=16e4, hop_bytes=1e4),
)
ALONE = 0.032 * 3


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_split_layers_divide_compute_and_nothing_else_without_a_link(num_ranks: int) -> None:
    assert predict_step(replace(JOB, strategy="tp"), num_ranks, 32).seconds == pytest.approx(ALONE / num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_pipeline_has_the_bubble_of_theory(num_ranks: int) -> None:
    parts = predict_step(replace(JOB, strategy="pp"), num_ranks, 32)
    micro_batches = 2 * num_ranks
    assert parts.bubble_seconds / parts.seconds == pytest.approx((num_ranks - 1) / (micro_batches + num_ranks - 1))
    assert parts.seconds == pytest.approx(ALONE / num_ranks * (micro_batches + num_ranks - 1) / micro_batches)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_what_the_schedule_takes_comes_with_every_slot(num_ranks: int) -> None:
    plain = replace(JOB, strategy="pp")
    busy = replace(plain, splitting=replace(JOB.splitting, slot_seconds=0.001))
    more = predict_step(busy, num_ranks, 32).seconds - predict_step(plain, num_ranks, 32).seconds
    assert more == pytest.approx((2 * num_ranks + num_ranks - 1) * 0.001)


@pytest.mark.parametrize(("stages", "micro_batches", "expected"), [(2, 4, 5), (3, 4, 9), (4, 8, 19), (8, 16, 43)])
def test_exchanges_are_those_that_a_stage_of_1f1b_waits_for(stages: int, micro_batches: int, expected: int) -> None:
    """Expected: from playing torch's schedule event by event, with a wait for every send and receive."""
    assert count_exchanges(stages, micro_batches) == expected
    slow = replace(JOB, strategy="pp", network=SLOW, splitting=replace(JOB.splitting, micro_batch=1))
    hop = SLOW.cost(SEND, 2, JOB.splitting.hop_bytes)
    apart = replace(slow, contention=1.0)
    assert predict_step(slow, stages, micro_batches).communication_seconds == pytest.approx(expected * hop)
    assert predict_step(apart, stages, micro_batches).communication_seconds == pytest.approx(2 * expected * hop)


def test_a_schedule_takes_what_two_stages_take_beyond_their_half() -> None:
    assert find_slot_seconds(1.0, 0.54, 4) == pytest.approx(0.01)
    assert find_slot_seconds(1.0, 0.4, 4) == 0.0


@pytest.mark.parametrize(
    ("strategy", "sent"), [("ddp", 8e6), ("tp", 16e4 * 32), ("pp", 1e4 * 32), ("hsdp", 8e6), ("fsdp2", 16e6)]
)
def test_bytes_of_two_ranks_are_those_that_their_strategy_sends(strategy: str, sent: float) -> None:
    assert count_reduced_bytes(strategy, 32, JOB.splitting, 8e6) == pytest.approx(sent)


@pytest.mark.parametrize(("strategy", "num_calls", "size"), [("tp", 16, 16e4 / 16 * 32)])
def test_every_reduction_of_split_layers_is_exposed(strategy: str, num_calls: int, size: float) -> None:
    parts = predict_step(replace(JOB, strategy=strategy, network=SLOW), 4, 32)
    assert parts.exposed_seconds == pytest.approx(num_calls * SLOW.cost("all_reduce", 4, size))


def test_a_send_is_one_hop() -> None:
    assert SLOW.cost(SEND, 2, 1e6) == pytest.approx(1e-4 + 1e-2)


def test_two_levels_send_shards_between_groups_and_units_inside() -> None:
    slow = replace(JOB, strategy="hsdp", network=SLOW, phases={}, units=(1e6,) * 8)
    two, four = (predict_step(slow, count, 32).communication_seconds for count in (2, 4))
    assert two == pytest.approx(8 * SLOW.cost("all_reduce", 2, 1e6)), "two groups of one rank: replicas"
    inside = SLOW.cost("all_gather", 2, 1e6) * 2 + SLOW.cost("reduce_scatter", 2, 1e6)
    assert four == pytest.approx(8 * (inside + SLOW.cost("all_reduce", 2, 5e5)))


def test_gloo_hides_nothing_of_shards_behind_compute() -> None:
    gloo = replace(JOB, strategy="fsdp2", network=replace(SLOW, is_gloo=True), units=(1e6,) * 8)
    parts = predict_step(gloo, 4, 32)
    assert parts.exposed_seconds == pytest.approx(parts.communication_seconds)
    assert predict_step(replace(gloo, network=SLOW), 4, 32).exposed_seconds < parts.exposed_seconds


def test_real_units_count_and_not_equal_ones() -> None:
    sharded = replace(JOB, strategy="fsdp-full", network=SLOW)
    uneven = replace(sharded, units=(6e6, *(2e6 / 7,) * 7))
    assert sum(uneven.units) == pytest.approx(sharded.gradient_bytes)
    assert predict_step(uneven, 4, 32).seconds > predict_step(replace(sharded, num_units=8), 4, 32).seconds


@pytest.mark.parametrize("strategy", ["tp", "pp", "hsdp", "fsdp2"])
def test_a_job_settled_on_two_ranks_takes_there_what_was_measured(strategy: str) -> None:
    job = replace(JOB, strategy=strategy, network=SLOW)
    for factor in (0.95, 1.3):
        seconds = factor * predict_step(job, 2, 32).seconds
        assert predict_step(settle_on_two(job, seconds, 32), 2, 32).seconds == pytest.approx(seconds, rel=1e-4)


def test_what_two_ranks_take_beyond_the_formula_is_kept_on_eight() -> None:
    job = settle_on_two(replace(JOB, strategy="tp"), 0.75 * ALONE, 32)
    assert job.residual_seconds == pytest.approx(0.25 * ALONE, rel=1e-3)
    assert predict_step(job, 8, 32).seconds == pytest.approx(ALONE * (1 / 8 + 0.25), rel=1e-3)


@pytest.mark.parametrize(("strategy", "mesh"), [("tp", Mesh(tp=8)), ("pp", Mesh(pp=8)), ("hsdp", Mesh(dp=2, fsdp=4))])
def test_ranks_that_share_samples_get_the_whole_batch(strategy: str, mesh: Mesh) -> None:
    assert arrange(strategy, 8) == mesh
    (found,) = scale_out(replace(JOB, strategy=strategy), [8], batch=64, is_weak=False)
    assert found.batch_per_rank == 64 / mesh.num_data_ranks
    assert found.throughput.value == pytest.approx(64 / found.step.value)


@pytest.mark.parametrize(("batch", "stages"), [(32, 4), (12, 4), (8, 8), (64, 2)])
def test_micro_batches_are_those_of_a_trial(batch: int, stages: int) -> None:
    trial = Trial(configuration="pp", workload="mlp", strategy="pp", num_ranks=stages, global_batch=batch)
    assert count_micro_batches(batch, stages, None) == trial.num_micro_batches


def time_phases(batch: float) -> dict[str, float]:
    return {"forward": batch, "backward": 2 * batch, "optimizer": 3.0}


def cost_size(kind: str, members: int, size: float) -> float:
    """Seconds as bytes, whoever sends them."""
    assert kind in ("all_reduce", "all_gather", "reduce_scatter", "send")
    assert members >= 1
    return size


SPLIT = Splitting(num_reductions=3, reduced_bytes=6.0, hop_bytes=5.0, slot_seconds=0.5)


def test_a_pass_of_split_layers_and_stages_is_the_one_worked_out_by_hand() -> None:
    """8 samples in 4 micro-batches of 2 on 2 × 2 ranks, each with a quarter of the compute.

    Three reductions of 6 · 2 / 3 bytes for every micro-batch, half of the layers each: 4 · 3 · 4 / 2 = 24 s. A slot
    takes (2 + 4 + 4 · 0.5 + 24) / 4 = 8 s, and one is empty. Five exchanges of 10 bytes, half beside each other.
    """
    found = split_pass(Mesh(tp=2, pp=2), 8, time_phases, SPLIT, cost_size, 0.5)
    assert found == MeshPass(
        forward=2.0, backward=4.0 + 2.0, optimizer=0.75, bubble=8.0, exposed=24.0 + 75.0, communication=24.0 + 75.0
    )


def test_one_rank_of_a_mesh_sends_nothing_and_waits_for_nothing() -> None:
    found = split_pass(Mesh(fsdp=2), 8, time_phases, SPLIT, cost_size)
    assert found == MeshPass(forward=8.0, backward=16.0, optimizer=3.0)
    silent = split_pass(Mesh(tp=2), 8, time_phases, replace(SPLIT, num_reductions=0), cost_size)
    assert (silent.exposed, silent.communication) == (0, 0)


@pytest.mark.parametrize(
    ("is_regathered", "is_blocking", "exposed", "sent"),
    [(True, False, 3.0 + 7.0, 14.0), (True, True, 14.0, 14.0), (False, False, 3.0 + 4.0, 10.0)],
)
def test_uneven_units_are_sent_beside_their_own_compute(
    is_regathered: bool, is_blocking: bool, exposed: float, sent: float
) -> None:
    """Units of 1 and 3 bytes, 4 s forward and 8 s backward: 1 + 3 s and 6 + 2 s.

    Forward gathers until 1, computes until 2, gathers until 4 and computes until 7: 3 s are exposed. Backward gathers
    until 3, computes until 9 and 11, and scatters (1.5 times the bytes: half of them again between the two groups)
    from 9 to 13.5 and to 15; without gathering, until 6 and 8, and from 6 to 10.5 and to 12.
    """
    found = MeshPass(forward=4.0, backward=8.0, optimizer=1.0, exposed=100.0, communication=200.0)
    after = shard_pass(
        Mesh(dp=2, fsdp=2), found, (1.0, 3.0), cost_size, is_regathered=is_regathered, is_blocking=is_blocking
    )
    assert after == replace(found, exposed=100.0 + exposed, communication=200.0 + sent)


@pytest.mark.parametrize(
    ("samples", "micro_batch", "count"),
    [(8, None, 4), (4, None, 4), (6, None, 2), (2, None, 2), (1, None, 1), (8, 2, 4), (8, 16, 1)],
)
def test_two_stages_take_two_micro_batches_each_where_that_divides(
    samples: int, micro_batch: int | None, count: float
) -> None:
    assert count_micro_batches(samples, 2, micro_batch) == count


@pytest.mark.parametrize(
    ("seconds", "fixed", "per_sample"),
    [
        ({8.0: 0.2}, 0.0, 0.025),
        ({6.0: 3.0, 2.0: 2.0}, 1.5, 0.25),
        ({6.0: 3.0, 2.0: 2.0, 4.0: 99.0}, 1.5, 0.25),
        ({2.0: 3.0, 6.0: 2.0}, 2.0, 0.0),
        ({2.0: 0.1, 6.0: 3.0}, 0.0, 0.5),
    ],
    ids=["one", "two", "ends", "falling", "no fixed part"],
)
def test_a_line_goes_through_the_smallest_and_the_largest_batch(
    seconds: dict[float, float], fixed: float, per_sample: float
) -> None:
    found = fit_line_by_batch(seconds)
    assert (found.fixed, found.per_sample) == (pytest.approx(fixed), pytest.approx(per_sample))
    assert found.at(4) == pytest.approx(fixed + 4 * per_sample)
    assert found.scale(3) == PerSampleCost(fixed=found.fixed * 3, per_sample=found.per_sample * 3)


@pytest.mark.parametrize(
    ("samples", "stages", "micro_batch", "count"),
    [(8, 4, None, 8), (16, 4, None, 8), (12, 4, None, 4), (3, 4, None, 3), (8, 2, 4, 2), (2, 2, 4, 1), (6, 2, 4, 1.5)],
)
def test_a_batch_is_cut_into_two_micro_batches_a_stage_if_it_divides(
    samples: int, stages: int, micro_batch: int | None, count: float
) -> None:
    assert count_micro_batches(samples, stages, micro_batch) == count


def test_a_mesh_is_what_does_more_than_average_gradients() -> None:
    meshed = {strategy: is_meshed(strategy) for strategy in ("ddp", "zero1", "fsdp-none", "fsdp2", "tp", "hsdp")}
    assert meshed == {"ddp": False, "zero1": False, "fsdp-none": False, "fsdp2": True, "tp": True, "hsdp": True}
    assert (arrange("ddp", 4), arrange("fsdp2", 4)) == (Mesh(dp=4), Mesh(fsdp=4))

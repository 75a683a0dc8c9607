"""One step of a job on any number of ranks."""

import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from scalelab.errors import TooNoisy, UsageError
from scalelab.predict.network_model import Gradient, LinkSpeed, NetworkModel, fill_buckets
from scalelab.predict.scaled_job import (
    GROUPS,
    Fitted,
    InputErrors,
    ScaledJob,
    _draw,
    _draw_table,
    _find_crowding,
    _find_factors,
    _fit_pair,
    predict_step,
    scale_out,
    settle_on_two,
)
from scalelab.predict.split_step import PerSampleCost, fit_line_by_batch
from scalelab.predict.what_if import WhatIf, change_job, find_width, fit_need

FAST = LinkSpeed(latency_seconds=0, bytes_per_second=1e15)
SLOW = LinkSpeed(latency_seconds=1e-5, bytes_per_second=1e9)
JOB = ScaledJob(
    phases={
        "forward": PerSampleCost(per_sample=0.001),
        "backward": PerSampleCost(per_sample=0.002),
        "optimizer": PerSampleCost(fixed=0.01),
    },
    gradients=tuple(Gradient((number + 1) / 40, 4e6) for number in range(40)),
    network=NetworkModel(inside=SLOW),
)
PERFECT = replace(JOB, network=NetworkModel(inside=FAST), phases={**JOB.phases, "optimizer": PerSampleCost()})


def test_a_perfect_link_gives_perfect_scaling():
    (found,) = scale_out(PERFECT, [64], batch=64, is_weak=False)
    assert found.speedup.value == pytest.approx(64, rel=1e-3)
    assert found.exposed.value == pytest.approx(0, abs=1e-3)


def test_what_does_not_shrink_bounds_the_speedup():
    (found,) = scale_out(replace(JOB, network=NetworkModel(inside=FAST)), [64], batch=64, is_weak=False)
    assert found.speedup.value == pytest.approx(0.202 / 0.013, rel=1e-3)


def test_the_parts_add_up_to_the_step():
    parts = predict_step(replace(JOB, jitter_ratio=0.1, residual_seconds=0.003), 8, 8)
    assert parts.seconds == pytest.approx(0.034 + parts.exposed_seconds + parts.straggler_seconds + 0.003)
    assert parts.straggler_seconds > 0


def test_the_exposed_share_is_that_of_the_step():
    (found,) = scale_out(JOB, [8], batch=64, is_weak=False)
    parts = predict_step(JOB, 8, 8)
    assert 0 < found.exposed.value == pytest.approx(parts.exposed_seconds / parts.seconds)
    assert found.exposed.low <= found.exposed.value <= found.exposed.high < 1


def test_a_link_between_nodes_leaves_the_nodes_as_they_were():
    nodes = replace(JOB, network=NetworkModel(inside=FAST, between=SLOW, ranks_per_node=4))
    faster = change_job(nodes, WhatIf(between=FAST)).network
    assert (faster.between, faster.ranks_per_node) == (FAST, 4)
    smaller = change_job(nodes, WhatIf(ranks_per_node=2)).network
    assert (smaller.between, smaller.ranks_per_node) == (SLOW, 2)
    cut = change_job(JOB, WhatIf(ranks_per_node=2)).network
    assert (cut.between, cut.ranks_per_node) == (SLOW, 2)


def test_a_line_goes_through_the_smallest_and_the_largest_batch():
    line = fit_line_by_batch({2.0: 5.0, 1.0: 1.0, 4.0: 7.0})
    assert (line.fixed, line.per_sample) == pytest.approx((0.0, 1.75))


@pytest.mark.parametrize(
    ("before", "after", "width"),
    [("float32", "float16", 0.5), ("bfloat16", "float32", 2), ("float16", "bfloat16", 1), ("float64", "float8", 0.25),
     ("float32", "tf32", 1), ("bfloat16", None, 1)],
)  # fmt: skip
def test_another_data_type_changes_the_bytes_of_a_number(before, after, width):
    assert find_width(replace(JOB, dtype=before), WhatIf(dtype=after)) == width


def test_one_rank_exchanges_nothing():
    parts = predict_step(replace(JOB, residual_seconds=1.0, jitter_ratio=0.5), 1, 8)
    assert (parts.exposed_seconds, parts.rest_seconds, parts.straggler_seconds) == (0, 0, 0)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp-full", "fsdp-grad-op"])
def test_a_faster_link_is_never_slower(strategy):
    slow, fast = (
        predict_step(replace(JOB, strategy=strategy, network=NetworkModel(inside=link)), 8, 8).seconds
        for link in (SLOW, FAST)
    )
    assert fast < slow


def test_sharding_parameters_sends_more_than_sharding_gradients():
    full, grad_op, ddp = (
        predict_step(replace(JOB, strategy=name), 8, 8).communication_seconds
        for name in ("fsdp-full", "fsdp-grad-op", "ddp")
    )
    assert full / ddp == pytest.approx(1.5, rel=0.02)
    assert grad_op / ddp == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("measured", [0.03, 0.2, 1.0])
def test_two_ranks_take_what_they_were_measured_to_take(measured):
    settled = settle_on_two(JOB, measured, 8)
    assert predict_step(settled, 2, 8).seconds == pytest.approx(measured, rel=1e-6)
    assert 0 <= settled.contention <= 1


def test_two_ranks_faster_than_the_model_never_run_in_less_than_no_time():
    settled = settle_on_two(JOB, 0.02, 8)
    steps = scale_out(settled, [2, 8, 64, 1024], batch=8192, is_weak=False)
    assert all(step.step.low > 0 and 0 <= step.exposed.low <= step.exposed.high <= 1 for step in steps)


def test_ranks_that_contradict_each_other_are_too_noisy():
    with pytest.raises(TooNoisy, match="too noisy to predict from: 2 ranks took 1"):
        settle_on_two(JOB, 0.001, 8)
    slow = replace(JOB, network=NetworkModel(inside=SLOW.scale(bandwidth=0.01)))
    least = predict_step(replace(slow, link_factor=0.01), 2, 8).seconds
    assert least > 0.1  # 160 MB beside 34 ms of compute, at a hundredth of the time that they take
    with pytest.raises(TooNoisy, match=f"their compute as measured on 1 rank takes {least * 1e3:.3g} ms"):
        settle_on_two(slow, 0.001, 8)


def test_noise_of_the_two_rank_step_reaches_every_size():
    """101 ms, known to a factor of 7.4 with 95 % confidence: of one to ten launches, Student's t and not a normal."""
    narrow, wide, few = (
        scale_out(
            settle_on_two(replace(JOB, known=replace(JOB.known, **errors)), 0.101, 32), [2, 8], batch=64, is_weak=False
        )
        for errors in (
            {"pair": 0.0},
            {"pair": math.log(7.4) / 1.96},
            {"pair": math.log(7.4) / 12.71, "freedom": {"pair": 1.0}},
        )
    )
    for before, after, alike in zip(narrow, wide, few, strict=True):
        assert after.step.value == before.step.value
        assert after.step.high / after.step.value > 1.5 * before.step.high / before.step.value
        assert 1 < alike.step.high / alike.step.value < after.step.high / after.step.value
    assert wide[0].dominant == "pair"


def test_a_line_through_two_batches_finds_what_is_fixed():
    phase = fit_line_by_batch({4: 0.5, 8: 0.9})
    assert (phase.fixed, phase.per_sample) == (pytest.approx(0.1), pytest.approx(0.1))


def test_a_batch_that_is_slower_in_half_has_no_negative_cost():
    phase = fit_line_by_batch({4: 1.0, 8: 0.9})
    assert (phase.fixed, phase.per_sample) == (0.9, 0)


def test_the_first_bucket_is_small():
    buckets = fill_buckets([Gradient(number / 10, 2 << 20) for number in range(20)])
    assert [round(bucket.payload_bytes / (1 << 20)) for bucket in buckets] == [2, 26, 12]
    assert buckets[0].ready_seconds == 0


@pytest.mark.parametrize(
    "change",
    [
        WhatIf(compression="fp16"),
        WhatIf(link=FAST),
        WhatIf(compute_factor=2.0),
        WhatIf(bucket_mb=1000.0),
        WhatIf(delay_seconds=0.1),
        WhatIf(slow_factor=1.5),
        WhatIf(accumulation=2),
    ],
)
def test_every_change_moves_the_step_the_way_it_should(change):
    before, after = (predict_step(job, 8, 8).seconds for job in (JOB, change_job(JOB, change)))
    is_slower = change.delay_seconds > 0 or change.slow_factor > 1 or change.bucket_mb is not None
    assert (after > before) == is_slower or change.accumulation == 2
    assert change.changes


def test_half_of_the_bytes_take_half_of_the_time():
    half, whole = (
        predict_step(change_job(JOB, WhatIf(dtype=dtype)), 8, 8).communication_seconds for dtype in ("bfloat16", "tf32")
    )
    assert whole / half == pytest.approx(2, rel=0.05)


def test_a_slow_rank_holds_up_others_and_not_itself():
    slow = change_job(JOB, WhatIf(slow_factor=1.5))
    assert predict_step(slow, 1, 8).seconds == predict_step(JOB, 1, 8).seconds
    assert predict_step(slow, 2, 8).seconds == pytest.approx(predict_step(JOB, 2, 8).seconds + 0.5 * 0.024)


def test_another_strategy_is_another_exchange():
    sharded = change_job(JOB, WhatIf(strategy="fsdp-full", num_units=4))
    assert (sharded.strategy, sharded.num_units) == ("fsdp-full", 4)
    with pytest.raises(UsageError, match="DDP communication hook"):
        change_job(JOB, WhatIf(strategy="fsdp2", compression="fp16"))


def test_the_interval_of_what_is_known_exactly_is_a_point():
    known = replace(JOB.known, compute=0, latency=0, bandwidth=0, contention=0, jitter=0, residual=0)
    (found,) = scale_out(replace(JOB, known=known), [8], batch=64, is_weak=False)
    assert found.step.low == pytest.approx(found.step.high)


def test_the_link_dominates_where_communication_does():
    (found,) = scale_out(replace(JOB, network=NetworkModel(inside=SLOW)), [8], batch=8, is_weak=False)
    assert found.dominant == "bandwidth"
    assert sum(found.shares.values()) == pytest.approx(1)


def test_ranks_that_share_cores_take_turns():
    shared = replace(JOB, core_seconds=0.01, network=NetworkModel(inside=SLOW, cores=2))
    assert predict_step(shared, 2, 8).seconds == predict_step(JOB, 2, 8).seconds
    assert predict_step(shared, 8, 8).crowding_seconds == pytest.approx(0.03)
    assert predict_step(replace(JOB, core_seconds=0.01), 8, 8).crowding_seconds == 0


def test_less_than_a_sample_per_rank_is_refused():
    with pytest.raises(UsageError, match=r"0\.5 samples"):
        predict_step(JOB, 16, 0.5)


@pytest.mark.parametrize(
    "wrong", [{"slow_factor": 0.5}, {"compression": "zip"}, {"batch": 0}, {"delay_seconds": -1}, {"strategy": "dp"}]
)
def test_changes_that_cannot_be_are_refused(wrong):
    with pytest.raises(UsageError):
        WhatIf(**wrong)


def test_one_measured_batch_says_what_as_many_samples_or_fewer_need():
    need = fit_need({4: 100.0})
    assert need is not None
    assert [need.find_bytes(batch) for batch in (2, 4, 5)] == [100, 100, None]


def test_two_measured_batches_give_a_line_to_any_number():
    need = fit_need({2: 10.0, 4: 14.0})
    assert need is not None
    assert (need.largest_batch, need.find_bytes(3), need.find_bytes(8)) == (4, pytest.approx(12), pytest.approx(22))
    assert fit_need({}) is None


def test_inputs_are_known_as_well_as_is_assumed_where_nothing_says_it():
    assert InputErrors() == InputErrors(
        compute=0.02, latency=0.2, bandwidth=0.1, contention=0.3, jitter=0.5, residual=0.5, pair=0.0, freedom={}
    )
    assert ScaledJob(phases={}, gradients=JOB.gradients, network=JOB.network).num_units == 12


@pytest.mark.parametrize(("num_ranks", "beyond_two"), [(1, 0.0), (2, 0.0), (3, 1 / (2 * math.sqrt(math.pi)))])
def test_ranks_wait_for_the_slowest_of_them(num_ranks, beyond_two):
    """The largest of two normal numbers is 1/√π on average, of three 3/(2√π); two are in the residual."""
    parts = predict_step(replace(PERFECT, jitter_ratio=0.1, accumulation=2), num_ranks, 8)
    assert parts.straggler_seconds == pytest.approx(0.1 * (0.008 + 0.016) * beyond_two)


@pytest.mark.parametrize(("batch", "passes"), [(2, 1), (8, 3), (9, 3), (10, 4)])
def test_a_batch_beyond_a_pass_takes_more_passes_and_one_optimizer_step(batch, passes):
    phases = {
        "input": PerSampleCost(fixed=0.1),
        "forward": PerSampleCost(fixed=1.0, per_sample=1.0),
        "backward": PerSampleCost(fixed=2.0),
        "optimizer": PerSampleCost(fixed=5.0),
    }
    parts = predict_step(replace(PERFECT, phases=phases, pass_samples=3.0), 1, batch)
    assert (parts.input_seconds, parts.forward_seconds) == pytest.approx((0.1 * passes, passes + batch))
    assert (parts.backward_seconds, parts.optimizer_seconds) == pytest.approx((2.0 * passes, 5.0))


@pytest.mark.parametrize(
    ("is_weak", "batch", "step", "throughput", "speedup"),
    [(False, 64, 0.1, 64 / 0.1, 0.202 / 0.1), (True, 8, 0.076, 4 * 8 / 0.076, 4 * 0.034 / 0.076)],
    ids=["strong", "weak"],
)
def test_four_ranks_divide_a_batch_or_have_one_each(is_weak, batch, step, throughput, speedup):
    """3 ms a sample, 10 ms of optimizer, and 42 ms that two ranks took beyond that."""
    instant = NetworkModel(inside=LinkSpeed(latency_seconds=0, bytes_per_second=1e300))
    exact = InputErrors(compute=0, latency=0, bandwidth=0, contention=0, jitter=0, residual=0)
    job = replace(JOB, network=instant, residual_seconds=0.042, known=exact)
    (found,) = scale_out(job, [4], batch=batch, is_weak=is_weak)
    assert found.step.value == pytest.approx(step)
    assert found.throughput.value == pytest.approx(throughput)
    assert found.speedup.value == pytest.approx(speedup)
    assert found.efficiency.value == pytest.approx(speedup / 4)
    assert (found.speedup.low, found.speedup.high) == pytest.approx((speedup, speedup))


LATE = replace(
    JOB, phases={"backward": PerSampleCost(fixed=1.0)}, gradients=(Gradient(1.0, 0.25e9),),
    network=NetworkModel(inside=LinkSpeed(latency_seconds=0, bytes_per_second=1e9)),
)  # fmt: skip
"""Backward of 1 s, then a message of 0.25 s."""
BESIDE = replace(LATE, gradients=(Gradient(0.5, 0.25e9),))
"""The same message halfway through: contention makes backward up to 0.25 s longer."""


@pytest.mark.parametrize(
    ("job", "measured", "fitted"),
    [
        (BESIDE, 1.1, Fitted(contention=0.4)),
        (BESIDE, 1.25, Fitted(contention=1.0)),
        (BESIDE, 1.5, Fitted(contention=1.0, residual_seconds=0.25)),
        (LATE, 1.1, Fitted(link_factor=0.4)),
        (LATE, 0.9, Fitted(link_factor=0.01, compute_factor=0.9 - 0.0025)),
        (LATE, 0.005, Fitted(link_factor=0.01, compute_factor=0.01)),
    ],
)
def test_two_ranks_show_contention_then_a_residual_or_a_faster_link_then_faster_compute(job, measured, fitted):
    assert _fit_pair(job, measured, 8) == pytest.approx(fitted, abs=1e-5)


def test_two_ranks_that_compute_in_less_than_half_of_the_time_are_too_noisy():
    assert settle_on_two(LATE, 0.503, 8).compute_factor == pytest.approx(0.5005, abs=1e-5)
    with pytest.raises(TooNoisy):
        settle_on_two(LATE, 0.502, 8)


def test_draws_never_change_and_are_students_where_launches_were_few():
    table = _draw_table(math.inf)
    assert table.shape == (400, 7)
    assert list(table[3]) == list(np.random.default_rng((20190417, 3)).standard_normal(7))
    cauchy = math.tan(math.pi * (NormalDist().cdf(table[3, 0]) - 0.5))  # Student's t of one degree
    assert _draw_table(1.0)[3, 0] == pytest.approx(cauchy)


def test_a_draw_scales_what_its_group_is_about():
    network = NetworkModel(inside=SLOW, between=SLOW.scale(latency=2.0), byte_core_seconds=2.0)
    job = replace(JOB, network=network, contention=0.5, jitter_ratio=0.3, residual_seconds=0.2)
    drawn, standard = _draw(job, 5, GROUPS), dict(zip(GROUPS, _draw_table(math.inf)[5], strict=True))
    factor = {group: math.exp(getattr(job.known, group) * standard[group]) for group in GROUPS}
    link = {"latency": factor["latency"], "bandwidth": factor["bandwidth"]}
    assert (drawn.network.inside, drawn.network.between) == (SLOW.scale(**link), network.between.scale(**link))
    assert drawn.network.byte_core_seconds == pytest.approx(2.0 / factor["bandwidth"])
    assert drawn.phases["forward"].per_sample == pytest.approx(0.001 * factor["compute"])
    assert drawn.contention == pytest.approx(min(1.0, 0.5 * factor["contention"]))
    assert (drawn.jitter_ratio, drawn.residual_seconds) == pytest.approx(
        (0.3 * factor["jitter"], 0.2 * factor["residual"])
    )
    assert _draw(job, 5, ()) == job
    assert _draw(replace(job, drawn_fits=(Fitted(),) * 5 + (Fitted(link_factor=0.5),)), 5, ("pair",)).link_factor == 0.5


def test_no_draw_is_further_off_than_ten_thousand_times():
    job = replace(JOB, known=InputErrors(compute=1e9))
    found = {round(_find_factors(job, number, ("compute",))["compute"], 9) for number in range(8)}
    assert found == {1e-4, 1e4}


def test_ranks_wait_for_the_cores_of_their_node_but_not_in_a_bubble():
    job = replace(JOB, core_seconds=0.01, network=NetworkModel(inside=SLOW, cores=2, ranks_per_node=6))
    assert _find_crowding(job, 12, 0.0) == pytest.approx(0.02)  # 6 ranks on 2 cores wait twice their own time
    assert _find_crowding(job, 4, 0.0) == pytest.approx(0.01)
    assert _find_crowding(job, 12, 0.005) == pytest.approx(0.015)
    assert (_find_crowding(job, 12, 0.05), _find_crowding(job, 1, 0.0)) == (0, 0)


def test_a_drawn_step_of_two_ranks_is_fitted_again():
    """1 s and 0.25 s of link: 1.1 s, known to 1 %, drawn a little longer or shorter."""
    settled = settle_on_two(replace(LATE, known=replace(LATE.known, pair=0.01)), 1.1, 8)
    standard = _draw_table(math.inf)[:4, GROUPS.index("pair")]
    links = [(1.1 * math.exp(0.01 * number) - 1) / 0.25 for number in standard]
    assert [fit.link_factor for fit in settled.drawn_fits[:4]] == pytest.approx(links, abs=1e-5)
    assert len(settled.drawn_fits) == 400

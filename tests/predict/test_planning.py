"""Whole plans: ranked layouts, totals, sweeps, the linear rule beside them."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from scalelab.analysis.estimate import enclose
from scalelab.analysis.growth import SECONDS_PER_DAY
from scalelab.errors import UsageError
from scalelab.predict.devices import find_device
from scalelab.predict.layout_cost import Efficiency, time_step
from scalelab.predict.layouts import Asked, Layout, PlannedJob, list_layouts
from scalelab.predict.planning import (
    GOODPUT,
    SmallRun,
    compare_linear,
    enclose_step,
    find_last_paying,
    is_checked,
    list_obstacles,
    make_plan,
    rank_divisions,
    sum_training,
    sweep_devices,
)
from scalelab.predict.transformer_shape import GPT2_SMALL, LLAMA3_8B, choose_shape

JOB = PlannedJob(model=LLAMA3_8B, device=find_device("a100-80gb"), global_batch=256)


@pytest.fixture(scope="module")
def plan():
    return make_plan(JOB, 64)


def test_layouts_are_ranked_and_fit(plan):
    steps = [planned.step.value for planned in plan.ranked]
    assert steps == sorted(steps)
    assert all(planned.footprint.device_bytes <= JOB.device.memory_bytes for planned in plan.ranked)
    assert plan.num_fitting >= len(plan.ranked)


def test_intervals_hold_their_values(plan):
    for planned in plan.ranked:
        assert planned.step.low < planned.step.value < planned.step.high
        assert 0 < planned.mfu.low < planned.mfu.high < 1


def test_a_device_that_was_not_measured_is_known_less_well(plan):
    other = make_plan(replace(JOB, device=find_device("mi300x")), 64, num_ranked=1)
    widths = [step.high / step.low for step in (plan.best.step, other.best.step)]
    assert widths[1] > widths[0]


def test_gathers_over_more_replicas_than_were_checked_are_known_less_well():
    def find_width(num_devices):
        job = replace(JOB, global_batch=num_devices)
        step = enclose_step(job, Layout(data=num_devices, zero=3, checkpointing="full"), Efficiency())
        return step.high / step.value

    assert is_checked(Layout(data=128, zero=3))
    assert is_checked(Layout(data=1024, zero=1))
    assert not is_checked(Layout(data=256, zero=3))
    assert find_width(1024) > 1.3 * find_width(128)


@pytest.mark.parametrize(
    "layout",
    [Layout(data=256, zero=3, checkpointing="full"), Layout(pipeline=4, data=64)],
    ids=["ZeRO-3", "plain pipeline"],
)
def test_an_interval_reaches_up_to_deepspeed_until_the_software_is_known(layout):
    unknown, by_torch, by_deepspeed = (
        enclose_step(replace(JOB, is_deepspeed=known), layout, Efficiency()) for known in (None, False, True)
    )
    assert (unknown.value, unknown.low) == (by_torch.value, by_torch.low)
    assert by_torch.high < by_deepspeed.high
    assert unknown.high == by_deepspeed.high
    assert by_deepspeed.value > by_torch.value


def test_deepspeed_has_no_rounds_and_does_not_run_on_tpus():
    rounds = Layout(pipeline=4, data=64, interleave=2)
    known = replace(JOB, is_deepspeed=False)
    assert enclose_step(JOB, rounds, Efficiency()) == enclose_step(known, rounds, Efficiency())
    plain = replace(rounds, interleave=1)
    pods = [replace(job, device=find_device("tpu-v5p")) for job in (JOB, known)]
    assert enclose_step(pods[0], plain, Efficiency()) == enclose_step(pods[1], plain, Efficiency())


def test_what_deepspeed_takes_scatters_more():
    """As the rows that its numbers were found on do: here the remainder, and there the links, are all that varies."""
    endless = replace(JOB.device, peaks={"bfloat16": 1e40}, memory_rate=1e40, link_rate=1e40)
    job = replace(JOB, device=endless, is_deepspeed=True)
    shares = Efficiency(launch_seconds=0.0, link_latency=0.0, node_latency=0.0)
    gathered = enclose_step(job, Layout(data=64, zero=3), shares)
    plain = enclose_step(replace(job, is_deepspeed=False), Layout(data=64, zero=0), shares)
    widths = [np.log(step.high / step.low) / (2 * 1.2816) for step in (plain, gathered)]
    assert widths == pytest.approx([np.hypot(0.30, 0.08), np.hypot(0.45, 0.08)], rel=0.15)
    launches = replace(job, device=replace(endless, node_rate=1e40))
    staged = [
        enclose_step(
            replace(launches, is_deepspeed=known),
            Layout(pipeline=4, data=16),
            Efficiency(link_latency=0.0, node_latency=0.0),
        )
        for known in (False, True)
    ]
    widths = [np.log(step.high / step.low) / (2 * 1.2816) for step in staged]
    assert widths == pytest.approx([np.hypot(0.30, 0.08), np.hypot(0.30, 0.14)], rel=0.15)


def test_totals_follow_from_the_step(plan):
    totals = sum_training(plan, 1e12)
    step = plan.best.step.value
    assert totals.num_steps == pytest.approx(1e12 / (256 * 8192))
    assert totals.days.value == pytest.approx(totals.num_steps * step / SECONDS_PER_DAY / GOODPUT)
    assert totals.days.high / totals.days.low > plan.best.step.high / plan.best.step.low
    assert totals.device_hours.value == pytest.approx(totals.days.value * 24 * 64)
    assert totals.kilowatt_hours is not None
    assert totals.kilowatt_hours.value == pytest.approx(totals.device_hours.value * 0.4)


def test_a_run_whose_layout_was_searched_may_take_longer_than_the_fastest(plan):
    searched = sum_training(plan, 1e12)
    given = sum_training(replace(plan, num_fitting=1), 1e12)
    assert (searched.days.value, searched.days.low) == (given.days.value, given.days.low)
    assert searched.days.high == pytest.approx(1.36 * given.days.high)
    assert given.days.high == pytest.approx(plan.best.step.high / 0.8 * given.num_steps / SECONDS_PER_DAY)
    assert given.days.low == pytest.approx(plan.best.step.low / 0.97 * given.num_steps / SECONDS_PER_DAY)


def test_what_is_unknown_of_a_device_stays_unknown(plan):
    bare = replace(JOB, device=replace(JOB.device, watts=None, price=None))
    totals = sum_training(make_plan(bare, 64, num_ranked=1), 1e12)
    assert (totals.kilowatt_hours, totals.dollars) == (None, None)


def test_too_large_a_model_is_refused_with_what_it_needs():
    with pytest.raises(UsageError, match=r"nothing fits: the smallest layout on 8 devices .* needs .*TB per device"):
        make_plan(replace(JOB, model=choose_shape(1e12)), 8)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (Asked(tensor=5), "multiple of --tensor × --pipeline"),
        (Asked(pipeline=64), "32 layers cannot be split over pipeline 64"),
        (Asked(micro_batch=7), "a global batch of 256 cannot be split"),
        (Asked(tensor=16, pipeline=8), "multiple of --tensor × --pipeline"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_the_reason(asked, reason):
    with pytest.raises(UsageError, match=reason):
        make_plan(JOB, 64, asked)


def test_more_devices_are_faster_until_they_stop_paying():
    job = replace(JOB, model=GPT2_SMALL, global_batch=512)
    plans, refused = sweep_devices(job, [1, 2, 4, 8, 32, 128, 512])
    assert not refused
    steps = [plan.best.step.value for plan in plans]
    assert steps[3] < steps[0] / 4
    last = find_last_paying(plans)
    assert last is not None
    assert 4 <= last < 512


def test_sizes_at_which_nothing_fits_are_told():
    plans, refused = sweep_devices(replace(JOB, model=choose_shape(1e12), global_batch=2048), [8, 2048])
    assert [plan.num_devices for plan in plans] == [2048]
    assert "nothing fits" in refused[8]


def test_the_factors_between_rule_and_plan_multiply_exactly(plan):
    totals = sum_training(plan, 1e13)
    found = compare_linear(plan, totals, SmallRun(tokens_per_second=32582.4, num_parameters=124439808), 1e13)
    assert found.linear.days.value / totals.days.value == pytest.approx(found.ratio)


def test_usual_sizes_that_do_not_work_are_listed_with_the_reason():
    job = PlannedJob(model=replace(GPT2_SMALL, num_heads=4), device=find_device("a100-80gb"), global_batch=128)
    found = list_obstacles(job, 128)
    assert set(found) == {f"tensor {size}" for size in (8, 16, 32, 64, 128)} | {
        f"pipeline {size}" for size in (16, 32, 64, 128)
    }
    assert found["tensor 64"] == "4 heads cannot be split over tensor 64"
    wide = replace(job, model=replace(job.model, width=1024, num_heads=32))
    assert list_obstacles(wide, 16)["tensor 16"] == "exceeds the 8 devices of a node; not searched"
    assert "tensor 8" not in list_obstacles(wide, 16)


def test_a_rule_that_starts_from_nothing_is_refused():
    with pytest.raises(UsageError, match="--measured-rate must be"):
        SmallRun(tokens_per_second=0, num_parameters=1e8)


def test_every_division_is_ranked_by_its_fastest_layout():
    job, asked = replace(JOB, model=GPT2_SMALL, global_batch=16), Asked(micro_batch=None)
    every = [
        (time_step(job, layout, Efficiency()).seconds, (layout.tensor, layout.pipeline, layout.data, layout.zero))
        for layout in list_layouts(job, 4, asked)
    ]
    found = rank_divisions(job, 4, asked, 1e15)
    divisions = [(layout.tensor, layout.pipeline, layout.data, layout.zero) for layout in found]
    fastest = {division: min(seconds for seconds, other in every if other == division) for _, division in every}
    assert [time_step(job, layout, Efficiency()).seconds for layout in found] == sorted(fastest.values())
    assert sorted(divisions) == sorted(fastest)
    assert rank_divisions(job, 4, asked, 1.0) == []


def test_the_least_sizes_that_do_not_work_are_listed_too():
    job = replace(JOB, model=replace(GPT2_SMALL, num_heads=3, num_layers=1), global_batch=128)
    sizes = (2, 4, 8, 16, 32, 64, 128)
    assert set(list_obstacles(job, 128)) == {f"{name} {size}" for name in ("tensor", "pipeline") for size in sizes}
    assert set(list_obstacles(job, 6)) == {"tensor 2", "pipeline 2"}


def test_an_interval_is_that_of_200_draws_of_a_seed():
    """Launches alone take time: they are drawn with 30 %, as the last of five shares, and a remainder of 8 %."""
    endless = replace(JOB.device, peaks={"bfloat16": 1e40}, memory_rate=1e40, link_rate=1e40, node_rate=1e40)
    job = replace(JOB, device=endless, is_deepspeed=False)
    shares = Efficiency(link_latency=0.0, node_latency=0.0)
    normal = np.random.default_rng(20190417).standard_normal((200, 6))
    alone = time_step(job, Layout(data=64), shares).seconds
    drawn = alone * np.exp(0.30 * normal[:, 4] + 0.08 * normal[:, 5])
    found, expected = enclose_step(job, Layout(data=64), shares), enclose(alone, list(drawn))
    assert (found.low, found.value, found.high) == pytest.approx((expected.low, expected.value, expected.high))


@pytest.mark.parametrize(
    ("steps", "last"),
    [
        ({1: 12.0, 2: 8.0, 8: 3.2, 16: 2.2, 32: 1.0}, 8),  # gains of exactly half: 1.5 and 2.5, then less than 1.5
        ({1: 12.0, 2: 8.1}, 1),
        ({4: 1.0}, 4),
        ({}, None),
    ],
)
def test_a_size_pays_if_it_gains_half_of_what_it_adds(steps, last):
    plans = [
        SimpleNamespace(num_devices=count, best=SimpleNamespace(step=SimpleNamespace(value=seconds)))
        for count, seconds in steps.items()
    ]
    assert find_last_paying(plans) == last


def test_two_stages_are_a_pipeline():
    assert is_checked(Layout(pipeline=2, data=256, zero=3))
    staged = Layout(pipeline=2, data=32)
    unknown, known = (enclose_step(replace(JOB, is_deepspeed=told), staged, Efficiency()) for told in (None, False))
    assert unknown.high > known.high

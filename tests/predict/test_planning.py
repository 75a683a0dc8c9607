"""Whole plans: ranked layouts, totals, sweeps, the linear rule beside them."""

from dataclasses import replace

import pytest

from scalelab.analysis.growth import SECONDS_PER_DAY
from scalelab.errors import UsageError
from scalelab.predict.devices import find_device
from scalelab.predict.layout_cost import Efficiency
from scalelab.predict.layouts import Asked, Layout, PlannedJob
from scalelab.predict.planning import (
    GOODPUT,
    SmallRun,
    compare_linear,
    enclose_step,
    find_last_paying,
    is_checked,
    list_obstacles,
    make_plan,
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


def test_totals_follow_from_the_step(plan):
    totals = sum_training(plan, 1e12)
    step = plan.best.step.value
    assert totals.num_steps == pytest.approx(1e12 / (256 * 8192))
    assert totals.days.value == pytest.approx(totals.num_steps * step / SECONDS_PER_DAY / GOODPUT)
    assert totals.days.high / totals.days.low > plan.best.step.high / plan.best.step.low
    assert totals.device_hours.value == pytest.approx(totals.days.value * 24 * 64)
    assert totals.kilowatt_hours is not None
    assert totals.kilowatt_hours.value == pytest.approx(totals.device_hours.value * 0.4)


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

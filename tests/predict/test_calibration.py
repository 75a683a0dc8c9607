"""A plan calibrated by one rank and a link: what went in comes out, and shared cores cost what they must."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scalelab.errors import UsageError
from scalelab.predict.calibration import MeasuredRank, calibrate, correlate_ranks
from scalelab.predict.layout_cost import Efficiency, time_step
from scalelab.predict.layouts import Layout
from scalelab.predict.network_model import LinkSpeed
from scalelab.predict.transformer_shape import GPT2_TINY

LINK = LinkSpeed(latency_seconds=1e-5, bytes_per_second=1e9)


def make_rank(**fields: object) -> MeasuredRank:
    known = {"steps": {8: 0.2, 1: 0.04}, "optimizer_seconds": 0.005, "link": LINK}
    return MeasuredRank(**(known | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(("samples", "seconds"), [(8, 0.2), (1, 0.04)])
def test_one_rank_takes_as_long_as_it_was_measured(samples: int, seconds: float) -> None:
    found = calibrate(GPT2_TINY, make_rank(), dtype="float32", global_batch=samples)
    assert found.predict(Layout(micro_batch=samples)).value == pytest.approx(seconds, rel=1e-3)


def test_replicas_share_the_batch_and_split_layers_the_products() -> None:
    found = calibrate(GPT2_TINY, make_rank(steps={8: 0.2}), dtype="float32", global_batch=8)
    assert 0.05 < found.predict(Layout(data=2, micro_batch=4)).value < 0.2
    assert 0.05 < found.predict(Layout(tensor=2, micro_batch=8)).value < 0.2


def test_a_slower_link_makes_every_layout_slower() -> None:
    slow = LinkSpeed(latency_seconds=1e-3, bytes_per_second=1e7)
    fast, late = (calibrate(GPT2_TINY, make_rank(link=link), dtype="float32", global_batch=8) for link in (LINK, slow))
    for layout in (Layout(data=2, micro_batch=4), Layout(tensor=2, micro_batch=8), Layout(pipeline=2, micro_batch=2)):
        assert late.predict(layout).value > fast.predict(layout).value


def test_ranks_that_share_cores_wait_and_the_bubble_is_not_counted_twice() -> None:
    alone, shared = (
        calibrate(GPT2_TINY, make_rank(num_cores=cores), dtype="float32", global_batch=8) for cores in (None, 2.0)
    )
    replicas, staged = Layout(data=4, micro_batch=2), Layout(pipeline=4, micro_batch=1)
    cost = alone.time(replicas)
    computed = cost.products + cost.moves + cost.optimizer
    assert shared.find_crowding(replicas) == pytest.approx(computed)
    assert alone.find_crowding(replicas) == 0
    assert shared.find_crowding(staged) < shared.time(staged).products


def test_a_rank_that_was_not_measured_is_refused() -> None:
    with pytest.raises(UsageError, match="one rank was not measured"):
        calibrate(GPT2_TINY, make_rank(steps={}), dtype="float32", global_batch=8)


def test_rank_correlation_of_the_same_order_is_one() -> None:
    assert correlate_ranks([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert correlate_ranks([1, 2, 3], [30, 20, 10]) == pytest.approx(-1)
    assert correlate_ranks([1, 2], [1, 2]) is None


def test_two_values_among_three_have_a_rank_correlation() -> None:
    assert correlate_ranks([1, 1, 2], [3, 3, 4]) == pytest.approx(1.0)
    assert correlate_ranks([1, 1, 2], [4, 4, 3]) == pytest.approx(-1.0)
    assert correlate_ranks([1, 2], [3, 4]) is None
    assert correlate_ranks([1, 1, 1], [2, 3, 4]) is correlate_ranks([2, 3, 4], [1, 1, 1]) is None


def test_what_was_measured_takes_the_place_of_a_devices_numbers() -> None:
    """Nothing but the measured rates, whole; one size of batch says nothing of tiles."""
    found = calibrate(GPT2_TINY, make_rank(steps={8: 0.2}), dtype="float32", global_batch=8)
    assert found.efficiency == Efficiency(
        gemm=1.0, tile=0.0, depth=0.0, memory=1.0, link=1.0, link_latency=1e-5, node=1.0, node_latency=1e-5,
        launch_seconds=0.0,
    )  # fmt: skip
    device = found.job.device
    assert (device.link_rate, device.node_rate, device.per_node) == (1e9, 1e9, 2**20)
    assert (found.job.is_deepspeed, list(device.peaks)) == (False, ["float32"])


@pytest.mark.parametrize(("optimizer", "moves"), [(0.005, None), (0.15, 0.5 * (0.2 - 0.15))])
def test_the_memory_rate_is_the_optimizers_unless_moves_would_take_half_of_the_rest(
    optimizer: float, moves: float | None
) -> None:
    rank = make_rank(steps={8: 0.2}, optimizer_seconds=optimizer)
    cost = calibrate(GPT2_TINY, rank, dtype="float32", global_batch=8).time(Layout(micro_batch=8))
    if moves is None:
        assert cost.optimizer == pytest.approx(optimizer)
    else:
        assert cost.moves == pytest.approx(moves)
        assert cost.optimizer < optimizer


def test_a_pass_of_few_samples_that_takes_longer_than_one_of_many_has_the_largest_tile() -> None:
    found = calibrate(GPT2_TINY, make_rank(steps={8: 0.2, 1: 0.25}), dtype="float32", global_batch=8)
    assert found.efficiency.tile == 1e6
    cheap = calibrate(GPT2_TINY, make_rank(steps={8: 0.2, 1: 0.01}), dtype="float32", global_batch=8)
    assert cheap.efficiency.tile == 0


def test_waiting_for_cores_comes_on_top_of_the_step() -> None:
    alone, shared = (
        calibrate(GPT2_TINY, make_rank(num_cores=cores), dtype="float32", global_batch=8) for cores in (None, 2.0)
    )
    layout = Layout(data=4, micro_batch=2)
    more = shared.predict(layout).value - alone.predict(layout).value
    assert more == pytest.approx(shared.find_crowding(layout)) != 0


def test_a_step_that_its_optimizer_fills_was_not_measured() -> None:
    with pytest.raises(UsageError, match="one rank was not measured"):
        calibrate(GPT2_TINY, make_rank(steps={8: 0.2}, optimizer_seconds=0.2), dtype="float32", global_batch=8)


@pytest.mark.parametrize("seconds", [0.11, 0.13, 0.17, 0.2, 0.23, 0.31, 0.37, 0.43, 0.53, 0.71, 0.97, 1.3])
def test_one_size_of_batch_says_nothing_of_tiles(seconds: float) -> None:
    """Whatever rounding leaves between the fitted step and the measured one."""
    assert calibrate(GPT2_TINY, make_rank(steps={8: seconds}), dtype="float32", global_batch=8).efficiency.tile == 0


@pytest.mark.parametrize("tile", [0.5, 5.0, 100.0])
def test_a_tile_that_was_there_is_found(tile: float) -> None:
    known = calibrate(GPT2_TINY, make_rank(steps={8: 0.2}), dtype="float32", global_batch=8)
    shares = replace(known.efficiency, tile=tile)
    steps = {
        samples: time_step(replace(known.job, global_batch=samples), Layout(micro_batch=samples), shares).seconds
        for samples in (1, 8)
    }
    found = calibrate(GPT2_TINY, make_rank(steps=steps), dtype="float32", global_batch=8)
    assert found.efficiency.tile == pytest.approx(tile, rel=0.02)
    assert found.job.device.peaks["float32"] == pytest.approx(known.job.device.peaks["float32"], rel=1e-3)


def test_an_update_that_took_no_time_takes_a_billionth_of_a_second() -> None:
    rank = make_rank(steps={8: 0.2}, optimizer_seconds=0.0)
    cost = calibrate(GPT2_TINY, rank, dtype="float32", global_batch=8).time(Layout(micro_batch=8))
    assert cost.optimizer == pytest.approx(1e-9, rel=1e-6)


def test_a_step_that_no_device_could_compute_is_refused() -> None:
    rank = make_rank(steps={8: 1e-12}, optimizer_seconds=1e-13)
    with pytest.raises(UsageError, match="faster than its memory rate allows"):
        calibrate(GPT2_TINY, rank, dtype="float32", global_batch=8)

"""Tables of scaling, extrapolated."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelab.errors import UsageError
from scalelab.predict.extrapolate import (
    LAWS,
    Tuning,
    extrapolate,
    find_excess,
    find_kind,
    find_misses,
    find_scale,
    fit_growth,
    follow_ring,
    follow_tree,
    predict_stretch,
    stay_linear,
    weigh_laws,
)
from scalelab.predict.scaling_table import ScalingSeries, find_doubts


def make_series(throughput, **others):
    return ScalingSeries(label="job", throughput=throughput, **others)


def test_perfect_scaling_goes_on_but_for_the_creep():
    (found,) = extrapolate(make_series({1: 10.0, 2: 20.0}), [4], Tuning(creep=0.0))
    assert found.throughput.value == pytest.approx(40)
    assert found.efficiency.value == pytest.approx(1)


def test_a_ring_is_recognised_by_what_it_sends():
    known = {count: 1 + 0.2 * (count - 1) / count for count in (1, 2, 4, 8)}
    assert follow_ring(known, 64) == pytest.approx(1 + 0.2 * 63 / 64)
    weights = weigh_laws(known)
    assert max(weights, key=lambda name: weights[name]) == "ring"


def test_a_tree_adds_the_same_with_every_doubling():
    known = {count: 1 + 0.05 * power for power, count in enumerate((1, 2, 4, 8, 16))}
    assert follow_tree(known, 64) == pytest.approx(1.30)
    weights = weigh_laws(known)
    assert max(weights, key=lambda name: weights[name]) == "tree"


@pytest.mark.parametrize("name", LAWS)
def test_every_law_goes_through_the_last_point(name):
    known = {1: 1.0, 2: 1.1, 4: 1.3}
    assert LAWS[name](known, 4) == pytest.approx(1.3)


def test_two_points_leave_the_prior():
    assert weigh_laws({1: 1.0, 2: 1.1}) == pytest.approx({"linear": 0.41, "ring": 0.37, "tree": 0.22})


def test_a_size_that_is_known_is_itself():
    (found,) = extrapolate(make_series({1: 10.0, 2: 17.0}), [2])
    assert found.throughput.low == found.throughput.high == pytest.approx(17)


@given(st.floats(0.4, 1.05), st.integers(3, 4096))
def test_efficiency_never_grows_and_the_interval_holds_the_value(efficiency, ranks):
    (found,) = extrapolate(make_series({1: 1.0, 2: 2 * efficiency}), [ranks])
    assert found.efficiency.value <= efficiency + 1e-9
    assert found.throughput.low <= found.throughput.value <= found.throughput.high


def test_leaving_a_node_costs_a_step():
    within, beyond = extrapolate(make_series({1: 1.0, 2: 2.0}), [8, 16], Tuning(creep=0.0))
    assert within.efficiency.value == pytest.approx(1)
    assert beyond.efficiency.value == pytest.approx(1 / 1.02)
    (far,) = extrapolate(make_series({8: 8.0, 16: 16.0}), [32], Tuning(creep=0.0))
    assert far.efficiency.value == pytest.approx(1)


def test_the_interval_widens_with_the_distance():
    near, far = extrapolate(make_series({1: 1.0, 2: 1.8}), [4, 64])
    assert far.efficiency.high / far.efficiency.low > near.efficiency.high / near.efficiency.low


def test_the_published_epochs_on_four_devices_follow_from_one_and_two():
    """R2: batch 32, 128 and 512; times of the same epoch."""
    for one, two, four in ((23.550, 16.164, 9.060), (18.311, 9.849, 5.023), (19.704, 10.012, 5.160)):
        series = make_series({1: 1 / one, 2: 1 / two}, is_time=True)
        (found,) = extrapolate(series, [4])
        assert 1 / found.throughput.value == pytest.approx(four, rel=0.05)
        assert found.throughput.holds(1 / four)


def test_super_linear_jumps_and_impossible_utilization_are_doubted():
    jump = make_series({32: 100.0, 64: 245.0})
    (doubt,) = find_doubts(jump)
    assert doubt.gain == pytest.approx(0.225)
    (doubt,) = find_doubts(make_series({1: 1.0, 2: 2.0}), {2: 1.35})
    assert doubt.utilization == 1.35
    assert find_doubts(make_series({1: 1.0, 2: 1.9})) == []


def test_a_single_size_says_nothing():
    with pytest.raises(UsageError, match="one size"):
        extrapolate(make_series({8: 1.0}), [16])


@pytest.mark.parametrize("throughput", [{1: 0.0}, {0: 1.0}, {1: float("nan")}])
def test_what_is_no_throughput_is_refused(throughput):
    with pytest.raises(UsageError):
        make_series(throughput)


def test_linear_takes_the_nearest_smaller_size():
    assert stay_linear({1: 1.0, 2: 1.2, 8: 1.5}, 4) == 1.2


def test_intervals_widen_with_every_doubling_by_what_the_tuning_says():
    known = {1: 1.0, 2: 1.1}
    excess = math.log(1.1)
    assert find_excess(known) == pytest.approx(excess)
    for doublings in (1, 2, 4):
        scale = math.sqrt(0.002**2 + (0.012 * doublings) ** 2 + (0.43 * excess * math.sqrt(doublings)) ** 2)
        assert find_scale(known, doublings) == pytest.approx(scale)
        better = {1: 1.65, 2: 1.65, 4: 1.25}[doublings] * scale
        stays = Tuning(node_tree=0.0)
        found = predict_stretch(known, 2 * 2**doublings, {"linear": 1.0}, stays)
        assert math.log(found.high / found.value) == pytest.approx(4.9 * scale)
        assert math.log(found.value / found.low) == pytest.approx(better)


def test_leaving_a_node_gives_half_the_weight_to_the_tree_and_its_spread_to_the_interval():
    known = {1: 1.0, 2: 1.1}
    inside, beyond = (predict_stretch(known, ranks, {"linear": 1.0}) for ranks in (8, 16))
    assert inside.value == pytest.approx(1.1 * (1 + 2 * 0.007))
    assert beyond.value == pytest.approx((1.1 + 1.4) / 2 * 1.02 * (1 + 3 * 0.007))
    scale = math.hypot(find_scale(known, 3.0), math.log(1.4 / 1.1) / 2)
    assert math.log(beyond.high / beyond.value) == pytest.approx(4.9 * scale)


def test_a_table_that_says_its_node_moves_the_step():
    known = {1: 1.0, 2: 1.0, 4: 1.01}
    four, eight = (predict_stretch(known, 8, {"linear": 1.0}, node_size=size) for size in (4, 8))
    assert four.value > 1.019 * eight.value


def test_from_three_sizes_on_what_the_laws_missed_widens_the_interval():
    smooth, rough = {1: 1.0, 2: 1.1, 4: 1.1}, {1: 1.0, 2: 1.4, 4: 1.1}
    assert find_excess(smooth) == find_excess(rough)
    assert find_scale(rough, 1.0) > 2 * find_scale(smooth, 1.0)


def test_a_size_is_near_costly_or_far():
    cheap, costly = {1: 1.0, 2: 1.05}, {1: 1.0, 2: 1.06}
    assert [find_kind(cheap, doublings) for doublings in (1.0, 2.99, 3.0)] == ["near", "near", "far"]
    assert [find_kind(costly, doublings) for doublings in (1.0, 2.99, 3.0)] == ["costly", "costly", "far"]


def test_leaving_a_node_and_every_doubling_beyond_the_last_size_stretch():
    known = {1: 1.0, 8: 1.0}
    assert predict_stretch(known, 4, {"linear": 1.0}).value == pytest.approx(1.0)
    assert predict_stretch(known, 16, {"linear": 1.0}).value == pytest.approx(1.007 * 1.02)
    assert predict_stretch({1: 1.0, 16: 1.0}, 64, {"linear": 1.0}).value == pytest.approx(1.014)


def test_a_law_without_a_prior_has_no_weight():
    assert weigh_laws({1: 1.0, 2: 1.1}, Tuning(priors={"linear": 1.0})) == {"linear": 1, "ring": 0, "tree": 0}


def test_a_law_goes_on_from_the_nearest_size_and_of_two_from_the_larger():
    known = {1: 1.0, 2: 1.3, 8: 1.2}
    for law, grow in ((follow_tree, math.log2), (follow_ring, lambda count: (count - 1) / count)):
        start, slope = fit_growth(known, grow)
        assert law(known, 4) == pytest.approx(1.2 * (start + slope * grow(4)) / (start + slope * grow(8)))
        assert law(known, 3) == pytest.approx(1.3 * (start + slope * grow(3)) / (start + slope * grow(2)))
        assert slope > 0
    assert stay_linear({4: 1.1, 8: 1.3}, 2) == 1.1
    assert follow_tree({4: 1.1}, 64) == 1.1


def test_a_law_weighs_by_how_far_it_is_off_each_size_that_is_left_out():
    """Linear says 1.0 of the 1.1 on two ranks, and the 1.1 on four; tree and ring say something of both."""
    known = {1: 1.0, 2: 1.1, 4: 1.1}
    misses = find_misses(known)
    assert misses["linear"] == pytest.approx(math.log(1.1) / 2)
    left = (follow_tree({1: 1.0, 4: 1.1}, 2) / 1.1, follow_tree({1: 1.0, 2: 1.1}, 4) / 1.1)
    assert misses["tree"] == pytest.approx(sum(abs(math.log(one)) for one in left) / 2)
    assert misses["tree"] == pytest.approx((abs(math.log(1.05 / 1.1)) + math.log(1.2 / 1.1)) / 2)
    weights = weigh_laws(known)
    assert weights["tree"] / weights["linear"] == pytest.approx(
        0.22 / 0.41 * math.exp((misses["linear"] - misses["tree"]) / 0.02)
    )
    assert sum(weights.values()) == pytest.approx(1)
    assert find_misses({1: 1.0, 2: 1.1}) == {}


def test_misses_widen_with_the_root_of_the_doublings():
    known = {2: 1.0, 4: 1.2, 8: 1.3}
    excess = math.log(1.3) / 2
    assert find_excess(known) == pytest.approx(excess)
    misses, weights = find_misses(known), weigh_laws(known)
    misfit = sum(weights[name] * misses[name] for name in LAWS)
    expected = math.sqrt(0.002**2 + (0.012 * 4) ** 2 + (0.43 * excess * 2) ** 2 + (misfit * 2) ** 2)
    assert find_scale(known, 4.0) == pytest.approx(expected)


def test_one_rank_can_be_asked_for_and_none_cannot():
    (found,) = extrapolate(make_series({2: 2.0, 4: 4.0}), [1])
    assert found.throughput.value == pytest.approx(1.0)
    with pytest.raises(UsageError, match="--ranks must be ≥ 1, got 0"):
        extrapolate(make_series({2: 2.0, 4: 4.0}), [0])


def test_between_two_sizes_the_distance_is_that_of_the_nearest():
    known = {1: 1.0, 8: 1.0}
    two, four = (predict_stretch(known, ranks, {"linear": 1.0}) for ranks in (2, 4))
    scale = find_scale(known, 1.0)
    for found in (two, four):
        assert math.log(found.high / found.value) == pytest.approx(4.9 * scale)
        assert math.log(found.value / found.low) == pytest.approx(1.65 * scale)


def test_laws_are_averaged_by_their_weights():
    """Of 1.1 on two ranks a ring makes 1 + 0.2 · 3/4 on four, and linear scaling the same 1.1."""
    found = predict_stretch({1: 1.0, 2: 1.1}, 4, {"linear": 0.25, "ring": 0.75, "tree": 0.0})
    assert found.value == pytest.approx((0.25 * 1.1 + 0.75 * 1.15) * 1.007)

"""The recurrences of DDP's buckets and FSDP's units."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelab.predict.network_model import Bucket, FsdpUnit, expected_maximum, overlap_buckets, overlap_units


def test_without_communication_backward_takes_what_it_takes():
    found = overlap_buckets(1.0, [Bucket(0.5, 10), Bucket(1.0, 10)], lambda _: 0.0)
    assert (found.seconds, found.exposed_seconds) == (1.0, 0.0)


def test_the_last_bucket_is_never_hidden():
    """It is ready only when backward is over."""
    found = overlap_buckets(1.0, [Bucket(0.2, 10), Bucket(1.0, 10)], lambda size: size / 100)
    assert found.exposed_seconds == pytest.approx(0.1)
    assert found.communication_seconds == pytest.approx(0.2)


def test_a_slow_link_ends_with_the_first_ready_bucket_and_all_the_rest_behind_it():
    buckets = [Bucket(0.25, 1), Bucket(0.5, 1), Bucket(1.0, 1)]
    assert overlap_buckets(1.0, buckets, lambda _: 5.0).seconds == pytest.approx(0.25 + 15)


def test_full_contention_is_one_after_the_other():
    found = overlap_buckets(1.0, [Bucket(0.0, 1), Bucket(1.0, 0)], lambda size: 0.4 * size, contention=1.0)
    assert found.seconds == pytest.approx(1.4)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 100)), min_size=1, max_size=8),
    st.floats(0, 0.1),
    st.floats(0, 1),
)
def test_it_lies_between_perfect_overlap_and_none(pairs, per_byte, contention):
    buckets = [Bucket(*pair) for pair in pairs]
    found = overlap_buckets(1.0, buckets, lambda size: size * per_byte, contention)
    assert max(1.0, found.communication_seconds) - 1e-9 <= found.seconds
    assert found.seconds <= 1.0 + (1 + contention) * found.communication_seconds + 1e-9


def test_the_first_gather_and_the_last_scatter_of_units_are_exposed():
    units = [FsdpUnit(1.0, 2.0, 1.0)] * 3
    forward, backward = overlap_units(units, lambda _: 0.5, lambda _: 0.5)
    assert forward.seconds == pytest.approx(0.5 + 3)
    assert backward.seconds == pytest.approx(0.5 + 6 + 0.5)


def test_parameters_that_stay_whole_are_not_gathered_again():
    units = [FsdpUnit(1.0, 2.0, 1.0)] * 3
    _, backward = overlap_units(units, lambda _: 0.5, lambda _: 0.5, is_regathered=False)
    assert backward.seconds == pytest.approx(6.5)
    assert backward.communication_seconds == pytest.approx(1.5)


def test_units_on_a_slow_link_take_what_is_sent_and_little_more():
    units = [FsdpUnit(0.1, 0.1, 1.0)] * 10
    _, backward = overlap_units(units, lambda _: 5.0, lambda _: 5.0)
    assert backward.seconds == pytest.approx(100, rel=0.03)


def test_the_largest_of_two_normal_numbers_is_known():
    assert expected_maximum(1) == 0
    assert expected_maximum(2) == pytest.approx(1 / math.sqrt(math.pi), rel=1e-6)
    assert expected_maximum(1024) / math.sqrt(2 * math.log(1024)) == pytest.approx(0.87, abs=0.02)


def test_what_units_expose_is_what_they_take_longer_than_computing():
    units = [FsdpUnit(1.0, 2.0, 1.0)] * 2
    forward, backward = overlap_units(units, lambda _: 0.5, lambda _: 0.25)
    assert (forward.seconds, forward.communication_seconds, forward.exposed_seconds) == (2.5, 1.0, 0.5)
    assert (backward.seconds, backward.communication_seconds, backward.exposed_seconds) == (4.75, 1.5, 0.75)


def test_contention_delays_what_is_left_of_backward_by_its_share():
    found = overlap_buckets(1.0, [Bucket(0.5, 1)], lambda _: 0.4, contention=0.5)
    assert found.seconds == pytest.approx(1.2)
    assert (found.communication_seconds, found.exposed_seconds) == (pytest.approx(0.4), pytest.approx(0.2))

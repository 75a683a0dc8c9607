"""The learning rate of every step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelab.errors import UsageError
from scalelab.records.settings import Optimization
from scalelab.workloads.schedule import (
    check_schedule,
    count_warmup_steps,
    learning_rate_factor,
    scale_learning_rate,
)


def list_rates(num_steps: int, base_lr: float = 1.0, **fields: Any) -> list[float]:
    optimization = Optimization(**fields)
    return [base_lr * learning_rate_factor(k, optimization, num_steps, 10, base_lr) for k in range(num_steps)]


def test_the_language_model_has_the_published_rates() -> None:
    rates = list_rates(20, 3e-4, schedule="cosine", lr_min=3e-5)
    assert f"{rates[0]:.2e}" == "2.98e-04"
    assert f"{rates[10]:.2e}" == "1.44e-04"
    assert rates[19] == pytest.approx(3e-5, rel=1e-12)


def test_a_constant_rate_is_the_base() -> None:
    assert list_rates(5, 0.1) == [0.1] * 5


def test_a_warm_up_rises_linearly_and_ends_at_the_full_rate() -> None:
    assert list_rates(6, 8.0, lr_warmup=4) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_a_cosine_begins_after_the_warm_up_and_ends_with_the_last_step() -> None:
    rates = list_rates(12, lr_warmup=4, schedule="cosine", lr_min=0.2)
    assert rates[3] == 1.0
    assert rates[7] == pytest.approx(0.6)
    assert rates[11] == pytest.approx(0.2)
    assert rates[3:] == sorted(rates[3:], reverse=True)


def test_a_schedule_may_end_before_the_training_and_then_stays_at_its_end() -> None:
    rates = list_rates(10, schedule="cosine", schedule_steps=4, lr_min=0.1)
    assert rates[3:] == pytest.approx([0.1] * 7)
    assert rates[:4] == list_rates(4, schedule="cosine", lr_min=0.1)


def test_a_warm_up_in_epochs_is_added_to_the_one_in_steps() -> None:
    optimization = Optimization(lr_warmup=3, lr_warmup_epochs=2.5)
    assert count_warmup_steps(optimization, steps_per_epoch=10) == 28
    assert count_warmup_steps(Optimization(lr_warmup=3), steps_per_epoch=None) == 3


def test_epochs_of_data_without_end_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--lr-warmup-epochs 2 needs batches with a len.*use --lr-warmup"):
        count_warmup_steps(Optimization(lr_warmup_epochs=2), steps_per_epoch=None)


def test_a_cosine_cannot_end_above_its_beginning() -> None:
    above = Optimization(schedule="cosine", lr_min=0.5, lr_warmup=4)
    with pytest.raises(UsageError, match=r"--lr-min must be at most the learning rate 0.1, got 0.5"):
        check_schedule(above, 0.1)
    check_schedule(above, 0.5)
    check_schedule(Optimization(lr_warmup=4), 0.1)


def test_a_rate_of_zero_stays_zero() -> None:
    assert list_rates(3, 0.0, schedule="cosine", lr_warmup=1) == [0.0] * 3


@given(
    num_steps=st.integers(1, 50),
    lr_warmup=st.integers(0, 60),
    schedule_steps=st.none() | st.integers(1, 60),
    floor=st.floats(0, 1),
    base_lr=st.floats(1e-6, 10),
)
def test_no_rate_leaves_its_bounds(
    num_steps: int, lr_warmup: int, schedule_steps: int | None, floor: float, base_lr: float
) -> None:
    rates = list_rates(
        num_steps,
        base_lr,
        lr_warmup=lr_warmup,
        schedule="cosine",
        schedule_steps=schedule_steps,
        lr_min=floor * base_lr,
    )
    slack = 1e-12 * base_lr
    assert all(0 < rate <= base_lr + slack for rate in rates[:lr_warmup])
    assert all(floor * base_lr - slack <= rate <= base_lr + slack for rate in rates[lr_warmup:])


def test_linear_scaling_follows_the_ranks_or_the_batch() -> None:
    """Goyal et al. 2017: a batch k times as large gets a rate k times as large."""
    by_ranks = Optimization(lr_scaling="ranks")
    by_batch = Optimization(lr_scaling="batch", lr_base_batch=128)
    assert scale_learning_rate(1e-3, by_ranks, num_ranks=4, global_batch=128) == 4e-3
    assert scale_learning_rate(0.1, by_batch, num_ranks=4, global_batch=8192) == pytest.approx(6.4)
    assert scale_learning_rate(0.1, by_batch, num_ranks=4, global_batch=128) == 0.1
    assert scale_learning_rate(0.1, Optimization(), num_ranks=4, global_batch=8192) == 0.1


def test_the_recipe_of_goyal_warms_up_to_the_scaled_rate() -> None:
    """Batch 8192 on 256 GPUs: from near 0.1 to 3.2 in five epochs, then constant."""
    optimization = Optimization(lr_scaling="batch", lr_base_batch=256, lr_warmup_epochs=5)
    scaled = scale_learning_rate(0.1, optimization, num_ranks=256, global_batch=8192)
    rates = [scaled * learning_rate_factor(k, optimization, 900, 156, scaled) for k in range(800)]
    assert scaled == pytest.approx(3.2)
    assert rates[0] < 0.1
    assert rates[5 * 156 - 1] == rates[-1] == scaled
    steps = {round(after - before, 12) for before, after in pairwise(rates[:780])}
    assert len(steps) == 1

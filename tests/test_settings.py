"""Settings that nothing would read are refused, and those that are read are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scalelab.errors import UsageError
from scalelab.records.settings import Optimization, Spreading, TrainingRun
from scalelab.records.tasks import Exchange


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [
        (Optimization, {"lr_min": 1e-5}, "--lr-min 1e-05 has no effect without --schedule cosine: add it"),
        (Optimization, {"schedule_steps": 20}, "--schedule-steps 20 has no effect without --schedule cosine: add it"),
        (Spreading, {"powersgd_rank": 2}, "--powersgd-rank 2 has no effect without --comm-hook powersgd: add it"),
        (
            Spreading,
            {"powersgd_start": 5, "gradient_hook": "fp16"},
            "--powersgd-start 5 has no effect without --comm-hook powersgd: add it",
        ),
        (TrainingRun, {"profile_wait": 0}, "--profile-wait 0 has no effect without --profile-active: add it"),
        (TrainingRun, {"profile_name": "mine"}, "--profile-name mine has no effect without --profile-active: add it"),
        (
            TrainingRun,
            {"profile_active": 1, "profile_name": "a/b"},
            "--profile-name 'a/b' is not a valid file name: use letters, digits and ._-",
        ),
        (TrainingRun, {"profile_warmup": 3}, "--profile-warmup 3 has no effect without --profile-active: add it"),
    ],
)
def test_a_number_that_nothing_reads_is_refused(
    make: Callable[..., object], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=f"^{message}$"):
        make(**fields)


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (Optimization, {"lr_min": 1e-5, "schedule_steps": 20, "schedule": "cosine"}),
        (Spreading, {"powersgd_rank": 2, "powersgd_start": 5, "gradient_hook": "powersgd"}),
        (Spreading, {"powersgd_rank": 1, "powersgd_start": 10}),
        (TrainingRun, {"profile_wait": 0, "profile_warmup": 3, "profile_active": 2}),
        (TrainingRun, {"profile_wait": 1, "profile_warmup": 1}),
    ],
)
def test_a_number_that_is_read_or_stays_as_it_was_is_taken(make: Callable[..., object], fields: dict[str, Any]) -> None:
    make(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sizes": ()}, "all_reduce needs at least one message size"),
        ({"sizes": (4, 6)}, "a message of 6 bytes is not a whole number of float32 values: use a multiple of 4"),
        ({"sizes": (0,)}, "a message of 0 bytes is not a whole number of float32 values: use a multiple of 4"),
        ({"repeats": 0}, "--repeats must be at least 1, got 0"),
        ({"warmup_calls": -1}, "--warmup-calls must be at least 0, got -1"),
        ({"budget_seconds": 0.0}, "--budget must be a finite number > 0, got 0"),
    ],
)
def test_an_exchange_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    defaults: dict[str, Any] = {"operation": "all_reduce", "sizes": (4,)}
    with pytest.raises(UsageError, match=f"^{message}$"):
        Exchange(**(defaults | fields))

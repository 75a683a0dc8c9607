"""Settings that nothing would read are refused, and those that are read are not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from scalelab.errors import UsageError
from scalelab.records.settings import DEVICES, Optimization, Perturbation, Spreading, StepShape, TrainingRun, find_kind
from scalelab.records.tasks import Dataset, Exchange, Quantization, Read, StepPlan


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


DATASET = Dataset(format="npy")


@pytest.mark.parametrize(
    ("make", "least"),
    [
        (StepPlan, {"lead_in_steps": 0, "phase_steps": 0, "comm_free_steps": 0, "profiled_steps": 0, "free_steps": 0}),
        (StepPlan, {"clean_steps": 1, "cycles": 1}),
        (partial(Dataset, format="npy"), {"num_samples": 1, "workers": 0}),
        (partial(Read, dataset=DATASET), {"epochs": 1}),
        (Quantization, {"num_samples": 1, "num_rounds": 1, "num_tested": 1, "mixed_points": 0}),
        (partial(Exchange, operation="all_reduce", sizes=(4,)), {"repeats": 1, "warmup_calls": 0}),
        (StepShape, {"micro_batch": 1}),
        (Optimization, {"lr": 0, "weight_decay": 0, "lr_warmup": 0, "lr_warmup_epochs": 0, "lr_base_batch": 1}),
        (partial(Optimization, optimizer="sgd"), {"momentum": 0}),
        (partial(Optimization, schedule="cosine"), {"lr_min": 0, "schedule_steps": 1}),
        (Spreading, {"averaging_period": 1, "averaging_warmup": 0}),
        (partial(Spreading, gradient_hook="powersgd"), {"powersgd_rank": 1, "powersgd_start": 2}),
        (Perturbation, {"delay_rank": 0}),
        (TrainingRun, {"log_every": 1, "keep": 0, "steps": 1, "evaluate_every": 1, "checkpoint_every": 1}),
        (TrainingRun, {"epochs": 1}),
        (
            partial(TrainingRun, profile_active=1),
            {"profile_wait": 0, "profile_warmup": 0, "profile_active": 0, "profile_repeat": 1},
        ),
    ],
)
def test_the_least_of_every_number_is_taken_and_one_less_is_refused(
    make: Callable[..., object], least: dict[str, int]
) -> None:
    for name, number in least.items():
        together = {"lr_scaling": "batch"} if name == "lr_base_batch" else {}
        make(**{name: number} | together)
        with pytest.raises(UsageError, match=f"got {number - 1}"):
            make(**{name: number - 1} | together)


def test_batches_of_which_one_is_none_are_refused() -> None:
    assert Quantization(batches=(1, 64)).batches == (1, 64)
    with pytest.raises(UsageError, match="--batches must be at least 1, got 0"):
        Quantization(batches=(1, 0))


def test_momentum_belongs_to_sgd_and_nesterov_needs_it() -> None:
    assert Optimization(optimizer="nesterov", momentum=0.9).momentum == 0.9
    assert Optimization(optimizer="sgd", momentum=0).momentum == 0
    with pytest.raises(UsageError, match="--optimizer nesterov needs --momentum > 0, got 0"):
        Optimization(optimizer="nesterov", momentum=0)
    with pytest.raises(UsageError, match=r"--momentum 0\.9 needs --optimizer sgd or nesterov"):
        Optimization(optimizer="adam", momentum=0.9)


@pytest.mark.parametrize("fields", [{"lr_scaling": "batch"}, {"lr_base_batch": 8}])
def test_scaling_by_batch_needs_the_batch_to_scale_from(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--lr-scaling batch and --lr-base-batch must be given together"):
        Optimization(**fields)


def test_a_run_is_as_long_as_its_steps_or_epochs_or_100_steps() -> None:
    found = [TrainingRun(**fields).num_steps for fields in ({}, {"steps": 7}, {"epochs": 2})]
    assert found == [100, 7, None]
    with pytest.raises(UsageError, match="--steps 7 and --epochs 2 are mutually exclusive"):
        TrainingRun(steps=7, epochs=2)


def test_a_delay_is_that_of_its_rank_or_of_all() -> None:
    one, every = Perturbation(delay="10ms", delay_rank=1), Perturbation(delay="10ms")
    assert [one.seconds_on(rank) for rank in range(3)] == [0, 0.01, 0]
    assert [every.seconds_on(rank) for rank in range(3)] == [0.01] * 3


def test_a_device_that_is_not_known_is_an_accelerator_without_peaks() -> None:
    found = find_kind("npu")
    assert (found.title, found.is_accelerator, found.has_peaks, found.backend) == ("npu", True, False, "gloo")
    known = {name: (kind.is_accelerator, kind.has_peaks, kind.block_bytes) for name, kind in DEVICES.items()}
    assert known == {
        "cpu": (False, False, 1),
        "cuda": (True, True, 512),
        "xpu": (True, True, 512),
        "mps": (True, False, 1),
    }

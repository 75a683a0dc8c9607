"""What a strategy can be told, and what is refused before anything is launched."""

from __future__ import annotations

import pytest

from scalelab.errors import UsageError
from scalelab.records.settings import Spreading, StepShape
from scalelab.records.strategies import KNOWN_FIELDS, STRATEGIES, check_spreading, check_strategy
from scalelab.worker.training import APPLY
from tests.worker.trials import make_trial


def test_every_strategy_that_is_named_can_be_applied() -> None:
    assert set(APPLY) == set(STRATEGIES)
    assert set(KNOWN_FIELDS) <= set(STRATEGIES)


@pytest.mark.parametrize(
    ("strategy", "spreading", "takers"),
    [
        ("single", Spreading(sync_batch_norm=True), "ddp or fsdp2 or"),
        ("dp", Spreading(gradient_hook="fp16"), "use it with ddp$"),
        ("fsdp-full", Spreading(bucket_mb=5.0), "use it with ddp$"),
        ("ddp", Spreading(reshard_after_forward=False), "use it with fsdp2$"),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused_with_who_takes_it(
    strategy: str, spreading: Spreading, takers: str
) -> None:
    with pytest.raises(UsageError, match=takers):
        check_spreading(strategy, spreading)


def test_a_static_graph_and_accumulation_are_refused_together() -> None:
    spreading, shape = Spreading(static_graph=True), StepShape(micro_batch=2)
    with pytest.raises(UsageError, match="--static-graph does not work with --micro-batch 2"):
        check_strategy(make_trial(spreading=spreading, shape=shape))
    check_strategy(make_trial(spreading=spreading))
    check_strategy(make_trial(spreading=spreading, shape=StepShape(micro_batch=4)))


def test_emulated_dp_and_checkpointing_are_refused_together() -> None:
    shape = StepShape(checkpointing="full")
    with pytest.raises(UsageError, match="--activation-checkpointing full does not work with --strategy dp on a CPU"):
        check_strategy(make_trial(strategy="dp", shape=shape))
    check_strategy(make_trial(strategy="dp"))
    check_strategy(make_trial(strategy="dp", shape=shape, device="cuda"))
    check_strategy(make_trial(strategy="fsdp2", shape=shape))

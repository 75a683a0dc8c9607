"""What a strategy can be told, and what is refused before anything is launched."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

import scalelab
from scalelab.errors import UsageError
from scalelab.records.refusals import check_spreading, check_strategy
from scalelab.records.settings import Spreading, StepShape
from scalelab.records.strategies import STRATEGIES, find_strategy
from scalelab.worker.strategies.apply import load_strategy
from tests.worker.trials import make_trial


def test_every_strategy_that_is_named_can_be_applied() -> None:
    for name in STRATEGIES:
        assert callable(load_strategy(name)), name


def test_every_record_names_options_and_strategies_that_exist() -> None:
    options = {field.name for field in fields(Spreading)}
    for name, strategy in STRATEGIES.items():
        assert strategy.name == name
        assert set(strategy.options) <= options, name
        assert {send.option for send in strategy.sends} <= {"", *strategy.options}, name
        assert strategy.on_one_rank in ("", *STRATEGIES), name
        assert {refusal.field for refusal in strategy.refuses} <= {"dtype", *vars(StepShape())}, name


def test_sharded_strategies_on_one_rank_shard_nothing() -> None:
    assert find_strategy("fsdp-full", 1) is STRATEGIES["fsdp-none"]
    assert find_strategy("fsdp-full", 2) is STRATEGIES["fsdp-full"]
    assert find_strategy("ddp", 1) is STRATEGIES["ddp"]


def test_every_strategy_is_a_row_of_its_page() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/strategies.md").read_text(encoding="utf-8")
    for name, strategy in STRATEGIES.items():
        count = "one per rank" if strategy.has_processes else "1"
        assert re.search(rf"^\| `{name}` \|.*\| {count} \|$", page, re.MULTILINE), name


def test_no_other_module_compares_the_name_of_a_strategy() -> None:
    quoted = "|".join(map(re.escape, STRATEGIES))
    pattern = re.compile(rf"""strateg\w*(\.name)?\s*(==|!=|in|not in)\s*[(\[{{]?["']({quoted})["']""")
    source = Path(scalelab.__file__).parent
    found = [
        f"{file.relative_to(source)}: {match.group()}"
        for file in source.rglob("*.py")
        for match in pattern.finditer(file.read_text(encoding="utf-8"))
    ]
    assert not found


@pytest.mark.parametrize(
    ("strategy", "spreading", "takers"),
    [
        ("single", Spreading(sync_batch_norm=True), "ddp or fsdp-full or"),
        ("dp", Spreading(gradient_hook="fp16"), "use it with ddp$"),
        ("fsdp-full", Spreading(bucket_mb=5.0), "use it with ddp or zero1 or ep or cp or local-sgd or torchft$"),
        ("ddp", Spreading(reshard_after_forward=False), "use it with fsdp2 or hsdp or tp or pp$"),
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

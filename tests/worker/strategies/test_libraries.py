"""Strategies of packages that are extras: they train as ddp does, where the package is installed."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalelab.analysis.traffic import compare_messages, expect_messages
from scalelab.errors import UsageError
from scalelab.launch.local import LocalLauncher
from scalelab.records.refusals import check_strategy
from scalelab.records.settings import StepShape
from scalelab.records.strategies import STRATEGIES, list_strategies
from scalelab.records.tasks import Train
from scalelab.records.trial import Status, TrainingRun
from scalelab.worker.strategies.apply import check_library
from tests.worker.strategies.cases import CASES, read_losses
from tests.worker.trials import launch, make_trial

OF_LIBRARIES = list_strategies(lambda known: bool(known.library))
WIDE = {"options": {"dim": 401, "depth": 2}}
"""Matrices beyond the 10⁵ numbers that stage 3 keeps whole, and pieces that two ranks have to fill up."""
ROUNDING = 2e-6
"""Stage 3 updates pieces that end elsewhere than parameters do, where a processor adds one by one."""
DEEPSPEED = [name for name in OF_LIBRARIES if STRATEGIES[name].library == "deepspeed"]


def need(strategy: str) -> None:
    library = STRATEGIES[strategy].library
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install --no-deps it, with the torch that is here")


@pytest.mark.ranks
@pytest.mark.parametrize("case", ["mlp", "gpt2", "lenet"])
@pytest.mark.parametrize("strategy", OF_LIBRARIES)
def test_losses_are_those_of_ddp(launcher: LocalLauncher, tmp_path: Path, strategy: str, case: str) -> None:
    need(strategy)
    expected = read_losses(launcher, tmp_path, "ddp", 2, **CASES[case])
    found = read_losses(launcher, tmp_path, strategy, 2, **CASES[case])
    assert found == (pytest.approx(expected, rel=ROUNDING) if strategy == "deepspeed-3" else expected)


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", OF_LIBRARIES)
def test_one_rank_trains_as_single_and_a_step_sends_what_the_record_says(
    launcher: LocalLauncher, tmp_path: Path, strategy: str
) -> None:
    need(strategy)
    alone = read_losses(launcher, tmp_path, "single", 1, **CASES["mlp"])
    assert read_losses(launcher, tmp_path, strategy, 1, **CASES["mlp"]) == alone
    result = launch(launcher, make_trial(strategy=strategy, instruments=("messages",), **WIDE), tmp_path / "sent")
    assert result.status is Status.COMPLETED, result.reason
    for rank in result.ranks:
        assert rank.message_basis is not None
        theory = expect_messages(strategy, 2, rank.message_basis, result.trial.spreading)
        for line in compare_messages(rank.messages, theory, 2):
            assert line.payload_bytes == line.expected_bytes, line


@pytest.mark.parametrize("strategy", OF_LIBRARIES)
def test_a_package_that_is_not_here_is_named_with_its_extra(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = STRATEGIES[strategy].library
    monkeypatch.setitem(sys.modules, library, None)
    advice = f"--strategy {strategy} needs {library}: pip install 'scalelab[{library}]'"
    with pytest.raises(UsageError, match=f"^{re.escape(advice)}$"):
        check_library(strategy)
    extras = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extras[library][0].startswith(library)


@pytest.mark.parametrize("strategy", DEEPSPEED)
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"shape": StepShape(micro_batch=2)}, "--micro-batch 2 does not work with"),
        ({"shape": StepShape(autocast=True), "dtype": "bfloat16"}, "--autocast True does not work with"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16 does not work with"),
        ({"shape": StepShape(compile=True)}, "--compile True does not work with"),
    ],
)
def test_what_the_engine_keeps_to_itself_is_refused(strategy: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=f"{words} --strategy {strategy}: DeepSpeed"):
        check_strategy(make_trial(strategy=strategy, **fields))


@pytest.mark.parametrize("strategy", OF_LIBRARIES)
def test_a_checkpoint_that_would_not_hold_all_state_is_refused(strategy: str) -> None:
    trial = replace(make_trial(strategy=strategy), task=Train(run=TrainingRun(steps=2, keep=1)))
    with pytest.raises(UsageError, match=f"--strategy {strategy} leaves state to .*--keep 0"):
        check_strategy(trial)
    check_strategy(replace(trial, task=Train(run=TrainingRun(steps=2, keep=0))))

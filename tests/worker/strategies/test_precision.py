"""Every strategy in every precision, with and without accumulation, trains as the plain loop does."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalelab.launch.local import LocalLauncher
from scalelab.records.settings import StepShape
from scalelab.records.strategies import STRATEGIES
from scalelab.records.trial import Status, StepPlan
from tests.worker.trials import launch, make_trial

pytestmark = pytest.mark.ranks

PLAN = StepPlan(lead_in_steps=0, clean_steps=3, phase_steps=0, comm_free_steps=0)
CASES = [
    ("float16", StepShape(autocast=True, micro_batch=2)),
    ("bfloat16", StepShape(autocast=True)),
    ("bfloat16", StepShape()),
    ("tf32", StepShape()),
    ("float64", StepShape(micro_batch=2)),
]
DIGITS = {"float16": 2e-3, "bfloat16": 1e-2, "tf32": 1e-5, "float64": 1e-12}
"""A sum of products of 8, 11, 24 or 53 bits, formed in another order."""

HALVES = ("float16", "bfloat16")
"""For these a strategy has rules of its own: what is reduced in which type, and whose gradients are scaled."""


def train(launcher: LocalLauncher, strategy: str, dtype: str, shape: StepShape, directory: Path) -> list[float]:
    num_ranks = 1 if strategy == "single" else 2
    trial = make_trial(strategy=strategy, num_ranks=num_ranks, plan=PLAN, dtype=dtype, shape=shape)
    result = launch(launcher, trial, directory)
    assert result.status is Status.COMPLETED, result.reason
    return list(result.losses().values())


@pytest.mark.parametrize(("dtype", "shape"), CASES, ids=lambda value: str(value).replace("StepShape", ""))
def test_a_precision_is_the_same_under_every_strategy(
    dtype: str, shape: StepShape, launcher: LocalLauncher, tmp_path: Path
) -> None:
    expected = train(launcher, "single", dtype, shape, tmp_path / "single")
    exact = train(launcher, "single", "float64", StepShape(), tmp_path / "exact")
    assert expected == pytest.approx(exact, rel=max(DIGITS[dtype], 1e-6))
    everywhere = [name for name, known in STRATEGIES.items() if name not in ("ep", "cp") and not known.library]
    for strategy in everywhere if dtype in HALVES else ("ddp", "fsdp2", "tp"):
        found = train(launcher, strategy, dtype, shape, tmp_path / strategy)
        assert found == pytest.approx(expected, rel=DIGITS[dtype]), strategy

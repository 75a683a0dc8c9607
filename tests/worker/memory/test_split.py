"""Forecasts of strategies that shard the optimizer, replicate shards or split the model, against real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scalelab.analysis.memory_sharding import find_largest_share
from scalelab.launch.local import LocalLauncher
from scalelab.records.observations import MemoryReport, RankReport
from scalelab.records.settings import Spreading
from scalelab.records.tasks import Forecast
from scalelab.records.trial import Status
from scalelab.worker.memory.split import forecast_rank
from tests.worker.memory.test_memory import PLAN, cache_directory
from tests.worker.strategies.cases import CASES, SHALLOW
from tests.worker.trials import launch, make_trial

__all__ = ["cache_directory"]

CLOSE = 0.05
BLOCK_BYTES = 793_088
"""Of a block of the small gpt2: what gloo takes to gather it. A pipeline starts the gather of a stage early. Whether
one thread of gloo still holds its buffer when another takes its own depends on the moment: both occur."""
SPLITS: list[tuple[str, int, dict[str, Any]]] = [
    ("zero1", 2, {}),
    ("hsdp", 4, {}),
    ("tp", 2, {}),
    ("tp", 4, {"mesh": "fsdp=2,tp=2"}),
    ("tp", 2, {"sequence_parallel": True}),
    ("pp", 2, {"pipeline_schedule": "interleaved"}),
    ("pp", 2, {"pipeline_schedule": "zbv"}),
    ("pp", 4, {"mesh": "pp=2,tp=2"}),
    ("pp", 4, {"mesh": "pp=2,fsdp=2"}),
    ("pp", 4, {"mesh": "pp=2,dp=2", "pipeline_schedule": "interleaved"}),
    ("ep", 2, {}),
    ("ep", 4, {"mesh": "dp=2,ep=2"}),
    ("local-sgd", 2, {}),
]


def make_fields(strategy: str, num_ranks: int, options: dict[str, Any]) -> dict[str, Any]:
    moe = {"workload": "moe", "options": {"sequence": 16, "vocabulary": 64, "dropout": 0.0}}
    gpt2 = CASES["gpt2"] if "pipeline_schedule" in options else SHALLOW
    return (moe if strategy == "ep" else gpt2) | {
        "global_batch": 8,
        "strategy": strategy,
        "num_ranks": num_ranks,
        "spreading": Spreading(**options),
    }


def forecast(strategy: str, num_ranks: int, options: dict[str, Any]) -> MemoryReport:
    trial = make_trial(**make_fields(strategy, num_ranks, options), task=Forecast())
    memory = forecast_rank(trial, RankReport(rank=0)).memory
    assert memory is not None
    return memory


@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "num_ranks", "options"), SPLITS, ids=str)
def test_the_forecast_is_what_the_fullest_rank_takes(
    strategy: str, num_ranks: int, options: dict[str, Any], launcher: LocalLauncher, tmp_path: Path
) -> None:
    fields = make_fields(strategy, num_ranks, options)
    result = launch(launcher, make_trial(**fields, plan=PLAN, instruments=("memory",)), tmp_path)
    assert result.status is Status.COMPLETED, result.reason
    measured = max(rank.memory.peak_bytes for rank in result.ranks if rank.memory is not None)
    least = forecast(strategy, num_ranks, options).peak_bytes
    most = least + (BLOCK_BYTES if options.get("mesh") == "pp=2,fsdp=2" else 0)
    assert (1 - CLOSE) * least <= measured <= (1 + CLOSE) * most


def test_more_pieces_are_smaller_ones() -> None:
    two, four = (forecast("tp", number, {}).by_category["parameters"] for number in (2, 4))
    assert two / 2 < four < two, "norms and embeddings stay whole"


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "share"),
    [((4, 4), 2, 0.5), ((6, 1, 1), 2, 0.75), ((5, 3, 3, 1), 2, 0.5), ((), 2, 1.0), ((3, 3, 2), 3, 3 / 8)],
)
def test_whole_parameters_are_shared_out_by_falling_size(sizes: tuple[int, ...], num_ranks: int, share: float) -> None:
    assert find_largest_share(sizes, num_ranks) == pytest.approx(share)

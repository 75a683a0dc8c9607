"""The workloads that strategies are compared on: small, and without dropout, whose masks differ between ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scalelab.launch.local import LocalLauncher
from scalelab.records.settings import Optimization, Spreading
from scalelab.records.strategies import STRATEGIES, list_strategies
from scalelab.records.trial import Status, StepPlan
from tests.records import count_steps
from tests.worker.trials import launch, make_trial

SPREAD = tuple(
    name
    for name in list_strategies(lambda known: known.has_processes and known.has_equal_replicas and not known.library)
    if not STRATEGIES[name].splits_model and not STRATEGIES[name].not_on_cpu
)
"""Every strategy of torch's own with one process and a whole model per rank; `test_meshes.py` has other meshes."""

PLAN = StepPlan(lead_in_steps=1, clean_steps=5, phase_steps=0, comm_free_steps=0, cycles=1)
BRIEF = StepPlan(lead_in_steps=1, clean_steps=2, phase_steps=0, comm_free_steps=0, cycles=1)
SMALL_TRANSFORMER = {
    "samples": 32,
    "features": 16,
    "d_model": 16,
    "heads": 2,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "feedforward": 32,
    "tgt_length": 4,
    "dropout": 0.0,
}
SMALL_GPT2 = {"size": "tiny", "sequence": 16, "vocabulary": 64, "dropout": 0.0}
SHALLOW_GPT2 = SMALL_GPT2 | {"layers": 2}
"""Half of its blocks, where nothing stored is compared with and no rank has two stages."""
SMALL_MOE = {"width": 16, "heads": 2, "sequence": 16, "vocabulary": 64, "dropout": 0.0}
SLOWLY = Optimization(optimizer="sgd", lr=0.001)
"""At the workload's own 0.1 a step on four images is a leap, and rounding grows tenfold with each."""

CASES: dict[str, dict[str, Any]] = {
    "mlp": {"workload": "mlp", "options": {"dim": 16, "depth": 2}, "global_batch": 8},
    "gpt2": {"workload": "gpt2", "options": SMALL_GPT2, "global_batch": 4},
    "transformer": {"workload": "transformer", "options": SMALL_TRANSFORMER, "global_batch": 8},
    "lenet": {"workload": "lenet", "options": {}, "global_batch": 8},
    "resnet18": {"workload": "resnet18", "options": {"norm": "none"}, "global_batch": 4, "optimization": SLOWLY}
    | {"plan": BRIEF},
}
SHALLOW = CASES["gpt2"] | {"options": SHALLOW_GPT2}
MOE = {"workload": "moe", "options": SMALL_MOE, "global_batch": 8}
"""Apart from the others: it came after 0.1.0, whose losses are kept for those."""
SYNCHRONISED = {
    "workload": "resnet18",
    "options": {"norm": "batch", "width": 16},
    "global_batch": 4,
    "optimization": SLOWLY,
    "spreading": Spreading(sync_batch_norm=True),
    "plan": BRIEF,
}


KNOWN: dict[str, list[float]] = {}
"""Losses by trial: what several tests compare with is run once, for the same trial always gives the same."""


def read_losses(launcher: LocalLauncher, directory: Path, strategy: str, num_ranks: int, **fields: Any) -> list[float]:
    """The losses of every step of a trial, the mean over its ranks."""
    name = f"{strategy}-{num_ranks}"
    trial = make_trial(**{"configuration": name, "plan": PLAN, "strategy": strategy, "num_ranks": num_ranks} | fields)
    if repr(trial) not in KNOWN:
        result = launch(launcher, trial, directory / f"{name}-{len(list(directory.iterdir()))}")
        assert result.status is Status.COMPLETED, result.reason
        KNOWN[repr(trial)] = list(result.losses().values())
        assert len(KNOWN[repr(trial)]) == count_steps(trial)
    return KNOWN[repr(trial)]


def run_check(launcher: LocalLauncher, directory: Path, check: str, argument: str = "") -> None:
    """Run one of the checks of `on_ranks.py` on two ranks."""
    spec = f"{Path(__file__).with_name('on_ranks.py')}:build"
    options = {"check": check, "argument": argument}
    result = launch(launcher, make_trial(workload=spec, options=options, plan=PLAN), directory)
    assert result.status is Status.COMPLETED, result.reason + result.traceback

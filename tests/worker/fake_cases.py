"""The matrix of jobs that are built on fake tensors: which there are, and the few that are run.

A job is a workload, a strategy, a world size (with a mesh where the strategy has one), a precision, and whether it is
compiled. All that the product does not refuse would be two thousand, at a second each and more. Most mistakes take two:
a strategy with a precision, a compiled workload, a world size with an odd number of rows. So cases are chosen such that
every two values of any two of the five that can occur together do, and cheap cases are preferred: a greedy cover,
without the cases whose pairs later ones have all brought again.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

from scalelab.errors import UsageError
from scalelab.records.refusals import check_strategy
from scalelab.records.settings import Spreading, StepShape
from scalelab.records.tasks import Forecast
from scalelab.records.trial import Trial
from scalelab.studies.shared.job import Job
from scalelab.studies.strategies.layouts import find_obstacle
from tests.worker.trials import make_trial

WORKLOADS: dict[str, dict[str, Any]] = {
    "mlp": {"dim": 64, "depth": 2},
    "lenet": {},
    "gpt2": {"layers": 2, "heads": 2, "width": 32, "sequence": 16, "vocabulary": 64},
    "transformer": {"samples": 4096, "features": 16, "d_model": 16, "heads": 2, "encoder_layers": 1}
    | {"decoder_layers": 1, "feedforward": 32, "tgt_length": 4},
    "resnet18": {"width": 8},
    "moe": {"width": 16, "heads": 2, "sequence": 16, "vocabulary": 64},
}
"""All that are built in, small."""
MESHES: dict[str, tuple[str, str, str]] = {
    "hsdp": ("dp=2,fsdp=4", "dp=8,fsdp=8", "dp=128,fsdp=8"),
    "tp": ("fsdp=4,tp=2", "dp=32,tp=2", "dp=32,fsdp=16,tp=2"),
    "pp": ("pp=2,fsdp=4", "pp=2,fsdp=16,tp=2", "pp=2,dp=512"),
    "ep": ("dp=4,ep=2", "dp=16,ep=4", "dp=256,ep=4"),
}
"""By strategy, of every world size."""
STRATEGIES = ("ddp", "fsdp-full", "fsdp-grad-op", "fsdp-none", "fsdp2", "zero1", "local-sgd", *MESHES)
WORLD_SIZES = (8, 64, 1024)
PRECISIONS = ("float32", "bfloat16", "float16", "float64", "autocast")
"""`--dtype`, and bfloat16 by autocast."""
BATCH = 4
COMPILING = {"lenet": 5.0, "mlp": 12.0, "gpt2": 10.0, "transformer": 12.0, "resnet18": 12.0, "moe": 9.0}
OF_TORCH = ("mlp", "transformer")
"""Models that are modules of torch itself: under DDP dynamo leaves them alone, so compiling others covers more."""


@dataclass(frozen=True)
class FakeCase:
    """One job of the matrix."""

    workload: str
    strategy: str
    num_ranks: int
    precision: str
    is_compiled: bool

    @property
    def mesh(self) -> str | None:
        meshes = MESHES.get(self.strategy)
        return meshes[WORLD_SIZES.index(self.num_ranks)] if meshes else None

    @property
    def cost(self) -> float:
        """About the processor seconds of it; `fully_shard` cuts every parameter into as many pieces as ranks."""
        is_cut = self.strategy == "fsdp2" and self.num_ranks == max(WORLD_SIZES) and self.workload != "mlp"
        return (COMPILING[self.workload] if self.is_compiled else 1.0) + 20.0 * is_cut

    def make(self, **more: Any) -> Trial:
        is_cast = self.precision == "autocast"
        settings: dict[str, Any] = {
            "workload": self.workload,
            "options": WORKLOADS[self.workload],
            "strategy": self.strategy,
            "num_ranks": self.num_ranks,
            "dtype": "bfloat16" if is_cast else self.precision,
            "shape": StepShape(autocast=is_cast, compile=self.is_compiled),
            "device": "cuda",
            "spreading": Spreading(mesh=self.mesh),
            "global_batch": BATCH * self.num_ranks,
        }
        trial = make_trial(**(settings | more))
        return replace(trial, global_batch=BATCH * trial.num_data_ranks, task=Forecast(messages=True))

    def is_possible(self) -> bool:
        """Whether the product would run it: the strategy takes the settings, and the model has a plan of the mesh."""
        try:
            trial = self.make()
            check_strategy(trial)
        except UsageError:
            return False
        job = Job(workload=self.workload, options=WORKLOADS[self.workload], device="cuda")
        return find_obstacle(job, trial.mesh, trial.global_batch) is None


FACTORS = (tuple(WORKLOADS), STRATEGIES, WORLD_SIZES, PRECISIONS, (False, True))


def list_pairs(case: FakeCase) -> frozenset[Any]:
    """Every two values of a case, with the names of what they are."""
    named = zip((field.name for field in fields(case)), astuple(case), strict=True)
    return frozenset(itertools.combinations(named, 2))


def list_possible() -> list[FakeCase]:
    every = (FakeCase(*values) for values in itertools.product(*FACTORS))
    return [case for case in every if case.is_possible()]


def cover_pairs() -> list[FakeCase]:
    """Cases that have every possible pair of values, at little cost."""
    pairs = {case: list_pairs(case) for case in list_possible()}
    missing = frozenset().union(*pairs.values())
    chosen = []
    while missing:
        best = max(pairs, key=lambda case: len(missing & pairs[case]) / case.cost)
        chosen.append(best)
        missing -= pairs[best]
    counts = Counter(pair for case in chosen for pair in pairs[case])
    for case in sorted(chosen, key=lambda case: -case.cost):
        if all(counts[pair] > 1 for pair in pairs[case]):
            chosen.remove(case)
            counts.subtract(pairs[case])
    return chosen

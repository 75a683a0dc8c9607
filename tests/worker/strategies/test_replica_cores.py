"""Replicas of an emulated dp on their own cores."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from scalelab.records.environment import usable_cores
from scalelab.worker.strategies.dp import EmulatedDataParallel


class Curious(nn.Module):
    """Remembers which cores each of its replicas may run on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: torch.Tensor) -> Any:
        self.seen.append(usable_cores())
        return self.layer(x)


def test_every_replica_runs_on_its_own_cores_and_the_caller_stays_where_it_was() -> None:
    before, cores = os.sched_getaffinity(0), usable_cores()
    model = Curious()
    spread = EmulatedDataParallel(model, 2)
    spread.own_cores(((cores[0],), (cores[-1],)))
    spread(torch.ones(4, 2)).sum().backward()
    assert sorted(model.seen) == sorted([(cores[0],), (cores[-1],)])
    assert os.sched_getaffinity(0) == before


def test_without_cores_of_their_own_replicas_run_where_the_process_may() -> None:
    model = Curious()
    EmulatedDataParallel(model, 2)(torch.ones(4, 2))
    assert model.seen == [usable_cores()] * 2

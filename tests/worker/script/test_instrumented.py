"""What is switched on for a block of steps is off again after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scalelab.records.trial import Block, StepKind
from tests.worker.script.test_session import watch


def test_a_script_that_accumulates_with_no_sync_communicates_again_after_steps_without(tmp_path: Path) -> None:
    syncs: list[bool] = []

    def loop(model: nn.Module, batches: Iterator[Any]) -> None:
        replica = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
        for number, (inputs, _) in enumerate(batches):
            with nullcontext() if number % 2 else replica.no_sync():
                replica(inputs).sum().backward()
            if number % 2:
                syncs.append(replica.require_backward_grad_sync)
                optimizer.step()

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        blocks = (Block(StepKind.CLEAN, 4), Block(StepKind.COMM_FREE, 3), Block(StepKind.CLEAN, 3))
        session, _ = watch(loop, tmp_path, blocks)
    finally:
        dist.destroy_process_group()
    assert session.obstacle == ""
    assert syncs == [True] * 4 + [False] * 4 + [True] * 3

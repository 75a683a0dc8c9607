"""The task `Forecast` for strategies that split the model: the memory of `tp` and `pp` before anything is allocated.

A plain step says nothing of a rank that holds a piece of every layer, or some of the layers. So the strategy itself is
put around fake tensors, in a fake process group (`instruments/fake_group.py`), and its step is written down as that of
a plain loop is: torch's own DTensor and schedule decide what is alive. Ranks that hold the same pieces take the same
memory, so one of every pipeline stage is looked at, and the one that takes the most is reported. Of a long pipeline two
stages at either end: those between hold the same layers, and no more micro-batches than the second.

What `fully_shard` adds on the axes `dp` and `fsdp` follows by its rules, from the pieces that `tp` leaves, and so do
the buckets of DDP, which `ep` puts around everything but experts. In a
pipeline it holds gradients and gathered parameters over several micro-batches; that has no rules and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from scalelab.analysis.memory import MemoryAccount, account_step
from scalelab.analysis.memory_sharding import Sharding, adapt_to_mesh, shard_recording, shard_standing
from scalelab.errors import UsageError
from scalelab.records.mesh import Mesh
from scalelab.records.observations import RankReport
from scalelab.records.strategies import find_strategy
from scalelab.records.trial import Trial
from scalelab.worker.device import choose_fake_device
from scalelab.worker.instruments.fake_group import build_fake, join_fake_group
from scalelab.worker.memory.forecast import Recorder, forecast_memory, list_units
from scalelab.worker.memory.recording import localise, make_report
from scalelab.worker.strategies.experts import find_experts
from scalelab.worker.training import Training


class SplitRecorder(Recorder):
    """Sees what DTensor does with the pieces of this rank, and not the DTensors, which have no memory."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


def forecast_rank(trial: Trial, report: RankReport) -> RankReport:
    """The report with the memory of a step, whatever the strategy."""
    is_split = find_strategy(trial.strategy).splits_model
    return (forecast_split if is_split else forecast_memory)(trial, report)


def forecast_split(trial: Trial, report: RankReport) -> RankReport:
    """The report with the memory that a step takes on the rank of the mesh that needs the most."""
    mesh = trial.mesh
    if mesh.pp > 1 and mesh.num_data_ranks > 1:
        raise UsageError(
            f"memory cannot be estimated for --mesh {mesh.text}: a sharded pipeline keeps gathered parameters over"
            " micro-batches, which has no rules; use an axis tp beside pp, or measure it"
        )
    inner = Mesh(pp=mesh.pp, tp=mesh.tp, ep=mesh.ep)
    alone = replace(
        trial,
        num_ranks=inner.num_ranks,
        global_batch=trial.batch_per_rank * inner.num_data_ranks,
        spreading=replace(trial.spreading, mesh=inner.text if inner.num_ranks > 1 else None),
    )
    ends = sorted({0, min(1, mesh.pp - 1), max(0, mesh.pp - 2), mesh.pp - 1})
    found = [_forecast_rank(alone, trial, stage * mesh.tp) for stage in ends]
    account, num_parameters, buffer_bytes = max(found, key=lambda one: one[0].peak_bytes)
    return replace(report, num_parameters=num_parameters, buffer_bytes=buffer_bytes, memory=make_report(account))


def _forecast_rank(alone: Trial, trial: Trial, rank: int) -> tuple[MemoryAccount, int | None, int]:
    """The account of one rank, and what else a report says of it."""
    with join_fake_group(alone.num_ranks, rank), build_fake(alone, rank, replicates=False) as training:
        recorder = SplitRecorder(training, choose_fake_device(trial.device), trial)
        recorder.run()
        sharding = _describe_sharding(trial, training)
    events, marks = shard_recording(recorder.recording, sharding)
    account = account_step(events, marks, shard_standing(recorder.standing, sharding))
    return account, training.num_parameters, recorder.standing["buffers"]


def _describe_sharding(trial: Trial, training: Training) -> Sharding:
    return Sharding(
        strategy=adapt_to_mesh(find_strategy(trial.strategy), trial.mesh),
        num_ranks=trial.mesh.fsdp,
        unit_bytes=tuple(count_bytes(parameters) for parameters in list_units(training.model)),
        gradient_bytes=count_bytes(list_replicated(training.model)),
        has_scratch=trial.device == "cpu",
    )


def list_replicated(model: nn.Module) -> list[nn.Parameter]:
    """The trained parameters that are no expert: those whose gradients DDP puts into buckets."""
    experts = {id(weight) for part in find_experts(model).values() for weight in part.parameters()}
    return [one for one in model.parameters() if one.requires_grad and id(one) not in experts]


def count_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Of this rank's pieces."""
    return sum(piece.nbytes for piece in map(localise, tensors) if piece is not None)

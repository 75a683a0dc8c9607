"""The task `Forecast` for strategies that split the model: the memory of `tp` and `pp` before anything is allocated.

A plain step says nothing of a rank that holds a piece of every layer, or some of the layers. So the strategy itself is
put around fake tensors, in a fake process group (`instruments/fake_group.py`), and its step is written down as that of
a plain loop is: torch's own DTensor and schedule decide what is alive. Ranks that hold the same pieces take the same
memory, so one of every pipeline stage is looked at, and the one that takes the most is reported. Of a long pipeline two
stages at either end: those between hold the same layers, and no more micro-batches than the second.

What `fully_shard` adds on the axes `dp` and `fsdp` follows by its rules, from the pieces that `tp` leaves, and so do
the buckets of DDP, which `ep` puts around everything but experts. In a pipeline it holds gradients and gathered
parameters over several micro-batches, as torch's schedule decides. So there `fully_shard` itself is put around the fake
stages, and what it takes and gives back by resizing storages is written down too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.tensor import DTensor

from scalelab.analysis.memory import MemoryAccount, PhaseMark, account_step
from scalelab.analysis.memory_sharding import Sharding, adapt_to_mesh, find_row_share, shard_recording, shard_standing
from scalelab.records.observations import RankReport
from scalelab.records.strategies import find_strategy
from scalelab.records.strategy import Mesh
from scalelab.records.trial import Trial
from scalelab.worker.device import choose_fake_device
from scalelab.worker.instruments.fake_group import build_fake, join_fake_group
from scalelab.worker.instruments.messages import NAMESPACES, find_payload, name_kind
from scalelab.worker.memory.forecast import SCRATCHPAD, Recorder, forecast_memory, list_rows, list_units
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


class ShardedRecorder(SplitRecorder):
    """Also sees what `fully_shard` does with storages without operators, and what gloo takes for itself."""

    def __init__(self, training: Training, device: torch.device, trial: Trial) -> None:
        super().__init__(training, device, trial)
        self._is_sharding = False
        self._has_scratch = trial.device == "cpu"

    def run(self) -> None:
        allocate, free, groups = _fsdp_param.alloc_storage, _fsdp_param.free_storage, _fsdp_param_group.FSDPParamGroup

        def see_allocated(tensor: torch.Tensor) -> None:
            allocate(tensor)
            self._see(tensor.untyped_storage())

        def see_freed(tensor: torch.Tensor) -> None:
            address = tensor.untyped_storage()._cdata
            if self._sizes.get(address):
                self._add(-self._sizes[address], address)
                self._sizes[address] = 0
            free(tensor)

        with ExitStack() as stack:
            for module in (_fsdp_param, _fsdp_param_group):
                stack.enter_context(patch.object(module, "alloc_storage", see_allocated))
            stack.enter_context(patch.object(_fsdp_param, "free_storage", see_freed))
            for name in ("unshard", "wait_for_unshard", "post_backward"):
                stack.enter_context(patch.object(groups, name, self._note_sharding(getattr(groups, name))))
            super().run()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = super().__torch_dispatch__(func, types, args, kwargs)
        if self._has_scratch and self._is_sharding and func.namespace in NAMESPACES and name_kind(func.name()):
            size = find_payload(func, args)
            self._add(size, SCRATCHPAD)
            self._add(-size, SCRATCHPAD)
        return results

    def _note_sharding(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            before, self._is_sharding = self._is_sharding, True
            try:
                return method(*args, **kwargs)
            finally:
                self._is_sharding = before

        return noted

    def _forget(self, address: int) -> None:
        if self._sizes.get(address):
            super()._forget(address)
        else:
            self._sizes.pop(address, None)

    def _add(self, num_bytes: int, address: int) -> None:
        super()._add(num_bytes, address)
        events = self.recording.events
        events[-1] = events[-1]._replace(is_exchange=self._is_sharding)


def forecast_rank(trial: Trial, report: RankReport) -> RankReport:
    """The report with the memory of a step, whatever the strategy."""
    is_split = find_strategy(trial.strategy).splits_model
    return (forecast_split if is_split else forecast_memory)(trial, report)


def forecast_split(trial: Trial, report: RankReport) -> RankReport:
    """The report with the memory that a step takes on the rank of the mesh that needs the most."""
    trial = replace(trial, shape=replace(trial.shape, compile=False))
    mesh = trial.mesh
    is_whole = mesh.pp > 1 and mesh.num_data_ranks > 1
    inner = mesh if is_whole else Mesh(pp=mesh.pp, tp=mesh.tp, ep=mesh.ep)
    alone = replace(
        trial,
        num_ranks=inner.num_ranks,
        global_batch=trial.batch_per_rank * inner.num_data_ranks,
        spreading=replace(trial.spreading, mesh=inner.text if inner.num_ranks > 1 else None),
    )
    ends = sorted({0, min(1, mesh.pp - 1), max(0, mesh.pp - 2), mesh.pp - 1})
    look = _forecast_sharded if is_whole else _forecast_rank
    found = [look(alone, trial, stage * (inner.num_ranks // mesh.pp)) for stage in ends]
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


def _forecast_sharded(_: Trial, trial: Trial, rank: int) -> tuple[MemoryAccount, int | None, int]:
    """The same of a rank whose stages are sharded or replicated."""
    with join_fake_group(trial.num_ranks, rank), build_fake(trial, rank, replicates=False) as training:
        recorder = ShardedRecorder(training, choose_fake_device(trial.device), trial)
        recorder.run()
    marks = [mark for mark in recorder.recording.marks if isinstance(mark, PhaseMark)]
    account = account_step(recorder.recording.events, marks, recorder.standing)
    return account, training.num_parameters, recorder.standing["buffers"]


def _describe_sharding(trial: Trial, training: Training) -> Sharding:
    return Sharding(
        strategy=adapt_to_mesh(find_strategy(trial.strategy), trial.mesh),
        num_ranks=trial.mesh.fsdp,
        unit_bytes=tuple(count_bytes(parameters) for parameters in list_units(training.model)),
        gradient_bytes=count_bytes(list_replicated(training.model)),
        largest_share=find_row_share(list_rows(training.model), trial.mesh.fsdp),
        has_scratch=trial.device == "cpu",
    )


def list_replicated(model: nn.Module) -> list[nn.Parameter]:
    """The trained parameters outside the experts: those whose gradients DDP puts into buckets."""
    experts = {id(weight) for part in find_experts(model).values() for weight in part.parameters()}
    return [one for one in model.parameters() if one.requires_grad and id(one) not in experts]


def count_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Of this rank's pieces."""
    return sum(piece.nbytes for piece in map(localise, tensors) if piece is not None)

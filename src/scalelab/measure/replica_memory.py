"""What every replica of `dp` holds: the price of having one device gather for all.

On GPUs each replica has a device, and torch's allocator says what was allocated there at most. On a CPU the replicas
are threads of one process, whose memory nobody can tell apart from outside. There the tensors of one step more are
added up: every replica has parameters, buffers, gradients and what its forward keeps for backward; replica 0, which is
the model itself, also has the optimizer's state and the gathered outputs. That is an account and no peak: it leaves out
what lives for an instant only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from scalelab.measure.step import mark_nothing, take_step
from scalelab.measure.training import Training
from scalelab.observations import RankReport
from scalelab.trial import Trial


def watch_replicas(trial: Trial, training: Training, _: Path, report: RankReport) -> RankReport:
    """The report with what each replica holds; unchanged for a strategy that has none."""
    if trial.strategy != "dp":
        return report
    if trial.device == "cuda":
        peaks = tuple(int(torch.cuda.max_memory_allocated(index)) for index in range(trial.num_ranks))
        return replace(report, replica_bytes=peaks)
    return replace(report, replica_bytes=account_replicas(training))


def account_replicas(training: Training) -> tuple[int, ...]:
    """Bytes of the tensors of every replica in one step, replica 0 first."""
    model: Any = training.model
    accounts = Accounts(model.module)
    with accounts.watch():
        take_step(training, mark_nothing)
    entries = tree_leaves(list(training.optimizer.state.values()))
    state = sum(entry.nbytes for entry in entries if isinstance(entry, torch.Tensor))
    first = accounts.first + state + accounts.outputs // training.accumulation
    others = accounts.others[-(model.num_replicas - 1) :]  # of the last pass: those before it have let go of theirs
    return (first, *others) if others else ()


class Accounts:
    """Hooks around the forward of replicas: torch hands a module's hooks on to its replicas."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._lock = threading.Lock()
        self._local = threading.local()
        self.first = 0
        self.others: list[int] = []
        self.outputs = 0
        """Of all replicas: what comes together on replica 0."""

    @contextmanager
    def watch(self) -> Iterator[None]:
        handles = [
            self._module.register_forward_pre_hook(self._enter),
            self._module.register_forward_hook(self._leave),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, replica: nn.Module, _: Any) -> None:
        kept: dict[int, int] = {}
        own = {tensor.untyped_storage().data_ptr() for tensor in (*replica.parameters(), *replica.buffers())}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            place = tensor.data_ptr()  # of the tensor, not its storage: a piece of a batch shares that with the others
            if tensor.untyped_storage().data_ptr() not in own:
                kept[place] = max(tensor.nbytes, kept.get(place, 0))
            return tensor

        self._local.kept = kept
        self._local.hooks = saved_tensors_hooks(pack, lambda tensor: tensor)
        self._local.hooks.__enter__()

    def _leave(self, replica: nn.Module, _: Any, output: Any) -> None:
        self._local.hooks.__exit__(None, None, None)
        parameters = sum(parameter.nbytes for parameter in replica.parameters())
        gradients = sum(parameter.nbytes for parameter in replica.parameters() if parameter.requires_grad)
        buffers = sum(buffer.nbytes for buffer in replica.buffers())
        total = parameters + gradients + buffers + sum(self._local.kept.values())
        with self._lock:
            self.outputs += sum(leaf.nbytes for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
            if self._is_first(replica):
                self.first = total
            else:
                self.others.append(total)

    def _is_first(self, replica: nn.Module) -> bool:
        """Replica 0 shares its parameters with the model."""
        pairs = zip(replica.parameters(), self._module.parameters(), strict=True)
        return all(ours.data_ptr() == theirs.data_ptr() for ours, theirs in pairs)

"""`cp`: context parallelism: each rank of the `cp` axis has its positions of every sequence (Liu et al. 2023).

torch's `context_parallel` (a prototype) makes attention a ring: keys and values of all ranks are gathered in forward
and again in backward, and their gradients are passed from rank to rank. A rank's positions are two pieces, one from
either end of the sequence, so that causal attention is as much work on every rank (`_HeadTailLoadBalancer`). The
context is entered with the first batch and never left: backward and activation checkpointing need it too. It is given
the numbers of all positions and cuts them; the same numbers then cut every batch, and tell the embedding of positions
where a token stands.

Every rank's loss is the mean over its own positions, and all have as many, so the mean over ranks, which DDP makes of
gradients, is the loss of whole sequences. Replicas on a `dp` axis have their own samples.

Limits: torch 2.13 has rings for the attention kernels of GPUs (flash, efficient, cuDNN), not for a CPU's. They do not
remember which mask dropout drew for which piece, so attention must not drop. Sequences must all be as long, of 2 · cp
equal pieces. Only `gpt2` says where its positions are.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from scalelab.errors import UsageError
from scalelab.records.trial import Trial
from scalelab.worker.models.gpt2 import Attention, Gpt2
from scalelab.worker.models.load import Loss
from scalelab.worker.strategies.meshes import make_device_mesh


class SequenceCut:
    """This rank's positions of a sequence; ring attention begins with the first one."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._entered = ExitStack()
        self.length = 0
        """Positions of a whole sequence; 0: none was seen yet."""
        self.places = torch.zeros(0, dtype=torch.int64)

    def __call__(self, batch: Any) -> Any:
        """This rank's piece of a batch, whose tensors have positions along their second dimension."""
        cut: Any = tree_map_only(torch.Tensor, self._select, batch)
        return cut

    def _select(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[1] != self.length:
            self._begin(tensor.shape[1], tensor.device)
        return tensor.index_select(1, self.places)

    def _begin(self, length: int, device: torch.device) -> None:
        pieces = 2 * self._mesh.size()
        if self.length or length % pieces:
            raise UsageError(
                f"cp={self._mesh.size()} cuts sequences into {pieces} equal pieces, got {length} positions"
                f"{f' after {self.length}' if self.length else ''}: use a multiple of {pieces}, the same for all"
            )
        from torch.distributed.tensor.experimental import context_parallel  # here: it imports much, for GPUs only

        self.length, self.places = length, torch.arange(length, device=device)
        whole = self.places
        ring = context_parallel(self._mesh, buffers=[whole], buffer_seq_dims=[0], no_restore_buffers={whole})
        self._entered.enter_context(ring)


def apply_cp(model: nn.Module, device: torch.device, trial: Trial) -> nn.Module:
    """Replicas that work on their own positions of the same samples."""
    if not isinstance(model, Gpt2):
        raise UsageError(
            f"--workload {trial.workload} has no plan for context parallelism: use gpt2, or --strategy tp"
            " --sequence-parallel"
        )
    dropout = max((part.dropout for part in model.modules() if isinstance(part, Attention)), default=0.0)
    if dropout:
        raise UsageError(f"cp cannot redraw what attention has dropped, got --dropout {dropout:g}: use --dropout 0")
    cut = SequenceCut(make_device_mesh(trial, device)["cp"])
    model.positions.register_forward_pre_hook(lambda *_: (cut.places,))
    replicated = DistributedDataParallel(
        model.to(device),
        device_ids=[device] if device.type == "cuda" else None,
        process_group=dist.new_group(),  # its own, to separate DDP's messages from the mesh's
        bucket_cap_mb=trial.spreading.bucket_mb,
    )
    replicated.cut = cut  # type: ignore[assignment]
    return replicated


def cut_sequences(loss: Loss, model: Any) -> Loss:
    """The loss of this rank's positions."""

    def cut_loss(called: Any, batch: Any) -> torch.Tensor:
        return loss(called, model.cut(batch))

    return cut_loss

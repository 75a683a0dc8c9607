"""`torchft`: replicas that agree on every step, by torchft's Manager: training that survives a lost replica.

Every rank is a replica group of its own. Before its first forward pass of a step it asks a lighthouse, which runs on
rank 0, for a quorum; gradients are averaged among those who are in it by DDP's buckets; before the update all vote on
whether the step counts. The steps measured here have all replicas in the quorum, so what is measured is what the
insurance costs while nothing happens. A lost replica ends the trial, as it does with every other strategy.

torchft never rebuilds DDP's buckets and looks for unused parameters in every step, and it broadcasts no buffers.
"""

from __future__ import annotations

import importlib
import os
import socket
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from scalelab.errors import UsageError
from scalelab.records.trial import Trial
from scalelab.worker.optimizers import Factory

LOOPBACK = "127.0.0.1"
PATIENCE = timedelta(minutes=5)
"""How long a replica waits for others: a rank that compiles or evaluates is not lost."""


def apply_torchft(model: nn.Module, device: torch.device, trial: Trial) -> nn.Module:
    """DDP whose gradients are averaged in the quorum of a step."""
    torchft = load_torchft()
    manager = join_replicas(torchft, device)
    replicated: nn.Module = torchft.DistributedDataParallel(
        manager, model.to(device), bucket_cap_mb=trial.spreading.bucket_mb
    )
    # Assigned around nn.Module, which means attributes to be tensors and modules.
    object.__setattr__(replicated, "manager", manager)
    object.__setattr__(replicated, "has_quorum", False)
    replicated.register_forward_pre_hook(ask_for_quorum)
    return replicated


def ask_for_quorum(model: Any, _: Any) -> None:
    """Begin a step, in its first pass."""
    if model.training and not model.has_quorum:
        model.manager.start_quorum()
        object.__setattr__(model, "has_quorum", True)


def vote_on_steps(make: Factory, model: nn.Module, _: Trial) -> torch.optim.Optimizer:
    """The optimizer that `make` gives, which updates only what all replicas have voted for."""
    optimizer = make(model.parameters())
    manager: Any = model.manager
    update = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        object.__setattr__(model, "has_quorum", False)
        if not manager.should_commit():
            raise RuntimeError(f"torchft's replicas did not commit a step: {manager.errored()}")
        return update(*args, **kwargs)

    optimizer.step = step  # type: ignore[method-assign]
    return optimizer


def join_replicas(torchft: ModuleType, device: torch.device) -> Any:
    """The manager of this rank's replica; rank 0 also runs the lighthouse that all of them ask."""
    coordination = importlib.import_module("torchft.coordination")
    num_ranks = dist.get_world_size()
    hosts: list[str | None] = [None] * num_ranks
    dist.all_gather_object(hosts, socket.gethostname())
    if len(set(hosts)) > 1:
        raise UsageError(f"--strategy torchft runs on one host here, got {len(set(hosts))}: use ddp")
    address: list[str | None] = [None]
    if dist.get_rank() == 0:
        lighthouse = coordination.LighthouseServer(bind=f"{LOOPBACK}:0", min_replicas=num_ranks)
        KEPT.append(lighthouse)
        address = [lighthouse.address().replace(socket.gethostname(), LOOPBACK)]
    dist.broadcast_object_list(address, 0)
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    make_group = torchft.ProcessGroupGloo if device.type == "cpu" else torchft.ProcessGroupNCCL
    manager = torchft.Manager(
        pg=make_group(timeout=PATIENCE),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=num_ranks,
        timeout=PATIENCE,
        quorum_timeout=PATIENCE,
        rank=0,
        world_size=1,
        store_addr=LOOPBACK,
        store_port=store.port,
        lighthouse_addr=address[0],
        replica_id=f"rank{dist.get_rank()}",
        hostname=LOOPBACK,
        init_sync=False,  # ranks draw the same weights
    )
    KEPT.extend((store, manager))
    return manager


KEPT: list[Any] = []
"""Servers that live as long as this process."""


def load_torchft() -> ModuleType:
    os.environ.setdefault("RUST_LOG", "warn")  # every step would write a dozen lines
    return importlib.import_module("torchft")

"""`deepspeed-1`, `-2`, `-3`: DeepSpeed's ZeRO, by an engine around the model (Rajbhandari et al. 2020).

Stage 1 shards the optimizer state, stage 2 also the gradients, stage 3 also the parameters. The engine wants model and
optimizer at once: the model is only held until its optimizer is made. From then on forward, backward and update are the
engine's, gradients included, so the loop can neither clip nor accumulate them.

What is sent follows from DeepSpeed's defaults, of which only the clipping to a norm of 1 is turned off. Stages 1 and 2
all-reduce buckets of gradients and gather the updated parameters. Stage 3 gathers parameters in forward and keeps them
until backward is done with them (in models of up to 10⁹), scatters gradients, and gathers after the update those of up
to 10⁵ numbers, which stay whole on every rank. The norm of all gradients is added up in any case.

On a CPU DeepSpeed would compile a shared-memory all-reduce when it is first used. That takes minutes, a killed rank
leaves its cache locked for all that come later, and what it sends passes torch.distributed by: it is switched off, and
gloo carries everything. The timer of throughput is off too: it synchronizes the device in every step.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scalelab.records.strategy import MessageBasis
from scalelab.records.trial import Trial
from scalelab.worker.optimizers import Factory

SHARED_MEMORY = "deepspeed_shm_comm"


class ZeroModel(nn.Module):
    """A model that the engine runs as soon as there is one."""

    engine: Any = None

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def start(self, engine: Any) -> None:
        """Run by an engine; around nn.Module, which would count its parameters twice."""
        object.__setattr__(self, "engine", engine)

    def train(self, mode: bool = True) -> ZeroModel:
        if self.engine is not None:
            self.engine.train(mode)
        return super().train(mode)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)

    def describe_message_basis(self) -> MessageBasis:
        """The sizes that an engine's messages follow from: flat parameters, or small ones first and then the others."""
        zero, num_ranks = self.engine.optimizer, dist.get_world_size()
        trained = [one for one in self.module.parameters() if one.requires_grad]
        sizes = [(getattr(one, "ds_numel", one.numel()), one.element_size(), is_whole(one)) for one in trained]
        padded = [(-(-number // num_ranks) * num_ranks * size, small) for number, size, small in sizes]
        units = [sum(size for size, small in padded if small is wanted) for wanted in (True, False)]
        is_flat = hasattr(zero, "bit16_groups_flat")
        return MessageBasis(
            gradient_bytes=sum(number * size for number, size, _ in sizes),
            num_gradients=sum(number for number, *_ in sizes),
            buffer_bytes=sum(buffer.nbytes for buffer in self.buffers()),
            unit_bytes=(sum(flat.nbytes for flat in zero.bit16_groups_flat),) if is_flat else tuple(units),
            clip_bytes=4 if is_flat else 8,
        )


class EngineOptimizer(torch.optim.Optimizer):
    """What the loop and its schedule see of an engine: groups and state are those of the optimizer inside."""

    def __init__(self, engine: Any, inside: torch.optim.Optimizer) -> None:
        super().__init__(inside.param_groups, inside.defaults)
        self._engine = engine
        self.state = inside.state

    def step(self, _: Any = None) -> None:  # type: ignore[override]
        self._engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The engine's step has done it."""


def apply_zero(model: nn.Module, device: torch.device, _: Trial) -> nn.Module:
    """Hold the model until its optimizer is made."""
    load_deepspeed(device)
    return ZeroModel(model.to(device))


def start_engine(make: Factory, model: nn.Module, trial: Trial) -> torch.optim.Optimizer:
    """Hand model and optimizer to an engine of the strategy's stage."""
    assert isinstance(model, ZeroModel)
    inside = make(model.module.parameters())
    device = next(model.module.parameters()).device
    engine, *_ = load_deepspeed(device).initialize(
        model=model.module,
        optimizer=inside,
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": trial.batch_per_rank,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,  # its default is 1
            "zero_optimization": {"stage": int(trial.strategy[-1])},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "timers": {"throughput": {"enabled": False}},
        },
    )
    model.start(engine)
    return EngineOptimizer(engine, inside)


def load_deepspeed(device: torch.device) -> ModuleType:
    """DeepSpeed for a kind of device; it takes seconds to import, so only ranks that use it do."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    for name, own in (("RANK", dist.get_rank()), ("WORLD_SIZE", dist.get_world_size())):
        os.environ.setdefault(name, str(own))
    deepspeed = importlib.import_module("deepspeed")
    deepspeed.ops.__compatible_ops__[SHARED_MEMORY] = False
    return deepspeed


def is_whole(parameter: torch.Tensor) -> bool:
    """Whether stage 3 keeps it on every rank."""
    return bool(getattr(parameter, "ds_persist", False))

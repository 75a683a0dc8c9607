"""Blocks of steps in a script: what is switched on for them, between two steps, and off again.

    phases      input, forward, backward and optimizer are timed; the rest of the step is other
    comm_free   DDP leaves out its gradient all-reduce; the state from before is restored
    profiled    torch's profiler records

Forward begins with a trained module and lasts until backward begins, so that it includes the loss.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _world
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from scalelab.records.trial import PHASES
from scalelab.worker.device import list_activities
from scalelab.worker.instruments.profiles import let_threads_finish
from scalelab.worker.loop import PhaseClock, RawStep, ReadyClock, StallClock
from scalelab.worker.script.boundary import replaced
from scalelab.worker.script.passes import hook_before
from scalelab.worker.script.watch import TrainingWatch

OTHER = "other"
ENGINE = "deepspeed.runtime.engine"
SHARDINGS = {
    ShardingStrategy.FULL_SHARD: "fsdp-full",
    ShardingStrategy.SHARD_GRAD_OP: "fsdp-grad-op",
    ShardingStrategy.NO_SHARD: "fsdp-none",
}


class PhaseHooks:
    """Follows the phases of a script's steps while it is entered: `end_phase` is called where each ends."""

    def __init__(self, watch: TrainingWatch) -> None:
        self._watch = watch
        self._stack = ExitStack()
        self._current = self._outer = OTHER
        self.last_batch: Any = None
        """What came out of a data loader last, or went into a trained module."""

    def end_phase(self, phase: str) -> None:
        """The time since the last call belongs to this phase."""
        raise NotImplementedError

    def follow(self) -> None:
        """Put the hooks on."""
        stack = self._stack
        stack.enter_context(self._watch.loading(self._load))
        for module in () if self._watch.modules.is_hidden else self._watch.trained:
            stack.callback(hook_before(module, self._before_forward).remove)
        engine = getattr(sys.modules.get(ENGINE), "DeepSpeedEngine", None)
        for name, phase in (("backward", "backward"), ("step", "optimizer")) if engine is not None else ():
            stack.enter_context(replaced(engine, name, functools.partial(self._wrap_whole, phase)))
        self._watch.on_phase = self._hear
        stack.callback(self._stop)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def switch(self, phase: str) -> None:
        """Another phase begins."""
        self.end_phase(self._current)
        self._current = self._outer if phase == OTHER else phase

    def _hear(self, phase: str) -> None:
        if phase != "forward" or self._current == OTHER:
            self.switch(phase)

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        # in an optimizer: its closure
        if self._current in (OTHER, "optimizer") and self._watch.modules.is_training(module):
            if self.last_batch is None:
                self.last_batch = inputs
            self.switch("forward")

    def _wrap_whole(self, phase: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """A library's function that is one phase, with what it does around torch's own: ZeRO reduces and gathers."""

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._outer = phase
            self.switch(phase)
            try:
                return original(*args, **kwargs)
            finally:
                self._outer = OTHER
                if self._watch.on_phase == self._hear:  # the block may have ended in it
                    self.switch(OTHER)

        return call

    def _load(self, original: Callable[[Any], Any], iterator: Any) -> Any:
        self._watch.begin_load()
        before = self._current
        self.switch("input")
        try:
            self.last_batch = original(iterator)
            return self.last_batch
        finally:
            self.switch(before if before != "input" else OTHER)

    def _stop(self) -> None:
        self._watch.on_phase = None


class PhaseBlock(PhaseHooks):
    """Times the phases of every step while it is entered."""

    def __init__(self, watch: TrainingWatch, synchronize: Callable[[], None]) -> None:
        super().__init__(watch)
        self._synchronize = synchronize

    def __enter__(self) -> PhaseBlock:
        is_on_cpu = all(p.device.type == "cpu" for module in self._watch.trained for p in module.parameters())
        self._stalls = self._stack.enter_context(StallClock(is_wanted=is_on_cpu))
        model = find_replicated(self._watch.trained)
        self._ready = self._stack.enter_context(ReadyClock(model or nn.Module(), self._stalls))
        self.follow()
        return self

    def begin(self) -> None:
        """Start of a step."""
        self._current = self._outer
        self.last_batch = None
        self._clock = PhaseClock(self._synchronize, self._stalls.read, (*PHASES, OTHER))
        self._ready.begin()

    def end_phase(self, phase: str) -> None:
        self._clock.mark(phase)

    def complete(self, step: RawStep) -> RawStep:
        """The step that just ended, with its phases, its stalls and the time of its last gradient."""
        clock, ready = self._clock, self._ready
        stalls = clock.stalls | {"ready": ready.read_stall(clock.start_stall)}
        return step._replace(phases=clock.seconds, ready=ready.read(clock.start), stalls=stalls)


def find_replicas(trained: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    """The models that DDP replicates, also inside the wrapper of a library or of torch.compile."""
    found = {id(one): one for module in trained for one in module.modules() if isinstance(one, DistributedDataParallel)}
    return list(found.values())


def find_replicated(trained: Sequence[nn.Module]) -> nn.Module | None:
    """The model that DDP replicates; None: there is none, or several."""
    found = find_replicas(trained)
    return found[0] if len(found) == 1 else None


def is_joining(trained: Sequence[nn.Module]) -> bool:
    """Whether DDP's `join()` lets ranks take different numbers of steps."""
    return any(one._join_config.enable for one in find_replicas(trained))


def is_all_replicated(trained: Sequence[nn.Module]) -> bool:
    """Whether DDP, and nothing else, averages every gradient of the trained modules."""
    inside = {id(parameter) for one in find_replicas(trained) for parameter in one.parameters()}
    needed = [one for module in trained for one in module.parameters() if one.requires_grad]
    return bool(needed) and all(id(one) in inside for one in needed)


def name_strategy(trained: Sequence[nn.Module]) -> str:
    """The strategy that a script applied to its model by itself; empty: none of those that scalelab has."""
    if is_all_replicated(trained):
        return "ddp"
    every = [part for module in trained for part in module.modules()]
    if any(isinstance(part, FSDPModule) for part in every):
        return "fsdp2"
    found = {SHARDINGS.get(part.sharding_strategy, "") for part in every if isinstance(part, FullyShardedDataParallel)}
    return found.pop() if len(found) == 1 else ""


def count_sharing(trained: Sequence[nn.Module]) -> int:
    """Ranks that work on the same samples, as under tensor parallelism; 1: every rank has samples of its own.

    Where DDP or FSDP averages gradients, its group has one rank of each of those; otherwise parameters that are spread
    over a mesh are there for one batch, and so are the stages of a pipeline.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    every = [part for module in trained for part in module.modules()]
    for part in every:
        if isinstance(part, DistributedDataParallel):
            return world // part.process_group.size()
        group = part._get_fsdp_state()._fsdp_param_group if isinstance(part, FSDPModule) else None
        if group is not None:
            return world // group.mesh_info.mesh.size()
    meshes = [one.device_mesh for part in every for one in part.parameters() if isinstance(one, DTensor)]
    return (meshes[0].size() if meshes else 1) * count_stage_ranks(every)


def count_stage_ranks(every: Sequence[nn.Module]) -> int:
    """Ranks of the pipeline in which torch.distributed.pipelining runs one of these modules; 1: there is none."""
    kind = getattr(sys.modules.get("torch.distributed.pipelining.stage"), "_PipelineStageBase", None)
    stages = [one for one in gc.get_objects() if issubclass(type(one), kind)] if kind is not None else []
    own = {id(part) for part in every}
    return next((one.group_size for one in stages if any(id(part) in own for part in one.submod.modules())), 1)


@contextmanager
def without_all_reduce() -> Iterator[None]:
    """DDP only accumulates gradients on each rank, whatever the script sets in the meantime.

    A property of the class hides the attribute that scripts set; what they set holds again afterwards. `no_sync` has
    nothing to do meanwhile: it would read False there, and put that back at its end as what was before.
    """
    name = "require_backward_grad_sync"
    setattr(
        DistributedDataParallel, name, property(lambda _: False, lambda one, value: vars(one).update({name: value}))
    )
    try:
        with replaced(DistributedDataParallel, "no_sync", lambda _: lambda _: nullcontext()):
            yield
    finally:
        delattr(DistributedDataParallel, name)


def can_renew_reducer(model: DistributedDataParallel) -> bool:
    """Whether DDP's reducer can be made again as it was: hooks and options that only the old one knows are not."""
    has_hook = bool(model._get_ddp_logging_data().get("comm_hook"))  # also those in C++
    kept = (has_hook, model.gradient_as_bucket_view, model.mixed_precision, model._delay_all_reduce_params)
    return not any(kept) and not model.static_graph


def renew_reducer(model: DistributedDataParallel) -> None:
    """Let DDP forget which parameters were used without communication: it would want their gradients in the next step.

    It notes that only where it looks for unused parameters, and there the new reducer has the same buckets: they are
    never rebuilt. Made as DDP does when it is unpickled, without communication.
    """
    parameters, is_sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, is_sparse, names, model.static_graph)


class ProfiledBlock:
    """torch's profiler over whole steps; the trace is written when the block ends."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace
        self._profile = torch.profiler.profile(activities=list_activities(), record_shapes=True)
        self._region: Any = None
        self._number = 0

    def __enter__(self) -> ProfiledBlock:
        self._profile.start()
        return self

    def begin(self) -> None:
        """Start of a step."""
        self._region = torch.profiler.record_function(f"ProfilerStep#{self._number}")
        self._region.__enter__()
        self._number += 1

    def end(self) -> None:
        """End of a step."""
        self._region.__exit__(None, None, None)

    def __exit__(self, *_: object) -> None:
        let_threads_finish()
        self._profile.stop()
        self._trace.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._trace))


def count_messages() -> int | None:
    """Collectives and messages so far, of all process groups: torch numbers them; None: a backend does not."""
    try:
        backends = {group._get_backend(kind) for group in _world.pg_map for kind in group._device_types}
        return sum(backend._get_sequence_number_for_group() for backend in backends)  # type: ignore[attr-defined]
    except RuntimeError:
        return None

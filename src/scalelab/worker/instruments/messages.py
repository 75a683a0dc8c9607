"""What a rank sends in one step: every collective that it starts, with the bytes of its tensors.

One step more is run after the timed ones, under a dispatch mode of torch that sees every operation before it is
carried out. Collectives are operators of torch (`c10d::allreduce_` …) wherever they start: DDP's reducer in C++, FSDP
in Python, a layer or a gradient hook. The operator is what is counted, not what the backend makes of it: gloo, for one,
carries a reduce-scatter out as an all-reduce of the whole tensor.

Payload is the whole tensor that the collective is about: for an all-gather what all ranks receive, for a
reduce-scatter what each rank gives. What a message is for follows from who started it and when;
`analysis/traffic.py` says what there should be.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.batchnorm import SyncBatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scalelab.records.observations import Message, MessageBasis, RankReport
from scalelab.records.settings import Spreading
from scalelab.records.strategies import find_strategy
from scalelab.records.trial import Trial
from scalelab.worker.memory.recording import list_replicas
from scalelab.worker.models.gpt2 import Attention
from scalelab.worker.step import mark_nothing, take_step
from scalelab.worker.strategies.experts import find_experts
from scalelab.worker.strategies.meshes import GROUPS
from scalelab.worker.strategies.pipeline import StagedModel
from scalelab.worker.strategies.plans import count_cut, count_reduced, count_sent, list_tied
from scalelab.worker.strategies.sync_batch_norm import SyncBatchNormOnCpu
from scalelab.worker.training import Training, find_dtype
from scalelab.workloads.catalogue import BUILT_IN, MoeOptions

NAMESPACES = ("c10d", "_c10d_functional")
OPERATOR_NAMES = (
    ("allreduce", "all_reduce"),
    ("all_reduce", "all_reduce"),
    ("reduce_scatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("all_gather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("all_to_all", "all_to_all"),
    ("broadcast", "broadcast"),
    ("barrier", "barrier"),
    ("::send", "send"),
)
"""Parts of an operator's name, and the collective that it is."""
NORM_FILES = ("strategies/sync_batch_norm.py", "nn/modules/_functions.py")
"""Where our batch norm and torch's synchronize statistics."""


@dataclass(frozen=True)
class StartedCollective:
    """One collective, as it was started."""

    kind: str
    payload_bytes: int
    is_from_norm: bool
    axis: str = ""


def watch_messages(trial: Trial, training: Training, _: Path, report: RankReport) -> RankReport:
    """The report with the messages of one step, and the sizes that they follow from."""
    basis = describe_split(trial, training.model, describe_basis(training.model))
    strategy = find_strategy(trial.strategy)
    if training.clip_norm is not None and strategy.count_shards("gradients", trial.num_ranks) > 1:
        basis = replace(basis, clip_bytes=8 if trial.dtype == "float64" else 4)
    average = getattr(training.optimizer, "average", None)  # of local SGD
    if average is not None:
        while not average.is_next:
            take_step(training, mark_nothing)
        basis = replace(basis, averaged_bytes=basis.gradient_bytes)
    recorder = CallRecorder()
    with recorder, count_buffers(training.model) as sent:
        take_step(training, recorder.end_phase)
    training.synchronize()
    basis = replace(basis, buffer_bytes=sum(sent) if list_replicas(training.model) else basis.buffer_bytes)
    messages = count_messages(recorder.by_phase, trial.strategy, trial.spreading)
    return replace(report, messages=messages, message_basis=basis)


@contextmanager
def count_buffers(model: nn.Module) -> Iterator[list[int]]:
    """The bytes of the buffers of every DDP, for each of its forwards that brings them up to date.

    That is one in a step, unless the loss calls the model several times, or one of the parts that take turns.
    """
    sent: list[int] = []

    def see(replicated: Any, _: object) -> None:
        if replicated.will_sync_module_buffers():
            sent.append(sum(buffer.nbytes for buffer in replicated.module.buffers()))

    hooks = [one.register_forward_pre_hook(see) for one in list_replicas(model)]
    try:
        yield sent
    finally:
        for hook in hooks:
            hook.remove()


class CallRecorder(TorchDispatchMode):
    """Sees every operation of a step and keeps the collectives, phase by phase."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_phase: dict[str, list[StartedCollective]] = {}
        self._calls: list[StartedCollective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor comes first, and what it starts in turn is seen
        if func.namespace in NAMESPACES:
            kind = name_kind(func.name())
            if kind not in ("barrier", ""):
                self._calls.append(
                    StartedCollective(kind, find_payload(func, args), is_norm_calling(), find_axis(args))
                )
        return func(*args, **(kwargs or {}))

    def end_phase(self, phase: str) -> None:
        """What was started since the last phase belongs to this one."""
        self.by_phase.setdefault(phase, []).extend(self._calls)
        self._calls = []


def name_kind(operator: str) -> str:
    """The collective behind an operator such as `c10d::_allgather_base_`; what is none, such as waiting, is empty."""
    return next((kind for part, kind in OPERATOR_NAMES if part in operator), "")


def find_axis(args: Sequence[Any]) -> str:
    """The axis of a mesh whose group a collective was given, as an object or by name; empty: another group."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            arg = dist.ProcessGroup.unbox(arg).group_name
        if isinstance(arg, str) and arg in GROUPS:
            return GROUPS[arg]
    return ""


def find_payload(func: Any, args: Sequence[Any]) -> int:
    """The bytes of the whole tensor that a collective is about.

    The operators of gathering and scattering are handed the whole, as one tensor or in pieces, beside one rank's piece:
    the larger argument is the whole. The functional ones are handed only what goes in, of which an all-gather makes as
    many as its group has ranks, their second argument.
    """
    sizes = [sum(leaf.nbytes for leaf in tree_leaves(arg) if isinstance(leaf, torch.Tensor)) for arg in args]
    is_piece = func.namespace == "_c10d_functional" and name_kind(func.name()) == "all_gather"
    return max(sizes, default=0) * (int(args[1]) if is_piece else 1)


def is_norm_calling() -> bool:
    """Whether a synchronized batch norm started the present call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(NORM_FILES):
            return True
        frame = frame.f_back
    return False


def count_messages(
    by_phase: Mapping[str, Sequence[StartedCollective]], strategy: str, spreading: Spreading | None = None
) -> tuple[Message, ...]:
    """Calls of one kind, purpose and phase as one line, in the order in which they first came."""
    found: dict[tuple[str, str, str, str], list[int]] = {}
    for phase, calls in by_phase.items():
        for call in calls:
            purpose, axis = name_purpose(call, phase, strategy, spreading or Spreading())
            found.setdefault((call.kind, purpose, phase, axis), []).append(call.payload_bytes)
    return tuple(
        Message(kind=kind, purpose=purpose, phase=phase, axis=axis, count=len(sizes), payload_bytes=sum(sizes))
        for (kind, purpose, phase, axis), sizes in found.items()
    )


def name_purpose(call: StartedCollective, phase: str, strategy: str, spreading: Spreading) -> tuple[str, str]:
    """What the strategy sends in this phase with this collective, and over which axis; empty: it did not start it.

    What all ranks send has no axis, although one axis of a mesh may be all ranks, with one group for both.
    """
    if call.is_from_norm:
        return "batch norm", ""
    sends = [send for send in find_strategy(strategy).sends if getattr(spreading, send.option, True)]
    for axis in dict.fromkeys((call.axis, "")):
        for send in sends:
            if (send.kind, send.phase, send.axis) == (call.kind, phase, axis):
                return send.purpose, axis
    is_clipping = call.kind == "all_reduce" and phase == "optimizer"
    return ("gradient norm", "") if is_clipping else ("", call.axis)


def describe_split(trial: Trial, model: nn.Module, basis: MessageBasis) -> MessageBasis:
    """The sizes that a mesh adds: of activations, which follow from the plan of the model and the batch."""
    mesh, size = trial.mesh, find_dtype(trial).itemsize
    if not find_strategy(trial.strategy).axes:
        return basis
    if "ep" in find_strategy(trial.strategy).axes or mesh.cp > 1:
        return (describe_attention if mesh.cp > 1 else describe_experts)(trial, model, basis)
    if isinstance(model, StagedModel):
        basis = replace(basis, regathered_bytes=model.num_micro_batches * measure_blocks(model))
    if mesh.fsdp == 1:
        basis = replace(basis, shard_bytes=basis.unit_bytes, unit_bytes=(), regathered_bytes=0)
    elif mesh.dp > 1:
        basis = replace(basis, shard_bytes=tuple(unit // mesh.fsdp for unit in basis.unit_bytes))
    is_known = mesh.tp * mesh.pp == 1 or trial.workload in BUILT_IN
    is_plain = mesh.tp == 1 or (trial.shape.checkpointing == "none" and not trial.shape.autocast)
    basis = replace(basis, is_complete=is_known and is_plain)  # autocast casts some activations and not others
    if not basis.is_complete:
        return basis
    if mesh.tp > 1:
        forward, backward = (size * number for number in count_reduced(model, trial))
        basis = replace(basis, reduced_bytes=(forward, backward))
        if trial.spreading.sequence_parallel:
            cut, norms = (size * number for number in count_cut(model, trial))
            basis = replace(
                basis,
                reduced_bytes=(0, 0),
                gathered_bytes=(backward + cut, forward + cut),
                scattered_bytes=(forward, backward),
                norm_bytes=norms,
            )
    if isinstance(model, StagedModel):
        tied: list[torch.Tensor] = [weight for stage in model.stages for weight in list_tied(stage)]
        basis = replace(
            basis,
            hop_bytes=size * sum(count_sent(trial, stage) for stage in model.hops),
            tied_bytes=sum(measure_local(weight) for weight in tied) if len(tied) == 1 else 0,
        )
    return basis


def describe_attention(trial: Trial, model: nn.Module, basis: MessageBasis) -> MessageBasis:
    """Keys and values of whole sequences in every layer; rings add up their gradients in float32."""
    layers = [part for part in model.modules() if isinstance(part, Attention)]
    length: int = model.cut.length  # type: ignore[union-attr,assignment]
    numbers = sum(2 * trial.batch_per_rank * length * part.num_heads * part.head_size for part in layers)
    attended = (numbers * find_dtype(trial).itemsize, numbers * 4)
    return replace(basis, attended_bytes=attended, is_complete=trial.shape.checkpointing == "none")


def describe_experts(trial: Trial, model: nn.Module, basis: MessageBasis) -> MessageBasis:
    """What tokens take on their way to experts and back, and the gradients of experts beside those of the rest.

    Activation checkpointing sends them once more.
    """
    every = find_experts(model).values()
    weights = [weight for experts in every for weight in experts.parameters() if weight.requires_grad]
    options: Any = BUILT_IN[trial.workload](**trial.options) if trial.workload in BUILT_IN else None
    slots = options.experts * options.num_slots * options.width if isinstance(options, MoeOptions) else 0
    sent = 2 * len(every) * trial.batch_per_rank * slots * find_dtype(trial).itemsize
    return replace(
        basis,
        gradient_bytes=basis.gradient_bytes - sum(weight.numel() * weight.element_size() for weight in weights),
        num_gradients=basis.num_gradients - sum(weight.numel() for weight in weights),
        expert_bytes=sum(map(measure_local, weights)) if trial.mesh.dp > 1 else 0,
        exchanged_bytes=sent if trial.mesh.ep > 1 else 0,
        is_complete=isinstance(options, MoeOptions) and trial.shape.checkpointing == "none",
    )


def measure_local(weight: torch.Tensor) -> int:
    """The bytes of a weight, or of this rank's shard of it."""
    return weight.to_local().nbytes if isinstance(weight, DTensor) else weight.nbytes


def describe_basis(model: nn.Module) -> MessageBasis:
    """The sizes of a model, whatever its strategy; one that an engine runs says them itself."""
    if hasattr(model, "describe_message_basis"):
        described: MessageBasis = model.describe_message_basis()  # type: ignore[operator]
        return described
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    norms = [m for m in model.modules() if isinstance(m, SyncBatchNormOnCpu | SyncBatchNorm)]
    return MessageBasis(
        gradient_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        num_gradients=sum(parameter.numel() for parameter in parameters),
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        unit_bytes=measure_units(model),
        norm_channels=tuple(norm.num_features for norm in norms) if dist.get_world_size() > 1 else (),
    )


def measure_units(model: nn.Module) -> tuple[int, ...]:
    """The bytes of every unit of FSDP, the root first, filled up to equal pieces; none where nothing is sharded."""
    if isinstance(model, FullyShardedDataParallel):
        return tuple(measure_flat(unit) for unit in FullyShardedDataParallel.fsdp_modules(model))
    if isinstance(model, FSDPModule | StagedModel):
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        return tuple(sum(measure_dtensor(p) for p in list_own_parameters(unit)) for unit in units)
    return ()


def measure_blocks(model: StagedModel) -> int:
    """The bytes of the units inside of a rank's stages, filled up to equal pieces."""
    inner = [part for stage in model.stages for part in stage.modules() if part is not stage]
    units = [part for part in inner if isinstance(part, FSDPModule)]
    return sum(measure_dtensor(p) for unit in units for p in list_own_parameters(unit))


def measure_flat(unit: FullyShardedDataParallel) -> int:
    """FSDP1: a unit's parameters lie in one flat tensor, of which each rank has an equal piece."""
    flat = getattr(unit, "_flat_param", None)
    if flat is None:
        return 0
    padded: torch.Size = getattr(flat, "_padded_unsharded_size", flat.size())
    return padded.numel() * int(flat.element_size())


def list_own_parameters(unit: nn.Module) -> list[nn.Parameter]:
    """FSDP2: the parameters of a unit that belong to no unit inside it."""
    inner = {
        id(parameter)
        for module in unit.modules()
        if module is not unit and isinstance(module, FSDPModule)
        for parameter in module.parameters()
    }
    return [parameter for parameter in unit.parameters() if id(parameter) not in inner]


def measure_dtensor(parameter: torch.Tensor) -> int:
    """FSDP2: a parameter is cut along its first dimension, and each rank's rows are filled up to as many."""
    if not isinstance(parameter, DTensor) or not parameter.dim():
        return parameter.nbytes
    axes, mesh, shape = list_axes(parameter), parameter.device_mesh, list(parameter.shape)
    if "tp" in axes:
        place = parameter.placements[axes.index("tp")]
        if isinstance(place, Shard):
            shape[place.dim] //= mesh["tp"].size()
    num_ranks = mesh["fsdp"].size() if "fsdp" in axes else mesh.size()
    rows = -(-shape[0] // num_ranks) * num_ranks
    return rows * math.prod(shape[1:]) * parameter.element_size()


def list_axes(parameter: DTensor) -> tuple[str, ...]:
    return parameter.device_mesh.mesh_dim_names or ()

"""The strategies: one record each, which says what studies, predictions and the worker have to know; without torch.

A strategy is a record here and a function in `worker/strategies/`, which the record names. Nothing else in the package
asks for a strategy by its name: what a step sends, what it shards, which instruments apply and what is refused are
questions to the record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal

from scalelab.errors import UsageError
from scalelab.records.settings import Spreading
from scalelab.records.strategy import MemoryRules, Mesh, Refusal, Send, StatePart, Strategy, parse_mesh

ALL_PARTS: tuple[StatePart, ...] = ("parameters", "gradients", "optimizer")
GATHER = Send(kind="all_gather", purpose="parameters", phase="forward", size="units")
GATHER_AGAIN = Send(kind="all_gather", purpose="parameters", phase="backward", size="inner_units")
SCATTER = Send(kind="reduce_scatter", purpose="gradients", phase="backward", size="units")
OTHERS_OPTIONS = (
    "reshard_after_forward", "mesh", "pipeline_schedule", "sequence_parallel", "async_tp", "averaging_period",
    "averaging_warmup",
)  # fmt: skip
DDP_OPTIONS = tuple(field.name for field in fields(Spreading) if field.name not in OTHERS_OPTIONS)
DDP_SENDS = (
    Send(kind="all_reduce", purpose="gradients", phase="backward", size="gradients"),
    Send(kind="broadcast", purpose="buffers", phase="forward", size="buffers", option="broadcast_buffers"),
)
SHARDED_SENDS = (
    replace(GATHER, axis="fsdp"),
    replace(GATHER_AGAIN, axis="fsdp", option="reshard_after_forward"),
    replace(SCATTER, axis="fsdp"),
    Send(kind="all_reduce", purpose="gradients", phase="backward", size="unit_shards", axis="dp"),
)
STAGE_SENDS = tuple(replace(send, size="regathered") if send.size == "inner_units" else send for send in SHARDED_SENDS)
TP_SENDS = (
    Send(kind="all_reduce", purpose="activations", phase="forward", size="reductions", axis="tp"),
    Send(kind="all_reduce", purpose="activations", phase="backward", size="input_reductions", axis="tp"),
)
CUT = Send(
    kind="all_gather", purpose="activations", phase="forward", size="gathers", axis="tp", option="sequence_parallel"
)
SEQUENCE_SENDS = (
    CUT,
    replace(CUT, kind="reduce_scatter", size="scatters"),
    replace(CUT, phase="backward", size="input_gathers"),
    replace(CUT, kind="reduce_scatter", phase="backward", size="input_scatters"),
    replace(CUT, kind="all_reduce", purpose="norm gradients", phase="backward", size="norms"),
)
TIED = "tied weights"
PP_SENDS = (
    Send(kind="send", purpose="activations", phase="forward", size="hops", axis="pp"),
    Send(kind="all_reduce", purpose=TIED, phase="forward", size="tied", axis="pp"),
)
EP_SENDS = (
    Send(kind="all_to_all", purpose="tokens", phase="forward", size="exchanges", axis="ep"),
    Send(kind="all_to_all", purpose="tokens", phase="backward", size="exchanges", axis="ep"),
    Send(kind="all_reduce", purpose="gradients", phase="backward", size="gradients"),
    Send(kind="all_reduce", purpose="expert gradients", phase="backward", size="experts", axis="dp"),
)
CP_SENDS = (
    Send(kind="all_gather", purpose="keys and values", phase="forward", size="attended", axis="cp"),
    Send(kind="all_gather", purpose="keys and values", phase="backward", size="attended", axis="cp"),
    Send(kind="all_to_all", purpose="their gradients", phase="backward", size="attended_gradients", axis="cp"),
    Send(kind="all_reduce", purpose="gradients", phase="backward", size="gradients"),
)
FSDP2_RULES = MemoryRules(
    forward="arrive",
    forward_end="give_back",
    backward="arrive_ahead",
    gradients="send",
    releases_gradients_in="optimizer",
    cuts_rows=True,
)

ZERO_REFUSES = (
    Refusal(field="micro_batch", reason="DeepSpeed's ZeRO reduces gradients in every pass", instead="fsdp2"),
    Refusal(field="autocast", reason="DeepSpeed has its own mixed precision", instead="fsdp2"),
    Refusal(field="dtype", reason="DeepSpeed keeps weights in float32 too, as no other strategy does", instead="fsdp2"),
    Refusal(field="compile", reason="DeepSpeed's engine calls the model itself", instead="fsdp2"),
)
ZERO_SENDS = (
    Send(kind="all_reduce", purpose="gradients", phase="backward", size="gradients"),
    Send(kind="all_gather", purpose="parameters", phase="optimizer", size="units"),
)
DEEPSPEED: dict[str, Any] = {
    "apply": "scalelab.worker.strategies.deepspeed:apply_zero",
    "optimizer": "scalelab.worker.strategies.deepspeed:start_engine",
    "refuses": ZERO_REFUSES,
    "keeps_gradients": True,
    "library": "deepspeed",
}

_KNOWN = (
    Strategy(
        name="single",
        description="the plain loop with no process group, on one rank",
        apply="scalelab.worker.strategies.apply:apply_single",
        ranks="one",
        memory=MemoryRules(),
        can_skip_communication=True,
    ),
    Strategy(
        name="dp",
        description="nn.DataParallel: one process, a replica per GPU; on CPU its algorithm is emulated by threads",
        apply="scalelab.worker.strategies.dp:apply_dp",
        ranks="threads",
        instruments=("replicas",),
        needs_gpus=True,
        refuses=(
            Refusal(
                field="checkpointing",
                reason="replicas that share one random generator cannot redraw a dropout mask",
                instead="ddp",
                only_emulated=True,
            ),
        ),
    ),
    Strategy(
        name="ddp",
        description="DistributedDataParallel: every rank has the whole model, gradients are all-reduced during"
        " backward",
        apply="scalelab.worker.strategies.ddp:apply_ddp",
        options=DDP_OPTIONS,
        sends=DDP_SENDS,
        memory=MemoryRules(has_buckets=True, gradients="copy_to_buckets"),
        instruments=("gradients", "counters"),
        can_skip_communication=True,
        rebuilds_buckets=True,
    ),
    Strategy(
        name="fsdp-full",
        description="FullyShardedDataParallel, FULL_SHARD: parameters, gradients and optimizer state are sharded",
        apply="scalelab.worker.strategies.fsdp:apply_full_shard",
        options=("sync_batch_norm",),
        shards=ALL_PARTS,
        sends=(GATHER, GATHER_AGAIN, SCATTER),
        memory=MemoryRules(forward="gather", forward_end="give_back", backward="gather_ahead", gradients="reduce"),
        wraps_blocks=True,
        on_one_rank="fsdp-none",
    ),
    Strategy(
        name="fsdp-grad-op",
        description="FullyShardedDataParallel, SHARD_GRAD_OP: parameters stay gathered between forward and backward",
        apply="scalelab.worker.strategies.fsdp:apply_shard_grad_op",
        options=("sync_batch_norm",),
        shards=ALL_PARTS,
        sends=(GATHER, SCATTER),
        memory=MemoryRules(forward="gather", backward="gather_ahead", gradients="reduce"),
        wraps_blocks=True,
        on_one_rank="fsdp-none",
    ),
    Strategy(
        name="fsdp-none",
        description="FullyShardedDataParallel, NO_SHARD: nothing is sharded",
        apply="scalelab.worker.strategies.fsdp:apply_no_shard",
        options=("sync_batch_norm",),
        sends=(Send(kind="all_reduce", purpose="gradients", phase="backward", size="units"),),
        memory=MemoryRules(gradients="join"),
        wraps_blocks=True,
    ),
    Strategy(
        name="fsdp2",
        description="fully_shard (FSDP2): each parameter is sharded as a DTensor",
        apply="scalelab.worker.strategies.fsdp:apply_fsdp2",
        options=("sync_batch_norm", "reshard_after_forward"),
        shards=ALL_PARTS,
        sends=(GATHER, replace(GATHER_AGAIN, option="reshard_after_forward"), SCATTER),
        memory=FSDP2_RULES,
        wraps_blocks=True,
    ),
    Strategy(
        name="zero1",
        description="ZeroRedundancyOptimizer: ddp, with the optimizer state sharded and parameters broadcast after"
        " the update",
        apply="scalelab.worker.strategies.ddp:apply_ddp",
        optimizer="scalelab.worker.strategies.zero1:shard_optimizer",
        options=("bucket_mb", "broadcast_buffers", "sync_batch_norm"),
        shards=("optimizer",),
        sends=(
            *DDP_SENDS,
            Send(kind="broadcast", purpose="parameters", phase="optimizer", size="parameters"),
        ),
        memory=MemoryRules(has_buckets=True, gradients="copy_to_buckets", updates_whole_parameters=True),
        rebuilds_buckets=True,
    ),
    Strategy(
        name="hsdp",
        description="fully_shard on a mesh of replicas and shards: sharded inside a group, gradients all-reduced"
        " between groups",
        apply="scalelab.worker.strategies.meshes:apply_hsdp",
        options=("sync_batch_norm", "reshard_after_forward", "mesh"),
        shards=ALL_PARTS,
        sends=SHARDED_SENDS,
        memory=FSDP2_RULES,
        wraps_blocks=True,
        axes=("dp", "fsdp"),
    ),
    Strategy(
        name="tp",
        description="tensor parallelism: the matrices of every layer are split over ranks, activations all-reduced",
        apply="scalelab.worker.strategies.meshes:apply_tp",
        options=("reshard_after_forward", "mesh", "sequence_parallel", "async_tp"),
        sends=(*SEQUENCE_SENDS, *TP_SENDS, *SHARDED_SENDS),  # the first that fits names what was sent
        memory=FSDP2_RULES,
        wraps_blocks=True,
        axes=("dp", "fsdp", "tp"),
    ),
    Strategy(
        name="pp",
        description="pipeline parallelism: each rank has some of the layers, micro-batches pass through",
        apply="scalelab.worker.strategies.pipeline:apply_pp",
        options=("reshard_after_forward", "mesh", "pipeline_schedule"),
        sends=tuple(replace(send, phase="forward") for send in (*PP_SENDS, *TP_SENDS, *STAGE_SENDS)),
        memory=FSDP2_RULES,
        instruments=("pipeline",),
        wraps_blocks=True,
        axes=("dp", "fsdp", "tp", "pp"),
        has_phases=False,
        refuses=(
            Refusal(field="autocast", reason="a schedule runs backward inside forward's context", instead="tp"),
            Refusal(field="compile", reason="a schedule calls the stages itself", instead="tp"),
        ),
    ),
    Strategy(
        name="ep",
        description="expert parallelism: each rank has some of the experts, tokens are sent to theirs by all-to-all",
        apply="scalelab.worker.strategies.experts:apply_ep",
        options=("bucket_mb", "mesh"),
        sends=EP_SENDS,
        memory=MemoryRules(has_buckets=True, gradients="copy_to_buckets"),
        rebuilds_buckets=True,
        axes=("dp", "ep"),
    ),
    Strategy(
        name="cp",
        description="context parallelism: each rank has some positions of every sequence, attention is a ring; on GPUs"
        " only",
        apply="scalelab.worker.strategies.context:apply_cp",
        loss="scalelab.worker.strategies.context:cut_sequences",
        options=("bucket_mb", "mesh"),
        sends=CP_SENDS,
        rebuilds_buckets=True,
        not_on_cpu="torch 2.13 has ring attention only for the attention kernels of GPUs",
        refuses=(
            Refusal(field="compile", reason="ring attention replaces a torch function at run time", instead="tp"),
        ),
        axes=("dp", "cp"),
    ),
    Strategy(
        name="local-sgd",
        description="local SGD: ranks update their replicas independently and average parameters every few steps",
        apply="scalelab.worker.strategies.local_sgd:apply_local_sgd",
        optimizer="scalelab.worker.strategies.local_sgd:average_after_steps",
        options=("bucket_mb", "averaging_period", "averaging_warmup"),
        sends=(Send(kind="all_reduce", purpose="parameters", phase="optimizer", size="averages"),),
        memory=MemoryRules(has_buckets=True, gradients="copy_to_buckets"),
        rebuilds_buckets=True,
        has_equal_replicas=False,
    ),
    Strategy(
        name="deepspeed-1",
        description="DeepSpeed ZeRO, stage 1: the optimizer state is sharded, updated parameters are gathered",
        shards=("optimizer",),
        sends=ZERO_SENDS,
        **DEEPSPEED,
    ),
    Strategy(
        name="deepspeed-2",
        description="DeepSpeed ZeRO, stage 2: gradients are sharded too",
        shards=("gradients", "optimizer"),
        sends=ZERO_SENDS,
        **DEEPSPEED,
    ),
    Strategy(
        name="deepspeed-3",
        description="DeepSpeed ZeRO, stage 3: parameters are sharded too, but for small ones",
        shards=ALL_PARTS,
        sends=(replace(GATHER, size="inner_units"), SCATTER, replace(GATHER, phase="optimizer", size="root_unit")),
        **DEEPSPEED,
    ),
    Strategy(
        name="torchft",
        description="torchft: ddp whose replicas form a quorum before every step and vote on its update",
        apply="scalelab.worker.strategies.torchft:apply_torchft",
        optimizer="scalelab.worker.strategies.torchft:vote_on_steps",
        options=("bucket_mb",),
        sends=DDP_SENDS[:1],
        library="torchft",
    ),
)

STRATEGIES: dict[str, Strategy] = {strategy.name: strategy for strategy in _KNOWN}
PLAIN = "single"
DEFAULT = "ddp"
"""The strategy of several ranks unless another is asked for."""
SCRIPT = Strategy(
    name="script",
    description="what a training script does itself",
    apply="",
    can_skip_communication=True,
    instruments=("gradients", "counters"),
)
"""Of trials that run a script: no flag chooses it."""
OTHER = Strategy(name="", description="ranks of collectives alone", apply="")
"""Instead of a record, where a trial has none of these strategies."""

if TYPE_CHECKING:
    StrategyName = str
    ParallelStrategy = str
    ProcessStrategy = str
else:
    StrategyName = Literal[tuple(STRATEGIES)]
    ParallelStrategy = Literal[tuple(name for name, known in STRATEGIES.items() if not known.is_plain)]
    ProcessStrategy = Literal[tuple(name for name, known in STRATEGIES.items() if known.has_processes)]
"""Types of flags: any strategy, one for several ranks, one with a process per rank. The records are the choices."""


def find_strategy(name: str, num_ranks: int | None = None) -> Strategy:
    """The record of a strategy; with a number of ranks, of what it becomes on so many."""
    found = SCRIPT if name == SCRIPT.name else STRATEGIES.get(name, OTHER)
    return STRATEGIES[found.on_one_rank] if num_ranks == 1 and found.on_one_rank else found


def choose_strategy(name: str | None, num_ranks: int) -> str:
    """The strategy that was asked for; otherwise the plain loop on one rank and ddp on more."""
    return name or (PLAIN if num_ranks == 1 else DEFAULT)


def list_strategies(holds: Callable[[Strategy], bool]) -> list[str]:
    """The names of the strategies of which something holds."""
    return [name for name, known in STRATEGIES.items() if holds(known)]


def arrange_ranks(name: str, num_ranks: int, spreading: Spreading) -> Mesh:
    """The mesh of a strategy on so many ranks; without an axis of its own, every rank is a replica."""
    strategy = find_strategy(name, num_ranks)
    if not strategy.axes:
        return Mesh(dp=num_ranks)
    own = strategy.axes[-1]
    if not spreading.mesh:
        replicas = 2 if own == "fsdp" and num_ranks % 2 == 0 else 1
        return Mesh(**{"dp": replicas, own: num_ranks // replicas})
    mesh = parse_mesh(spreading.mesh)
    if mesh.num_ranks != num_ranks:
        raise UsageError(f"--mesh {spreading.mesh} is for {mesh.num_ranks} ranks, got {num_ranks}: change one of them")
    extra = [axis for axis in mesh.axes if axis not in strategy.axes]
    if extra:
        takers = [known.name for known in STRATEGIES.values() if set(mesh.axes) <= set(known.axes)]
        raise UsageError(f"--strategy {name} has no axis {extra[0]}: use --strategy {' or '.join(takers)}")
    return mesh


def choose_of_mesh(mesh: Mesh) -> str:
    """The plainest strategy that runs a mesh."""
    plain = {("dp",): DEFAULT, ("fsdp",): "fsdp2", (): DEFAULT}
    having = (known.name for known in STRATEGIES.values() if known.axes and set(mesh.axes) <= set(known.axes))
    return plain.get(mesh.axes) or next(having)

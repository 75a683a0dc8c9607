"""The strategies by name and their options; without torch."""

from __future__ import annotations

from dataclasses import fields
from typing import Literal, get_args

from scalelab.checks import flag
from scalelab.errors import UsageError
from scalelab.records.settings import SHARDED as SHARDED
from scalelab.records.settings import Spreading
from scalelab.records.trial import Trial

Strategy = Literal["single", "dp", "ddp", "fsdp-full", "fsdp-grad-op", "fsdp-none", "fsdp2"]
Spread = Literal["dp", "ddp", "fsdp-full", "fsdp-grad-op", "fsdp-none", "fsdp2"]
"""The strategies that use more than one rank."""

STRATEGIES: dict[str, str] = {
    "single": "the plain loop with no process group, on one rank",
    "dp": "nn.DataParallel: one process, a replica per GPU; on CPU its algorithm is emulated by threads",
    "ddp": "DistributedDataParallel: every rank has the whole model, gradients are all-reduced during backward",
    "fsdp-full": "FullyShardedDataParallel, FULL_SHARD: parameters, gradients and optimizer state are sharded",
    "fsdp-grad-op": "FullyShardedDataParallel, SHARD_GRAD_OP: parameters stay gathered between forward and backward",
    "fsdp-none": "FullyShardedDataParallel, NO_SHARD: nothing is sharded",
    "fsdp2": "fully_shard (FSDP2): each parameter is sharded as a DTensor",
}

FSDP = (*SHARDED, "fsdp-none")
KNOWN_FIELDS: dict[str, tuple[str, ...]] = {
    "ddp": tuple(field.name for field in fields(Spreading) if field.name != "reshard_after_forward"),
    "fsdp2": ("sync_batch_norm", "reshard_after_forward"),
} | dict.fromkeys(("fsdp-full", "fsdp-grad-op", "fsdp-none"), ("sync_batch_norm",))
"""Which fields of `Spreading` a strategy takes."""


def check_strategy(trial: Trial) -> None:
    """Refuse what the strategy would ignore, and what it cannot do."""
    check_spreading(trial.strategy, trial.spreading)
    if trial.spreading.static_graph and trial.accumulation > 1:
        raise UsageError(
            f"--static-graph does not work with --micro-batch {trial.shape.micro_batch}: DDP must all-reduce gradients"
            " in the first pass to learn the graph; drop one of the two"
        )
    if trial.strategy == "dp" and trial.shape.checkpointing != "none" and trial.is_emulated:
        raise UsageError(
            f"--activation-checkpointing {trial.shape.checkpointing} does not work with --strategy dp on a CPU:"
            " replicas that share one random generator cannot redraw a dropout mask; use --strategy ddp"
        )


def check_spreading(strategy: str, spreading: Spreading) -> None:
    """Refuse a setting that the strategy would ignore."""
    for field in fields(Spreading):
        value = getattr(spreading, field.name)
        if value != field.default and field.name not in KNOWN_FIELDS.get(strategy, ()):
            takers = [name for name, known in KNOWN_FIELDS.items() if field.name in known]
            raise UsageError(
                f"{flag(field.name)} does not apply to --strategy {strategy}: use it with {' or '.join(takers)}"
            )


assert set(get_args(Strategy)) == set(STRATEGIES)

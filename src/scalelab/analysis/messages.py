"""What a step of data-parallel training has to send, from the sizes of the model.

Payload is the whole tensor that a collective is about, on one rank. With P bytes of gradients, N ranks, and units (the
blocks of a model and its root) that are sharded one by one:

    ddp            all-reduce of P in backward; broadcast of rank 0's buffers before forward (Li et al. 2020)
    fsdp-full      all-gather of every unit in forward, and again in backward of all but the root, which is needed
                   first there and is kept; reduce-scatter of every unit's gradients (Zhao et al. 2023)
    fsdp-grad-op   the same without gathering again
    fsdp-none      all-reduce of every unit's gradients
    fsdp2          as fsdp-full; without resharding after forward, as fsdp-grad-op
    synchronised   all-gather of mean, variance and count of every rank in forward: N · (2C + 1) numbers for C
    batch norm     channels; all-reduce of two sums per channel in backward: 2C numbers

What one rank then sends over the network, if the collective moves as few bytes as it can (Patarasu & Yuan 2009, ring
all-reduce): 2·M·(N − 1)/N for an all-reduce of M bytes, M·(N − 1)/N for an all-gather or a reduce-scatter, and on
average M·(N − 1)/N for a broadcast, which N − 1 ranks must receive whole.
"""

from __future__ import annotations

from scalelab.observations import Message, MessageBasis
from scalelab.settings import Spreading

FLOAT_BYTES = 4
"""Statistics of batch norm are exchanged in float32."""
HALF_BYTES = 2
"""Of a gradient that a hook has compressed to 16 bits."""
WIRE_FACTORS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "broadcast": 1.0}


def count_wire_bytes(kind: str, payload_bytes: float, num_ranks: int) -> float | None:
    """What a rank sends at the least, on average over ranks; None for a collective that is not known."""
    factor = WIRE_FACTORS.get(kind)
    return None if factor is None else factor * payload_bytes * (num_ranks - 1) / num_ranks


def expect_messages(
    strategy: str, num_ranks: int, basis: MessageBasis, spreading: Spreading, accumulation: int = 1
) -> list[Message]:
    """What theory says one step sends; `count` is left at 0 where it depends on how tensors are put into buckets."""
    exchange = _expect_ddp(basis, spreading) if strategy == "ddp" else []
    if strategy.startswith("fsdp"):
        exchange = _expect_fsdp(strategy, basis, spreading, accumulation)
    return [message for message in (*exchange, *_expect_norms(basis, num_ranks, accumulation)) if message.payload_bytes]


def is_exact(strategy: str, spreading: Spreading, accumulation: int) -> bool:
    """Whether theory gives every byte: not what PowerSGD compresses to, nor when FSDP gathers between passes."""
    if strategy == "ddp":
        return spreading.gradient_hook != "powersgd"
    return strategy.startswith("fsdp") and accumulation == 1


def _expect_ddp(basis: MessageBasis, spreading: Spreading) -> list[Message]:
    found = []
    if spreading.gradient_hook != "powersgd":
        payload = HALF_BYTES * basis.num_gradients if spreading.gradient_hook != "none" else basis.gradient_bytes
        found.append(_expect("all_reduce", "gradients", "backward", payload))
    if spreading.broadcast_buffers:
        found.append(_expect("broadcast", "buffers", "forward", basis.buffer_bytes))
    return found


def _expect_fsdp(strategy: str, basis: MessageBasis, spreading: Spreading, accumulation: int) -> list[Message]:
    if accumulation > 1:
        return []
    units, total = basis.unit_bytes, sum(basis.unit_bytes)
    sharded = [size for size in units if size]
    if strategy == "fsdp-none":
        return [_expect("all_reduce", "gradients", "backward", total, len(sharded))]
    again = units[1:] if strategy == "fsdp-full" or (strategy == "fsdp2" and spreading.reshard_after_forward) else ()
    return [
        _expect("all_gather", "parameters", "forward", total, len(sharded)),
        _expect("all_gather", "parameters", "backward", sum(again), sum(size > 0 for size in again)),
        _expect("reduce_scatter", "gradients", "backward", total, len(sharded)),
    ]


def _expect_norms(basis: MessageBasis, num_ranks: int, accumulation: int) -> list[Message]:
    count = accumulation * len(basis.norm_channels)
    gathered = sum(num_ranks * (2 * channels + 1) for channels in basis.norm_channels) * FLOAT_BYTES
    reduced = sum(2 * channels for channels in basis.norm_channels) * FLOAT_BYTES
    return [
        _expect("all_gather", "batch norm", "forward", accumulation * gathered, count),
        _expect("all_reduce", "batch norm", "backward", accumulation * reduced, count),
    ]


def _expect(kind: str, purpose: str, phase: str, payload_bytes: int, count: int = 0) -> Message:
    return Message(kind=kind, purpose=purpose, phase=phase, payload_bytes=payload_bytes, count=count)

"""What a step of data-parallel training sends, and the bandwidth of a collective.

Payload is the whole tensor of a collective, on one rank. With P bytes of gradients, N ranks, and units (the blocks of a
model and its root) that are sharded one by one:

    ddp            all-reduce of P in backward; broadcast of rank 0's buffers before forward (Li et al. 2020)
    fsdp-full      all-gather of every unit in forward, and again in backward of all but the root, which is needed
                   first there and is kept; reduce-scatter of every unit's gradients (Zhao et al. 2023)
    fsdp-grad-op   the same without gathering again
    fsdp-none      all-reduce of every unit's gradients
    fsdp2          as fsdp-full; without resharding after forward, as fsdp-grad-op
    synchronized   all-gather of mean, variance and count of every rank in forward: N · (2C + 1) numbers for C
    batch norm     channels; all-reduce of two sums per channel in backward: 2C numbers
    zero1          as ddp; then every parameter is broadcast by the rank that has updated it (Rajbhandari et al. 2020)
    hsdp           as fsdp2 on the ranks of its fsdp axis; all-reduce of a rank's shard of the gradients, P/shards, on
                   the dp axis
    tp             for every pair of split layers, with A bytes of activations: all-reduce of A in forward and of the
                   gradient of its input in backward (Shoeybi et al. 2019)
                   With sequence parallelism all-gather of A before a pair and reduce-scatter after it, the same for
                   gradients in backward; all-gather of A where whole sequences are needed again; all-reduce of the
                   gradients of norms (Korthikanti et al. 2022)
    pp             every stage sends A bytes of activations to the next and A of their gradients to the one before,
                   over all micro-batches; first and last stage all-reduce weights that they share. With an fsdp axis
                   forward gives the blocks of a stage back, and torch keeps what backward has gathered until the next
                   forward: with M micro-batches, whatever their order, a block is gathered M + 1 times and the rest
                   of the stage once; gradients are reduce-scattered once
    ep             for every layer of experts: all-to-all of the slots that tokens are put into, to the experts and
                   back, in forward and again in backward (Lepikhin et al. 2021); all-reduce of the gradients of all
                   other parameters, and of a rank's experts on the dp axis
    cp             for every layer, with K bytes of keys and values of whole sequences: all-gather of K in forward and
                   again in backward; their gradients, in float32, once around the ring (Liu et al. 2023). All-reduce of
                   P in backward
    local-sgd      all-reduce of all parameters, in a step that averages; nothing in the others (Stich 2019)
    clipping       of sharded gradients: all-reduce of one number, the square of their norm, before the update

One rank sends at least (Patarasuk & Yuan 2009, ring all-reduce) 2·M·(N − 1)/N bytes for an all-reduce of M bytes,
M·(N − 1)/N for an all-gather, a reduce-scatter or an all-to-all, and on average M·(N − 1)/N for a broadcast.

The size of a collective is that of the whole message, as nccl-tests defines it:

    all-reduce, broadcast, reduce, point-to-point   the buffer
    all-gather, gather                              what is gathered, of all ranks together
    reduce-scatter, scatter                         what is scattered, over all ranks together
    all-to-all                                      what one rank sends, to all ranks together

Size over time is the *algorithm* bandwidth: what training waits for. It falls with the number of ranks even on a
perfect network, because more must be sent for the same message. The *bus* bandwidth takes that out: it is what every
rank's link carries in each direction under the cheapest schedule, so it can be compared with the link's nominal rate
(NVIDIA nccl-tests, doc/PERFORMANCE.md; Rabenseifner 2004 for the all-reduce). With n ranks:

    all-reduce                                         algorithm × 2 (n − 1) / n
    all-gather, reduce-scatter, all-to-all,
    gather, scatter                                    algorithm × (n − 1) / n
    broadcast, reduce, point-to-point                  algorithm

One rank sends nothing: the factor of the first two is 0. A barrier has no message: its factor is 0. A GB is 10⁹ bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from scalelab.errors import UnknownName
from scalelab.records.observations import Message, MessageBasis
from scalelab.records.settings import Spreading
from scalelab.records.strategies import TIED, find_strategy
from scalelab.records.strategy import Send

FLOAT_BYTES = 4
"""Statistics of batch norm are reduced in float32."""
HALF_BYTES = 2
"""Of a gradient that a hook has compressed to 16 bits."""
WIRE_FACTORS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "broadcast": 1.0, "all_to_all": 1.0}


def count_wire_bytes(kind: str, payload_bytes: float, num_ranks: int) -> float | None:
    """What a rank sends at the least, on average over ranks; None for a collective that is not known."""
    if kind == "send":
        return payload_bytes
    factor = WIRE_FACTORS.get(kind)
    return None if factor is None else factor * payload_bytes * (num_ranks - 1) / num_ranks


def count_members(purpose: str, axis: str, num_ranks: int, sizes: Mapping[str, int] | None) -> int:
    """The ranks that a message concerns: those of its axis, or all; weights are tied between two stages."""
    return 2 if purpose == TIED else (sizes or {}).get(axis, num_ranks)


def expect_messages(
    strategy: str, num_ranks: int, basis: MessageBasis, spreading: Spreading, accumulation: int = 1
) -> list[Message]:
    """What theory says one step sends; `count` is left at 0 where it depends on how tensors are put into buckets."""
    sent = [
        _expect_send(send, basis, spreading)
        for send in find_strategy(strategy).sends
        if _is_sized(send, spreading, accumulation) and getattr(spreading, send.option, True)
    ]
    clipping = _expect("all_reduce", "gradient norm", "optimizer", basis.clip_bytes, 1)
    every = (*sent, *_expect_norms(basis, num_ranks, accumulation), clipping)
    return _add_alike([message for message in every if message.payload_bytes])


def _add_alike(messages: Sequence[Message]) -> list[Message]:
    """One message for all of a kind, purpose, phase and axis: a schedule mixes forward and backward."""
    found: dict[tuple[str, ...], Message] = {}
    for message in messages:
        alike = [one for one in (found.get(_key(message)), message) if one is not None]
        payload = sum(one.payload_bytes for one in alike if one.payload_bytes)
        found[_key(message)] = replace(message, payload_bytes=payload, count=sum(one.count for one in alike))
    return list(found.values())


def is_exact(strategy: str, spreading: Spreading, accumulation: int) -> bool:
    """Whether theory gives every byte: not what PowerSGD compresses to, nor when FSDP gathers between passes."""
    sends = find_strategy(strategy).sends
    return bool(sends) and all(_is_sized(send, spreading, accumulation) for send in sends)


def _is_sized(send: Send, spreading: Spreading, accumulation: int) -> bool:
    if send.size in ("units", "inner_units", "regathered"):
        return accumulation == 1
    return send.size != "gradients" or spreading.gradient_hook != "powersgd"


@dataclass(frozen=True, kw_only=True)
class MessageComparison:
    """One kind of message of a configuration: counted beside expected."""

    kind: str
    purpose: str
    phase: str
    count: int | None
    """None: theory has it, and it was not sent."""
    payload_bytes: int | None
    expected_bytes: int | None
    """None: theory has no number for it."""
    wire_bytes: float | None
    axis: str = ""

    @property
    def name(self) -> str:
        return self.kind.replace("_", "-")

    @property
    def told_purpose(self) -> str:
        """What it is for, and over which axis of a mesh."""
        return f"{self.purpose or 'unknown'} over {self.axis}" if self.axis else self.purpose or "unknown"


def compare_messages(
    sent: Sequence[Message], theory: Sequence[Message], num_ranks: int, sizes: Mapping[str, int] | None = None
) -> list[MessageComparison]:
    """In the order in which they were first sent; what only theory has comes last.

    `sizes` are the ranks on every axis of a mesh: a message concerns those of its axis, or all.
    """
    counted = {_key(message): message for message in sent}
    expected = {_key(message): message.payload_bytes for message in theory}
    lines = []
    for key in counted | expected:
        payload = counted[key].payload_bytes if key in counted else 0
        members = count_members(key[1], key[3], num_ranks, sizes)
        lines.append(
            MessageComparison(
                kind=key[0],
                purpose=key[1],
                phase=key[2],
                count=counted[key].count if key in counted else None,
                payload_bytes=payload,
                expected_bytes=expected.get(key),
                wire_bytes=None if payload is None else count_wire_bytes(key[0], payload, members),
                axis=key[3],
            )
        )
    return lines


def _key(message: Message) -> tuple[str, str, str, str]:
    return message.kind, message.purpose, message.phase, message.axis


def _expect_send(send: Send, basis: MessageBasis, spreading: Spreading) -> Message:
    compressed = None if spreading.gradient_hook == "none" else HALF_BYTES * basis.num_gradients
    pieces = {
        "gradients": (basis.gradient_bytes if compressed is None else compressed,),
        "buffers": (basis.buffer_bytes,),
        "units": basis.unit_bytes,
        "inner_units": basis.unit_bytes[1:],
        "regathered": (basis.regathered_bytes,),
        "root_unit": basis.unit_bytes[:1],
        "unit_shards": basis.shard_bytes,
        "parameters": (basis.gradient_bytes,),
        "reductions": basis.reduced_bytes[:1],
        "input_reductions": basis.reduced_bytes[1:],
        "gathers": basis.gathered_bytes[:1],
        "input_gathers": basis.gathered_bytes[1:],
        "scatters": basis.scattered_bytes[:1],
        "input_scatters": basis.scattered_bytes[1:],
        "norms": (basis.norm_bytes,),
        "hops": (basis.hop_bytes,),
        "tied": (basis.tied_bytes,),
        "experts": (basis.expert_bytes,),
        "exchanges": (basis.exchanged_bytes,),
        "averages": (basis.averaged_bytes,),
        "attended": basis.attended_bytes[:1],
        "attended_gradients": basis.attended_bytes[1:],
    }[send.size]
    count = sum(size > 0 for size in pieces) if send.size in ("units", "inner_units", "unit_shards") else 0
    return replace(_expect(send.kind, send.purpose, send.phase, sum(pieces), count), axis=send.axis)


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


POINT_TO_POINT = "point_to_point"
"""A message from one rank to one other; `send` and `recv` are its two sides."""


def _pass_once(_num_ranks: int) -> float:
    return 1.0


def _keep_own_part(num_ranks: int) -> float:
    return (num_ranks - 1) / num_ranks


def _reduce_then_gather(num_ranks: int) -> float:
    return 2 * (num_ranks - 1) / num_ranks


def _carry_nothing(_num_ranks: int) -> float:
    return 0.0


_FACTORS: Mapping[str, Callable[[int], float]] = MappingProxyType(
    {
        "all_reduce": _reduce_then_gather,
        "all_gather": _keep_own_part,
        "reduce_scatter": _keep_own_part,
        "all_to_all": _keep_own_part,
        "broadcast": _pass_once,
        "reduce": _pass_once,
        "gather": _keep_own_part,
        "scatter": _keep_own_part,
        "send": _pass_once,
        "recv": _pass_once,
        POINT_TO_POINT: _pass_once,
        "barrier": _carry_nothing,
    }
)

KINDS: tuple[str, ...] = tuple(_FACTORS)
"""The kinds of communication, as the code, the files and the flags name them."""


def bus_factor(kind: str, num_ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth; above 0 unless nothing is sent."""
    if kind not in _FACTORS:
        raise UnknownName("collective", kind, KINDS)
    if num_ranks < 1:
        raise ValueError(f"the number of ranks must be ≥ 1, got {num_ranks}")
    return _FACTORS[kind](num_ranks)


def sum_payload(lines: Sequence[MessageComparison]) -> int | None:
    return add_known([line.payload_bytes for line in lines])


def sum_wire(lines: Sequence[MessageComparison]) -> int | None:
    return add_known([line.wire_bytes for line in lines])


def add_known(values: Sequence[float | None]) -> int | None:
    known = [value for value in values if value is not None]
    return round(sum(known)) if known and len(known) == len(values) else None


def count_messages(lines: Sequence[MessageComparison]) -> int | None:
    return sum(line.count or 0 for line in lines) if lines else None

"""What a collective costs on n ranks: α–β for a ring and for a tree, on one level and over two.

    ring all-reduce          2(n − 1) · (α + S/n · β)                     Patarasuk & Yuan 2009
    tree all-reduce          2 ⌈log₂ n⌉ · α + 2(n − 1)/n · S · β          Thakur, Rabenseifner & Gropp 2005
    all-gather, scatter      (n − 1) · (α + S/n · β)                      one half of a ring all-reduce

S is the whole message, α the latency of one hop, 1/β the bandwidth of a link per direction. A half-bandwidth size
h = α/β says the same as α. The cheaper of ring and tree is taken, as NCCL chooses.

Over two levels, m ranks on each of k nodes, a reduce-scatter inside the nodes is followed by an all-reduce between them
(each rank with 1/m of the message, all through the node's own link) and an all-gather inside.

Where n ranks share c < n cores, as gloo's do on a laptop, their bytes take turns on these: whatever the link, it takes
n/c times what one rank's bytes keep a core busy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from scalelab.errors import UsageError
from scalelab.units import format_bytes, parse_bit_rate, parse_bytes, parse_seconds

HALVES = ("all_gather", "reduce_scatter")


@dataclass(frozen=True, kw_only=True)
class LinkCost:
    """Latency and bandwidth of one hop."""

    latency_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bytes_per_second) and self.bytes_per_second > 0):
            raise UsageError(f"a link of {self.bytes_per_second:g} B/s carries nothing: give a rate above 0")
        if not (math.isfinite(self.latency_seconds) and self.latency_seconds >= 0):
            raise UsageError(f"a latency of {self.latency_seconds:g} s cannot be: give 0 or more")

    @property
    def half_bytes(self) -> float:
        """The message that moves at half of the bandwidth."""
        return self.latency_seconds * self.bytes_per_second

    @property
    def words(self) -> str:
        return f"{format_bytes(self.bytes_per_second)}/s, {self.latency_seconds * 1e6:.3g} µs"

    def scale(self, *, latency: float = 1.0, bandwidth: float = 1.0) -> LinkCost:
        return replace(
            self,
            latency_seconds=self.latency_seconds * latency,
            bytes_per_second=self.bytes_per_second * bandwidth,
        )


@dataclass(frozen=True, kw_only=True)
class Network:
    """What joins the ranks of a job."""

    inside: LinkCost
    """Between ranks of one node, or between all where nodes do not matter."""
    between: LinkCost | None = None
    """Between nodes: what one node has for all its ranks."""
    ranks_per_node: int | None = None
    """None: all ranks are on one."""
    byte_core_seconds: float = 0.0
    """How long a byte that is sent keeps a core busy; 0: hardware moves it."""
    cores: int | None = None
    """That the ranks of a node share; None: each has its own."""

    def __post_init__(self) -> None:
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise UsageError(f"--ranks-per-node {self.ranks_per_node} cannot be: use 1 or more")

    def cost(self, kind: str, num_ranks: int, payload_bytes: float) -> float:
        """Seconds of one collective."""
        if num_ranks < 2 or payload_bytes <= 0:
            return 0.0
        half = 0.5 if kind in HALVES else 1.0
        per_node = min(self.ranks_per_node or num_ranks, num_ranks)
        num_nodes = math.ceil(num_ranks / per_node)
        if num_nodes == 1 or self.between is None:
            seconds = half * reduce_all(self.inside, num_ranks, payload_bytes)
        else:
            inner = half * reduce_all(self.inside, per_node, payload_bytes)
            seconds = inner + half * reduce_all(self.between, num_nodes, payload_bytes)
        return max(seconds, half * self._find_core_seconds(num_ranks, per_node, payload_bytes))

    def _find_core_seconds(self, num_ranks: int, per_node: int, payload_bytes: float) -> float:
        """How long the cores of a node need for what its ranks send in an all-reduce."""
        if self.cores is None or per_node <= self.cores:
            return 0.0
        sent = 2 * (num_ranks - 1) / num_ranks * payload_bytes
        return sent * self.byte_core_seconds * per_node / self.cores


def share_cores(link: LinkCost, cores: int, one_seconds: float, two_seconds: float, sent_bytes: float) -> Network:
    """A host whose cores all ranks share, from the time that a step keeps a core busy on one and on two ranks.

    What two ranks are busy beyond one is for the bytes that each sends, up to what the link's rate leaves for them.
    """
    per_byte = max(0.0, two_seconds - one_seconds) / sent_bytes
    return Network(inside=link, byte_core_seconds=min(per_byte, 1 / link.bytes_per_second), cores=cores)


def reduce_all(link: LinkCost, num_ranks: int, payload_bytes: float) -> float:
    """The cheaper of a ring and a tree."""
    if num_ranks < 2:
        return 0.0
    transfer = 2 * (num_ranks - 1) / num_ranks * payload_bytes / link.bytes_per_second
    hops = min(2 * (num_ranks - 1), 2 * math.ceil(math.log2(num_ranks)))
    return hops * link.latency_seconds + transfer


def read_link(text: str) -> LinkCost:
    """A link as it is typed: 25GB/s,5us; bits as 100Gbit/s; the latency may be left out."""
    rate, _, latency = (part.strip() for part in text.partition(","))
    try:
        if rate.lower().removesuffix("/s").endswith("bit"):
            per_second = parse_bit_rate(rate) / 8
        elif rate.lower().endswith("b/s"):
            per_second = float(parse_bytes(rate[:-2]))
        else:
            raise UsageError("a rate ends in B/s or bit/s")
        seconds = parse_seconds(latency) if latency else 0.0
    except UsageError as error:
        raise UsageError(f"--link {text!r} cannot be read: write it as 25GB/s,5us or 100gbit,5us") from error
    return LinkCost(latency_seconds=seconds, bytes_per_second=per_second)

"""What communication costs, and how much of it compute hides.

The α–β cost of a collective on n ranks, for a ring and a tree, on one level or two:

    ring all-reduce          2(n − 1) · (α + S/n · β)                     Patarasuk & Yuan 2009
    tree all-reduce          2 ⌈log₂ n⌉ · α + 2(n − 1)/n · S · β          Thakur, Rabenseifner & Gropp 2005
    all-gather, scatter      (n − 1) · (α + S/n · β)                      one half of a ring all-reduce

S is the whole message, α the latency of one hop, 1/β the bandwidth of a link per direction. The cheaper of ring and
tree counts, as NCCL chooses. gloo does not choose: torch has it run a ring whatever the message, its reduce-scatter is
an all-reduce of which each rank keeps a part, and FSDP's calls block the host until they are done. Its all-gather sends
a rank's share in two halves and offers to send before it offers to receive (gloo/allgather.cc), so that one half waits
for another: it takes S/(2n) · β longer.

On two levels (k nodes of m ranks): reduce-scatter inside each node, all-reduce between nodes (each rank with 1/m of the
message, all through the node's link), all-gather inside. If n ranks share c < n cores, as gloo's do on a laptop, a
collective takes at least n/c times the core time of one rank's bytes, whatever the link; and of a hop's latency, what
is the work of a core (threads that wake, copies through the kernel) takes n/c times as long.

DDP sends bucket k when its gradients are ready and bucket k − 1 has been sent (wait-free backpropagation: Zhang et al.
2017; Shi, Chu & Li 2019, MG-WFBP; Li et al. 2020 for DDP's buckets):

    e_k = max(r_k, e_{k−1}) + C(S_k)            backward ends at max(t_backward, e_K)

r_k is when bucket k is ready after the start of backward. While a bucket is being sent, compute may be slower, by
`contention` of the overlapping time (0: independent; 1: the host does one after the other). Buckets are filled in the
order in which gradients become ready and closed at their size: 1 MiB for the first, so that sending starts early, and
25 MiB for the others by default. A bucket is ready with its last gradient.

FSDP gathers a unit's parameters before it computes and, in backward, reduce-scatters its gradients afterwards. The
next unit is gathered while one computes (prefetch); messages are sent one after the other. On gloo nothing is hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

from scalelab.analysis.link import LineFit
from scalelab.checks import parse_bit_rate, parse_bytes, parse_seconds
from scalelab.errors import UsageError
from scalelab.units import format_bytes

HALVES = ("all_gather", "reduce_scatter")
SEND = "send"
"""From one rank to another: between nodes where there are any, as stages of a pipeline are."""


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """Latency and bandwidth of one hop."""

    latency_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bytes_per_second) and self.bytes_per_second > 0):
            raise UsageError(f"link bandwidth must be > 0, got {self.bytes_per_second:g} B/s")
        if not (math.isfinite(self.latency_seconds) and self.latency_seconds >= 0):
            raise UsageError(f"link latency must be ≥ 0, got {self.latency_seconds:g} s")

    @property
    def half_bytes(self) -> float:
        """The message that moves at half of the bandwidth."""
        return self.latency_seconds * self.bytes_per_second

    @property
    def words(self) -> str:
        return f"{format_bytes(self.bytes_per_second)}/s, {self.latency_seconds * 1e6:.3g} µs"

    def scale(self, *, latency: float = 1.0, bandwidth: float = 1.0) -> LinkSpeed:
        return replace(
            self,
            latency_seconds=self.latency_seconds * latency,
            bytes_per_second=self.bytes_per_second * bandwidth,
        )


@dataclass(frozen=True, kw_only=True)
class NetworkModel:
    """What joins the ranks of a job."""

    inside: LinkSpeed
    """Between ranks of one node, or between all where nodes do not matter."""
    between: LinkSpeed | None = None
    """Between nodes: what one node has for all its ranks."""
    ranks_per_node: int | None = None
    """None: all ranks are on one."""
    byte_core_seconds: float = 0.0
    """How long a byte that is sent keeps a core busy; 0: hardware moves it."""
    hop_core_seconds: float = 0.0
    """The same of a hop, whatever its bytes."""
    cores: int | None = None
    """That the ranks of a node share; None: each has its own."""
    is_gloo: bool = False
    """Rings only, all-gathers that wait for half a share, reduce-scatters as all-reduces, blocking calls of FSDP."""

    def __post_init__(self) -> None:
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise UsageError(f"--ranks-per-node must be ≥ 1, got {self.ranks_per_node}")

    def cost(self, kind: str, num_ranks: int, payload_bytes: float) -> float:
        """Seconds of one collective."""
        if num_ranks < 2 or payload_bytes <= 0:
            return 0.0
        if kind == SEND:
            link = self.inside if self.between is None else self.between
            return link.latency_seconds + payload_bytes / link.bytes_per_second
        half = 0.5 if kind in HALVES and (kind, self.is_gloo) != ("reduce_scatter", True) else 1.0
        reduce = partial(reduce_all, is_ring=self.is_gloo)
        per_node = min(self.ranks_per_node or num_ranks, num_ranks)
        num_nodes = math.ceil(num_ranks / per_node)
        if num_nodes == 1 or self.between is None:
            seconds = half * reduce(self.inside, num_ranks, payload_bytes)
        else:
            inner = half * reduce(self.inside, per_node, payload_bytes)
            seconds = inner + half * reduce(self.between, num_nodes, payload_bytes)
        if kind == "all_gather" and self.is_gloo:
            seconds += 0.5 * payload_bytes / num_ranks / self._find_slowest(num_nodes).bytes_per_second
        return max(seconds, half * self._find_core_seconds(num_ranks, per_node, payload_bytes))

    def _find_slowest(self, num_nodes: int) -> LinkSpeed:
        return self.inside if num_nodes == 1 or self.between is None else self.between

    def crowd(self, num_ranks: int) -> NetworkModel:
        """The same with so many ranks on the job's nodes, of which all send at once."""
        per_node = min(self.ranks_per_node or num_ranks, num_ranks)
        if not self.is_gloo or self.cores is None or per_node <= self.cores:
            return self
        waiting = (per_node / self.cores - 1) * self.hop_core_seconds
        return replace(self, inside=replace(self.inside, latency_seconds=self.inside.latency_seconds + waiting))

    def _find_core_seconds(self, num_ranks: int, per_node: int, payload_bytes: float) -> float:
        """Core time of a node for the bytes of its ranks in an all-reduce."""
        if self.cores is None or per_node <= self.cores:
            return 0.0
        sent = 2 * (num_ranks - 1) / num_ranks * payload_bytes
        return sent * self.byte_core_seconds * per_node / self.cores


def share_cores(link: LinkSpeed, cores: int, one_seconds: float, two_seconds: float, sent_bytes: float) -> NetworkModel:
    """A host whose ranks share its cores, by gloo, from the core time of a step on one and on two ranks.

    The difference is the core time of the sent bytes, up to the time that the link needs for them.
    """
    per_byte = max(0.0, two_seconds - one_seconds) / sent_bytes
    return NetworkModel(
        inside=link, byte_core_seconds=min(per_byte, 1 / link.bytes_per_second), cores=cores, is_gloo=True
    )


def reduce_all(link: LinkSpeed, num_ranks: int, payload_bytes: float, *, is_ring: bool = False) -> float:
    """The cheaper of a ring and a tree, or a ring."""
    if num_ranks < 2:
        return 0.0
    transfer = 2 * (num_ranks - 1) / num_ranks * payload_bytes / link.bytes_per_second
    hops = 2 * (num_ranks - 1)
    if not is_ring:
        hops = min(hops, 2 * math.ceil(math.log2(num_ranks)))
    return hops * link.latency_seconds + transfer


def parse_rate(text: str) -> float:
    """Bytes per second, from 25GB/s or 100gbit."""
    rate = text.strip().lower()
    if rate.removesuffix("/s").endswith("bit"):
        return parse_bit_rate(rate) / 8
    if rate.endswith("b/s"):
        return float(parse_bytes(text.strip()[:-2]))
    raise UsageError(f"{text!r} is not a valid rate: use a form such as 25GB/s or 100gbit")


def read_link(text: str) -> LinkSpeed:
    """A link such as 25GB/s,5us or 100gbit; the latency is optional."""
    rate, _, latency = (part.strip() for part in text.partition(","))
    try:
        per_second = parse_rate(rate)
        seconds = parse_seconds(latency) if latency else 0.0
    except UsageError as error:
        raise UsageError(f"--link {text!r} is not a valid link: use a form such as 25GB/s,5us or 100gbit") from error
    return LinkSpeed(latency_seconds=seconds, bytes_per_second=per_second)


def find_hop(line: LineFit) -> LinkSpeed:
    """One hop, from the line of an all-reduce on two ranks: it is two hops of half the message each."""
    return LinkSpeed(
        latency_seconds=max(0.0, line.fitted_latency_seconds) / 2, bytes_per_second=1 / line.fitted_byte_seconds
    )


Cost = Callable[[float], float]
"""Seconds of a collective, by its bytes."""


@dataclass(frozen=True)
class Bucket:
    """Gradients that are sent together."""

    ready_seconds: float
    """After the beginning of backward."""
    payload_bytes: float


@dataclass(frozen=True)
class FsdpUnit:
    """A part of the model that FSDP gathers as a whole."""

    forward_seconds: float
    backward_seconds: float
    payload_bytes: float


@dataclass(frozen=True, kw_only=True)
class Overlapped:
    """A stretch of computing with communication beside it."""

    seconds: float
    communication_seconds: float
    exposed_seconds: float
    """What it takes longer than computing alone."""


def overlap_buckets(
    backward_seconds: float, buckets: Sequence[Bucket], cost: Cost, contention: float = 0.0
) -> Overlapped:
    """Backward of DDP with the all-reduces of its buckets."""
    delay = end = total = 0.0
    for bucket in sorted(buckets, key=lambda found: found.ready_seconds):
        start = max(bucket.ready_seconds + delay, end)
        seconds = cost(bucket.payload_bytes)
        end, total = start + seconds, total + seconds
        # What computing is left while this bucket travels is slowed down by as much as both take.
        beside = min(seconds, max(0.0, backward_seconds + delay - start))
        delay += contention * beside
    finish = max(backward_seconds + delay, end)
    return Overlapped(seconds=finish, communication_seconds=total, exposed_seconds=finish - backward_seconds)


def overlap_units(
    units: Sequence[FsdpUnit], gather: Cost, scatter: Cost, *, is_regathered: bool = True
) -> tuple[Overlapped, Overlapped]:
    """Forward and backward of FSDP; without `is_regathered` parameters stay whole after forward (SHARD_GRAD_OP)."""
    forward = _pass_units([(u.forward_seconds, gather(u.payload_bytes), 0.0) for u in units])
    backward = _pass_units(
        [
            (u.backward_seconds, gather(u.payload_bytes) if is_regathered else 0.0, scatter(u.payload_bytes))
            for u in reversed(units)
        ]
    )
    return forward, backward


def _pass_units(steps: Sequence[tuple[float, float, float]]) -> Overlapped:
    """Units one after the other: gathered, computed, scattered; two queues, one computes and one sends."""
    begun = computed = sent = gradients = 0.0
    for compute, gather, scatter in steps:
        # A unit is prefetched when the one before begins, so before that one's gradients are sent.
        gathered = max(sent, begun) + gather if gather else 0.0
        sent = max(sent, gathered)
        if gradients:
            sent = max(sent, computed) + gradients
        begun = max(computed, gathered)
        computed = begun + compute
        gradients = scatter
    if gradients:
        sent = max(sent, computed) + gradients
    total = math.fsum(gather + scatter for _, gather, scatter in steps)
    end = max(computed, sent)
    pure = math.fsum(compute for compute, _, _ in steps)
    return Overlapped(seconds=end, communication_seconds=total, exposed_seconds=end - pure)


@lru_cache(maxsize=256)
def expected_maximum(count: int) -> float:
    """The mean of the largest of n standard normal numbers; grows like √(2 ln n) (Cramér 1946)."""
    if count < 2:
        return 0.0

    from scipy import integrate, stats  # not at start-up: the help of studies reads this module

    def density(value: float) -> float:
        return float(value * count * stats.norm.pdf(value) * stats.norm.cdf(value) ** (count - 1))

    return float(integrate.quad(density, -8, 12, limit=200)[0])


MEBIBYTE = 1 << 20
FIRST_BYTES = MEBIBYTE
OTHER_BYTES = 25 * MEBIBYTE


class Gradient(NamedTuple):
    """One parameter's gradient."""

    ready_seconds: float
    """After the beginning of backward."""
    payload_bytes: float


def fill_buckets(gradients: Iterable[Gradient], bucket_bytes: float | None = None) -> list[Bucket]:
    """The buckets in the order in which they are sent; `bucket_bytes`: of all, the first too. None: torch's own."""
    limits = [FIRST_BYTES, OTHER_BYTES] if bucket_bytes is None else [bucket_bytes]
    buckets: list[Bucket] = []
    size = ready = 0.0
    for gradient in sorted(gradients):
        size, ready = size + gradient.payload_bytes, gradient.ready_seconds
        if size >= limits[min(len(buckets), len(limits) - 1)]:
            buckets.append(Bucket(ready, size))
            size = 0.0
    if size:
        buckets.append(Bucket(ready, size))
    return buckets

"""How communication hides behind computing: the recurrences of DDP's buckets and of FSDP's units.

DDP sends bucket k when its gradients are there and the one before it is through (wait-free backpropagation: Zhang et
al. 2017; Shi, Chu & Li 2019, MG-WFBP; Li et al. 2020 for DDP's buckets):

    e_k = max(r_k, e_{k−1}) + C(S_k)            backward ends at max(t_backward, e_K)

r_k is when bucket k is ready after the beginning of backward. While a bucket is on its way computing may be slower, by
`contention` of the time that both take (0: they do not touch; 1: the host does one after the other).

FSDP gathers the parameters of a unit before it computes and, in backward, scatters its gradients after. The next unit
is gathered while one computes (prefetch); everything that is sent goes one after the other.

DDP's buckets from the gradients themselves.

DDP fills buckets in the order in which gradients become ready (after its first step it has seen that order), and
closes one when it has reached its size: 1 MiB for the first, so that sending begins early, and 25 MiB for the others
unless told otherwise (Li et al. 2020). A bucket is ready with its last gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from scipy import integrate, stats

Cost = Callable[[float], float]
"""Seconds of a collective on so many bytes."""


@dataclass(frozen=True)
class Bucket:
    """Gradients that are sent at once."""

    ready_seconds: float
    """After the beginning of backward."""
    payload_bytes: float


@dataclass(frozen=True)
class Unit:
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
    """Backward of DDP with the exchange of its buckets."""
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
    units: Sequence[Unit], gather: Cost, scatter: Cost, *, is_regathered: bool = True, prefetch: bool = True
) -> tuple[Overlapped, Overlapped]:
    """Forward and backward of FSDP; without `is_regathered` parameters stay whole after forward (SHARD_GRAD_OP)."""
    forward = _pass_units([(u.forward_seconds, gather(u.payload_bytes), 0.0) for u in units], prefetch)
    backward = _pass_units(
        [
            (u.backward_seconds, gather(u.payload_bytes) if is_regathered else 0.0, scatter(u.payload_bytes))
            for u in reversed(units)
        ],
        prefetch,
    )
    return forward, backward


def _pass_units(steps: Sequence[tuple[float, float, float]], prefetch: bool) -> Overlapped:
    """Units one after the other: gathered, computed, scattered; two queues, one computes and one sends."""
    begun = computed = sent = gradients = 0.0
    for compute, gather, scatter in steps:
        # A unit that is gathered ahead is asked for when the one before begins, so before its gradients are sent.
        if not prefetch and gradients:
            sent = max(sent, computed) + gradients
        gathered = max(sent, begun if prefetch else computed) + gather if gather else 0.0
        sent = max(sent, gathered)
        if prefetch and gradients:
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

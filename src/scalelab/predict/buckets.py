"""DDP's buckets from the gradients themselves.

DDP fills buckets in the order in which gradients become ready (after its first step it has seen that order), and
closes one when it has reached its size: 1 MiB for the first, so that sending begins early, and 25 MiB for the others
unless told otherwise (Li et al. 2020). A bucket is ready with its last gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from scalelab.predict.overlap import Bucket

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

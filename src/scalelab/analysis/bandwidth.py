"""Bandwidth of a collective: what it moves, set against its time.

A collective is timed with a size, and the size is that of the whole message, as nccl-tests defines it:

    all-reduce, broadcast, reduce, point-to-point   the buffer
    all-gather, gather                              what is gathered, of all ranks together
    reduce-scatter, scatter                         what is scattered, over all ranks together
    all-to-all                                      what one rank sends, to all ranks together

Size over time is the *algorithm* bandwidth: what a training waits for. It falls with the number of ranks even on
a perfect network, because more must be sent for the same message. The *bus* bandwidth takes that out. It is
what every rank's link carries in each direction under the cheapest schedule, so that it can be held against the
link's nominal rate (NVIDIA nccl-tests, doc/PERFORMANCE.md; Rabenseifner 2004 for the all-reduce). With n ranks:

    all-reduce                                         algorithm × 2 (n − 1) / n
    all-gather, reduce-scatter, all-to-all,
    gather, scatter                                    algorithm × (n − 1) / n
    broadcast, reduce, point-to-point                  algorithm

One rank sends nothing: the factor of the first two is 0. A barrier has no message and no bandwidth: its factor
is 0 with any number of ranks. A GB is 10⁹ bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from scalelab.errors import UnknownName

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
        raise ValueError(f"{num_ranks} ranks cannot communicate: use 1 or more")
    return _FACTORS[kind](num_ranks)


def find_algorithm_bandwidth(payload_bytes: float, seconds: float) -> float | None:
    """Size over time, in bytes per second; nothing where no time has passed."""
    return payload_bytes / seconds if seconds > 0 else None


def find_bus_bandwidth(kind: str, num_ranks: int, payload_bytes: float, seconds: float) -> float | None:
    """What each link carries per direction, in bytes per second; nothing where no time has passed."""
    algorithm = find_algorithm_bandwidth(payload_bytes, seconds)
    return None if algorithm is None else algorithm * bus_factor(kind, num_ranks)

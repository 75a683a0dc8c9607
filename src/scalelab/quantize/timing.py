"""The latencies of several runtimes, side by side.

What is timed first pays for memory and caches that those after it find ready, and a machine that slows down on the way
slows whoever is last. A fixed order without a warm call has been seen to turn a runtime that takes 0.73 times as long
into one that takes 1.77 times. So every round goes through all runtimes in an order that is drawn anew, each makes one
call that nobody times, and then as many as fill a few milliseconds. A round gives one number per runtime, the mean of
its calls, and runtimes are compared round by round.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

import torch

from scalelab.records.quantized import Timing

Call = Callable[[], object]

LEAST_SECONDS = 0.01
"""What the calls of one timing should fill together, so that the clock's own steps and noise do not count."""
MOST_CALLS = 200


def time_runtimes(runtimes: Mapping[str, Call], *, batch: int, num_rounds: int, seed: int = 0) -> list[Timing]:
    """So many rounds of every runtime, whose call computes one batch of this size."""
    counts = {name: _count_calls(call) for name, call in runtimes.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runtimes}
    order, draw = list(runtimes), random.Random(seed)
    for _ in range(num_rounds):
        draw.shuffle(order)
        for name in order:
            call, count = runtimes[name], counts[name]
            call()
            start = perf_counter()
            for _ in range(count):
                call()
            seconds[name].append((perf_counter() - start) / count)
    return [Timing(runtime=name, batch=batch, seconds=tuple(found)) for name, found in seconds.items()]


def _count_calls(call: Call) -> int:
    """How many calls one timing is made of: as two warm ones say."""
    call()
    call()
    start = perf_counter()
    call()
    once = max(perf_counter() - start, 1e-9)
    return min(MOST_CALLS, max(1, round(LEAST_SECONDS / once)))


@contextmanager
def one_thread() -> Iterator[None]:
    """torch's own kernels on one thread: as the sessions beside them have, or where work is too little to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""Latencies of several runtimes, interleaved.

Whatever is timed first pays for cold caches, and a machine that slows down penalises what comes last: a fixed order
without a warm-up call once turned 0.73 times as long into 1.77 times. So every round visits all runtimes in a random
order; each makes one untimed call and then as many as fill a few milliseconds. A round gives the mean per runtime, and
runtimes are compared round by round.
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
"""Minimum length of one timing, far above the clock's resolution."""
MOST_CALLS = 200


def time_runtimes(runtimes: Mapping[str, Call], *, batch: int, num_rounds: int, seed: int = 0) -> list[Timing]:
    """Time every runtime in `num_rounds` rounds; a call computes one batch."""
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
    """Calls per timing, estimated after two warm-up calls."""
    call()
    call()
    start = perf_counter()
    call()
    once = max(perf_counter() - start, 1e-9)
    return min(MOST_CALLS, max(1, round(LEAST_SECONDS / once)))


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread, like the onnxruntime sessions."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

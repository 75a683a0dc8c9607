"""Which cores a rank owns.

A rank gets `threads_per_rank` cores of its own, the same number in every trial of a study, so that one rank against
two compares like with like: without pinning, one rank would use the whole machine and two would halve it. More ranks
than cores is allowed: then cores are handed out again from the first, and the trial is marked as oversubscribed.
"""

from __future__ import annotations

from collections.abc import Sequence


def assign_cores(num_ranks: int, threads_per_rank: int, cores: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The cores of each rank, in order; a rank that wants more than there are gets all of them."""
    width = min(threads_per_rank, len(cores))
    starts = range(0, num_ranks * width, width)
    return tuple(tuple(sorted(cores[(start + i) % len(cores)] for i in range(width))) for start in starts)


def default_threads_per_rank(most_ranks: int, num_cores: int) -> int:
    """As many cores as the largest trial of a study can give to each of its ranks, at least one."""
    return max(1, num_cores // most_ranks)


def is_oversubscribed(num_ranks: int, threads_per_rank: int, num_cores: int) -> bool:
    """Whether some core must serve more than one thread."""
    return num_ranks * threads_per_rank > num_cores

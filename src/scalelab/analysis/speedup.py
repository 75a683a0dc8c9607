"""Speedup, efficiency and what communication costs, from the rounds of two configurations.

    strong scaling   the same work on N ranks:   S = T₁ / T_N      efficiency S / N
    weak scaling     N times the work:           efficiency T₁ / T_N,   scaled speedup N · T₁ / T_N

Two ways lead to the cost of communication. By subtraction it is everything that keeps N ranks from the
ideal: it needs no instrument, and counts memory contention, imbalance and the serial part as communication
too. By ablation it is the part of the step that vanishes without the gradient all-reduce:
communication that is hidden behind computation does not count, and that is the number that an optimisation
of it could win.

All of them are compared round by round (`stats.py`), so their intervals hold on a machine that drifts.
"""

from __future__ import annotations

from dataclasses import dataclass

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import Rounds, estimate_difference, estimate_ratio


@dataclass(frozen=True, kw_only=True)
class ExposedCommunication:
    """The part of a step that waits for communication; slightly negative values are noise around nothing."""

    seconds: Estimate
    share: Estimate
    """Of the whole step."""


def estimate_speedup(base: Rounds, rounds: Rounds) -> Estimate:
    """How many times faster the steps of `rounds` are than those of the base."""
    return estimate_ratio(base, rounds)


def estimate_scaled_speedup(base: Rounds, rounds: Rounds, num_ranks: int) -> Estimate:
    """How many times the base's work per second is done when the work grows with the ranks (Gustafson
    1988)."""
    return estimate_ratio(base, rounds).map(lambda ratio: ratio * num_ranks)


def karp_flatt(speedup: Estimate, num_ranks: int) -> Estimate | None:
    """The serial fraction that explains one speedup over one rank: e = (1/S − 1/N) / (1 − 1/N).

    Karp & Flatt (1990). If it grows with N, the loss is overhead that grows and not a serial part; if it is
    negative, the speedup is more than N. One rank has none.
    """
    if num_ranks < 2:
        return None
    return speedup.map(lambda ratio: (1 / ratio - 1 / num_ranks) / (1 - 1 / num_ranks))


def communication_by_subtraction(base: Rounds, rounds: Rounds, num_ranks: int, *, is_weak: bool = False) -> Estimate:
    """The seconds by which a step is longer than its ideal: T_N − T₁ / N, or T_N − T₁ under weak scaling."""
    ideal_ratio = 1.0 if is_weak else 1 / num_ranks
    ideal = [[seconds * ideal_ratio for seconds in steps] for steps in base]
    return estimate_difference(rounds, ideal)


def communication_by_ablation(clean: Rounds, comm_free: Rounds) -> ExposedCommunication:
    """What leaving out the gradient all-reduce saves: blocks of both kinds from the same launches, by round."""
    return ExposedCommunication(
        seconds=estimate_difference(clean, comm_free),
        share=estimate_ratio(comm_free, clean).map(lambda ratio: 1 - ratio),
    )

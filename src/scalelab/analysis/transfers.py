"""The timings of exchanges, launch by launch: what their tables, their fits and their warnings start from.

The time of a collective is that of its slowest rank: the maximum over ranks of every timing, divided by its calls.
That of a message between two ranks is what the one saw that sent first and waited for the answer. A timing that some
rank did not complete is left out; the others of a launch that failed later are as good as any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scalelab.analysis.bandwidth import POINT_TO_POINT
from scalelab.analysis.rounds import Rounds
from scalelab.settings import Exchange
from scalelab.trial import Trial, TrialResult


@dataclass(frozen=True, kw_only=True)
class TransferSeries:
    """All rounds of one exchange. A round that gave nothing is an empty list and keeps its place."""

    trial: Trial
    """The first round's; the others differ only in the round."""
    results: tuple[TrialResult, ...]
    seconds: Mapping[int, Rounds]
    """Of one call, by the size of its message in bytes, ascending."""
    num_calls: Mapping[int, int]
    """In one timing, by size: the most of any launch."""

    @property
    def exchange(self) -> Exchange:
        assert self.trial.exchange is not None
        return self.trial.exchange

    @property
    def operation(self) -> str:
        return self.exchange.operation

    @property
    def backend(self) -> str:
        if self.exchange.backend != "auto":
            return self.exchange.backend
        return "nccl" if self.trial.device == "cuda" else "gloo"

    @property
    def is_measured(self) -> bool:
        return bool(self.seconds)


def group_transfers(results: Sequence[TrialResult]) -> dict[str, TransferSeries]:
    """One series per configuration that exchanges, in the order in which they first ran; other trials are left out."""
    grouped: dict[str, list[TrialResult]] = {}
    for result in sorted(results, key=lambda result: result.trial.round):
        if result.trial.exchange is not None:
            grouped.setdefault(result.trial.configuration, []).append(result)
    last_round = max((result.trial.round for found in grouped.values() for result in found), default=0)
    return {name: _make_series(found, last_round) for name, found in grouped.items()}


def _make_series(results: list[TrialResult], last_round: int) -> TransferSeries:
    seconds: dict[int, list[list[float]]] = {}
    num_calls: dict[int, int] = {}
    for result in results:
        for size, times in read_call_seconds(result).items():
            rounds = seconds.setdefault(size, [[] for _ in range(last_round)])
            rounds[result.trial.round - 1] = times
        for line in result.transfers:
            num_calls[line.payload_bytes] = max(num_calls.get(line.payload_bytes, 0), line.num_calls)
    return TransferSeries(
        trial=results[0].trial,
        results=tuple(results),
        seconds={size: seconds[size] for size in sorted(seconds)},
        num_calls=num_calls,
    )


def read_call_seconds(result: TrialResult) -> dict[int, list[float]]:
    """The time of one call of every complete timing, by size."""
    exchange = result.trial.exchange
    is_pair = exchange is not None and exchange.operation == POINT_TO_POINT
    wanted = 2 if is_pair else result.trial.num_ranks
    timings: dict[tuple[int, int], dict[int, float]] = {}
    for line in result.transfers:
        timings.setdefault((line.payload_bytes, line.repeat), {})[line.rank] = line.seconds / line.num_calls
    found: dict[int, list[float]] = {}
    for (size, _), by_rank in sorted(timings.items()):
        if len(by_rank) == wanted and max(by_rank.values()) > 0:
            found.setdefault(size, []).append(by_rank[0] if is_pair else max(by_rank.values()))
    return found

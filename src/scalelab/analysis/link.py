"""A link in two numbers: the fixed cost of a message, and the cost of a byte.

    t(n) = α + β · n          α  latency          1/β  bandwidth          n½ = α / β  half-bandwidth size

This is the model of Hockney (1994) and, per collective, of Thakur, Rabenseifner & Gropp (2005). At n½ a message moves
at half of the asymptotic bandwidth: smaller messages are dominated by latency, larger ones by bandwidth. β refers to
the whole message (`communication.py`), so 1/β is an algorithm bandwidth; times the bus factor it is the bus bandwidth,
which can be compared with the wire.

Both are fitted to the logs of the times, so 4 bytes count as much as a gigabyte, with a loss that grows linearly
beyond 10 % (soft L1; Huber 1964 for the idea): real links change protocol, algorithm or cache on the way, and a few
sizes that are off must not bend the line. Sizes that are off by more than `MISFIT` are named. α is known if it is most
of the smallest message's time, β if it is most of the largest's; otherwise the sizes do not reach far enough and it is
None. Each round is also fitted on its own, which gives the intervals, as in `scaling_laws.py`.

The time of a collective is that of its slowest rank: the maximum over ranks of every timing, divided by its calls. The
time of a message between two ranks is what the rank saw that sent first and waited for the answer. A timing that some
rank did not complete is left out; earlier timings of a failed launch count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import tabulate_sizes
from scalelab.analysis.stats import Floats, Rounds, estimate_over_rounds, leave_logs
from scalelab.analysis.traffic import POINT_TO_POINT, bus_factor
from scalelab.records.settings import find_kind
from scalelab.records.tasks import Exchange
from scalelab.records.trial import Trial, TrialResult


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
        assert isinstance(self.trial.task, Exchange)
        return self.trial.task

    @property
    def operation(self) -> str:
        return self.exchange.operation

    @property
    def backend(self) -> str:
        if self.exchange.backend != "auto":
            return self.exchange.backend
        return find_kind(self.trial.device).backend

    @property
    def is_measured(self) -> bool:
        return bool(self.seconds)


def group_transfers(results: Sequence[TrialResult]) -> dict[str, TransferSeries]:
    """One series per configuration that exchanges, in the order in which they first ran; other trials are left out."""
    grouped, last_round = group_rounds(results, Exchange)
    return {name: _make_series(found, last_round) for name, found in grouped.items()}


def group_rounds(results: Sequence[TrialResult], task: type[object]) -> tuple[dict[str, list[TrialResult]], int]:
    """The rounds of every configuration with such a task, and the number of the last one of any."""
    grouped: dict[str, list[TrialResult]] = {}
    for result in sorted(results, key=lambda result: result.trial.round):
        if isinstance(result.trial.task, task):
            grouped.setdefault(result.trial.configuration, []).append(result)
    return grouped, max((found[-1].trial.round for found in grouped.values()), default=0)


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
    task = result.trial.task
    is_pair = isinstance(task, Exchange) and task.operation == POINT_TO_POINT
    wanted = 2 if is_pair else result.trial.num_ranks
    timings: dict[tuple[int, int], dict[int, float]] = {}
    for line in result.transfers:
        timings.setdefault((line.payload_bytes, line.repeat), {})[line.rank] = line.seconds / line.num_calls
    found: dict[int, list[float]] = {}
    for (size, _), by_rank in sorted(timings.items()):
        if len(by_rank) == wanted and max(by_rank.values()) > 0:
            found.setdefault(size, []).append(by_rank[0] if is_pair else max(by_rank.values()))
    return found


MISFIT = 0.25
"""A size whose time is this far from the line, relative to the line, is named."""
SOFT_LIMIT = 0.1
"""Relative errors up to about this count by their square, larger ones by their size."""
MAJORITY = 0.5
"""A coefficient that is less of the time than this, where it should matter most, is not known."""
FEWEST_SIZES = 3
"""Two sizes determine the line: whether it is one cannot be seen."""


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """A size that the line does not describe."""

    payload_bytes: int
    ratio: float
    """Its time over the line's."""


@dataclass(frozen=True, kw_only=True)
class LineFit:
    """t(n) = α + β · n as fitted to times by size."""

    latency_seconds: Estimate | None
    """α; None if the smallest message is too large to show it."""
    byte_seconds: Estimate | None
    """β; None if the largest message is too small to show it."""
    half_bytes: Estimate | None
    """n½ = α / β."""
    fitted_latency_seconds: float
    """α as fitted, known well or not: the line itself."""
    fitted_byte_seconds: float
    """β as fitted, known well or not."""
    residual_ratio: float
    """The root mean square of the relative residuals."""
    misfits: tuple[Misfit, ...]
    smallest_bytes: int
    largest_bytes: int

    @property
    def bandwidth(self) -> Estimate | None:
        """1/β in bytes per second: the algorithm bandwidth that large messages come to."""
        return None if self.byte_seconds is None else self.byte_seconds.map(lambda seconds: 1 / seconds)

    def predict_seconds(self, payload_bytes: float) -> float:
        """The time of one call by the line; beyond the sizes that were measured only as good as what is known of it."""
        return self.fitted_latency_seconds + payload_bytes * self.fitted_byte_seconds


@dataclass(frozen=True, kw_only=True)
class LinkFit:
    """The line of one operation on so many ranks: what a prediction of larger jobs starts from."""

    configuration: str
    operation: str
    num_ranks: int
    backend: str
    device: str
    link: str
    """What joins the hosts; empty: all ranks are on one."""
    line: LineFit

    @property
    def bus_bandwidth(self) -> Estimate | None:
        """What each link carries per direction, in bytes per second."""
        factor = bus_factor(self.operation, self.num_ranks)
        return None if self.line.bandwidth is None else self.line.bandwidth.map(lambda rate: rate * factor)


def fit_links(results: Sequence[TrialResult]) -> list[LinkFit]:
    """The fit of every exchange among the results that has enough sizes, in the order in which they ran."""
    return [found for series in group_transfers(results).values() if (found := fit_series(series)) is not None]


def fit_series(series: TransferSeries) -> LinkFit | None:
    """The fit of one exchange; None if too few sizes were measured."""
    line = fit_line(series.seconds)
    if line is None:
        return None
    return LinkFit(
        configuration=series.trial.configuration,
        operation=series.operation,
        num_ranks=series.trial.num_ranks,
        backend=series.backend,
        device=series.trial.device,
        link=series.trial.link if series.trial.num_hosts > 1 else "",
        line=line,
    )


def fit_line(times: Mapping[int, Rounds]) -> LineFit | None:
    """Fit the line to times by size in bytes; None for fewer than `FEWEST_SIZES` that gave any."""
    table = tabulate_sizes(times)
    sizes = table.num_ranks
    if len(sizes) < FEWEST_SIZES:
        return None
    alpha, beta = (float(value) for value in np.exp(_solve(sizes, table.centres)))
    rounds = [_solve(sizes, values) for values in table.per_round]
    fitted = alpha + beta * sizes
    ratios = table.centres / fitted
    has_alpha, has_beta = alpha >= MAJORITY * fitted[0], beta * sizes[-1] >= MAJORITY * fitted[-1]
    return LineFit(
        latency_seconds=_estimate(alpha, [found[0] for found in rounds]) if has_alpha else None,
        byte_seconds=_estimate(beta, [found[1] for found in rounds]) if has_beta else None,
        half_bytes=_estimate(alpha / beta, [found[0] - found[1] for found in rounds])
        if has_alpha and has_beta
        else None,
        fitted_latency_seconds=alpha,
        fitted_byte_seconds=beta,
        residual_ratio=float(np.sqrt(np.mean((ratios - 1) ** 2))),
        misfits=tuple(
            Misfit(payload_bytes=int(size), ratio=float(ratio))
            for size, ratio in zip(sizes, ratios, strict=True)
            if abs(ratio - 1) > MISFIT
        ),
        smallest_bytes=int(sizes[0]),
        largest_bytes=int(sizes[-1]),
    )


def _solve(sizes: Floats, seconds: Floats) -> Floats:
    """The logs of α and β."""
    from scipy.optimize import least_squares  # here, because loading it takes longer than all that `--help` does

    log_sizes, targets = np.log(sizes), np.log(seconds)

    def miss(coefficients: Floats) -> Floats:
        found: Floats = np.logaddexp(coefficients[0], coefficients[1] + log_sizes) - targets
        return found

    start = np.array([targets[0], targets[-1] - log_sizes[-1]])
    solved = least_squares(miss, start, loss="soft_l1", f_scale=SOFT_LIMIT)
    return np.asarray(solved.x, dtype=np.float64)


def _estimate(value: float, logs: list[float]) -> Estimate:
    """A positive number with its interval from the rounds, on the log scale; one that says nothing is not given."""
    return leave_logs(estimate_over_rounds(math.log(value), logs))

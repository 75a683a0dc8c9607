"""A link in two numbers: what a message costs whatever its size, and what a byte adds.

    t(n) = α + β · n          α  latency          1/β  bandwidth          n½ = α / β  half-bandwidth size

This is the model of Hockney (1994) and, per collective, that of Thakur, Rabenseifner & Gropp (2005). At n½ a message
moves at half of the bandwidth that ever larger ones come to: smaller messages are dominated by latency, larger ones
by bandwidth. β belongs to the whole message of `bandwidth.py`, so that 1/β is an algorithm bandwidth; times the bus
factor it is the bus bandwidth that can be held against the wire.

Both are fitted to the logs of the times, so that 4 bytes count as much as a gigabyte, with a loss that grows linearly
and not as a square beyond 10 % (soft L1; Huber 1964 for the idea): real links change protocol, algorithm or cache on
the way, and a few sizes that are off must not bend the line. Where they are off by more than `MISFIT` they are named.
α is known where it is most of the smallest message's time, β where it is most of the largest's; otherwise the sizes
do not reach far enough, and it is None.

Each round is also fitted on its own: that is where the intervals come from, as in `sizes.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scalelab.analysis.bandwidth import bus_factor
from scalelab.analysis.estimate import Estimate
from scalelab.analysis.rounds import Floats, Rounds
from scalelab.analysis.sizes import tabulate_sizes
from scalelab.analysis.stats import WIDEST_FACTOR, estimate_over_rounds
from scalelab.analysis.transfers import TransferSeries, group_transfers
from scalelab.trial import TrialResult

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
    """α; None where the smallest message is too large to show it."""
    byte_seconds: Estimate | None
    """β; None where the largest message is too small to show it."""
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
    """The fit of one exchange; None where too few sizes were measured."""
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
    found = estimate_over_rounds(math.log(value), logs)
    if found.low is None or found.high is None or found.high - found.low > math.log(WIDEST_FACTOR):
        return Estimate(value=value)
    return found.map(math.exp)

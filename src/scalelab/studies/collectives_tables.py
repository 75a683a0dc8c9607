"""The tables of the study of collectives."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from scalelab.analysis.bandwidth import bus_factor
from scalelab.analysis.estimate import Estimate
from scalelab.analysis.link import LinkFit
from scalelab.analysis.stats import estimate_median
from scalelab.analysis.transfers import TransferSeries
from scalelab.report.document import Cell, Column, Table, make_cell, make_row
from scalelab.settings import LACKED
from scalelab.studies.sweep import INTERVAL_NOTE, OVERSUBSCRIBED
from scalelab.trial import Status, TrialResult

GLOO_NOTE = "gloo carries a reduce-scatter out as an all-reduce of the whole: it sends twice what its size says"
FIT_NOTES = (
    "time = latency + size / algorithm bandwidth, a line through all sizes (Hockney 1994); half at: the size that moves"
    " at half of it",
    "bus: algorithm × 2(n−1)/n for all-reduce, (n−1)/n for all-gather, reduce-scatter and all-to-all, 1 for the others",
)


def name_operation(operation: str) -> str:
    """As a reader knows it."""
    return operation.replace("_", "-")


def find_failure(series: TransferSeries) -> TrialResult | None:
    """The first round that did not complete, if there is one."""
    return next((result for result in series.results if result.status is not Status.COMPLETED), None)


def is_lacking(series: TransferSeries) -> bool:
    """Whether the backend has no such operation."""
    return any(LACKED in result.reason for result in series.results)


def make_fit_table(every: Sequence[TransferSeries], fits: Mapping[str, LinkFit | None]) -> Table:
    """Latency and bandwidth of every operation: what a predictor starts from."""
    columns = (
        Column(key="run", header="operation", align="left"),
        Column(key="num_ranks", header="ranks", quantity="count"),
        Column(key="latency_seconds", header="latency", quantity="latency"),
        Column(key="bandwidth", header="algorithm", quantity="bandwidth"),
        Column(key="bus_bandwidth", header="bus", quantity="bandwidth"),
        Column(key="half_bytes", header="half at", quantity="bytes"),
        Column(key="residual_ratio", header="off the line", quantity="share"),
    )
    rows = [_make_fit_row(series, fits[series.trial.configuration]) for series in every]
    return Table(columns=columns, rows=tuple(rows), notes=(INTERVAL_NOTE, *FIT_NOTES, *_list_notes(every)))


def _make_fit_row(series: TransferSeries, fit: LinkFit | None) -> tuple[Cell, ...]:
    label = make_cell(series.trial.label, mark=OVERSUBSCRIBED if series.trial.is_oversubscribed else "")
    if fit is None:
        return make_row(label, series.trial.num_ranks, _say_status(series), None, None, None, None)
    line = fit.line
    return make_row(
        label,
        series.trial.num_ranks,
        line.latency_seconds,
        line.bandwidth,
        fit.bus_bandwidth,
        line.half_bytes,
        line.residual_ratio,
    )


def _say_status(series: TransferSeries) -> str | None:
    """Why there is no fit; nothing where there were only too few sizes."""
    failure = find_failure(series)
    if is_lacking(series):
        return f"lacking in {series.backend}"
    return failure.status.words if failure and not series.is_measured else None


def make_size_table(series: TransferSeries, fit: LinkFit | None) -> Table:
    """Every size of one operation: its time, and what that makes as bandwidth."""
    columns = (
        Column(key="payload_bytes", header="size, bytes", quantity="count"),
        Column(key="num_calls", header="calls", quantity="count"),
        Column(key="num_timings", header="timings", quantity="count"),
        Column(key="call_seconds", header="time", quantity="latency"),
        Column(key="mean_seconds", header="mean", quantity="latency"),
        Column(key="bandwidth", header="algorithm", quantity="bandwidth"),
        Column(key="bus_bandwidth", header="bus", quantity="bandwidth"),
        Column(key="line_ratio", header="× line", quantity="ratio"),
    )
    rows = tuple(_make_size_row(series, size, fit) for size in series.seconds)
    return Table(columns=columns, rows=rows, notes=(INTERVAL_NOTE, *_list_notes([series])))


def _make_size_row(series: TransferSeries, size: int, fit: LinkFit | None) -> tuple[Cell, ...]:
    rounds = series.seconds[size]
    timings = [seconds for launch in rounds for seconds in launch]
    call = estimate_median(rounds)
    bandwidth: Estimate = call.map(lambda seconds: size / seconds)
    factor = bus_factor(series.operation, series.trial.num_ranks)
    return make_row(
        size,
        series.num_calls[size],
        len(timings),
        call,
        statistics.fmean(timings),
        bandwidth,
        bandwidth.map(lambda rate: rate * factor),
        None if fit is None else call.value / fit.line.predict_seconds(size),
    )


def _list_notes(every: Sequence[TransferSeries]) -> Iterator[str]:
    if any(series.trial.is_oversubscribed for series in every):
        yield f"{OVERSUBSCRIBED} oversubscribed: its ranks share cores"
    if any(series.operation == "reduce_scatter" and series.backend == "gloo" for series in every):
        yield GLOO_NOTE

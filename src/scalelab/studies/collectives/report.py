"""The tables of the study of collectives.

The study of collectives in words: its findings, and what is wrong with its measurement.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from scalelab.analysis.communication import bus_factor
from scalelab.analysis.estimate import Estimate
from scalelab.analysis.link import MISFIT, LinkFit, TransferSeries
from scalelab.analysis.quality import measure_noise
from scalelab.analysis.stats import estimate_median
from scalelab.records.settings import LACKED
from scalelab.records.trial import Status, TrialResult
from scalelab.report.document import Cell, Column, Table, make_cell, make_row
from scalelab.report.findings import Caution
from scalelab.studies.shared.cautions import FEWEST_LAUNCHES, HEAVY_TAIL, NOISY_BETWEEN, warn_of_load
from scalelab.studies.shared.sweep import INTERVAL_NOTE, OVERSUBSCRIBED
from scalelab.units import format_bytes, format_quantity, format_share

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


MOST_NAMED = 3
"""How many sizes or operations a sentence names."""


def summarise_links(every: Sequence[TransferSeries], fits: Mapping[str, LinkFit | None]) -> tuple[str, ...]:
    """One sentence for every operation and number of ranks."""
    return tuple(_say_link(series, fits[series.trial.configuration]) for series in every)


def _say_link(series: TransferSeries, fit: LinkFit | None) -> str:
    name = f"{name_operation(series.operation)} on {series.trial.num_ranks} ranks"
    if is_lacking(series):
        return f"{name}: {series.backend} has no such operation for these messages."
    if not series.is_measured:
        return f"{name}: nothing was measured."
    if fit is None:
        return f"{name}: too few sizes for latency and bandwidth; the table has their times."
    parts = [
        f"{format_quantity('latency', fit.line.latency_seconds)} latency"
        if fit.line.latency_seconds
        else "no message small enough to show latency",
        f"{format_quantity('bandwidth', fit.bus_bandwidth)} bus bandwidth"
        if fit.bus_bandwidth
        else "no message large enough to show bandwidth",
    ]
    half = fit.line.half_bytes
    tail = f"; half of that from {format_bytes(half.value)} on" if half else ""
    return f"{name}: {', '.join(parts)}{tail}."


def warn_of_left_out(left_out: Mapping[str, Sequence[int]]) -> Iterator[Caution]:
    """Sizes that were asked for and that memory had no room for."""
    named = [f"{label} {', '.join(map(format_bytes, sizes))}" for label, sizes in left_out.items() if sizes]
    if named:
        yield Caution(
            message=f"messages that did not fit into the memory that was free were left out: {'; '.join(named)}",
            next_step="free memory, use fewer --ranks, or a smaller --max-size",
        )


def warn_of_exchanges(every: Sequence[TransferSeries], fits: Mapping[str, LinkFit | None]) -> Iterator[Caution]:
    """Everything that makes the numbers less certain than their intervals say."""
    for series in every:
        yield from _name_failure(series)
    yield from _name_noise(every)
    yield from _name_crowding(every)
    yield from _name_few_launches(every)
    yield from warn_of_load([result for series in every for result in series.results])
    yield from _name_tails(every)
    yield from _name_misfits(every, fits)


def _name_failure(series: TransferSeries) -> Iterator[Caution]:
    failure = find_failure(series)
    if failure is None or is_lacking(series):
        return
    num_failed = sum(result.status is failure.status for result in series.results)
    which = f" in {num_failed} of {len(series.results)} rounds" if len(series.results) > 1 else ""
    kept = "; what was timed before is in the tables" if failure.transfers else ""
    advice = "see --backend and --operations" if failure.status is Status.INVALID else failure.status.advice
    yield Caution(
        message=f"{series.trial.label} {failure.status.words}{which}: {failure.reason}{kept}",
        next_step=f"{advice}; its logs are in trials/{failure.trial.name}",
    )


def _name_noise(every: Sequence[TransferSeries]) -> Iterator[Caution]:
    found = [
        (measure_noise(rounds).between_ratio or 0.0, series.trial.label, size)
        for series in every
        if not series.trial.is_oversubscribed
        for size, rounds in series.seconds.items()
    ]
    worst, label, size = max(found, default=(0.0, "", 0))
    if worst > NOISY_BETWEEN:
        yield Caution(
            message=f"noisy host: launches of {label} differ by {format_share(worst)} (standard deviation) at"
            f" {format_bytes(size)}, the worst of all",
            next_step="close other programs, or raise --rounds",
        )


def _name_crowding(every: Sequence[TransferSeries]) -> Iterator[Caution]:
    crowded = [series.trial.label for series in every if series.trial.is_oversubscribed]
    if crowded:
        yield Caution(
            message=f"ranks share cores in {', '.join(crowded)}: waiting for a core is part of every time there",
            next_step="use fewer --ranks or --threads-per-rank before believing latencies",
        )


def _name_few_launches(every: Sequence[TransferSeries]) -> Iterator[Caution]:
    counts = [
        (sum(bool(launch) for launch in rounds), series.trial.label)
        for series in every
        for rounds in series.seconds.values()
    ]
    fewest, label = min(counts, default=(FEWEST_LAUNCHES, ""))
    if fewest < FEWEST_LAUNCHES:
        times = "once" if fewest == 1 else f"{fewest} times"
        yield Caution(
            message=f"{label} was launched {times}: an interval over launches rests on few numbers, or is missing",
            next_step=f"use --rounds {FEWEST_LAUNCHES}",
        )


def _name_tails(every: Sequence[TransferSeries]) -> Iterator[Caution]:
    """Calls that stall move no median, and are part of what a training waits for."""
    found = [
        (max(_measure_tail(series, size) for size in series.seconds), series) for series in every if series.seconds
    ]
    heavy = [f"{series.trial.label} up to {tail:.1f}×" for tail, series in found if tail > HEAVY_TAIL]
    if heavy:
        yield Caution(
            message=f"some calls take far longer than most; mean over median: {', '.join(heavy)}",
            next_step="a training waits by the mean, a fit goes through the medians; transfers.csv has every timing",
        )


def _measure_tail(series: TransferSeries, size: int) -> float:
    timings = [seconds for launch in series.seconds[size] for seconds in launch]
    return statistics.fmean(timings) / statistics.median(timings)


def _name_misfits(every: Sequence[TransferSeries], fits: Mapping[str, LinkFit | None]) -> Iterator[Caution]:
    named = []
    for series in every:
        fit = fits[series.trial.configuration]
        misfits = sorted(fit.line.misfits, key=lambda misfit: -abs(misfit.ratio - 1)) if fit else []
        if misfits:
            listed = ", ".join(f"{format_bytes(m.payload_bytes)} {m.ratio:.2f}×" for m in misfits[:MOST_NAMED])
            more = f" and {len(misfits) - MOST_NAMED} more" if len(misfits) > MOST_NAMED else ""
            named.append(f"{series.trial.label} at {listed}{more}")
    if named:
        yield Caution(
            message=f"one line does not describe all sizes, off by over {format_share(MISFIT)}: {'; '.join(named)}",
            next_step="take the times of the sizes that matter from the table: protocols and caches change on the way",
        )

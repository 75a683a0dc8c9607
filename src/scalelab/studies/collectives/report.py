"""The answer of the collectives study: latency and bandwidth of every operation, size by size, and what to doubt."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.link import MISFIT, LinkFit, TransferSeries
from scalelab.analysis.quality import measure_noise
from scalelab.analysis.stats import Rounds, estimate_median
from scalelab.analysis.traffic import bus_factor
from scalelab.records.trial import Cause, Status, TrialResult
from scalelab.report.charts.column_charts import plot_rates, plot_times
from scalelab.report.charts.plot import MOST_SERIES
from scalelab.report.document import Chart, Table, make_cell
from scalelab.report.findings import DETAIL, MAIN, REASON, Caution, CautionKind, Finding, FindingKind, Known
from scalelab.report.tables import (
    INTERVAL_NOTE,
    bytes_column,
    count_column,
    make_column,
    make_table,
    ratio_column,
    share_column,
    text_column,
)
from scalelab.studies.shared.arms import describe_failures, join_words
from scalelab.studies.shared.cautions import (
    HEAVY_TAIL,
    HEAVY_TAILS,
    NOISY_BETWEEN,
    NOISY_LAUNCHES,
    name_failure,
    name_few_launches,
    name_noise,
    warn_of_load,
)
from scalelab.studies.shared.sweep import OVERSUBSCRIBED
from scalelab.units import format_bytes, format_known, format_share, list_some

GLOO_NOTE = "gloo runs a reduce-scatter as an all-reduce of the whole: it sends twice its size"
FIT_NOTES = (
    "fit: time = latency + size / algbw (Hockney 1994); n½: the size that reaches half of algbw",
    "busbw: algbw × 2(n−1)/n for all-reduce, (n−1)/n for all-gather, reduce-scatter and all-to-all",
)
INTERVALS = "Bars are 95 % CIs."
NUM_PLACES = 40
MOST_NAMED = 3
"""How many sizes of one operation a warning names."""
Made = dict[str, Any]

LINK = FindingKind(
    "link",
    "Latency and bandwidth of a collective, from a line through all message sizes",
    REASON,
    ("latency_seconds", "bus_bandwidth", "half_bytes"),
)
LACKING = FindingKind("no-operation", "The backend does not implement the operation", DETAIL)
NO_FIT = FindingKind("no-fit", "Why an operation has no latency and bandwidth", DETAIL)

SIZES_LEFT_OUT = CautionKind("sizes-left-out", "Message sizes that did not fit into free memory", "failure")
CROWDED = CautionKind("oversubscribed", "Ranks share cores", "wrong-work")
MISFITS = CautionKind("misfit", "Message sizes that the fitted line does not describe", "noise")


def name_operation(operation: str) -> str:
    """As a reader knows it."""
    return operation.replace("_", "-")


def find_failure(series: TransferSeries) -> TrialResult | None:
    """The first round that did not complete, if there is one."""
    return next((result for result in series.results if result.status is not Status.COMPLETED), None)


def is_lacking(series: TransferSeries) -> bool:
    """Whether the backend has no such operation."""
    return any(result.cause is Cause.UNSUPPORTED for result in series.results)


def make_fit_table(every: Sequence[TransferSeries], fits: Mapping[str, LinkFit | None]) -> Table:
    """Latency and bandwidth of every operation: what a predictor starts from."""

    def read_fit(read: Callable[[LinkFit], Known]) -> Callable[[TransferSeries], Known]:
        return lambda series: read(fit) if (fit := fits[series.trial.configuration]) else None

    def read_latency(series: TransferSeries) -> Known:
        fit = fits[series.trial.configuration]
        return fit.line.latency_seconds if fit else _describe_status(series)

    return make_table(
        every,
        text_column("run", "operation", lambda series: make_cell(series.trial.label, mark=_find_mark(series))),
        count_column("num_ranks", "ranks", lambda series: series.trial.num_ranks, is_detail=True),
        make_column("latency", "latency_seconds", "latency", read_latency),
        make_column("bandwidth", "bandwidth", "algbw", read_fit(lambda fit: fit.line.bandwidth)),
        make_column("bandwidth", "bus_bandwidth", "busbw", read_fit(lambda fit: fit.bus_bandwidth)),
        bytes_column("half_bytes", "n½", read_fit(lambda fit: fit.line.half_bytes)),
        share_column("residual_ratio", "fit error", read_fit(lambda fit: fit.line.residual_ratio)),
        notes=(INTERVAL_NOTE, *FIT_NOTES, *_list_notes(every)),
    )


def _find_mark(series: TransferSeries) -> str:
    return OVERSUBSCRIBED if series.trial.is_oversubscribed else ""


def _describe_status(series: TransferSeries) -> str | None:
    """Why there is no fit; nothing if there were only too few sizes."""
    failure = find_failure(series)
    if is_lacking(series):
        return f"not in {series.backend}"
    return failure.status.words if failure and not series.is_measured else None


def make_size_table(series: TransferSeries, fit: LinkFit | None) -> Table:
    """Every size of one operation: its time, and the bandwidth it reaches."""
    factor = bus_factor(series.operation, series.trial.num_ranks)

    def read_rate(row: tuple[int, Estimate], factor: float = 1.0) -> Estimate:
        return row[1].map(lambda seconds: row[0] * factor / seconds)

    def compare_to_line(row: tuple[int, Estimate]) -> float | None:
        return row[1].value / fit.line.predict_seconds(row[0]) if fit else None

    return make_table(
        [(size, estimate_median(rounds)) for size, rounds in series.seconds.items()],
        count_column("payload_bytes", "size, bytes", lambda row: row[0]),
        count_column("num_calls", "calls", lambda row: series.num_calls[row[0]]),
        count_column("num_timings", "timings", lambda row: len(_list_timings(series, row[0]))),
        make_column("latency", "call_seconds", "time", lambda row: row[1]),
        make_column("latency", "mean_seconds", "mean", lambda row: statistics.fmean(_list_timings(series, row[0]))),
        make_column("bandwidth", "bandwidth", "algbw", read_rate),
        make_column("bandwidth", "bus_bandwidth", "busbw", lambda row: read_rate(row, factor)),
        ratio_column("line_ratio", "× fit", compare_to_line),
        notes=(INTERVAL_NOTE, *_list_notes([series])),
    )


def _list_timings(series: TransferSeries, size: int) -> list[float]:
    return [seconds for launch in series.seconds[size] for seconds in launch]


def _list_notes(every: Sequence[TransferSeries]) -> Iterator[str]:
    if any(series.trial.is_oversubscribed for series in every):
        yield f"{OVERSUBSCRIBED} oversubscribed: its ranks share cores"
    if any(series.operation == "reduce_scatter" and series.backend == "gloo" for series in every):
        yield GLOO_NOTE


def summarise_operations(every: Sequence[TransferSeries], fits: Mapping[str, LinkFit | None]) -> Iterator[Finding]:
    """One finding for every operation and number of ranks, the first measured one as the answer."""
    measured = [series for series in every if fits[series.trial.configuration] is not None]
    for series in every:
        yield _describe_link(series, fits[series.trial.configuration], series in measured[:1])


def _describe_link(series: TransferSeries, fit: LinkFit | None, is_main: bool) -> Finding:
    label = series.trial.label
    if is_lacking(series):
        return LACKING(label, f"{label}: {series.backend} does not implement this operation.")
    if not series.is_measured:
        return NO_FIT(label, f"{label}: not measured.")
    if fit is None:
        return NO_FIT(label, f"{label}: too few sizes to fit latency and bandwidth; the table lists their times.")
    latency, bandwidth, half = fit.line.latency_seconds, fit.bus_bandwidth, fit.line.half_bytes
    parts = (
        f"latency {format_known('latency', latency)}" if latency else "latency unknown (no message small enough)",
        f"bus bandwidth {format_known('bandwidth', bandwidth)}"
        if bandwidth
        else "bandwidth unknown (no message large enough)",
    )
    tail = f", half of it at {format_bytes(half.value)}" if half else ""
    text = f"{label}: {', '.join(parts)}{tail}."
    weight = MAIN if is_main else REASON
    return LINK(label, text, weight=weight, latency_seconds=latency, bus_bandwidth=bandwidth, half_bytes=half)


def warn_of_left_out(left_out: Mapping[str, Sequence[int]]) -> Iterator[Caution]:
    """Requested sizes that memory had no room for."""
    named = [f"{label} {', '.join(map(format_bytes, sizes))}" for label, sizes in left_out.items() if sizes]
    if named:
        yield SIZES_LEFT_OUT(
            ", ".join(label for label, sizes in left_out.items() if sizes),
            f"sizes left out, not enough free memory: {'; '.join(named)}",
            "free memory, use fewer --ranks, or a smaller --max-size",
        )


def warn_of_exchanges(every: Sequence[TransferSeries], fits: Mapping[str, LinkFit | None]) -> Iterator[Caution]:
    """Everything that makes the numbers less certain than their intervals say."""
    for series in every:
        if not is_lacking(series):
            failure = find_failure(series)
            kept = "; earlier timings are in the tables" if failure and failure.transfers else ""
            yield from name_failure(series.trial.label, series.results, is_measured=series.is_measured, more=kept)
    fair = [series for series in every if not series.trial.is_oversubscribed]
    spreads = {label: measure_noise(rounds).between_ratio or 0.0 for label, rounds in _list_sizes(fair).items()}
    yield from name_noise(NOISY_LAUNCHES, spreads, NOISY_BETWEEN, "launches", "--rounds")
    yield from _name_crowding(every)
    yield from name_few_launches(_list_sizes(every))
    yield from warn_of_load([result for series in every for result in series.results])
    yield from _name_tails(every)
    yield from _name_misfits(every, fits)


def _list_sizes(every: Sequence[TransferSeries]) -> dict[str, Rounds]:
    """The timings of every size of every operation, by what a warning calls them."""
    return {f"{one.trial.label}, {format_bytes(size)}": rounds for one in every for size, rounds in one.seconds.items()}


def _name_crowding(every: Sequence[TransferSeries]) -> Iterator[Caution]:
    crowded = ", ".join(series.trial.label for series in every if series.trial.is_oversubscribed)
    if crowded:
        yield CROWDED(
            crowded,
            f"ranks share cores in {crowded}: those times include waiting for a core",
            "use fewer --ranks or --threads-per-rank",
        )


def _name_tails(every: Sequence[TransferSeries]) -> Iterator[Caution]:
    """Calls that stall do not move a median, and training waits for them."""
    found = {series.trial.label: _measure_tail(series) for series in every if series.seconds}
    heavy = {label: tail for label, tail in found.items() if tail > HEAVY_TAIL}
    if heavy:
        yield HEAVY_TAILS(
            ", ".join(heavy),
            "some calls take far longer than the median; mean over median: "
            + ", ".join(f"{label} up to {tail:.1f}×" for label, tail in heavy.items()),
            "training waits for the mean, the fit uses medians; transfers.csv has every timing",
            mean_over_median=max(heavy.values()),
        )


def _measure_tail(series: TransferSeries) -> float:
    every = [_list_timings(series, size) for size in series.seconds]
    return max(statistics.fmean(timings) / statistics.median(timings) for timings in every)


def _name_misfits(every: Sequence[TransferSeries], fits: Mapping[str, LinkFit | None]) -> Iterator[Caution]:
    named = {}
    for series in every:
        fit = fits[series.trial.configuration]
        misfits = sorted(fit.line.misfits, key=lambda misfit: -abs(misfit.ratio - 1)) if fit else []
        if misfits:
            sizes = [f"{format_bytes(m.payload_bytes)} {m.ratio:.2f}×" for m in misfits]
            named[series.trial.label] = list_some(sizes, MOST_NAMED)
    if named:
        yield MISFITS(
            ", ".join(named),
            f"the fit is off by over {format_share(MISFIT)}: "
            + "; ".join(f"{label} at {sizes}" for label, sizes in named.items()),
            "for those sizes use the times in the table: protocols and caches change with size",
        )


def make_points(series: TransferSeries) -> list[Made]:
    """Time and bus bandwidth of every size."""
    factor = bus_factor(series.operation, series.trial.num_ranks)
    points: list[Made] = []
    for size, rounds in series.seconds.items():
        call = estimate_median(rounds)
        rate = call.map(lambda seconds, size=size: size * factor / seconds)  # type: ignore[misc]
        label = series.trial.label
        points.append({"series": label, "payload_bytes": size, "seconds": call, "bandwidth": rate, "key": label})
    return points


def plot_operations(every: Sequence[TransferSeries]) -> tuple[Chart, ...]:
    """Times and bandwidths of all operations, as many as a figure can show."""
    measured = [series for series in every if series.is_measured]
    shown = measured[:MOST_SERIES]
    rows = [point for series in shown for point in make_points(series)]
    if not rows:
        return ()
    lost = [(s.trial.label, find_status(s)) for s in every if not s.is_measured]
    more = f"{len(measured) - len(shown)} more are drawn below." if len(measured) > len(shown) else ""
    said = join_words(INTERVALS, more, *describe_failures(lost))
    return (
        plot_times(title="Time per call", rows=rows, fits=(), caption=said),
        plot_rates(title="Bus bandwidth", rows=rows, caption=said),
    )


def find_status(series: TransferSeries) -> str:
    failure = find_failure(series)
    return failure.status.words if failure else "no timing"


def plot_operation(series: TransferSeries, fit: LinkFit | None) -> tuple[Chart, ...]:
    """One operation: every launch, the median, and the line that latency and bandwidth come from."""
    rows = make_points(series)
    if not rows:
        return ()
    said = join_words(
        INTERVALS,
        "Faint points are medians of single launches." if len(series.results) > 1 else "",
        "" if fit is not None else "Too few sizes for a fit.",
    )
    launches: list[Made] = [
        {"series": series.trial.label, "payload_bytes": size, "seconds": estimate_median([launch]).value}
        for size, rounds in series.seconds.items()
        for launch in rounds
        if len(rounds) > 1 and len(launch)
    ]
    title = f"{series.trial.label}: time against size"
    return (plot_times(title=title, rows=rows, raw=launches, fits=_draw_line(fit), caption=said),)


def _draw_line(fit: LinkFit | None) -> list[Made]:
    """The fitted line, which is a curve on logarithmic axes."""
    if fit is None:
        return []
    low, high = fit.line.smallest_bytes, fit.line.largest_bytes
    places = [low * (high / low) ** (step / (NUM_PLACES - 1)) for step in range(NUM_PLACES)]
    name = "latency + size / bandwidth"
    return [{"series": name, "payload_bytes": place, "seconds": fit.line.predict_seconds(place)} for place in places]

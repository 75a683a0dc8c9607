"""The study of collectives in words: its findings, and what is wrong with its measurement."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from scalelab.analysis.link import MISFIT, LinkFit
from scalelab.analysis.quality import measure_noise
from scalelab.analysis.transfers import TransferSeries
from scalelab.report.document import Caution
from scalelab.studies.cautions import FEWEST_LAUNCHES, HEAVY_TAIL, NOISY_BETWEEN, warn_of_load
from scalelab.studies.collectives_tables import find_failure, is_lacking, name_operation
from scalelab.trial import Status
from scalelab.units import format_bytes, format_quantity, format_share

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

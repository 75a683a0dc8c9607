"""The study of I/O formats in words: its findings, and what is wrong with its measurement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from scalelab.analysis.fetches import FetchSeries
from scalelab.analysis.quality import measure_noise
from scalelab.analysis.stats import estimate_ratio
from scalelab.data.amplification import TOLERATED
from scalelab.records.settings import MEMORY, Pass
from scalelab.records.trial import Status
from scalelab.report.findings import Caution
from scalelab.studies.io_formats.report import IN_MEMORY, compare_with_map, estimate_utilisation, find_alike
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.breakdown import estimate_phase_share
from scalelab.studies.shared.cautions import FEWEST_LAUNCHES, NOISY_BETWEEN, find_cautions, warn_of_load
from scalelab.studies.shared.input_split import estimate_part, read_load
from scalelab.units import format_bytes, format_quantity, format_seconds, format_share

STAYED = 0.01
"""A share of the file that may stay in memory without a cold pass being a warm one."""
NEARLY = 0.05
"""A share of the step that is not worth a word."""
MOST_NAMED = 4


def summarise_formats(
    alone: Sequence[FetchSeries], every: Sequence[FetchSeries], arms: Mapping[str, Arm]
) -> Iterator[str]:
    """The quickest and the slowest; why some are slow, and what helps; workers; the training."""
    measured = [series for series in alone if series.main is not None]
    yield from _name_extremes(measured)
    yield from _name_causes(measured)
    yield from _name_cures(measured)
    yield from _name_blocks(measured)
    yield from _name_cold(measured)
    yield from _name_workers(every)
    yield from _name_waits(arms)


def _say_epoch(series: FetchSeries) -> str:
    assert series.main is not None
    return format_quantity("seconds", series.main.epoch_seconds)


def _name_extremes(measured: Sequence[FetchSeries]) -> Iterator[str]:
    files = [series for series in measured if series.reading.format != MEMORY]
    if not files:
        return
    # What was loaded whole is read from memory: it says nothing of its file.
    best = min(
        (one for one in files if one.reading.mode != "eager"), key=_read_epoch, default=min(files, key=_read_epoch)
    )
    worst = max(files, key=_read_epoch)
    words = f"Shuffled and warm, an epoch of {best.num_samples} samples takes {_say_epoch(best)} from {best.label}"
    if worst is best:
        yield f"{words}."
        return
    times = format_quantity("ratio", _read_epoch(worst) / _read_epoch(best))
    yield f"{words}, the quickest file, and {_say_epoch(worst)} from {worst.label}, {times} times as long."


def _read_epoch(series: FetchSeries) -> float:
    assert series.main is not None
    return series.main.epoch_seconds.value


def _name_causes(measured: Sequence[FetchSeries]) -> Iterator[str]:
    """Chunks that hold many samples, where each sample is asked for alone."""
    for series in measured:
        amplification = series.amplification or 1.0
        if series.reading.mode != "naive" or amplification <= TOLERATED:
            continue
        ratio = compare_with_map(measured, series)
        beside = f", {format_quantity('ratio', ratio)} times the memory map" if ratio is not None else ""
        yield (
            f"{series.label} takes {_say_epoch(series)}{beside}: {series.chunks}, so that each sample of"
            f" {format_bytes(series.sample_bytes)} inflates {amplification:.4g} times its bytes."
        )


def _name_cures(measured: Sequence[FetchSeries]) -> Iterator[str]:
    """The same file, read by batches and with its chunks kept."""
    for series in measured:
        if series.reading.mode != "naive":
            continue
        alike = (one for one in measured if _is_same_file(one, series) and one.reading.mode == "lazy")
        lazy = next(alike, None)
        if lazy is None or lazy.main is None or series.main is None:
            continue
        ratio = estimate_ratio(series.main.epochs, lazy.main.epochs)
        first = format_quantity("seconds", lazy.main.first_epoch_seconds)
        yield (
            f"Read by batches, the same file takes {_say_epoch(lazy)} ({lazy.label}; {first} in the first epoch):"
            f" {series.label} is {format_quantity('ratio', ratio)} times as slow."
        )


def _name_blocks(measured: Sequence[FetchSeries]) -> Iterator[str]:
    """Sets that are too large to be kept: what blocks of chunks save, and what they cost in randomness."""
    for series in measured:
        blocks = series.passes.get(Pass(order="blocks").name)
        if blocks is None or series.main is None or not series.shuffle:
            continue
        ratio = estimate_ratio(series.main.epochs, blocks.epochs)
        seconds = format_quantity("seconds", blocks.epoch_seconds)
        yield (
            f"In a training {series.label} is {series.shuffle}. An epoch takes {seconds} so; fully shuffled"
            f" {format_quantity('ratio', ratio)} times as long."
        )


def _is_same_file(one: FetchSeries, other: FetchSeries) -> bool:
    def describe(series: FetchSeries) -> tuple[object, ...]:
        reading = series.reading
        return reading.format, reading.automatic_chunks, reading.is_as_it_is, series.trial.num_ranks

    return describe(one) == describe(other)


def _name_cold(measured: Sequence[FetchSeries]) -> Iterator[str]:
    """What the disk adds, for the quickest format."""
    found = []
    for series in measured:
        cold, warm = series.passes.get("shuffled batch cold"), series.passes.get("shuffled batch warm")
        if series.reading.mode == "lazy" and cold is not None and warm is not None:
            found.append((cold.epoch_seconds.value, series, estimate_ratio(cold.epochs, warm.first_epochs)))
    if found:
        seconds, series, ratio = min(found, key=lambda one: one[0])
        yield (
            f"From the disk an epoch takes {format_seconds(seconds)} at the least ({series.label}),"
            f" {format_quantity('ratio', ratio)} times its first epoch from the kernel's memory."
        )


def _name_workers(every: Sequence[FetchSeries]) -> Iterator[str]:
    """Whether workers read faster than the rank itself."""
    words = []
    for series in every:
        others = [one for one in find_alike(every, series) if one.reading.workers and one.main is not None]
        if series.reading.workers or series.main is None or not others:
            continue
        best = min(others, key=_read_epoch)
        assert best.main is not None
        ratio = estimate_ratio(series.main.epochs, best.main.epochs)
        words.append(f"{series.label} {format_quantity('ratio', ratio)} ({best.reading.workers})")
    if words:
        yield f"Samples per second with the best number of workers over those without: {'; '.join(words)}."


def _name_waits(arms: Mapping[str, Arm]) -> Iterator[str]:
    """The training that waits most, and those that hardly do."""
    reference = arms.get(IN_MEMORY)
    shares = [(share, arm) for arm in arms.values() if (share := estimate_phase_share(arm, "input")) is not None]
    if not shares:
        return
    worst, arm = max(shares, key=lambda pair: pair[0].value)
    wait = format_quantity("seconds", estimate_part(arm, read_load))
    utilisation = estimate_utilisation(arm, reference)
    yield (
        f"Inside a training {arm.label} waits longest: {wait} of every step, {format_quantity('share', worst)} of it;"
        f" accelerator utilisation {format_quantity('share', utilisation)}."
    )
    idle = [other.label for share, other in shares if share.value < NEARLY and other is not reference]
    if idle:
        yield f"Less than {format_share(NEARLY)} of the step waits with {', '.join(idle)}."


def warn_of_reading(every: Sequence[FetchSeries], arms: Mapping[str, Arm]) -> Iterator[Caution]:
    """Everything that makes the numbers less certain than their intervals say."""
    yield from _name_failures(every)
    yield from _name_warm_colds(every)
    yield from _name_crowding(every)
    yield from _name_noise(every)
    yield from _name_few_launches(every)
    if arms:
        yield from find_cautions(arms.values())
        yield from _name_unequal_losses(arms)
    else:
        yield from warn_of_load([result for series in every for result in series.results])


def _name_failures(every: Sequence[FetchSeries]) -> Iterator[Caution]:
    """Missing libraries once for all that they are missing for."""
    for reason in dict.fromkeys(one.failure.reason for one in every if one.failure):
        alike = [one for one in every if one.failure and one.failure.reason == reason]
        first = alike[0].failure
        assert first is not None
        labels = ", ".join(one.label for one in alike[:MOST_NAMED])
        more = f" and {len(alike) - MOST_NAMED} more" if len(alike) > MOST_NAMED else ""
        if first.status is Status.NOT_RUN:
            message, _, command = reason.rpartition(": ")
            yield Caution(message=f"{labels}{more} not run: {message or reason}", next_step=command)
            continue
        advice = "see --formats and --shape" if first.status is Status.INVALID else first.status.advice
        yield Caution(
            message=f"{labels}{more} {first.status.words}: {reason}",
            next_step=f"{advice}; the logs are in trials/{first.trial.name}",
        )


def _name_warm_colds(every: Sequence[FetchSeries]) -> Iterator[Caution]:
    stayed = [(share, one.label) for one in every if (share := one.resident_share) is not None and share > STAYED]
    if stayed:
        share, label = max(stayed)
        named = ", ".join(label for _, label in stayed[:MOST_NAMED])
        yield Caution(
            message=f"{named} could not be made cold: {format_share(share)} of {label} still in memory",
            next_step="take its cold rows for warm ones; use a local file system, and end whoever maps the file",
        )
    obstacles = dict.fromkeys(report.cold_obstacle for one in every for report in one.reports if report.cold_obstacle)
    for obstacle in obstacles:
        yield Caution(message=f"cold passes were warm: {obstacle}", next_step="read the warm tables only")


def _name_crowding(every: Sequence[FetchSeries]) -> Iterator[Caution]:
    crowded = [series.label for series in every if series.trial.is_oversubscribed]
    if crowded:
        more = f" and {len(crowded) - MOST_NAMED} more" if len(crowded) > MOST_NAMED else ""
        yield Caution(
            message=f"ranks share cores in {', '.join(crowded[:MOST_NAMED])}{more}: waiting is in their times",
            next_step="use fewer --ranks or --threads-per-rank before believing them",
        )


def _name_noise(every: Sequence[FetchSeries]) -> Iterator[Caution]:
    found = [
        (measure_noise(series.main.epochs).between_ratio or 0.0, series.label)
        for series in every
        if series.main is not None and not series.trial.is_oversubscribed
    ]
    worst, label = max(found, default=(0.0, ""))
    if worst > NOISY_BETWEEN:
        yield Caution(
            message=f"noisy host: epochs of {label} differ by {format_share(worst)} between launches (standard"
            " deviation), the worst of all",
            next_step="close other programs, or raise --rounds",
        )


def _name_few_launches(every: Sequence[FetchSeries]) -> Iterator[Caution]:
    counts = [sum(bool(len(launch)) for launch in one.main.epochs) for one in every if one.main is not None]
    fewest = min(counts, default=FEWEST_LAUNCHES)
    if fewest < FEWEST_LAUNCHES:
        times = "once" if fewest == 1 else f"{fewest} times"
        yield Caution(
            message=f"every format was launched {times}: an interval rests on few numbers, or is missing",
            next_step=f"use --rounds {FEWEST_LAUNCHES}",
        )


def _name_unequal_losses(arms: Mapping[str, Arm]) -> Iterator[Caution]:
    """All train on the same samples in the same order, unless it is by blocks: another loss is other data."""
    reference = arms.get(IN_MEMORY)
    known = _read_losses(reference) if reference is not None else None
    if not known:
        return
    alike = [arm for arm in arms.values() if not any(rank.shuffle for one in arm.results for rank in one.ranks)]
    differing = [arm.label for arm in alike if (found := _read_losses(arm)) and found != known]
    if differing:
        yield Caution(
            message=f"{', '.join(differing)} gave other losses than the same training from memory",
            next_step="do not trust these formats' data before that is understood",
        )


def _read_losses(arm: Arm) -> dict[int, float]:
    return arm.completed[0].losses() if arm.completed else {}

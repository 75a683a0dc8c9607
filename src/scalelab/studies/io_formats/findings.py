"""What io-formats found, and what is wrong with its measurement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.fetches import FetchSeries
from scalelab.analysis.quality import measure_noise
from scalelab.analysis.stats import estimate_ratio
from scalelab.data.chunks import TOLERATED
from scalelab.data.formats.catalogue import ENTRIES
from scalelab.records.tasks import MEMORY, Pass
from scalelab.records.trial import Status
from scalelab.report.findings import ASIDE, DETAIL, MAIN, REASON, Caution, CautionKind, Finding, FindingKind
from scalelab.studies.collectives.report import CROWDED
from scalelab.studies.io_formats.report import IN_MEMORY, compare_with_map, estimate_utilization, find_alike
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.breakdown import LOADER_WAIT, estimate_part, estimate_phase_share, read_load
from scalelab.studies.shared.cautions import (
    FAILED,
    NOISY_BETWEEN,
    NOISY_LAUNCHES,
    NOT_RUN,
    UNEQUAL_LOSSES,
    VERBS,
    find_cautions,
    name_few_launches,
    name_noise,
    warn_of_load,
)
from scalelab.studies.shared.losses import read_losses
from scalelab.studies.shared.study import was_refused
from scalelab.units import (
    Quantity,
    format_bytes,
    format_known,
    format_quantity,
    format_seconds,
    format_share,
    format_times,
    is_known,
    list_some,
)

STAYED = 0.01
"""A cold pass may find this share of the file in the page cache."""
NEARLY = 0.05
"""A share of the step that does not matter."""
MOST_NAMED = 4

FASTEST = FindingKind(
    "fastest-format", "Epoch of the fastest format, and of the slowest", MAIN, ("epoch_seconds", "slowest", "ratio")
)
CHUNKS = FindingKind(
    "chunks", "Chunks that hold many samples, read sample by sample", REASON, ("epoch_seconds", "amplification")
)
BY_BATCHES = FindingKind("batched-reads", "The same file read by batches", REASON, ("ratio",))
BLOCKS = FindingKind("block-shuffle", "Shuffling by blocks against a full shuffle", DETAIL, ("ratio",))
COLD = FindingKind("cold-reads", "What reading from disk adds", DETAIL, ("epoch_seconds", "ratio"))
WORKERS = FindingKind("workers", "Throughput with the best number of workers over none", DETAIL, ("ratio", "workers"))
NO_WAITING = FindingKind("no-loader-wait", "Formats that training hardly waits for", ASIDE)

WARM = CautionKind("not-cold", "Passes from disk were served from the page cache", "wrong-work", ("share",))


def summarise_formats(
    alone: Sequence[FetchSeries], every: Sequence[FetchSeries], arms: Mapping[str, Arm]
) -> Iterator[Finding]:
    """The fastest and the slowest; why some are slow, and what helps; workers; training."""
    measured = [series for series in alone if series.main is not None]
    yield from _name_extremes(measured)
    yield from _name_waits(arms)
    for series in measured:
        if series.dataset.mode == "naive":
            yield from _name_cause(measured, series)
            yield from _name_cure(measured, series)
    for series in measured:
        yield from _name_blocks(series)
    yield from _name_cold(measured)
    yield from _name_workers(every)


def _format_epoch(series: FetchSeries) -> str:
    assert series.main is not None
    seconds = series.main.epoch_seconds
    return format_quantity("seconds", seconds) if is_known(seconds) else "an unknown time"


def _knows_epoch(*every: FetchSeries) -> bool:
    return all(series.main is not None and is_known(series.main.epoch_seconds) for series in every)


def _say(estimate: Estimate | None, quantity: Quantity) -> str:
    return "unknown" if estimate is None else format_known(quantity, estimate)


def _read_epoch(series: FetchSeries) -> float:
    assert series.main is not None
    return series.main.epoch_seconds.value


def _name_extremes(measured: Sequence[FetchSeries]) -> Iterator[Finding]:
    files = [series for series in measured if series.dataset.format != MEMORY]
    if not files:
        return
    # An eager reader serves from memory: its epochs say nothing about the file.
    lazy = [one for one in files if one.dataset.mode != "eager"]
    best, worst = min(lazy or files, key=_read_epoch), max(files, key=_read_epoch)
    assert best.main is not None
    ratio = _read_epoch(worst) / _read_epoch(best)
    text = f"{best.label} is the fastest file: an epoch of {best.num_samples} samples takes {_format_epoch(best)}"
    if worst is not best:
        times = f", {format_quantity('ratio', ratio)} times as long" if _knows_epoch(worst, best) else ""
        text += f"; {worst.label} takes {_format_epoch(worst)}{times}"
    yield FASTEST(
        best.label,
        f"{text} (shuffled, warm).",
        epoch_seconds=best.main.epoch_seconds,
        slowest=worst.label,
        ratio=ratio,
    )


def _name_cause(measured: Sequence[FetchSeries], series: FetchSeries) -> Iterator[Finding]:
    """Chunks that hold many samples, where each sample is asked for alone."""
    amplification = series.amplification or 1.0
    if amplification <= TOLERATED or series.main is None:
        return
    ratio = compare_with_map(measured, series)
    beside = f", {format_times(ratio)} the memory map" if ratio is not None and _knows_epoch(series) else ""
    yield CHUNKS(
        series.label,
        f"{series.label} takes {_format_epoch(series)}{beside}: {series.chunks}, so reading one sample of"
        f" {format_bytes(series.sample_bytes)} decompresses {amplification:.4g} times its bytes.",
        epoch_seconds=series.main.epoch_seconds,
        amplification=amplification,
    )


def _name_cure(measured: Sequence[FetchSeries], series: FetchSeries) -> Iterator[Finding]:
    """The same file, read by batches and with its chunks kept."""
    lazy = next((one for one in measured if _is_same_file(one, series) and one.dataset.mode == "lazy"), None)
    if lazy is None or lazy.main is None or series.main is None:
        return
    ratio = estimate_ratio(series.main.epochs, lazy.main.epochs)
    first = format_known("seconds", lazy.main.first_epoch_seconds)
    yield BY_BATCHES(
        series.label,
        f"Read by batches, the same file takes {_format_epoch(lazy)} ({lazy.label}; {first} in the first epoch):"
        f" {series.label} takes {format_times(ratio)} as long.",
        ratio=ratio,
    )


def _is_same_file(one: FetchSeries, other: FetchSeries) -> bool:
    def describe(series: FetchSeries) -> tuple[object, ...]:
        dataset = series.dataset
        return dataset.format, dataset.automatic_chunks, dataset.is_as_it_is, series.trial.num_ranks

    return describe(one) == describe(other)


def _name_blocks(series: FetchSeries) -> Iterator[Finding]:
    """Data sets too large to be kept: what blocks of chunks save, and what they cost in randomness."""
    blocks = series.passes.get(Pass(order="blocks").name)
    if blocks is None or series.main is None or not series.shuffle:
        return
    ratio = estimate_ratio(series.main.epochs, blocks.epochs)
    seconds = format_known("seconds", blocks.epoch_seconds)
    yield BLOCKS(
        series.label,
        f"In training {series.label} is {series.shuffle}: an epoch takes {seconds}; a full shuffle takes"
        f" {format_times(ratio)} as long.",
        ratio=ratio,
    )


def _name_cold(measured: Sequence[FetchSeries]) -> Iterator[Finding]:
    """What the disk adds, for the fastest format."""
    found = []
    for series in measured:
        cold, warm = series.passes.get(Pass(cache="cold").name), series.passes.get(Pass().name)
        if series.dataset.mode == "lazy" and cold is not None and warm is not None:
            found.append((cold.epoch_seconds.value, series, estimate_ratio(cold.epochs, warm.first_epochs)))
    if found:
        seconds, series, ratio = min(found, key=lambda one: one[0])
        yield COLD(
            series.label,
            f"From disk the fastest epoch takes {format_seconds(seconds)} ({series.label}),"
            f" {format_times(ratio)} its first epoch from the page cache.",
            epoch_seconds=seconds,
            ratio=ratio,
        )


def _name_workers(every: Sequence[FetchSeries]) -> Iterator[Finding]:
    """Whether workers read faster than the rank itself."""
    for series in every:
        others = [one for one in find_alike(every, series) if one.dataset.workers and one.main is not None]
        if series.dataset.workers or series.main is None or not others:
            continue
        best = min(others, key=_read_epoch)
        assert best.main is not None
        ratio = estimate_ratio(series.main.epochs, best.main.epochs)
        yield WORKERS(
            series.label,
            f"{best.label}: {format_times(ratio)} the samples/s of {series.label} without workers.",
            ratio=ratio,
            workers=best.dataset.workers,
        )


def _name_waits(arms: Mapping[str, Arm]) -> Iterator[Finding]:
    """The training that waits most, and those that hardly do."""
    reference = arms.get(IN_MEMORY)
    stored = [arm for arm in arms.values() if arm is not reference]
    shares = [(share, arm) for arm in stored if (share := estimate_phase_share(arm, "input")) is not None]
    if not shares:
        return
    worst, arm = max(shares, key=lambda pair: pair[0].value)
    wait, utilization = estimate_part(arm, read_load), estimate_utilization(arm, reference)
    yield LOADER_WAIT(
        arm.label,
        f"In training {arm.label} waits longest for its batches: {_say(wait, 'seconds')} per step,"
        f" {_say(worst, 'share')} of it; accelerator utilization {_say(utilization, 'share')}.",
        wait_seconds=wait,
        share=worst,
        utilization=utilization,
    )
    idle = ", ".join(other.label for share, other in shares if share.value < NEARLY)
    if idle:
        yield NO_WAITING(idle, f"Training waits less than {format_share(NEARLY)} of the step with {idle}.")


def warn_of_reading(every: Sequence[FetchSeries], arms: Mapping[str, Arm]) -> Iterator[Caution]:
    """Everything that makes the numbers less certain than their intervals say."""
    yield from _name_failures(every)
    yield from _name_warm_colds(every)
    crowded = [series.label for series in every if series.trial.is_oversubscribed]
    if crowded:
        yield CROWDED(
            ", ".join(crowded),
            f"ranks share cores in {list_some(crowded, MOST_NAMED)}: those times include waiting for a core",
            "use fewer --ranks or --threads-per-rank",
        )
    epochs = {one.label: one.main.epochs for one in every if one.main is not None}
    spreads = {
        name: measure_noise(rounds).between_ratio or 0.0 for name, rounds in epochs.items() if name not in crowded
    }
    yield from name_noise(NOISY_LAUNCHES, spreads, NOISY_BETWEEN, "launches", "--rounds")
    yield from name_few_launches(epochs)
    if arms:
        yield from find_cautions(arms.values())
        yield from _name_unequal_losses(arms)
    else:
        yield from warn_of_load([result for series in every for result in series.results])


def _name_failures(every: Sequence[FetchSeries]) -> Iterator[Caution]:
    """The same failure once for all rows that have it, such as a library that is not installed."""
    alike: dict[str, list[FetchSeries]] = {}
    for series in every:
        if series.failure:
            alike.setdefault(series.failure.reason, []).append(series)
    for reason, rows in alike.items():
        failure = rows[0].failure
        assert failure is not None
        if was_refused(failure):
            kind, advice = NOT_RUN, _advise_installing(rows[0].dataset.format)
        else:
            advice = "check --formats and --shape" if failure.status is Status.INVALID else failure.advice
            kind, advice = FAILED, f"{advice}; logs are in trials/{failure.trial.name}"
        labels = [one.label for one in rows]
        message = f"{list_some(labels, MOST_NAMED)} {VERBS[failure.status]}: {reason}"
        yield kind(", ".join(labels), message, advice, status=failure.status.value)


def _advise_installing(name: str) -> str:
    extra = ENTRIES[name].extra if name in ENTRIES else ""
    return f"pip install 'scalelab[{extra}]', or leave {name} out of --formats" if extra else f"leave {name} out"


def _name_warm_colds(every: Sequence[FetchSeries]) -> Iterator[Caution]:
    stayed = {one.label: share for one in every if (share := one.resident_share) is not None and share > STAYED}
    if stayed:
        worst = max(stayed, key=lambda label: stayed[label])
        yield WARM(
            ", ".join(stayed),
            f"{list_some(list(stayed), MOST_NAMED)} stayed in the page cache: {format_share(stayed[worst])} of {worst}",
            "read its cold rows as warm ones; use a local file system, and stop programs that map the file",
            share=stayed[worst],
        )
    obstacles = dict.fromkeys(report.cold_obstacle for one in every for report in one.reports if report.cold_obstacle)
    for obstacle in obstacles:
        yield WARM("", f"cold passes were warm: {obstacle}", "use the warm tables only")


def _name_unequal_losses(arms: Mapping[str, Arm]) -> Iterator[Caution]:
    """All train on the same samples in the same order, unless shuffled by blocks: another loss means other data."""
    known = read_losses(arms.get(IN_MEMORY))
    if not known:
        return
    alike = [arm for arm in arms.values() if not any(rank.shuffle for one in arm.results for rank in one.ranks)]
    differing = ", ".join(arm.label for arm in alike if (found := read_losses(arm)) and found != known)
    if differing:
        yield UNEQUAL_LOSSES(
            differing,
            f"{differing} gave different losses than the same training from memory",
            "do not trust these formats' data until that is explained",
        )

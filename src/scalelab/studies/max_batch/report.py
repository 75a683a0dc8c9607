"""The probes of a search, what they show, and what to know before relying on it."""

from __future__ import annotations

from collections.abc import Iterator

from scalelab.analysis.batch_limits import MOST_PROBES, predict_largest
from scalelab.records.observations import NUM_LOOKED_AT
from scalelab.records.trial import Status, TrialResult
from scalelab.report.charts.column_charts import draw_lines
from scalelab.report.charts.plot import Axis, Row, plot_lines
from scalelab.report.document import Chart, Table
from scalelab.report.findings import ASIDE, MAIN, REASON, Caution, CautionKind, Finding, FindingKind
from scalelab.report.tables import bytes_column, count_column, make_table, share_column, text_column
from scalelab.studies.max_batch.answer import BatchSearch, find_signal
from scalelab.studies.shared.job import Job
from scalelab.units import format_bytes, format_count, format_share

EDGE_BYTES = 64 * 1024
"""A smaller margin may fall the other way in another launch: Python's own objects differ by as much."""

LARGEST_BATCH = FindingKind(
    "largest-batch",
    "The largest batch per rank that ran, and whether one sample more failed",
    MAIN,
    ("batch", "global_batch", "is_confirmed"),
)
HEADROOM = FindingKind("headroom", "Memory that the largest batch leaves of the limit", REASON, ("headroom", "limit"))
MEMORY_LINE = FindingKind(
    "memory-line", "Fixed memory and memory per sample", REASON, ("fixed_bytes", "bytes_per_sample", "largest_by_line")
)
STANDING_MEMORY = FindingKind(
    "standing-memory",
    "Weights, gradients and optimizer state of a rank, where no batch fits",
    REASON,
    ("total", "limit", "parameters", "gradients", "optimizer"),
)
SEARCH_COST = FindingKind("search-cost", "Probes and forecasts of the search", ASIDE, ("probes", "failed", "forecasts"))

ENDED_EARLY = CautionKind("search-ended", "A probe failed for another reason than memory", "failure", ("batch",))
GIVEN_UP = CautionKind("search-given-up", "Memory does not grow with the batch", "failure", ("probes",))
CRASHED = CautionKind("crashed-probe", "A probe crashed and counts as out of memory", "wrong-work", ("batch",))
NO_LIMIT = CautionKind("no-limit", "No memory limit was given", "note", ("limit",))
CLOSE_CALL = CautionKind("close-call", "Batch and limit are very close", "noise", ("margin",))
UNEVEN = CautionKind("uneven-batches", "Batches differ in shape", "wrong-work", ("batch", "shapes"))
OWN_PAGES = CautionKind("own-pages", "An ordinary allocator needs more memory", "note")


def describe_end(result: TrialResult) -> str:
    return "ran" if result.status is Status.COMPLETED else result.status.words


def make_probe_table(search: BatchSearch) -> Table:
    """The probes, and the trial that ended the search, if one did."""
    peaks = [probe.peak_bytes for probe in search.probes]
    predicted = [search.predict(number) for number in range(len(peaks))]
    unknown = [None] * (len(search.results) - len(peaks))
    rows = list(zip(search.results, [*peaks, *unknown], [*predicted, *unknown], strict=True))
    limit = search.limit_bytes
    return make_table(
        rows,
        count_column("batch_per_rank", "batch per rank", lambda row: row[0].trial.batch_per_rank),
        text_column("status", "status", lambda row: describe_end(row[0])),
        bytes_column("peak_bytes", "peak", lambda row: row[1]),
        bytes_column("predicted_bytes", "predicted", lambda row: row[2]),
        share_column("limit_share", "of the limit", lambda row: row[1] / limit if row[1] and limit else None),
        notes=(
            "in the order in which they were tried",
            "peak: the most that counts towards the limit, on the rank with the most",
            "predicted: by the line through two earlier probes, before this one ran",
        ),
    )


def make_answer_table(search: BatchSearch, num_ranks: int) -> Table:
    line = search.line
    return make_table(
        [search],
        count_column("largest_batch", "largest batch", lambda row: row.largest),
        count_column("largest_global_batch", "over all ranks", lambda row: (row.largest or 0) * num_ranks),
        bytes_column("limit_bytes", "limit", lambda row: row.limit_bytes),
        bytes_column("headroom_bytes", "headroom", lambda row: row.headroom_bytes),
        bytes_column("fixed_bytes", "fixed", lambda _: line.fixed_bytes if line else None),
        bytes_column("sample_bytes", "per sample", lambda _: line.sample_bytes if line else None),
    )


def draw_probes(table: Table, search: BatchSearch) -> Chart | None:
    """The memory of every probe, as predicted and as measured, with the line and the limit."""
    last = max((result.trial.batch_per_rank for result in search.results), default=0)
    levels: list[Row] = []
    for batch in (0, last):
        if search.line is not None:
            levels.append({"batch_per_rank": batch, "value": search.line.predict_bytes(batch), "series": "line"})
        if search.limit_bytes is not None:
            limit = f"limit {format_bytes(search.limit_bytes)}"
            levels.append({"batch_per_rank": batch, "value": search.limit_bytes, "series": limit})
    return draw_lines(
        table,
        Axis(field="batch_per_rank", title="batch per rank", quantity="count"),
        {"predicted_bytes": "predicted before", "peak_bytes": "measured"},
        title="Memory of every probe",
        axis_title="peak",
        levels=levels,
        is_joined=False,
        caption="What a limit counts, on the rank that takes most; the line goes through the two nearest probes.",
    )


def draw_search(search: BatchSearch) -> Chart | None:
    """Which batch was tried when, and how it ended."""
    if len(search.results) < 2:
        return None
    places = [{"number": n, "batch": r.trial.batch_per_rank} for n, r in enumerate(search.results, start=1)]
    batches = [int(place["batch"]) for place in places]
    rows: list[Row] = [
        {**place, "series": describe_end(result), "key": result.trial.label, "reason": result.reason}
        for place, result in zip(places, search.results, strict=True)
    ]
    guides: list[Row] = [{**place, "series": "search"} for place in places]
    if search.largest is not None:
        ends = (1, len(places))
        guides += [{"number": n, "batch": search.largest, "series": f"largest, {search.largest}"} for n in ends]
    return plot_lines(
        title="The search",
        x=Axis(field="number", title="probe", quantity="count", from_zero=False),
        y=Axis(field="batch", title="batch per rank", quantity="count", is_log=max(batches) >= 8 * min(batches)),
        rows=rows,
        guides=guides,
        is_joined=False,
        extra={"reason": "reason"},
        caption="Probes in the order in which they ran.",
    )


def list_findings(
    search: BatchSearch, num_ranks: int, most: int | None, tolerance: str = "0%", tolerated: float = 0.0
) -> Iterator[Finding]:
    largest, failed = search.largest, search.smallest_failed
    if largest is None:
        if failed is not None:
            text = f"No batch ran: a batch of {failed} per rank {describe_failure(search, failed)}."
            yield LARGEST_BATCH("", text, is_confirmed=False)
            yield from describe_standing(search)
        return
    everywhere = f" ({largest * num_ranks} over {num_ranks} ranks)" if num_ranks > 1 else ""
    ran = f"it ran on all {num_ranks} ranks" if num_ranks > 1 else "it ran"
    if search.is_confirmed:
        text = (
            f"The largest batch that fits is {largest} per rank{everywhere}: {ran}, and {largest + 1}"
            f" {describe_failure(search, largest + 1)}."
        )
    elif largest == search.data_end:
        text = (
            f"All of the data fits: a batch of {largest} per rank{everywhere} ran, and it has no samples for a larger"
            " one."
        )
    elif largest == most:
        text = f"A batch of {largest} per rank{everywhere} fits: {ran}; --most allows no larger one."
    elif search.is_near(tolerated):
        seen = "by the memory line" if failed is None else f"for {failed} {describe_failure(search, failed)}"
        text = (
            f"A batch of {largest} per rank{everywhere} fits: {ran}; the largest is at most {tolerance} larger, {seen}."
        )
    else:
        text = f"The largest batch that ran so far is {largest} per rank{everywhere}; the search did not finish."
    answer = {"batch": largest, "global_batch": largest * num_ranks, "is_confirmed": search.is_confirmed}
    yield LARGEST_BATCH(f"batch {largest}", text, **answer)
    yield from describe_memory(search)
    num_failed = sum(not probe.fits for probe in search.probes)
    begun = f"; {format_count(len(search.forecasts), 'forecast')} decided where to begin" if search.forecast else ""
    yield SEARCH_COST(
        "",
        f"The search took {format_count(len(search.probes), 'probe')}, of which {num_failed} did not fit{begun}.",
        probes=len(search.probes),
        failed=num_failed,
        forecasts=len(search.forecasts),
    )


def describe_standing(search: BatchSearch) -> Iterator[Finding]:
    """What is there before the first sample, where not one fits."""
    found, limit = search.standing_bytes, search.limit_bytes
    if not found or not limit:
        return
    total = sum(found.values())
    names = {"parameters": "weights", "gradients": "gradients up to", "optimizer": "optimizer state"}
    words = ", ".join(f"{names[name]} {format_bytes(size)}" for name, size in found.items())
    verdict = "more than" if total > limit else "of"
    yield STANDING_MEMORY(
        "",
        f"Without any sample a {search.owner} holds up to {format_bytes(total)}, {verdict} the {format_bytes(limit)}"
        f" it may have: {words} (by forecast).",
        total=total,
        limit=limit,
        **found,
    )


def describe_failure(search: BatchSearch, batch: int) -> str:
    tried = (one for one in search.results if one.trial.batch_per_rank == batch)
    crashed = next((one for one in tried if one.status is Status.CRASHED), None)
    if crashed is None:
        return "ran out of memory"
    died = find_signal(crashed)
    return f"died of {died.name} at the memory limit" if died and search.is_at_limit(crashed) else "crashed"


def describe_memory(search: BatchSearch) -> Iterator[Finding]:
    headroom, limit, line = search.headroom_bytes, search.limit_bytes, search.line
    if headroom is not None and limit:
        text = (
            f"It takes {format_bytes(search.peak_bytes)} of the {format_bytes(limit)} that a {search.owner} may have:"
            f" {format_bytes(headroom)} ({format_share(headroom / limit)}) are left."
        )
        yield HEADROOM("", text, headroom=headroom, limit=limit)
    if line is None:
        return
    by_line = predict_largest(line, limit) if limit is not None and search.is_confirmed else None
    verdict = "" if by_line is None else f"; this line alone predicts a largest batch of {by_line}"
    text = (
        f"A step needs {format_bytes(line.fixed_bytes)} whatever the batch, plus {format_bytes(line.sample_bytes)} per"
        f" sample{verdict}."
    )
    yield MEMORY_LINE(
        "", text, fixed_bytes=line.fixed_bytes, bytes_per_sample=line.sample_bytes, largest_by_line=by_line
    )


def list_cautions(search: BatchSearch, job: Job, most: int | None) -> Iterator[Caution]:
    broken, crashed = search.broken, search.crashed
    if broken is not None:
        batch = broken.trial.batch_per_rank
        yield ENDED_EARLY(
            broken.trial.label,
            f"the search ended early: batch {batch} was {broken.status.words}: {broken.reason}",
            f"{broken.advice and broken.advice + '; '}if the data has no more samples, give --most; its logs are in"
            f" trials/{broken.trial.name}",
            batch=batch,
        )
    elif len(search.probes) >= MOST_PROBES and not search.is_confirmed and search.largest != search.bound(most):
        yield GIVEN_UP(
            "",
            f"the search stopped after {MOST_PROBES} probes: memory does not grow with the batch",
            "check that build() uses batch_size, or give --most",
            probes=len(search.probes),
        )
    if crashed is not None:
        yield CRASHED(
            crashed.trial.label,
            f"{crashed.trial.label} crashed and counts as one that does not fit: {crashed.reason}",
            f"check whether memory was the reason; its logs are in trials/{crashed.trial.name}",
            batch=crashed.trial.batch_per_rank,
        )
    yield from warn_of_shapes(search)
    if search.trial is None or search.trial.device != "cpu":
        return
    if job.memory_limit is None:
        limit = format_bytes(search.limit_bytes)
        yield NO_LIMIT(
            "",
            f"no --memory-limit: a {search.owner} was limited to {limit}, its share of half the available memory",
            "give --memory-limit to get the answer for another machine",
            limit=search.limit_bytes,
        )
    yield from warn_of_margin(search)
    yield OWN_PAGES(
        "",
        "every tensor had its own pages here (--allocator pages); an ordinary allocator needs more memory for the"
        " same step, and a different amount in every launch",
        "train with --allocator pages, or leave memory free",
    )


def warn_of_shapes(search: BatchSearch) -> Iterator[Caution]:
    """The largest batch is the largest for the shapes that were drawn: a longer one may not fit."""
    if search.uneven is None:
        return
    batch = search.uneven.trial.batch_per_rank
    shapes = max(rank.num_batch_shapes or 1 for rank in search.uneven.ranks)
    yield UNEVEN(
        f"batch {batch}",
        f"batches of the same size differ in shape ({shapes} shapes in {NUM_LOOKED_AT} batches): memory depends on"
        " which ones are drawn",
        "let build() pad every batch to the longest sample, or leave memory free",
        batch=batch,
        shapes=shapes,
    )


def warn_of_margin(search: BatchSearch) -> Iterator[Caution]:
    """What was decided by less than launches differ by."""
    headroom, line, largest = search.headroom_bytes, search.line, search.largest
    if not search.is_confirmed or headroom is None or line is None or largest is None:
        return
    missing = line.sample_bytes - headroom
    if headroom < EDGE_BYTES:
        yield CLOSE_CALL(
            f"batch {largest}",
            f"batch {largest} fits by only {format_bytes(headroom)}: another launch may need more",
            f"train with {max(1, largest - 1)}",
            margin=headroom,
        )
    elif 0 < missing < EDGE_BYTES:
        yield CLOSE_CALL(
            f"batch {largest + 1}",
            f"by the line, batch {largest + 1} exceeds the limit by only {format_bytes(missing)}: it may fit in another"
            " launch",
            f"rely on {largest}, which ran",
            margin=missing,
        )

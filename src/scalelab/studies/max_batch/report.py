"""The answer of a search for the largest batch: its probes, the line through them, and what is left."""

from __future__ import annotations

from collections.abc import Iterator

from scalelab.analysis.batch_size import MOST_PROBES, predict_largest
from scalelab.records.trial import Status
from scalelab.report.document import Column, Document, Section, Table, make_row
from scalelab.report.findings import Caution, as_findings
from scalelab.studies.batch_size.charts import draw_search
from scalelab.studies.max_batch.answer import BatchSearch
from scalelab.studies.shared.job import Job
from scalelab.units import format_bytes, format_share

EDGE_BYTES = 64 * 1024
"""What is decided by less may be decided otherwise by another launch: Python's own objects differ by as much."""


def conclude_search(
    search: BatchSearch, *, question: str, job: Job, strategy: str, num_ranks: int, most: int | None
) -> Document:
    where = "plain loop" if strategy == "single" else f"{strategy} × {num_ranks}"
    steps = search.trial.plan.num_steps if search.trial else "–"
    limit = f"{format_bytes(search.limit_bytes)} per {name_owner(search)}"
    sections = [Section(tables=(make_probe_table(search),), charts=draw_search(search))]
    if search.largest is not None:
        sections.append(Section(heading="The answer", tables=(make_answer_table(search),)))
    return Document(
        title="Max batch",
        question=question,
        setting=" · ".join([job.label, where, job.dtype, limit, f"probes of {steps} steps"]),
        sections=tuple(sections),
        findings=as_findings(_find_sentences(search, num_ranks, most)),
        cautions=tuple(_find_cautions(search, job, most)),
    )


def name_owner(search: BatchSearch) -> str:
    """Who has the limit: the replicas of dp share a process."""
    return "process" if search.trial is not None and search.trial.strategy == "dp" else "rank"


def make_probe_table(search: BatchSearch) -> Table:
    columns = (
        Column(key="batch_per_rank", header="batch per rank", quantity="count"),
        Column(key="status", header="status", align="left"),
        Column(key="peak_bytes", header="peak", quantity="bytes"),
        Column(key="predicted_bytes", header="predicted", quantity="bytes"),
        Column(key="limit_share", header="of the limit", quantity="share"),
    )
    rows = []
    for number, result in enumerate(search.results):
        status = "ran" if result.status is Status.COMPLETED else result.status.words
        batch = result.trial.batch_per_rank
        if number >= len(search.probes):  # it ended the search, and is the last
            rows.append(make_row(batch, status, None, None, None))
            continue
        peak = search.probes[number].peak_bytes
        share = peak / search.limit_bytes if peak and search.limit_bytes else None
        rows.append(make_row(batch, status, peak, search.predict(number), share))
    notes = (
        "in the order in which they were tried",
        "peak: the most that a limit counts, of the rank that took most",
        "predicted: by the line through two earlier probes, before this one was run",
    )
    return Table(columns=columns, rows=tuple(rows), notes=notes)


def make_answer_table(search: BatchSearch) -> Table:
    columns = (
        Column(key="largest_batch", header="largest batch", quantity="count"),
        Column(key="largest_global_batch", header="over all ranks", quantity="count"),
        Column(key="limit_bytes", header="limit", quantity="bytes"),
        Column(key="headroom_bytes", header="headroom", quantity="bytes"),
        Column(key="fixed_bytes", header="fixed", quantity="bytes"),
        Column(key="sample_bytes", header="per sample", quantity="bytes"),
    )
    assert search.trial is not None
    assert search.largest is not None
    line = search.line
    row = make_row(
        search.largest,
        search.largest * search.trial.num_ranks,
        search.limit_bytes,
        find_headroom(search),
        line.fixed_bytes if line else None,
        line.sample_bytes if line else None,
    )
    return Table(columns=columns, rows=(row,))


def find_headroom(search: BatchSearch) -> int | None:
    """What the largest batch leaves of the limit."""
    if search.limit_bytes is None or search.peak_bytes is None:
        return None
    return search.limit_bytes - search.peak_bytes


def _find_sentences(search: BatchSearch, num_ranks: int, most: int | None) -> Iterator[str]:
    if search.largest is None:
        if search.smallest_failed is not None:
            end = _say_end(search, search.smallest_failed)
            yield f"No batch has run: a batch of {search.smallest_failed} per rank {end}."
        return
    yield _state_answer(search, num_ranks, most)
    headroom = find_headroom(search)
    if headroom is not None and search.limit_bytes:
        yield (
            f"It takes {format_bytes(search.peak_bytes)} of the {format_bytes(search.limit_bytes)} that a"
            f" {name_owner(search)} may have: {format_bytes(headroom)} ({format_share(headroom / search.limit_bytes)})"
            " are left."
        )
    line = search.line
    if line is not None:
        yield (
            f"A step needs {format_bytes(line.fixed_bytes)} whatever the batch, and"
            f" {format_bytes(line.sample_bytes)} for every sample of a rank's batch{_judge_line(search)}."
        )
    num_failed = sum(not probe.fits for probe in search.probes)
    num_probes = len(search.probes)
    told = "" if search.forecast is None else f"; {len(search.forecasts)} forecasts told where to begin"
    yield f"It took {num_probes} probe{'s'[: num_probes > 1]}, of which {num_failed} did not fit{told}."


def _state_answer(search: BatchSearch, num_ranks: int, most: int | None) -> str:
    largest = search.largest
    assert largest is not None
    everywhere = f" ({largest * num_ranks} over {num_ranks} ranks)" if num_ranks > 1 else ""
    ranks = f" on all {num_ranks} ranks" if num_ranks > 1 else ""
    if search.is_confirmed:
        return (
            f"The largest batch that fits is {largest} per rank{everywhere}: it ran{ranks}, and {largest + 1}"
            f" {_say_end(search, largest + 1)}."
        )
    if largest == most:
        return f"A batch of {largest} per rank{everywhere} fits: it ran{ranks}; larger ones were not wanted (--most)."
    return f"The largest batch that has run so far is {largest} per rank{everywhere}; the search did not end."


def _say_end(search: BatchSearch, batch: int) -> str:
    crashed = any(r.status is Status.CRASHED for r in search.results if r.trial.batch_per_rank == batch)
    return "crashed" if crashed else "ran out of memory"


def _judge_line(search: BatchSearch) -> str:
    """Whether the line, drawn through completed probes, says itself what was found."""
    assert search.line is not None
    if search.limit_bytes is None or not search.is_confirmed:
        return ""
    by_line = predict_largest(search.line, search.limit_bytes)
    if by_line == search.largest:
        return "; by that line too, the largest batch is the one that was found"
    return f"; by that line alone it would be {by_line}" if by_line is not None else ""


def _find_cautions(search: BatchSearch, job: Job, most: int | None) -> Iterator[Caution]:
    if search.broken is not None:
        broken = search.broken
        yield Caution(
            message=f"the search ended early: batch {broken.trial.batch_per_rank} was {broken.status.words}:"
            f" {broken.reason}",
            next_step=f"{broken.status.advice}; where the data has no more samples, give --most; its logs are in"
            f" trials/{broken.trial.name}",
        )
    elif len(search.probes) >= MOST_PROBES and not search.is_confirmed and search.largest != most:
        yield Caution(
            message=f"the search was given up after {MOST_PROBES} probes: memory does not grow with the batch",
            next_step="check that build() uses batch_size, or give --most",
        )
    if search.crashed is not None:
        crashed = search.crashed
        yield Caution(
            message=f"batch {crashed.trial.batch_per_rank} crashed and is counted as one that does not fit:"
            f" {crashed.reason}",
            next_step=f"look whether memory was the reason; its logs are in trials/{crashed.trial.name}",
        )
    if search.trial is None or search.trial.device != "cpu":
        return
    if job.memory_limit is None:
        yield Caution(
            message=f"no --memory-limit was given: a {name_owner(search)} was limited to"
            f" {format_bytes(search.limit_bytes)}, its share of half the memory that was available here",
            next_step="give --memory-limit to ask about another machine",
        )
    yield from _name_close_call(search)
    yield Caution(
        message="every tensor had pages of its own here (--allocator pages); an ordinary allocator needs more for the"
        " same step, and not the same in every launch",
        next_step="train with --allocator pages, or leave memory free",
    )


def _name_close_call(search: BatchSearch) -> Iterator[Caution]:
    """What was decided by less than launches differ by."""
    headroom, line, largest = find_headroom(search), search.line, search.largest
    if not search.is_confirmed or headroom is None or line is None or largest is None:
        return
    missing = line.sample_bytes - headroom
    if headroom < EDGE_BYTES:
        yield Caution(
            message=f"batch {largest} fits by {format_bytes(headroom)} only: another launch may need more",
            next_step=f"train with {max(1, largest - 1)}",
        )
    elif 0 < missing < EDGE_BYTES:
        yield Caution(
            message=f"by the line, batch {largest + 1} misses the limit by {format_bytes(missing)} only: it may fit"
            " in another launch",
            next_step=f"rely on {largest}, which has run",
        )

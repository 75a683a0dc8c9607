"""The document of a job of many ranks: what slows it down, which ranks behave alike, and the job without stragglers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from scalelab.answers.trace.report import describe_traces
from scalelab.answers.trace.view import NS, TraceView
from scalelab.report.charts.grid import plot_grid
from scalelab.report.charts.plot import Axis, Row
from scalelab.report.document import Chart, Document, Section, Table
from scalelab.report.findings import MAIN, REASON, Finding, FindingKind
from scalelab.report.tables import count_column, make_table, ratio_column, seconds_column, share_column, text_column
from scalelab.trace.stragglers import Fleet, SlowPart, inspect_fleet
from scalelab.units import REST_HIDDEN, format_count, format_seconds, format_share, list_some

STRAGGLER = FindingKind(
    "trace-straggler",
    "A rank, host, rail, stage or link that slows the job down",
    MAIN,
    ("cause", "slower", "saved", "num_ranks"),
    free=("slower",),
)
NO_STRAGGLER = FindingKind("no-straggler", "No rank, host, rail, stage or link stands out", MAIN)
WITHOUT = FindingKind("without-stragglers", "The time of the job without its stragglers", REASON, ("saved", "if_equal"))
MOST_LINES, MOST_COLUMNS = 128, 60
"""Of the heat map."""
CELL_HEIGHT = 6
LEAST_UNEVEN = 0.05
"""What the job must save without any delay, beyond its stragglers', for uneven work to be named."""
FEWEST_STEPS = 3
MOST_NAMED = 5
QUESTION = "Which ranks slow the job down, and how fast would it be without them?"


def describe_fleet(view: TraceView) -> Document:
    """The job as a whole."""
    document = describe_traces(view)
    fleet = inspect_fleet(view.job)
    if fleet is None:
        return document
    num_steps = max(len(trace.tables.steps) for trace in view.job.ranks)
    tables = (*([make_stragglers_table(fleet)] if fleet.stragglers else []), make_alike_table(fleet))
    chart = draw_lateness(fleet)
    section = Section(heading="Stragglers", tables=tables, charts=(chart,) if chart is not None else ())
    return replace(
        document,
        question=QUESTION,
        sections=(section, *document.sections),
        findings=(*summarise_fleet(fleet, num_steps), *document.findings),
    )


def summarise_fleet(fleet: Fleet, num_steps: int) -> Iterator[Finding]:
    """The stragglers, the most costly first, and the job without them."""
    for one in fleet.stragglers[:MOST_NAMED]:
        what = "Transfers through" if one.kind == "link" else "Transfers in" if one.kind == "group" else ""
        text = f"{what} the {one.name} take" if what else f"{one.name[0].upper()}{one.name[1:]} takes"
        own = "than usual" if what else "than usual between collectives"
        without = "without this delay"
        if one.kind == "long stage":
            text, own = f"S{one.name[1:]} computes", "than the mean of all stages"
            without = "with layers spread evenly"
        yield STRAGGLER(
            one.name,
            f"{text} {format_share(one.slower)} longer {own}; {without} the job would take"
            f" {format_share(one.saved)} less.",
            cause=one.kind,
            slower=one.slower,
            saved=one.saved,
            num_ranks=len(one.ranks),
        )
    if not fleet.stragglers:
        yield NO_STRAGGLER("", "No rank, host, rail, stage or link stands out.")
    per_step = f" ({format_seconds(fleet.span_ns * NS / num_steps)} per step)" if num_steps else ""
    without = f"Without {format_count(len(fleet.stragglers), 'straggler')}, the replayed job{per_step} takes"
    text = f"{without} {format_share(fleet.saved)} less. " if fleet.stragglers else ""
    is_uneven = fleet.saved_if_equal - fleet.saved > LEAST_UNEVEN and num_steps >= FEWEST_STEPS and is_spread(fleet)
    why = ": which ranks are slow changes from collective to collective, as with batches of uneven length"
    yield WITHOUT(
        "",
        f"{text}With usual times of all ranks and transfers, the job would take"
        f" {format_share(fleet.saved_if_equal)} less{why if is_uneven else ''}.",
        saved=fleet.saved,
        if_equal=fleet.saved_if_equal,
    )


def is_spread(fleet: Fleet) -> bool:
    """Whether the quarter of the ranks that are late the most is late for less than half of the time of all."""
    late: dict[int, float] = {}
    for rank, _, seconds in fleet.lateness:
        late[rank] = late.get(rank, 0.0) + seconds
    ordered = sorted(late.values(), reverse=True)
    return sum(ordered[: -(-len(ordered) // 4)]) < 0.5 * sum(ordered)


def make_stragglers_table(fleet: Fleet) -> Table:
    def list_places(one: SlowPart) -> str:
        hosts = sorted({fleet.places[rank].host for rank in one.ranks} - {""})
        return list_some(hosts, 3, REST_HIDDEN) or "–"

    return make_table(
        fleet.stragglers,
        text_column("straggler", "straggler", lambda one: one.name),
        text_column("hosts", "host", list_places),
        count_column("num_ranks", "ranks", lambda one: len(one.ranks)),
        ratio_column("time_ratio", "time / usual", lambda one: 1 + one.slower),
        share_column("saved_share", "saved / job", lambda one: one.saved),
        title="What slows the job down",
        notes=(
            "time: own time between collectives (ranks, hosts, rails, stages; compute of a long stage over the mean of"
            " all stages), transfer time (links, groups)",
            "saved: what a replay of the job without it takes less",
        ),
    )


def make_alike_table(fleet: Fleet) -> Table:
    return make_table(
        fleet.alike,
        text_column("ranks", "ranks that behave alike", lambda one: one.name),
        count_column("num_ranks", "number", lambda one: len(one.ranks)),
        text_column("which", "which", lambda one: format_ranks(one.ranks)),
        seconds_column("own_seconds", "own time", lambda one: one.own_ns * NS),
        seconds_column("waiting_seconds", "waiting", lambda one: one.waiting_ns * NS, unit_of="own_seconds"),
        title="Ranks that behave alike",
        notes=("per step, medians over ranks; own time: between collectives; waiting: in them, beyond the transfer",),
    )


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks in order as ranges."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    texts = [str(low) if low == high else f"{low}–{high}" for low, high in ranges]
    return list_some(texts, MOST_NAMED, REST_HIDDEN)


def draw_lateness(fleet: Fleet) -> Chart | None:
    """Ranks (or hosts, if they are many) over time: how late they enter their collectives."""
    if not fleet.lateness:
        return None
    ranks = sorted({rank for rank, _, _ in fleet.lateness})
    hosts = [fleet.places[rank].host for rank in ranks]
    names = {rank: f"rank {rank}" for rank in ranks}
    if len(ranks) > MOST_LINES and all(hosts):
        names = dict(zip(ranks, hosts, strict=True))
    if len(set(names.values())) > MOST_LINES:
        size = -(-len(ranks) // MOST_LINES)
        names = {rank: f"from rank {ranks[number // size * size]}" for number, rank in enumerate(ranks)}
    end = max(time for _, time, _ in fleet.lateness) or 1.0
    cells: dict[tuple[str, int], float] = {}
    for rank, time, late in fleet.lateness:
        key = names[rank], min(MOST_COLUMNS - 1, int(MOST_COLUMNS * time / end))
        cells[key] = max(late, cells.get(key, 0.0))
    lines, columns = list(dict.fromkeys(names.values())), sorted({column for _, column in cells})
    rows: list[Row] = [
        {
            "time": format_seconds((column + 0.5) * end / MOST_COLUMNS),
            "rank": line,
            "late": cells.get((line, column), 0.0),
        }
        for line in lines
        for column in columns
    ]
    what = "The largest delay of a rank behind the median of its group, by time"
    return plot_grid(
        title="Lateness at collectives",
        x=Axis(field="time", title="time", quantity="text"),
        y=Axis(field="rank", title="", quantity="text"),
        value=Axis(field="late", title="late by", quantity="seconds"),
        rows=rows,
        caption=f"{what}; each line is the slowest of its ranks." if len(lines) < len(ranks) else f"{what}.",
        cell_height=CELL_HEIGHT,
    )

"""The tables of the links study: what a link costs, what profiles say of it, how fast it is.

The links study in words, and what to be careful about.
"""

from __future__ import annotations

from collections.abc import Iterator

from scalelab.analysis.estimate import Estimate
from scalelab.report.document import Cell, Column, Table, make_row
from scalelab.report.findings import Caution, Value
from scalelab.studies.network.answer import (
    BASE,
    LinkRow,
    LinksAnswer,
    read_communication,
    read_latency,
    read_share,
    read_transfer,
    read_waiting,
)
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.sweep import (
    CONTROL,
    INTERVAL_NOTE,
    SweepColumn,
    compare_steps,
    make_sweep_table,
    ratio_column,
    samples_column,
    step_column,
)
from scalelab.units import format_bytes, format_quantity


def make_cost_table(answer: LinksAnswer) -> Table:
    """Steps, and how much of them waits for the exchange."""
    by_name = {row.link.name: row for row in answer.rows}
    inside = answer.reference.arm if answer.reference else None

    def read_exposed(arm: Arm, what: str) -> Value | Cell:
        row = by_name.get(arm.configuration)
        exposed = row.exposed if row else None
        if exposed is None:
            return None
        found = getattr(exposed, what)
        return Cell(value=found.value, low=found.low, high=found.high)

    columns = [
        step_column(),
        samples_column(),
        ratio_column(inside, "× inside"),
        SweepColumn(
            column=Column(key="exposed_seconds", header="exposed comm", quantity="seconds"),
            read=lambda arm: read_exposed(arm, "seconds"),
        ),
        SweepColumn(
            column=Column(key="exposed_share", header="of the step", quantity="share"),
            read=lambda arm: read_exposed(arm, "share"),
        ),
    ]
    known = [answer.arms.get(BASE), answer.arms.get(CONTROL), *(row.arm for row in answer.rows)]
    notes = ("exposed comm: a step less a step without the gradient exchange",)
    return make_sweep_table([arm for arm in known if arm], columns, name_header="link", notes=notes)


def make_profile_table(answer: LinksAnswer) -> Table:
    """What ranks did in their collectives, in the profiled steps."""
    columns = (
        Column(key="link", header="link", align="left"),
        Column(key="communication_seconds", header="communication", quantity="seconds"),
        Column(key="communication_share", header="of the profiled step", quantity="share"),
        Column(key="communication_ratio", header="comm × inside", quantity="ratio"),
        Column(key="latency_seconds", header="mean latency", quantity="seconds"),
        Column(key="transfer_seconds", header="transfer", quantity="seconds"),
        Column(key="waiting_seconds", header="waiting", quantity="seconds", unit_of="transfer_seconds"),
    )
    rows = tuple(
        make_row(
            row.link.name,
            row.estimate(read_communication),
            row.estimate(read_share),
            answer.compare_communication(row),
            row.estimate(read_latency),
            row.estimate(read_transfer),
            row.estimate(read_waiting),
        )
        for row in answer.rows
    )
    notes = (
        INTERVAL_NOTE,
        "a step, as the mean over ranks; communication: some collective is under way, hidden or not",
        "transfer: the shortest time of any rank in each collective; waiting: what ranks spent in it beyond that",
    )
    return Table(columns=columns, rows=rows, notes=notes)


def make_bandwidth_table(answer: LinksAnswer) -> Table:
    """Bus bandwidth of the training and of all-reduces alone, beside the nominal rate."""
    columns = (
        Column(key="link", header="link", align="left"),
        Column(key="payload_bytes", header="payload", quantity="bytes"),
        Column(key="trained_bytes_per_second", header="bus/s, training", quantity="bytes"),
        Column(key="bytes_per_second", header="bus/s, alone", quantity="bytes", unit_of="nominal_bytes_per_second"),
        Column(key="nominal_bytes_per_second", header="nominal/s", quantity="bytes"),
        Column(key="nominal_share", header="of nominal", quantity="share"),
        Column(key="latency_seconds", header="latency of 4 B", quantity="seconds"),
    )
    rows = tuple(_make_bandwidth_row(row) for row in answer.rows)
    notes = (
        INTERVAL_NOTE,
        "payload: of all collectives of a step; bus: what every link carries in each direction, as nccl-tests has it",
        "of nominal: the all-reduces alone, or the training where there are none",
    )
    return Table(columns=columns, rows=rows, notes=notes)


def _make_bandwidth_row(row: LinkRow) -> tuple[Cell, ...]:
    return make_row(
        row.link.name,
        row.payload_bytes,
        row.trained_bandwidth,
        row.bandwidth,
        row.link.bytes_per_second,
        row.nominal_share,
        row.latency,
    )


TOLERANCE = 0.1
"""How far a link may be from its nominal rate before there is a warning."""
MUCH_WAITING = 0.2
"""Share of the time in collectives from which on waiting is worth a word."""


def summarise_links(answer: LinksAnswer) -> Iterator[str]:
    """What every link costs, whether it is what it is said to be, and what of it is waiting."""
    for row in answer.rows:
        yield from _tell_cost(answer, row)
    for row in answer.rows:
        yield from _tell_bandwidth(row)
    for row in answer.rows:
        yield from _tell_waiting(row)


def _tell_cost(answer: LinksAnswer, row: LinkRow) -> Iterator[str]:
    if row.arm is None or not row.is_measured or row.link.is_inside:
        return
    words = []
    inside = answer.reference.arm if answer.reference else None
    ratio = compare_steps(row.arm, inside)
    if isinstance(ratio, Estimate):
        words.append(f"a step takes {format_quantity('ratio', ratio)} times as long as inside one host")
    share = row.exposed.share if row.exposed else None
    if share is not None:
        words.append(f"{format_quantity('share', share)} of a step waits for the exchange")
    total, part = row.estimate(read_communication), row.estimate(read_share)
    if total is not None and part is not None:
        times = answer.compare_communication(row)
        more = f", {format_quantity('ratio', times)} times that inside" if isinstance(times, Estimate) else ""
        words.append(f"communication is {format_quantity('share', part)} of a profiled step{more}")
    if words:
        yield f"{row.link.name}: {'; '.join(words)}."


def _tell_bandwidth(row: LinkRow) -> Iterator[str]:
    found = row.bandwidth
    if found is None or row.series is None:
        return
    size = format_bytes(max(row.series.seconds))
    said = f"{row.link.name}: an all-reduce of {size} alone has a bus bandwidth of {format_quantity('bytes', found)}/s"
    nominal = row.link.bytes_per_second
    if nominal is None or row.nominal_share is None:
        yield f"{said}."
    else:
        share = format_quantity("share", row.nominal_share)
        yield f"{said}, {share} of the nominal {format_bytes(nominal)}/s."


def _tell_waiting(row: LinkRow) -> Iterator[str]:
    transfer, waiting = row.estimate(read_transfer), row.estimate(read_waiting)
    if transfer is None or waiting is None or transfer.value + waiting.value <= 0:
        return
    share = waiting.value / (transfer.value + waiting.value)
    if share >= MUCH_WAITING:
        yield (
            f"{row.link.name}: {format_quantity('share', share)} of the time in collectives is waiting for a later"
            " rank, which no faster link would save."
        )


def warn_of_links(answer: LinksAnswer) -> Iterator[Caution]:
    """A link that is not what it is said to be, or whose exchanges failed."""
    for row in answer.rows:
        share = row.nominal_share
        if share is not None and row.bandwidth is not None and abs(share.value - 1) > TOLERANCE:
            how = "could not be filled" if share.value < 1 else "let more through than it should"
            yield Caution(
                message=f"{row.link.name} {how}: the largest all-reduce had {format_quantity('share', share)} of the"
                " nominal rate, so that its row is of another link",
                next_step="measure again on an idle machine, or with a slower link: a CPU must carry what it emulates",
            )
        failed = [result for result in (row.series.results if row.series else ()) if result.reason]
        if failed:
            yield Caution(
                message=f"{row.link.name}: the all-reduces alone were {failed[0].status.words}: {failed[0].reason}",
                next_step="look at the last lines of the logs",
            )

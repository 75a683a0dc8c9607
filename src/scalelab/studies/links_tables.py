"""The tables of the links study: what a link costs, what profiles say of it, how fast it is."""

from __future__ import annotations

from scalelab.report.document import Cell, Column, Table, Value, make_row
from scalelab.studies.arms import Arm
from scalelab.studies.links_answer import (
    BASE,
    LinkRow,
    LinksAnswer,
    read_communication,
    read_latency,
    read_share,
    read_transfer,
    read_waiting,
)
from scalelab.studies.sweep import (
    CONTROL,
    INTERVAL_NOTE,
    SweepColumn,
    make_sweep_table,
    ratio_column,
    samples_column,
    step_column,
)


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

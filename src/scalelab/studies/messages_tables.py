"""The tables of the study of messages, and what they are computed from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scalelab.analysis.messages import count_wire_bytes, expect_messages, is_exact
from scalelab.observations import Message, RankReport
from scalelab.report.document import Caution, Column, Table, make_row
from scalelab.studies.arms import Arm
from scalelab.studies.sweep import CONTROL, SweepColumn, make_sweep_table, ratio_column, step_column
from scalelab.units import format_bytes

WIRE_NOTE = "on the wire: what a rank sends at the least, on average over ranks (Patarasu & Yuan 2009)"
GLOO_NOTE = "gloo carries a reduce-scatter out as an all-reduce of the whole: it sends twice what stands here"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One kind of message of a configuration: what was counted beside what there should be."""

    kind: str
    purpose: str
    phase: str
    count: int | None
    """None: theory has it, and it was not sent."""
    payload_bytes: int | None
    expected_bytes: int | None
    """None: theory says nothing about it."""
    wire_bytes: float | None


def read_report(arm: Arm) -> RankReport | None:
    """Rank 0's of the round that messages were counted in: all ranks take part in every collective."""
    return next((r.ranks[0] for r in arm.completed if r.ranks and r.ranks[0].message_basis is not None), None)


def list_lines(arm: Arm) -> list[Line]:
    """In the order in which they were first sent; what theory has besides comes last. Empty: nothing was counted."""
    report, trial = read_report(arm), arm.trial
    if report is None or report.message_basis is None:
        return []
    theory = expect_messages(trial.strategy, trial.num_ranks, report.message_basis, trial.spreading, trial.accumulation)
    expected = {_key(message): message.payload_bytes for message in theory}
    sent = {_key(message): message for message in report.messages}
    lines = []
    for key in sent | expected:
        payload = sent[key].payload_bytes if key in sent else 0
        lines.append(
            Line(
                kind=key[0],
                purpose=key[1],
                phase=key[2],
                count=sent[key].count if key in sent else None,
                payload_bytes=payload,
                expected_bytes=expected.get(key),
                wire_bytes=None if payload is None else count_wire_bytes(key[0], payload, trial.num_ranks),
            )
        )
    return lines


def _key(message: Message) -> tuple[str, str, str]:
    return message.kind, message.purpose, message.phase


def sum_payload(arm: Arm) -> int | None:
    return _add([line.payload_bytes for line in list_lines(arm)])


def sum_expected(arm: Arm) -> int | None:
    """Only where theory gives every byte."""
    if not is_exact(arm.trial.strategy, arm.trial.spreading, arm.trial.accumulation):
        return None
    return _add([line.expected_bytes or 0 for line in list_lines(arm)])


def sum_wire(arm: Arm) -> float | None:
    return _add([line.wire_bytes for line in list_lines(arm)])


def _add(values: Sequence[float | None]) -> int | None:
    known = [value for value in values if value is not None]
    return round(sum(known)) if known and len(known) == len(values) else None


def make_message_table(arms: Sequence[Arm], reference: Arm | None) -> Table:
    """Time, messages and bytes of one step, for every configuration."""
    columns = (
        step_column(),
        ratio_column(reference),
        SweepColumn(
            column=Column(key="num_messages", header="messages", quantity="count"),
            read=lambda arm: sum(line.count or 0 for line in list_lines(arm)) if list_lines(arm) else None,
        ),
        SweepColumn(column=Column(key="payload_bytes", header="payload", quantity="bytes"), read=sum_payload),
        SweepColumn(column=Column(key="expected_bytes", header="by theory", quantity="bytes"), read=sum_expected),
        SweepColumn(column=Column(key="wire_bytes", header="on the wire", quantity="bytes"), read=sum_wire),
    )
    return make_sweep_table(arms, columns, notes=_list_notes(arms))


def make_kind_table(arms: Sequence[Arm]) -> Table:
    """Every kind of message of every configuration, in bytes."""
    columns = (
        Column(key="run", header="run", align="left"),
        Column(key="kind", header="collective", align="left"),
        Column(key="purpose", header="of", align="left"),
        Column(key="phase", header="in", align="left"),
        Column(key="num_messages", header="messages", quantity="count"),
        Column(key="payload_bytes", header="payload, bytes", quantity="count"),
        Column(key="expected_bytes", header="by theory, bytes", quantity="count"),
        Column(key="wire_bytes", header="on the wire", quantity="bytes"),
    )
    rows = [
        make_row(
            arm.label,
            line.kind.replace("_", "-"),
            line.purpose or "unknown",
            line.phase,
            line.count or 0,
            line.payload_bytes,
            line.expected_bytes,
            line.wire_bytes,
        )
        for arm in arms
        if arm.configuration != CONTROL
        for line in list_lines(arm)
    ]
    return Table(columns=columns, rows=tuple(rows), notes=_list_notes(arms))


def _list_notes(arms: Sequence[Arm]) -> tuple[str, ...]:
    lines = [line for arm in arms if arm.trial.device == "cpu" for line in list_lines(arm)]
    is_scattering = any(line.kind == "reduce_scatter" for line in lines)
    return (WIRE_NOTE, GLOO_NOTE) if is_scattering else (WIRE_NOTE,)


def find_differences(arm: Arm) -> list[Line]:
    """Kinds of messages whose bytes are not those of theory, where theory is exact."""
    if not is_exact(arm.trial.strategy, arm.trial.spreading, arm.trial.accumulation):
        return []
    return [line for line in list_lines(arm) if line.payload_bytes != line.expected_bytes]


def warn_of_messages(arms: Sequence[Arm]) -> Iterator[Caution]:
    """Where a strategy sends something else than theory says."""
    for arm in arms:
        differing = find_differences(arm)
        if differing:
            named = ", ".join(
                f"{line.kind.replace('_', '-')} in {line.phase} {format_bytes(line.payload_bytes)} instead of"
                f" {format_bytes(line.expected_bytes or 0)}"
                for line in differing
            )
            yield Caution(
                message=f"{arm.label} sends something else than theory says: {named}",
                next_step="look for collectives in the model, the loss or a hook, and for frozen parameters",
            )

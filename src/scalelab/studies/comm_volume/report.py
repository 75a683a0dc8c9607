"""The tables of the study of messages, and what they are computed from.

The study of messages in words: how many bytes, are they those of theory, what batch norm adds.

The figures of `messages`: bytes beside theory, and by kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from scalelab.analysis.communication import count_wire_bytes, expect_messages, is_exact
from scalelab.analysis.stats import Verdict, estimate_ratio, judge
from scalelab.records.observations import Message, RankReport
from scalelab.report.charts.amounts import MOST_SERIES
from scalelab.report.charts.plot import Axis, Row, plot_bars
from scalelab.report.document import Chart, Column, Table, make_row
from scalelab.report.findings import Caution
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.sweep import (
    CONTROL,
    SweepColumn,
    draw_columns,
    keep_charts,
    list_keys,
    make_sweep_table,
    ratio_column,
    step_column,
)
from scalelab.units import format_bytes, format_interval, format_quantity, format_share

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


UNSENT = "ddp-unsent"
SYNCED = "ddp-synced"
NO_NORM = "ddp-no-norm"


def summarise_messages(arms: Mapping[str, Arm], ddp: str) -> tuple[str, ...]:
    """The findings, the main one first."""
    return tuple(_find_sentences(arms, ddp))


def _find_sentences(arms: Mapping[str, Arm], ddp: str) -> Iterator[str]:
    plain = arms.get(ddp)
    if plain is not None and list_lines(plain):
        yield from _describe_ddp(plain)
    yield from _check_theory(arms)
    if plain is not None and list_lines(plain):
        yield from _compare_sharded(arms, plain)
        yield from _describe_buffers(arms, plain)
        yield from _describe_synced(arms, plain)
        yield from _describe_no_norm(arms, plain)


def _describe_ddp(arm: Arm) -> Iterator[str]:
    report, gradients = read_report(arm), _find(arm, "gradients")
    if report is None or not gradients:
        return
    payload = sum(line.payload_bytes or 0 for line in gradients)
    count = sum(line.count or 0 for line in gradients)
    wire = sum(line.wire_bytes or 0 for line in gradients)
    each = payload / report.num_parameters if report.num_parameters else None
    size = "" if each is None else f", {each:g} for each of {_count(report.num_parameters)} parameters"
    yield (
        f"DDP all-reduces {_count(payload)} bytes of gradients a step{size}, in {count}"
        f" message{'s' if count != 1 else ''}; a ring sends {format_bytes(wire)} from every rank for it."
    )


def _check_theory(arms: Mapping[str, Arm]) -> Iterator[str]:
    known = [arm for name, arm in arms.items() if name != CONTROL and sum_expected(arm) is not None]
    exact = [arm for arm in known if not find_differences(arm)]
    if known and len(exact) == len(known):
        yield f"All messages of all {len(exact)} rows are those of theory, to the byte."
    elif known:
        differing = [arm for arm in known if find_differences(arm)]
        yield f"Not the bytes that theory gives: {_name(differing)}; the warnings say where."


def _compare_sharded(arms: Mapping[str, Arm], plain: Arm) -> Iterator[str]:
    base = sum_wire(plain)
    sharded = [arm for arm in arms.values() if arm.trial.strategy.startswith("fsdp")]
    found = [(arm.label, wire / base) for arm in sharded if base and (wire := sum_wire(arm)) is not None]
    if found:
        named = ", ".join(f"{label} {ratio:.2f}" for label, ratio in found)
        yield (
            f"On the wire, DDP's bytes times: {named}. Gathering parameters once costs half an all-reduce of as many"
            " bytes, and so does scattering gradients."
        )


def _describe_buffers(arms: Mapping[str, Arm], plain: Arm) -> Iterator[str]:
    buffers, total = _find(plain, "buffers"), sum_payload(plain)
    if not buffers or not total:
        return
    payload, count = sum(line.payload_bytes or 0 for line in buffers), sum(line.count or 0 for line in buffers)
    words = (
        f"Rank 0's buffers, {_count(payload)} bytes in {count} broadcast{'s' if count != 1 else ''}, are"
        f" {format_share(payload / total)} of what DDP sends"
    )
    unsent = arms.get(UNSENT)
    if unsent is None or not unsent.is_measured or not plain.is_measured:
        yield f"{words}."
    else:
        yield f"{words}; without sending them a step {_say_ratio(unsent, plain)}."


def _describe_synced(arms: Mapping[str, Arm], plain: Arm) -> Iterator[str]:
    synced = arms.get(SYNCED)
    statistics = _find(synced, "batch norm") if synced is not None else []
    if synced is None or not statistics:
        return
    payload, count = sum(line.payload_bytes or 0 for line in statistics), sum(line.count or 0 for line in statistics)
    ratio = f"; a step {_say_ratio(synced, plain)}" if synced.is_measured and plain.is_measured else ""
    yield (
        f"Synchronised batch norm adds {count} messages of together {_count(payload)} bytes: its price is how often"
        f" ranks wait for each other, not bytes{ratio}."
    )


def _describe_no_norm(arms: Mapping[str, Arm], plain: Arm) -> Iterator[str]:
    bare = arms.get(NO_NORM)
    if bare is None or not bare.is_measured or not plain.is_measured:
        return
    payload = sum_payload(bare)
    yield f"Without batch norm the network sends {_count(payload)} bytes; a step {_say_ratio(bare, plain)}."


def _say_ratio(arm: Arm, reference: Arm) -> str:
    """How long a step takes against ddp's, and whether that is a finding."""
    ratio = estimate_ratio(arm.clean, reference.clean)
    said = format_interval("ratio", ratio)
    return {
        Verdict.FASTER: f"takes {said} times as long as ddp's",
        Verdict.SLOWER: f"takes {said} times as long as ddp's",
        Verdict.NO_DIFFERENCE: f"takes as long as ddp's: {said}",
        Verdict.UNRESOLVED: f"cannot be told from ddp's: {said}",
    }[judge(ratio)]


def _count(number: int | None) -> str:
    return format_quantity("count", number)


def _find(arm: Arm, purpose: str) -> list[Line]:
    return [line for line in list_lines(arm) if line.purpose == purpose]


def _name(arms: list[Arm]) -> str:
    return "; ".join(arm.label for arm in arms)


def draw_payloads(table: Table, arms: Sequence[Arm]) -> tuple[Chart, ...]:
    """What was counted, what theory says, and what must go over the wire; and the step."""
    keys = list_keys(arms)
    columns = {"payload_bytes": "payload, counted", "expected_bytes": "payload by theory", "wire_bytes": "on the wire"}
    return keep_charts(
        draw_columns(
            table,
            columns,
            title="Bytes of one step",
            keys=keys,
            axis_title="bytes of one rank",
            caption="Counted in one step, so without intervals. A dash: theory does not give every byte.",
        ),
        draw_columns(table, ["step_seconds"], title="Step of every strategy", keys=keys),
    )


def draw_kinds(arms: Sequence[Arm]) -> tuple[Chart, ...]:
    """The payload of every configuration by collective and purpose."""
    rows: list[Row] = [
        {
            "name": arm.label,
            "payload_bytes": line.payload_bytes,
            "series": f"{line.kind.replace('_', '-')} of {line.purpose or 'unknown'}",
            "key": arm.label,
            "phase": line.phase,
            "count": line.count or 0,
        }
        for arm in arms
        if arm.configuration != CONTROL
        for line in list_lines(arm)
    ]
    names, kinds = ({str(row[field]) for row in rows} for field in ("name", "series"))
    if len(names) < 2 or len(kinds) > MOST_SERIES:
        return ()
    chart = plot_bars(
        title="Payload of one step by kind",
        x=Axis(field="payload_bytes", title="payload", quantity="bytes"),
        y=Axis(field="name", title="", quantity="text"),
        rows=rows,
        has_labels=True,
        extra={"phase": "in", "count": "messages"},
        caption="Pieces are in the order of the legend; the same kind in two phases of a step is two pieces.",
    )
    return (chart,)

"""What was sent beside what theory says: tables, charts, findings and warnings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import Verdict, judge
from scalelab.analysis.traffic import (
    MessageComparison,
    add_known,
    compare_messages,
    count_messages,
    expect_messages,
    is_exact,
    sum_payload,
    sum_wire,
)
from scalelab.records.strategies import DEFAULT
from scalelab.report.charts.amounts import MOST_SERIES
from scalelab.report.charts.column_charts import draw_columns, keep_charts
from scalelab.report.charts.plot import Axis, Row, plot_bars
from scalelab.report.document import Chart, Table
from scalelab.report.findings import DETAIL, MAIN, REASON, Caution, CautionKind, Finding, FindingKind
from scalelab.report.tables import Field, bytes_column, count_column, make_table, text_column
from scalelab.studies.shared.arms import Arm, name_sender, read_counted
from scalelab.studies.shared.sweep import (
    CONTROL,
    compare_steps,
    make_sweep_table,
    relative_column,
    step_column,
)
from scalelab.units import format_bytes, format_count, format_interval, format_quantity, format_share

UNSENT, SYNCED, NO_NORM = "ddp-unsent", "ddp-synced", "ddp-no-norm"
_count = partial(format_quantity, "count")
WIRE_NOTES = (
    "on the wire: the least that a rank sends, mean over ranks (Patarasuk & Yuan 2009)",
    "an all-gather or a reduce-scatter costs half an all-reduce of as many bytes",
)
GLOO_NOTE = "gloo runs a reduce-scatter as an all-reduce of the whole: it sends twice what is listed"

GRADIENTS = FindingKind(
    "gradient-volume",
    "What DDP all-reduces in a step",
    MAIN,
    ("payload_bytes", "bytes_per_parameter", "messages", "wire_bytes"),
)
SENT = FindingKind("script-volume", "What a script sends in a step", MAIN, ("payload_bytes", "messages"))
THEORY = FindingKind("theory", "Whether all bytes match theory", REASON, ("rows", "differing"))
WIRE_RATIO = FindingKind("wire-ratio", "Bytes on the wire over those of DDP", REASON, ("ratio",))
BUFFERS = FindingKind("buffers", "What broadcasting buffers adds to DDP", DETAIL, ("payload_bytes", "share", "ratio"))
SYNC_NORM = FindingKind("sync-batch-norm", "What synchronized batch norm adds", DETAIL, ("messages", "ratio"))
BARE = FindingKind("no-batch-norm", "What the network sends without batch norm", DETAIL, ("payload_bytes", "ratio"))
NOT_THEORY = CautionKind("not-theory", "The bytes that a strategy sends differ from theory", "wrong-work")


def list_lines(arm: Arm) -> list[MessageComparison]:
    """Every kind of message of a step, counted beside expected. Empty: nothing was counted."""
    report, trial = read_counted(arm), arm.trial
    if report is None or report.message_basis is None:
        return []
    theory = expect_messages(name_sender(arm), trial.num_ranks, report.message_basis, trial.spreading, arm.num_passes)
    return compare_messages(report.messages, theory, trial.num_ranks, trial.mesh.sizes)


def has_theory(arm: Arm) -> bool:
    basis = getattr(read_counted(arm), "message_basis", None)
    return basis is not None and basis.is_complete and is_exact(name_sender(arm), arm.trial.spreading, arm.num_passes)


def sum_expected(arm: Arm) -> int | None:
    return add_known([line.expected_bytes or 0 for line in list_lines(arm)]) if has_theory(arm) else None


def find_differences(arm: Arm) -> list[MessageComparison]:
    """Kinds of messages whose bytes are not those of theory, where theory is exact; a script may send its own."""
    lines = [line for line in list_lines(arm) if line.payload_bytes != line.expected_bytes] if has_theory(arm) else []
    return [line for line in lines if not is_own(arm, line)]


def is_own(arm: Arm, line: MessageComparison) -> bool:
    """Whether a script sent this beside what its strategy sends: a gradient norm, a loss to print."""
    return bool(arm.scripts) and line.expected_bytes is None


def make_message_table(arms: Sequence[Arm], reference: Arm | None) -> Table:
    """Time, messages and bytes of one step, for every configuration."""
    columns: list[Field[Arm]] = [
        count_column("num_messages", "messages", lambda arm: count_messages(list_lines(arm))),
        bytes_column("payload_bytes", "payload", lambda arm: sum_payload(list_lines(arm))),
        bytes_column("expected_bytes", "by theory", sum_expected),
        bytes_column("wire_bytes", "on the wire", lambda arm: sum_wire(list_lines(arm))),
    ]
    if arms and all(arm.trial.is_forecast for arm in arms):
        return make_table(arms, text_column("run", "run", lambda arm: arm.label), *columns, notes=_list_notes(arms))
    return make_sweep_table(arms, [step_column(), relative_column(reference), *columns], notes=_list_notes(arms))


def make_kind_table(arms: Sequence[Arm]) -> Table:
    """Every kind of message of every configuration, in bytes."""
    return make_table(
        [(arm, line) for arm in arms if arm.configuration != CONTROL for line in list_lines(arm)],
        text_column("run", "run", lambda row: row[0].label),
        text_column("kind", "collective", lambda row: row[1].name),
        text_column("purpose", "of", lambda row: row[1].told_purpose),
        text_column("phase", "in", lambda row: row[1].phase),
        count_column("num_messages", "messages", lambda row: row[1].count or 0),
        count_column("payload_bytes", "payload, bytes", lambda row: row[1].payload_bytes),
        count_column("expected_bytes", "by theory, bytes", lambda row: row[1].expected_bytes),
        bytes_column("wire_bytes", "on the wire", lambda row: row[1].wire_bytes),
        notes=_list_notes(arms),
    )


def _list_notes(arms: Sequence[Arm]) -> tuple[str, ...]:
    lines = [line for arm in arms if arm.trial.device == "cpu" for line in list_lines(arm)]
    return (*WIRE_NOTES, GLOO_NOTE) if any(line.kind == "reduce_scatter" for line in lines) else WIRE_NOTES


def warn_of_messages(arms: Sequence[Arm]) -> Iterator[Caution]:
    """Where a strategy sends something else than theory gives."""
    for arm in arms:
        named = ", ".join(
            f"{line.name} in {line.phase} {format_bytes(line.payload_bytes)} instead of"
            f" {format_bytes(line.expected_bytes or 0)}"
            for line in find_differences(arm)
        )
        if named:
            yield NOT_THEORY(
                arm.label,
                f"{arm.label} does not send the bytes of theory: {named}",
                "check the model, the loss and hooks for collectives, and for frozen parameters",
            )


def summarise_messages(arms: Mapping[str, Arm], ddp: str) -> Iterator[Finding]:
    """What DDP sends, whether theory agrees, and what FSDP and batch norm add."""
    plain = arms.get(ddp)
    lines = list_lines(plain) if plain is not None else []
    if plain is not None:
        if name_sender(plain) == DEFAULT:
            yield from _describe_gradients(plain)
        if plain.scripts and lines:
            yield _describe_script(plain, lines)
    yield from _check_theory(arms)
    if plain is not None and lines:
        base = sum_wire(lines)
        for arm in arms.values():
            wire = sum_wire(list_lines(arm)) if arm.trial.strategy != plain.trial.strategy else None
            if base and wire is not None:
                text = f"{arm.label} puts {wire / base:.2f} times the bytes of DDP on the wire."
                yield WIRE_RATIO(arm.label, text, ratio=wire / base)
        yield from _describe_norms(arms, plain)


def _describe_gradients(arm: Arm) -> Iterator[Finding]:
    report, gradients = read_counted(arm), _find(arm, "gradients")
    if report is None or not gradients:
        return
    payload, wire = sum_payload(gradients) or 0, sum(line.wire_bytes or 0 for line in gradients)
    count = count_messages(gradients) or 0
    each = payload / report.num_parameters if report.num_parameters else None
    size = "" if each is None else f" ({each:g} for each of {_count(report.num_parameters)} parameters)"
    yield GRADIENTS(
        arm.label,
        f"DDP all-reduces {_count(payload)} bytes of gradients per step{size} in {format_count(count, 'message')}; a"
        f" ring sends {format_bytes(wire)} from every rank.",
        payload_bytes=payload,
        bytes_per_parameter=each,
        messages=count,
        wire_bytes=wire,
    )


def _describe_script(arm: Arm, lines: Sequence[MessageComparison]) -> Finding:
    payload, count = sum_payload(lines), count_messages(lines)
    sent = ", ".join(f"{line.count} × {line.name} in {line.phase}" for line in lines)
    text = f"{arm.label} sends {_count(payload)} bytes per step in {format_count(count or 0, 'message')}: {sent}."
    return SENT(arm.label, text, payload_bytes=payload, messages=count)


def _check_theory(arms: Mapping[str, Arm]) -> Iterator[Finding]:
    known = [arm for name, arm in arms.items() if name != CONTROL and sum_expected(arm) is not None]
    differing = ", ".join(arm.label for arm in known if find_differences(arm))
    num_differing = sum(bool(find_differences(arm)) for arm in known)
    if known:
        own = sum(line.payload_bytes or 0 for arm in known for line in list_lines(arm) if is_own(arm, line))
        besides = f", besides {format_count(own, 'byte')} that the script sends itself" if own else ""
        text = f"The messages of {format_count(len(known), 'configuration')} match theory to the byte{besides}."
        if differing:
            text = f"Theory gives other bytes for {differing}; see the warnings."
        yield THEORY(differing, text, rows=len(known), differing=num_differing)


def _describe_norms(arms: Mapping[str, Arm], plain: Arm) -> Iterator[Finding]:
    """What buffers and synchronized statistics add, and what is left without batch norm."""
    unsent, synced, bare = (arms.get(name) for name in (UNSENT, SYNCED, NO_NORM))
    buffers, total = _find(plain, "buffers"), sum_payload(list_lines(plain))
    statistics = _find(synced, "batch norm")
    if buffers and total:
        payload, ratio = sum_payload(buffers) or 0, _compare(unsent, plain)
        text = (
            f"Rank 0's buffers, {_count(payload)} bytes in {format_count(count_messages(buffers) or 0, 'broadcast')},"
            f" are {format_share(payload / total)} of what DDP sends{_describe_ratio(ratio, '; without them a step')}."
        )
        yield BUFFERS(plain.label, text, payload_bytes=payload, share=payload / total, ratio=ratio)
    if synced is not None and statistics:
        count, ratio, added = count_messages(statistics) or 0, _compare(synced, plain), sum_payload(statistics)
        share = f", +{format_share(added / total)} of what DDP sends" if added and total else ""
        cost = _describe_ratio(ratio, "; a step")
        if ratio is not None and judge(ratio) is Verdict.UNRESOLVED:
            said = format_interval("ratio", ratio)
            cost = f"; whether it costs time is unresolved: a step takes {said} times as long as with ddp"
        text = (
            f"Synchronized batch norm adds {format_count(count, 'message')}, {_count(added)} bytes in all{share}{cost}."
        )
        yield SYNC_NORM(synced.label, text, messages=count, ratio=ratio)
    if bare is not None and (ratio := _compare(bare, plain)) is not None:
        sent = sum_payload(list_lines(bare))
        text = f"Without batch norm the network sends {_count(sent)} bytes{_describe_ratio(ratio, '; a step')}."
        yield BARE(bare.label, text, payload_bytes=sent, ratio=ratio)


def _compare(arm: Arm | None, plain: Arm) -> Estimate | None:
    """A step's time over that of ddp; None unless both were measured."""
    ratio = compare_steps(arm, plain) if arm is not None else None
    return ratio if isinstance(ratio, Estimate) else None


def _describe_ratio(ratio: Estimate | None, before: str) -> str:
    """How long a step takes against ddp's, and whether that is a finding; nothing where it is not known."""
    if ratio is None:
        return ""
    said = format_interval("ratio", ratio)
    words = {
        Verdict.NO_DIFFERENCE: f"takes as long as with ddp: {said}",
        Verdict.UNRESOLVED: f"cannot be distinguished from ddp's: {said}",
    }
    return f"{before} {words.get(judge(ratio), f'takes {said} times as long as with ddp')}"


def _find(arm: Arm | None, purpose: str) -> list[MessageComparison]:
    return [line for line in list_lines(arm) if line.purpose == purpose] if arm is not None else []


def draw_payloads(table: Table) -> tuple[Chart, ...]:
    """What was counted, what theory gives, and what goes over the wire; and the step."""
    columns = {"payload_bytes": "payload, counted", "expected_bytes": "payload by theory", "wire_bytes": "on the wire"}
    place = next((index for index, column in enumerate(table.columns) if column.key == "expected_bytes"), None)
    is_unknown = place is not None and any(row[place].value is None for row in table.rows)
    dash = " A dash: theory does not give every byte." if is_unknown else ""
    caption = f"Counted in one step, so without intervals.{dash}"
    is_timed = table.columns[1].key == "step_seconds"
    return keep_charts(
        draw_columns(table, columns, title="Bytes per step", axis_title="bytes of one rank", caption=caption),
        draw_columns(table, ["step_seconds"], title="Step time by strategy") if is_timed else None,
    )


def draw_kinds(table: Table) -> tuple[Chart, ...]:
    """The payload of every configuration by collective and purpose."""
    position = {column.key: index for index, column in enumerate(table.columns)}
    rows: list[Row] = []
    for cells in table.rows:
        run, kind, purpose, phase, count, payload = (
            cells[position[key]].value for key in ("run", "kind", "purpose", "phase", "num_messages", "payload_bytes")
        )
        what = {"payload_bytes": payload, "series": f"{kind} of {purpose}"}
        rows.append({"name": run, "key": run, "phase": phase, "count": count} | what)
    names, kinds = ({str(row[field]) for row in rows} for field in ("name", "series"))
    if len(names) < 2 or len(kinds) > MOST_SERIES:
        return ()
    x, y = Axis(field="payload_bytes", title="payload", quantity="bytes"), Axis(field="name", title="", quantity="text")
    caption, extra = "The same kind in two phases of a step is two pieces.", {"phase": "in", "count": "messages"}
    return (plot_bars(title="Payload per step by kind", x=x, y=y, rows=rows, extra=extra, caption=caption),)

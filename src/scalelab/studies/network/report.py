"""The answer of the network study: what a link costs, what profiles show of it, how fast it is, and what to doubt."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import ExposedCommunication
from scalelab.report.charts.column_charts import draw_columns, keep_charts, plot_rates
from scalelab.report.charts.plot import MOST_SERIES
from scalelab.report.document import Chart, Table
from scalelab.report.findings import DETAIL, MAIN, REASON, Caution, CautionKind, Finding, FindingKind, Known
from scalelab.report.tables import (
    INTERVAL_NOTE,
    bytes_column,
    make_column,
    make_table,
    seconds_column,
    share_column,
    text_column,
)
from scalelab.studies.collectives.report import INTERVALS, find_status, make_points
from scalelab.studies.network.answer import (
    BASE,
    LinkRow,
    NetworkAnswer,
    read_communication,
    read_latency,
    read_share,
    read_transfer,
    read_waiting,
)
from scalelab.studies.shared.arms import Arm, describe_failures, join_words
from scalelab.studies.shared.breakdown import WAITING
from scalelab.studies.shared.cautions import name_failure
from scalelab.studies.shared.sweep import (
    CONTROL,
    compare_steps,
    make_sweep_table,
    relative_column,
    samples_column,
    step_column,
)
from scalelab.units import format_bytes, format_quantity, is_known

TOLERANCE = 0.1
"""How far a link may be from its nominal rate before there is a warning."""
MUCH_WAITING = 0.2
"""Share of the time in collectives from which waiting is reported."""

COST = FindingKind(
    "link-cost", "Step time over a link against that inside one host", REASON, ("step_ratio", "exposed_share")
)
COMMUNICATION = FindingKind(
    "profiled-communication", "Communication in a profiled step over a link", DETAIL, ("share", "ratio")
)
BANDWIDTH = FindingKind(
    "bus-bandwidth",
    "Bus bandwidth of all-reduces alone over a link",
    DETAIL,
    ("bus_bandwidth", "nominal_share"),
    free=("nominal_share",),
)
NOT_NOMINAL = CautionKind("not-nominal", "A link is not as fast as its rate says", "wrong-work", ("nominal_share",))


def make_cost_table(answer: NetworkAnswer) -> Table:
    """Steps, and how much of them waits for the gradient all-reduce."""
    by_name = {row.link.name: row for row in answer.rows}

    def read_exposed(read: Callable[[ExposedCommunication], Known]) -> Callable[[Arm], Known]:
        def find(arm: Arm) -> Known:
            exposed = by_name[arm.configuration].exposed if arm.configuration in by_name else None
            return read(exposed) if exposed else None

        return find

    columns = [
        step_column(),
        samples_column(),
        relative_column(answer.inside, "× inside"),
        seconds_column("exposed_seconds", "exposed comm", read_exposed(lambda exposed: exposed.seconds)),
        share_column("exposed_share", "of the step", read_exposed(lambda exposed: exposed.share)),
    ]
    known = [answer.arms.get(BASE), answer.arms.get(CONTROL), *(row.arm for row in answer.rows)]
    notes = ("exposed comm: a step minus a step without the gradient all-reduce",)
    return make_sweep_table([arm for arm in known if arm], columns, name_header="link", notes=notes)


def make_profile_table(answer: NetworkAnswer) -> Table:
    """What ranks did in their collectives, in the profiled steps."""
    return make_table(
        answer.rows,
        text_column("link", "link", lambda row: row.link.name),
        seconds_column("communication_seconds", "communication", lambda row: row.estimate(read_communication)),
        share_column("communication_share", "of the profiled step", lambda row: row.estimate(read_share)),
        make_column("ratio", "communication_ratio", "comm × inside", answer.compare_communication),
        seconds_column("latency_seconds", "mean latency", lambda row: row.estimate(read_latency)),
        seconds_column("transfer_seconds", "transfer", lambda row: row.estimate(read_transfer)),
        seconds_column(
            "waiting_seconds", "waiting", lambda row: row.estimate(read_waiting), unit_of="transfer_seconds"
        ),
        notes=(
            INTERVAL_NOTE,
            "per step, mean over ranks; communication: time with a collective in flight, overlapped or not",
            "transfer: shortest time of any rank in each collective; waiting: time that ranks spent in it beyond that",
        ),
    )


def make_bandwidth_table(answer: NetworkAnswer) -> Table:
    """Bus bandwidth in training and of all-reduces alone, beside the nominal rate."""
    return make_table(
        answer.rows,
        text_column("link", "link", lambda row: row.link.name),
        bytes_column("payload_bytes", "payload", lambda row: row.payload_bytes),
        bytes_column("trained_bytes_per_second", "busbw/s, training", lambda row: row.trained_bandwidth),
        bytes_column(
            "bytes_per_second", "busbw/s, alone", lambda row: row.bandwidth, unit_of="nominal_bytes_per_second"
        ),
        bytes_column("nominal_bytes_per_second", "nominal/s", lambda row: row.link.bytes_per_second),
        share_column("nominal_share", "of nominal", lambda row: row.nominal_share),
        seconds_column("latency_seconds", "latency of 4 B", lambda row: row.latency),
        notes=(
            INTERVAL_NOTE,
            "payload: all collectives of a step; busbw: bytes per link and direction, as in nccl-tests",
            "of nominal: all-reduces alone, or training where they were not timed",
        ),
    )


def summarise_links(answer: NetworkAnswer) -> Iterator[Finding]:
    """What every link costs, whether it reaches its nominal rate, and how much of it is waiting."""
    ratios = {row.link.name: compare_steps(row.arm, answer.inside) for row in answer.rows if row.arm}
    known = {name: ratio for name, ratio in ratios.items() if isinstance(ratio, Estimate)}
    slowest = max(known, key=lambda name: known[name].value, default=None)
    for row in answer.rows:
        yield from _describe_cost(row, known.get(row.link.name), is_main=row.link.name == slowest)
    for row in answer.rows:
        yield from _describe_communication(answer, row)
        yield from _describe_bandwidth(row)
        yield from _describe_waiting(row)


def _describe_cost(row: LinkRow, ratio: Estimate | None, *, is_main: bool) -> Iterator[Finding]:
    if not row.is_measured or row.link.is_inside:
        return
    share = row.exposed.share if row.exposed else None
    words = []
    if ratio is not None:
        known = f"a step takes {format_quantity('ratio', ratio)} times as long as inside one host"
        words.append(known if is_known(ratio) else "step time against that inside one host is unknown")
    if share is not None:
        words.append(_describe_share("exposed communication", share, "the step"))
    if words:
        text = f"{row.link.name}: {'; '.join(words)}."
        yield COST(row.link.name, text, weight=MAIN if is_main else REASON, step_ratio=ratio, exposed_share=share)


def _describe_communication(answer: NetworkAnswer, row: LinkRow) -> Iterator[Finding]:
    share, times = row.estimate(read_share), answer.compare_communication(row)
    if share is None or row.link.is_inside:
        return
    is_compared = isinstance(times, Estimate) and is_known(times)
    more = f", {format_quantity('ratio', times)} times as long as inside" if is_compared else ""
    text = f"{row.link.name}: {_describe_share('communication', share, 'a profiled step')}{more}."
    yield COMMUNICATION(row.link.name, text, share=share, ratio=times)


def _describe_share(what: str, share: Estimate, whole: str) -> str:
    return f"{what} is {format_quantity('share', share)} of {whole}" if is_known(share) else f"{what} is unknown"


def _describe_bandwidth(row: LinkRow) -> Iterator[Finding]:
    found, share = row.bandwidth, row.nominal_share
    if found is None or row.series is None:
        return
    size = format_bytes(max(row.series.seconds))
    rate = f"reaches {format_quantity('bytes', found)}/s" if is_known(found) else "has unknown"
    text = f"{row.link.name}: an all-reduce of {size} alone {rate} bus bandwidth"
    if row.link.bytes_per_second is not None and share is not None and is_known(share):
        nominal = format_bytes(row.link.bytes_per_second)
        text += f", {format_quantity('share', share)} of the nominal {nominal}/s"
    yield BANDWIDTH(row.link.name, f"{text}.", bus_bandwidth=found, nominal_share=share)


def _describe_waiting(row: LinkRow) -> Iterator[Finding]:
    transfer, waiting = row.estimate(read_transfer), row.estimate(read_waiting)
    if transfer is None or waiting is None or transfer.value + waiting.value <= 0:
        return
    share = waiting.value / (transfer.value + waiting.value)
    if share >= MUCH_WAITING:
        yield WAITING(
            row.link.name,
            f"{row.link.name}: {format_quantity('share', share)} of the time in collectives is waiting for a later"
            " rank; a faster link would not help.",
            seconds=waiting,
            share=share,
        )


def warn_of_links(answer: NetworkAnswer) -> Iterator[Caution]:
    """A link that is not what it claims to be, or whose all-reduces failed."""
    for row in answer.rows:
        share, name = row.nominal_share, row.link.name
        if share is not None and row.bandwidth is not None and abs(share.value - 1) > TOLERANCE:
            how = "was not saturated" if share.value < 1 else "let more through than its rate"
            yield NOT_NOMINAL(
                name,
                f"{name} {how}: the largest all-reduce reached {format_quantity('share', share)} of the nominal rate,"
                " so this row does not represent that link",
                "measure again on an idle machine, or emulate a slower link: the CPU carries the traffic",
                nominal_share=share,
            )
        if row.series is not None:
            label = f"{name}, all-reduces alone"
            yield from name_failure(label, row.series.results, is_measured=row.series.is_measured)


def draw_costs(table: Table) -> tuple[Chart, ...]:
    """A step over every link, and what of it is exposed communication."""
    columns = {"step_seconds": "step", "exposed_seconds": "exposed communication"}
    return keep_charts(draw_columns(table, columns, title="Step time by link", axis_title="time"))


def plot_link_rates(answer: NetworkAnswer) -> tuple[Chart, ...]:
    """All-reduces alone over every link, beside the nominal rates."""
    measured = [row.series for row in answer.rows if row.series is not None and row.series.is_measured][:MOST_SERIES]
    rows = [point for series in measured for point in make_points(series)]
    if not rows:
        return ()
    sizes = [point["payload_bytes"] for point in rows]
    nominal = [(row.link.name, row.link.bytes_per_second) for row in answer.rows if row.link.bytes_per_second]
    guides = [
        {"series": f"{name}, nominal", "payload_bytes": size, "bandwidth": rate}
        for name, rate in nominal[: max(0, MOST_SERIES - len(measured))]
        for size in (min(sizes), max(sizes))
    ]
    lost = [
        (row.link.name, "not run" if row.series is None else find_status(row.series))
        for row in answer.rows
        if row.series is None or not row.series.is_measured
    ]
    said = join_words(INTERVALS, *describe_failures(lost))
    return (plot_rates(title="Bus bandwidth of all-reduces alone", rows=rows, guides=guides, caption=said),)

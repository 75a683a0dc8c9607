"""A run as text that other tools read: OpenMetrics, a timeline for Perfetto, nccl-tests and OSU tables, CSV files.

    OpenMetrics   every number of the report's tables as a gauge, for Prometheus (node_exporter's textfile collector)
    Perfetto      Chrome's trace format: trials as spans, a lane per configuration; below them the steps of every rank
    nccl-tests    the columns of all_reduce_perf: size, count, type, redop, root, time, algbw, busbw
    OSU           the columns of osu_allreduce -f: size, average, least and largest latency, iterations
    CSV           a file per table and one of all samples, each beside its `-metadata.json` (W3C CSV on the Web) with
                  type and unit of every column

Nothing is rounded but for nccl-tests and OSU, whose columns have fixed decimals. In-place columns of nccl-tests are
"N/A": scalelab times out-of-place calls only, and does not check results.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scalelab.analysis.link import TransferSeries, group_transfers
from scalelab.analysis.traffic import bus_factor
from scalelab.checks import clean_text, defuse_formula
from scalelab.errors import UsageError
from scalelab.export.points import find_first_start, make_name, read_start
from scalelab.records.files import storage_errors, write_atomically
from scalelab.records.trial import Status, TrialResult
from scalelab.report.document import Document
from scalelab.report.renderers.csv_table import name_tables
from scalelab.report.results import DataTable, Run, make_frame

FLOAT_BYTES = 4
METRIC_UNITS = ("seconds", "bytes")
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
COLOURS = {Status.COMPLETED: "good", Status.NOT_RUN: "grey"}
"""Of Chrome's palette; any other status is "terrible"."""


def render_openmetrics(document: Document, labels: Mapping[str, str]) -> str:
    """Every number of the tables; ends of intervals are gauges of their own."""
    families: dict[str, list[str]] = {}
    seen: set[str] = set()
    for name, table in zip(name_tables(document), document.tables, strict=True):
        for row in table.rows:
            for column, cell in zip(table.columns[1:], row[1:], strict=True):
                if cell.estimate is None:
                    continue
                own = {**labels, "table": name, "row": str(row[0].value)}
                for end, value in (("", cell.estimate.value), ("_low", cell.low), ("_high", cell.high)):
                    metric = re.sub(r"\W", "_", f"scalelab_{column.key}{end}")
                    line = f"{metric}{{{_set_labels(own)}}}"
                    if value is not None and math.isfinite(value) and line not in seen:
                        seen.add(line)
                        families.setdefault(metric, []).append(f"{line} {float(value)!r}")
    lines = [line for metric, samples in families.items() for line in (*_describe_family(metric), *samples)]
    return "\n".join([*lines, "# EOF"]) + "\n"


def _describe_family(metric: str) -> Iterator[str]:
    yield f"# TYPE {metric} gauge"
    unit = metric.rpartition("_")[2]
    if unit in METRIC_UNITS:
        yield f"# UNIT {metric} {unit}"


def _set_labels(labels: Mapping[str, str]) -> str:
    escaped = {key: clean_text(text).replace("\\", r"\\").replace('"', r"\"") for key, text in labels.items()}
    return ",".join(f'{key}="{text}"' for key, text in escaped.items())


def render_timeline(name: str, results: Sequence[TrialResult]) -> str:
    """Chrome's trace format; times are microseconds since the first trial started."""
    begun = find_first_start(results)
    lanes = {one: number for number, one in enumerate(dict.fromkeys(r.trial.configuration for r in results))}
    events: list[dict[str, Any]] = [_name("process_name", 0, 0, name)]
    events += [_name("thread_name", 0, lane, one) for one, lane in lanes.items()]
    for number, result in enumerate(results, start=1):
        trial, start = result.trial, 1e6 * (read_start(result) - begun) if read_start(result) else 0.0
        told = {"status": result.status.words, "reason": result.reason, "ranks": trial.num_ranks, "round": trial.round}
        events.append(
            {"name": trial.name, "cat": "trial", "ph": "X", "pid": 0, "tid": lanes[trial.configuration], "ts": start}
            | {"dur": 1e6 * result.wall_seconds, "cname": COLOURS.get(result.status, "terrible"), "args": told}
        )
        events += _list_steps(result, number, start)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, ensure_ascii=False, separators=(",", ":"))


def _list_steps(result: TrialResult, number: int, start: float) -> Iterator[dict[str, Any]]:
    """The steps of every rank, in a process of their own; ranks start with their first step."""
    if not result.samples:
        return
    yield _name("process_name", number, 0, result.trial.name)
    first: dict[int, float] = {}
    for sample in result.samples:
        first[sample.rank] = min(first.get(sample.rank, math.inf), sample.start_seconds)
    for rank in sorted(first):
        yield _name("thread_name", number, rank, f"rank {rank}")
    before = start + 1e6 * (result.first_step_seconds or 0.0)
    for sample in result.samples:
        yield (
            {"name": sample.kind.value, "cat": "step", "ph": "X", "pid": number, "tid": sample.rank}
            | {"ts": before + 1e6 * (sample.start_seconds - first[sample.rank]), "dur": 1e6 * sample.step_seconds}
            | {"args": {"step": sample.step} | ({} if sample.loss is None else {"loss": sample.loss})}
        )


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def list_exchanges(results: Sequence[TrialResult]) -> list[TransferSeries]:
    """The timed collectives of a run; raises `UsageError` if it has none."""
    found = [series for series in group_transfers(results).values() if series.is_measured]
    if not found:
        raise UsageError("this run timed no collectives: use a run of scalelab collectives")
    return found


def render_nccl_tests(results: Sequence[TrialResult]) -> str:
    """A block per collective, as nccl-tests prints it; times are medians."""
    return "\n".join("\n".join(_list_nccl_lines(series)) for series in list_exchanges(results)) + "\n"


def _list_nccl_lines(series: TransferSeries) -> Iterator[str]:
    num_ranks, sizes = series.trial.num_ranks, list(series.seconds)
    redop = "sum" if series.operation in REDUCING else "none"
    yield f"# {series.operation}_perf · {series.backend} · {num_ranks} ranks · {len(series.results)} launches"
    yield f"# minBytes {sizes[0]} maxBytes {sizes[-1]} warmup iters: {series.exchange.warmup_calls} validation: 0"
    yield "#"
    yield f"#{'out-of-place':>70}{'in-place':>34}"
    yield (
        f"#{'size':>11}{'count':>14}{'type':>10}{'redop':>8}{'root':>8}"
        f"{'time':>9}{'algbw':>8}{'busbw':>8}{'#wrong':>7}{'time':>9}{'algbw':>8}{'busbw':>8}{'#wrong':>7}"
    )
    units = f"{'(us)':>9}{'(GB/s)':>8}{'(GB/s)':>8}{'':>7}"
    yield f"#{'(B)':>11}{'(elements)':>14}{'':>26}{units}{units}"
    factor = bus_factor(series.operation, num_ranks) or 1.0
    reached = []
    for size, rounds in series.seconds.items():
        seconds = statistics.median(time for times in rounds for time in times)
        rate = size / seconds / 1e9
        reached.append(rate * factor)
        measured = f"{1e6 * seconds:>9.2f}{rate:>8.2f}{rate * factor:>8.2f}{'N/A':>7}"
        kept = f"{size:>12}{size // FLOAT_BYTES:>14}{'float':>10}{redop:>8}{-1:>8}{measured}"
        yield f"{kept}{'N/A':>9}{'N/A':>8}{'N/A':>8}{'N/A':>7}"
    yield f"# Avg bus bandwidth    : {statistics.fmean(reached):g}"
    yield "#"


def render_osu(results: Sequence[TrialResult]) -> str:
    """A block per collective, as OSU's benchmarks print it with -f; the slowest rank of each call counts."""
    return "\n".join("\n".join(_list_osu_lines(series)) for series in list_exchanges(results)) + "\n"


def _list_osu_lines(series: TransferSeries) -> Iterator[str]:
    title = "".join(part.capitalize() for part in series.operation.split("_"))
    yield f"# OSU-shaped {title} Latency Test · {series.backend} · {series.trial.num_ranks} ranks"
    yield f"{'# Size':<12}{'Avg Latency(us)':>18}{'Min Latency(us)':>18}{'Max Latency(us)':>18}{'Iterations':>14}"
    for size, rounds in series.seconds.items():
        times = [1e6 * time for found in rounds for time in found]
        latencies = f"{statistics.fmean(times):>18.2f}{min(times):>18.2f}{max(times):>18.2f}"
        yield f"{size:<12}{latencies}{len(times) * series.num_calls.get(size, 1):>14}"
    yield ""


def write_csv_files(directory: Path, run: Run) -> list[Path]:
    """Every table and all samples as CSV, each beside its metadata; returns the CSV files."""
    frames = [make_frame(table, name) for name, table in zip(run.tables, run.document.tables, strict=True)]
    frames += [found for kind in ("samples", "transfers", "fetches") if len(found := run.read_raw(kind))]
    written: dict[Path, DataTable] = {}
    for frame in frames:
        stem = make_name(frame.title).replace(" ", "-").lower()
        place = directory / f"{stem}.csv"
        written[place if place not in written else directory / f"{stem}-{len(written)}.csv"] = frame
    with storage_errors(directory, "--csv-files"):
        directory.mkdir(parents=True, exist_ok=True)
        for file, frame in written.items():
            write_atomically(file, _render_csv(frame))
            write_atomically(file.with_name(f"{file.name}-metadata.json"), describe_csv(file.name, frame))
    return list(written)


def _render_csv(frame: DataTable) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(frame.columns)
    rows = zip(*frame.columns.values(), strict=True)
    writer.writerows([defuse_formula(one) if isinstance(one, str) else one for one in row] for row in rows)
    return text.getvalue()


def describe_csv(file: str, frame: DataTable) -> str:
    """Metadata as CSV on the Web defines it; units are words of schema.org."""
    columns = [
        {"name": name, "datatype": find_datatype(values)}
        | ({"schema:unitText": frame.units[name]} if name in frame.units else {})
        for name, values in frame.columns.items()
    ]
    context = ["http://www.w3.org/ns/csvw", {"schema": "https://schema.org/"}]
    data = {"@context": context, "url": file, "dc:title": frame.title, "tableSchema": {"columns": columns}}
    return json.dumps(data, ensure_ascii=False, indent=2) + "\n"


def find_datatype(values: Iterable[object]) -> str:
    kinds = {type(value) for value in values if value is not None}
    if kinds == {bool}:
        return "boolean"
    if kinds == {int}:
        return "integer"
    return "double" if kinds and kinds <= {int, float} else "string"

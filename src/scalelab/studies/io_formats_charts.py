"""The figures of `io-formats`: an epoch and a file by format, a batch by order and access, workers, and trainings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.fetches import FetchSeries
from scalelab.report.charts.amounts import plot_amounts
from scalelab.report.charts.plot import Axis, Row, plot_lines
from scalelab.report.document import Chart, Table, Value
from scalelab.settings import MEMORY, Pass
from scalelab.studies.arms import Arm
from scalelab.studies.io_formats_tables import ORDER_WORDS, PASSES, find_alike, say_status
from scalelab.studies.sweep_charts import INTERVALS, draw_columns, keep_charts, list_keys

MODES = {"lazy": "lazily", "eager": "eagerly", "naive": "naively"}
MOST_WORKER_SERIES = 8


def draw_costs(every: Sequence[FetchSeries]) -> tuple[Chart, ...]:
    """An epoch by format and way to read, and what lies on the disk."""
    return keep_charts(
        plot_amounts(
            title="An epoch by format",
            x=Axis(field="seconds", title="epoch", quantity="seconds"),
            rows=_list_rows(every, lambda series: series.main.epoch_seconds if series.main else None),
            caption=f"{INTERVALS} Shuffled, with the file in the kernel's memory, by whole batches; naively, by"
            f" samples.{_list_failures(every)}",
        ),
        _draw_files(every),
    )


def _draw_files(every: Sequence[FetchSeries]) -> Chart | None:
    sizes: dict[str, Row] = {}
    for series in every:
        name = _name_set(series)
        if series.file_bytes and name not in sizes:
            sizes[name] = {"name": name, "file_bytes": series.file_bytes, "series": "", "key": name}
    return plot_amounts(
        title="Size on disk",
        x=Axis(field="file_bytes", title="on disk", quantity="bytes"),
        rows=list(sizes.values()),
        caption="The same samples in every format; exact, so without intervals. What is held in memory has no file.",
    )


def draw_batches(every: Sequence[FetchSeries]) -> tuple[Chart, ...]:
    """The median batch, by order and access, of what is read lazily."""
    lazy = [series for series in every if series.reading.mode == "lazy" and series.passes]
    rows: list[Row] = []
    for series in lazy:
        for order, access in PASSES:
            times = series.passes.get(Pass(order=order, access=access, cache="warm").name)  # type: ignore[arg-type]
            if times is not None:
                rows.append(
                    {
                        "name": _name_set(series),
                        "series": f"{ORDER_WORDS[order]}, by {access}",
                        "seconds": times.fetch_seconds,
                        "key": _name_set(series),
                    }
                )
    chart = plot_amounts(
        title="A batch by order and access",
        x=Axis(field="seconds", title="fetch", quantity="seconds"),
        rows=rows,
        caption=f"{INTERVALS} The median batch, read lazily, with the file in the kernel's memory.",
    )
    return keep_charts(chart)


def draw_workers(every: Sequence[FetchSeries]) -> tuple[Chart, ...]:
    """Samples per second against the number of workers."""
    rows: list[Row] = []
    for series in every:
        if series.main is not None and any(one.reading.workers for one in find_alike(every, series)):
            total = series.num_samples
            rows.append(
                {
                    "workers": series.reading.workers,
                    "rate": series.main.epoch_seconds.map(lambda seconds, total=total: total / seconds),  # type: ignore[misc]
                    "series": series.label.partition(",")[0],
                    "key": series.label.partition(",")[0],
                }
            )
    names = list(dict.fromkeys(str(row["series"]) for row in rows))
    kept = names[:MOST_WORKER_SERIES]
    left_out = f" In the table only: {', '.join(names[MOST_WORKER_SERIES:])}." if len(names) > len(kept) else ""
    if len(rows) < 2:
        return ()
    chart = plot_lines(
        title="Samples per second by workers",
        x=Axis(field="workers", title="workers", quantity="number"),
        y=Axis(field="rate", title="samples/s", quantity="rate"),
        rows=[row for row in rows if row["series"] in kept],
        caption=f"Vertical lines are 95 % confidence intervals.{left_out}",
    )
    return (chart,)


def draw_trainings(table: Table, arms: Mapping[str, Arm]) -> tuple[Chart, ...]:
    """The step of every training, and the part of it that waits."""
    keys = list_keys(arms.values())
    columns = {"step_seconds": "whole step", "input_seconds": "waiting for the batch"}
    return keep_charts(
        draw_columns(table, columns, title="A training step by format", keys=keys, axis_title="time"),
        draw_columns(
            table,
            ["step_ratio"],
            title="Step over that from memory",
            keys=keys,
            reference=1.0,
            from_zero=False,
            caption=f"{INTERVALS} Right of the dashed line reading costs time.",
        ),
    )


def _list_rows(every: Sequence[FetchSeries], read: Callable[[FetchSeries], Estimate | None]) -> list[Row]:
    rows: list[Row] = []
    for series in every:
        value: Value | Estimate = read(series)
        rows.append(
            {
                "name": _name_set(series),
                "series": "in memory" if series.reading.format == MEMORY else MODES[series.reading.mode],
                "seconds": value,
                "status": say_status(series) if value is None else "",
                "reason": series.failure.reason if series.failure and value is None else "",
                "key": _name_set(series),
            }
        )
    return rows


def _name_set(series: FetchSeries) -> str:
    """The format, and the number of ranks where that is varied: the label without the way to read."""
    words = series.label.split(" ")
    return " ".join(word for word in words if word not in MODES) or series.label


def _list_failures(every: Sequence[FetchSeries]) -> str:
    failed = [f"{series.label} ({say_status(series)})" for series in every if series.main is None]
    return f" Without a number: {', '.join(failed)}." if failed else ""

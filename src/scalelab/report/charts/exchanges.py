"""Communication alone: time and bandwidth of a message against its size, on logarithmic axes, with the fitted line."""

from __future__ import annotations

from scalelab.report.charts.axes import Axis, Rows
from scalelab.report.charts.plot import plot_lines
from scalelab.report.document import Chart

SIZE = Axis(field="payload_bytes", title="message size", quantity="bytes", is_log=True)


def plot_times(*, title: str, rows: Rows, fits: Rows, caption: str = "", raw: Rows = (), failed: Rows = ()) -> Chart:
    """`seconds` of one call by `payload_bytes`."""
    y = Axis(field="seconds", title="time of a call", quantity="seconds", is_log=True)
    return plot_lines(title=title, x=SIZE, y=y, rows=rows, raw=raw, guides=fits, failed=failed, caption=caption)


def plot_rates(*, title: str, rows: Rows, caption: str = "", guides: Rows = ()) -> Chart:
    """`bandwidth` in bytes per second by `payload_bytes`."""
    y = Axis(field="bandwidth", title="bus bandwidth", quantity="bandwidth", is_log=True)
    return plot_lines(title=title, x=SIZE, y=y, rows=rows, guides=guides, caption=caption)

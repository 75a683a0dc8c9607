"""A document in a notebook: the one-screen answer as HTML, with its first charts as pictures.

No scripts: a notebook shows them on GitHub, in an e-mail and in a PDF as it does in Jupyter. Texts may come from
someone else and are escaped. Colours come from the notebook, so dark themes work.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from importlib.util import find_spec

from scalelab.report.document import Chart, Document, Table
from scalelab.report.renderers.html import set_text, set_words
from scalelab.report.renderers.pictures import draw_svg, list_charts
from scalelab.report.tables import TextColumn, format_columns, list_notes, shorten

MOST_CHARTS = 2
"""The report has the others."""
MOST_ROWS = 30
CELL = "padding:2px 10px;text-align:{align};white-space:nowrap"
QUIET = "opacity:.7;font-size:90%"
CHART_WIDTH = 420


def render_notebook(document: Document, *, source: str = "") -> str:
    """The answer as a fragment of HTML; `source` says where the run is."""
    brief = shorten(document)
    parts = [f"<p><strong>{set_text(document.headline)}</strong><br>", f"{set_text(document.setting)}</p>"]
    parts += [f"<p>⚠ {set_words(one.message)} → {set_words(one.next_step)}</p>" for one in brief.failures]
    if brief.table is not None:
        parts.append(set_plain_table(brief.table))
    parts.append(f"<ul>{''.join(f'<li>{set_words(finding.text)}</li>' for finding in brief.findings)}</ul>")
    parts += draw_first(document)
    warnings = (f"⚠ {set_words(one.message)} → {set_words(one.next_step)}" for one in brief.warnings)
    parts += [f'<p style="{QUIET}">{warning}</p>' for warning in warnings]
    left_out = f'not shown: {brief.left_out}; .report("report.html") has everything' if brief.left_out else ""
    rest = " · ".join(words for words in (source, left_out) if words)
    parts += [f'<p style="{QUIET}">{set_text(rest)}</p>'] if rest else []
    return f'<div class="scalelab">{"".join(parts)}</div>'


def set_plain_table(table: Table) -> str:
    """A table with its own alignment, without a style sheet."""
    columns = format_columns(table)
    styles = [CELL.format(align=column.align) for column in columns]
    head = "".join(
        f'<th style="{style}">{set_text(column.header)}</th>' for style, column in zip(styles, columns, strict=True)
    )
    rows = "".join(
        f"<tr>{''.join(_set_cells(number, columns, styles))}</tr>" for number in range(min(len(table.rows), MOST_ROWS))
    )
    left_out = len(table.rows) - MOST_ROWS
    notes = [*list_notes(table), *([f"{left_out} more rows: .table().to_pandas()"] if left_out > 0 else [])]
    words = f'<p style="{QUIET}">{"<br>".join(map(set_text, notes))}</p>' if notes else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{words}"


def _set_cells(number: int, columns: tuple[TextColumn, ...], styles: list[str]) -> Iterator[str]:
    for style, column in zip(styles, columns, strict=True):
        yield f'<td style="{style}">{set_words(column.cells[number] + column.marks[number])}</td>'


def draw_first(document: Document) -> Iterator[str]:
    """The first charts as pictures; nothing without vl-convert, which draws them."""
    if find_spec("vl_convert") is None:
        return
    for chart in list_charts(document)[:MOST_CHARTS]:
        yield draw_image(chart)


def draw_image(chart: Chart) -> str:
    """A chart as an image that carries its own data: SVG inside a page would inherit the page's style."""
    encoded = base64.b64encode(draw_svg(chart, width=CHART_WIDTH).encode()).decode()
    return f'<img alt="{set_text(chart.title)}" style="background:#fff" src="data:image/svg+xml;base64,{encoded}">'

"""Text, tables and figures of a page. Whatever a document says goes in as text, never as markup."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from html import escape

from scalelab.report.cells import TextColumn, format_columns, list_notes
from scalelab.report.document import Chart, Section, Table
from scalelab.report.text import clean_text
from scalelab.report.theme import COMPOSED, LEGEND_SIGN, LETTER, list_names
from scalelab.units import PLUS_MINUS

LONG_PROSE = 40
"""Cells with more letters than this get more room before they are broken into lines."""
MOST_VECTORS = 4000
"""A figure of more data than this is drawn as pixels, which browsers handle faster than as many elements."""

ZOOM_HINT = "Zoom with Ctrl or Shift and the wheel, drag to move, double-click for all of it."
"""Only a page can be zoomed: paper is not told of it."""


def set_text(text: str) -> str:
    """A text as it is, on one line, whatever is in it."""
    return escape(clean_text(text), quote=True)


def set_words(text: str) -> str:
    """A sentence in which a number is not torn from its interval or its sign by the end of a line."""
    return re.sub("(?<=±) | (?=[±%])", "\u00a0", set_text(text))


def set_table(table: Table, label: str) -> str:
    """A table in a box of its own, which scrolls sideways where a screen is narrow."""
    columns = format_columns(table)
    titled = f"<caption>{set_text(table.title)}</caption>" if table.title else ""
    head = "".join(f'<th scope="col"{_name_classes(column)}>{set_text(column.header)}</th>' for column in columns)
    rows = "\n".join(
        f"<tr>{''.join(_set_cell(column, row, is_name=not number) for number, column in enumerate(columns))}</tr>"
        for row in range(len(table.rows))
    )
    notes = "".join(f"<p>{set_text(note)}</p>" for note in list_notes(table))
    return (
        f'<div class="table"><div class="scroll" tabindex="0" role="region" aria-label="{set_text(label)}">'
        f"<table>{titled}<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>"
        f'{f"""<div class="notes">{notes}</div>""" if notes else ""}</div>\n'
    )


def _name_classes(column: TextColumn, text: str = "") -> str:
    names = ["left"] if column.align == "left" else []
    if column.is_prose:
        names += ["prose", "long"] if len(text) > LONG_PROSE else ["prose"]
    return f' class="{" ".join(names)}"' if names else ""


def _set_cell(column: TextColumn, row: int, *, is_name: bool) -> str:
    text = re.sub(" +", " ", column.cells[row].strip())
    number, sign, interval = text.partition(PLUS_MINUS)
    inner = set_text(text)
    if sign and not column.is_prose:
        inner = f'{escape(number)}<span class="pm">{escape(sign + interval)}</span>'
    mark = f"<sup>{set_text(column.marks[row])}</sup>" if column.marks[row] else ""
    tag, scope = ("th", ' scope="row"') if is_name else ("td", "")
    return f"<{tag}{scope}{_name_classes(column, text)}>{inner}{mark}</{tag}>"


def set_charts(section: Section, number: int) -> str:
    """The figures of a section, two beside each other where there is room."""
    if not section.charts:
        return ""
    last = len(section.charts) - 1
    figures = "".join(
        set_figure(chart, f"{number}-{index}", is_wide=is_wide(chart) or (index == last and last % 2 == 0))
        for index, chart in enumerate(section.charts)
    )
    many = " many" if len(section.charts) > 1 else ""
    return f'<div class="charts{many}">{figures}</div>\n'


def set_figure(chart: Chart, place: str, *, is_wide: bool) -> str:
    """The frame of a figure; the program of the page draws into it."""
    title, caption = set_text(chart.title), set_text(chart.caption)
    label = ": ".join(part for part in (title, caption) if part) or "chart"
    longest = max((len(name) for name in list_names(chart.spec)), default=0)
    large = ' data-large="true"' if count_values(chart.spec) > MOST_VECTORS else ""
    wide = ' class="wide"' if is_wide else ""
    heading = f"<h3>{title}</h3>" if title else ""
    words = f"<p>{caption}</p>" if caption else ""
    words += f'<p class="hint">{ZOOM_HINT}</p>' if is_zoomable(chart) else ""
    actions = "".join(f'<button type="button" data-format="{one}">{one.upper()}</button>' for one in ("svg", "png"))
    return (
        f'<figure{wide}>{heading}<div class="plot" role="img" aria-label="{label}" data-chart="{place}"'
        f' data-entry="{longest * LETTER + LEGEND_SIGN:.1f}" data-name="{name_file(chart.title)}"{large}></div>'
        f'<figcaption>{words}<div class="actions">{actions}</div></figcaption></figure>\n'
    )


def is_wide(chart: Chart) -> bool:
    """Whether a figure needs all of the page: several views, or one that is gone through in detail."""
    return any(name in chart.spec for name in COMPOSED) or is_zoomable(chart)


def is_zoomable(chart: Chart) -> bool:
    return "interval" in _list_params(chart.spec)


def _list_params(part: object) -> Iterator[str]:
    """The kinds of selections in a figure."""
    if isinstance(part, Mapping):
        select = part.get("select")
        kind = select.get("type") if isinstance(select, Mapping) else select
        if isinstance(kind, str):
            yield kind
        for name, value in part.items():
            if name not in ("data", "datasets"):
                yield from _list_params(value)
    elif isinstance(part, list | tuple):
        for value in part:
            yield from _list_params(value)


def count_values(part: object) -> int:
    """How many rows of data a figure has."""
    if isinstance(part, Mapping):
        rows = part.get("values")
        own = len(rows) if isinstance(rows, list | tuple) else 0
        return own + sum(count_values(value) for name, value in part.items() if name != "values")
    return sum(map(count_values, part)) if isinstance(part, list | tuple) else 0


def name_file(title: str) -> str:
    """A name for the picture of a figure."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower())[:60].strip("-") or "chart"

"""A document in a terminal, as wide as that is; without colours it is the same words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from scalelab.report.cells import format_columns, list_notes
from scalelab.report.document import Document, Section, Table
from scalelab.report.layout import arrange_columns, measure_column, set_header, set_rows
from scalelab.report.text import clean_text, pad_text, wrap_text

INDENT = "  "


class Line(NamedTuple):
    """One line of output and its style."""

    text: str = ""
    style: str = ""


def render_terminal(document: Document, console: Console) -> None:
    """Print a document: title, sections, summary, warnings."""
    for line in _set_document(document, console.width):
        style = "" if console.no_color else line.style
        console.print(Text(line.text.rstrip(" "), style), soft_wrap=True, highlight=False)


def _set_document(document: Document, width: int) -> Iterator[Line]:
    yield from _set_text(document.headline, width, style="bold")
    yield from _set_text(document.setting, width, INDENT)
    for section in document.sections:
        if section.paragraphs or section.tables or not section.charts:  # of figures alone there is nothing to print
            yield from _set_section(section, width)
    if document.summary:
        yield from (Line(), Line("Summary", "bold"))
    for finding in document.summary:
        yield from _set_text(finding, width, INDENT)
    if document.cautions:
        yield from (Line(), Line("Warnings", "bold yellow"))
    for caution in document.cautions:
        yield from _set_text(caution.message, width, INDENT)
        for number, line in enumerate(_set_text(caution.next_step, width, 3 * INDENT, "dim")):
            yield line if number else Line(2 * INDENT + "→ " + line.text.lstrip(" "), line.style)


def _set_section(section: Section, width: int) -> Iterator[Line]:
    if section.heading or section.paragraphs:
        yield Line()
    yield from _set_text(section.heading, width, style="bold")
    for paragraph in section.paragraphs:
        yield from _set_text(paragraph, width, INDENT)
    for table in section.tables:
        yield from _set_table(table, width)


def _set_text(text: str, width: int, indent: str = "", style: str = "") -> Iterator[Line]:
    cleaned = clean_text(text)
    if cleaned:
        yield from (Line(indent + line, style) for line in wrap_text(cleaned, width - len(indent)))


def _set_table(table: Table, width: int) -> Iterator[Line]:
    columns = format_columns(table)
    parts = arrange_columns([measure_column(column) for column in columns], max(1, width - len(INDENT)))
    if table.title:
        yield Line()
        yield from _set_text(table.title, width, INDENT)
    for part in parts:
        chosen = [columns[index] for index in part.columns]
        yield Line()
        yield from (Line(INDENT + line, "bold") for line in set_header(chosen, part))
        yield Line(INDENT[1:] + "─" * (part.width + 1), "dim")
        yield from (Line(INDENT + line) for line in set_rows(chosen, part))
    for note in list_notes(table):
        for line in wrap_text(note, width - len(INDENT)):
            yield Line(INDENT + pad_text(line, parts[-1].width, "right"), "dim")

"""A document as GitHub-flavoured Markdown.

Failures and the summary come first, warnings after the results. What the document says is text, not markup:
everything in it that Markdown or HTML would interpret is escaped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from urllib.parse import quote

from scalelab.checks import clean_text
from scalelab.report.document import Align, Chart, Document, Section, Table
from scalelab.report.findings import Caution
from scalelab.report.tables import format_columns, list_notes, measure_text, pad_text

_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_SPECIAL = re.compile(r"[\\`*_#|~$&<>]|\[(?=\^)|\](?=[(\[:])")
_BLOCK_START = re.compile(r"^(?:[-+=\[]|([0-9]+)(?=[.)](?: |$)))")


def render_markdown(document: Document, pictures: Sequence[str] = ()) -> str:
    """The whole document, its environment last; `pictures` are the files of its charts, in their order."""
    return "\n\n".join(block for block in _list_blocks(document, iter(pictures)) if block) + "\n"


def escape_markdown(text: str) -> str:
    """A text that Markdown shows as it is, on one line."""
    inline = _SPECIAL.sub(lambda match: _ENTITIES.get(match[0], f"\\{match[0]}"), clean_text(text))
    return _BLOCK_START.sub(lambda match: f"{match[0]}\\" if match[1] else f"\\{match[0]}", inline)


def _list_blocks(document: Document, pictures: Iterator[str]) -> Iterator[str]:
    """The blocks that stand apart by an empty line; an empty one is left out."""
    yield _set_heading(1, document.headline)
    yield escape_markdown(document.setting)
    yield from _list_cautions("Failed", document.failures)
    if document.findings:
        yield "## Summary"
        yield "\n".join(f"- {escape_markdown(finding)}" for finding in document.summary)
    for section in document.sections:
        yield from _list_section_blocks(section, pictures)
    yield from _list_cautions("Warnings", document.warnings)
    if document.environment:
        yield "## Environment"
        yield _set_grid(("what", "value"), document.environment, ("left", "left"))


def _list_cautions(heading: str, cautions: Sequence[Caution]) -> Iterator[str]:
    if cautions:
        yield f"## {heading}"
        yield "\n".join(f"- {escape_markdown(one.message)} → {escape_markdown(one.next_step)}" for one in cautions)


def _list_section_blocks(section: Section, pictures: Iterator[str]) -> Iterator[str]:
    drawn = [(chart, file) for chart, file in zip(section.charts, pictures, strict=False)]
    if section.paragraphs or section.tables or drawn or (section.heading and not section.charts):
        yield _set_heading(2, section.heading or "Results")
    for asked, rest in map(section.split_question, section.paragraphs):
        yield f"{_set_strong(asked)}{' ' if asked else ''}{escape_markdown(rest.lstrip())}"
    for chart, file in drawn:
        yield _set_strong(chart.title)
        yield _set_picture(chart, file)
        yield escape_markdown(chart.caption)
    for table in section.tables:
        yield _set_heading(3, table.title)
        yield _set_table(table)
        yield from map(escape_markdown, list_notes(table))


def _set_picture(chart: Chart, file: str) -> str:
    """A picture that lies beside the page; a bracket would end its name."""
    name = (chart.title or "chart").replace("[", "(").replace("]", ")")
    return f"![{escape_markdown(name)}]({quote(os.fsencode(file))})"


def _set_strong(text: str) -> str:
    """A title above a picture; its alternative text is not visible."""
    escaped = escape_markdown(text)
    return f"**{escaped}**" if escaped else ""


def _set_heading(level: int, text: str) -> str:
    escaped = escape_markdown(text)
    return f"{'#' * level} {escaped}" if escaped else ""


def _set_table(table: Table) -> str:
    columns = format_columns(table)
    texts = [[cell + mark for cell, mark in zip(c.cells, c.marks, strict=True)] for c in columns]
    rows = [[column[row] for column in texts] for row in range(len(table.rows))]
    return _set_grid([column.header for column in columns], rows, [column.align for column in columns])


def _set_grid(header: Sequence[str], rows: Sequence[Sequence[str]], aligns: Sequence[Align]) -> str:
    """A table whose columns are aligned in the source as well."""
    cells = [[escape_markdown(text) for text in row] for row in (header, *rows)]
    widths = [max(3, *map(measure_text, column)) for column in zip(*cells, strict=True)]
    rules = [
        ":" + "-" * (width - 1) if align == "left" else "-" * (width - 1) + ":"
        for width, align in zip(widths, aligns, strict=True)
    ]
    padded = ([*map(pad_text, row, widths, aligns)] for row in cells)
    lines = [f"| {' | '.join(row)} |" for row in padded]
    return "\n".join([lines[0], f"| {' | '.join(rules)} |", *lines[1:]])

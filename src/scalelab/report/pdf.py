"""A document as a typeset A4 report, by typst.

The template stands in `assets/report.typ` and reads the document as data, so nothing in it can be taken for markup.
Charts are vectors, with their fonts. A table that is too wide for the page is set in a smaller size, and then split
into tables below each other that repeat the first column, as in a terminal. What the fonts lack is spelled out.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from scalelab.errors import UsageError
from scalelab.report.cells import TextColumn, format_columns, list_notes
from scalelab.report.document import Caution, Chart, Document, Section, Table
from scalelab.report.glyphs import spell_out
from scalelab.report.layout import Part, arrange_columns, measure_column
from scalelab.report.pictures import PICTURE_WIDTH, draw_pdf

NO_TYPST = "a PDF is set by typst, which is not installed: pip install 'scalelab[report]'"
SIZES = ((9.5, 98, 4.5), (8.5, 112, 4.0), (7.5, 126, 3.0))
"""Sizes of tables in points, how many characters of each fit beside each other, and the blank around a cell."""
NO_BREAK = "\u00a0"


def render_pdf(document: Document) -> bytes:
    """The whole document, its environment last."""
    try:
        import typst
    except ImportError as error:
        raise UsageError(NO_TYPST) from error
    with tempfile.TemporaryDirectory(prefix="scalelab-pdf-") as place:
        directory = Path(place)
        described = describe_document(document, directory)
        (directory / "report.json").write_text(json.dumps(described), encoding="utf-8")
        template = files("scalelab.report").joinpath("assets", "report.typ").read_text(encoding="utf-8")
        (directory / "report.typ").write_text(template, encoding="utf-8")
        pdf: bytes = typst.compile(str(directory / "report.typ"), root=place, ignore_system_fonts=True)
    return pdf


def describe_document(document: Document, directory: Path) -> dict[str, Any]:
    """The document as the template reads it; its charts become files in a directory."""
    names = iter(range(10**6))
    return {
        "headline": spell_out(document.headline),
        "title": spell_out(document.title),
        "question": spell_out(document.question),
        "setting": spell_out(document.setting),
        "footer": spell_out(next((value for name, value in document.environment if name == "run"), document.title)),
        "summary": [spell_out(finding) for finding in document.summary],
        "cautions": [_describe_caution(caution) for caution in document.cautions],
        "sections": [
            {
                "heading": spell_out(section.heading or "Results"),
                "paragraphs": [spell_out(paragraph) for paragraph in section.paragraphs],
                "charts": [_describe_chart(chart, directory, f"chart{next(names)}.pdf") for chart in section.charts],
                "tables": [_describe_table(table) for table in section.tables],
            }
            for section in document.sections
            if _says_something(section)
        ],
        "environment": [[spell_out(name), spell_out(value)] for name, value in document.environment],
    }


def _says_something(section: Section) -> bool:
    return bool(section.heading or section.paragraphs or section.charts or section.tables)


def _describe_caution(caution: Caution) -> dict[str, str]:
    return {"message": spell_out(caution.message), "next_step": spell_out(caution.next_step)}


def _describe_chart(chart: Chart, directory: Path, name: str) -> dict[str, Any]:
    (directory / name).write_bytes(draw_pdf(chart, width=PICTURE_WIDTH))
    return {"title": spell_out(chart.title), "caption": spell_out(chart.caption), "file": name, "share": 100}


def _describe_table(table: Table) -> dict[str, Any]:
    columns = format_columns(table)
    size, parts, gap = _fit_table(columns)
    return {
        "title": spell_out(table.title),
        "parts": [_describe_part(columns, part, size, gap) for part in parts],
        "notes": [spell_out(note) for note in list_notes(table)],
    }


def _fit_table(columns: Sequence[TextColumn]) -> tuple[float, tuple[Part, ...], float]:
    """The largest size in which a table need not be split, or the smallest one and its parts."""
    sizes = [measure_column(column) for column in columns]
    for points, width, gap in SIZES:
        parts = arrange_columns(sizes, width)
        if len(parts) == 1:
            return points, parts, gap
    return points, parts, gap


def _describe_part(columns: Sequence[TextColumn], part: Part, size: float, gap: float) -> dict[str, Any]:
    chosen = [columns[index] for index in part.columns]
    has_prose = any(column.is_prose for column in chosen)
    return {
        "size": size,
        "gap": gap,
        "columns": [
            {
                "header": spell_out(column.header),
                "align": column.align,
                "prose": column.is_prose and has_prose and _is_long(column),
            }
            for column in chosen
        ],
        "rows": [[_set_cell(column, row) for column in chosen] for row in range(len(columns[0].cells))],
    }


def _is_long(column: TextColumn) -> bool:
    """Whether a column's words take the width that the others leave."""
    return max((len(cell) for cell in column.cells), default=0) > 24


def _set_cell(column: TextColumn, row: int) -> str:
    text = spell_out(column.cells[row] + column.marks[row])
    return text if column.is_prose else text.replace(" ", NO_BREAK)

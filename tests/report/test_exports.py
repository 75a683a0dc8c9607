"""Other programs get raw numbers in base units."""

from __future__ import annotations

import csv
import io
import json
import math

import pytest
from hypothesis import given, settings

from scalelab.checks import clean_text
from scalelab.report.document import Chart, Column, Document, Section, Table, make_cell, read_document, render_json
from scalelab.report.renderers.csv_table import CSV_HEADER, render_csv
from tests.report.samples import (
    HOSTILE_TEXTS,
    build_hostile_document,
    build_strong_scaling,
    build_troubled_scaling,
    draw_documents,
    make_row,
)


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def read_lines(document: Document) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(render_csv(document))))


def export_table(table: Table) -> list[dict[str, str]]:
    return read_lines(Document(title="Document", sections=(Section(tables=(table,)),)))


@settings(max_examples=30)
@given(draw_documents())
def test_json_is_strict_for_any_document(document: Document) -> None:
    json.loads(render_json(document), parse_constant=refuse_constant)


def test_json_keeps_every_digit_and_every_chart() -> None:
    data = json.loads(render_json(build_strong_scaling()))
    assert data["sections"][0]["tables"][0]["rows"][1][1]["value"] == 0.2147
    assert data["sections"][0]["charts"][0]["spec"] == {"mark": "line"}
    assert data["schema_version"] == 2


def test_every_figure_is_one_line_of_the_json_whatever_texts_say() -> None:
    spec = {"layer": [{"data": {"values": [{"x": 1, "spec": None}]}}], "title": '"spec": null'}
    chart = Chart(title='"spec": null', spec=spec, caption='\n"spec": null')
    document = Document(title='"spec": null', sections=(Section(charts=(chart, chart)),))
    text = render_json(document)
    assert read_document(text) == document
    lines = [line.strip().rstrip(",") for line in text.split("\n")]
    assert sum(line.startswith('"spec": {') and line.endswith("}") for line in lines) == 2


def test_csv_has_a_line_for_every_cell_in_base_units() -> None:
    lines = read_lines(build_troubled_scaling())
    assert len(lines) == 4 * 7 + 4
    assert lines[8] == {
        "table": "Strong scaling", "row": "2", "column": "step_seconds", "unit": "s",
        "value": "0.2147", "low": "0.2143", "high": "0.2271", "mark": "",
    }  # fmt: skip
    assert lines[-1]["table"] == "Failures"


def test_csv_keeps_marks_and_failures() -> None:
    lines = read_lines(build_troubled_scaling())
    marked = [(line["row"], line["column"]) for line in lines if line["mark"] == "†"]
    assert marked == [("8", "num_ranks"), ("8", "step_seconds")]
    assert {"value": "out of memory", "unit": ""}.items() <= lines[15].items()


def test_unknown_is_empty_in_csv() -> None:
    column = Column(key="speedup", header="speedup", quantity="ratio")
    table = Table(columns=(column,), rows=tuple(make_row(value) for value in (None, math.nan, math.inf)))
    assert [line["value"] for line in export_table(table)] == ["", "", ""]


def test_a_table_without_a_title_is_named_by_its_section() -> None:
    table = Table(columns=(Column(key="a", header="a"),), rows=(make_row(True),))
    sections = (Section(tables=(table,)), Section(heading="Laws of scaling", tables=(table,)))
    document = Document(title="Strong scaling", sections=sections)
    assert [line["table"] for line in read_lines(document)] == ["Strong scaling", "Laws of scaling"]


def test_tables_of_the_same_title_have_different_names() -> None:
    table = Table(columns=(Column(key="a", header="a"),), rows=(make_row(True),))
    document = Document(title="Document", sections=(Section(tables=(table, table)),))
    assert [line["table"] for line in read_lines(document)] == ["Document", "Document (2)"]


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", " =1", "\u200b=1"])
def test_text_never_becomes_a_formula(text: str) -> None:
    column = Column(key=text, header="h")
    (line,) = export_table(Table(title=text, columns=(column,), rows=((make_cell(text, mark=text),),)))
    assert {line[name] for name in ("table", "column", "value", "mark")} == {"'" + clean_text(text)}


def test_negative_numbers_stay_numbers() -> None:
    column = Column(key="exposed", header="exposed", quantity="share")
    (line,) = export_table(Table(columns=(column,), rows=(make_row(-0.012),)))
    assert float(line["value"]) == -0.012


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_any_text_can_be_stored(text: str) -> None:
    document = build_hostile_document(text)
    assert json.loads(render_json(document).encode("utf-8"))["schema_version"] == 2
    assert render_csv(document).encode("utf-8").startswith(",".join(CSV_HEADER).encode())

"""A document is plain data, and reads back as it was written."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings

from scalelab.analysis.estimate import Estimate
from scalelab.errors import DamagedRun
from scalelab.report.document import (
    SCHEMA_VERSION,
    Cell,
    Column,
    Document,
    Section,
    Table,
    make_cell,
    read_document,
    render_json,
)
from tests.report.samples import build_strong_scaling, build_troubled_scaling, draw_documents, make_row

COLUMN = Column(key="speedup", header="speedup", quantity="ratio")


def damage_sample(**changes: Any) -> str:
    return json.dumps(json.loads(render_json(build_strong_scaling())) | changes)


@pytest.mark.parametrize("document", [build_strong_scaling(), build_troubled_scaling()])
def test_a_document_reads_back_as_it_was_written(document: Document) -> None:
    assert read_document(render_json(document)) == document


@settings(max_examples=50)
@given(draw_documents())
def test_what_was_read_is_written_the_same_again(document: Document) -> None:
    text = render_json(document)
    assert render_json(read_document(text)) == text


def test_numbers_that_json_cannot_hold_read_back_as_unknown() -> None:
    table = Table(columns=(COLUMN,), rows=(make_row(math.nan), make_row(math.inf)))
    read = read_document(render_json(Document(title="t", sections=(Section(tables=(table,)),))))
    assert read.tables[0].rows == (make_row(None), make_row(None))


def test_a_newer_document_is_refused_with_what_to_do() -> None:
    with pytest.raises(DamagedRun, match=f"schema version {SCHEMA_VERSION + 1}.*upgrade scalelab"):
        read_document(damage_sample(schema_version=SCHEMA_VERSION + 1, unheard_of=True))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        "{}",
        '{"schema_version": 1}',
        '{"schema_version": "1", "title": "t"}',
        '{"schema_version": 0, "title": "t"}',
        damage_sample(sections=[{"tables": 3}]),
        damage_sample(title=None),
        damage_sample(sections=[{"tables": [{"columns": [{"key": "a", "header": "a"}], "rows": [[]]}]}]),
        damage_sample(sections=[{"tables": [{"columns": [{"key": "a", "header": "a", "quantity": "x"}]}]}]),
        "[" * 100_000,
        render_json(build_strong_scaling())[:-20],
    ],
)
def test_a_damaged_document_is_refused(text: str) -> None:
    with pytest.raises(DamagedRun, match="cannot be read"):
        read_document(text)


def test_a_row_has_a_cell_for_every_column() -> None:
    with pytest.raises(ValueError, match="row 2 has 2 cells for 1 columns"):
        Table(title="t", columns=(COLUMN,), rows=(make_row(1.0), make_row(1.0, 2.0)))


def test_a_table_has_columns_and_every_column_its_own_key() -> None:
    with pytest.raises(ValueError, match="different keys"):
        Table(columns=(), rows=())
    with pytest.raises(ValueError, match="different keys"):
        Table(columns=(COLUMN, COLUMN), rows=())


def test_a_cell_keeps_the_interval_of_its_estimate() -> None:
    estimate = Estimate(value=1.9, low=1.8, high=2.1)
    assert make_cell(estimate, mark="†") == Cell(value=1.9, low=1.8, high=2.1, mark="†")
    assert make_cell(estimate).estimate == estimate


@pytest.mark.parametrize("value", [None, "out of memory", True])
def test_a_cell_without_a_number_has_no_estimate(value: str | bool | None) -> None:
    assert make_cell(value).estimate is None


def test_a_row_is_made_of_anything_a_cell_can_hold() -> None:
    marked = Cell(value=8, mark="†")
    assert make_row(marked, "ddp", None) == (marked, Cell(value="ddp"), Cell())

"""Every published figure is in the line of the assignment, or of the table, that it is said to be in."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from scalelab.recipes.recipe import QUESTIONS, Printed, read_published
from scalelab.recipes.reproduce import RECIPES

REFERENCE = Path(__file__).parents[3] / "shared" / "reference"


def list_figures(recipe: str) -> list[tuple[str, Printed]]:
    """Figures, and questions."""
    files = [read_published(recipe), read_published(recipe, QUESTIONS)]
    return [(f"{row}.{name}", printed) for rows in files for row, own in rows.items() for name, printed in own.items()]


@pytest.fixture(scope="module")
def documents() -> dict[str, list[str]]:
    """The lines of every assignment, by its number, and of every table, by its file."""
    assignments = {file.name[:3]: file for file in REFERENCE.glob("assignments/*.txt")}
    tables = {file.name: file for file in REFERENCE.glob("tables/*.csv")}
    if not assignments or not tables:
        pytest.skip("the published documents are not here: ../shared/reference")
    return {name: file.read_text(encoding="utf-8").splitlines() for name, file in (assignments | tables).items()}


def is_printed(text: str, line: str, *, is_table: bool) -> bool:
    """Whole, and in a table as one of its cells."""
    if is_table:
        return text in next(csv.reader([line]))
    return bool(re.search(rf"(?<![\d.]){re.escape(text)}(?!\d)", line))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_figure_is_printed_where_it_is_said_to_be(recipe: str, documents: dict[str, list[str]]) -> None:
    missing = []
    for name, printed in list_figures(recipe):
        document, _, line = printed.where.partition(":")
        text = documents[document][int(line) - 1]
        if not is_printed(printed.text, text, is_table=document.endswith(".csv")):
            missing.append(f"{name}: {printed.text!r} is not in {printed.where}: {text[:80]!r}")
    assert missing == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_row_with_figures_is_a_row_of_its_recipe(recipe: str) -> None:
    rows = {row.id for row in RECIPES[recipe].make_rows("small")}
    assert set(read_published(recipe)) <= rows
    assert all(re.fullmatch(r"(00[0-4]|\w+\.csv):\d+", printed.where) for _, printed in list_figures(recipe))

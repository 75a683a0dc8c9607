"""Every published figure is in the line of the assignment that it is said to be in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scalelab.recipes.recipe import QUESTIONS, Printed, has_questions, read_published
from scalelab.recipes.reproduce import RECIPES

ASSIGNMENTS = Path(__file__).parents[3] / "shared" / "reference" / "assignments"


def list_figures(recipe: str) -> list[tuple[str, Printed]]:
    """Figures, and questions."""
    files = [read_published(recipe), *([read_published(recipe, QUESTIONS)] if has_questions(recipe) else [])]
    return [(f"{row}.{name}", printed) for rows in files for row, own in rows.items() for name, printed in own.items()]


@pytest.fixture(scope="module")
def assignments() -> dict[str, list[str]]:
    """The lines of every document, by its number."""
    files = sorted(ASSIGNMENTS.glob("*.txt"))
    if not files:
        pytest.skip("the assignments are not here: ../shared/reference/assignments")
    return {file.name[:3]: file.read_text(encoding="utf-8").splitlines() for file in files}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_figure_is_printed_where_it_is_said_to_be(recipe: str, assignments: dict[str, list[str]]) -> None:
    missing = []
    for name, printed in list_figures(recipe):
        document, _, line = printed.where.partition(":")
        text = assignments[document][int(line) - 1]
        if not re.search(rf"(?<![\d.]){re.escape(printed.text)}(?!\d)", text):
            missing.append(f"{name}: {printed.text!r} is not in {printed.where}: {text[:80]!r}")
    assert missing == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_row_with_figures_is_a_row_of_its_recipe(recipe: str) -> None:
    rows = {row.id for row in RECIPES[recipe].make_rows("small")}
    assert set(read_published(recipe)) <= rows
    assert all(re.fullmatch(r"00[0-4]:\d+", printed.where) for _, printed in list_figures(recipe))

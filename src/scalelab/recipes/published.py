"""Published numbers: `published.toml` of an assignment, each as it was printed and where.

    [G2]
    tokens_per_second = ["32582.4", "002:69"]           text, and the assignment's document and line

A number of ours never stands in these files; tests find every text in its line.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from scalelab.recipes.recipe import Question

QUESTIONS = "questions.toml"


class Printed(NamedTuple):
    """A published figure."""

    text: str
    """As it was printed, without its unit."""
    where: str
    """Document and line, such as 004:411."""

    @property
    def number(self) -> float:
        return float(self.text.replace(",", ""))


@cache
def read_published(recipe: str, name: str = "published.toml") -> Mapping[str, Mapping[str, Printed]]:
    """The published figures of an assignment, or its questions (`questions.toml`), by row and name."""
    file = Path(__file__).parent / recipe / name
    rows = tomllib.loads(file.read_text(encoding="utf-8"))
    return {row: {name: Printed(*pair) for name, pair in figures.items()} for row, figures in rows.items()}


def has_questions(recipe: str) -> bool:
    return (Path(__file__).parent / recipe / QUESTIONS).is_file()


def pair_questions(recipe: str, row: str, answers: Mapping[str, str]) -> tuple[Question, ...]:
    """The questions of a row with their answers, in the assignment's order; those without an answer are left out."""
    asked = read_published(recipe, QUESTIONS).get(row, {})
    return tuple(Question(printed.text, answers[name]) for name, printed in asked.items() if name in answers)

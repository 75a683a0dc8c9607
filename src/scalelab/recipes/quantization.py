"""The quantization recipe: a small convolutional network in int8, by hand."""

from __future__ import annotations

from collections.abc import Sequence

from scalelab.recipes.quantization_checks import make_checks
from scalelab.recipes.quantization_rows import make_q1, make_q2, make_q3, make_q4, make_q5
from scalelab.recipes.recipe import Recipe, Row, Size


def make_rows(size: Size) -> Sequence[Row]:
    return (make_q1(size), make_q2(size), make_q3(size), make_q4(size), make_q5(size))


QUANTIZATION = Recipe(
    name="quantization",
    title="A small CNN in int8",
    make_rows=make_rows,
    make_checks=make_checks,
)

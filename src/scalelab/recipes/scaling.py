"""The scaling recipe: reproducible benchmarks, strong scaling, DP against DDP."""

from __future__ import annotations

from collections.abc import Sequence

from scalelab.recipes.recipe import Recipe, Row, Size
from scalelab.recipes.scaling_checks import make_checks
from scalelab.recipes.scaling_rows import (
    make_s1,
    make_s2,
    make_s3,
    make_s4,
    make_s5a,
    make_s5b,
    make_s5c,
    make_s6,
)


def make_rows(size: Size) -> Sequence[Row]:
    return (
        make_s1(size),
        make_s2(size),
        make_s3(size),
        make_s4(size),
        make_s5a(size),
        make_s5b(size),
        make_s5c(size),
        make_s6(),
    )


SCALING = Recipe(
    name="scaling",
    title="Reproducible benchmarks, strong scaling, DP against DDP",
    make_rows=make_rows,
    make_checks=make_checks,
)

"""The polaris recipe: DDP on a supercomputer, from two reports of one homework."""

from __future__ import annotations

from collections.abc import Sequence

from scalelab.recipes.polaris.checks import make_checks
from scalelab.recipes.polaris.formats import make_p6
from scalelab.recipes.polaris.jobs import make_p9
from scalelab.recipes.polaris.links import make_p1, make_p4, make_p5, make_p10
from scalelab.recipes.polaris.ranks import make_p2
from scalelab.recipes.polaris.rows import make_p3, make_p7, make_p8
from scalelab.recipes.recipe import Recipe, Row, Size


def make_rows(size: Size) -> Sequence[Row]:
    return (
        make_p1(size),
        make_p2(size),
        make_p3(size),
        make_p4(size),
        make_p5(size),
        make_p6(size),
        make_p7(size),
        make_p8(size),
        make_p9(size),
        make_p10(size),
    )


POLARIS = Recipe(
    name="polaris",
    title="DDP on a supercomputer",
    make_rows=make_rows,
    make_checks=make_checks,
)

"""The resnet recipe: DDP on CIFAR-10."""

from __future__ import annotations

from collections.abc import Sequence

from scalelab.recipes.recipe import Recipe, Row, Size
from scalelab.recipes.resnet.checks import make_checks
from scalelab.recipes.resnet.epochs import make_r2, make_r3, make_r4
from scalelab.recipes.resnet.rows import make_r1, make_r5, make_r6, make_r7


def make_rows(size: Size) -> Sequence[Row]:
    return (
        make_r1(size),
        make_r2(size),
        make_r3(size),
        make_r4(size),
        make_r5(size),
        make_r6(size),
        make_r7(size),
    )


RESNET = Recipe(
    name="resnet",
    title="DDP on CIFAR-10",
    make_rows=make_rows,
    make_checks=make_checks,
)

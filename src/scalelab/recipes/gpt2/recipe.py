"""The gpt2 recipe: profiling on one GPU, then DDP and FSDP."""

from __future__ import annotations

from collections.abc import Sequence

from scalelab.recipes.gpt2.checks import make_checks
from scalelab.recipes.gpt2.parallel import make_g5, make_g6
from scalelab.recipes.gpt2.rows import make_g1, make_g2, make_g3, make_g4
from scalelab.recipes.recipe import Recipe, Row, Size


def make_rows(size: Size) -> Sequence[Row]:
    return (make_g1(size), make_g2(size), make_g3(size), make_g4(size), make_g5(size), make_g6(size))


GPT2 = Recipe(
    name="gpt2",
    title="Profiling on one GPU, DDP and FSDP",
    make_rows=make_rows,
    make_checks=make_checks,
)

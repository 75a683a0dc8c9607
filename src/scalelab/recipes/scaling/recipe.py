"""The scaling recipe: reproducible benchmarks, strong scaling, DP against DDP.

The checks of the scaling assignment: what its model's arithmetic says before anything is measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from scalelab.recipes.recipe import Check, Recipe, Row, Size
from scalelab.recipes.scaling import published
from scalelab.recipes.scaling.rows import (
    make_s1,
    make_s2,
    make_s3,
    make_s4,
    make_s5a,
    make_s5b,
    make_s5c,
    make_s6,
)
from scalelab.workloads.options import MlpOptions


def count_bytes(options: MlpOptions) -> int:
    """Gradients of one step: 4P."""
    return published.BYTES_PER_PARAMETER * options.count_parameters()


def count_operations(options: MlpOptions) -> float:
    """Operations of one step over all ranks: 6PB, but for the biases."""
    return options.flops_per_sample() * published.GLOBAL_BATCH


def make_checks() -> list[Check]:
    small, large = (MlpOptions(dim=dim, depth=depth) for dim, depth in published.SIZES)
    more_bytes = count_bytes(large) / count_bytes(small)
    more_operations = count_operations(large) / count_operations(small)
    ratios = [count_bytes(options) / count_operations(options) for options in (small, large)]
    is_alike = abs(ratios[1] / ratios[0] - 1) < 0.01
    return [
        Check(
            id="S3",
            claim=f"{large.label} is dominated by computation, {small.label} by communication",
            computed=f"{large.label} has {more_bytes:.1f} times the bytes (4P) and {more_operations:.1f} times the"
            f" operations (6PB) of {small.label}: {1e3 * ratios[0]:.2f} and {1e3 * ratios[1]:.2f} bytes per thousand"
            " operations, so size alone does not decide it",
            holds=not is_alike,
        )
    ]


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

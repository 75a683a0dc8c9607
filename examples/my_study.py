"""A study of your own: its rows, its columns and what it finds. Try it:

scalelab run examples/my_study.py:Accumulation --workload mlp --dim 512 --depth 4 --passes 1 2 8
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from scalelab import SweepStudy
from scalelab.studies.shared.sweep import memory_column, name_fastest, relative_column, step_column


@dataclass(frozen=True, kw_only=True)
class Accumulation(SweepStudy):
    """The same batch in one forward pass, and in several whose gradients are accumulated."""

    question: ClassVar[str] = "What does gradient accumulation cost in time and save in memory?"
    row_header: ClassVar[str] = "passes"
    reference_name: ClassVar[str] = "passes-1"

    passes: tuple[int, ...] = (1, 2, 4)
    """Forward passes per step; one is always measured."""
    batch_per_rank: int = 64
    """Samples per step and rank."""

    def list_rows(self):
        for passes in sorted({1, *self.passes}):
            job = replace(self.job, shape=replace(self.job.shape, micro_batch=self.batch_per_rank // passes))
            label = f"{passes} pass{'es' * (passes > 1)}"
            yield self.configure(f"passes-{passes}", self.batch_per_rank, job, label=label)

    def list_columns(self, sweep):
        yield from (step_column(), relative_column(sweep.reference, "× one pass"), memory_column())

    def list_findings(self, sweep):
        return name_fastest(sweep, "number of passes")

"""Model size: does a larger model wait less for communication?

The usual answer, "small models are communication-bound and large ones compute-bound", does not follow from size alone.
One data-parallel step all-reduces the gradients, 4·P bytes for P parameters in float32, and computes with every
parameter on every sample: 6·P·B FLOPs for a multilayer perceptron and a batch B. Both grow with P, so bytes per FLOP
stay 4 / (6·B) for every size. The batch decides, and how fast the machine does either at that size. So each size is
measured on each number of ranks, and its row says what dominated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from scalelab.checks import check_at_least, read_flag
from scalelab.errors import UsageError
from scalelab.records.trial import Option, Trial, TrialResult
from scalelab.report.document import Document, Section
from scalelab.strategies.catalogue import Spread
from scalelab.studies.model_size.report import (
    SizeAnswer,
    draw_parts,
    draw_sizes,
    find_findings,
    make_part_table,
    make_size_table,
    make_work_table,
)
from scalelab.studies.shared.arms import group_arms
from scalelab.studies.shared.breakdown import make_breakdown_table, warn_of_rest
from scalelab.studies.shared.communication import FEW_STEPS, has_traces, make_traced_table
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.sampling import Configuration, Sampling, check_ranks
from scalelab.studies.shared.study import Study
from scalelab.studies.shared.sweep import describe_measurement, find_sweep_cautions, plan_sweep
from scalelab.studies.shared.variations import parse_options


@dataclass(frozen=True, kw_only=True)
class ModelSize(Study):
    """Every size on every number of ranks, with the same global batch."""

    name: ClassVar[str] = "model-size"
    title: ClassVar[str] = "Model size"
    question: ClassVar[str] = "Does communication or compute dominate, and does model size decide it?"

    sizes: tuple[str, ...] = ("dim=256,depth=2", "dim=1024,depth=2")
    """Workload options of each size, as option=value,option=value; the others stay as given."""
    ranks: tuple[int, ...] = (1, 2)
    """World sizes to measure; one rank is always measured."""
    global_batch: int = 64
    """Samples per step, over all ranks."""
    strategy: Spread = "ddp"
    """How training is distributed."""
    job: Job = field(default_factory=lambda: Job(workload="mlp"))
    sampling: Sampling = field(default_factory=lambda: Sampling(profile_steps=FEW_STEPS))

    def __post_init__(self) -> None:
        check_at_least("global_batch", self.global_batch, 1)
        check_ranks(self.ranks, self.global_batch)
        if not self.sizes or len(set(self.sizes)) < len(self.sizes):
            raise UsageError(f"--sizes {' '.join(self.sizes)} needs at least one size, each once")

    @property
    def all_ranks(self) -> list[int]:
        return sorted({1, *self.ranks})

    def _read_size(self, text: str) -> dict[str, Option]:
        return read_flag("sizes", text, lambda words: parse_options(words, self.job.workload))

    def plan(self) -> list[Trial]:
        return plan_sweep(self.job, self.sampling, list(self._configure()))

    def _configure(self) -> Iterator[Configuration]:
        for number, text in enumerate(self.sizes, start=1):
            job = replace(self.job, options={**self.job.options, **self._read_size(text)})
            for num_ranks in self.all_ranks:
                yield Configuration(
                    name=f"size{number}-{self.strategy}-{num_ranks}",
                    strategy=self.strategy,
                    num_ranks=num_ranks,
                    global_batch=self.global_batch,
                    job=job,
                    label=f"{text.replace(',', ' ')} × {num_ranks}",
                    instruments=("counters",) if self.strategy == "ddp" and num_ranks > 1 else (),
                )

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        arms = group_arms(results, self.sampling.warmup)
        answer = SizeAnswer(arms=arms, strategy=self.strategy, sizes=self.sizes, ranks=tuple(self.all_ranks))
        words = (self.strategy, self.job.dtype, f"global batch {self.global_batch}")
        label = self.job.workload if self.job.built_in is not None else self.job.label
        setting = describe_measurement(self.job, self.sampling, arms.values(), *words)
        largest = [arm for arm in (answer.find(size, answer.ranks[-1]) for size in self.sizes) if arm is not None]
        parts = tuple(
            make_breakdown_table(arm, title=f"Every rank of {arm.label}") for arm in largest if arm.trial.num_ranks > 1
        )
        sections = [
            Section(tables=(make_size_table(answer),), charts=draw_sizes(answer)),
            Section(heading="Bytes and operations", tables=(make_work_table(answer),)),
        ]
        if parts:
            traced = make_traced_table([arm for arm in largest if has_traces(arm)])
            whole = make_part_table(answer)
            tables = (whole, *parts, *((traced,) if traced else ()))
            sections.append(Section(heading="Where the time goes", tables=tables, charts=draw_parts(whole)))
        return Document(
            title=self.title,
            question=self.question,
            setting=setting.replace(self.job.label, label, 1),
            sections=tuple(sections),
            findings=tuple(find_findings(answer)),
            cautions=(
                *find_sweep_cautions(arms, answer.find(self.sizes[0], 1)),
                *(caution for arm in largest for caution in warn_of_rest(arm)),
            ),
        )

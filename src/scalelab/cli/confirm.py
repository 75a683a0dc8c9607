"""Running the best of what was predicted: `scalelab predict RUN --best --confirm`.

Each combination becomes the study that the run was made by, on that one number of ranks, with the settings that were
searched. They are runs like any other, kept beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from scalelab.analysis.estimate import Estimate
from scalelab.errors import ScalelabError, UsageError
from scalelab.predict.what_if import Candidate, WhatIf
from scalelab.records.environment import count_cores
from scalelab.runs.experiment import read_results, run_study
from scalelab.studies.scaling.answer import ScalingAnswer
from scalelab.studies.scaling.study import StrongScaling, WeakScaling

NUM_CONFIRMED = 3
ROUNDS = 4
RUN = ("batch", "bucket_mb", "compression", "accumulation")
"""What is searched, and can be run; other changes are of the machine, or of the training itself."""


def confirm_best(study: StrongScaling | WeakScaling, best: Sequence[Candidate], runs_dir: Path) -> dict[int, Estimate]:
    """Samples per second of the first combinations, by their place; one that fails is left out and told."""
    check_confirmable(best[0])
    found: dict[int, Estimate] = {}
    for place, one in enumerate(best[:NUM_CONFIRMED], start=1):
        print(f"place {place}: {', '.join(one.change.changes) or 'as it is'}", file=sys.stderr)  # noqa: T201
        try:
            rate = measure_rate(study, one, runs_dir)
        except ScalelabError as error:
            print(f"place {place} gave nothing: {error}", file=sys.stderr)  # noqa: T201
            continue
        found[place] = rate
    return found


def check_confirmable(one: Candidate) -> None:
    others = [field.name for field in fields(WhatIf) if field.name not in RUN]
    if any(getattr(one.change, name) != getattr(WhatIf(), name) for name in others):
        raise UsageError("--confirm runs here, as it was measured: of what-ifs leave all but the batch and buckets out")
    if one.step.num_ranks > count_cores():
        raise UsageError(
            f"--confirm would put {one.step.num_ranks} ranks on {count_cores()} cores: use a machine that has them"
        )


def measure_rate(study: StrongScaling | WeakScaling, one: Candidate, runs_dir: Path) -> Estimate:
    """Samples per second of one combination, run here."""
    change, num_ranks = one.change, one.step.num_ranks
    assert change.batch is not None
    is_strong = isinstance(study, StrongScaling)
    per_rank = change.batch // num_ranks if is_strong else change.batch
    job = study.job
    spreading = replace(
        job.spreading,
        bucket_mb=job.spreading.bucket_mb if change.bucket_mb is None else change.bucket_mb,
        gradient_hook=change.compression,
    )
    micro = job.shape.micro_batch if change.accumulation is None else per_rank // change.accumulation
    shape = replace(job.shape, micro_batch=micro)
    changed = replace(job, spreading=spreading, shape=shape)
    sampling = replace(study.sampling, rounds=ROUNDS, control=False, profile_steps=0)
    again: StrongScaling | WeakScaling
    if isinstance(study, StrongScaling):
        again = replace(study, ranks=(num_ranks,), job=changed, sampling=sampling, global_batch=change.batch)
    else:
        again = replace(study, ranks=(num_ranks,), job=changed, sampling=sampling, batch_per_rank=change.batch)
    confirmed, _ = run_study(again, runs_dir=runs_dir)
    answer = ScalingAnswer.from_results(
        read_results(confirmed)[0], study.strategy, sampling.warmup, is_strong=is_strong
    )
    arm = next(arm for arm in answer.spread if arm.trial.num_ranks == num_ranks)
    return arm.step.map(lambda seconds: arm.trial.global_batch / seconds)

"""`scalelab compare A B`: two runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from scalelab.answers.comparison import RunSide, compare_runs
from scalelab.cli.flags import RunsDir, parse_flags
from scalelab.cli.output import Output, write_outputs
from scalelab.errors import UsageError
from scalelab.records.store import RUNS_DIR, RunStore, open_run
from scalelab.records.trial import to_builtins
from scalelab.runs.experiment import read_results
from scalelab.studies.catalogue import read_study
from scalelab.studies.shared.arms import group_arms, make_fetch_arms, make_transfer_arms


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Compare two runs: for every configuration that both measured, is B faster than A?"""

    a: Annotated[str, tyro.conf.Positional]
    """Baseline run: its name (or the beginning of it), its path, or last."""
    b: Annotated[str, tyro.conf.Positional]
    """Run to compare with the baseline."""
    runs_dir: RunsDir = RUNS_DIR
    output: Output = field(default_factory=Output)


def main(args: Sequence[str]) -> int:
    compare = parse_flags(Compare, args, "compare")
    compare.output.check()
    before, after = (open_run(name, compare.runs_dir) for name in (compare.a, compare.b))
    if before.path.resolve() == after.path.resolve():
        raise UsageError(f"{compare.a} and {compare.b} are the same run, {before.name}: give two")
    write_outputs(compare_runs(read_side(before), read_side(after)), compare.output, [before.path, after.path])
    return 0


def read_side(store: RunStore) -> RunSide:
    """A run as the comparison takes it."""
    study = read_study(store)
    results, damaged = read_results(store, study)
    results = [study.count_steps(result) for result in results]
    sampling = store.record.fields.get("sampling", {})
    warmup = sampling.get("warmup") if isinstance(sampling, dict) else None
    return RunSide(
        name=store.name,
        arms=group_arms([result for result in results if not result.trial.trains_nothing], warmup)
        | make_transfer_arms(results)
        | make_fetch_arms(results),
        environment=to_builtins(store.environment()) | {"workload sha256": store.record.workload_sha256},
        damaged=tuple(str(error) for error in damaged),
    )

"""`scalelab compare A B`: two runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from scalelab.answers.comparison import compare_runs, read_side
from scalelab.cli.flags import RunsDir, parse_flags
from scalelab.cli.output import Output, write_outputs
from scalelab.errors import UsageError
from scalelab.records.store import RUNS_DIR, open_run


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

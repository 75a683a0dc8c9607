"""`scalelab resume`: go on with a run that was interrupted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from scalelab import __version__
from scalelab.cli.finish import measure_and_report
from scalelab.cli.flags import parse_flags
from scalelab.cli.output import Output, RunsDir
from scalelab.environment import read_environment
from scalelab.measure.launchers.local import LocalLauncher
from scalelab.store import RUNS_DIR, RunStore, hash_workload, open_run


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Go on with a run that was interrupted: trials that have a result are not run again."""

    run: Annotated[str, tyro.conf.Positional] = "last"
    """Its name, the beginning of its name, its path, or last."""
    runs_dir: RunsDir = RUNS_DIR
    output: Output = field(default_factory=Output)


def main(args: Sequence[str]) -> int:
    resume = parse_flags(Resume, args, "resume")
    resume.output.check()
    store = open_run(resume.run, resume.runs_dir)
    warn_of_changes(store)
    return measure_and_report(store, LocalLauncher(), resume.output)


def warn_of_changes(store: RunStore) -> None:
    """A run that goes on elsewhere, or with another workload file, mixes the times of two jobs."""
    before, now = store.environment(), read_environment(__version__)
    changes = [
        f"{name} was {getattr(before, name)}, is {getattr(now, name)}"
        for name in ("host", "processor", "num_cores", "torch")
        if getattr(before, name) != getattr(now, name)
    ]
    if hash_workload(store.trials()[0].workload) != store.record.workload_sha256:
        changes.append("the workload's file has changed")
    if changes:
        print(f"warning: this is not what the run began on: {'; '.join(changes)}", file=sys.stderr)  # noqa: T201

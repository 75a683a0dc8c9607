"""`scalelab train`: a real training run, alone or as one of torchrun's ranks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from scalelab.cli.finish import measure_and_report
from scalelab.cli.run import parse_kind
from scalelab.errors import UsageError
from scalelab.experiment import start_run
from scalelab.measure.launchers.joined import JoinedLauncher, Membership, find_membership, run_member
from scalelab.measure.launchers.local import LocalLauncher
from scalelab.studies.train import Train
from scalelab.trial import SINGLE_PROCESS


def main(args: Sequence[str]) -> int:
    train, execution = parse_kind(Train, args, "train")
    member = find_membership(os.environ)
    train = place_checkpoints(join_ranks(train, member) if member else train)
    (trial,) = train.plan()
    if execution.dry_run:
        what = f"{trial.strategy}, {trial.num_ranks} rank{'s'[: trial.num_ranks > 1]}"
        print(f"{what}, batch {trial.batch_per_rank} per rank. Nothing was run.")  # noqa: T201
        return 0
    if member and member.rank > 0:
        return run_member("-")
    execution.output.check()
    launcher = JoinedLauncher() if member else LocalLauncher()
    launcher.check()
    store = start_run(train, execution.runs_dir, ["scalelab", "train", *args])
    return measure_and_report(store, launcher, execution.output)


def join_ranks(train: Train, member: Membership) -> Train:
    """The training on as many ranks as torchrun has started."""
    if train.ranks not in (1, member.num_ranks):
        raise UsageError(f"--ranks {train.ranks} contradicts the {member.num_ranks} that were launched: leave it out")
    if member.num_ranks > 1 and train.strategy in SINGLE_PROCESS:
        raise UsageError(f"--strategy {train.strategy} is one process, {member.num_ranks} were launched: use ddp")
    return dataclasses.replace(train, ranks=member.num_ranks)


def place_checkpoints(train: Train) -> Train:
    """An absolute directory, so that ranks and later resumes find it from wherever they are."""
    given = train.course.checkpoints
    if given is None:
        return train
    return dataclasses.replace(train, course=dataclasses.replace(train.course, checkpoints=str(Path(given).resolve())))

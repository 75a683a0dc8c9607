"""Before torch is there: the variables of a script's rank, and `--fresh-interpreter`.

torch reads environment variables when it is imported, and a script may set them before. But we have to be there when
its first step is taken, with hooks that need torch. So in a fresh interpreter the script runs twice up to its first
import of torch: the first time ends there, then torch is imported in the environment that it left, and the script
starts again.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
from contextlib import suppress
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import msgspec

from scalelab.launch.agreement import Assignment, copied_directory
from scalelab.records.tasks import Script
from scalelab.records.trial import Trial

LOCAL_RANK = re.compile(r"(?<!\{)\{local_rank\}(?!\})")


class TorchWanted(BaseException):
    """The script imports torch."""


class TorchFinder(MetaPathFinder):
    """Ends the script where it imports torch."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] == "torch":
            raise TorchWanted


def run_prelude(trial: Trial, script: Script, assignment: Assignment) -> None:
    """Run the script up to its first import of torch; what goes wrong before goes wrong again, and is reported then."""
    os.environ.update(make_variables(trial, assignment))
    script = fill_in_rank(script, assignment)
    if script.is_scratch:
        script = move_to_copy(script, copied_directory(Path(assignment.directory)))
    before = (Path.cwd(), sys.argv, list(sys.path))
    finder = TorchFinder()
    sys.meta_path.insert(0, finder)
    try:
        if script.directory:
            os.chdir(script.directory)
        sys.argv = [script.target, *script.arguments]
        sys.path.insert(0, str(Path.cwd() if script.is_module else Path(script.target).resolve().parent))
        with suppress(TorchWanted, Exception, SystemExit, KeyboardInterrupt):
            execute_script(script)
    finally:
        sys.meta_path.remove(finder)
        os.chdir(before[0])
        sys.argv, sys.path = before[1], before[2]


def execute_script(script: Script) -> None:
    """Run it as Python would."""
    if script.is_module:
        runpy.run_module(script.target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script.target, run_name="__main__")


def make_variables(trial: Trial, assignment: Assignment) -> dict[str, str]:
    """What torchrun sets for a rank."""
    rank, local_size = assignment.rank, assignment.num_local_ranks or trial.num_ranks
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": assignment.local_rank,
        "WORLD_SIZE": trial.num_ranks,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": rank // local_size,
        "GROUP_WORLD_SIZE": -(-trial.num_ranks // local_size),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": trial.num_ranks,
        "MASTER_PORT": assignment.port,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "OMP_NUM_THREADS": trial.threads_per_rank,
    }
    words = {
        "MASTER_ADDR": assignment.address,
        "TORCHELASTIC_RUN_ID": "scalelab",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return {name: str(number) for name, number in numbers.items()} | words


def fill_in_rank(script: Script, assignment: Assignment) -> Script:
    """The script with the one argument that differs by rank, as torch.distributed.launch passes it."""
    words = tuple(LOCAL_RANK.sub(str(assignment.local_rank), word) for word in script.arguments)
    return msgspec.structs.replace(script, arguments=words)


def move_to_copy(script: Script, copy: Path) -> Script:
    """The script in the copy of its working directory."""
    target, before = Path(script.target), Path(script.directory)
    moved = str(copy / target.relative_to(before)) if target.is_relative_to(before) else script.target
    return msgspec.structs.replace(script, target=moved, directory=str(copy))

"""A script as Python would run it, as a rank: its variables, its working copy, and where its steps end.

torch reads environment variables when it is imported, and a script may set them before. But we have to be there when
its first step is taken, with hooks that need torch. So with `--fresh-interpreter` the script runs twice up to its first
import of torch: the first time ends there, then torch is imported in the environment that it left, and the script
starts again. Nothing here imports torch for that.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import runpy
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from scalelab.errors import UsageError
from scalelab.launch.agreement import Assignment, copied_directory
from scalelab.records.tasks import Script
from scalelab.records.trial import Trial
from scalelab.worker.script.boundary import replaced

if TYPE_CHECKING:
    from scalelab.worker.script.watch import TrainingWatch

LOCAL_RANK = re.compile(r"(?<!\{)\{local_rank\}(?!\})")
STEP_NAME = "__scalelab_step__"
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)


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


def execute_watched(script: Script, watch: TrainingWatch) -> None:
    """Run it, with the function that ends a step wrapped if there is one."""
    if not watch.uses_function:
        execute_script(script)
    elif is_own_function(script):
        execute_with_step(script, watch.wrap_step)
    else:
        with replaced(*find_function(script.step_at), watch.wrap_step):
            execute_script(script)


def is_own_function(script: Script) -> bool:
    """Whether the function that ends a step is in the script itself."""
    own = script.target if script.is_module else Path(script.target).stem
    return script.step_at.partition(":")[0] in ("__main__", own)


def find_function(step_at: str) -> tuple[Any, str]:
    """The module or class that has the function that ends a step, and its name there."""
    module, _, path = step_at.partition(":")
    *classes, name = path.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for part in classes:
            owner = getattr(owner, part)
        getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--step-at {step_at}: {error}") from error
    return owner, name


def execute_with_step(script: Script, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Run a script with a decorator on one of its functions; lines keep their numbers."""
    spec = importlib.util.find_spec(script.target) if script.is_module else None
    path = spec.origin if spec is not None and spec.origin else script.target
    tree = ast.parse(Path(path).read_bytes(), path)
    place: list[ast.stmt] = tree.body
    for part in script.step_at.partition(":")[2].split("."):
        found = next((one for one in place if isinstance(one, DEFINITIONS) and one.name == part), None)
        if found is None:
            raise UsageError(f"--step-at {script.step_at}: {Path(path).name} defines no {part} there")
        place = found.body
    assert found is not None
    found.decorator_list.insert(0, ast.copy_location(ast.Name(STEP_NAME, ast.Load()), found))
    main = ModuleType("__main__")
    main.__dict__.update({"__file__": path, "__package__": spec.parent if spec else None, STEP_NAME: wrap})
    sys.modules["__main__"] = main
    exec(compile(tree, path, "exec"), main.__dict__)

"""A script as Python would run it, with the function wrapped that ends its steps, if there is one."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from scalelab.errors import UsageError
from scalelab.records.tasks import Script
from scalelab.worker.script.patches import replaced
from scalelab.worker.script.prelude import execute_script
from scalelab.worker.script.watch import TrainingWatch

STEP_NAME = "__scalelab_step__"
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)


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

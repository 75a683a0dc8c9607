"""Python imports this in every process that `scalelab meter -- COMMAND` starts, because its folder is in PYTHONPATH.

It must cost nothing where nothing is trained: torch, once it is loaded, calls us when the first optimizer is made, and
only then is scalelab imported. The `sitecustomize` that this one hides is run as well.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

WATCHED = "torch.optim.optimizer"


class OptimizerFinder:
    """Finds torch's optimizers as Python does, and lets the first one that is made begin the recording."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name != WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_replace(module: ModuleType) -> None:
                load(module)
                await_first(module.Optimizer)

            spec.loader.exec_module = load_and_replace  # type: ignore[method-assign]
        return spec


def await_first(optimizer: Any) -> None:
    """Begin the recording at the first call of what torch does with every optimizer, made or read from a file."""
    original: Callable[[Any], None] = optimizer._patch_step_function

    def prepare(self: Any) -> None:
        if optimizer._patch_step_function is prepare:
            optimizer._patch_step_function = original
            begin_recording()
        original(self)

    optimizer._patch_step_function = prepare


def begin_recording() -> None:
    try:
        from scalelab.worker.meter.unedited import record_training
    except ImportError as error:
        sys.stderr.write(f"warning: nothing is recorded: {sys.executable} cannot import scalelab ({error})\n")
    else:
        record_training()


def run_hidden() -> None:
    """The `sitecustomize` that Python would have found without us."""
    here = Path(__file__).resolve().parent
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, OptimizerFinder())
run_hidden()

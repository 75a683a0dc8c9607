"""Python imports this in every process that `scalelab meter -- COMMAND` starts, because its folder is in PYTHONPATH.

It must cost nothing where nothing is trained: torch, once it is loaded, calls us at the first backward pass, and only
then is scalelab imported. The `sitecustomize` that this one hides is run as well.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

WATCHED = "torch.autograd"


class AutogradFinder:
    """Finds torch.autograd as Python does, and replaces `backward` in it by one that begins the recording."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name != WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_replace(module: ModuleType) -> None:
                load(module)
                module.backward = make_trigger(module, module.backward)  # type: ignore[attr-defined]

            spec.loader.exec_module = load_and_replace  # type: ignore[method-assign]
        return spec


def make_trigger(autograd: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """The first call begins the recording; every call is torch's own."""
    is_waiting = True

    def backward(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_waiting
        if is_waiting:
            is_waiting = False
            if autograd.backward is backward:
                autograd.backward = original
            begin_recording()
        return autograd.backward(*args, **kwargs)

    return backward


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


sys.meta_path.insert(0, AutogradFinder())
run_hidden()

"""From a trial to the workload that a rank trains: the side that imports torch."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from scalelab.errors import UsageError
from scalelab.trial import Trial
from scalelab.workloads.catalogue import BUILT_IN
from scalelab.workloads.gpt import build_gpt
from scalelab.workloads.mlp import build_mlp
from scalelab.workloads.source import CONTEXT_NAMES
from scalelab.workloads.workload import BuildContext, Workload

BUILDERS: dict[str, Callable[[Any, BuildContext], Workload]] = {"mlp": build_mlp, "gpt": build_gpt}


def load_workload(trial: Trial, rank: int) -> Workload:
    """Build what the trial trains, for one rank."""
    context = BuildContext(
        batch_size=trial.batch_per_rank,
        rank=rank,
        num_ranks=trial.num_ranks,
        seed=trial.seed,
        device=trial.device,
    )
    if trial.workload in BUILT_IN:
        return BUILDERS[trial.workload](BUILT_IN[trial.workload](**trial.options), context)
    return build_own(trial.workload, trial.options, context)


def build_own(spec: str, options: Mapping[str, Any], context: BuildContext) -> Workload:
    """Call the user's `build` with its options and with what it asks for of the context."""
    file, _, function = spec.rpartition(":")
    build = getattr(import_file(Path(file)), function, None)
    if not callable(build):
        raise UsageError(f"{file} has no function {function!r}")
    parameters = inspect.signature(build).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = {field.name: getattr(context, field.name) for field in fields(context)}
    wanted = {name: known[name] for name in CONTEXT_NAMES if name in parameters or takes_any}
    return read_answer(build(**{**wanted, **options}), f"{Path(file).name}:{function}")


def import_file(path: Path) -> ModuleType:
    """Import a file by its path, with its own directory searched first, as running it would."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def read_answer(answer: object, where: str) -> Workload:
    """What `build` returned, as a `Workload`: one itself, a dict, or model, batches, loss and perhaps optimizer."""
    expected = "return model, batches and loss (a fourth may make the optimizer from the parameters)"
    if isinstance(answer, Workload):
        return answer
    if isinstance(answer, Mapping):
        try:
            return Workload(**answer)
        except TypeError as error:
            raise UsageError(f"{where} returned a dict that does not fit: {error}; {expected}") from error
    if not isinstance(answer, tuple | list) or len(answer) not in (3, 4):
        size = f" of {len(answer)}" if isinstance(answer, tuple | list) else ""
        raise UsageError(f"{where} returned a {type(answer).__name__}{size}: {expected}")
    model, batches, loss, *rest = answer
    if not isinstance(model, nn.Module):
        raise UsageError(f"{where} returned a {type(model).__name__} as the model: {expected}")
    if not hasattr(batches, "__iter__"):
        raise UsageError(f"{where} returned a {type(batches).__name__} as the batches: it cannot be iterated")
    if not callable(loss):
        raise UsageError(f"{where} returned a {type(loss).__name__} as the loss: use loss(model, batch)")
    return Workload(model=model, batches=batches, loss=loss, optimizer=rest[0] if rest else None)

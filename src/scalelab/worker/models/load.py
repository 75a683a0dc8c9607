"""From a trial to the workload that a rank trains: the side that imports torch."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from scalelab.errors import UsageError
from scalelab.records.trial import Trial
from scalelab.worker.models.gpt2 import build_gpt2
from scalelab.worker.models.networks import build_lenet, build_mlp, build_resnet18
from scalelab.worker.models.transformer import build_transformer
from scalelab.workloads.catalogue import BUILT_IN
from scalelab.workloads.source import CONTEXT_NAMES, find_root
from scalelab.workloads.workload import BuildContext, Workload

BUILDERS: dict[str, Callable[[Any, BuildContext], Workload]] = {
    "gpt2": build_gpt2,
    "lenet": build_lenet,
    "mlp": build_mlp,
    "resnet18": build_resnet18,
    "transformer": build_transformer,
}

EXPECTED = "return model, batches and loss (and optionally a function that creates the optimizer from the parameters)"


def load_workload(trial: Trial, rank: int) -> Workload:
    """Build what the trial trains, for one rank."""
    context = BuildContext(
        batch_size=trial.batch_per_pass,
        rank=rank,
        num_ranks=trial.num_processes,
        seed=trial.seed,
        device=trial.device,
        accumulation=trial.accumulation,
    )
    if trial.workload in BUILT_IN:
        return BUILDERS[trial.workload](BUILT_IN[trial.workload](**trial.options), context)
    return build_own(trial.workload, trial.options, context)


def build_own(spec: str, options: Mapping[str, Any], context: BuildContext) -> Workload:
    """Call the user's `build` with its options and the context arguments it declares."""
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
    """Import a file by its path, with its own directory searched first, as running it would.

    A file inside a package is imported as its module, for the sake of relative imports, with the directory above the
    package searched too.
    """
    root = find_root(path)
    sys.path[:0] = dict.fromkeys((str(path.parent), str(root), str(Path.cwd())))
    if root != path.parent:
        parts = path.relative_to(root).with_suffix("").parts
        return importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def read_answer(answer: object, where: str) -> Workload:
    """What `build` returned, as a `Workload`: one itself, a dict, or model, batches, loss and perhaps optimizer."""
    workload = answer if isinstance(answer, Workload) else _read_parts(answer, where)
    if not isinstance(workload.model, nn.Module):
        raise UsageError(f"{where} returned a {_kind(workload.model)} as the model: {EXPECTED}")
    if not hasattr(workload.batches, "__iter__"):
        raise UsageError(f"{where} returned a {_kind(workload.batches)} as the batches: return an iterable")
    if not callable(workload.loss):
        raise UsageError(f"{where} returned a {_kind(workload.loss)} as the loss: use loss(model, batch)")
    if workload.optimizer is not None and not callable(workload.optimizer):
        raise UsageError(
            f"{where} returned a {_kind(workload.optimizer)} as the optimizer: return a function that makes one, such"
            f" as lambda p: torch.optim.{_name_optimizer(workload.optimizer)}(p)"
        )
    return workload


def _read_parts(answer: object, where: str) -> Workload:
    """The parts that a dict names, or those of a tuple or list in their order."""
    if isinstance(answer, Mapping):
        known = [field.name for field in fields(Workload)]
        unknown = [str(key) for key in answer if key not in known]
        missing = [name for name in ("model", "batches", "loss") if name not in answer]
        if unknown or missing:
            wrong = [f"the unknown key {', '.join(unknown)}"] if unknown else []
            wrong += [f"no {', '.join(missing)}"] if missing else []
            raise UsageError(f"{where} returned a dict with {' and '.join(wrong)}: its keys are {', '.join(known)}")
        return Workload(**answer)
    if not isinstance(answer, tuple | list) or len(answer) not in (3, 4):
        size = f" of {len(answer)}" if isinstance(answer, tuple | list) else ""
        raise UsageError(f"{where} returned a {_kind(answer)}{size}: {EXPECTED}")
    return Workload(**dict(zip(("model", "batches", "loss", "optimizer"), answer, strict=False)))


def _name_optimizer(optimizer: object) -> str:
    return _kind(optimizer) if hasattr(torch.optim, _kind(optimizer)) else "Adam"


def _kind(value: object) -> str:
    return type(value).__name__

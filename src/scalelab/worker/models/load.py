"""From a trial to the workload that a rank trains: the side that imports torch."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from scalelab.errors import UsageError
from scalelab.records.trial import Trial
from scalelab.worker.batches.stream import load_tests, share_samples
from scalelab.worker.models.gpt2 import build_gpt2
from scalelab.worker.models.moe import build_moe
from scalelab.worker.models.networks import build_lenet, build_mlp, build_resnet18
from scalelab.worker.models.transformer import build_transformer
from scalelab.worker.strategies.plans import OWN
from scalelab.workloads.catalogue import BUILT_IN
from scalelab.workloads.source import CONTEXT_NAMES, LIBRARY_FILE, find_root, is_in_library
from scalelab.workloads.workload import BuildContext, Workload

BUILDERS: dict[str, Callable[[Any, BuildContext], Workload]] = {
    "gpt2": build_gpt2,
    "lenet": build_lenet,
    "mlp": build_mlp,
    "moe": build_moe,
    "resnet18": build_resnet18,
    "transformer": build_transformer,
}

Loss = Callable[[nn.Module, Any], torch.Tensor]
OUTPUT_NAMES = {"input", "inputs", "out", "output", "outputs", "pred", "preds", "prediction", "predictions", "logits"}
OUTPUT_NAMES |= {"scores", "y_pred", "y_hat"}
TARGET_NAMES = {"target", "targets", "label", "labels", "y", "y_true", "truth", "ground_truth", "gt", "mask", "masks"}
TARGET_NAMES |= {"true", "tgt", "expected", "reference"}
"""What people call the parameters of a criterion; one of them is enough, where the other is not called so:"""
MODEL_NAMES, BATCH_NAMES = {"model", "net", "network", "module", "m"}, {"batch", "b", "data", "sample", "samples"}
EXPECTED = "return model, batches and loss (and optionally a function that creates the optimizer from the parameters)"
FUNCTIONS = {
    "schedule": "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 30)",
    "evaluate": "a function of model and batch",
}
"""Parts that must be functions, and what to write."""
NUMBERS = {"clip_norm": float, "accumulation": int, "batch_dim": int, "tokens_per_sample": float}
NUMBERS |= {"flops_per_sample": float}
"""Parts that must be numbers."""


def load_workload(trial: Trial, rank: int) -> Workload:
    """Build what the trial trains, for one rank."""
    context = BuildContext(
        batch_size=trial.batch_per_pass,
        rank=trial.mesh.find_data_rank(rank) if trial.joins_group else rank,
        num_ranks=trial.num_data_ranks if trial.joins_group else trial.num_processes,
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
    if is_in_library(spec):
        function, _, model = spec.partition(":")
        file, options = str(LIBRARY_FILE), {**options, "model": model}
    module = import_file(Path(file))
    OWN[spec] = module
    build = getattr(module, function, None)
    if not callable(build):
        raise UsageError(f"{file} has no function {function!r}")
    parameters = inspect.signature(build).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and not is_in_library(spec)
    known = {field.name: getattr(context, field.name) for field in fields(context)}
    wanted = {name: known[name] for name in CONTEXT_NAMES if name in parameters or takes_any}
    workload = read_answer(build(**{**wanted, **options}), f"{Path(file).name}:{function}")
    batches = share_samples(workload.batches, context, workload.accumulation, is_split="rank" in parameters)
    return replace(workload, batches=batches, test_batches=load_tests(workload.test_batches, context.batch_size))


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
    if not hasattr(workload.batches, "__iter__") and not isinstance(workload.batches, Dataset):
        raise UsageError(f"{where} returned a {_kind(workload.batches)} as the batches: return an iterable")
    for loss in _list_values(workload.loss):
        if not callable(loss):
            raise UsageError(f"{where} returned a {_kind(loss)} as the loss: use loss(model, batch)")
    for optimizer in _list_values(workload.optimizer):
        if not callable(optimizer):
            raise UsageError(
                f"{where} returned a {_kind(optimizer)} as the optimizer: return a function that makes one, such as"
                f" lambda p: torch.optim.{_name_optimizer(optimizer)}(p)"
            )
    _check_turns(workload, where)
    _check_rest(workload, where)
    return workload


def _check_turns(workload: Workload, where: str) -> None:
    """Losses by submodule and their optimizers must be of the same submodules."""
    turns, optimizers = workload.loss, workload.optimizer
    if isinstance(turns, Mapping) and not turns:
        raise UsageError(f"{where} returned no loss in its dict of losses: name a submodule and its loss")
    if isinstance(optimizers, Mapping) and (not isinstance(turns, Mapping) or set(optimizers) - set(turns)):
        names = ", ".join(turns) if isinstance(turns, Mapping) else "none"
        raise UsageError(
            f"{where} returned optimizers of {', '.join(optimizers)} and losses of {names}: name the same submodules"
        )


def _check_rest(workload: Workload, where: str) -> None:
    """The optional parts: functions, and numbers above 0."""
    for name, advice in FUNCTIONS.items():
        value = getattr(workload, name)
        if value is not None and not callable(value):
            raise UsageError(f"{where} returned a {_kind(value)} as {name}: return {advice}")
    for name, kind in NUMBERS.items():
        value, least = getattr(workload, name), 0 if name == "batch_dim" else 1 if kind is int else 5e-324
        is_number = isinstance(value, kind | int) and not isinstance(value, bool)
        if value is not None and not (is_number and least <= value < math.inf):
            words = f"whole number from {least}" if kind is int else "number > 0"
            raise UsageError(f"{where} returned {value!r} as {name}: use a {words}")
    if workload.evaluate is not None and workload.test_batches is None:
        raise UsageError(f"{where} returned evaluate without test_batches: add what it is called with")


def _list_values(value: Any) -> list[Any]:
    """The values of a dict, or the one value; None is none."""
    if isinstance(value, Mapping):
        return list(value.values())
    return [] if value is None else [value]


def _read_parts(answer: object, where: str) -> Workload:
    """The parts that a dict names, or those of a tuple or list in their order."""
    if isinstance(answer, Mapping):
        known = [field.name for field in fields(Workload)]
        unknown = [str(key) for key in answer if key not in known]
        missing = [name for name in ("model", "batches") if name not in answer]
        if unknown or missing:
            wrong = [f"the unknown key {', '.join(unknown)}"] if unknown else []
            wrong += [f"no {', '.join(missing)}"] if missing else []
            raise UsageError(f"{where} returned a dict with {' and '.join(wrong)}: its keys are {', '.join(known)}")
        return Workload(**answer)
    if not isinstance(answer, tuple | list) or len(answer) not in (2, 3, 4):
        size = f" of {len(answer)}" if isinstance(answer, tuple | list) else ""
        raise UsageError(f"{where} returned a {_kind(answer)}{size}: {EXPECTED}")
    return Workload(**dict(zip(("model", "batches", "loss", "optimizer"), answer, strict=False)))


def _name_optimizer(optimizer: object) -> str:
    return _kind(optimizer) if hasattr(torch.optim, _kind(optimizer)) else "Adam"


def _kind(value: object) -> str:
    return type(value).__name__


def as_loss(loss: Loss | nn.Module | None) -> Loss:
    """A criterion such as `nn.MSELoss()` or `F.cross_entropy` becomes a loss of model and batch; so does none."""
    if loss is None:
        return read_loss
    if not isinstance(loss, nn.Module) and not is_criterion(loss):
        return loss
    criterion: Callable[..., torch.Tensor] = loss

    def loss_of_pair(model: nn.Module, batch: Any) -> torch.Tensor:
        if isinstance(batch, Mapping):
            raise UsageError(explain_named_batch(loss, list(batch)))
        output = model(batch[0])
        try:
            result: torch.Tensor = criterion(output, batch[1])
        except (RuntimeError, ValueError) as error:
            if has_classes_last(output, batch[1]):
                raise UsageError(explain_tokens(loss, output.shape, batch[1].shape)) from error
            raise
        return result

    return loss_of_pair


def has_classes_last(output: Any, target: Any) -> bool:
    """Whether an output has scores of classes for every token: torch's criteria expect the classes second."""
    is_pair = isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)
    return is_pair and target.ndim > 1 and output.shape[:-1] == target.shape and not target.is_floating_point()


def explain_tokens(criterion: Any, output: Sequence[int], target: Sequence[int]) -> str:
    """What to write where a criterion meets an output of every token."""
    name = getattr(criterion, "__name__", "criterion")
    return (
        f"the loss takes classes second, and the model's output is {tuple(output)} for targets {tuple(target)}: return"
        f" lambda model, batch: {name}(model(batch[0]).flatten(0, -2), batch[1].flatten()) as the loss"
    )


def explain_named_batch(criterion: Any, keys: Sequence[Any]) -> str:
    """What to write where a criterion meets a batch that is a dict."""
    name = getattr(criterion, "__name__", "criterion")
    first, second = (*map(repr, keys), "…", "…")[:2]
    return (
        f"the loss takes an output and a target, and a batch is a dict of {', '.join(map(str, keys))}: return"
        f" lambda model, batch: {name}(model(batch[{first}]), batch[{second}]), with your own keys, as the loss"
    )


def read_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss that a model returns itself: alone, as `loss` of its output, or as the last of several outputs."""
    named: Mapping[str, Any] = batch if isinstance(batch, Mapping) else {}
    given = () if named else batch if isinstance(batch, list | tuple) else (batch,)
    try:
        output = model(*given, **named)
    except TypeError as error:
        if takes(model, given, named):
            raise
        names = ", ".join(named) or f"{len(given)} values"
        raise UsageError(
            f"there is no loss, and the model does not take a batch of {names} to return one itself: add a loss, such"
            " as nn.CrossEntropyLoss() of the model's output and the batch's second value"
        ) from error
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    found = found[-1] if isinstance(found, list | tuple) and found else found
    if isinstance(found, torch.Tensor) and found.requires_grad >= torch.is_grad_enabled() and found.ndim < 2:
        return found if found.ndim == 0 else found.mean()
    kind = f"tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(output).__name__
    raise UsageError(f"build() returned no loss, and its model a {kind}: return model, batches and loss from build()")


def takes(model: nn.Module, given: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether the model inside its wrappers can be called so."""
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    try:
        inspect.signature(model.forward).bind(*given, **named)
    except TypeError:
        return False
    return True


def is_criterion(function: Callable[..., Any]) -> bool:
    """Whether a function takes an output and a target, as those of torch.nn.functional do, by their names."""
    try:
        names = [name.lower().strip("_") for name in inspect.signature(function).parameters][:2]
    except (TypeError, ValueError):  # built in, without a signature
        return False
    if len(names) < 2 or names[0] in MODEL_NAMES or names[1] in BATCH_NAMES:
        return False
    return names[0] in OUTPUT_NAMES or names[1] in TARGET_NAMES

"""What a model takes and gives, found by trying: for `scalelab init`.

    python -m scalelab.worker.models.inspection REQUEST ANSWER

REQUEST and ANSWER are JSON files. The model is made in this process, with the arguments of its user. What its first
layers expect suggests inputs; the first that passes forward and backward is the answer. Nothing is measured.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

NUM_SAMPLES = 4
LENGTH = 16
"""Of a sequence."""
SIDES = (32, 28, 64, 224)
"""Of an image, in the order in which they are tried."""
MOST_TRIES = 300
TARGETS = ("targets", "target", "labels", "label", "y")
"""What forward calls the answers, where it computes the loss itself."""

Input = dict[str, Any]


def suggest_inputs(model: nn.Module) -> list[Input]:
    """Inputs of one sample that the layers expect, those of the first layers first."""
    found: list[Input] = []
    for layer in model.modules():
        found += [one for one in expect_of(layer) if one not in found]
    return found + [one for one in FALLBACKS if one not in found]


def expect_of(layer: nn.Module) -> Iterator[Input]:
    match layer:
        case nn.Embedding():
            yield whole_numbers([LENGTH], layer.num_embeddings)
            yield whole_numbers([], layer.num_embeddings)
        case nn.Conv2d():
            yield from (real_numbers([layer.in_channels, side, side]) for side in SIDES)
        case nn.Conv1d():
            yield real_numbers([layer.in_channels, 4 * LENGTH])
        case nn.Conv3d():
            yield real_numbers([layer.in_channels, LENGTH, LENGTH, LENGTH])
        case nn.RNNBase():
            yield real_numbers([LENGTH, layer.input_size])
        case nn.MultiheadAttention():
            yield real_numbers([LENGTH, layer.embed_dim])
        case nn.Linear():
            yield real_numbers([layer.in_features])
            yield real_numbers([LENGTH, layer.in_features])


def real_numbers(shape: list[int]) -> Input:
    return {"kind": "float", "shape": shape}


def whole_numbers(shape: list[int], high: int) -> Input:
    return {"kind": "int", "shape": shape, "high": high}


FALLBACKS = [real_numbers([3, 32, 32]), real_numbers([1, 28, 28]), real_numbers([10]), whole_numbers([LENGTH], 100)]


def draw(one: Input) -> torch.Tensor:
    size = (NUM_SAMPLES, *one["shape"])
    return torch.randint(one["high"], size) if one["kind"] == "int" else torch.randn(size)


def list_names(model: nn.Module) -> tuple[list[str], str | None]:
    """The parameters of forward that must be given, at least one, and the one that takes the answers, if any."""
    parameters = inspect.signature(model.forward).parameters.values()
    plain = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    needed = [one.name for one in plain if one.default is one.empty and one.name not in TARGETS]
    target = next((one.name for one in parameters if one.name in TARGETS), None)
    return needed or [one.name for one in plain[:1]], target


def is_keyword(model: nn.Module, name: str) -> bool:
    """Whether forward takes a parameter only by its name."""
    return inspect.signature(model.forward).parameters[name].kind is inspect.Parameter.KEYWORD_ONLY


def try_inputs(model: nn.Module) -> dict[str, Any]:
    """The first inputs that pass, and what came out; the error of the first try where none does."""
    names, target = list_names(model)
    suggested = suggest_inputs(model)
    first: str | None = None
    for combination in itertools.islice(itertools.product(suggested, repeat=len(names)), MOST_TRIES):
        for targeted in [target, None] if target else [None]:
            try:
                output = see_output(model, names, combination, targeted)
            except Exception as error:  # noqa: BLE001 - whatever it is, this input is not it
                first = first or f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            pairs = zip(names, combination, strict=True)
            inputs = [{"name": name, "is_keyword": is_keyword(model, name), **one} for name, one in pairs]
            unused = [name for name, one in model.named_parameters() if one.requires_grad and one.grad is None]
            return {"inputs": inputs, "target": targeted, "output": output, "unused": unused}
    return {"error": f"forward({', '.join(names)}) took none of {len(suggested)} synthetic inputs; the first: {first}"}


def see_output(model: nn.Module, names: Sequence[str], inputs: Sequence[Input], target: str | None) -> dict[str, Any]:
    """Forward and backward of one batch, and what came out."""
    batch = {name: draw(one) for name, one in zip(names, inputs, strict=True)}
    answers = draw(inputs[0]) if inputs[0]["kind"] == "int" else torch.randint(2, (NUM_SAMPLES,))
    named = {name: batch.pop(name) for name in names if is_keyword(model, name)}
    output = model(*batch.values(), **named, **({target: answers} if target else {}))
    described = describe_output(output, inputs)
    if target and described["kind"] != "loss":
        raise ValueError(f"with {target} it gave no loss")
    model.zero_grad()
    pick(output, described["path"]).float().mean().backward()
    return described


def pick(output: Any, path: Sequence[Any]) -> torch.Tensor:
    """Follow a path of keys and, with a dot in front, attributes."""
    for step in path:
        output = getattr(output, step[1:]) if str(step).startswith(".") else output[step]
    return torch.as_tensor(output)


def describe_output(output: Any, inputs: Sequence[Input]) -> dict[str, Any]:
    """Where the tensor to learn by is, and what it is: a loss, classes, tokens or values."""
    path = find_tensor(output)
    found = pick(output, path)
    shape = list(found.shape)
    if found.ndim == 0:
        kind = "loss"
    elif shape[0] != NUM_SAMPLES:
        raise ValueError(f"{shape[0]} rows for {NUM_SAMPLES} samples")
    elif found.ndim == 2 and shape[1] > 1:
        kind = "classes"
    elif found.ndim == 3 and inputs[0]["kind"] == "int" and shape[1] == inputs[0]["shape"][0]:
        kind = "tokens"
    else:
        kind = "values"
    return {"kind": kind, "path": path, "shape": shape[1:]}


def find_tensor(output: Any) -> list[Any]:
    """The way to a loss, or to the first floating-point tensor of an output."""
    if isinstance(output, torch.Tensor):
        return []
    for name in ("loss", "logits"):
        if isinstance(getattr(output, name, None), torch.Tensor):
            return [f".{name}"]
    entries = output.items() if isinstance(output, dict) else enumerate(output)
    tensors = {key: one for key, one in entries if isinstance(one, torch.Tensor) and one.is_floating_point()}
    scalars = [key for key, one in tensors.items() if one.ndim == 0]
    return [(scalars or list(tensors))[0]]


def inspect_model(request: dict[str, Any]) -> dict[str, Any]:
    """Import, make and try the model; what went wrong is an answer too, with the stage."""
    sys.path.insert(0, request["directory"])
    try:
        module = importlib.import_module(request["module"])
    except Exception as error:  # noqa: BLE001
        return {"stage": "import", "error": describe_error(error)}
    kind = getattr(module, request["name"], None)
    if kind is None:
        known = [name for name, one in vars(module).items() if inspect.isclass(one) and issubclass(one, nn.Module)]
        return {"stage": "name", "error": request["name"], "known": known}
    torch.manual_seed(0)
    try:
        model = eval(f"{request['name']}({request['arguments']})", vars(module))
    except Exception as error:  # noqa: BLE001
        needed = list_needed(kind)
        return {
            "stage": "make",
            "error": describe_error(error),
            "needed": list(needed),
            "call": ", ".join(needed.values()),
        }
    if not isinstance(model, nn.Module):
        return {"stage": "type", "error": type(model).__name__}
    found = try_inputs(model.train())
    num_parameters = sum(one.numel() for one in model.parameters())
    return {"stage": "forward", "num_parameters": num_parameters, **found}


def list_needed(kind: Any) -> dict[str, str]:
    """The arguments without a default of what makes the model, each as it could be given: a Config as `Config()`."""
    try:
        parameters = inspect.signature(kind, eval_str=True).parameters.values()
    except Exception:  # noqa: BLE001 - without a signature, or with annotations that name nothing
        return {}
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [one for one in parameters if one.default is one.empty and one.kind not in fixed]
    return {one.name: f"{one.name}={suggest_value(one.annotation)}" for one in needed}


def suggest_value(annotation: Any) -> str:
    """A class of the user's own, made with its defaults; nothing of Python, of torch, or without an annotation."""
    is_own = inspect.isclass(annotation) and annotation.__module__.partition(".")[0] not in (
        "builtins",
        "inspect",
        "torch",
    )
    return f"{annotation.__name__}()" if is_own else "…"


def describe_error(error: Exception) -> str:
    traceback.print_exc()
    return f"{type(error).__name__}: {error}".splitlines()[0]


def main() -> None:
    request, answer = map(Path, sys.argv[1:])
    found = inspect_model(json.loads(request.read_text(encoding="utf-8")))
    answer.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()

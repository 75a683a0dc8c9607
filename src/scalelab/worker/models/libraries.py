"""Models of other libraries by one line: `--workload hf:gpt2`, `timm:resnet18`, `diffusers:UNet2DModel`.

Each function is a `build` like a user's own, whose first parameter is what stands behind the colon; the others are
flags. Weights are random and data is synthetic, which changes no time; nothing is downloaded. A configuration comes
from a file or a directory, from the local cache of the hub, or from the library's own defaults, and any other flag
replaces one of its values: `--num-hidden-layers 2`.

timm imports torchvision for its image transforms, of which a model needs nothing. torchvision's wheels for GPUs do not
load beside a torch for CPUs, so where it cannot be imported, placeholders take its place until timm is loaded.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from scalelab.errors import UsageError
from scalelab.workloads.workload import NUM_POOLED_BATCHES as NUM_BATCHES

TASKS = ("MaskedLM", "CausalLM", "Seq2SeqLM", "ImageClassification")
"""What a configuration that names no class is tried as, in this order."""


def hf(
    model: str, batch_size: int, rank: int, num_ranks: int, seed: int, sequence: int = 128, **overrides: Any
) -> dict[str, Any]:
    """A model of transformers from its configuration, on random tokens or pixels."""
    transformers = import_library("transformers")
    config = load_config(transformers, model, overrides)
    made = make_transformer(transformers, config, model)
    kind = made.main_input_name
    if kind not in ("input_ids", "pixel_values"):
        raise UsageError(f"hf:{model} takes {kind}, which has no synthetic data here: write a build() for it")
    count = NUM_BATCHES * num_ranks * batch_size
    generator = torch.Generator().manual_seed(seed)
    if kind == "pixel_values":
        pixels = torch.randn(count, config.num_channels, *find_size(config), generator=generator)
        labels = torch.randint(config.num_labels, (count,), generator=generator)
        return {"model": made, "batches": split_steps({kind: pixels, "labels": labels}, rank, num_ranks, batch_size)}
    length = min(sequence, getattr(config, "max_position_embeddings", None) or sequence)
    tokens = torch.randint(config.get_text_config().vocab_size, (count, length), generator=generator)
    batches = split_steps({kind: tokens, "labels": tokens}, rank, num_ranks, batch_size)
    return {"model": made, "batches": batches, "tokens_per_sample": length}


def timm(
    model: str, batch_size: int, rank: int, num_ranks: int, seed: int, image_size: int = 0, **overrides: Any
) -> dict[str, Any]:
    """An image model of timm on random pixels; image_size 0 is the model's own."""
    with torchvision_or_none():
        library = import_library("timm")
        try:
            made: Any = library.create_model(model, pretrained=False, **overrides)
        except RuntimeError as error:
            raise UsageError(f"timm:{model}: {error}; timm.list_models() has the names") from error
    channels, *size = made.default_cfg["input_size"]
    size = [image_size, image_size] if image_size else size
    generator = torch.Generator().manual_seed(seed)
    count = NUM_BATCHES * num_ranks * batch_size
    pixels = torch.randn(count, channels, *size, generator=generator)
    labels = torch.randint(made.num_classes, (count,), generator=generator)
    batches = split_steps({"pixels": pixels, "labels": labels}, rank, num_ranks, batch_size)
    return {"model": made, "batches": [tuple(one.values()) for one in batches], "loss": nn.CrossEntropyLoss()}


def diffusers(
    model: str, batch_size: int, rank: int, num_ranks: int, seed: int, image_size: int = 0, **overrides: Any
) -> dict[str, Any]:
    """A network of diffusers that predicts noise, on random latents; image_size 0 is the model's own."""
    library = import_library("diffusers")
    name, settings = read_diffusers(model)
    kind = getattr(library, name, None)
    if kind is None or not hasattr(kind, "from_config"):
        raise UsageError(f"diffusers:{model}: diffusers has no model {name!r}: use a class such as UNet2DModel")
    made: Any = kind.from_config(settings | {key: read_list(value) for key, value in overrides.items()})
    config = made.config
    size = image_size or config.get("sample_size") or 32
    sizes = [size, size] if isinstance(size, int) else list(size)
    generator = torch.Generator().manual_seed(seed)
    count = NUM_BATCHES * num_ranks * batch_size
    data = {"sample": torch.randn(count, config["in_channels"], *sizes, generator=generator)}
    data |= {"noise": torch.randn(count, config["out_channels"], *sizes, generator=generator)}
    data |= {"timestep": torch.randint(1000, (count,), generator=generator)}
    if config.get("cross_attention_dim") and "encoder_hidden_states" in inspect.signature(kind.forward).parameters:
        width = config["cross_attention_dim"]
        data["encoder_hidden_states"] = torch.randn(count, 8, width, generator=generator)

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        inputs = {name: value for name, value in batch.items() if name != "noise"}
        return nn.functional.mse_loss(model(**inputs, return_dict=False)[0], batch["noise"])

    return {"model": made, "batches": split_steps(data, rank, num_ranks, batch_size), "loss": loss}


def load_classes(spec: str) -> None:
    """Import what the model of a workload such as `hf:gpt2` is made of, without making it."""
    library, _, model = spec.partition(":")
    if library == "hf":
        transformers = import_library("transformers")
        find_class(transformers, load_config(transformers, model, {}))
    elif library == "diffusers":
        getattr(import_library("diffusers"), read_diffusers(model)[0])
    else:
        with torchvision_or_none():
            import_library("timm")


def import_library(name: str) -> Any:
    """The library; a missing one is named with how to install it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] != name:
            raise
        advice = " --no-deps (its torchvision may replace torch)" if name == "timm" else ""
        raise UsageError(f"{name} is not installed: pip install {name}{advice}") from error


def load_config(transformers: Any, model: str, overrides: dict[str, Any]) -> Any:
    """A configuration file or directory, one from the local cache, or the defaults of a kind of model."""
    try:
        return transformers.AutoConfig.from_pretrained(model, local_files_only=True, **overrides)
    except (OSError, ValueError) as error:
        if Path(model).exists():
            raise UsageError(f"hf:{model} has no configuration that transformers knows: {error}") from error
    try:
        return transformers.AutoConfig.for_model(model, **overrides)
    except (ValueError, KeyError):
        raise UsageError(
            f"hf:{model} is neither a file or directory, nor in the local cache of the hub (HF_HOME), nor a kind of"
            " model such as gpt2, llama or vit"
        ) from None


def make_transformer(transformers: Any, config: Any, model: str) -> Any:
    """The model with random weights."""
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id or 0
    kind = find_class(transformers, config)
    if kind is None:
        raise UsageError(
            f"hf:{model} has a configuration for which transformers has no class with a loss: write a build() for it"
        )
    return kind._from_config(config)


def find_class(transformers: Any, config: Any) -> Any:
    """The class that a configuration names, or that of the first task that knows it; None: there is none."""
    kind = getattr(transformers, (config.architectures or [""])[0] or " ", None)
    for task in () if kind else TASKS:
        mapping = getattr(transformers, f"AutoModelFor{task}")._model_mapping
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    return kind


def read_list(value: Any) -> Any:
    """A list or tuple where text is one, as a flag gives it: --block-out-channels '(32, 64)'."""
    is_list = isinstance(value, str) and value.strip().startswith(("(", "["))
    return ast.literal_eval(value) if is_list else value


def find_size(config: Any) -> list[int]:
    """Height and width of the pixels that an image model takes."""
    size = getattr(config, "image_size", 224)
    return [size, size] if isinstance(size, int) else list(size)


def read_diffusers(model: str) -> tuple[str, dict[str, Any]]:
    """The class and the settings of a configuration file or directory; otherwise a class with its defaults."""
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    if not path.is_file():
        return model, {}
    settings: dict[str, Any] = json.loads(path.read_text())
    return str(settings.get("_class_name", "")), settings


def split_steps(
    data: dict[str, torch.Tensor], rank: int, num_ranks: int, batch_size: int
) -> list[dict[str, torch.Tensor]]:
    """Batches of one rank: every step's samples are cut over the ranks, so any number of ranks has the same ones."""
    steps = len(next(iter(data.values()))) // (num_ranks * batch_size)
    firsts = [(step * num_ranks + rank) * batch_size for step in range(steps)]
    return [{name: values[first : first + batch_size] for name, values in data.items()} for first in firsts]


@contextmanager
def torchvision_or_none() -> Iterator[None]:
    """Placeholders for torchvision while a library is imported, where it is missing or does not load."""
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError, OSError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        finder = PlaceholderFinder()
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)
    else:
        yield


class Placeholder(type):
    """A class that can be named and asked whether something is one of it."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class PlaceholderModule(ModuleType):
    """A module in which every name is a placeholder."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = Placeholder(name, (), {})
        setattr(self, name, made)
        return made


class PlaceholderFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of torchvision."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:  # noqa: ARG002 - as Python calls it
        is_asked = fullname.partition(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_asked else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return PlaceholderModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""

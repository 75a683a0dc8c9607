"""How a model is split: which of its layers pair up for tensor parallelism, and where a pipeline cuts it.

    gpt2          tp: attention by heads, the feed-forward layer by its hidden width; pp: equal numbers of blocks
    mlp           tp: every two linear layers; pp: equal numbers of layers
    transformer   tp: the feed-forward layers; attention stays whole, for nn.MultiheadAttention packs q, k and v in one
                  parameter that torch cannot split by heads; pp: none, the decoder needs two tensors of the encoder

Sequence parallelism also cuts what lies between split layers, along positions (`list_regions`); `mlp` has none.

A workload of the user's own has its plan beside `build`: `parallelize(model, mesh)` splits the layers over a DeviceMesh
of one axis and returns the model; `split(model, num_stages)` returns the stages of a pipeline, each taking what the one
before returns. An `nn.Sequential` needs no `split`, and a model with a `_tp_plan`, as Hugging Face's have, no
`parallelize`.

GPT-2's head shares the token table, which the first stage of a pipeline looks up and the last multiplies by. Both hold
a copy, and the gradients of the two are added up in every step, so that they stay equal (Shoeybi et al. 2019).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from scalelab.checks import flag
from scalelab.errors import UsageError
from scalelab.records.strategy import STAGES_PER_RANK
from scalelab.records.trial import Trial
from scalelab.worker.models.gpt2 import Attention, Gpt2
from scalelab.workloads.catalogue import BUILT_IN, TransformerOptions
from scalelab.workloads.gpt2_options import Gpt2Options
from scalelab.workloads.workload import Divisible

Pair = tuple[str, str]
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
}
"""By the names of a `_tp_plan`; the last two gather what they compute, as heads do."""
OWN: dict[str, Any] = {}
"""The modules of the user's own workloads, by their names: `build` was found there."""


def check_divisible(trial: Trial) -> None:
    """Reject a mesh that does not divide a built-in model; what has no plan is said when it is split."""
    make: Any = BUILT_IN.get(trial.workload)
    sizes: Divisible | None = getattr(make(**trial.options), "divisible", None) if make else None
    if sizes is None:
        return
    mesh, per_rank = trial.mesh, STAGES_PER_RANK[trial.spreading.pipeline_schedule]
    stages = mesh.pp * per_rank if mesh.pp > 1 else 1
    obstacle = sizes.find_obstacle(mesh.tp if sizes.tp[0] > 1 else 1, stages if sizes.pp[0] > 1 else 1, mesh.ep)
    if obstacle is not None:
        raise UsageError(f"{obstacle}: use a divisor")
    if trial.spreading.sequence_parallel and sizes.tp[0] > 1:
        check_sequences(trial)


def check_sequences(trial: Trial) -> None:
    """Reject sequence parallelism of a built-in model whose samples have no positions, or whose ranks do not divide."""
    options: Any = BUILT_IN[trial.workload](**trial.options)
    if isinstance(options, Gpt2Options):
        lengths = {"sequence": options.num_tokens}
    elif isinstance(options, TransformerOptions):
        lengths = {"src_length": options.src_length, "tgt_length": options.tgt_length}
    else:
        raise UsageError(
            f"--sequence-parallel cuts samples along their positions, and those of --workload {trial.workload} have"
            " none: use gpt2 or transformer, or drop it"
        )
    for name, length in lengths.items():
        if length % trial.mesh.tp:
            raise UsageError(
                f"--sequence-parallel cuts sequences into {trial.mesh.tp} equal pieces, got {flag(name)} {length}: use"
                f" a multiple of {trial.mesh.tp}"
            )


def split_layers(model: nn.Module, mesh: DeviceMesh, workload: str, cuts_sequences: bool = False) -> nn.Module:
    """The model with its pairs of layers split over the mesh; where it cuts sequences, with norms on pieces of them."""
    own = getattr(OWN.get(workload), "parallelize", None)
    if cuts_sequences and not list_regions(model):
        raise UsageError(
            f"--workload {workload} has no plan for --sequence-parallel: use gpt2 or transformer, or shard norms in"
            " parallelize(model, mesh) and drop it"
        )
    if own is not None:
        split: nn.Module = own(model, mesh)
        return split
    given: dict[str, str] | None = getattr(model, "_tp_plan", None)
    if given:
        parallelize_module(model, mesh, {name: find_style(name, style) for name, style in given.items()})
        return model
    pairs = list_pairs(model, mesh.size())
    if not pairs:
        raise UsageError(
            f"--workload {workload} has no plan for tensor parallelism: write parallelize(model, mesh) beside build, or"
            " use gpt2, mlp or transformer"
        )
    for module in model.modules():
        if isinstance(module, Attention):
            gather_heads(module, mesh.size())
    outside = Shard(1) if cuts_sequences else Replicate()
    styles: dict[str, ParallelStyle] = {first: ColwiseParallel(input_layouts=outside) for first, _ in pairs}
    styles |= {second: RowwiseParallel(output_layouts=outside) for _, second in pairs}
    parallelize_module(model, mesh, styles)
    for region in list_regions(model) if cuts_sequences else []:
        cut_sequences(model, mesh, region)
    return model


@dataclass(frozen=True)
class Region:
    """Where a rank has its piece of every sequence: to the last of some norms, from a module's output or the first."""

    norms: tuple[str, ...]
    after: str = ""


def list_regions(model: nn.Module) -> list[Region]:
    """Between the layers that need whole sequences; empty: the model has no plan for it.

    In GPT-2 all blocks are one region. In nn.Transformer attention is whole, so every feed-forward layer has its own.
    """
    if isinstance(model, Gpt2):
        inner = [f"blocks.{number}.norm{place}" for number in range(len(model.blocks)) for place in (1, 2)]
        return [Region((*inner, "norm"), after="drop")]
    if isinstance(model, nn.Transformer):
        names = [name for name, part in model.named_modules() if hasattr(part, "linear1")]
        lasts = [(name, 3 if hasattr(model.get_submodule(name), "norm3") else 2) for name in names]
        return [Region((f"{name}.norm{last - 1}", f"{name}.norm{last}")) for name, last in lasts]
    return []


def cut_sequences(model: nn.Module, mesh: DeviceMesh, region: Region) -> None:
    """Cut activations where a region begins, gather them where it ends; the gradients of its norms are added up."""
    whole, piece = Replicate(), Shard(1)
    if region.after:
        begin = PrepareModuleOutput(output_layouts=whole, desired_output_layouts=piece)
        parallelize_module(model.get_submodule(region.after), mesh, begin)
    else:
        cut = PrepareModuleInput(input_layouts=whole, desired_input_layouts=piece, use_local_output=True)
        parallelize_module(model.get_submodule(region.norms[0]), mesh, cut)
    for name in region.norms:
        norm = model.get_submodule(name)
        parallelize_module(norm, mesh, SequenceParallel(use_local_output=True))
        for parameter in norm.parameters():
            parameter.register_hook(add_pieces)
    end = PrepareModuleOutput(output_layouts=piece, desired_output_layouts=whole)
    parallelize_module(model.get_submodule(region.norms[-1]), mesh, end)


def add_pieces(gradient: torch.Tensor) -> torch.Tensor:
    """The sum of the ranks' gradients; `fully_shard` adds them up by itself."""
    return gradient.redistribute(placements=[Replicate()]) if isinstance(gradient, DTensor) else gradient


def find_style(name: str, style: str) -> ParallelStyle:
    """How a `_tp_plan` of Hugging Face's models splits a layer; raises `UsageError` for styles that torch lacks."""
    if style not in STYLES:
        raise UsageError(
            f"_tp_plan splits {name} by {style!r}, which is not supported: use {', '.join(STYLES)}, or write"
            " parallelize(model, mesh) beside build"
        )
    return STYLES[style]()


def list_pairs(model: nn.Module, num_ranks: int) -> list[Pair]:
    """The names of the layers that are split by columns and by rows; empty: the model has no plan."""
    if isinstance(model, Gpt2):
        names = [f"blocks.{number}" for number in range(len(model.blocks))]
        return [pair for name in names for pair in _pair_block(name)]
    if isinstance(model, nn.Transformer):
        names = [name for name, part in model.named_modules() if hasattr(part, "linear1")]
        return _check_widths(model, [(f"{name}.linear1", f"{name}.linear2") for name in names], num_ranks)
    if isinstance(model, nn.Sequential):
        linears = [name for name, part in model.named_children() if isinstance(part, nn.Linear)]
        return _check_widths(model, list(zip(linears[::2], linears[1::2], strict=False)), num_ranks)
    return []


def _pair_block(name: str) -> list[Pair]:
    return [(f"{name}.attention.qkv", f"{name}.attention.out"), (f"{name}.up", f"{name}.down")]


def _check_widths(model: nn.Module, pairs: list[Pair], num_ranks: int) -> list[Pair]:
    for first, _ in pairs:
        width = int(model.get_submodule(first).out_features)  # type: ignore[arg-type]
        if width % num_ranks:
            raise UsageError(f"tp={num_ranks} does not divide the {width} columns of layer {first}: use a divisor")
    return pairs


def gather_heads(attention: Attention, num_ranks: int) -> None:
    """Order the rows of q, k and v by rank, so that an equal cut gives each rank q, k and v of its own heads."""
    order = order_heads(3 * attention.num_heads * attention.head_size, num_ranks)
    with torch.no_grad():
        for parameter in (attention.qkv.weight, attention.qkv.bias):
            parameter.copy_(parameter[order].clone())
    attention.num_heads //= num_ranks
    attention.num_pieces = num_ranks


def order_heads(num_rows: int, num_ranks: int) -> torch.Tensor:
    """Which row of q, k and v comes where: those of the first rank's heads first."""
    return torch.arange(num_rows).view(3, num_ranks, -1).transpose(0, 1).flatten()


class Gpt2Stage(nn.Module):
    """Some blocks of a GPT-2; the first stage also embeds, the last one makes logits."""

    def __init__(self, model: Gpt2, first: int, last: int) -> None:
        super().__init__()
        self.is_first, self.is_last = first == 0, last == len(model.blocks)
        if self.is_first:
            self.positions, self.drop = model.positions, model.drop
        if self.is_first or self.is_last:
            self.tokens = model.tokens if self.is_first else copy_embedding(model.tokens)
        self.blocks = model.blocks[first:last]
        if self.is_last:
            self.norm = model.norm

    @property
    def tied(self) -> nn.Parameter | None:
        """The table that first and last stage share; None: it is not in two places."""
        has_copy = self.is_first != self.is_last
        table: Any = self.tokens.weight if has_copy else None
        return table if isinstance(table, nn.Parameter) else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_first:
            x = self.drop(self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device)))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight) if self.is_last else x


def copy_embedding(tokens: nn.Embedding) -> nn.Embedding:
    """A copy with a storage of its own; views of a deep copy of fake tensors would not share theirs."""
    return nn.Embedding(tokens.num_embeddings, tokens.embedding_dim, _weight=tokens.weight.detach().clone())


def list_tied(stage: nn.Module) -> list[nn.Parameter]:
    """The weights of a stage that another one shares."""
    tied = getattr(stage, "tied", None)
    return [] if tied is None else [tied]


def cut_stages(model: nn.Module, num_stages: int, workload: str) -> Sequence[nn.Module]:
    """The stages of a pipeline, equally deep."""
    own: Callable[[nn.Module, int], Sequence[nn.Module]] | None = getattr(OWN.get(workload), "split", None)
    if own is not None:
        stages = own(model, num_stages)
        if len(stages) != num_stages:
            raise UsageError(f"split() returned {len(stages)} stages instead of {num_stages}: return one per stage")
        return stages
    if isinstance(model, Gpt2):
        each = _count_each(len(model.blocks), num_stages)
        return [Gpt2Stage(model, first, first + each) for first in range(0, len(model.blocks), each)]
    if isinstance(model, nn.Sequential):
        starts = [number for number, part in enumerate(model) if next(part.parameters(), None) is not None]
        each = _count_each(len(starts), num_stages)
        bounds = [0, *starts[each::each], len(model)]
        return [model[first:last] for first, last in itertools.pairwise(bounds)]
    raise UsageError(
        f"--workload {workload} has no plan for a pipeline: write split(model, num_stages) beside build, or use gpt2 or"
        " mlp"
    )


def _count_each(num_layers: int, num_stages: int) -> int:
    if num_layers % num_stages:
        raise UsageError(f"{num_stages} stages do not divide the {num_layers} layers of the model: use a divisor")
    return num_layers // num_stages


def count_reduced(model: nn.Module, trial: Trial) -> tuple[int, int]:
    """Numbers that the pairs of a split model all-reduce in a step: in forward, and in backward.

    The input of the first layer of an `nn.Sequential` is the batch, which needs no gradient.
    """
    parts: Any = getattr(model, "stages", [model])
    begins = isinstance(parts[0], nn.Sequential)
    linears = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    forward = backward = 0
    for name, part in linears.items():
        style = read_style(part)
        numbers = trial.batch_per_rank * count_positions(name, trial)
        forward += numbers * part.out_features if style == "rows" else 0
        is_input = begins and name.removeprefix("stages.0.") == "0"
        backward += numbers * part.in_features if style == "columns" and not is_input else 0
    return forward, backward


def count_cut(model: nn.Module, trial: Trial) -> tuple[int, int]:
    """Numbers that sequence parallelism gathers where its regions end, or begin in backward; and gradients of norms.

    Without `fully_shard`, which waits for the last pass, every pass adds up the gradients of norms.
    """
    gathered = norms = 0
    for region in list_regions(model):
        sizes = [sum(one.numel() for one in model.get_submodule(name).parameters()) for name in region.norms]
        width = int(model.get_submodule(region.norms[-1]).normalized_shape[0])  # type: ignore[index]
        gathered += trial.batch_per_rank * count_positions(region.norms[-1], trial) * width
        norms += sum(sizes)
    return gathered, norms * (1 if trial.num_data_ranks > 1 else trial.accumulation)


def read_style(layer: nn.Linear) -> str:
    """How a layer is split over the `tp` axis: by columns, by rows (of the transposed weight), or not at all."""
    weight = layer.weight
    if not isinstance(weight, DTensor) or "tp" not in (weight.device_mesh.mesh_dim_names or ()):
        return ""
    place = weight.placements[-1]
    return {0: "columns", 1: "rows"}.get(getattr(place, "dim", -1), "")


def count_positions(name: str, trial: Trial) -> int:
    """Positions of a sample that a layer sees."""
    options: Any = BUILT_IN[trial.workload](**trial.options)
    if isinstance(options, Gpt2Options):
        return options.num_tokens
    if isinstance(options, TransformerOptions):
        return options.src_length if "encoder" in name else options.tgt_length
    return 1


def count_sent(trial: Trial, stage: int) -> int:
    """Numbers of one step's activations between a stage and the next; inside a split pair, a rank's piece of them."""
    options: Any = BUILT_IN[trial.workload](**trial.options)
    if isinstance(options, Gpt2Options):
        return trial.batch_per_rank * options.num_tokens * options.shape.width
    num_stages = STAGES_PER_RANK[trial.spreading.pipeline_schedule] * trial.mesh.pp
    is_inside = (stage + 1) * int(options.depth) // num_stages % 2 == 1
    return trial.batch_per_rank * int(options.dim) // (trial.mesh.tp if is_inside else 1)

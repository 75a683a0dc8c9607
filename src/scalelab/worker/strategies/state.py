"""Model and optimizer as a checkpoint holds them: under the same names and in the same order whatever the strategy.

torch.distributed.checkpoint writes every rank's piece of a tensor and reads any other cut of it, so a training run can
continue on another mesh or number of ranks. Its own names serve `ddp` and `fsdp`; four strategies need more:

    pp      a stage numbers its layers from 0: they get their names in the whole model, and so do copies of tied weights
    tp      gpt2 orders the rows of q, k and v by rank: they are gathered and put back in the model's order
    ep      a rank has plain tensors of its experts: they are written as the shards that they are
    zero1   an optimizer that holds the state of some parameters: each rank gives those

What was read is written over, so that loading needs no memory for a second copy; rows that were put in order are copied
back to where they lie.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Replicate
from torch.utils._pytree import tree_map_only

from scalelab.errors import UsageError
from scalelab.worker.strategies.experts import find_experts
from scalelab.worker.strategies.pipeline import StagedModel
from scalelab.worker.strategies.plans import order_heads
from scalelab.worker.training import Training

Values = dict[str, Any]


class PortableState:
    """The state of a training run, as torch's tree of it and as a checkpoint's."""

    def __init__(self, training: Training) -> None:
        self._model = training.model
        self._outer = training.optimizers
        self._optimizers = tuple(getattr(one, "optim", one) for one in self._outer)
        with quiet_checkpointing():
            self._weights, optimizer = get_state_dict(self._model, self._optimizers)
        self._moments = cast(dict[str, Any], optimizer)
        groups: Any = self._moments["param_groups"]
        self._trained = [list(group["params"]) for group in groups]  # a checkpoint's list those of another rank
        self._ordered = list_ordered(self._model)
        self._sharded = list_sharded(self._model)
        states: Values = {name: self._make_whole(name, one) for name, one in self._moments["state"].items()}
        self.values: dict[str, Any] = {
            "model": self._rename({name: self._make_whole(name, one) for name, one in self._weights.items()}),
            "optimizer": {"state": self._rename(states), "param_groups": groups},
        }
        """What is saved, and what a checkpoint is loaded into."""

    def put_back(self) -> None:
        """Have the training run use what was loaded into `values`."""
        weights = self._take_back(self.values["model"], self._weights)
        states = self._take_back(self.values["optimizer"]["state"], self._moments["state"])
        saved = self.values["optimizer"]["param_groups"]
        groups = [dict(group) | {"params": own} for group, own in zip(saved, self._trained, strict=True)]
        with quiet_checkpointing():
            set_state_dict(
                self._model,
                self._optimizers,
                model_state_dict=weights,
                optim_state_dict={"state": states, "param_groups": groups},
            )
        for outer, inner in zip(self._outer, self._optimizers, strict=True):
            if outer is not inner:
                outer.state = inner.state
                for group, own in zip(outer.param_groups, inner.param_groups, strict=True):
                    group.update({key: value for key, value in own.items() if key != "params"})

    def _rename(self, values: Values) -> Values:
        """By the names in the whole model."""
        return {name_in_whole(self._model, name): value for name, value in values.items()}

    def _make_whole(self, name: str, value: Any) -> Any:
        """A value, or every tensor of an optimizer's state, with the shape and the order of rows of the whole model."""
        if name not in self._ordered and name not in self._sharded:
            return value
        if isinstance(value, Mapping):
            return {key: self._make_whole(name, part) for key, part in value.items()}
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        if name in self._sharded:
            return DTensor.from_local(value, self._sharded[name], [Shard(0)], run_check=False)
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return whole[torch.argsort(order_heads(whole.shape[0], self._ordered[name]))]

    def _take_back(self, loaded: Values, own: Values) -> Values:
        """What was loaded under torch's own names; rows that were put in order are copied to where they lie.

        A rank with two copies of a tied weight updates each: the second gets tensors of its own.
        """
        found: dict[str, Any] = {}
        given: set[str] = set()
        for name, value in own.items():
            called = name_in_whole(self._model, name)
            new = loaded[called] if called not in given else copy_tensors(loaded[called])
            found[name] = self._cut(name, new, value) if name in self._ordered else new
            if name in self._sharded:
                found[name] = tree_map_only(DTensor, DTensor.to_local, found[name])
            given.add(called)
        return found

    def _cut(self, name: str, loaded: Any, own: Any) -> Any:
        if isinstance(own, Mapping):
            return {key: self._cut(name, loaded[key], part) for key, part in own.items()}
        if not isinstance(own, torch.Tensor) or not own.ndim:
            return loaded
        piece = loaded[order_heads(loaded.shape[0], self._ordered[name])]
        local = own
        if isinstance(own, DTensor):
            mesh, local = own.device_mesh, own.to_local()
            places = zip(own.placements, mesh.shape, mesh.get_coordinate() or (), strict=True)
            for placement, size, number in reversed(list(places)):
                piece = piece if isinstance(placement, Replicate) else cut_rows(piece, size, number)
        with torch.no_grad():
            local.copy_(piece)
        return own


def copy_tensors(value: Any) -> Any:
    """A weight, or the optimizer's state of one, in a storage of its own."""
    return tree_map_only(torch.Tensor, torch.Tensor.clone, value)


def cut_rows(tensor: torch.Tensor, size: int, number: int) -> torch.Tensor:
    """One of so many pieces, as torch shards rows; the last ones may have none."""
    pieces = tensor.chunk(size)
    return pieces[number] if number < len(pieces) else tensor[:0]


def list_ordered(model: nn.Module) -> dict[str, int]:
    """The parameters whose rows lie in the order of ranks, and of how many."""
    pieces = {name: int(getattr(part, "num_pieces", 1)) for name, part in model.named_modules()}
    return {f"{name}.qkv.{end}": number for name, number in pieces.items() if number > 1 for end in ("weight", "bias")}


def list_sharded(model: nn.Module) -> dict[str, DeviceMesh]:
    """The weights of experts that are plain tensors, and the mesh that they are shards on."""
    meshes = {name: part.mesh for name, part in find_experts(model).items() if part.mesh is not None}
    return {f"{name.removeprefix('module.')}.{end}": mesh for name, mesh in meshes.items() for end in ("up", "down")}


def name_in_whole(model: nn.Module, name: str) -> str:
    """What a tensor of this rank is called in the whole model."""
    if not isinstance(model, StagedModel):
        return name
    if name not in model.names:
        raise UsageError(
            f"{name.partition('.')[2]} is in no stage under a name of the model: let split() return parts of the model"
            " itself, so that a checkpoint can name them"
        )
    return model.names[name]


@contextmanager
def quiet_checkpointing() -> Iterator[None]:
    """Silence torch's warnings about its deprecated parts, and about saving without a process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

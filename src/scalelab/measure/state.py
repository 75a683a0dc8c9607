"""The state of a training, saved and put back: for steps that must leave no trace."""

from __future__ import annotations

import copy
from typing import Any

import torch

from scalelab.measure.failure import is_out_of_memory
from scalelab.measure.memory_limit import has_room_for
from scalelab.measure.randomness import read_random_state, restore_random_state
from scalelab.measure.training import Training


class SavedState:
    """Parameters, buffers, optimizer, learning rate, loss scale and random state.

    Copies stay in the host's memory, where there is more of it.
    """

    def __init__(self, training: Training) -> None:
        self._optimizer = training.optimizer
        self._keys = {parameter: set(state) for parameter, state in self._optimizer.state.items()}
        self._tensors = [*training.model.parameters(), *training.model.buffers()]
        self._tensors += [value for _, _, value in self._optimizer_values() if isinstance(value, torch.Tensor)]
        if not has_room_for(sum(tensor.nbytes for tensor in self._tensors)):
            raise MemoryError("the limit leaves no room for a copy of the state")
        self._copies = [tensor.detach().to("cpu", copy=True) for tensor in self._tensors]
        self._scalars = [
            (state, key, copy.deepcopy(value))
            for state, key, value in self._optimizer_values()
            if not isinstance(value, torch.Tensor)
        ]
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        self._others = [(part, part.state_dict()) for part in (training.scheduler, training.scaler) if part]
        self._random = read_random_state()

    @classmethod
    def copy_of(cls, training: Training) -> SavedState | None:
        """The state now; None when there is no memory for a copy."""
        try:
            return cls(training)
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                return None
            raise

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, saved in zip(self._tensors, self._copies, strict=True):
                tensor.copy_(saved)
        for state, key, value in self._scalars:
            state[key] = value
        for parameter, state in list(self._optimizer.state.items()):
            for key in state.keys() - self._keys.get(parameter, set()):
                del state[key]
            if parameter not in self._keys:
                del self._optimizer.state[parameter]
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        for part, kept in self._others:
            part.load_state_dict(kept)
        restore_random_state(self._random)

    def _optimizer_values(self) -> list[tuple[dict[str, Any], str, Any]]:
        return [(state, key, state[key]) for state in self._optimizer.state.values() for key in state]

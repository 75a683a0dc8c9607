"""The state of a training, saved and put back: for steps that must leave no trace."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch

from scalelab.measure.failure import is_out_of_memory
from scalelab.measure.training import Training


class SavedState:
    """Parameters, buffers, optimizer and random state. Copies stay in the host's memory, where there is more of it."""

    def __init__(self, training: Training) -> None:
        self._optimizer = training.optimizer
        self._keys = {parameter: set(state) for parameter, state in self._optimizer.state.items()}
        self._tensors = [*training.model.parameters(), *training.model.buffers()]
        self._tensors += [value for _, _, value in self._optimizer_values() if isinstance(value, torch.Tensor)]
        self._copies = [tensor.detach().to("cpu", copy=True) for tensor in self._tensors]
        self._scalars = [
            (state, key, copy.deepcopy(value))
            for state, key, value in self._optimizer_values()
            if not isinstance(value, torch.Tensor)
        ]
        self._rng = torch.get_rng_state(), random.getstate(), np.random.get_state()
        self._cuda_rng = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

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
        torch_state, python_state, numpy_state = self._rng
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if self._cuda_rng is not None:
            torch.cuda.set_rng_state(self._cuda_rng)

    def _optimizer_values(self) -> list[tuple[dict[str, Any], str, Any]]:
        return [(state, key, state[key]) for state in self._optimizer.state.values() for key in state]

"""The random state of a rank: seeded, read and put back.

torch on every device, NumPy and Python: a user's code may draw from any of them. What `read_random_state` gives holds
only tensors, numbers and tuples, so that a checkpoint can be loaded without running what is in it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from scalelab.worker.device import find_used_driver


def seed_everything(seed: int) -> None:
    """Seed every random generator that `build` or training may use."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def read_random_state() -> dict[str, Any]:
    """The state of every source now."""
    driver = find_used_driver()
    name, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": driver.read_random_state() if driver else None,
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "python": random.getstate(),
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Put back what `read_random_state` gave."""
    torch.set_rng_state(state["torch"])
    driver = find_used_driver()
    if state["cuda"] is not None and driver is not None:  # by its old name: checkpoints have it
        driver.restore_random_state(state["cuda"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])


def find_generators(batches: Any) -> list[torch.Generator]:
    """The generators that a loader, its sampler and its batch sampler draw from, each once."""
    sampler, batch_sampler = getattr(batches, "sampler", None), getattr(batches, "batch_sampler", None)
    parts = (batches, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    found = {id(g): g for part in parts if isinstance(g := getattr(part, "generator", None), torch.Generator)}
    return list(found.values())


@contextmanager
def untouched_randomness() -> Iterator[None]:
    """Whatever is drawn inside leaves no trace."""
    state = read_random_state()
    try:
        yield
    finally:
        restore_random_state(state)

"""Runs a script as on a machine with a GPU that is not there: what torch counts on it is given, tensors have no memory.

The arguments are the script and its own. Models and tokens stay where they are, so that no device is needed.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

MB = 2**20
PEAK, RESERVED = round(3076.27 * MB), 15890 * MB
"""As published."""
TOO_LARGE = 64
"""The batch that is out of memory."""
COUNTED = {
    "is_available": lambda: True,
    "reset_peak_memory_stats": lambda: None,
    "synchronize": lambda: None,
    "empty_cache": lambda: None,
    "max_memory_allocated": lambda: PEAK,
    "memory_reserved": lambda: RESERVED,
}


def put_gpu() -> None:
    draw: Any = torch.randint

    def embed(self: torch.nn.Embedding, tokens: torch.Tensor) -> torch.Tensor:
        if tokens.ndim > 1 and len(tokens) >= TOO_LARGE:
            raise torch.OutOfMemoryError
        return torch.nn.functional.embedding(tokens, self.weight)

    torch.nn.Embedding.forward = embed  # type: ignore[method-assign]
    torch.randint = lambda *arguments, device: draw(*arguments)
    torch.nn.Module.to = lambda self, device: self  # type: ignore[assignment, method-assign]
    torch.Tensor.item = lambda self: 1.0  # type: ignore[assignment, method-assign]
    for name, read in COUNTED.items():
        setattr(torch.cuda, name, read)
    torch.cuda.memory._record_memory_history = lambda max_entries: None
    torch.cuda.memory._dump_snapshot = lambda filename: Path(filename).write_bytes(b"recorded")


if __name__ == "__main__":
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    put_gpu()
    with FakeTensorMode():
        runpy.run_path(sys.argv[0], run_name="__main__")

"""Losses of 0.1.0: every built-in workload under every strategy, as `cases.py` trains them.

They were computed from the release itself (commit 537248c) and are kept as hexadecimal floats. Kernels differ between
processors and versions of torch, and so do the last digits: losses must be equal bit for bit where both are those the
losses were stored with, and within `KERNELS` elsewhere.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

FILE = Path(__file__).with_name("losses-0.1.0.json")
KERNELS = 1e-5
"""Relative, after six steps: what other kernels may round differently."""


@cache
def read_stored() -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return stored


def describe_processor() -> dict[str, Any]:
    """What kernels are chosen by: torch and its libraries, the instructions and the caches."""
    found = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return {
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": torch.backends.mkldnn.is_available(),
        "mkl": torch.backends.mkl.is_available(),
        "name": found.get("cpu_name", ""),
        "caches": [found.get("l1d_cache_size"), found.get("l2_cache_size")],
        "instructions": sorted(name for name, has in found.items() if has is True),
    }


def is_same_processor() -> bool:
    return bool(describe_processor() == read_stored()["processor"])


def check_stored(case: str, strategy: str, num_ranks: int, losses: list[float]) -> None:
    """Compare with 0.1.0; a newer strategy has nothing there."""
    texts = read_stored()["losses"][case].get(f"{strategy}-{num_ranks}")
    if texts is not None:
        stored = [float.fromhex(text) for text in texts]
        assert losses == (stored if is_same_processor() else pytest.approx(stored, rel=KERNELS)), (
            f"{strategy} on {case}"
        )

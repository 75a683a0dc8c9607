"""Public traces of real accelerators beside the repository, and what a plain reading of their JSON says."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scalelab.trace.files.reader import find_trace_files
from scalelab.trace.job_trace import JobTrace, read_ranks

TRACES = Path(__file__).parents[2].parent / "shared" / "reference" / "traces"
SETS = sorted(path.name for path in TRACES.glob("*") if path.is_dir()) if TRACES.is_dir() else []
needs_traces = pytest.mark.skipif(not SETS, reason=f"no public traces in {TRACES}")

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset")
RUNTIME = ("cuda_runtime", "cuda_driver", "runtime")
Document = dict[str, Any]


@cache
def read_set(name: str) -> JobTrace:
    return read_ranks(find_trace_files([TRACES / name]))


def load(path: Path) -> Document:
    found: Document = msgspec.json.decode(gzip.decompress(path.read_bytes()))
    return found


def list_spans(document: Document) -> dict[int, float]:
    """Microseconds from the first start to the last end of the kernels launched in every step."""
    events = [event for event in document["traceEvents"] if event.get("ph") == "X" and "args" in event]
    steps = [e for e in events if e["name"].startswith("ProfilerStep") and e["cat"] != "gpu_user_annotation"]
    launched = {e["args"].get("correlation"): e["ts"] for e in events if e["cat"].lower() in RUNTIME}
    found: dict[int, list[float]] = {}
    for event in events:
        start = launched.get(event["args"].get("correlation")) if event["cat"].lower() in DEVICE else None
        for step in steps if start is not None else ():
            if step["ts"] <= start < step["ts"] + step["dur"]:
                ends = found.setdefault(int(step["name"].split("#")[1]), [])
                ends += [event["ts"], event["ts"] + event["dur"]]
    return {step: max(times) - min(times) for step, times in found.items()}


def copy_set(name: str, directory: Path, change: Callable[[int, Document], None]) -> JobTrace:
    """A set with something changed on its ranks."""
    files = []
    for number, path in enumerate(find_trace_files([TRACES / name])):
        document = load(path)
        change(number, document)
        copy = directory / f"rank{number}.json"
        copy.write_text(json.dumps(document))
        files.append(copy)
    return read_ranks(files)

"""How far the memory of plans is from torch's own tracker and from what others have published.

Tracked: GPT-2 small on one rank by torch's MemTracker, run here on tensors without memory. Published: a sweep of
batches with GPT-2 small on one GPU, whose gelu is written out and whose loop keeps gradients until the next backward (a
published assignment); rows of FSDP, Llama 3.1 8B with local batch 2 and selective recomputing (torchtitan,
benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3), which are what the allocator had reserved. What it
reserves beyond what is allocated was found on the row of 8 devices. Every row has a bar.

    python benchmarks/plan_memory.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

from scalelab.predict.devices import find_device
from scalelab.predict.footprint import Kernels, find_footprint
from scalelab.predict.layouts import Layout, PlannedJob
from scalelab.predict.transformer_shape import GPT2_SMALL, LLAMA3_8B

GIBI, MEBI = 2**30, 2**20
MOST_TRACKER_ERROR, MOST_PUBLISHED_ERROR = 0.02, 0.05
TRACKED_BATCHES = (2, 8)
BATCH_ROWS = {8: 16104, 16: 30224, 32: 58438}
"""MiB at the peak by batch: GPT-2 small, sequence 1024, float32, dropout 0.1, one H100."""
FSDP_ROWS = {8: 82.4, 128: 67.0}
"""GiB reserved by number of devices."""


class MemoryRow(NamedTuple):
    """One peak, in GiB."""

    name: str
    known: float
    planned: float
    bar: float

    @property
    def error(self) -> float:
        return self.planned / self.known - 1


def main() -> int:
    rows = [*track_gpt2(), *read_batches(), *read_fsdp()]
    print(f"{'peak memory [GiB]':44}{'known':>8}{'planned':>9}{'error':>8}{'bar':>6}")
    for row in rows:
        print(f"{row.name:44}{row.known:8.2f}{row.planned:9.2f}{row.error:+8.2%}{row.bar:6.0%}")
    missed = [row.name for row in rows if abs(row.error) > row.bar]
    worst = max(abs(row.error) for row in rows)
    print(f"plan_memory: {worst:.1%} off at worst, {len(missed)} of {len(rows)} rows beyond their bars (bar 0)")
    return 1 if missed else 0


def make_gpt2(batch: int, dropout: float = 0.0) -> PlannedJob:
    return PlannedJob(
        model=GPT2_SMALL, device=find_device("h100-sxm"), dtype="float32", global_batch=batch, dropout=dropout
    )


def track_gpt2() -> Iterator[MemoryRow]:
    for batch in TRACKED_BATCHES:
        planned = find_footprint(make_gpt2(batch), Layout(micro_batch=batch)).total_bytes / GIBI
        yield MemoryRow(f"GPT-2 small, batch {batch}, MemTracker", track(batch), planned, MOST_TRACKER_ERROR)


def track(batch: int) -> float:
    """The peak of a second step by MemTracker, on tensors that have no memory: no dropout, logits kept."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from scalelab.worker.models.gpt2 import Gpt2
    from scalelab.workloads.gpt2_options import GPT2_SHAPES

    with FakeTensorMode():
        model = Gpt2(GPT2_SHAPES["small"], 0.0)
        optimizer = torch.optim.AdamW(model.parameters())
        tokens, targets = (torch.randint(50257, (batch, 1024)) for _ in range(2))
        tracker = MemTracker()
        tracker.track_external(model, optimizer, tokens, targets)
        with tracker:
            for _ in range(2):
                tracker.reset_mod_stats()
                logits = model(tokens)
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        peak = tracker.get_tracker_snapshot("peak")
    return float(sum(part["Total"] for part in peak.values()) / GIBI)


def read_batches() -> Iterator[MemoryRow]:
    kernels = Kernels(has_fused_gelu=False, keeps_gradients=True)
    for batch, published in BATCH_ROWS.items():
        planned = find_footprint(make_gpt2(batch, 0.1), Layout(micro_batch=batch), kernels).total_bytes / GIBI
        name = f"GPT-2 small, batch {batch}, published"
        yield MemoryRow(name, published * MEBI / GIBI, planned, MOST_PUBLISHED_ERROR)


def read_fsdp() -> Iterator[MemoryRow]:
    for devices, published in FSDP_ROWS.items():
        job = PlannedJob(model=LLAMA3_8B, device=find_device("h100-sxm"), global_batch=2 * devices)
        layout = Layout(data=devices, micro_batch=2, zero=3, checkpointing="selective")
        planned = find_footprint(job, layout, Kernels(keeps_logits=False)).reserved_bytes / GIBI
        yield MemoryRow(f"Llama 3.1 8B, FSDP on {devices}, published", published, planned, MOST_PUBLISHED_ERROR)


if __name__ == "__main__":
    sys.exit(main())

"""What watching an unedited script adds to its clean steps.

The same training loop with and without us, in one process on one core, in blocks that take turns in random order; a
step takes about a millisecond. Time is the processor's, of this process: what other programs do falls on nobody. Each
block begins with steps that are not timed, in which a script's steps are learned. The bar: at
most 1.02 times as long and at most 20 µs more a step, and the very same parameters at the end.
"""

from __future__ import annotations

import copy
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from scalelab.analysis.stats import estimate_difference, estimate_ratio
from scalelab.records.environment import usable_cores
from scalelab.records.trial import Block, StepKind
from scalelab.units import format_interval, format_seconds
from scalelab.worker.script.session import ScriptSession

NUM_CYCLES = 30
LEARNED, STEPS = 6, 100
BATCH = 16
LEAST_SECONDS = 1e-3
MOST_SECONDS, MOST_RATIO = 20e-6, 1.02

Watching = Callable[[], AbstractContextManager[None]]


class Kept(list[Any]):
    def flush(self) -> None: ...


def make_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
    )


def run_steps(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, num_steps: int) -> float:
    """Seconds per step of the processor."""
    start = time.process_time()
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs)
        loss.backward()
        optimizer.step()
    return (time.process_time() - start) / num_steps


def find_width() -> int:
    """The narrowest network whose step takes a millisecond here."""
    for width in range(64, 2048, 32):
        model, inputs = make_model(width), torch.randn(BATCH, width)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        run_steps(model, optimizer, inputs, 5)
        if run_steps(model, optimizer, inputs, 50) >= LEAST_SECONDS:
            return width
    return 2048


@contextmanager
def watch_as_script() -> Iterator[None]:
    """As a rank of a study does it during clean steps."""
    with ScriptSession((Block(StepKind.CLEAN, 10**9),), 0, Path("trace.json"), Kept(), BATCH):
        yield


def measure(width: int, contestants: dict[str, Watching]) -> tuple[dict[str, list[list[float]]], dict[str, nn.Module]]:
    """Seconds per step of every block, by contestant and cycle; and the trained models."""
    initial, inputs = make_model(width), torch.randn(BATCH, width)
    models = {name: copy.deepcopy(initial) for name in contestants}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=1e-3) for name, model in models.items()}
    times: dict[str, list[list[float]]] = {name: [] for name in contestants}
    order, shuffler = list(contestants), random.Random(0)
    for _ in range(NUM_CYCLES):
        shuffler.shuffle(order)
        for name in order:
            with contestants[name]():
                run_steps(models[name], optimizers[name], inputs, LEARNED)
                times[name].append([run_steps(models[name], optimizers[name], inputs, STEPS)])
    return times, models


def is_equal(left: nn.Module, right: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True))


def main() -> int:
    os.sched_setaffinity(0, usable_cores()[:1])
    torch.set_num_threads(1)
    width = find_width()
    contestants: dict[str, Watching] = {"bare": nullcontext, "bare again": nullcontext, "script": watch_as_script}
    times, models = measure(width, contestants)
    seconds = sorted(block[0] for block in times["bare"])[NUM_CYCLES // 2]
    table = Table("loop", "more per step [µs]", "ratio", "same parameters", box=None)
    for name in list(contestants)[1:]:
        more = estimate_difference(times[name], times["bare"]).map(lambda value: 1e6 * value)
        ratio = estimate_ratio(times[name], times["bare"])
        same = "yes" if is_equal(models[name], models["bare"]) else "no"
        table.add_row(name, format_interval("number", more), format_interval("ratio", ratio), same)
    Console().print(f"{NUM_CYCLES} blocks of {STEPS} steps each, {format_seconds(seconds)} of CPU time a step\n")
    Console().print(table)
    more = estimate_difference(times["script"], times["bare"]).value
    ratio = estimate_ratio(times["script"], times["bare"]).value
    bar = f"bar {MOST_SECONDS * 1e6:.0f} µs and {MOST_RATIO}×"
    print(f"\nscript_overhead: {more * 1e6:+.1f} µs a step, {ratio:.3f}× ({bar})")
    is_same = all(is_equal(model, models["bare"]) for model in models.values())
    return 0 if more <= MOST_SECONDS and ratio <= MOST_RATIO and is_same else 1


if __name__ == "__main__":
    sys.exit(main())

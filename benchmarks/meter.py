"""What a Meter adds to a step of somebody's own training loop.

The same small training with and without it, in one process on one core, in blocks that take turns in random order, so
that the machine's noise falls on all alike. A block is as long as the Meter keeps steps before it writes them: every
block pays for one writing, and none hides in a median. A contestant's time is that of its whole block, taken from
outside. The bar: at most 20 µs more a step, and the very same parameters at the end. What losses and phases add on top
is in the table.
"""

from __future__ import annotations

import copy
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from scalelab import Meter
from scalelab.analysis.stats import estimate_difference
from scalelab.records.environment import usable_cores
from scalelab.units import format_interval, format_seconds
from scalelab.worker.meter.step_log import MOST_WAITING

NUM_CYCLES = 40
DIM, BATCH = 64, 16
MOST_SECONDS = 20e-6

Batch = tuple[torch.Tensor, torch.Tensor]
Block = Callable[[], None]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))


def make_batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(BATCH, DIM, generator=generator)  # noqa: E731
    return [(draw(), draw()) for _ in range(4)] * (MOST_WAITING // 4)


def make_block(model: nn.Module, meter: Meter | None) -> Block:
    """A training loop as a user writes it; with a Meter, with the one line more."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches, criterion = make_batches(), nn.MSELoss()

    def run() -> None:
        steps: Iterable[Batch] = batches if meter is None else meter.steps(batches)
        for inputs, targets in steps:
            loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def make_full_block(model: nn.Module, meter: Meter) -> Block:
    """The same with everything that a Meter can be asked for."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches, criterion = make_batches(), nn.MSELoss()

    def run() -> None:
        for inputs, targets in meter.steps(batches):
            with meter.phase("forward"):
                loss = criterion(model(inputs), targets)
            with meter.phase("backward"):
                loss.backward()
            with meter.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            meter.loss(loss)

    return run


def measure(blocks: dict[str, Block]) -> dict[str, list[list[float]]]:
    """Seconds per step of every block, by contestant and cycle."""
    for run in blocks.values():
        run()
    times: dict[str, list[list[float]]] = {name: [] for name in blocks}
    order = list(blocks)
    shuffler = random.Random(0)
    for _ in range(NUM_CYCLES):
        shuffler.shuffle(order)
        for name in order:
            start = time.perf_counter()
            blocks[name]()
            times[name].append([(time.perf_counter() - start) / MOST_WAITING])
    return times


def main() -> int:
    os.sched_setaffinity(0, usable_cores()[:1])
    torch.set_num_threads(1)
    initial = make_model()
    names = ("without", "without again", "Meter", "Meter, loss and phases")
    models = {name: copy.deepcopy(initial) for name in names}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        two_lines, everything = (stack.enter_context(Meter(name, runs_dir=directory)) for name in ("two", "all"))
        times = measure(
            {
                "without": make_block(models["without"], None),
                "without again": make_block(models["without again"], None),
                "Meter": make_block(models["Meter"], two_lines),
                "Meter, loss and phases": make_full_block(models["Meter, loss and phases"], everything),
            }
        )

    seconds = sorted(block[0] for block in times["without"])[NUM_CYCLES // 2]
    more = {name: estimate_difference(times[name], times["without"]) for name in names[1:]}
    equal = {name: is_equal(models[name], models["without"]) for name in names}
    table = Table("loop", "more per step [µs]", "same parameters", box=None)
    for name, difference in more.items():
        in_microseconds = difference.map(lambda value: 1e6 * value)
        table.add_row(name, format_interval("number", in_microseconds), "yes" if equal[name] else "no")
    Console().print(f"{NUM_CYCLES} blocks of {MOST_WAITING} steps each, about {format_seconds(seconds)} a step\n")
    Console().print(table)

    print(f"\nmeter: {more['Meter'].value * 1e6:+.1f} µs a step (bar {MOST_SECONDS * 1e6:.0f} µs)")
    return 0 if more["Meter"].value <= MOST_SECONDS and all(equal.values()) else 1


def is_equal(left: nn.Module, right: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True))


if __name__ == "__main__":
    sys.exit(main())

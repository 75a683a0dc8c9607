"""What our timed loop costs: against a hand-written torch loop, Lightning Fabric and accelerate.

All four train the same weights on the same batches with the same optimizer, in one process on one core, in blocks
that take turns in random order, so that the machine's noise falls on all alike. A contestant's time is that of its
whole block, taken from outside. The bar: ours takes at most 1.02 times as long as the hand-written loop and at most
20 µs more a step, and ends with the very same parameters.
"""

from __future__ import annotations

import copy
import os
import random
import sys
import time
from collections.abc import Callable

import torch
from accelerate import Accelerator
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import LightningEnvironment
from rich.console import Console
from rich.table import Table
from torch import nn

from scalelab.analysis.stats import estimate_ratio
from scalelab.records.environment import usable_cores
from scalelab.units import format_quantity, format_seconds
from scalelab.worker.batches.stream import BatchStream
from scalelab.worker.loop import run_clean_steps
from scalelab.worker.training import Training, as_loss

NUM_CYCLES = 100
STEPS_PER_BLOCK = 30
DIM, DEPTH, BATCH = 256, 2, 64
MOST_RATIO = 1.02
MOST_SECONDS = 20e-6

Block = Callable[[int], None]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(DIM, DIM), nn.ReLU())))


def make_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(BATCH, DIM, generator=generator)  # noqa: E731
    return [(draw(), draw()) for _ in range(4)]


def make_hand_written(model: nn.Module) -> Block:
    """What a user would write: nothing is recorded."""
    optimizer = torch.optim.Adam(model.parameters())
    batches, criterion = make_batches(), nn.MSELoss()
    position = 0

    def run(num_steps: int) -> None:
        nonlocal position
        for _ in range(num_steps):
            inputs, targets = batches[position % len(batches)]
            position += 1
            loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def make_ours(model: nn.Module) -> Block:
    training = Training(
        model=model,
        loss=as_loss(nn.MSELoss()),
        optimizer=torch.optim.Adam(model.parameters()),
        batches=BatchStream(make_batches(), None, BATCH),
        synchronize=lambda: None,
    )
    return lambda num_steps: run_clean_steps(training, num_steps, [])


def make_fabric(model: nn.Module) -> Block:
    # Given, because looking for one loads MPI, which a machine need not have.
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[LightningEnvironment()])
    wrapped, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
    return make_library_block(wrapped, optimizer, fabric.backward)


def make_accelerate(model: nn.Module) -> Block:
    accelerator = Accelerator(cpu=True)
    wrapped, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    return make_library_block(wrapped, optimizer, accelerator.backward)


def make_library_block(model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[..., None]) -> Block:
    """The hand-written loop with a library's model, optimizer and backward."""
    batches, criterion = make_batches(), nn.MSELoss()
    position = 0

    def run(num_steps: int) -> None:
        nonlocal position
        for _ in range(num_steps):
            inputs, targets = batches[position % len(batches)]
            position += 1
            backward(criterion(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()

    return run


def measure(blocks: dict[str, Block]) -> dict[str, list[list[float]]]:
    """Seconds per step of every block, by contestant and cycle."""
    for run in blocks.values():
        run(STEPS_PER_BLOCK)
    times: dict[str, list[list[float]]] = {name: [] for name in blocks}
    order = list(blocks)
    shuffler = random.Random(0)
    for _ in range(NUM_CYCLES):
        shuffler.shuffle(order)
        for name in order:
            start = time.perf_counter()
            blocks[name](STEPS_PER_BLOCK)
            times[name].append([(time.perf_counter() - start) / STEPS_PER_BLOCK])
    return times


def main() -> int:
    os.sched_setaffinity(0, usable_cores()[:1])
    torch.set_num_threads(1)
    initial = make_model()
    makers = {
        "hand-written": make_hand_written,
        "hand-written again": make_hand_written,
        "scalelab": make_ours,
        "Lightning Fabric": make_fabric,
        "accelerate": make_accelerate,
    }
    models = {name: copy.deepcopy(initial) for name in makers}
    times = measure({name: make(models[name]) for name, make in makers.items()})

    hand = times["hand-written"]
    hand_seconds = sorted(block[0] for block in hand)[NUM_CYCLES // 2]
    table = Table("loop", "times the hand-written", "more per step", "same parameters", box=None)
    ratios = {name: estimate_ratio(times[name], hand) for name in makers}
    equal = {name: is_equal(models[name], models["hand-written"]) for name in makers}
    for name, ratio in ratios.items():
        more = format_seconds((ratio.value - 1) * hand_seconds)
        table.add_row(name, format_quantity("ratio", ratio), more, "yes" if equal[name] else "no")
    Console().print(
        f"{NUM_CYCLES} blocks of {STEPS_PER_BLOCK} steps each, about {format_seconds(hand_seconds)} a step\n"
    )
    Console().print(table)

    ours = ratios["scalelab"].value
    more = (ours - 1) * hand_seconds
    print(
        f"\noverhead: {ours:.3f} x, {more * 1e6:+.1f} µs a step, parameters"
        f" {'equal' if equal['scalelab'] else 'differ'} (bar {MOST_RATIO} x, {MOST_SECONDS * 1e6:.0f} µs, equal)"
    )
    return 0 if ours <= MOST_RATIO and more <= MOST_SECONDS and equal["scalelab"] else 1


def is_equal(left: nn.Module, right: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True))


if __name__ == "__main__":
    sys.exit(main())

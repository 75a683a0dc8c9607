"""What our strategies cost: each against a hand-written torch script of the same thing.

Two rank processes hold both on one process group: our training, as a trial builds it, with our timed loop; and the
model wrapped by hand with a plain loop that records nothing. Both train the same weights on the same batches. Blocks of
steps take turns in random order, the same on both ranks, so that the machine's noise falls on all alike; a block
takes as long as the slower rank. A third contestant, the hand-written script once more, shows what noise alone does.
Blocks are run until the interval is narrow, or the strategy's time is up: its width is what decides, never the ratio.

The bar: ours takes at most 1.02 times as long, by an interval that is narrower than the bar is wide, and ends with
the very same parameters. Emulated `dp` is left out: there is nothing of torch's to compare it with on a CPU.

Arguments name the strategies to measure; without any, all are.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_ratio
from scalelab.records.environment import usable_cores
from scalelab.records.trial import Trial
from scalelab.units import format_quantity, format_seconds
from scalelab.worker.loop import run_clean_steps
from scalelab.worker.models.load import load_workload
from scalelab.worker.training import build_training

NUM_RANKS = 2
CYCLES_AT_ONCE = 10
FEWEST_CYCLES = 80
MOST_SECONDS = 20.0
"""Of one strategy: all six then take between two and three minutes on any machine."""
STEPS_PER_BLOCK = 4
DIM, DEPTH, BATCH = 512, 4, 64
MOST_RATIO = 1.02
WIDEST_HALF = 0.015
STRATEGIES = ("single", "ddp", "fsdp-full", "fsdp-grad-op", "fsdp-none", "fsdp2")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Contestant:
    """A model and how it takes some steps."""

    model: nn.Module
    run: Callable[[int], None]


def make_trial(strategy: str) -> Trial:
    """A global batch over two ranks; `single` trains one rank's share on each, next to each other."""
    num_ranks = 1 if strategy == "single" else NUM_RANKS
    return Trial(
        configuration=f"{strategy}-{num_ranks}",
        workload="mlp",
        options={"dim": DIM, "depth": DEPTH},
        strategy=strategy,
        num_ranks=num_ranks,
        global_batch=BATCH * num_ranks // NUM_RANKS,
    )


def make_ours(strategy: str, rank: int) -> Contestant:
    training = build_training(make_trial(strategy), rank if strategy != "single" else 0, CPU)
    return Contestant(training.model, lambda num_steps: run_clean_steps(training, num_steps, []))


def make_hand_written(strategy: str, rank: int) -> Contestant:
    """What a user would write; only the batches are taken from the workload, to be the same."""
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(DIM, DIM), nn.ReLU())]
    model = wrap_by_hand(nn.Sequential(*layers), strategy)
    optimizer, criterion = torch.optim.Adam(model.parameters()), nn.MSELoss()
    batches: Any = load_workload(make_trial(strategy), rank if strategy != "single" else 0).batches
    pool = list(batches)
    position = 0

    def run(num_steps: int) -> None:
        nonlocal position
        for _ in range(num_steps):
            inputs, targets = pool[position % len(pool)]
            position += 1
            loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return Contestant(model, run)


def wrap_by_hand(model: nn.Module, strategy: str) -> nn.Module:
    if strategy == "ddp":
        return DistributedDataParallel(model)
    if strategy == "fsdp2":
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        for layer in model.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    sharding = {
        "fsdp-full": ShardingStrategy.FULL_SHARD,
        "fsdp-grad-op": ShardingStrategy.SHARD_GRAD_OP,
        "fsdp-none": ShardingStrategy.NO_SHARD,
    }
    if strategy in sharding:
        return FullyShardedDataParallel(
            model,
            sharding_strategy=sharding[strategy],
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            use_orig_params=True,
            device_id=CPU,
        )
    return model


def run_rank(rank: int, directory: str, strategies: list[str]) -> None:
    """Measure every strategy; rank 0 writes the times of all blocks, the slower rank's."""
    warnings.filterwarnings("ignore", ".*NO_SHARD", FutureWarning)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    cores = usable_cores()
    os.sched_setaffinity(0, [cores[rank % len(cores)]])
    torch.set_num_threads(1)
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=NUM_RANKS)
    for strategy in strategies:
        contestants = {
            "hand-written": make_hand_written(strategy, rank),
            "hand-written again": make_hand_written(strategy, rank),
            "scalelab": make_ours(strategy, rank),
        }
        times = measure_until_narrow(contestants)
        equal = torch.tensor(int(is_equal(contestants["scalelab"].model, contestants["hand-written"].model)))
        dist.all_reduce(equal, op=dist.ReduceOp.MIN)
        if rank == 0:
            found = {"times": times, "equal": bool(equal)}
            Path(directory, f"{strategy}.json").write_text(json.dumps(found))
            print(describe_row(strategy, times, bool(equal)), flush=True)
    dist.barrier()
    # A gloo group that is destroyed now and then waits for its own threads: the process just ends.
    os._exit(0)


def measure_until_narrow(contestants: dict[str, Contestant]) -> dict[str, list[float]]:
    """Seconds per step of every block, by contestant: the slower rank's, so that all ranks stop at the same one."""
    for contestant in contestants.values():
        contestant.run(4 * STEPS_PER_BLOCK)
    gc.collect()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    shuffler = random.Random(0)
    start, seconds = time.perf_counter(), 0.0
    while seconds < MOST_SECONDS:
        own = measure(contestants, shuffler)
        slowest = torch.tensor([own[name] for name in contestants], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        for name, blocks in zip(contestants, slowest.tolist(), strict=True):
            times[name] += blocks
        if len(times["scalelab"]) >= FEWEST_CYCLES and half_width(compare(times, "scalelab")) < WIDEST_HALF:
            break
        passed = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(passed, op=dist.ReduceOp.MAX)
        seconds = passed.item()
    return times


def measure(contestants: dict[str, Contestant], shuffler: random.Random) -> dict[str, list[float]]:
    """This rank's seconds per step of some blocks more."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    order = list(contestants)
    for _ in range(CYCLES_AT_ONCE):
        shuffler.shuffle(order)
        for name in order:
            dist.barrier()
            start = time.perf_counter()
            contestants[name].run(STEPS_PER_BLOCK)
            times[name].append((time.perf_counter() - start) / STEPS_PER_BLOCK)
    return times


def compare(times: dict[str, list[float]], name: str) -> Estimate:
    """How many times as long a contestant takes as the hand-written script, block by block."""
    return estimate_ratio([[block] for block in times[name]], [[block] for block in times["hand-written"]])


def is_equal(left: nn.Module, right: nn.Module) -> bool:
    """Whether two models hold the same bits on this rank."""
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return all(torch.equal(read_shard(a), read_shard(b)) for a, b in pairs)


def read_shard(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def half_width(estimate: Estimate) -> float:
    if estimate.low is None or estimate.high is None:
        return float("inf")
    return (estimate.high - estimate.low) / 2


HEADER = ("strategy", "blocks", "step by hand", "again by hand", "scalelab", "same parameters")


def describe_row(strategy: str, times: dict[str, list[float]], is_same: bool) -> str:
    """One line of the table, printed as soon as the strategy is done."""
    return format_row(
        strategy,
        str(len(times["hand-written"])),
        format_seconds(statistics.median(times["hand-written"])),
        format_quantity("ratio", compare(times, "hand-written again")),
        format_quantity("ratio", compare(times, "scalelab")),
        "yes" if is_same else "no",
    )


def format_row(name: str, *cells: str) -> str:
    return f"{name:12}" + "".join(f"{cell:>17}" for cell in cells)


def main() -> int:
    strategies = sys.argv[1:] or list(STRATEGIES)
    print(f"{NUM_RANKS} ranks, blocks of {STEPS_PER_BLOCK} steps; ratios to the step by hand, ± is 95 %\n")
    print(format_row(*HEADER), flush=True)
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(run_rank, (directory, strategies), nprocs=NUM_RANKS)
        found = {name: json.loads(Path(directory, f"{name}.json").read_text()) for name in strategies}
    ratios = {name: compare(answer["times"], "scalelab") for name, answer in found.items()}
    worst = max(ratios.values(), key=lambda ratio: ratio.value)
    wide = [name for name, ratio in ratios.items() if half_width(ratio) >= MOST_RATIO - 1]
    if wide:
        print(f"\nundecided, the machine is too busy for an interval as narrow as the bar: {', '.join(wide)}")
    print(f"\nstrategies: worst ratio {worst.value:.3f} ± {half_width(worst):.3f} (bar {MOST_RATIO})")
    is_same = all(answer["equal"] for answer in found.values())
    return 0 if worst.value <= MOST_RATIO and not wide and is_same else 1


if __name__ == "__main__":
    sys.exit(main())

"""What our strategies cost: each against a hand-written torch script of the same thing.

Our training, as a trial builds it, with our timed loop, and the model wrapped by hand with a plain loop that records
nothing train the same weights on the same batches. Blocks of steps take turns in random order, so that the machine's
noise falls on all alike. A third contestant, the hand-written script once more, shows what noise alone does.

Twice: in one rank alone, whose collectives end at once, so that what is left is the work of this rank, where all of our
cost is; and in two real ranks over gloo, where a block takes as long as the slower rank and waiting for each other
makes single steps vary by a quarter. Alone, DDP has a gloo group of one; sharding needs two, which are pretended.
Blocks are run until the interval is narrow, or the strategy's time is up: its width is what decides, never the ratio.

The bar: ours takes at most 1.02 times as long in one rank alone, by an interval that is narrower than the bar is
wide; in real ranks the interval does not lie above the bar, and both end with the very same parameters. Emulated `dp`
is left out: there is nothing of torch's to compare it with on a CPU.

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
from torch.testing._internal.distributed.fake_pg import FakeStore

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_ratio
from scalelab.records.environment import usable_cores
from scalelab.records.trial import Trial
from scalelab.units import format_quantity, format_seconds
from scalelab.worker.loop import run_clean_steps
from scalelab.worker.models.load import load_workload
from scalelab.worker.training import build_training
from scalelab.worker.worker import keep_freed_memory

NUM_RANKS = 2
CYCLES_AT_ONCE = 10
FEWEST_CYCLES = 80
MOST_SECONDS = {"alone": 16.0, "real": 8.0}
"""Of one strategy: all six then take between two and four minutes on any machine."""
STEPS_PER_BLOCK = 4
DIM, DEPTH, BATCH = 512, 4, 64
MOST_RATIO = 1.02
WIDEST_HALF = 0.01
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


def run_rank(rank: int, group: str, directory: str, strategy: str) -> None:
    """Measure a strategy; rank 0 writes the times of all blocks, the slower rank's."""
    warnings.filterwarnings("ignore", ".*NO_SHARD", FutureWarning)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    cores = usable_cores()
    os.sched_setaffinity(0, [cores[rank % len(cores)]])
    torch.set_num_threads(1)
    keep_freed_memory()  # otherwise what lies above a freed block decides whether the next step faults its pages in
    join(rank, group, strategy, f"{directory}/{group}.store")
    contestants = {
        "hand-written": make_hand_written(strategy, rank),
        "hand-written again": make_hand_written(strategy, rank),
        "scalelab": make_ours(strategy, rank),
    }
    times = measure_until_narrow(contestants, MOST_SECONDS[group])
    equal = torch.tensor(int(is_equal(contestants["scalelab"].model, contestants["hand-written"].model)))
    dist.all_reduce(equal, op=dist.ReduceOp.MIN)
    if rank == 0:
        Path(directory, f"{group}.json").write_text(json.dumps({"times": times, "equal": bool(equal)}))
    dist.barrier()
    # A gloo group that is destroyed now and then waits for its own threads: the process just ends.
    os._exit(0)


def join(rank: int, group: str, strategy: str, store: str) -> None:
    if group == "alone" and strategy.startswith("fsdp"):
        # The sums of a pretended group are not sums: values may run into denormals, which take longer.
        torch.set_flush_denormal(True)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=NUM_RANKS)
        return
    num_ranks = 1 if group == "alone" else NUM_RANKS
    dist.init_process_group("gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks)


def measure_until_narrow(contestants: dict[str, Contestant], most_seconds: float) -> dict[str, list[float]]:
    """Seconds per step of every block, by contestant: the slower rank's, so that all ranks stop at the same one."""
    for contestant in contestants.values():
        contestant.run(4 * STEPS_PER_BLOCK)
    gc.collect()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    shuffler = random.Random(0)
    start, seconds = time.perf_counter(), 0.0
    while seconds < most_seconds:
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


HEADER = ("strategy", "blocks", "step by hand", "again by hand", "scalelab", "real step", "again by hand", "scalelab")


@dataclass(frozen=True)
class Found:
    """What was measured of one strategy: seconds per step by contestant, alone and in real ranks."""

    alone: dict[str, list[float]]
    real: dict[str, list[float]]
    is_same: bool

    @property
    def is_narrow(self) -> bool:
        return half_width(compare(self.alone, "scalelab")) < MOST_RATIO - 1

    @property
    def is_slower_for_real(self) -> bool:
        return (compare(self.real, "scalelab").low or 0.0) > MOST_RATIO


def measure_strategy(strategy: str) -> Found:
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(run_rank, ("alone", directory, strategy), nprocs=1)
        mp.spawn(run_rank, ("real", directory, strategy), nprocs=NUM_RANKS)
        alone, real = (json.loads(Path(directory, f"{group}.json").read_text()) for group in ("alone", "real"))
    return Found(alone["times"], real["times"], real["equal"])


def describe_row(strategy: str, found: Found) -> str:
    """One line of the table, printed as soon as the strategy is done."""
    cells = [str(len(found.alone["scalelab"]))]
    for times in (found.alone, found.real):
        cells.append(format_seconds(statistics.median(times["hand-written"])))
        cells += [format_quantity("ratio", compare(times, name)) for name in ("hand-written again", "scalelab")]
    return format_row(strategy, *cells)


def format_row(name: str, *cells: str) -> str:
    return f"{name:12}" + "".join(f"{cell:>15}" for cell in cells)


def main() -> int:
    strategies = sys.argv[1:] or list(STRATEGIES)
    print(f"blocks of {STEPS_PER_BLOCK} steps; ratios to the step by hand, ± is 95 %; then {NUM_RANKS} real ranks\n")
    print(format_row(*HEADER), flush=True)
    found: dict[str, Found] = {}
    for name in strategies:
        found[name] = measure_strategy(name)
        print(describe_row(name, found[name]), flush=True)
    complaints = {
        "undecided, the machine is too busy": [name for name, one in found.items() if not one.is_narrow],
        "slower in real ranks": [name for name, one in found.items() if one.is_slower_for_real],
        "other parameters than by hand": [name for name, one in found.items() if not one.is_same],
    }
    for complaint, names in complaints.items():
        if names:
            print(f"\n{complaint}: {', '.join(names)}")
    worst = max((compare(one.alone, "scalelab") for one in found.values()), key=lambda ratio: ratio.value)
    print(f"\nstrategies: worst ratio {worst.value:.3f} ± {half_width(worst):.3f} (bar {MOST_RATIO})")
    return 0 if worst.value <= MOST_RATIO and not any(complaints.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

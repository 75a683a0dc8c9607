"""Strategies with a mesh: each against a hand-written torch script, and a pipeline's bubble against theory.

`zero1`, `hsdp`, `tp` and `pp` train the same weights on the same batches as a script that wraps the model by hand, in
two real ranks over gloo. Blocks of steps take turns in random order, as in `strategies.py`. The bar: at most 1.02 times
as long, by an interval narrower than the bar is high; a wider one decides nothing and does not hold.

The bubble is measured on stages that sleep instead of computing, so that four ranks are honest on two cores: the idle
share of GPipe and 1F1B on 2 and 4 ranks is within 10 % of (p − 1)/(m + p − 1).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from strategies import CPU, Contestant, compare, half_width, measure_until_narrow
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from scalelab.launch.local import LocalLauncher
from scalelab.records.environment import usable_cores
from scalelab.records.schema import write_trial
from scalelab.records.settings import Spreading, StepShape
from scalelab.records.tasks import Measure
from scalelab.records.trial import StepPlan, Trial
from scalelab.units import format_quantity, format_share
from scalelab.worker.loop import run_clean_steps
from scalelab.worker.models.load import load_workload
from scalelab.worker.training import build_training
from scalelab.worker.worker import keep_freed_memory

STRATEGIES = ("zero1", "hsdp", "tp", "pp")
DIM, DEPTH, BATCH = 512, 4, 64
MOST_SECONDS = 55.0
"""Of one strategy, unless its interval is narrow before: all four and the bubbles then end within five minutes."""
MOST_RATIO = 1.02
MOST_ERROR = 0.1
SLEEPING = """\
import time
import torch
from torch import nn

class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(SECONDS * x.shape[0])
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * SECONDS * gradient.shape[0])
        return gradient

SECONDS = 0.03

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return Sleep.apply(x * self.scale)

def build(batch_size):
    return nn.Sequential(*(Layer() for _ in range(4))), [(torch.ones(batch_size, 1),) * 2], nn.MSELoss()
"""


def make_trial(strategy: str) -> Trial:
    return Trial(
        configuration=strategy,
        workload="mlp",
        options={"dim": DIM, "depth": DEPTH},
        strategy=strategy,
        num_ranks=2,
        global_batch=BATCH,
    )


def make_ours(strategy: str, rank: int) -> Contestant:
    training = build_training(make_trial(strategy), rank, CPU)
    return Contestant(training.model, lambda num_steps: run_clean_steps(training, num_steps, []))


def make_hand_written(strategy: str, rank: int) -> Contestant:
    """What a user would write; only the batches are taken from the workload, to be the same."""
    torch.manual_seed(0)
    whole = nn.Sequential(*[layer for _ in range(DEPTH) for layer in (nn.Linear(DIM, DIM), nn.ReLU())])
    batches: Any = load_workload(make_trial(strategy), rank).batches
    pool, criterion, position = list(batches), nn.MSELoss(), 0
    model, schedule = wrap_by_hand(whole, strategy, rank)
    kind = torch.optim.Adam
    optimizer = ZeroRedundancyOptimizer(model.parameters(), kind) if strategy == "zero1" else kind(model.parameters())

    def run(num_steps: int) -> None:
        nonlocal position
        for _ in range(num_steps):
            inputs, targets = pool[position % len(pool)]
            position += 1
            if schedule is None:
                criterion(model(inputs), targets).backward()
            elif rank == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=targets, losses=[])
            optimizer.step()
            optimizer.zero_grad()

    return Contestant(model, run)


def wrap_by_hand(model: nn.Sequential, strategy: str, rank: int) -> tuple[nn.Module, Any]:
    """The model as torch's documentation wraps it, and the schedule of a pipeline."""
    if strategy == "zero1":
        return DistributedDataParallel(model), None
    if strategy == "hsdp":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "fsdp"))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh, reshard_after_forward=False), None
    if strategy == "tp":
        mesh = init_device_mesh("cpu", (2,))
        pairs = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(), "6": RowwiseParallel()}
        return parallelize_module(model, mesh, pairs), None  # type: ignore[arg-type]
    half = model[rank * DEPTH : (rank + 1) * DEPTH]
    stage = PipelineStage(half, rank, 2, CPU)
    return half, Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.MSELoss())


def run_rank(rank: int, directory: str, strategy: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    cores = usable_cores()
    os.sched_setaffinity(0, [cores[rank % len(cores)]])
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/store", 2), rank=rank, world_size=2)
    contestants = {
        "hand-written": make_hand_written(strategy, rank),
        "hand-written again": make_hand_written(strategy, rank),
        "scalelab": make_ours(strategy, rank),
    }
    times = measure_until_narrow(contestants, MOST_SECONDS)
    if rank == 0:
        Path(directory, "times.json").write_text(json.dumps(times))
    dist.barrier()
    os._exit(0)


def measure_strategy(strategy: str) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(run_rank, (directory, strategy), nprocs=2)
        found: dict[str, list[float]] = json.loads(Path(directory, "times.json").read_text())
    return found


def measure_bubble(launcher: LocalLauncher, directory: Path, schedule: Any, num_ranks: int) -> tuple[float, float]:
    """The idle share of a pipeline that sleeps, mean over ranks, and that of theory."""
    own = directory / "sleeping.py"
    own.write_text(SLEEPING)
    trial = Trial(
        configuration=f"{schedule}-{num_ranks}",
        workload=f"{own}:build",
        strategy="pp",
        num_ranks=num_ranks,
        global_batch=8,
        shape=StepShape(micro_batch=1),
        spreading=Spreading(pipeline_schedule=schedule),
        task=Measure(plan=StepPlan(lead_in_steps=1, clean_steps=1, phase_steps=0, comm_free_steps=0, cycles=1)),
        instruments=("pipeline",),
    )
    place = directory / trial.name
    place.mkdir()
    write_trial(place, trial)
    result = launcher.launch(trial, place)
    if not result.ranks or result.ranks[0].pipeline is None:
        raise SystemExit(f"{trial.configuration}: {result.reason}")
    watched = [rank.pipeline for rank in result.ranks if rank.pipeline is not None]
    return statistics.fmean(one.idle_share or 0.0 for one in watched), watched[0].bubble or 0.0


def main() -> int:
    slower, undecided, worst = [], [], 0.0
    for name in sys.argv[1:] or STRATEGIES:
        times = measure_strategy(name)
        again, ours = compare(times, "hand-written again"), compare(times, "scalelab")
        ratios = [format_quantity("ratio", ratio) for ratio in (again, ours)]
        print(f"{name:8}by hand again {ratios[0]:>14}  scalelab {ratios[1]:>14}", flush=True)
        slower += [name] if ours.value > MOST_RATIO else []
        undecided += [name] if half_width(ours) >= MOST_RATIO - 1 else []
    with LocalLauncher() as launcher, tempfile.TemporaryDirectory() as directory:
        for schedule in ("gpipe", "1f1b"):
            for num_ranks in (2, 4):
                idle, theory = measure_bubble(launcher, Path(directory), schedule, num_ranks)
                worst = max(worst, abs(idle / theory - 1))
                print(f"{schedule:8}{num_ranks} ranks: idle {format_share(idle)}, theory {format_share(theory)}")
    print(f"undecided, the machine is too busy: {', '.join(undecided) or 'none'}")
    named = ", ".join(slower) or "none"
    print(f"layouts: slower than by hand {named}, worst bubble error {worst:.1%} (bar none, {MOST_ERROR:.0%})")
    return 0 if not slower and not undecided and worst <= MOST_ERROR else 1


if __name__ == "__main__":
    sys.exit(main())

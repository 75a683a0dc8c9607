"""Strategies with a mesh: each against a hand-written torch script, and a pipeline's bubble against theory.

`zero1`, `hsdp`, `tp`, `pp`, `ep` and `local-sgd` train the same weights on the same batches as a script that wraps the
model by hand, in two real ranks over gloo. Single steps of the two take turns, in random order (of `local-sgd` whole
periods), so that a pair is milliseconds apart and what the machine does falls on both alike.

Two clocks: the wall's, of the slower rank, and the processor's, of both ranks together. What scalelab adds is work of
the processor; waiting for the other rank makes single steps vary by a quarter and says nothing of us. The bar: at most
1.02 times as long, by the whole 95 % interval of either clock. An interval across the bar decides nothing and does not
hold. Measuring ends when both intervals are narrow, or the strategy's time is up: their width decides, never the ratio.

The bubble is measured on stages that sleep instead of computing, so that eight ranks are honest on two cores: the idle
share of GPipe and 1F1B on 2, 4 and 8 ranks is within 10 % of (p − 1)/(m + p − 1).

    python benchmarks/layouts.py [zero1 hsdp … bubbles]
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from strategies import CPU, Contestant, half_width, is_equal
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_ratio
from scalelab.launch.local import LocalLauncher
from scalelab.records.environment import usable_cores
from scalelab.records.files import write_trial
from scalelab.records.settings import Spreading, StepShape
from scalelab.records.tasks import Measure
from scalelab.records.trial import StepPlan, Trial
from scalelab.units import format_interval, format_seconds, format_share
from scalelab.worker.loop import run_clean_steps
from scalelab.worker.models.load import load_workload
from scalelab.worker.models.moe import Experts, balanced_loss
from scalelab.worker.training import build_training
from scalelab.worker.worker import keep_freed_memory

STRATEGIES = ("zero1", "hsdp", "tp", "pp", "ep", "local-sgd")
BUBBLES = "bubbles"
DIM, DEPTH, BATCH = 512, 4, 64
PERIOD = 2
"""Steps of `local-sgd` from one averaging to the next."""
PAIRS_AT_ONCE, ROUND = 100, 5
"""Steps of both between two looks at the intervals, and pairs that make a round of the estimate."""
MOST_SECONDS = 100.0
"""Of one strategy, unless its intervals are narrow before: all six and the bubbles then end within seven minutes."""
WIDEST_HALF = 0.006
MOST_RATIO = 1.02
MOST_ERROR = 0.1
Times = dict[str, dict[str, list[float]]]
"""Seconds of every block, by clock and contestant."""
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
NUM_LAYERS = 4

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return Sleep.apply(x * self.scale)

def build(batch_size):
    return nn.Sequential(*(Layer() for _ in range(NUM_LAYERS))), [(torch.ones(batch_size, 1),) * 2], nn.MSELoss()
"""


def make_trial(strategy: str) -> Trial:
    is_moe = strategy == "ep"
    return Trial(
        configuration=strategy,
        workload="moe" if is_moe else "mlp",
        options={"dropout": 0.0} if is_moe else {"dim": DIM, "depth": DEPTH},
        strategy=strategy,
        num_ranks=2,
        global_batch=16 if is_moe else BATCH,
        spreading=Spreading(averaging_period=PERIOD) if strategy == "local-sgd" else Spreading(),
    )


def make_ours(strategy: str, rank: int) -> Contestant:
    training = build_training(make_trial(strategy), rank, CPU)
    return Contestant(training.model, lambda num_steps: run_clean_steps(training, num_steps, []))


def make_hand_written(strategy: str, rank: int) -> Contestant:
    """What a user would write; batches are taken from the workload, to be the same, and so is the model of `ep`."""
    torch.manual_seed(0)
    workload = load_workload(make_trial(strategy), rank)
    batches: Any = workload.batches
    pool, criterion, position = list(batches), nn.MSELoss(), 0
    torch.manual_seed(0)
    whole = nn.Sequential(*[layer for _ in range(DEPTH) for layer in (nn.Linear(DIM, DIM), nn.ReLU())])
    model, schedule = split_experts(workload.model, rank) if strategy == "ep" else wrap_by_hand(whole, strategy, rank)
    optimizer = make_optimizer(strategy, model)

    def run(num_steps: int) -> None:
        nonlocal position
        for _ in range(num_steps):
            inputs, targets = pool[position % len(pool)]
            position += 1
            if strategy == "ep":
                balanced_loss(model, (inputs, targets)).backward()
            elif schedule is None:
                criterion(model(inputs), targets).backward()
            elif rank == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=targets, losses=[])
            optimizer.step()
            optimizer.zero_grad()

    return Contestant(model, run)


def make_optimizer(strategy: str, model: nn.Module) -> Any:
    if strategy == "zero1":
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    if strategy == "ep":
        return torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    adam = torch.optim.Adam(model.parameters())
    return PostLocalSGDOptimizer(adam, PeriodicModelAverager(period=PERIOD)) if strategy == "local-sgd" else adam


def wrap_by_hand(model: nn.Sequential, strategy: str, rank: int) -> tuple[nn.Module, Any]:
    """The model as torch's documentation wraps it, and the schedule of a pipeline."""
    if strategy == "zero1":
        return DistributedDataParallel(model), None
    if strategy == "local-sgd":
        replicated = DistributedDataParallel(model)
        alone = PostLocalSGDState(None, None, start_localSGD_iter=0, post_local_gradient_allreduce=False)
        replicated.register_comm_hook(alone, post_localSGD_hook)
        return replicated, None
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


class ExchangeRows(torch.autograd.Function):
    """An equal share of the rows to either rank; gradients the same way back."""

    @staticmethod
    def forward(_: Any, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.contiguous()
        arrived = torch.empty_like(rows)
        dist.all_to_all_single(arrived, rows)
        return arrived

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> Any:
        return ExchangeRows.apply(gradients[0])


class HalfOfExperts(nn.Module):
    """This rank's experts, which work for both ranks."""

    def __init__(self, every: Experts, rank: int) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(one.detach().chunk(2)[rank].clone()) for one in (every.up, every.down))

    def forward(self, slots: torch.Tensor) -> torch.Tensor:
        own, width = len(self.up), slots.shape[-1]
        arrived: torch.Tensor = ExchangeRows.apply(slots)
        here = arrived.view(2, own, -1, width).transpose(0, 1).reshape(own, -1, width)
        found = torch.bmm(functional.gelu(torch.bmm(here, self.up), approximate="tanh"), self.down)
        parted = found.view(own, 2, -1, width).transpose(0, 1).reshape(2 * own, -1, width)
        back: torch.Tensor = ExchangeRows.apply(parted)
        return back


def split_experts(model: nn.Module, rank: int) -> tuple[nn.Module, None]:
    """Half of the experts of every layer on either rank, and DDP around the rest."""
    split = {}
    for name, part in list(model.named_modules()):
        if isinstance(part, Experts):
            split[name] = HalfOfExperts(part, rank)
            model.set_submodule(name, split[name])
    ignored = [f"{name}.{part}" for name in split for part in ("up", "down")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    for weight in (weight for half in split.values() for weight in half.parameters()):
        weight.register_post_accumulate_grad_hook(halve_gradient)
    return DistributedDataParallel(model), None


def halve_gradient(weight: torch.Tensor) -> None:
    if weight.grad is not None:
        weight.grad.div_(2)


def run_rank(rank: int, directory: str, strategy: str) -> None:
    warnings.filterwarnings("ignore", ".*torch.jit", DeprecationWarning)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    cores = usable_cores()
    os.sched_setaffinity(0, [cores[rank % len(cores)]])
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/store", 2), rank=rank, world_size=2)
    contestants = {"by hand": make_hand_written(strategy, rank), "scalelab": make_ours(strategy, rank)}
    times = measure_until_narrow(contestants, PERIOD if strategy == "local-sgd" else 1)
    alike = torch.tensor(int(is_equal(contestants["scalelab"].model, contestants["by hand"].model)))
    dist.all_reduce(alike, op=dist.ReduceOp.MIN)
    if rank == 0:
        Path(directory, "times.json").write_text(json.dumps({"times": times, "is_same": bool(alike)}))
    dist.barrier()
    os._exit(0)


def measure_until_narrow(contestants: dict[str, Contestant], num_steps: int) -> Times:
    """Blocks of both in turns, until both clocks have narrow intervals or time is up."""
    for contestant in contestants.values():
        contestant.run(10 * num_steps)
    gc.collect()
    gc.disable()
    times: Times = {clock: {name: [] for name in contestants} for clock in ("wall", "processor")}
    shuffler = random.Random(0)
    start, seconds = time.perf_counter(), 0.0
    while seconds < MOST_SECONDS:
        wall, processor = measure_pairs(contestants, num_steps, shuffler)
        dist.all_reduce(wall, op=dist.ReduceOp.MAX)
        dist.all_reduce(processor)
        for number, name in enumerate(contestants):
            times["wall"][name] += wall[number].tolist()
            times["processor"][name] += processor[number].tolist()
        passed = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(passed, op=dist.ReduceOp.MAX)
        is_narrow = all(half_width(compare(times, clock)) < WIDEST_HALF for clock in times)
        seconds = MOST_SECONDS if is_narrow else passed.item()
        gc.collect()
    return times


def measure_pairs(
    contestants: dict[str, Contestant], num_steps: int, shuffler: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's seconds of some blocks more, contestant by contestant, by the wall and by the processor."""
    found = torch.zeros(2, len(contestants), PAIRS_AT_ONCE, dtype=torch.float64)
    order = list(enumerate(contestants.values()))
    for pair in range(PAIRS_AT_ONCE):
        shuffler.shuffle(order)
        for number, contestant in order:
            dist.barrier()
            busy, start = time.process_time(), time.perf_counter()
            contestant.run(num_steps)
            found[0, number, pair] = time.perf_counter() - start
            found[1, number, pair] = time.process_time() - busy
    return found[0], found[1]


def compare(times: Times, clock: str) -> Estimate:
    """How many times as long scalelab takes by a clock, round by round."""
    ours, theirs = (
        [blocks[n : n + ROUND] for n in range(0, len(blocks), ROUND)]
        for blocks in (times[clock]["scalelab"], times[clock]["by hand"])
    )
    return estimate_ratio(ours, theirs)


def judge(ratio: Estimate) -> str:
    """By the ends of the interval."""
    if ratio.low is None or ratio.high is None:
        return "undecided"
    if ratio.high <= MOST_RATIO:
        return "holds"
    return "slower" if ratio.low > MOST_RATIO else "undecided"


def measure_strategy(strategy: str) -> tuple[Times, bool]:
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(run_rank, (directory, strategy), nprocs=2)
        found = json.loads(Path(directory, "times.json").read_text())
    return found["times"], found["is_same"]


def measure_bubble(launcher: LocalLauncher, directory: Path, schedule: Any, num_ranks: int) -> tuple[float, float]:
    """The idle share of a pipeline that sleeps, mean over ranks, and that of theory."""
    own = directory / f"sleeping{num_ranks}.py"
    own.write_text(SLEEPING.replace("NUM_LAYERS = 4", f"NUM_LAYERS = {max(4, num_ranks)}"))
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
    idle = [share for one in watched for share in one.idle_shares]
    return statistics.fmean(idle), watched[0].bubble or 0.0


def compare_strategies(names: list[str]) -> list[str]:
    """What does not hold."""
    complaints = []
    if names:
        print(f"{'':11}{'pairs':>7}{'step by hand':>14}{'processor time':>26}{'wall time':>26}  same parameters")
    for name in names:
        times, is_same = measure_strategy(name)
        ratios = {clock: compare(times, clock) for clock in ("processor", "wall")}
        cells = [f"{format_interval('ratio', one):>26}" for one in ratios.values()]
        hand = times["wall"]["by hand"]
        seconds = format_seconds(statistics.median(hand) / (PERIOD if name == "local-sgd" else 1))
        print(f"{name:11}{len(hand):7}{seconds:>14}{''.join(cells)}  {'yes' if is_same else 'no'}", flush=True)
        verdicts = {clock: judge(one) for clock, one in ratios.items()}
        complaints += [f"{name} {verdict} by {clock} time" for clock, verdict in verdicts.items() if verdict != "holds"]
        complaints += [] if is_same else [f"{name} has other parameters"]
    return complaints


def compare_bubbles() -> float:
    """The largest error of theory's idle share."""
    worst = 0.0
    with LocalLauncher() as launcher, tempfile.TemporaryDirectory() as directory:
        for schedule in ("gpipe", "1f1b"):
            for num_ranks in (2, 4, 8):
                idle, theory = measure_bubble(launcher, Path(directory), schedule, num_ranks)
                worst = max(worst, abs(idle / theory - 1))
                shares = f"idle {format_share(idle)}, theory {format_share(theory)}"
                print(f"{schedule:8}{num_ranks} ranks: {shares}, {idle / theory - 1:+.1%}", flush=True)
    return worst


def main() -> int:
    wanted: Callable[[str], bool] = lambda name: name in (sys.argv[1:] or (*STRATEGIES, BUBBLES))  # noqa: E731
    complaints = compare_strategies([name for name in STRATEGIES if wanted(name)])
    worst = compare_bubbles() if wanted(BUBBLES) else 0.0
    verdict = ", ".join(complaints) or "holds"
    print(f"\nlayouts: {verdict} (bar {MOST_RATIO}×), bubble error {worst:.1%} (bar {MOST_ERROR:.0%})")
    return 0 if not complaints and worst <= MOST_ERROR else 1


if __name__ == "__main__":
    sys.exit(main())

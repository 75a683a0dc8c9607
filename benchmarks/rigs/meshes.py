"""Trainings over a mesh whose computing is sleep and whose communication is torch's own: `tp`, `pp` and `hsdp`.

A block is two small linear layers with a nap between them. Tensor parallelism splits the layers and the nap, a pipeline
gives every stage some of the blocks, `hsdp` shards every block in groups and replicates the groups twice.

Naps need no cores, but what surrounds them does, and eight ranks share the two of a laptop. A rig is honest only where
that is a small part of a step: otherwise it measures who gets a core. So naps are long, and layers are split by hand as
in Megatron-LM (an all-reduce after every second layer in forward and before it in backward), which takes a third of the
processor time of DTensor's dispatch. How far this holds is printed: the share of the cores that all ranks keep busy.

    measured on one rank     the step, its phases, with the whole batch and with an eighth of it
    measured on two ranks    the step, an all-reduce by size, and how long a step and a hop keep a core busy
    predicted                4 and 8 ranks, and 2 from the other half of the repeats
"""

import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from scalelab.errors import TooNoisy
from scalelab.predict.network_model import Gradient, LinkSpeed, NetworkModel
from scalelab.predict.scaled_job import ScaledJob, predict_step, settle_on_two
from scalelab.predict.split_step import PerSampleCost, Splitting, arrange, fit_line_by_batch
from scalelab.records.environment import count_cores

KINDS = ("tp", "pp", "hsdp")
CASES = [
    {"kind": kind, "blocks": 8, "width": width, "sample_ms": sample_ms}
    for kind, naps in (("tp", (1.0, 2.0)), ("pp", (1.5, 3.0)), ("hsdp", (1.0, 2.0)))
    for width in (64, 256)
    for sample_ms in naps
]
BATCH = 32
FEW = BATCH // 8
NUM_TURNS, NUM_STEPS = 2, 3
NUM_HOPS = 200
FLOAT_BYTES = 4


class Enter(torch.autograd.Function):
    """The same activations on all ranks; their gradients are added up."""

    @staticmethod
    def forward(_context, activations):
        return activations

    @staticmethod
    def backward(_context, gradient):
        whole = gradient.clone()
        dist.all_reduce(whole)
        return whole


class Leave(torch.autograd.Function):
    """The parts of all ranks, added up."""

    @staticmethod
    def forward(_context, parts):
        whole = parts.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(_context, gradient):
        return gradient


class Nap(torch.autograd.Function):
    @staticmethod
    def forward(context, activations, seconds):
        context.seconds = seconds * len(activations)
        time.sleep(context.seconds)
        return activations.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(2 * context.seconds)
        return gradient.clone(), None


class Block(nn.Module):
    """`parts`: ranks that split it, the first layer by columns and the second by rows."""

    def __init__(self, width, seconds, parts=1):
        super().__init__()
        self.up, self.down = nn.Linear(width, width // parts), nn.Linear(width // parts, width)
        self.seconds, self.parts = seconds / parts, parts

    def forward(self, activations):
        inside = Enter.apply(activations) if self.parts > 1 else activations
        found = self.down(Nap.apply(self.up(inside), self.seconds))
        return Leave.apply(found) if self.parts > 1 else found


def make_training(case, rank, num_ranks):
    """The model as torch's documentation wraps it; a function that takes a step and one that marks its phases."""
    torch.manual_seed(0)
    seconds = case["sample_ms"] / 1e3
    kind = case["kind"] if num_ranks > 1 else ""
    parts = num_ranks if kind == "tp" else 1
    blocks = nn.Sequential(*(Block(case["width"], seconds, parts) for _ in range(case["blocks"])))
    schedule = None
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("dp", "fsdp"))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(blocks, mesh=mesh, reshard_after_forward=False)
    if kind == "pp":
        share = case["blocks"] // num_ranks
        blocks = blocks[rank * share : (rank + 1) * share]
        stage = PipelineStage(blocks, rank, num_ranks, torch.device("cpu"))
        schedule = Schedule1F1B(stage, n_microbatches=2 * num_ranks, loss_fn=lambda output, _: output.sum())
    optimizer = torch.optim.SGD(blocks.parameters(), lr=1e-6)

    def step(samples, mark=lambda _: None):
        inputs = torch.zeros(samples, case["width"], requires_grad=True)
        if schedule is None:
            loss = blocks(inputs).sum()
            mark("forward")
            loss.backward()
        elif rank == 0:
            schedule.step(inputs)
        elif rank == num_ranks - 1:
            schedule.step(target=torch.zeros(samples, 1), losses=[])
        else:
            schedule.step()
        mark("backward")
        optimizer.step()
        optimizer.zero_grad()
        mark("optimizer")

    return step


def measure(rank, num_ranks, place, time_transfers):
    """Every case on so many ranks; rank 0 writes what it saw."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{place}/meshes{num_ranks}", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    trainings = [make_training(case, rank, num_ranks) for case in CASES]
    if num_ranks == 1:
        phases = [{str(size): time_phases(one, size) for size in (BATCH, FEW)} for one in trainings]
        Path(place, "meshes1.json").write_text(json.dumps({"phases": phases}))
        os._exit(0)
    steps = [[[], []] for _ in CASES]
    busy = [0.0 for _ in CASES]
    for training in trainings:
        training(BATCH)
    for turn in range(NUM_TURNS):
        for number, training in enumerate(trainings):
            dist.barrier()
            training(BATCH)
            begin = time.process_time()
            for _ in range(NUM_STEPS):
                start = time.perf_counter()
                training(BATCH)
                steps[number][turn % 2].append(time.perf_counter() - start)
            busy[number] += (time.process_time() - begin) / NUM_STEPS / NUM_TURNS
    answer = {"steps": steps, "busy": busy}
    if num_ranks == 2:
        answer |= {"transfers": time_transfers(), "hop_core": time_hop()}
    if rank == 0:
        Path(place, f"meshes{num_ranks}.json").write_text(json.dumps(answer))
    dist.barrier()
    os._exit(0)


def time_hop():
    """How long a hop keeps a core busy: an all-reduce of two ranks has two."""
    message = torch.zeros(NUM_HOPS)
    dist.all_reduce(message)
    dist.barrier()
    begin = time.process_time()
    for _ in range(NUM_HOPS):
        dist.all_reduce(message)
    return (time.process_time() - begin) / NUM_HOPS / 2


def time_phases(step, samples):
    """The median seconds of every phase on one rank."""
    found = {name: [] for name in ("forward", "backward", "optimizer")}
    step(FEW)
    for _ in range(NUM_STEPS):
        stamps = [time.perf_counter()]
        step(samples, lambda _, stamps=stamps: stamps.append(time.perf_counter()))
        for name, begin, end in zip(found, stamps, stamps[1:], strict=False):
            found[name].append(end - begin)
    return {name: statistics.median(times) for name, times in found.items()}


def make_job(case, found, link: LinkSpeed):
    """The job as one and two ranks show it."""
    number, kind = CASES.index(case), case["kind"]
    phases = found[1]["phases"][number]
    by_batch = {
        name: fit_line_by_batch({float(size): phases[size][name] for size in phases}) for name in phases[str(BATCH)]
    }
    block_bytes = FLOAT_BYTES * 2 * (case["width"] ** 2 + case["width"])
    one_way = FLOAT_BYTES * case["width"]
    hop_core = min(found[2]["hop_core"], link.latency_seconds)
    hops = {"tp": 4 * case["blocks"], "pp": 0, "hsdp": 2 * case["blocks"]}[kind]  # of all-reduces, on two ranks
    job = ScaledJob(
        phases=by_batch | {"optimizer": PerSampleCost(fixed=phases[str(BATCH)]["optimizer"])},
        gradients=tuple(Gradient((place + 1) / case["blocks"], block_bytes) for place in range(case["blocks"])),
        network=NetworkModel(inside=link, cores=count_cores(), is_gloo=True, hop_core_seconds=hop_core),
        core_seconds=max(0.0, found[2]["busy"][number] - hops * hop_core),
        strategy=kind,
        units=(float(block_bytes),) * case["blocks"],
        splitting=Splitting(
            num_reductions=2 * case["blocks"], reduced_bytes=2 * case["blocks"] * one_way, hop_bytes=one_way
        ),
    )
    return settle_on_two(job, statistics.median(found[2]["steps"][number][0]), find_samples(kind, 2))


def find_load(found, num_ranks, kind):
    """The share of all cores that the ranks keep busy, in the busiest case of a kind."""
    cases = [number for number, case in enumerate(CASES) if case["kind"] == kind]
    steps = [statistics.median([*first, *second]) for first, second in (found["steps"][number] for number in cases)]
    return max(num_ranks * found["busy"][n] / s / count_cores() for n, s in zip(cases, steps, strict=True))


def find_samples(kind, num_ranks):
    """Of a data rank: all data ranks have the same batch, whatever their number."""
    assert arrange(kind, num_ranks).num_ranks == num_ranks
    return BATCH


def predict_all(found, link, counts):
    """By case: what was seen and what is predicted, by number of ranks; nothing of a case that is too noisy."""
    for number, case in enumerate(CASES):
        try:
            job = make_job(case, found, link)
        except TooNoisy as error:
            yield case, error, {}
            continue
        line = {}
        for count in counts:
            halves = found[count]["steps"][number]
            seen = statistics.median(halves[1] if count == 2 else halves[0] + halves[1])
            line[count] = (seen, predict_step(job, count, find_samples(case["kind"], count)).seconds)
        yield case, sum(found[1]["phases"][number][str(BATCH)].values()), line

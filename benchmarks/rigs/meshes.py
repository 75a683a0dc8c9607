"""Trainings over a mesh whose computing is sleep and whose communication is torch's own: `tp`, `pp` and `hsdp`.

A block is two small linear layers with a nap between them. Tensor parallelism splits the layers and the nap, a pipeline
gives every stage some of the blocks, `hsdp` shards every block in groups and replicates the groups twice. Naps need no
cores, so eight ranks run honestly on two.

    measured on one rank     the step, its phases, with the whole batch and with an eighth of it
    measured on two ranks    the step, an all-reduce by size, and how long a step keeps a core busy
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
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from scalelab.errors import TooNoisy
from scalelab.predict.network_model import Gradient, LinkSpeed, NetworkModel
from scalelab.predict.scaled_job import ScaledJob, predict_step, settle_on_two
from scalelab.predict.split_step import PerSampleCost, Splitting, arrange, fit_line_by_batch
from scalelab.records.environment import count_cores

KINDS = ("tp", "pp", "hsdp")
CASES = [
    {"kind": kind, "blocks": 8, "width": width, "sample_ms": sample_ms}
    for kind in KINDS
    for width in (64, 256)
    for sample_ms in (0.15, 0.3)
]
BATCH = 32
FEW = BATCH // 8
NUM_TURNS, NUM_STEPS = 4, 5
FLOAT_BYTES = 4


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
    def __init__(self, width, seconds):
        super().__init__()
        self.up, self.down, self.seconds = nn.Linear(width, width), nn.Linear(width, width), seconds

    def forward(self, activations):
        return self.down(Nap.apply(self.up(activations), self.seconds))


def make_training(case, rank, num_ranks):
    """The model as torch's documentation wraps it; a function that takes a step and one that marks its phases."""
    torch.manual_seed(0)
    seconds = case["sample_ms"] / 1e3
    kind = case["kind"] if num_ranks > 1 else ""
    blocks = nn.Sequential(
        *(Block(case["width"], seconds / (num_ranks if kind == "tp" else 1)) for _ in range(case["blocks"]))
    )
    schedule = None
    if kind == "tp":
        mesh = init_device_mesh("cpu", (num_ranks,))
        plan = {}
        for number in range(case["blocks"]):
            plan |= {f"{number}.up": ColwiseParallel(), f"{number}.down": RowwiseParallel()}
        blocks = parallelize_module(blocks, mesh, plan)
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
    steps = [[[], []] for _ in CASES]
    busy = [0.0 for _ in CASES]
    for training in trainings:
        training(BATCH), training(BATCH)
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
    if num_ranks == 1:
        answer["phases"] = [{str(size): time_phases(one, size) for size in (BATCH, FEW)} for one in trainings]
    if num_ranks == 2:
        answer["transfers"] = time_transfers()
    if rank == 0:
        Path(place, f"meshes{num_ranks}.json").write_text(json.dumps(answer))
    dist.barrier()
    os._exit(0)


def time_phases(step, samples):
    """The median seconds of every phase on one rank."""
    found = {name: [] for name in ("forward", "backward", "optimizer")}
    for _ in range(2 * NUM_STEPS):
        stamps = [time.perf_counter()]
        step(samples, lambda _, stamps=stamps: stamps.append(time.perf_counter()))
        for name, begin, end in zip(found, stamps, stamps[1:], strict=False):
            found[name].append(end - begin)
    return {name: statistics.median(times) for name, times in found.items()}


def make_job(case, found, link: LinkSpeed):
    """The job as one and two ranks show it."""
    number, kind = CASES.index(case), case["kind"]
    phases = found[1]["phases"][number]
    # One rank's clean step decides; phases only divide it.
    scale = statistics.median(join(found[1]["steps"][number])) / sum(phases[str(BATCH)].values())
    by_batch = {
        name: fit_line_by_batch({float(size): scale * phases[size][name] for size in phases})
        for name in phases[str(BATCH)]
    }
    block_bytes = FLOAT_BYTES * 2 * (case["width"] ** 2 + case["width"])
    one_way = FLOAT_BYTES * case["width"]
    job = ScaledJob(
        phases=by_batch | {"optimizer": PerSampleCost(fixed=scale * phases[str(BATCH)]["optimizer"])},
        gradients=tuple(Gradient((place + 1) / case["blocks"], block_bytes) for place in range(case["blocks"])),
        network=NetworkModel(inside=link, cores=count_cores()),
        core_seconds=found[2]["busy"][number],
        strategy=kind,
        units=(float(block_bytes),) * case["blocks"],
        splitting=Splitting(
            num_reductions=2 * case["blocks"], reduced_bytes=2 * case["blocks"] * one_way, hop_bytes=one_way
        ),
    )
    return settle_on_two(job, statistics.median(found[2]["steps"][number][0]), find_samples(kind, 2))


def join(halves):
    return [*halves[0], *halves[1]]


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
        yield case, statistics.median(join(found[1]["steps"][number])), line

"""Trainings over a mesh whose computing is sleep and whose communication is torch's own: `tp`, `pp` and `hsdp`.

A block is a layer of `sleeper.py`: weights that get a gradient, and a nap per sample. Tensor parallelism splits the
weights and the nap, by hand as in Megatron-LM (an all-reduce after every block in forward and before it in backward); a
pipeline gives every stage some of the blocks; `hsdp` shards every block in groups and replicates the groups twice.

Naps need no cores, but what surrounds them does, and eight ranks share the two of a laptop. A rig is honest only where
that is a small part of a step: otherwise it measures who gets a core. So every rank has a link of its own, slow enough
that bytes take time and hardly any core, and naps are long. How far this holds is printed: the share of the cores that
all ranks keep busy.

    measured on one rank     the step and its phases, with an eighth and with a half of the batch
    measured on two ranks    the step, an all-reduce by size, and how long a step and a hop keep a core busy
    predicted                4 and 8 ranks, and 2 from the other half of the repeats
"""

import statistics
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from sleeper import SleepingLayer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from scalelab.answers.prediction.predicted_job import find_core_seconds
from scalelab.errors import TooNoisy
from scalelab.predict.network_model import Gradient, LinkSpeed, share_cores
from scalelab.predict.scaled_job import ScaledJob, predict_step, settle_on_two
from scalelab.predict.split_step import (
    PerSampleCost,
    Splitting,
    arrange,
    count_micro_batches,
    count_reduced_bytes,
    find_slot_seconds,
    fit_line_by_batch,
)
from scalelab.records.environment import count_cores

KINDS = ("tp", "pp", "hsdp")
SHAPES = {
    "tp": ((4, 2048, 0.1, 2.5), (4, 2048, 0.1, 5.0), (4, 4096, 0.1, 2.5), (4, 4096, 0.1, 5.0)),
    "pp": ((8, 256, 0.1, 5.0), (8, 256, 0.1, 10.0), (8, 32768, 0.1, 5.0), (8, 32768, 0.1, 10.0)),
    "hsdp": ((4, 1, 0.5, 1.0), (4, 1, 0.5, 2.0), (4, 1, 1.0, 1.0), (4, 1, 1.0, 2.0)),
}
"""Blocks, numbers of a sample, megabytes of a block's weights, and milliseconds of a nap per sample."""
CASES = [
    {"kind": kind, "blocks": blocks, "width": width, "layer_mb": layer_mb, "sample_ms": sample_ms}
    for kind, shapes in SHAPES.items()
    for blocks, width, layer_mb, sample_ms in shapes
]
BATCH = 32
FEW, HALF = BATCH // 8, BATCH // 2
NUM_TURNS, NUM_STEPS = 2, 2
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


class SplitLayer(SleepingLayer):
    """A part of a layer; all parts are added up."""

    def forward(self, activations):
        return Leave.apply(super().forward(Enter.apply(activations)))


def make_training(case, rank, num_ranks):
    """The model as torch's documentation wraps it, as a function that takes a step and marks its phases."""
    torch.manual_seed(0)
    kind = case["kind"] if num_ranks > 1 else ""
    parts = num_ranks if kind == "tp" else 1
    numbers, seconds = round(case["layer_mb"] * 1e6 / FLOAT_BYTES), case["sample_ms"] / 1e3
    layer = SplitLayer if parts > 1 else SleepingLayer
    blocks = nn.Sequential(*(layer(numbers // parts, 0.0, seconds / parts) for _ in range(case["blocks"])))
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


def measure(rank, num_ranks, kind):
    """Every case of a kind on so many ranks, as this rank saw it."""
    trainings = [make_training(case, rank, num_ranks) for case in list_cases(kind)]
    if num_ranks == 1:
        return {"timed": [{str(size): time_phases(one, size) for size in (FEW, HALF)} for one in trainings]}
    steps = [[[], []] for _ in trainings]
    busy = [0.0 for _ in trainings]
    for training in trainings:
        training(BATCH)
    for turn in range(NUM_TURNS):
        for number, training in enumerate(trainings):
            dist.barrier()
            begin = time.process_time()
            for _ in range(NUM_STEPS):
                start = time.perf_counter()
                training(BATCH)
                steps[number][turn % 2].append(time.perf_counter() - start)
            busy[number] += (time.process_time() - begin) / NUM_STEPS / NUM_TURNS
    return {"steps": steps, "busy": busy} | ({"hop_core": time_hop()} if num_ranks == 2 else {})


def list_cases(kind):
    return [case for case in CASES if case["kind"] == kind]


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
    """The median seconds of every phase on one rank, and of a core for the whole step."""
    found = {name: [] for name in ("forward", "backward", "optimizer", "busy")}
    step(1)
    for _ in range(NUM_STEPS):
        begin, stamps = time.process_time(), [time.perf_counter()]
        step(samples, lambda _, stamps=stamps: stamps.append(time.perf_counter()))
        for name, before, after in zip(found, stamps, stamps[1:], strict=False):
            found[name].append(after - before)
        found["busy"].append(time.process_time() - begin)
    return {name: statistics.median(times) for name, times in found.items()}


def make_job(case, number, found, link: LinkSpeed):
    """The job as one and two ranks show it."""
    kind, timed = case["kind"], found[1]["timed"][number]
    by_batch = {
        name: fit_line_by_batch({float(size): timed[size][name] for size in timed}) for name in ("forward", "backward")
    }
    block_bytes = case["layer_mb"] * 1e6
    one_way = FLOAT_BYTES * case["width"]
    hop_core = min(found[2]["hop_core"], link.latency_seconds)
    hops = {"tp": 4 * case["blocks"], "pp": 0, "hsdp": 2 * case["blocks"]}[kind]  # of all-reduces, on two ranks
    alone, busy = timed[str(HALF)]["busy"], found[2]["busy"][number]
    slot = 0.0
    if kind == "pp":
        count = count_micro_batches(BATCH, 2, None)
        dispatched = fit_line_by_batch({float(size): timed[size]["busy"] for size in timed}).at(BATCH / count)
        slot = find_slot_seconds(count * dispatched, busy, count)
    splitting = Splitting(
        num_reductions=2 * case["blocks"],
        reduced_bytes=2 * case["blocks"] * one_way,
        hop_bytes=one_way,
        slot_seconds=slot,
    )
    sent = count_reduced_bytes(kind, BATCH, splitting, block_bytes * case["blocks"])
    network = share_cores(link, count_cores(), alone, busy - hops * hop_core, sent)
    job = ScaledJob(
        phases=by_batch | {"optimizer": PerSampleCost(fixed=timed[str(HALF)]["optimizer"])},
        gradients=tuple(Gradient((place + 1) / case["blocks"], block_bytes) for place in range(case["blocks"])),
        network=replace(network, hop_core_seconds=hop_core),
        core_seconds=find_core_seconds(network, alone, busy - hops * hop_core, sent),
        strategy=kind,
        units=(float(block_bytes),) * case["blocks"],
        splitting=splitting,
    )
    assert arrange(kind, 8).num_ranks == 8
    return settle_on_two(job, statistics.median(found[2]["steps"][number][0]), BATCH)


def find_load(found, num_ranks):
    """The share of all cores that the ranks keep busy, in the busiest case."""
    steps = [statistics.median([*first, *second]) for first, second in found["steps"]]
    return max(num_ranks * busy / step / count_cores() for busy, step in zip(found["busy"], steps, strict=True))


def predict_all(kind, found, link, counts):
    """By case: one rank, then what was seen and what is predicted by number of ranks; nothing of one too noisy.

    Every data rank has the same batch, whatever their number.
    """
    for number, case in enumerate(list_cases(kind)):
        try:
            job = make_job(case, number, found, link)
        except TooNoisy as error:
            yield case, error, {}
            continue
        line = {}
        for count in counts:
            halves = found[count]["steps"][number]
            seen = statistics.median(halves[1] if count == 2 else halves[0] + halves[1])
            line[count] = (seen, predict_step(job, count, BATCH).seconds)
        yield case, predict_step(job, 1, BATCH).seconds, line

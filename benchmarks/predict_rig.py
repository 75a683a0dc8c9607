"""Predictions of 4 and 8 ranks from one and two, held against real torch on gloo whose computing is sleep.

Ranks that sleep need no cores, so eight of them run honestly on two, if communication needs hardly any either: on the
loopback an all-reduce of eight ranks takes as long as it takes to get a core. So every rank is an emulated host with a
link of its own, held to a rate at which bytes take much longer on the wire than in a core (`LINK`); needs root, as
`network.py` does. The share of the cores that all ranks keep busy is printed.

Sixteen trainings with DDP (rigs/sleeper.py) differ in layers, bytes, time per layer and buckets; four each with tensor
parallelism, pipelines and two-level shards (rigs/meshes.py) in bytes and time. All run one after the other in the same
processes, several times over, and a step is its median. The form of the model was settled on this rig, with its
rows on 4 and 8 ranks in view: how cores are shared, which messages a pipeline waits for, and that half a share waits in
an all-gather. No constant is fitted.

    measured on one rank     the step, when each gradient is ready, and how long it keeps a core busy
    measured on two ranks    the step, the time of an all-reduce by size, and how long sending keeps a core busy
    predicted                2, 4 and 8 ranks, with the cores of this machine shared by all

Of two ranks one half of the repeats is measured and the other half predicted. Beside it stands the prediction that
computing alone would make: a step stays what it is on one rank, or is divided. Every kind has a median of its own.

    python benchmarks/predict_rig.py [ddp tp pp hsdp]
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time, sleep

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from scalelab.analysis.link import fit_line
from scalelab.answers.prediction.predicted_job import find_core_seconds, share_times
from scalelab.launch.ranks.namespaces import INTERFACE, emulate_hosts, find_host_obstacle, parse_link
from scalelab.predict.network_model import MEBIBYTE, Gradient, LinkSpeed, find_hop, share_cores
from scalelab.predict.scaled_job import ScaledJob, predict_step, settle_on_two
from scalelab.predict.split_step import PerSampleCost
from scalelab.records.environment import count_cores

sys.path.insert(0, str(Path(__file__).resolve().parent / "rigs"))
import meshes
from sleeper import build

RANKS = (1, 2, 4, 8)
LINK = "100mbit"
BATCH = 8
BAR = 0.05
NUM_PASSES, NUM_STEPS = 1, 3
SIZES = [4096, *(1 << power for power in range(18, 23))]
"""Of all-reduces in bytes: one for the latency, and those that are longer than a burst of the link."""
NUM_TRANSFERS = 5
REFILL_SECONDS = 0.02
"""Before a timed all-reduce, as a nap is before that of a step: a long message leaves the bucket of its link empty."""
CASES = [
    {"layers": layers, "layer_mb": layer_mb, "fixed_ms": fixed_ms, "sample_ms": 0.0, "bucket_mb": bucket_mb}
    for layers, layer_mb, fixed_ms, bucket_mb in itertools.product((6, 12), (0.1, 0.4), (4.0, 12.0), (None, 1.0))
]
CLONE_NEWNET = 0x40000000


def main() -> int:
    obstacle = find_host_obstacle()
    if obstacle:
        print(f"predict_rig: skipped: {obstacle}")
        return 0
    wanted = sys.argv[1:] or ["ddp", *meshes.KINDS]
    with tempfile.TemporaryDirectory() as place:
        for count in RANKS:
            with emulate_hosts(count, parse_link(LINK)) as hosts:
                mp.spawn(run_rank, (count, place, [host.name for host in hosts], wanted), nprocs=count)
        found = {count: json.loads((Path(place) / f"{count}.json").read_text()) for count in RANKS}
    link = find_link(found[2]["transfers"])
    print(f"an all-reduce on two ranks: {link.latency_seconds * 2e6:.0f} µs, {link.bytes_per_second / 1e6:.1f} MB/s")
    worst = [
        (check_ddp if kind == "ddp" else check_mesh)(kind, {n: found[n][kind] for n in RANKS}, link) for kind in wanted
    ]
    return 0 if max(worst) <= BAR else 1


def run_rank(rank: int, num_ranks: int, place: str, hosts: list[str], kinds: list[str]) -> None:
    """All cases of these kinds on so many ranks, each on its host; the first rank writes what it saw."""
    torch.set_num_threads(1)
    with Path("/run/netns", hosts[rank]).open() as host:
        if ctypes.CDLL(None).setns(host.fileno(), CLONE_NEWNET):
            raise SystemExit(f"predict_rig: rank {rank} cannot enter {hosts[rank]}")
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    store = dist.FileStore(f"{place}/store{num_ranks}", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    answer: dict = {
        kind: measure(num_ranks) if kind == "ddp" else meshes.measure(rank, num_ranks, kind) for kind in kinds
    }
    if num_ranks == 2:
        answer["transfers"] = time_transfers()
    if rank == 0:
        Path(place, f"{num_ranks}.json").write_text(json.dumps(answer))
    dist.barrier()
    os._exit(0)


def check_mesh(kind: str, found: dict[int, dict], link: LinkSpeed) -> float:
    """The larger median error of a kind on 4 or 8 ranks."""
    errors: dict[int, list[float]] = {count: [] for count in RANKS[1:]}
    plain: dict[int, list[float]] = {count: [] for count in RANKS[1:]}
    print_header()
    for case, one, line in meshes.predict_all(kind, found, link, RANKS[1:]):
        text = f"{kind}, {case['width']} wide, {case['layer_mb']:g} MB, {case['sample_ms']:g} ms"
        if not line:
            print(f"{text:34} {one}")
            errors[RANKS[-1]].append(float("inf"))
            continue
        print(f"{text:34} {one * 1e3:7.1f}ms ", end="")
        for count, (seen, said) in line.items():
            errors[count].append(abs(said / seen - 1))
            plain[count].append(abs((one if kind == "hsdp" else one / count) / seen - 1))
            print(f"{seen * 1e3:7.1f}ms {said * 1e3:6.1f}ms {said / seen - 1:+6.1%} ", end="")
        print()
    medians = {count: statistics.median(values) for count, values in errors.items()}
    tell(kind, medians, plain, meshes.find_load(found[RANKS[-1]], RANKS[-1]))
    return max(medians[count] for count in RANKS if count > 2)


def print_header() -> None:
    print(f"\n{'case':34} {'1 rank':>9} " + " ".join(f"{f'{n} ranks':>9} {'said':>8} {'error':>7}" for n in RANKS[1:]))


def tell(kind: str, medians: dict[int, float], plain: dict[int, list[float]], busy: float) -> None:
    told = ", ".join(f"{medians[count]:.1%}" for count in medians)
    alone = ", ".join(f"{statistics.median(plain[count] or [0.0]):.1%}" for count in medians)
    print(
        f"predict_rig: {kind}: median errors {told} on 2, 4 and 8 ranks (bar {BAR:.0%} each);"
        f" of computing alone {alone}; cores busy on {RANKS[-1]}: {busy:.0%}",
        flush=True,
    )


def check_ddp(kind: str, found: dict[int, dict], link: LinkSpeed) -> float:
    """The largest median error of any number of ranks."""
    errors: dict[int, list[float]] = {count: [] for count in RANKS[1:]}
    plain: dict[int, list[float]] = {count: [] for count in RANKS[1:]}
    loads = []
    print_header()
    for number, case in enumerate(CASES):
        steps = {count: found[count]["steps"][number] for count in RANKS}
        one = statistics.median(steps[1][0] + steps[1][1])
        busy = [found[count]["busy"][number] for count in (1, 2)]
        job = make_job(case, found[1]["gradients"][number], steps, link, busy)
        line = f"{describe(case):34} {one * 1e3:7.1f}ms "
        for count in RANKS[1:]:
            seen = statistics.median(steps[2][1] if count == 2 else steps[count][0] + steps[count][1])
            said = predict_step(job, count, BATCH).seconds
            errors[count].append(abs(said / seen - 1))
            plain[count].append(abs(one / seen - 1))
            line += f"{seen * 1e3:7.1f}ms {said * 1e3:6.1f}ms {said / seen - 1:+6.1%} "
        loads.append(RANKS[-1] * found[RANKS[-1]]["busy"][number] / seen / count_cores())
        print(line)
    medians = {count: statistics.median(errors[count]) for count in errors}
    tell(kind, medians, plain, max(loads))
    return max(medians.values())


def describe(case: dict) -> str:
    bucket = "torch's" if case["bucket_mb"] is None else f"{case['bucket_mb']:g} MiB"
    return f"{case['layers']} × {case['layer_mb']:g} MB, {case['fixed_ms']:g} ms, buckets {bucket}"


def make_job(case: dict, gradients: dict, steps: dict, link: LinkSpeed, busy: list[float]) -> ScaledJob:
    """The job as one and two ranks show it."""
    one = statistics.median(steps[1][0] + steps[1][1])
    phases = gradients["phases"]
    scale = one / sum(phases.values())
    times = [Gradient(seconds, size) for seconds, size in zip(gradients["ready"], gradients["bytes"], strict=True)]
    total = sum(gradients["bytes"])
    network = share_cores(link, count_cores(), busy[0], busy[1], total)
    ratio = statistics.stdev(steps[1][0] + steps[1][1]) / one
    job = ScaledJob(
        phases={name: PerSampleCost(fixed=seconds * scale) for name, seconds in phases.items()},
        gradients=share_times(times, phases["backward"]),
        network=network,
        core_seconds=find_core_seconds(network, busy[0], busy[1], total),
        bucket_bytes=None if case["bucket_mb"] is None else case["bucket_mb"] * MEBIBYTE,
        jitter_ratio=ratio,
    )
    return settle_on_two(job, statistics.median(steps[2][0]), BATCH)


def find_link(transfers: dict[str, list[float]]) -> LinkSpeed:
    line = fit_line({int(size): [seconds] for size, seconds in transfers.items()})
    assert line is not None
    return find_hop(line)


def measure(num_ranks: int) -> dict:
    """All cases of DDP on so many ranks, as this rank saw them."""
    trainings = [make_training(case) for case in CASES]
    for training in trainings:
        run_steps(training, 2)
    steps: list[list[list[float]]] = [[[], []] for _ in CASES]
    busy = [0.0 for _ in CASES]
    for turn in range(2 * NUM_PASSES):
        for number, training in enumerate(trainings):
            dist.barrier()
            run_steps(training, 1)
            begin = process_time()
            steps[number][turn % 2] += run_steps(training, NUM_STEPS)
            busy[number] += (process_time() - begin) / NUM_STEPS / (2 * NUM_PASSES)
    answer = {"steps": steps, "busy": busy}
    if num_ranks == 1:
        answer["gradients"] = [watch_gradients(training) for training in trainings]
    return answer


def make_training(case: dict) -> tuple:
    options = {name: value for name, value in case.items() if name != "bucket_mb"}
    model, batches, loss, make_optimizer = build(BATCH, **options)
    buckets = {} if case["bucket_mb"] is None else {"bucket_cap_mb": case["bucket_mb"]}
    model = torch.nn.parallel.DistributedDataParallel(model, **buckets)
    return model, batches[0], loss, make_optimizer(model.parameters())


def run_steps(training: tuple, count: int, mark=lambda _: None) -> list[float]:
    model, batch, loss, optimizer = training
    found = []
    for _ in range(count):
        start = perf_counter()
        value = loss(model, batch)
        mark("forward")
        value.backward()
        mark("backward")
        optimizer.step()
        optimizer.zero_grad()
        mark("optimizer")
        found.append(perf_counter() - start)
    return found


def watch_gradients(training: tuple) -> dict:
    """When each gradient is ready, and the phases of the same steps."""
    parameters = list(training[0].parameters())
    stamps: dict = {}
    seen: list[tuple[list[float], dict[str, float]]] = []
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    hooks = [
        p.register_post_accumulate_grad_hook(lambda p: stamps.update({numbers[id(p)]: perf_counter()}))
        for p in parameters
    ]
    for _ in range(NUM_STEPS):
        stamps.clear()
        start = perf_counter()
        run_steps(training, 1, lambda name: stamps.update({name: perf_counter()}))
        ready = [stamps[number] - stamps["forward"] for number in range(len(parameters))]
        phases = {
            "forward": stamps["forward"] - start,
            "backward": stamps["backward"] - stamps["forward"],
            "optimizer": stamps["optimizer"] - stamps["backward"],
        }
        seen.append((ready, phases))
    for hook in hooks:
        hook.remove()
    pairs = sorted(
        (statistics.median(ready[number] for ready, _ in seen), parameter.nbytes)
        for number, parameter in enumerate(parameters)
    )
    return {
        "ready": [seconds for seconds, _ in pairs],
        "bytes": [size for _, size in pairs],
        "phases": {name: statistics.median(phases[name] for _, phases in seen) for name in seen[0][1]},
    }


def time_transfers() -> dict[int, list[float]]:
    """Single all-reduces by size, each as its slowest rank saw it."""
    found: dict[int, list[float]] = {size: [] for size in SIZES}
    for _ in range(NUM_TRANSFERS):
        for size in SIZES:
            tensor = torch.zeros(size // 4)
            dist.all_reduce(tensor)
            sleep(REFILL_SECONDS)
            dist.barrier()
            start = perf_counter()
            dist.all_reduce(tensor)
            slowest = torch.tensor([perf_counter() - start])
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            found[size].append(float(slowest))
    return {size: [float(np.median(times))] for size, times in found.items()}


if __name__ == "__main__":
    sys.exit(main())

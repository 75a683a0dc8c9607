"""Two thousand generated jobs whose collectives carry no sequence number: is the delayed rank named, or the doubt?

Every job trains on 2 to 8 ranks, step by step, with all-reduces and other collectives that all ranks leave together, up
to a few microseconds. One rank is late. The traces are then spoilt as real ones are: recordings that begin and end at
different collectives, kernels dropped on one rank, extra ones that no other rank has, clocks up to a second apart that
drift, kernels under other names, process groups removed, sizes removed, no steps, steps that are numbered differently,
CUDA graphs (one launch for all kernels of a step), broadcasts of the host beside the device.

Two things are wrong: collectives paired with others than their own, and another rank than the late one called last.
Either is allowed only with a doubt that says so. A tool that doubts everything would pass: the share of jobs that are
right and without a doubt about pairing stands beside. The bar: none wrong without a doubt.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from scalelab.trace.job_trace import JobTrace, find_match_doubts, read_ranks

NUM_JOBS = 2000
Rng = np.random.Generator
NAMES = {"allreduce": "AllReduce_Sum_f32_RING_LL", "_allgather_base": "AllGather_RING_LL", "all_to_all": "SendRecv"}
RENAMED = {
    "allreduce": "fabric::ringAllReduceStep<4>(x)",
    "_allgather_base": "fabric::gatherAllGather",
    "all_to_all": "x",
}
BAD = ("paired wrongly", "another rank named")
PAIRING_DOUBTS = {"uncertain-pairing", "uncertain-clocks"}


@dataclass(frozen=True)
class Plan:
    """What a job does and how its traces are spoilt."""

    num_ranks: int
    num_steps: int
    buckets: tuple[tuple[str, int], ...]
    """Kind and elements of the collectives of a step."""
    step_us: float
    jitter: float
    """Of the computing between two collectives, as a share of it."""
    scatter_us: float
    """How far apart the ranks leave a collective."""
    late_rank: int
    late_us: float
    ahead_us: tuple[float, ...]
    drift: tuple[float, ...]
    is_one_host: bool
    skipped: tuple[tuple[int, int], ...]
    """Collectives that the recording of every rank misses at its begin and at its end."""
    drop_share: float
    num_extra: int
    extra_rank: int
    has_steps: bool
    step_shift: tuple[int, ...]
    has_sizes: bool
    has_groups: bool
    num_groups: int
    is_renamed: bool
    is_graph: bool
    num_host_broadcasts: int


def draw_plan(rng: Rng) -> Plan:
    """One of many jobs."""
    num_ranks = int(rng.choice([2, 3, 4, 8]))
    sizes = rng.integers(1, 9, size=int(rng.integers(1, 7))) * 1_000_000
    is_alike, is_one_host, is_even = rng.random() < 0.5, rng.random() < 0.25, rng.random() < 0.3
    kinds = rng.choice(["allreduce", "_allgather_base", "all_to_all"], size=len(sizes), p=[0.7, 0.15, 0.15])
    buckets = [
        (str("allreduce" if is_alike else kind), int(sizes[0] if is_alike else size))
        for kind, size in zip(kinds, sizes, strict=True)
    ]
    step_us, jitter = float(rng.choice([3e3, 2e4, 1e5])), float(rng.choice([0, 0.001, 0.01, 0.1]))
    shift = rng.uniform(-1e6, 1e6, num_ranks) * (rng.random() < 0.7)
    return Plan(
        num_ranks=num_ranks,
        num_steps=int(rng.integers(1, 13)),
        buckets=tuple(buckets),
        step_us=step_us,
        jitter=jitter,
        scatter_us=float(rng.choice([0.5, 3, 15])),
        late_rank=int(rng.integers(num_ranks)),
        late_us=step_us * (float(rng.uniform(0.05, 0.4)) + 6 * jitter / (len(buckets) + 1)),
        ahead_us=tuple((shift * (not is_one_host)).tolist()),
        drift=tuple((rng.normal(0, 5e-6, num_ranks) * (not is_one_host)).tolist()),
        is_one_host=is_one_host,
        skipped=tuple((0, 0) if is_even else (int(a), int(b)) for a, b in rng.integers(0, 4, (num_ranks, 2))),
        drop_share=float(rng.choice([0, 0, 0.03, 0.1])),
        num_extra=int(rng.choice([0, 0, 1, 3])),
        extra_rank=int(rng.integers(num_ranks)),
        has_steps=bool(rng.random() < 0.6),
        step_shift=tuple(int(rng.integers(0, 2)) * (rng.random() < 0.2) for _ in range(num_ranks)),
        has_sizes=bool(rng.random() < 0.7),
        has_groups=bool(rng.random() < 0.6),
        num_groups=int(rng.choice([1, 2])),
        is_renamed=bool(rng.random() < 0.2),
        is_graph=bool(rng.random() < 0.2),
        num_host_broadcasts=int(rng.choice([0, 0, 4])),
    )  # fmt: skip


@dataclass
class Job:
    """The traces of a job, and which collective each kernel is: by rank and start."""

    documents: list[dict[str, Any]]
    truth: dict[tuple[int, int], int]


def simulate(plan: Plan, rng: Rng) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """True starts and ends, one row per collective and one column per rank, in microseconds."""
    num = plan.num_steps * len(plan.buckets)
    starts, ends = np.zeros((num, plan.num_ranks)), np.zeros((num, plan.num_ranks))
    ready, left = np.zeros(plan.num_ranks), np.zeros(plan.num_ranks)
    piece = plan.step_us / (len(plan.buckets) + 1)
    for number in range(num):
        is_first = number % len(plan.buckets) == 0
        if is_first:
            ready = np.maximum(ready, left) + piece * (1 + plan.jitter * rng.standard_normal(plan.num_ranks))
            ready[plan.late_rank] += plan.late_us
        ready = ready + piece * np.maximum(0.05, 1 + plan.jitter * rng.standard_normal(plan.num_ranks))
        starts[number] = np.maximum(ready, left + 1)
        transfer = 20 + plan.buckets[number % len(plan.buckets)][1] / 2e5
        left = starts[number].max() + transfer + np.abs(plan.scatter_us * rng.standard_normal(plan.num_ranks))
        ends[number] = left
    return starts, ends


def make_job(plan: Plan, rng: Rng) -> Job:
    starts, ends = simulate(plan, rng)
    truth: dict[tuple[int, int], int] = {}
    documents = []
    for rank in range(plan.num_ranks):
        low, high = plan.skipped[rank]
        kept = [n for n in range(low, len(starts) - high) if rng.random() >= plan.drop_share]
        rows = [
            (n, starts[n, rank], ends[n, rank], plan.buckets[n % len(plan.buckets)], n // len(plan.buckets))
            for n in kept
        ]
        for extra in range(plan.num_extra if rank == plan.extra_rank else 0):
            before = int(rng.integers(len(starts)))  # a stream runs one kernel at a time
            free = ends[before - 1, rank] if before else 0.0, starts[before, rank]
            if free[1] - free[0] > 200:
                at = float(rng.uniform(free[0] + 50, free[1] - 80))
                bucket = plan.buckets[int(rng.integers(len(plan.buckets)))]
                rows.append((-1 - extra, at, at + 30, bucket, before // len(plan.buckets)))
        documents.append(write_rank(plan, rank, rows, truth))
    return Job(documents, truth)


def write_rank(plan: Plan, rank: int, rows: list[Any], truth: dict[tuple[int, int], int]) -> dict[str, Any]:
    """A rank's file: kernels, their launches, steps, and broadcasts of the host."""

    def on_clock(time: float) -> float:
        return round(float(2e6 + time * (1 + plan.drift[rank]) + plan.ahead_us[rank]), 3)

    events: list[dict[str, Any]] = []
    for number, (identity, start, end, (kind, elements), step) in enumerate(sorted(rows, key=lambda row: row[1])):
        begin, stop = on_clock(start), on_clock(end)
        correlation = 1000 + step if plan.is_graph else 5000 + number
        host = on_clock(start - 40)
        names = RENAMED if plan.is_renamed else {key: f"ncclDevKernel_{name}" for key, name in NAMES.items()}
        args: dict[str, Any] = {"correlation": correlation, "stream": 20, "device": rank}
        if plan.has_sizes and not plan.is_graph:
            args |= {"In msg nelems": elements, "Out msg nelems": elements, "dtype": "Float", "Collective name": kind}
            args |= {"Group size": plan.num_ranks}
        if plan.has_groups and not plan.is_graph:
            args |= {"Process Group Name": "0"}
        common = {"ph": "X", "pid": rank, "tid": 20}
        events.append(
            common | {"cat": "kernel", "name": names[kind], "ts": begin, "dur": round(stop - begin, 3), "args": args}
        )
        truth[rank, round(begin * 1000)] = identity
        call = "cudaGraphLaunch" if plan.is_graph else "cudaLaunchKernel"
        if not plan.is_graph or not any(e["name"] == call and e["args"]["correlation"] == correlation for e in events):
            thread = {"ph": "X", "pid": 4242, "tid": 1}
            events.append(
                thread
                | {"cat": "cuda_runtime", "name": call, "ts": host, "dur": 4, "args": {"correlation": correlation}}
            )
            if plan.is_renamed and not plan.is_graph:
                asked = {"allreduce": "all_reduce", "_allgather_base": "all_gather"}.get(kind, kind)
                events.append(
                    thread | {"cat": "user_annotation", "name": f"nccl:{asked}", "ts": host - 1, "dur": 6, "args": {}}
                )
    if plan.has_steps:
        events += mark_steps(plan, rank, rows, on_clock)
    for number in range(plan.num_host_broadcasts):
        at = on_clock(number * plan.step_us / 7) + 0.123
        events.append(
            {
                "ph": "X",
                "cat": "user_annotation",
                "name": "gloo:broadcast",
                "pid": 4242,
                "tid": 9,
                "ts": at,
                "dur": plan.step_us / 9,
                "args": {},
            }
        )
    groups = [{"pg_name": "0", "pg_size": plan.num_ranks, "ranks": list(range(plan.num_ranks))}]
    if plan.num_groups > 1:
        groups.append(
            {"pg_name": "1", "pg_size": 2, "ranks": [0, 1]} if plan.num_ranks > 2 else groups[0] | {"pg_name": "1"}
        )
    return {
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": plan.num_ranks, "pg_config": groups},
        "host_name": "a" if plan.is_one_host else "",
        "traceEvents": events,
    }


def mark_steps(plan: Plan, rank: int, rows: list[Any], on_clock: Any) -> list[dict[str, Any]]:
    """The host's marks around the launches of every step."""
    by_step: dict[int, list[float]] = {}
    for identity, start, _, _, step in rows:
        if identity >= 0:
            by_step.setdefault(step, []).append(start - 45)
    edges = [min(times) for _, times in sorted(by_step.items())]
    found = []
    for place, step in enumerate(sorted(by_step)):
        begin = on_clock(edges[place])
        end = on_clock(edges[place + 1] if place + 1 < len(edges) else max(by_step[step]) + 100)
        name = f"ProfilerStep#{step + plan.step_shift[rank]}"
        found.append(
            {
                "ph": "X",
                "cat": "user_annotation",
                "name": name,
                "pid": 4242,
                "tid": 1,
                "ts": begin,
                "dur": round(end - begin, 3),
                "args": {},
            }
        )
    return found


def find_wrong(job: JobTrace, truth: dict[tuple[int, int], int]) -> int:
    """Matched collectives whose columns are not the same collective."""
    matching = job.matching
    num_wrong = 0
    for group in matching.groups if matching is not None else ():
        starts = {rank: job.by_rank[rank].collectives.start_ns for rank in group.ranks}
        for places in group.places:
            known = [
                truth.get((rank, int(starts[rank][place]))) for rank, place in zip(group.ranks, places, strict=True)
            ]
            num_wrong += len(set(known)) > 1 or any(one is not None and one < 0 for one in known)
    return num_wrong


def judge(plan: Plan, job: JobTrace, truth: dict[tuple[int, int], int]) -> tuple[str, set[str]]:
    """How a job ended, and its doubts."""
    doubts = {doubt.kind for doubt in (*job.doubts, *find_match_doubts(job))}
    num_wrong = find_wrong(job, truth)
    last = job.arrivals.last if job.arrivals is not None else None
    is_named = last is not None and last.rank == plan.late_rank
    if num_wrong and not doubts & PAIRING_DOUBTS:
        return "paired wrongly", doubts
    if last is not None and not is_named and not doubts & PAIRING_DOUBTS:
        return "another rank named", doubts
    if num_wrong or (last is not None and not is_named):
        return "doubted, wrong", doubts
    if last is None:
        return "no rank named", doubts
    return ("doubted, right" if doubts & PAIRING_DOUBTS else "right"), doubts


def run(seed: int, directory: Path) -> tuple[str, Plan, set[str]]:
    rng = np.random.default_rng(seed)
    plan = draw_plan(rng)
    made = make_job(plan, rng)
    files = []
    for rank, document in enumerate(made.documents):
        files.append(directory / f"rank{rank}.json")
        files[-1].write_bytes(msgspec.json.encode(document))
    ending, doubts = judge(plan, read_ranks(files), made.truth)
    return ending, plan, doubts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=NUM_JOBS)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    endings: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as directory:
        for seed in range(wanted.seed, wanted.seed + wanted.jobs):
            ending, plan, doubts = run(seed, Path(directory))
            endings[ending] += 1
            if ending in BAD:
                print(f"seed {seed}: {ending}; {sorted(doubts)}\n  {plan}")
    for ending, number in endings.most_common():
        print(f"{ending:20} {number:6}")
    num_bad = sum(endings[ending] for ending in BAD)
    print(f"jobs misread without a doubt: {num_bad} of {wanted.jobs} (0)")
    return int(num_bad > 0)


if __name__ == "__main__":
    sys.exit(main())

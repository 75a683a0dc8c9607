"""How far plans are from what others have published: steps, and memory.

Steps. The table of Narayanan et al. 2021 (arXiv 2104.04473, table 1) has ten GPT models on 32 to 3072 A100s; its
iteration times follow from its own count of operations, 96·B·s·l·h²·(1 + s/6h + V/16lh) over its TFLOP/s. Layouts are
those of Megatron-LM's examples/sc21/run_table_1.sh. Nothing was found on this table: the shares of `Efficiency` come
from 41 layouts and NCCL timings by VIA-Research/vTrain, and --fit finds them again; that of fused attention from
llm-foundry's rows for devices of 40 GB, so that its rows for 80 GB are scored. The form of the model was settled with
these tables in view, its numbers were not.

Memory. torch's own MemTracker on tensors without memory, for GPT-2 on one rank; a published sweep of batches with
GPT-2 small on one GPU, whose gelu is written out; published rows of FSDP, Llama 3.1 8B with local batch 2 and selective
recomputing (torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3), which are what the allocator had
reserved. What it reserves beyond what is allocated was found on the row of 8 devices; the row of 128 is scored.

    python benchmarks/plan.py [DIRECTORY] [--fit]

DIRECTORY has vTrain's and llm-foundry's tables; without them their parts are not run.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import optimize

from scalelab.predict.devices import find_device
from scalelab.predict.layout_cost import Efficiency, time_step
from scalelab.predict.layouts import Kernels, Layout, PlannedJob, find_footprint
from scalelab.predict.network_model import LinkSpeed, reduce_all
from scalelab.predict.planning import enclose_step
from scalelab.predict.transformer_shape import GPT2_SMALL, LLAMA3_8B, Transformer

GIBI = 2**30
MOST_STEP_ERROR, MOST_TRACKER_ERROR, MOST_FSDP_ERROR = 0.10, 0.02, 0.05
CALCULON = -0.12
"""The error on the 1T row of the analytical model of Isaev et al. 2023."""
VOCABULARY, SEQUENCE = 51200, 2048
TRACKED_GIB = 12.08
"""GPT-2 small, batch 8, sequence 1024, float32, no dropout, logits kept, by MemTracker of torch 2.13."""
BATCH_ROWS = {8: 16104, 16: 30224, 32: 58438}
"""MiB at the peak by batch: GPT-2 small, sequence 1024, float32, dropout 0.1, one H100 (a published assignment)."""
FSDP_ROWS = {8: 82.4, 128: 67.0}
"""GiB reserved by number of devices."""
FITTED = ("gemm", "tile", "depth", "memory", "node", "launch_seconds")
MOST_SHARE = 0.95
WORST = 1e9
FIRST_GUESS = (0.8, 100.0, 60.0, 0.8, 0.6, 5e-4)
MPT_SHAPES = {
    "125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16), "3b": (32, 2560, 20),
    "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56), "70b": (80, 8192, 64),
}  # fmt: skip


class Megatron(NamedTuple):
    name: str
    width: int
    layers: int
    heads: int
    tensor: int
    pipeline: int
    micro_batch: int
    rounds: int
    devices: int
    batch: int
    tflops: float


MEGATRON = (
    Megatron("1.7B", 2304, 24, 24, 1, 1, 16, 1, 32, 512, 137),
    Megatron("3.6B", 3072, 30, 32, 2, 1, 16, 1, 64, 512, 138),
    Megatron("7.5B", 4096, 36, 32, 4, 1, 16, 1, 128, 512, 142),
    Megatron("18B", 6144, 40, 48, 8, 1, 8, 1, 256, 1024, 135),
    Megatron("39B", 8192, 48, 64, 8, 2, 4, 1, 512, 1536, 138),
    Megatron("76B", 10240, 60, 80, 8, 4, 2, 3, 1024, 1792, 140),
    Megatron("145B", 12288, 80, 96, 8, 8, 2, 2, 1536, 2304, 148),
    Megatron("310B", 16384, 96, 128, 8, 16, 1, 2, 1920, 2160, 155),
    Megatron("530B", 20480, 105, 128, 8, 35, 1, 3, 2520, 2520, 163),
    Megatron("1T", 25600, 128, 160, 8, 64, 1, 1, 3072, 3072, 163),
)


class Case(NamedTuple):
    job: PlannedJob
    layout: Layout
    seconds: float
    """Published."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path, nargs="?", default=Path("../shared/reference/tables"))
    parser.add_argument("--fit", action="store_true", help="find the shares again (a minute)")
    asked = parser.parse_args()
    efficiency = Efficiency()
    layouts = list(read_vtrain(asked.directory))
    if asked.fit and layouts:
        efficiency = fit(layouts, asked.directory)
    largest = score_megatron(efficiency)
    score_table("vTrain's layouts, on which the shares were found", layouts, efficiency)
    foundry = list(read_foundry(asked.directory))
    for name, use in (("a100-40gb", "attention's share was found on them"), ("a100-80gb", "scored")):
        cases = [case for case in foundry if case.job.device.name == name]
        score_table(f"llm-foundry's FSDP runs on {name}, {use}", cases, efficiency)
    tracked = score_tracker()
    score_batches()
    fsdp = score_fsdp()
    print(
        f"\nplan: 1T step {largest:+.1%} (bar 10 %, calculon {CALCULON:.0%}), GPT-2 small {tracked:+.2%} (bar 2 %),"
        f" FSDP memory {fsdp:+.1%} (bar 5 %)"
    )
    holds = abs(largest) <= MOST_STEP_ERROR and abs(tracked) <= MOST_TRACKER_ERROR and abs(fsdp) <= MOST_FSDP_ERROR
    return 0 if holds else 1


def score_megatron(efficiency: Efficiency) -> float:
    """Print the ten rows; gives the error of the largest."""
    print("Narayanan et al. 2021, iteration time [s]: published, predicted with its 80 % interval, error")
    errors, inside = [], 0
    for row, case in zip(MEGATRON, map(make_megatron, MEGATRON), strict=True):
        step = enclose_step(case.job, case.layout, efficiency)
        errors.append(step.value / case.seconds - 1)
        inside += step.holds(case.seconds)
        peer = f"   (calculon {CALCULON:.0%})" if row.name == "1T" else ""
        interval = f"{step.low:6.2f} to {step.high:6.2f}"
        print(f"  {row.name:>5} {case.seconds:7.2f} {step.value:7.2f} ({interval}) {errors[-1]:+6.1%}{peer}")
    print(
        f"  median {np.median(np.abs(errors)):.1%}, worst {max(map(abs, errors)):.1%}, {inside} of 10 in the interval"
    )
    return errors[-1]


def make_megatron(row: Megatron) -> Case:
    width, layers = row.width, row.layers
    operations = 96.0 * row.batch * SEQUENCE * layers * width**2
    operations *= 1 + SEQUENCE / (6 * width) + VOCABULARY / (16 * layers * width)
    layout = Layout(
        tensor=row.tensor, pipeline=row.pipeline, data=row.devices // (row.tensor * row.pipeline),
        micro_batch=row.micro_batch, interleave=row.rounds, checkpointing="full",
    )  # fmt: skip
    # Without a pipeline that script takes torch's DDP, which overlaps; with one its own, which does not.
    job = make_job(layers, width, row.heads, row.batch, has_overlap=row.pipeline == 1)
    return Case(job, layout, operations / (row.tflops * 1e12 * row.devices))


def make_job(layers: int, width: int, heads: int, batch: int, *, has_overlap: bool) -> PlannedJob:
    """A job as they were in 2021: half precision, attention not fused."""
    model = Transformer(num_layers=layers, width=width, num_heads=heads, vocabulary=VOCABULARY, sequence=SEQUENCE)
    return PlannedJob(
        model=model, device=find_device("a100-80gb"), dtype="float16", global_batch=batch, has_fused_attention=False,
        dropout=0.1, has_overlap=has_overlap,
    )  # fmt: skip


def read_rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_vtrain(directory: Path) -> Iterator[Case]:
    for row in read_rows(directory / "vtrain_multinode_a100_megatron_deepspeed.csv"):
        number = {name: int(row[name]) for name in ("layers", "hidden", "heads", "global_batch", "micro_batch")}
        job = make_job(number["layers"], number["hidden"], number["heads"], number["global_batch"], has_overlap=False)
        layout = Layout(
            tensor=int(row["tp"]), pipeline=int(row["pp"]), data=int(row["dp"]), micro_batch=number["micro_batch"],
            checkpointing="full",
        )  # fmt: skip
        yield Case(job, layout, float(row["iter_ms"]) / 1000)


def read_foundry(directory: Path) -> Iterator[Case]:
    for row in read_rows(directory / "llmfoundry_mpt_throughput.csv"):
        layers, width, heads = MPT_SHAPES[row["model"].lower()]
        model = Transformer(
            num_layers=layers, width=width, num_heads=heads, vocabulary=50368, sequence=int(row["seq_len"]),
            has_biases=False,
        )  # fmt: skip
        device = find_device(row["gpu"].replace("_", "-"))
        job = PlannedJob(model=model, device=device, global_batch=int(row["global_batch"]))
        layout = Layout(
            data=int(row["n_gpus"]), micro_batch=int(row["micro_batch"]), zero=3,
            checkpointing="full" if row["act_ckpt"] == "True" else "none",
        )  # fmt: skip
        if job.global_batch % (layout.data * layout.micro_batch) == 0:
            yield Case(job, layout, job.tokens / float(row["tok_per_s"]))


def score_table(title: str, cases: Sequence[Case], efficiency: Efficiency) -> None:
    if not cases:
        print(f"\n{title}: not run, its table is not there")
        return
    steps = [enclose_step(case.job, case.layout, efficiency) for case in cases]
    errors = np.array([step.value / case.seconds - 1 for step, case in zip(steps, cases, strict=True)])
    inside = np.mean([step.holds(case.seconds) for step, case in zip(steps, cases, strict=True)])
    print(
        f"\n{title}: {len(cases)} rows, median error {np.median(np.abs(errors)):.1%}, 90th percentile"
        f" {np.quantile(np.abs(errors), 0.9):.0%}, 80 % intervals hold {inside:.0%}"
    )


def fit(cases: Sequence[Case], directory: Path) -> Efficiency:
    """The shares of `Efficiency`, found again: links on NCCL's timings, the rest on layouts; errors beyond 25 % count
    as that, since some rows are not of this model's making."""
    link, latency = fit_link(directory)
    first = np.log(FIRST_GUESS)

    def make(values: np.ndarray) -> Efficiency:
        found = dict(zip(FITTED, map(float, np.exp(values)), strict=True))
        return Efficiency(**found, link=link, link_latency=latency)

    def miss(values: np.ndarray) -> float:
        found = make(values)
        if max(found.gemm, found.memory, found.node) > MOST_SHARE:
            return WORST
        errors = [abs(math.log(time_step(case.job, case.layout, found).seconds / case.seconds)) for case in cases]
        return float(np.sum(np.minimum(errors, 0.25)) + 0.05 * np.sum((values - first) ** 2))

    best = min((descend(miss, first, seed) for seed in range(3)), key=miss)
    found = make(best)
    print("found:", ", ".join(f"{name} {getattr(found, name):.3g}" for name in (*FITTED, "link", "link_latency")))
    return found


def descend(miss: Callable[[np.ndarray], float], first: np.ndarray, seed: int) -> np.ndarray:
    """From one start to the lowest point near it; begun again there, since a simplex may collapse early."""
    values = first + np.random.default_rng(seed).normal(0, 0.2, len(first))
    for _ in range(2):
        values = optimize.minimize(miss, values, method="Nelder-Mead", options={"maxfev": 1500}).x
    return values


def fit_link(directory: Path) -> tuple[float, float]:
    """The share of NVLink's rate and the seconds of a hop."""
    rows = read_rows(directory / "vtrain_nccl_allreduce_intranode.csv")
    if not rows:
        return Efficiency().link, Efficiency().link_latency
    timed = [(int(row["n_gpus"]), int(row["bytes"]), float(row["time_ns_outofplace"]) * 1e-9) for row in rows]
    rate = find_device("a100-80gb").link_rate

    def miss(values: np.ndarray) -> float:
        share, hop = map(float, np.exp(values))
        cost = LinkSpeed(latency_seconds=hop, bytes_per_second=rate * share)
        return sum(abs(math.log(reduce_all(cost, ranks, size) / seconds)) for ranks, size, seconds in timed)

    share, hop = np.exp(optimize.minimize(miss, np.log([0.8, 1e-5]), method="Nelder-Mead").x)
    return float(share), float(hop)


def make_gpt2(batch: int, dropout: float = 0.0) -> PlannedJob:
    return PlannedJob(
        model=GPT2_SMALL, device=find_device("h100-sxm"), dtype="float32", global_batch=batch, dropout=dropout
    )


def score_tracker() -> float:
    """GPT-2 against torch's own tracker, live where torch is there; gives the error of batch 8."""
    print("\nGPT-2 small, sequence 1024, float32, one rank: peak [GiB] by torch's tracker, by the plan, error")
    predicted = {
        batch: find_footprint(make_gpt2(batch), Layout(micro_batch=batch)).total_bytes / GIBI for batch in (2, 8)
    }
    for batch, planned in predicted.items():
        tracked = track(batch)
        if tracked is None:
            print(f"  batch {batch}: {planned:.3f}; not run, torch is not there")
            continue
        print(f"  batch {batch}: {tracked:.3f} {planned:.3f} {planned / tracked - 1:+.2%}")
    return predicted[8] / TRACKED_GIB - 1


def track(batch: int) -> float | None:
    """The peak of a second step by MemTracker, on tensors that have no memory."""
    try:
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.distributed._tools.mem_tracker import MemTracker

        from scalelab.worker.models.gpt2 import Gpt2
        from scalelab.workloads.gpt2_options import GPT2_SHAPES
    except ImportError:
        return None
    with FakeTensorMode():
        model = Gpt2(GPT2_SHAPES["small"], 0.0)
        optimizer = torch.optim.AdamW(model.parameters())
        tokens, targets = (torch.randint(50257, (batch, 1024)) for _ in range(2))
        tracker = MemTracker()
        tracker.track_external(model, optimizer, tokens, targets)
        with tracker:
            for _ in range(2):
                tracker.reset_mod_stats()
                logits = model(tokens)
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        peak = tracker.get_tracker_snapshot("peak")
    return float(sum(part["Total"] for part in peak.values()) / GIBI)


def score_batches() -> None:
    """A published sweep of batches. Its loop keeps gradients until the next backward."""
    print("\nGPT-2 small on one GPU, a published sweep: peak [MiB] published, planned, error")
    kernels = Kernels(has_fused_gelu=False, keeps_gradients=True)
    for batch, published in BATCH_ROWS.items():
        found = find_footprint(make_gpt2(batch, 0.1), Layout(micro_batch=batch), kernels).total_bytes / 2**20
        print(f"  batch {batch:>2}: {published} {found:.0f} {found / published - 1:+.1%}")


def score_fsdp() -> float:
    """Published rows of FSDP; gives the error of the one that nothing was found on."""
    print("\nLlama 3.1 8B, FSDP: memory [GiB] reserved as published, allocated and reserved by the plan, error")
    error = math.inf
    for devices, published in FSDP_ROWS.items():
        job = PlannedJob(model=LLAMA3_8B, device=find_device("h100-sxm"), global_batch=2 * devices)
        layout = Layout(data=devices, micro_batch=2, zero=3, checkpointing="selective")
        found = find_footprint(job, layout, Kernels(keeps_logits=False))
        error = found.reserved_bytes / GIBI / published - 1
        use = "the allocator's share was found on it" if devices == 8 else "scored"
        sizes = f"{found.total_bytes / GIBI:.1f} {found.reserved_bytes / GIBI:.1f}"
        print(f"  {devices:>3} devices: {published} {sizes} {error:+.1%} ({use})")
    return error


if __name__ == "__main__":
    sys.exit(main())

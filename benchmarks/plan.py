"""How far the steps of plans are from what others have published (`plan_memory.py`: their memory).

Found on (A100): the shares of `Efficiency` on 41 layouts and NCCL timings by VIA-Research/vTrain (--fit finds
them again), fused attention on llm-foundry's rows for devices of 40 GB. Found on (H100): how much of its peak it holds
on the four rows without a pipeline of Megatron-Core's table, or with 500 W on torchtitan's row of 8 devices with
torch.compile; 8-bit products and operators that are not fused on its two other rows of 8 devices. Scored, nothing found
on them: Narayanan et al. 2021 (arXiv 2104.04473, table 1; layouts of Megatron-LM's examples/sc21/run_table_1.sh, times
from its own count of operations), Korthikanti et al. 2022 (table 5), llm-foundry's rows for 80 GB, Megatron-LM's
figures of 2020 on V100s and A100s, Megatron-Core's rows with a pipeline, torchtitan's other rows. Found on (DeepSpeed):
what its ZeRO-3 gets of the links, and how its pipelines stall, on bigscience's rows, which have Megatron-LM on the same
nodes beside them. Their authors call them right to 40 %, so they are not scored: the same job took up to 1.8 times as
long on another day, and the fastest row of a size counts. The form of the model was settled with these tables in view,
its numbers were not. Parts of a layout that a table does not state are searched,
as `scalelab plan` does; torchtitan makes as many micro-batches as there are pipeline stages unless it is configured
otherwise (`pipeline_parallel_microbatches`). Beside it: 6 operations per parameter and token at 40 % of the peak.

A layout that was really run must never be said not to fit.

    python benchmarks/plan.py [DIRECTORY] [--fit]

DIRECTORY has the tables; without them their parts are not run.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import optimize

from scalelab.predict.devices import find_device
from scalelab.predict.footprint import find_footprint, is_possible
from scalelab.predict.layout_cost import DEEPSPEED_NODE, Efficiency, time_step
from scalelab.predict.layouts import Asked, Layout, PlannedJob, list_layouts
from scalelab.predict.network_model import LinkSpeed, reduce_all
from scalelab.predict.planning import enclose_step
from scalelab.predict.transformer_shape import KNOWN_MODELS, Transformer

MANY_ROWS = 40
NUM_FLAT = 4
"""Rows of Megatron-Core's table without a pipeline."""
NUM_FIRST = 3
"""Rows of torchtitan's table on 8 devices without context parallelism."""
KORTHIKANTI = {
    "megatron-22B": (48, 6144, 64, 1), "gpt3-175B": (96, 12288, 96, 3), "turing-530B": (105, 20480, 128, 3),
    "megatron-1T": (128, 25600, 160, 1),
}  # fmt: skip
"""Layers, width, heads, rounds (arXiv 2205.05198, table 3)."""
MEGATRON_2020 = {"1B": (24, 1920, 1), "2B": (30, 2304, 2), "4B": (36, 3072, 4), "8B": (42, 4096, 8)}
"""Layers, width, tensor-parallel ranks."""
VOCABULARY, SEQUENCE = 51200, 2048
VTRAIN_NODE_RATE = 100e9
"""Bytes per second of a node: 800 Gbit/s, as in vTrain's own configurations (inter_node_bandwidth)."""
FITTED = ("gemm", "tile", "depth", "memory", "node", "launch_seconds")
MOST_SHARE = 0.95
WORST = 1e9
FIRST_GUESS = (0.8, 100.0, 60.0, 0.8, 0.6, 5e-4)
MPT_SHAPES = {
    "125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16), "3b": (32, 2560, 20),
    "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56), "70b": (80, 8192, 64),
}  # fmt: skip
BIGSCIENCE_SHAPES = {
    "7.5B": (36, 4096), "18B": (40, 6144), "30B": (48, 7168), "39B": (48, 8192), "52B": (64, 8192), "65B": (64, 9216),
    "116B": (64, 12288), "206B": (64, 16384),
}  # fmt: skip
"""Layers and width, by the scripts beside the table (bigscience, experiments/gpt2-meg); 32 heads, sequences of 1024."""
BIGSCIENCE_DEVICE = replace(find_device("v100"), per_node=4, node_rate=50e9)
"""Jean Zay: four Omni-Path links of 100 Gbit/s."""
OFFLOADED_LINE = "400"


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
    name: str
    job: PlannedJob
    layout: Layout
    seconds: float
    """Published."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path, nargs="?", default=Path("../shared/reference/tables"))
    parser.add_argument("--fit", action="store_true", help="find the numbers again (minutes)")
    asked = parser.parse_args()
    folder: Path = asked.directory
    efficiency = Efficiency()
    vtrain = list(read_vtrain(folder))
    if asked.fit and vtrain:
        efficiency = fit(vtrain, folder)
    if asked.fit:
        fit_deepspeed(list(read_bigscience(folder)))
    foundry, hopper, titan = list(read_foundry(folder)), list(read_hopper(folder)), list(read_titan(folder))
    large = [case for case in foundry if case.job.device.name == "a100-80gb"]
    found_on = {
        "vTrain, A100": vtrain,
        "llm-foundry FSDP, A100 40 GB": [case for case in foundry if case not in large],
        "Megatron-Core, H100, no pipeline": hopper[:NUM_FLAT],
        "torchtitan FSDP, 8 H100s of 500 W": titan[:NUM_FIRST],
    }
    scored = {
        "Narayanan 2021, A100": [make_megatron(row) for row in MEGATRON],
        "Korthikanti 2022, A100": list(read_korthikanti(folder)),
        "llm-foundry FSDP, A100 80 GB": large,
        "Megatron-LM 2020, V100 and A100": list(read_megatron_2020(folder)),
        "Megatron-Core, H100, pipelines": hopper[NUM_FLAT:],
        "torchtitan, H100 of 500 W": titan[NUM_FIRST:],
    }
    print(f"{'table':36}{'rows':>5}{'median':>8}{'p90':>7}{'bias':>7}{'held':>6}{'6ND median':>12}{'6ND p90':>9}")
    for title, cases in found_on.items():
        score(f"found on: {title}", cases, efficiency)
    groups = [score(title, cases, efficiency) for title, cases in scored.items()]
    if asked.fit:
        compare_fastest([*map(make_megatron, MEGATRON), *read_korthikanti(folder), *hopper, *titan, *foundry])
    print_rows(scored, efficiency)
    errors = np.concatenate([group.errors for group in groups])
    median, far = np.median(errors), np.quantile(errors, 0.9)
    held = np.mean(np.concatenate([group.held for group in groups]))
    is_better = all(np.median(group.errors) <= np.median(group.naive) for group in groups if len(group.errors))
    ran = [case for cases in (*found_on.values(), *scored.values()) for case in cases]
    ran += [case for case in read_bigscience(folder) if case.layout.zero < 3]  # those of ZeRO-3 offload activations
    impossible = [case for case in ran if not is_possible(case.job, case.layout)]
    print(
        f"\nplan: {len(errors)} steps off by {median:.1%} (bar 5 %), p90 {far:.0%} (bar 15 %), 80 % intervals hold"
        f" {held:.0%} (bar 75 to 90 %), {'never' if is_better else 'somewhere'} worse than 6ND, {len(impossible)} rows"
        " that ran do not fit (bar 0)"
    )
    return 0 if median <= 0.05 and far <= 0.15 and 0.75 <= held <= 0.9 and is_better and not impossible else 1


class Group(NamedTuple):
    """How far off the rows of a table are: absolute relative errors, whether intervals hold, and 6ND's errors."""

    errors: np.ndarray
    held: np.ndarray
    naive: np.ndarray


def score(title: str, cases: Sequence[Case], efficiency: Efficiency) -> Group:
    if not cases:
        print(f"{title:36}    –   its table is not there")
        return Group(np.array([]), np.array([]), np.array([]))
    steps = [enclose_step(case.job, case.layout, efficiency) for case in cases]
    pairs = list(zip(steps, cases, strict=True))
    errors = np.array([step.value / case.seconds - 1 for step, case in pairs])
    held = np.array([step.holds(case.seconds) for step, case in pairs])
    naive = np.abs([guess_naively(case) / case.seconds - 1 for case in cases])
    far, naive_far = np.quantile(np.abs(errors), 0.9), np.quantile(naive, 0.9)
    print(
        f"{title:36}{len(cases):>5}{np.median(np.abs(errors)):>8.1%}{far:>7.0%}{np.mean(errors):>+7.0%}"
        f"{np.mean(held):>6.0%}{np.median(naive):>12.1%}{naive_far:>9.0%}"
    )
    return Group(np.abs(errors), held, naive)


def print_rows(tables: dict[str, list[Case]], efficiency: Efficiency) -> None:
    """Every row of the smaller tables."""
    print("\nstep [s]: published, planned with its 80 % interval, error, 6ND's error")
    for title, cases in tables.items():
        for case in cases if len(cases) < MANY_ROWS else ():
            step = enclose_step(case.job, case.layout, efficiency)
            interval = f"({step.low:.2f} to {step.high:.2f})"
            naive = guess_naively(case) / case.seconds - 1
            print(
                f"  {title[:16]:16} {case.name[:34]:34}{case.seconds:8.2f}{step.value:8.2f} {interval:20}"
                f"{step.value / case.seconds - 1:+7.1%}{naive:+7.0%}"
            )


def guess_naively(case: Case) -> float:
    """6 operations per parameter and token at 40 % of the peak of 16-bit products."""
    job = case.job
    peak = job.device.peak("bfloat16" if "bfloat16" in job.device.peaks else "float16")
    return 6 * job.model.num_parameters * job.tokens / (0.4 * peak * case.layout.num_devices)


def search(job: PlannedJob, num_devices: int, asked: Asked) -> Layout:
    """The fastest layout that fits."""
    layouts = [one for one in list_layouts(job, num_devices, asked) if is_possible(job, one)]
    return min(layouts, key=lambda one: time_step(job, one, Efficiency()).seconds)


def compare_fastest(cases: Sequence[Case]) -> None:
    """The fastest published row of every job beside the fastest layout that plan finds for it, with today's kernels."""
    jobs: dict[tuple[object, ...], Case] = {}
    for case in cases:
        job = case.job
        key = (job.model, job.device.name, case.layout.num_devices, job.dtype)
        best = jobs.get(key, case)
        if case.layout.context == 1:
            jobs[key] = min(best, case, key=lambda one: one.seconds / one.job.tokens)
    found = []
    for case in jobs.values():
        now = replace(case.job, has_fused_attention=True, dropout=0.0, has_overlap=True, is_eager=False)
        now = replace(now, has_tensor_overlap=False)
        num_devices = case.layout.num_devices
        fitting = [
            time_step(now, layout, Efficiency()).seconds
            for layout in list_layouts(now, num_devices)
            if find_footprint(now, layout).device_bytes <= now.device.memory_bytes
        ]
        found += [case.seconds / min(fitting)] if fitting else []
    median, most = np.quantile(found, [0.5, 0.9])
    print(f"found: {len(found)} jobs took {median:.3g} times the fastest layout, nine of ten at most {most:.3g}")


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
    return Case(row.name, job, layout, operations / (row.tflops * 1e12 * row.devices))


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
        job = replace(job, device=replace(job.device, node_rate=VTRAIN_NODE_RATE))
        layout = Layout(
            tensor=int(row["tp"]), pipeline=int(row["pp"]), data=int(row["dp"]), micro_batch=number["micro_batch"],
            checkpointing="full",
        )  # fmt: skip
        yield Case(f"{row['params_b']}B", job, layout, float(row["iter_ms"]) / 1000)


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
            yield Case(row["model"], job, layout, job.tokens / float(row["tok_per_s"]))


def read_korthikanti(directory: Path) -> Iterator[Case]:
    """Full recomputing, and that of attention with sequence parallelism; two of the models in three rounds."""
    for row in read_rows(directory / "korthikanti2022_table5_iter_time.csv"):
        layers, width, heads, rounds = KORTHIKANTI[row["model"]]
        is_full = row["recompute"] == "full"
        job = make_job(layers, width, heads, int(row["global_batch"]), has_overlap=False)
        layout = Layout(
            tensor=int(row["tp"]), pipeline=int(row["pp"]), data=int(row["dp"]), micro_batch=int(row["micro_batch"]),
            checkpointing="full" if is_full else "attention", has_split_sequence=not is_full, interleave=rounds,
        )  # fmt: skip
        yield Case(f"{row['model']} {row['recompute']}", job, layout, float(row["iter_s"]))


def read_megatron_2020(directory: Path) -> Iterator[Case]:
    """Sequences of 1024, everything recomputed, one micro-batch a replica; sizes are in the table's source column."""
    for row in read_rows(directory / "megatron_2020_mp_dp_scaling.csv"):
        layers, width, tensor = MEGATRON_2020[row["case"]]
        devices, batch = int(row["n_gpus"]), int(row["global_batch"])
        name = "v100" if row["system"].startswith("V100") else "a100-40gb"
        job = make_job(layers, width, width // 128, batch, has_overlap=True)
        model = replace(job.model, sequence=1024)
        data = devices // tensor
        layout = Layout(tensor=tensor, data=data, micro_batch=batch // data, checkpointing="full")
        seconds = float(row["iter_ms"]) / 1000
        yield Case(
            f"{row['case']} {row['system']}", replace(job, model=model, device=find_device(name)), layout, seconds
        )


def read_hopper(directory: Path) -> Iterator[Case]:
    """Micro-batches and rounds are not stated: searched. Vocabulary and sequence are those of its README."""
    for row in read_rows(directory / "megatron_h100_weak_scaling_2024.csv"):
        model = Transformer(
            num_layers=int(row["layers"]), width=int(row["hidden"]), num_heads=int(row["heads"]), vocabulary=131072,
            sequence=4096, num_positions=0,
        )  # fmt: skip
        devices, batch = int(row["n_gpus"]), int(row["global_batch"])
        job = PlannedJob(model=model, device=find_device("h100-sxm"), global_batch=batch, has_tensor_overlap=True)
        layout = search(job, devices, Asked(tensor=int(row["tp"]), pipeline=int(row["pp"]), zero=1))
        seconds = model.count_operations(batch) / (float(row["tflops_per_gpu"]) * 1e12 * devices)
        yield Case(row["model"], job, layout, seconds)


def read_titan(directory: Path) -> Iterator[Case]:
    for row in read_rows(directory / "torchtitan_llama3_h100_202412.csv"):
        sizes = dict(re.findall(r"([a-z]+)([0-9]+)", row["parallelism"]))
        part = {name: int(sizes.get(name, 1)) for name in ("fsdp", "tp", "pp", "cp")}
        used = row["techniques"].lower()
        model = replace(KNOWN_MODELS[row["model"].lower().replace("3.1", "3")], sequence=int(row["seq_len"]))
        batch = int(row["local_batch"]) * part["fsdp"]
        job = PlannedJob(
            model=model, device=find_device("h100-500w"), global_batch=batch, is_eager="compile" not in used,
            dtype="float8" if "fp8" in used else "bfloat16", has_tensor_overlap="asynctp" in used,
        )  # fmt: skip
        layout = Layout(
            tensor=part["tp"], pipeline=part["pp"], context=part["cp"], data=part["fsdp"], zero=3,
            micro_batch=int(row["local_batch"]) // part["pp"], checkpointing=row["act_ckpt"],
            has_split_sequence=part["tp"] > 1, interleave=2 if "interleaved" in used else 1,
        )  # fmt: skip
        seconds = job.tokens / (float(row["tok_per_s_gpu"]) * layout.num_devices)
        yield Case(f"{row['table']} {row['model']} {row['parallelism']}", job, layout, seconds)


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


def read_bigscience(directory: Path) -> Iterator[Case]:
    """Named by the engine and size. Its document says tensor 4 wherever a row does not; other rows do not add up."""
    for row in read_rows(directory / "bigscience_v100_gpt2.csv"):
        engine = "zero" if "ZeRO" in row["section"] else "3d" if "3D" in row["section"] else "megatron"
        if row["size"] not in BIGSCIENCE_SHAPES or row["section"].startswith("HF") or row["line"] == OFFLOADED_LINE:
            continue
        layers, width = BIGSCIENCE_SHAPES[row["size"]]
        devices, micro, tensor = int(row["n_gpus"]), int(row["mbs"]), int(row["tp"] or 4)
        pipeline = int(row["pp"] or 1)
        data = devices // tensor if engine == "zero" else int(row["dp"])
        layout = Layout(
            tensor=tensor, pipeline=pipeline, data=data, micro_batch=micro, zero=3 if engine == "zero" else 0,
            checkpointing="full",
        )  # fmt: skip
        job = make_job(layers, width, 32, int(row["gbs"]), has_overlap=engine == "zero")
        model = replace(job.model, sequence=1024, vocabulary=50304)
        job = replace(job, model=model, device=BIGSCIENCE_DEVICE, is_deepspeed=engine == "zero")
        if layout.num_devices == devices and job.global_batch % (data * micro) == 0:
            yield Case(f"{engine} {row['size']}", job, layout, float(row["sec_per_iter"]))


def fit_deepspeed(cases: Sequence[Case]) -> None:
    """DeepSpeed beside Megatron-LM, size by size: how its pipelines stall, and the links that ZeRO-3 gets."""

    def compare(name: str, shares: Efficiency) -> list[float]:
        named = [case for case in cases if case.name == name]
        return [case.seconds / time_step(case.job, case.layout, shares).seconds for case in named]

    plain = Efficiency()
    stalls = [min(compare(f"3d {size}", plain)) / min(compare(f"megatron {size}", plain)) for size in ("39B", "52B")]
    slower = min(compare("megatron 52B", plain))

    def miss(share: float) -> float:
        return float(np.median(compare("zero 52B", plain.scale(node=share / DEEPSPEED_NODE)))) / slower - 1

    share = optimize.brentq(miss, 0.01, 1.0, xtol=1e-3)
    print(f"found: DeepSpeed's stall {np.exp(np.mean(np.log(stalls))) - 1:.3g}, its share of the links {share:.3g}")


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


if __name__ == "__main__":
    sys.exit(main())

"""What reading a trace costs: `scalelab.trace` against HolisticTraceAnalysis (PyPI: `traceinsight`).

The trace is that of a real run of two ranks on this machine, repeated until the file has the wanted size, always in the
same number of steps. As there is no GPU, every operator of it launches a kernel, with the events and arguments that
Kineto writes for one, and every all-reduce one of NCCL's. Each tool reads the same file in a process of its own, back
to back, for the same question: the time of the device in parts, and how much communication lies beside compute.
The CPU time and the largest memory are what the system counted for that process, start and imports included. Ours
answers by their definitions (`--hta`); the third row is our default: exact, with all that it counts.

The bars: at most 1/5 of its CPU time and 1/2 of its memory at 50 MB, 1/6 and 1/4 at 470 MB; and the same numbers,
within 1 µs and 0.01 percentage points.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

NUM_STEPS = 6
BARS = {50: (5.0, 2.0), 470: (6.0, 4.0)}
"""By megabytes: how many times less CPU time and memory ours must take."""
TOOLS = {"hta": "traceinsight", "ours": "scalelab --hta", "exact": "scalelab, exact"}
KERNELS = ("aten::addmm", "aten::mm", "aten::add_", "aten::mul_", "aten::relu", "aten::copy_", "aten::sum", "aten::t")
FIRST_CORRELATION = 1_000_000
"""traceinsight fails where all of them fit 16 bits and there are more events than that."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a process took, and what it said."""

    cpu_seconds: float
    memory_bytes: int
    answer: dict[str, float]


def record_trace(directory: Path) -> list[dict[str, Any]]:
    """The events of rank 0 of a real run."""
    flags = "--workload mlp --dim 256 --depth 4 --global-batch-size 32 --ranks 2 --strategy ddp --rounds 1 --steps 6"
    command = [sys.executable, "-m", "scalelab", "run", "strong-scaling", *flags.split(), "--warmup", "2"]
    command += ["--profile-steps", "3", "--runs-dir", str(directory)]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = directory.glob("*/trials/ddp-2*/trace/rank0.json.gz")
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


class Tile:
    """The recorded events with what a device would add to them, to be written again and again."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        complete = [event for event in events if event["ph"] == "X" and event["cat"] != "Trace"]
        self.first_us = min(event["ts"] for event in complete)
        self.length_us = max(event["ts"] + event["dur"] for event in complete) - self.first_us + 50
        self.meta = [event for event in events if event["ph"] == "M"]
        self.events = [event for event in complete if not event["name"].startswith("ProfilerStep")]
        self.num_correlations = 0
        for event in [*self.events]:
            if event["name"].startswith("c10d::allreduce"):
                self._add_kernel(event, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 20)
            elif event["name"].startswith(KERNELS):
                self._add_kernel(event, f"void at::native::{event['name'][6:]}_kernel<float, 128, 4>(float*, int)", 7)

    def _add_kernel(self, operator: dict[str, Any], name: str, stream: int) -> None:
        """A launch inside the operator, the kernel some microseconds later, and the arrow between them."""
        number = self.num_correlations
        self.num_correlations += 1
        launch = operator["ts"] + operator["dur"] / 3
        start, length = launch + 7.25 + number % 5, 5 * operator["dur"] if stream == 20 else 0.8 * operator["dur"]
        host = {"pid": operator["pid"], "tid": operator["tid"]}
        args = {"External id": 7, "queued": 0, "device": 0, "context": 1, "stream": stream, "correlation": number}
        args |= {"registers per thread": 96, "shared memory": 0, "blocks per SM": 1.5, "warps per SM": 6.0}
        args |= {"grid": [36, 1, 1], "block": [256, 1, 1], "est. achieved occupancy %": 12}
        if stream == 20:
            args |= {
                "Collective name": "allreduce",
                "In msg nelems": 263168,
                "Out msg nelems": 263168,
                "dtype": "Float",
            }
            args |= {"Group size": 2, "Process Group Name": "0", "Process Group Ranks": "[0, 1]"}
        runtime = {"External id": 7, "cbid": 211, "correlation": number}
        arrow = {"id": number, "cat": "ac2g", "name": "ac2g"}
        device = {"pid": 0, "tid": stream}
        self.events += [
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", **host, "ts": launch, "dur": 3.5}
            | {"args": runtime},
            {"ph": "s", **arrow, **host, "ts": launch},
            {"ph": "X", "cat": "kernel", "name": name, **device, "ts": start, "dur": length, "args": args},
            {"ph": "f", **arrow, **device, "ts": start, "bp": "e"},
        ]

    def write(self, index: int) -> Iterator[str]:
        """The events of the tile of that number."""
        shift = index * self.length_us
        for event in self.events:
            moved = dict(event, ts=round(event["ts"] + shift, 3))
            if "dur" in event:
                moved["dur"] = round(event["dur"], 3)
            args = event.get("args")
            if args and "correlation" in args:
                number = FIRST_CORRELATION + index * self.num_correlations + args["correlation"]
                moved["args"] = args | {"correlation": number, "External id": number}
            if "id" in event:
                moved["id"] = FIRST_CORRELATION + index * self.num_correlations + event["id"]
            yield json.dumps(moved)


def build_trace(tile: Tile, path: Path, megabytes: int) -> int:
    """Write tiles until the file is as large as wanted; the number of events."""
    header = {"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 2}}
    header |= {"displayTimeUnit": "ms", "baseTimeNanoseconds": 0}
    num_events = 0
    with path.open("w") as file:
        file.write(json.dumps(header)[:-1] + ', "traceEvents": [\n')
        file.writelines(json.dumps(event) + ",\n" for event in tile.meta)
        size = len("".join(tile.write(0))) + 2 * len(tile.events)
        num_tiles = max(NUM_STEPS, round(megabytes * 1e6 / size))
        for index in range(num_tiles):
            for text in tile.write(index):
                file.write(text + ",\n")
                num_events += 1
        per_step = num_tiles * tile.length_us / NUM_STEPS
        steps = [
            {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 1, "tid": 1}
            | {"ts": round(tile.first_us + step * per_step, 3), "dur": round(per_step - 1, 3), "args": {}}
            for step in range(NUM_STEPS)
        ]
        file.write(",\n".join(map(json.dumps, steps)) + "\n]}\n")
    return num_events + len(steps)


def answer(tool: str, path: Path) -> dict[str, float]:
    """What a tool says about the file."""
    if tool == "hta":
        from hta.trace_analysis import TraceAnalysis

        logging.disable(logging.CRITICAL)
        analysis = TraceAnalysis(trace_files={0: str(path)}, trace_dir=str(path.parent))
        parts = analysis.get_temporal_breakdown(visualize=False).iloc[0]
        overlap = analysis.get_comm_comp_overlap(visualize=False).iloc[0]
        names = ("idle", "compute", "non_compute", "kernel")
        found = {name: float(parts[f"{name}_time(us)"]) for name in names}
        return found | {"overlap": float(overlap["comp_comm_overlap_pctg"])}
    if tool == "ours":
        from scalelab.trace.hta import read_hta

        ours = read_hta(path)
        found = {"idle": ours.idle_us, "compute": ours.compute_us, "non_compute": ours.non_compute_us}
        return found | {"kernel": ours.kernel_us, "overlap": 100 * (ours.overlap or 0.0)}
    from scalelab.answers.trace.view import make_counters
    from scalelab.trace.rank_trace import read_rank

    whole = read_rank(path, counters=make_counters(None)).breakdown.whole
    found = {"idle": whole.idle_ns / 1e3, "compute": whole.compute_ns / 1e3, "kernel": whole.span_ns / 1e3}
    return found | {"overlap": 100 * whole.overlapped_ns / max(1, whole.communication_ns)}


def measure(tool: str, path: Path) -> Cost:
    """Run a tool in a process of its own; the system counts."""
    reading, writing = os.pipe()
    child = os.posix_spawn(
        sys.executable,
        [sys.executable, "-W", "ignore", __file__, "--tool", tool, "--file", str(path)],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, writing, 1), (os.POSIX_SPAWN_CLOSE, reading)],
    )
    os.close(writing)
    with os.fdopen(reading) as output:
        text = output.read()
    _, status, usage = os.wait4(child, 0)
    if status:
        raise SystemExit(f"{TOOLS[tool]} failed on {path}")
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return Cost(cpu_seconds=cpu_seconds, memory_bytes=usage.ru_maxrss * 1024, answer=json.loads(text.splitlines()[-1]))


def compare(path: Path, megabytes: int, table: Table) -> tuple[str, bool, Cost]:
    """Both tools on one file: a sentence, whether the bars hold, and what our default took."""
    costs = {tool: measure(tool, path) for tool in TOOLS}
    theirs, ours = costs["hta"], costs["ours"]
    for tool, cost in costs.items():
        cpu, memory = theirs.cpu_seconds / cost.cpu_seconds, theirs.memory_bytes / cost.memory_bytes
        figures = [f"{cost.cpu_seconds:.2f}", f"1/{cpu:.1f}", f"{cost.memory_bytes / 1e6:,.0f}", f"1/{memory:.1f}"]
        parts = [f"{cost.answer[name]:,.1f}" for name in ("idle", "compute", "kernel")]
        size = f"{path.stat().st_size / 1e6:,.0f}"
        table.add_row(size, TOOLS[tool], *figures, *parts, f"{cost.answer['overlap']:.2f}")
    limits = {"overlap": 0.01 + 0.005}  # theirs is rounded to a hundredth
    is_same = all(abs(theirs.answer[name] - ours.answer[name]) <= limits.get(name, 1.0) for name in theirs.answer)
    cpu, memory = theirs.cpu_seconds / ours.cpu_seconds, theirs.memory_bytes / ours.memory_bytes
    least_cpu, least_memory = BARS.get(megabytes, (0.0, 0.0))
    text = f"CPU 1/{cpu:.1f} and memory 1/{memory:.1f} at {megabytes} MB" + ("" if is_same else " with other numbers")
    return text, is_same and cpu >= least_cpu and memory >= least_memory, costs["exact"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=list(BARS))
    parser.add_argument("--tool", choices=list(TOOLS), help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.tool:
        print(json.dumps(answer(given.tool, given.file)))
        return 0
    columns = ("file [MB]", "tool", "CPU [s]", "", "memory [MB]", "", "idle [µs]", "compute [µs]", "span [µs]")
    table = Table(*columns, "overlap [%]", title="one trace, one question")
    found = []
    with tempfile.TemporaryDirectory(prefix="scalelab-") as directory:
        tile = Tile(record_trace(Path(directory, "runs")))
        for megabytes in given.megabytes:
            path = Path(directory, f"trace-{megabytes}.json")
            build_trace(tile, path, megabytes)
            found.append(compare(path, megabytes, table))
            path.unlink()
    Console(width=130).print(table)
    bars = ", ".join(f"1/{cpu:.0f} and 1/{memory:.0f} at {size} MB" for size, (cpu, memory) in BARS.items())
    sizes = [f"{cost.memory_bytes / 1e6:.0f} MB" for _, _, cost in found]
    print(f"our exact analysis took {', '.join(sizes)} of memory at {', '.join(map(str, given.megabytes))} MB of trace")
    print(f"trace_vs_hta: {', '.join(text for text, _, _ in found)} (bar {bars})")
    return 0 if all(is_met for _, is_met, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main())

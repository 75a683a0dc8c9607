"""1,024 ranks in bounded memory: does `scalelab trace` find a slow rank, a slow host and a slow link?

The traces are the public ones of 8 ranks of DLRM (`--traces`, see docs/reference/trace.md), re-timed: a rank has the
events of one of the eight, several steps of them, stretched between its collectives. The own time of a rank between
two collectives is the median of the eight, with 2 % noise, and a collective ends when the last of its group has come
and the shortest transfer of the eight has passed. All-to-alls run in the rows of a mesh of ranks, all-reduces in its
columns, with the arguments that torch 2.4 and later put on kernels. In one copy a rank computes 30 % longer, the ranks
of a host 20 %, and the transfers of a third rank take twice as long; the other copy is clean.

The bars: the three are found and nothing else, nothing on the clean copy; at most 1,200 s of CPU time (10 minutes on
two cores) and 1 GB for 1,024 ranks of about 5 MB each, and proportionally less CPU time for fewer.

`--speedup` measures only what `--jobs 2` gains: the wall time of the full report of 16 such files with one process over
that with two, in three pairs that alternate, of 5 MB and of 29 MB each. Ranks of real jobs leave 20 to 100 MB, so the
bar, 1.7 on two free cores, is that of the larger; starting, joining and describing take 0.6 s of one core, a third of
what the smaller take altogether. On busy cores the ratio says nothing. Modules are compiled beforehand, as where a
package is installed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TRACES = Path(__file__).parents[2] / "shared" / "reference" / "traces"
SOURCE = "dlrm_8rank"
NOISE = 0.02
CPU_SECONDS_PER_RANK = 1200 / 1024
MEMORY_BYTES = 1e9
SPEEDUP = 1.7
SPEEDUP_STEPS = (6, 36)
"""Of the small files and the large ones, to which the bar applies."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is planted; -1: nothing."""

    num_ranks: int
    host_size: int
    num_steps: int = 6
    slow_rank: int = -1
    slow_host: int = -1
    slow_link: int = -1

    @property
    def row_size(self) -> int:
        """About the square root, and more than a host."""
        size = 2 * self.host_size
        while size * size < self.num_ranks:
            size *= 2
        return size

    def list_members(self, rank: int, kind: str) -> list[int]:
        row, column = divmod(rank, self.row_size)
        if kind == "all_to_all":
            return list(range(row * self.row_size, (row + 1) * self.row_size))
        return list(range(column, self.num_ranks, self.row_size))

    def name_host(self, rank: int) -> str:
        return f"node{rank // self.host_size:03d}"

    @property
    def expected(self) -> set[str]:
        found = {f"rank {self.slow_rank}", f"link of rank {self.slow_link}"}
        found.add(f"host {self.name_host(self.slow_host * self.host_size)}")
        return found if self.slow_rank >= 0 else set()


class Source:
    """One of the recorded ranks: its events as text around their times, and when its collectives ran.

    The text of a step is made once; of every rank, only the times and the arguments of collectives are written anew.
    """

    def __init__(self, path: Path) -> None:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        self.events = [event for event in events if event.get("ph") in ("X", "s", "f") and event.get("cat") != "Trace"]
        kernels = [event for event in self.events if event.get("cat") == "kernel" and "nccl" in event["name"]]
        self.kernels = sorted(kernels, key=lambda event: event["ts"])
        self.places = {id(event): place for place, event in enumerate(self.kernels)}
        self.kinds = ["all_reduce" if "AllReduce" in event["name"] else "all_to_all" for event in self.kernels]
        self.start = np.array([event["ts"] for event in self.events], dtype=np.float64)
        self.length = np.array([event.get("dur", 0) for event in self.events], dtype=np.float64)
        # Where the times of every event stand in its text: its start, and of most events its length.
        is_complete = np.array([event["ph"] == "X" for event in self.events])
        places = np.arange(len(self.events))
        both = np.stack([places, places + len(places)], axis=1)
        self.order = both[np.stack([np.ones(len(places), dtype=bool), is_complete], axis=1)]
        self.low, self.high = self.start.min(), (self.start + self.length).max()
        edges = [edge for event in self.kernels for edge in (event["ts"], event["ts"] + event["dur"])]
        self.knots = np.maximum.accumulate(np.array([self.low, *edges, self.high], dtype=np.float64))

    @cache  # noqa: B019  # sources live as long as the program
    def make_template(self, step: int) -> str:
        """The events of one step as text with a place for every time, and for the arguments of collectives."""
        found = []
        for event in self.events:
            moved: dict[str, Any] = {name: value for name, value in event.items() if name not in ("ts", "dur")}
            args = event.get("args", {})
            if args.get("correlation", 0) > 0:
                moved["args"] = args | {"correlation": args["correlation"] + step * 1_000_000}
            if event["name"].startswith("ProfilerStep#"):
                moved["name"] = f"ProfilerStep#{step}"
            if "id" in event:
                moved["id"] = event["id"] + step * 1_000_000
            if id(event) in self.places:
                moved["args"] = {self.kinds[self.places[id(event)]].upper(): 0} | moved.get("args", {})
            text = json.dumps(moved).replace("%", "%%")
            times = '"ts": %.3f, "dur": %.3f, ' if event["ph"] == "X" else '"ts": %.3f, '
            found.append("{" + times + text[1:])
        return ",\n".join(found)

    def write_step(self, knots: Floats, step: int, plan: Plan, rank: int) -> str:
        """The events of one step between these times of its collectives."""
        start = np.interp(self.start, self.knots, knots)
        end = np.interp(self.start + self.length, self.knots, knots)
        text = self.make_template(step) % tuple(np.concatenate([start, end - start])[self.order].tolist())
        for kind in set(self.kinds):
            text = text.replace(f'"{kind.upper()}": 0', json.dumps(describe_collective(kind, plan, rank))[1:-1])
        return text


def describe_collective(kind: str, plan: Plan, rank: int) -> dict[str, Any]:
    members = plan.list_members(rank, kind)
    name = "allreduce" if kind == "all_reduce" else "all_to_allv"
    args = {"Collective name": name, "In msg nelems": 1 << 20, "Out msg nelems": 1 << 20, "dtype": "Byte"}
    return args | {"Group size": len(members), "Process Group Name": name_group(kind, members)}


def name_group(kind: str, members: list[int]) -> str:
    return f"{'ep' if kind == 'all_to_all' else 'dp'}{members[0]}"


def simulate(plan: Plan, sources: list[Source]) -> Floats:
    """When every rank starts and ends its collectives: rank, step, knots (begin, start, end, …, end of the step)."""
    generator = np.random.default_rng(1)
    kinds = sources[0].kinds
    own = np.median([np.diff(source.knots)[::2] for source in sources], axis=0)
    transfer = np.min([np.diff(source.knots)[1::2] for source in sources], axis=0)
    slow = np.ones(plan.num_ranks)
    if plan.slow_rank >= 0:
        slow[plan.slow_rank] = 1.3
        slow[plan.slow_host * plan.host_size : (plan.slow_host + 1) * plan.host_size] = 1.2
    knots = np.zeros((plan.num_ranks, plan.num_steps, 2 * len(kinds) + 2))
    now = np.zeros(plan.num_ranks)
    for step in range(plan.num_steps):
        knots[:, step, 0] = now
        for place, kind in enumerate(kinds):
            now = now + own[place] * slow * (1 + NOISE * generator.standard_normal(plan.num_ranks))
            knots[:, step, 2 * place + 1] = now
            for members in {tuple(plan.list_members(rank, kind)) for rank in range(plan.num_ranks)}:
                factor = 2.0 if plan.slow_link in members else 1.0
                length = factor * transfer[place] * (1 + NOISE * generator.standard_normal())
                now[list(members)] = now[list(members)].max() + max(1.0, length)
            knots[:, step, 2 * place + 2] = now
        now = now + own[-1] * slow
        knots[:, step, -1] = now
    return knots


def write_ranks(plan: Plan, sources: list[Source], directory: Path) -> int:
    """All files; their bytes."""
    knots = simulate(plan, sources)
    for rank in range(plan.num_ranks):
        source = sources[rank % len(sources)]
        groups = [(kind, plan.list_members(rank, kind)) for kind in ("all_to_all", "all_reduce")]
        config = [
            {"pg_name": name_group(kind, members), "pg_desc": f"mesh_{kind}", "pg_size": len(members), "ranks": members}
            for kind, members in groups
        ]
        header = {
            "schemaVersion": 1,
            "host_name": plan.name_host(rank),
            "distributedInfo": {
                "backend": "nccl",
                "rank": rank,
                "world_size": plan.num_ranks,
                "pg_config": config,
            },
        }
        with (directory / f"rank{rank}.json").open("w") as file:
            file.write(json.dumps(header)[:-1] + ', "traceEvents": [\n')
            for step in range(plan.num_steps):
                file.write(",\n" if step else "")
                file.write(source.write_step(knots[rank, step], step, plan, rank))
            file.write("\n]}\n")
    return sum(file.stat().st_size for file in directory.iterdir())


def read(directory: Path, jobs: int) -> tuple[set[str], float, int]:
    """What `scalelab trace` finds, its CPU time and the largest memory of all its processes together."""
    answer = directory.with_suffix(".answer.json")
    command = [sys.executable, "-m", "scalelab", "trace", str(directory), "--overview", "--jobs", str(jobs)]
    child = os.posix_spawn(sys.executable, [*command, "--json", str(answer)], os.environ)
    _, status, usage = os.wait4(child, 0)
    if status:
        raise SystemExit(f"scalelab trace failed on {directory}")
    findings = json.loads(answer.read_text())["findings"]
    found = {one["subject"] for one in findings if one["kind"] == "trace-straggler"}
    # The system gives the largest of the processes: all of them together take at most so many times as much.
    return found, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 * (1 + jobs)


def time_report(directory: Path, jobs: int) -> tuple[float, float]:
    """Wall and CPU seconds of the full report of all files."""
    command = [sys.executable, "-m", "scalelab", "trace", str(directory / "ranks"), "--jobs", str(jobs)]
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(directory / "compiled")}
    begin, before = time.perf_counter(), os.times()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **compiled})
    after = os.times()
    cpu_seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - begin, cpu_seconds


def compare_jobs(sources: list[Source], num_steps: int) -> float:
    """How much sooner two processes answer than one."""
    with tempfile.TemporaryDirectory(prefix="scalelab-") as place:
        directory = Path(place)
        (directory / "ranks").mkdir()
        size = write_ranks(Plan(num_ranks=16, host_size=2, num_steps=num_steps), sources, directory / "ranks")
        time_report(directory, 1)  # compiles the bytecode, fills the page cache
        pairs = [(time_report(directory, 1), time_report(directory, 2)) for _ in range(3)]
    ratios = sorted(one[0] / two[0] for one, two in pairs)
    listed = "; ".join(f"{one[0]:.2f} and {two[0]:.2f} s (CPU {one[1]:.2f} and {two[1]:.2f} s)" for one, two in pairs)
    print(f"16 files of {size / 16e6:.0f} MB, one and two processes: {listed}; load {os.getloadavg()[0]:.1f}")
    print(f"  {ratios[1]:.2f} times as fast ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    return ratios[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--host-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6, help="steps per rank, of about 0.8 MB each")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--speedup", action="store_true", help="measure only what --jobs 2 gains, on 16 files")
    parser.add_argument("--traces", type=Path, default=TRACES, help="directory of the public sets")
    given = parser.parse_args()
    if not (given.traces / SOURCE).is_dir():
        raise SystemExit(f"{given.traces} has no {SOURCE}: give the directory of the public traces with --traces")
    sources = [Source(path) for path in sorted((given.traces / SOURCE).glob("*.json.gz"))]
    if given.speedup:
        small, large = (compare_jobs(sources, num_steps) for num_steps in SPEEDUP_STEPS)
        print(f"trace_ranks: --jobs 2 is {large:.2f} times as fast (bar {SPEEDUP}; {small:.2f} with files of 5 MB)")
        return 0 if large >= SPEEDUP else 1
    clean = Plan(num_ranks=given.ranks, host_size=given.host_size, num_steps=given.steps)
    last_host = given.ranks // given.host_size - 1
    planted = replace(clean, slow_rank=given.ranks // 3, slow_host=last_host - 1, slow_link=given.ranks // 2 + 1)
    held, words = True, []
    for name, plan in (("planted", planted), ("clean", clean)):
        with tempfile.TemporaryDirectory(prefix="scalelab-") as directory:
            place = Path(directory, name)
            place.mkdir()
            size = write_ranks(plan, sources, place)
            found, cpu_seconds, memory_bytes = read(place, given.jobs)
        bar = CPU_SECONDS_PER_RANK * given.ranks
        held = held and found == plan.expected and cpu_seconds <= bar and memory_bytes <= MEMORY_BYTES
        listed = ", ".join(sorted(found)) or "nothing"
        print(f"{name}: {given.ranks} ranks, {size / 1e6:,.0f} MB of trace, found: {listed}")
        words.append(
            f"{name} {len(found & plan.expected)} of {len(plan.expected)} found, {len(found - plan.expected)}"
            f" false, {cpu_seconds:.0f} s of CPU, {memory_bytes / 1e6:.0f} MB"
        )
    bars = f"all found, 0 false, {CPU_SECONDS_PER_RANK * given.ranks:.0f} s, {MEMORY_BYTES / 1e6:.0f} MB"
    print(f"trace_ranks: {'; '.join(words)} (bar {bars})")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())

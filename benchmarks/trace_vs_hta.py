"""What reading a real trace costs: `scalelab trace` against HolisticTraceAnalysis (PyPI: `traceinsight`).

The files are public traces of real GPUs (`--traces`, see docs/reference/trace.md), as they were recorded or, for the
larger sizes, repeated: times, correlation and step numbers are shifted from one copy to the next. Each tool reads the
same file in its own process, as a user starts it. CPU time and largest memory are what the system counted for that
process, start and imports included, both with compiled bytecode; imports alone are shown apart. `--hta` answers the
same question by their definitions, and must give the same numbers within 1 µs and 0.01 percentage points; the full
report has everything that scalelab finds, by its own definitions.

The bars: of their CPU time at most 1/5 for the full report and 1/8 with `--hta` (1/10 and 1/20 of a file of 470 MB),
of their memory at most 1/5 (1/20).
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
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

TRACES = Path(__file__).parents[2] / "shared" / "reference" / "traces"


@dataclass(frozen=True, kw_only=True)
class Input:
    """A file to read, and how many times less of everything ours must take."""

    source: str
    copies: int
    launches: int
    full: float
    hta: float
    memory: float


INPUTS = {
    54: Input(source="hta_df_index_resolver", copies=1, launches=3, full=5, hta=8, memory=5),
    84: Input(source="tracelens_mi300_resnet_ddp8", copies=6, launches=3, full=5, hta=8, memory=5),
    470: Input(source="hta_df_index_resolver", copies=14, launches=1, full=10, hta=20, memory=20),
}
"""By about so many megabytes."""
IMPORTS = {
    "peer": "import hta.trace_analysis",
    "full": "import scalelab.cli.trace, scalelab.answers.trace.report, scalelab.report.renderers.terminal",
}
"""What a tool loads before it reads, shown apart."""
TOOLS = {"peer": "traceinsight", "hta": "scalelab trace --hta", "full": "scalelab trace"}
LENS = "TraceLens"
"""AMD's (github.com/AMD-AGI/TraceLens; the project of that name on PyPI is another). Shown without a bar, if it
can be imported: its call tree, kernels by operator and GPU timeline."""
if importlib.util.find_spec(LENS) is not None:
    TOOLS = TOOLS | {"lens": LENS}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a process took."""

    cpu_seconds: float
    memory_bytes: int


def build_file(traces: Path, wanted: Input, path: Path) -> None:
    """The source, decompressed, with its events as often as wanted."""
    (source,) = (traces / wanted.source).glob("*.json.gz")
    text = gzip.decompress(source.read_bytes())
    if wanted.copies == 1:
        path.write_bytes(text)
        return
    document = json.loads(text)
    events = document.pop("traceEvents")
    with path.open("w") as file:
        file.write(json.dumps(document)[:-1] + ', "traceEvents": [\n')
        for number, event in enumerate(repeat_events(events, wanted.copies)):
            file.write((",\n" if number else "") + json.dumps(event))
        file.write("\n]}\n")


def repeat_events(events: list[dict[str, Any]], copies: int) -> Iterator[dict[str, Any]]:
    """All events, then all of them later, and so on; what is not timed comes once."""
    timed = [event for event in events if event.get("ph") == "X" and event.get("cat") != "Trace"]
    length = max(event["ts"] + event.get("dur", 0) for event in timed) - min(event["ts"] for event in timed) + 50
    largest = max(event.get("args", {}).get("correlation", 0) for event in timed) + 1
    yield from events
    for copy in range(1, copies):
        for event in timed:
            moved = event | {"ts": event["ts"] + copy * length}
            if event.get("args", {}).get("correlation", 0) > 0:
                moved["args"] = event["args"] | {"correlation": event["args"]["correlation"] + copy * largest}
            if event["name"].startswith("ProfilerStep#"):
                moved["name"] = f"ProfilerStep#{int(event['name'].split('#')[1]) + 1000 * copy}"
            yield moved


def ask_peer(path: Path) -> dict[str, float]:
    """What traceinsight says about the file."""
    from hta.trace_analysis import TraceAnalysis

    logging.disable(logging.CRITICAL)
    analysis = TraceAnalysis(trace_files={0: str(path)}, trace_dir=str(path.parent))
    parts = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    overlap = analysis.get_comm_comp_overlap(visualize=False).iloc[0]
    found = {name: float(parts[f"{name}_time(us)"]) for name in ("idle", "compute", "non_compute", "kernel")}
    return found | {"overlap": float(overlap["comp_comm_overlap_pctg"])}


def ask_lens(path: Path) -> dict[str, float]:
    """What TraceLens says about the file."""
    from TraceLens import TreePerfAnalyzer  # type: ignore[import-not-found]

    analyzer = TreePerfAnalyzer.from_file(str(path))
    analyzer.get_df_kernel_launchers()
    times = analyzer.get_df_gpu_timeline().set_index("type")["time ms"]
    return {name: 1e3 * float(times[f"{name}_time"]) for name in ("idle", "computation", "exposed_comm")}


def ask_ours(path: Path) -> dict[str, float]:
    from scalelab.trace.hta import read_hta

    ours = read_hta(path)
    found = {"idle": ours.idle_us, "compute": ours.compute_us, "non_compute": ours.non_compute_us}
    return found | {"kernel": ours.kernel_us, "overlap": 100 * (ours.overlap or 0.0)}


def measure(tool: str, path: Path, environment: dict[str, str], log: Path) -> Cost:
    """Run a tool in its own process; the system counts.

    This process stays small, because the system counts the memory of the parent at the start of a child too.
    """
    command = [sys.executable, "-W", "ignore", __file__, "--ask", tool, "--file", str(path)]
    if tool in IMPORTS.values():
        command = [sys.executable, "-W", "ignore", "-c", tool]
    elif tool in ("hta", "full"):
        command = [sys.executable, "-m", "scalelab", "trace", str(path), *(["--hta"] if tool == "hta" else [])]
    output = (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    child = os.posix_spawn(sys.executable, command, environment, file_actions=[output])
    _, status, usage = os.wait4(child, 0)
    if status:
        raise SystemExit(f"{TOOLS.get(tool, tool)} failed on {path}")
    return Cost(cpu_seconds=usage.ru_utime + usage.ru_stime, memory_bytes=usage.ru_maxrss * 1024)


def measure_best(tool: str, path: Path, environment: dict[str, str], log: Path, launches: int) -> Cost:
    """The least of several launches: a shared machine only ever adds."""
    found = [measure(tool, path, environment, log) for _ in range(launches)]
    return Cost(cpu_seconds=min(c.cpu_seconds for c in found), memory_bytes=min(c.memory_bytes for c in found))


def compare(size: int, path: Path, environment: dict[str, str], table: Table) -> tuple[str, bool]:
    """All tools on one file: a sentence, and whether the bars hold."""
    wanted, log = INPUTS[size], path.with_suffix(".out")
    costs = {tool: measure_best(tool, path, environment, log, wanted.launches) for tool in reversed(TOOLS)}
    theirs = costs["peer"]
    answers = [json.loads(log.read_text().splitlines()[-1])]
    measure("ours", path, environment, log)
    answers.append(json.loads(log.read_text().splitlines()[-1]))
    limits = {"overlap": 0.01 + 0.005}  # theirs is rounded to a hundredth
    is_same = all(abs(answers[0][name] - answers[1][name]) <= limits.get(name, 1.0) for name in answers[0])
    ratios = {}
    for tool, name in TOOLS.items():
        cost = costs[tool]
        ratios[tool] = theirs.cpu_seconds / cost.cpu_seconds, theirs.memory_bytes / cost.memory_bytes
        figures = [f"{cost.cpu_seconds:.2f}", f"1/{ratios[tool][0]:.1f}", f"{cost.memory_bytes / 1e6:,.0f}"]
        table.add_row(f"{path.stat().st_size / 1e6:,.0f}", name, *figures, f"1/{ratios[tool][1]:.1f}")
    full, hta, memory = ratios["full"][0], ratios["hta"][0], min(ratios["full"][1], ratios["hta"][1])
    text = f"CPU 1/{full:.1f}, --hta 1/{hta:.1f}, memory 1/{memory:.1f} at {size} MB"
    is_met = full >= wanted.full and hta >= wanted.hta and memory >= wanted.memory
    return text + ("" if is_same else " with other numbers"), is_same and is_met


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=list(INPUTS), choices=list(INPUTS))
    parser.add_argument("--traces", type=Path, default=TRACES, help="directory of the public sets")
    parser.add_argument("--ask", choices=["peer", "lens", "ours", "build"], help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ask == "build":
        build_file(given.traces, INPUTS[given.megabytes[0]], given.file)
        return 0
    if given.ask:
        ask = {"peer": ask_peer, "lens": ask_lens, "ours": ask_ours}[given.ask]
        print(json.dumps(ask(given.file)))
        return 0
    if not given.traces.is_dir():
        raise SystemExit(f"{given.traces} does not exist: give the directory of the public traces with --traces")
    table = Table("file [MB]", "tool", "CPU [s]", "", "memory [MB]", "", title="one trace")
    found = []
    with tempfile.TemporaryDirectory(prefix="scalelab-") as directory:
        environment = os.environ | {"PYTHONPYCACHEPREFIX": str(Path(directory, "bytecode"))}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        (small,) = (given.traces / "hta_nccl_parser_config").glob("*.json.gz")
        for tool in TOOLS:  # compiles the bytecode
            measure(tool, small, environment, Path(directory, "warm-up"))
        for tool, statement in IMPORTS.items():
            cost = measure_best(statement, small, environment, Path(directory, "imports"), 3)
            table.add_row(
                "–", f"imports of {TOOLS[tool]}", f"{cost.cpu_seconds:.2f}", "", f"{cost.memory_bytes / 1e6:,.0f}", ""
            )
        for size in given.megabytes:
            path = Path(directory, f"trace-{size}.json")
            flags = ["--ask", "build", "--file", str(path), "--megabytes", str(size), "--traces", str(given.traces)]
            subprocess.run([sys.executable, __file__, *flags], check=True)
            found.append(compare(size, path, environment, table))
            path.unlink()
    Console(width=130).print(table)
    bars = "; ".join(f"1/{i.full:.0f}, 1/{i.hta:.0f}, 1/{i.memory:.0f} at {size} MB" for size, i in INPUTS.items())
    print(f"trace_vs_hta: {'; '.join(text for text, _ in found)} (bar {bars})")
    return 0 if all(is_met for _, is_met in found) else 1


if __name__ == "__main__":
    sys.exit(main())

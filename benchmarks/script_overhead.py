"""What watching an unedited script adds to its clean steps.

One training loop in one process on one core, whose steps are watched and left alone in turns (`rigs/alternating.py`);
a step takes about a millisecond. Time is the processor's, of this process: what other programs do falls on both alike.
A step counts with all that our hooks do in it, also what a recorded step leaves out. The bar: at most 1.02 times as
long and at most 20 µs more a step, judged by the whole 95 % interval; and the very same parameters after 100 steps.

    python benchmarks/script_overhead.py [--pairs 2000]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rigs.small_step import BATCH, find_width, make_model, run_steps

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_difference, estimate_ratio
from scalelab.records.environment import usable_cores
from scalelab.records.trial import Block, StepKind
from scalelab.units import format_interval, format_seconds
from scalelab.worker.script.session import ScriptSession

RIGS = Path(__file__).parent / "rigs"
MOST_SECONDS, MOST_RATIO = 20e-6, 1.02
MOST_TIME = 300.0
ROUND = 10
"""Pairs of blocks that make a round of the estimate."""


class Kept(list[Any]):
    def flush(self) -> None: ...


def alternate(
    num_pairs: int, seconds: float, *program: str, variables: Mapping[str, str] | None = None
) -> dict[str, list[list[float]]]:
    """Seconds of a step, by kind and round: `watched` and `alone`, in turns in one process on one core."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "times.json"
        rig = [sys.executable, str(RIGS / "alternating.py"), str(out), str(num_pairs), str(seconds), *program]
        rank = {"OMP_NUM_THREADS": "1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_port()), "TORCHELASTIC_RUN_ID": "turns"}
        core = str(usable_cores()[0])
        subprocess.run(
            ["taskset", "-c", core, *rig],
            cwd=place,
            env=os.environ | rank | dict(variables or {}),
            check=True,
            stdout=subprocess.DEVNULL,
        )
        found = json.loads(out.read_text())
    return {name: [times[n : n + ROUND] for n in range(0, len(times), ROUND)] for name, times in found.items()}


def find_port() -> int:
    """One that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def is_same_with_us(width: int) -> bool:
    """Whether 100 steps give the same parameters, watched and not."""
    models = [make_model(width) for _ in range(2)]
    inputs = torch.randn(BATCH, width)
    run_steps(models[0], inputs, 100)
    with ScriptSession((Block(StepKind.CLEAN, 10**9),), 0, Path("trace.json"), Kept(), BATCH):
        run_steps(models[1], inputs, 100)
    return all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))


def judge(more: Estimate, ratio: Estimate) -> str:
    """By the ends of the intervals: the bar holds, does not hold, or cannot be decided."""
    if more.high is None or more.low is None or ratio.high is None or ratio.low is None:
        return "undecided"
    if more.high <= MOST_SECONDS and ratio.high <= MOST_RATIO:
        return "holds"
    return "fails" if more.low > MOST_SECONDS or ratio.low > MOST_RATIO else "undecided"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=2000)
    num_pairs = parser.parse_args().pairs
    os.sched_setaffinity(0, usable_cores()[:1])
    torch.set_num_threads(1)
    width = find_width()
    is_same = is_same_with_us(width)
    times = alternate(num_pairs, MOST_TIME, str(RIGS / "small_step.py"), str(width))
    more = estimate_difference(times["watched"], times["alone"])
    ratio = estimate_ratio(times["watched"], times["alone"])
    seconds = statistics.median(value for steps in times["alone"] for value in steps)
    table = Table("more per step [µs]", "ratio", "same parameters", box=None)
    in_micros = more.map(lambda value: 1e6 * value)
    table.add_row(format_interval("number", in_micros), format_interval("ratio", ratio), "yes" if is_same else "no")
    Console().print(f"{num_pairs} pairs of blocks in turns, {format_seconds(seconds)} of CPU time a step\n")
    Console().print(table)
    verdict = judge(more, ratio)
    bar = f"bar {MOST_SECONDS * 1e6:.0f} µs and {MOST_RATIO}×"
    print(f"\nscript_overhead: {more.value * 1e6:+.1f} µs a step, {ratio.value:.3f}×, {verdict} ({bar})")
    return 0 if verdict == "holds" and is_same else 1


if __name__ == "__main__":
    sys.exit(main())

"""Whether an emulated link reaches its rate, and whether training feels it.

Runs the study `network` over unshaped, 1gbit and 100mbit links between two emulated hosts. The bar: the bus bandwidth
of the largest all-reduce alone is within 10 % of the shaped rate, and communication takes a larger share of the step on
every slower link. Needs root; without it the benchmark is skipped and says so.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path

from scalelab.launch.hosts import HostsLauncher
from scalelab.launch.ranks.namespaces import find_host_obstacle
from scalelab.records.environment import read_load_average
from scalelab.report.renderers.terminal import render_terminal
from scalelab.runs.experiment import run_study
from scalelab.studies.network.answer import NetworkAnswer, read_answer, read_share
from scalelab.studies.network.study import Network
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling
from scalelab.units import format_quantity

STUDY = Network(
    links=("unshaped", "1gbit", "100mbit"),
    batch_per_rank=8,
    job=Job(workload="mlp", options={"dim": 512, "depth": 4}, device="cpu", threads_per_rank=1),
    sampling=Sampling(rounds=3, steps=12, phase_steps=0, comm_free_steps=4, profile_steps=4, control=False),
)
MOST_ERROR = 0.10


def list_shares(answer: NetworkAnswer) -> list[float | None]:
    """Share of communication in a step, link by link: profiled, or by ablation where nothing was profiled."""
    profiled = [row.estimate(read_share) for row in answer.rows]
    left_out = [row.exposed.share if row.exposed else None for row in answer.rows]
    found = profiled if all(profiled) else left_out
    return [share.value if share else None for share in found]


def main() -> int:
    obstacle = find_host_obstacle()
    if obstacle:
        print(f"network: skipped: {obstacle}")
        return 0
    with tempfile.TemporaryDirectory() as directory:
        store, document = run_study(STUDY, runs_dir=Path(directory), launcher=HostsLauncher())
        answer = read_answer(STUDY.read_links(), store.results()[0], STUDY.sampling.warmup)
    print(render_terminal(document, 120))
    held = [row.nominal_share for row in answer.rows if row.link.bits_per_second]
    worst = max(abs(share.value - 1) if share else 1.0 for share in held)
    shares = list_shares(answer)
    is_rising = all(a is not None and b is not None and a < b for a, b in itertools.pairwise(shares))
    told = [f"{row.link.name} {format_quantity('share', s)}" for row, s in zip(answer.rows, shares, strict=True)]
    verdict = "rising" if is_rising else "NOT rising"
    print(f"\nload {read_load_average():.1f}; communication share of a step: {', '.join(told)} ({verdict})")
    print(f"network: worst |bus/nominal − 1| {worst:.3f} (bar {MOST_ERROR:.2f})")
    return 0 if worst <= MOST_ERROR and is_rising else 1


if __name__ == "__main__":
    sys.exit(main())

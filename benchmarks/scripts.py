"""Unmodified training programs under `scalelab run strong-scaling -- …`, checked against running them alone.

The programs are in `rigs/programs`: some use a library from PyPI as its documentation does, the others are written in
the style of well-known scripts. Each prints its loss and the time after every step. For every program:

    steps     every step that the program printed was recorded, and no other
    losses    on two ranks, what it prints is the same with and without us, bit for bit
    clock     our step over the interval between two of its own prints, in the median of a launch: within 2 %
    watched   a step that is watched over one that is not, by processor time, in turns in one process on one rank
              (`rigs/alternating.py`): the 95 % interval of the ratio ends below 1.02
    answer    strong scaling on one and two ranks, with the phases of a step, and exposed communication where DDP
              averages all gradients

    python benchmarks/scripts.py [--only NAME …] [--seconds 40]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from script_overhead import alternate, find_port

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_ratio
from scalelab.records.environment import usable_cores
from scalelab.records.store import open_run
from scalelab.records.tasks import Script
from scalelab.records.trial import Status, StepKind, TrialResult
from scalelab.units import format_interval
from scalelab.worker.script.observers import CounterObserver, GradientObserver, Observer

FOLDER = Path(__file__).parent / "rigs" / "programs"
LINE = re.compile(r"loss=(\S+) time=(\S+)")
LEAD_IN, STEPS = 6, 24
MOST = 0.02
OBSERVERS: dict[str, type[Observer]] = {"gradients": GradientObserver, "counters": CounterObserver}
LEAST_PROGRAMS = 10
MOST_PAIRS = 2000
BARE_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Program:
    name: str
    arguments: str
    package: str = "torch"
    global_batch: int = 32
    is_ddp: bool = True
    spawns: bool = False
    is_module: bool = False

    @property
    def target(self) -> list[str]:
        """What follows `python`, without the arguments."""
        return ["-m", self.name] if self.is_module else [str(FOLDER / f"{self.name}.py")]

    @property
    def shown(self) -> str:
        return f"-m {self.name}" if self.is_module else f"{self.name}.py"

    @property
    def variables(self) -> dict[str, str]:
        """Where its own package is found."""
        places = [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(places)} if self.is_module else {}

    def find_version(self) -> str | None:
        try:
            return f"{self.package} {importlib.metadata.version(self.package)}"
        except importlib.metadata.PackageNotFoundError:
            return None


BATCH = "--batch-size {batch_per_rank}"
PROGRAMS = (
    Program(name="ddp_tutorial", arguments=BATCH),
    Program(name="fsdp2", arguments="--local-batch {batch_per_rank}", is_ddp=False),
    Program(name="gpt", arguments="--batch_size=8 --accumulation=4"),
    Program(name="gan", arguments="--batchSize {batch_per_rank}"),
    Program(name="iterable", arguments="{batch_per_rank}"),
    Program(name="evaluates", arguments="--batch {batch_per_rank}"),
    Program(name="mixed_precision", arguments="--batch {batch_per_rank}"),
    Program(name="spawns", arguments=f"{BATCH} --world-size {{ranks}} --steps {{steps}}", spawns=True),
    Program(name="hf_trainer", arguments="--per_device_train_batch_size {batch_per_rank}", package="transformers"),
    Program(name="hf_accelerate", arguments="--batch_size {batch_per_rank}", package="accelerate"),
    Program(name="lightning_trainer", arguments=BATCH, package="lightning"),
    Program(name="lightning_fabric", arguments=BATCH, package="lightning"),
    Program(name="deepspeed_zero", arguments="--micro-batch {batch_per_rank}", package="deepspeed", is_ddp=False),
    Program(name="titan", arguments="--training.local_batch_size {batch_per_rank}", is_ddp=False),
    Program(name="diffusion", arguments="--train_batch_size {batch_per_rank}", package="accelerate"),
    Program(name="translator.train", arguments="data.batch_size={batch_per_rank}", is_module=True),
)

Lines = list[tuple[str, float]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one program showed; `faults` says what does not hold."""

    program: Program
    num_steps: int
    clock: float
    watched: Estimate
    answer: str
    faults: tuple[str, ...]


def read_lines(text: str) -> Lines:
    return [(loss, float(seconds)) for loss, seconds in LINE.findall(text)]


def fill_in(program: Program, num_ranks: int) -> list[str]:
    """The program's words on so many ranks."""
    values = {"batch_per_rank": program.global_batch // num_ranks, "ranks": num_ranks, "steps": 10_000}
    return [word.format(**values) for word in program.arguments.split()]


def run_bare(program: Program, num_ranks: int, num_lines: int, cwd: Path) -> Lines:
    """The program as a launcher would start it, ended when it has printed enough."""
    port = find_port()
    words = fill_in(program, num_ranks)
    cores = usable_cores()

    def start(rank: int) -> subprocess.Popen[str]:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        variables = {name: str(value) for name, value in place.items()}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "bare"}
        command = [sys.executable, "-u", *program.target, *words]
        if not program.spawns:
            command = ["taskset", "-c", str(cores[rank % len(cores)]), *command]
        return subprocess.Popen(
            command,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | program.variables | ({} if program.spawns else variables),
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
            cwd=cwd,
        )

    ranks = [start(rank) for rank in range(1 if program.spawns else num_ranks)]
    lines: Lines = []
    try:
        assert ranks[0].stdout is not None
        for line in ranks[0].stdout:
            lines += read_lines(line)
            if len(lines) >= num_lines:
                break
    finally:
        for one in ranks:
            os.killpg(one.pid, signal.SIGKILL)
            one.wait()
            if one.stdout is not None:
                one.stdout.close()
    return lines


def run_watched(program: Program, cwd: Path) -> tuple[dict[str, Any], dict[int, TrialResult], dict[int, Lines]]:
    """The answer of one round of strong scaling, and of each number of ranks its result and what rank 0 printed."""
    command = [
        *(sys.executable, "-m", "scalelab", "run", "strong-scaling", "--rounds", "1", "--no-control"),
        *("--ranks", "1", "2", "--global-batch-size", str(program.global_batch)),
        *("--steps", str(STEPS), "--phase-steps", "3", "--comm-free-steps", "3", "--profile-steps", "0"),
        *("--timeout", "300", "--json", "answer.json", "--", *program.target, *program.arguments.split()),
    ]
    variables = os.environ | {"PYTHONUNBUFFERED": "1"} | program.variables
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=variables)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    store = open_run("last", cwd / "runs")
    results = {trial.num_ranks: store.result(trial.name) for trial in store.trials()}
    logs = {
        trial.num_ranks: read_lines((store.trial_directory(trial.name) / "rank0.log").read_text())
        for trial in store.trials()
    }
    return json.loads((cwd / "answer.json").read_text()), results, logs


def count_undisturbed(result: TrialResult) -> int:
    """Steps before the first communication-free one: until there a step is what the program would do alone."""
    own = [sample for sample in result.samples if sample.rank == 0]
    return next((n for n, sample in enumerate(own) if sample.kind is StepKind.COMM_FREE), len(own))


def compare_clocks(result: TrialResult, lines: Lines) -> float:
    """Our clean step over the program's own interval of the same step, in the median: a late print moves only two."""
    own = [sample for sample in result.samples if sample.rank == 0][: count_undisturbed(result)]
    return statistics.median(
        sample.step_seconds / (lines[n][1] - lines[n - 1][1])
        for n, sample in enumerate(own)
        if sample.kind is StepKind.CLEAN and LEAD_IN <= n < len(lines)
    )


def find_faults(result: TrialResult, lines: Lines, bare: Lines) -> list[str]:
    """What does not hold in one launch on two ranks."""
    faults = []
    num_steps = count_undisturbed(result)
    if result.status is not Status.COMPLETED:
        faults.append(f"{result.status.words}: {result.reason}")
    num_own = sum(sample.rank == 0 for sample in result.samples)
    num_printed = len(lines) + 1  # the last step ends before it is printed
    report = result.ranks[0].script
    if isinstance(result.trial.task, Script) and report is not None and not report.obstacle:
        kinds = [block.kind for block in result.trial.task.plan.blocks]
        num_printed -= kinds.count(StepKind.COMM_FREE)  # a step is dropped where communication is switched off
    if report is not None:  # instruments take further steps, which are not recorded
        used = [name for name in result.trial.instruments if name in OBSERVERS and name not in report.left_out]
        num_printed -= sum(OBSERVERS[name].num_steps for name in used)
    if num_own != num_printed:
        faults.append(f"{num_own} steps recorded, {num_printed} taken")
    ours, alone = ([loss for loss, _ in one[:num_steps]] for one in (lines, bare))
    if ours != alone[: len(ours)] or len(alone) < len(ours):
        faults.append("losses differ from the bare run's")
    phases = [sample for sample in result.samples if sample.kind is StepKind.PHASES]
    if not phases or not all(s.forward_seconds and s.backward_seconds and s.optimizer_seconds for s in phases):
        faults.append("a phase is missing")
    return faults


def find_answer(document: dict[str, Any]) -> dict[str, Any]:
    table = document["sections"][0]["tables"][0]
    keys = [column["key"] for column in table["columns"]]
    return {key: cell["value"] for key, cell in zip(keys, table["rows"][-1], strict=True)}


def check(program: Program, seconds: float) -> Outcome:
    with tempfile.TemporaryDirectory() as name:
        cwd = Path(name)
        alone = run_bare(program, 2, LEAD_IN + STEPS + 8, cwd)
        document, results, lines = run_watched(program, cwd)
    times = alternate(MOST_PAIRS, seconds, *program.target, *fill_in(program, 1), variables=program.variables)
    ratio = estimate_ratio(times["watched"], times["alone"])
    faults = find_faults(results[2], lines[2], alone)
    clock = statistics.median(compare_clocks(results[n], lines[n]) for n in (1, 2))
    if abs(clock - 1) > MOST:
        faults.append(f"our clock is off by {clock - 1:.1%}")
    if ratio.high is None or ratio.high > 1 + MOST:
        faults.append(
            "watching costs over 2 %" if (ratio.low or 0) > 1 + MOST else "the cost of watching is not resolved"
        )
    row = find_answer(document)
    exposed = row.get("exposed_share")
    is_ablated = any(sample.kind is StepKind.COMM_FREE for sample in results[2].samples)
    if row.get("speedup") is None or (program.is_ddp and not is_ablated):
        faults.append("the answer is incomplete")
    words = ", exposed not resolved" if is_ablated else ""  # too noisy: a step without communication took as long
    words = words if exposed is None else f", {exposed:.0%} exposed"
    return Outcome(
        program=program,
        num_steps=sum(sample.rank == 0 for sample in results[2].samples),
        clock=clock,
        watched=ratio,
        answer=f"{row.get('speedup') or 0:.2f}×{words}",
        faults=tuple(faults),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [program.name for program in PROGRAMS]
    parser.add_argument(
        "--only", nargs="+", default=names, choices=names, metavar="NAME", help="programs; default: all"
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="CPU time of steps in turns, for each program")
    args = parser.parse_args()
    table = Table("program", "version", "steps", "clock", "watched", "speedup on 2", "holds", box=None)
    holding = checked = 0
    for program in PROGRAMS:
        if program.name not in args.only:
            continue
        version = program.find_version()
        if version is None:
            table.add_row(program.name, f"{program.package} is not installed", *["–"] * 4, "skipped")
            continue
        try:
            one = check(program, args.seconds)
        except (RuntimeError, IndexError, ZeroDivisionError, subprocess.CalledProcessError) as error:
            table.add_row(program.name, version, *["–"] * 4, f"no: {error}")
            checked += 1
            continue
        checked += 1
        holding += not one.faults
        said = "; ".join(one.faults) or "holds"
        print(f"{program.name}: {format_interval('ratio', one.watched)} watched, {said}", file=sys.stderr, flush=True)
        table.add_row(
            program.name,
            version,
            str(one.num_steps),
            f"{one.clock:.3f}",
            format_interval("ratio", one.watched),
            one.answer,
            "no: " + "; ".join(one.faults) if one.faults else "yes",
        )
    Console(width=150).print(table)
    for program in PROGRAMS:
        print(f"  scalelab run strong-scaling … -- {program.shown} {program.arguments}")
    least = min(len(args.only), LEAST_PROGRAMS)
    print(f"\nscripts: {holding} of {checked} programs (bar: all, and at least {least})")
    return 0 if holding == checked and holding >= least else 1


if __name__ == "__main__":
    sys.exit(main())

"""`scalelab doctor`: what this machine can measure and what would disturb it; under a launcher, every rank.

Every rank of a launcher writes its line into a shared directory named after the launch, and rank 0 prints them in
order: overlapping masks are visible only side by side. If no variable names the launch, `--mpi` gets a name from MPI;
otherwise every rank prints its own line in any order.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape

from scalelab import __version__
from scalelab.analysis.quality import measure_noise
from scalelab.checks import clean_lines
from scalelab.cli.doctor.device import examine_device
from scalelab.cli.doctor.host import (
    DoctorCheck,
    Grade,
    OutputConsole,
    ask_mpi,
    clean_up,
    describe_copy,
    describe_device,
    describe_member,
    describe_nodes,
    look_at_cores,
    look_at_memory,
    look_at_nccl,
    look_at_network,
    look_at_rank,
    look_at_roofs,
    look_at_threads,
    measure_roofs,
    print_check,
)
from scalelab.cli.flags import RunsDir, parse_flags
from scalelab.errors import DamagedRun, RankUnknown, ScalelabError
from scalelab.launch.joined import find_member
from scalelab.launch.launcher import Launcher
from scalelab.launch.local import LocalLauncher
from scalelab.launch.ranks.discovery import Membership
from scalelab.launch.ranks.placement import Placement, find_mistakes, format_cores, read_placement
from scalelab.records.environment import Environment, read_cpu_quota, read_environment
from scalelab.records.files import read_json, storage_errors, write_json, write_trial
from scalelab.records.store import RUNS_DIR
from scalelab.records.strategies import choose_strategy
from scalelab.records.tasks import Measure
from scalelab.records.trial import Status, StepKind, StepPlan, Trial, TrialResult, from_builtins, to_builtins
from scalelab.studies.shared.cautions import NOISY_BETWEEN, NOISY_WITHIN
from scalelab.units import format_bytes, format_seconds, format_share

NUM_NOISE_LAUNCHES = 6
LOW_SPACE_BYTES = 500_000_000


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Check what this machine can measure and what would disturb it."""

    runs_dir: RunsDir = RUNS_DIR
    quick: bool = False
    """Start no ranks and measure nothing."""
    device: Literal["cpu", "cuda", "xpu", "mps"] | None = None
    """Self-test of every device of this kind instead: expectation, figure and verdict of each check."""
    gpu: bool = False
    """The same as --device cuda."""
    bundle: Path | None = None
    """Write the self-test and the environment to this file, to attach to an issue; of GPUs unless --device is given."""
    mpi: bool = False
    """Compare the launcher's rank and world size with those of mpi4py."""
    json: bool = False
    """Print one JSON object per check; under a launcher, one per rank and one per problem."""
    clean: bool = False
    """Only remove what killed commands left: temporary directories, processes, emulated hosts."""


def main(args: Sequence[str]) -> int:
    doctor = parse_flags(Doctor, args, "doctor")
    console = OutputConsole()
    if doctor.clean:
        return clean_up(console)
    member = find_rank()
    if member is not None and member.num_ranks > 1:
        return examine_rank(
            console, member, doctor.runs_dir, is_quick=doctor.quick, asks_mpi=doctor.mpi, is_json=doctor.json
        )
    device = doctor.device or ("cuda" if doctor.gpu or doctor.bundle else None)
    checks = []
    launcher = LocalLauncher()
    found = examine_device(device, doctor.bundle, None if doctor.quick else launcher) if device else None
    for check in found or examine(doctor, launcher):
        checks.append(check)
        print_check(console, check, is_json=doctor.json)
    failed = [check.name for check in checks if check.grade is Grade.FAILED]
    if not doctor.json:
        words = f"Not ready: {', '.join(failed)}" if failed else "Ready  ·  scalelab run strong-scaling --ranks 1 2"
        console.print(f"\n{escape(words)}", soft_wrap=True)
    return 1 if failed else 0


def find_rank() -> Membership | None:
    """Which rank this is; a check reports variables that contradict each other."""
    try:
        return find_member(os.environ)
    except RankUnknown:
        return None


def examine(doctor: Doctor, launcher: Launcher) -> Iterator[DoctorCheck]:
    """All checks, the quick ones first."""
    environment = read_environment(__version__)
    yield from look_at_machine(environment)
    yield look_at_rank(os.environ)
    if doctor.mpi:
        yield ask_mpi(find_rank())[0]
    yield from look_at_cores()
    yield look_at_threads(os.environ)
    yield look_at_network()
    yield look_at_storage(doctor.runs_dir)
    if not doctor.quick:
        yield from look_at_roofs()
    if environment.torch is None:
        yield DoctorCheck(
            name="torch",
            grade=Grade.FAILED,
            detail="not installed: runs can be shown and compared but not measured",
            next_step="pip install 'scalelab[torch]'",
        )
        return
    yield DoctorCheck(name="torch", grade=Grade.OK, detail=environment.torch)
    if not doctor.quick:
        yield look_at_nccl()
        try:
            yield from try_ranks(launcher)
        except ScalelabError as error:
            yield DoctorCheck(name="ranks", grade=Grade.FAILED, detail=str(error))
        finally:
            launcher.close()


def look_at_machine(environment: Environment) -> Iterator[DoctorCheck]:
    yield DoctorCheck(name="scalelab", grade=Grade.OK, detail=f"{environment.scalelab} on Python {environment.python}")
    usable = f"{environment.num_cores} of {environment.num_machine_cores} cores"
    cores = f"{environment.processor or 'unknown processor'}, {usable}"
    quota = read_cpu_quota()
    if quota is not None and quota < environment.num_cores:
        yield DoctorCheck(
            name="processor",
            grade=Grade.WARNING,
            detail=f"{cores}, limited to {quota:g} by a CPU quota",
            next_step=f"keep ranks × --threads-per-rank ≤ {max(1, int(quota))}",
        )
    else:
        yield DoctorCheck(name="processor", grade=Grade.OK, detail=cores)
    governor = environment.frequency_governor
    if governor not in (None, "performance"):
        yield DoctorCheck(
            name="frequency",
            grade=Grade.WARNING,
            detail=f"CPU governor {governor}: the clock rate changes with load",
            next_step="cpupower frequency-set -g performance",
        )
    load = environment.load_average
    is_busy = load is not None and load > 0.5 * environment.num_cores
    yield DoctorCheck(
        name="load",
        grade=Grade.WARNING if is_busy else Grade.OK,
        detail="unknown" if load is None else f"{load:.2f} over the last minute",
        next_step="wait for other programs to end" if is_busy else "",
    )
    yield look_at_memory(environment)
    gpus = ", ".join(f"{gpu.name} ({format_bytes(gpu.memory_bytes)})" for gpu in environment.gpus)
    yield DoctorCheck(name="GPUs", grade=Grade.OK, detail=gpus or "none: ranks run on the CPU with gloo")


def look_at_storage(runs_dir: Path) -> DoctorCheck:
    place = runs_dir.resolve()
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        return DoctorCheck(
            name="runs",
            grade=Grade.FAILED,
            detail=f"{runs_dir} is not writable",
            next_step="use another --runs-dir",
        )
    free = shutil.disk_usage(place).free
    is_low = free < LOW_SPACE_BYTES
    return DoctorCheck(
        name="runs",
        grade=Grade.WARNING if is_low else Grade.OK,
        detail=f"{runs_dir}, {format_bytes(free)} free",
        next_step="free some space" if is_low else "",
    )


def try_ranks(launcher: Launcher) -> Iterator[DoctorCheck]:
    """Start two real ranks, then measure the noise between launches and steps of a small job."""
    started = time.perf_counter()
    pair = launch_once(launcher, num_ranks=2)
    if pair.status is not Status.COMPLETED:
        yield DoctorCheck(name="ranks", grade=Grade.FAILED, detail=f"two gloo ranks: {pair.status}, {pair.reason}")
        return
    loading = time.perf_counter() - started - pair.wall_seconds
    first = format_seconds(pair.first_step_seconds)
    yield DoctorCheck(
        name="ranks",
        grade=Grade.OK,
        detail=f"two gloo ranks on loopback, first step after {first} (torch import {loading:.1f} s)",
    )
    results = [launch_once(launcher, num_ranks=1) for _ in range(NUM_NOISE_LAUNCHES)]
    noise = measure_noise([list(result.step_seconds(StepKind.CLEAN).values())[8:] for result in results])
    within, between = noise.within_ratio or 0.0, noise.between_ratio or 0.0
    is_noisy = between > NOISY_BETWEEN or within > NOISY_WITHIN
    yield DoctorCheck(
        name="noise",
        grade=Grade.WARNING if is_noisy else Grade.OK,
        detail=f"standard deviation {format_share(within)} between steps, {format_share(between)} between launches",
        next_step="close other programs, or raise --rounds" if is_noisy else "",
    )


def launch_once(launcher: Launcher, num_ranks: int) -> TrialResult:
    """Launch a small job that takes a fraction of a second."""
    trial = Trial(
        configuration=f"doctor-{num_ranks}",
        workload="mlp",
        options={"dim": 256, "depth": 2},
        strategy=choose_strategy(None, num_ranks),
        num_ranks=num_ranks,
        task=Measure(plan=StepPlan(lead_in_steps=8, clean_steps=30, phase_steps=0, comm_free_steps=0)),
        timeout_seconds=60.0,
    )
    with tempfile.TemporaryDirectory() as directory:
        write_trial(Path(directory), trial)
        return launcher.launch(trial, Path(directory))


WAIT_SECONDS = 60.0
"""How long rank 0 waits for the others: nodes load programs from one file system."""
OLD_SECONDS = 3600.0
"""Older lines are from an earlier launch of the same name that was killed."""


@dataclass(frozen=True, kw_only=True)
class RankLine:
    """What one rank reports."""

    member: Membership
    placement: Placement
    threads: str = ""
    """OMP_NUM_THREADS; empty: not set."""
    memory_bytes_per_second: float | None = None
    """Measured on all ranks at about the same time; None: not measured."""
    copy_bytes: int | None = None
    """The array that was copied for that."""
    flops_per_second: float | None = None
    unmeasured: str = ""
    """Why it was not measured; empty: it was, or was not requested."""
    nccl: DoctorCheck | None = None
    """Tried by the first rank of every node; None: not tried."""
    difference: str = ""
    """Where mpi4py disagrees; empty: nowhere, or it was not asked."""


def examine_rank(
    console: Console, member: Membership, runs_dir: Path, *, is_quick: bool, asks_mpi: bool, is_json: bool
) -> int:
    """Report this rank; rank 0 reports all. Gives the exit code."""
    asked, by_mpi = ask_mpi(member) if asks_mpi else (None, None)
    difference = asked.detail if asked is not None and asked.grade is Grade.FAILED else ""
    line = make_line(member, difference, is_quick=is_quick)
    launch = member.launch or (by_mpi.launch if by_mpi else None)
    if launch is None:
        print_lines(console, [line], is_json=is_json)
        return print_mistakes(console, list_mistakes([line], [line.member.rank]), is_json=is_json)
    place = runs_dir / f".doctor-{launch}"
    with storage_errors(place):
        place.mkdir(parents=True, exist_ok=True)
        write_json(place / f"rank{member.rank}.json", to_builtins(line))
    if member.rank > 0:
        return 0
    try:
        lines = gather_lines(place, member.num_ranks)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print_lines(console, lines, is_json=is_json)
    return print_mistakes(console, list_mistakes(lines, range(member.num_ranks)), is_json=is_json)


def make_line(member: Membership, difference: str, *, is_quick: bool) -> RankLine:
    """The line of this rank, with its measurements unless `is_quick`."""
    is_first = member.local_rank == 0 or (member.local_rank is None and member.rank == 0)
    roofs: Mapping[str, Any] = {} if is_quick else measure_roofs(member.num_local_ranks or member.num_ranks)
    return RankLine(
        member=member,
        placement=read_placement(member.rank, socket.gethostname(), member.local_rank),
        threads=os.environ.get("OMP_NUM_THREADS", ""),
        memory_bytes_per_second=roofs.get("memory_bytes_per_second"),
        copy_bytes=roofs.get("copy_bytes"),
        flops_per_second=roofs.get("flops_per_second"),
        unmeasured=roofs.get("unmeasured", ""),
        nccl=look_at_nccl() if is_first and not is_quick else None,
        difference=difference,
    )


def gather_lines(place: Path, num_ranks: int) -> list[RankLine]:
    """The lines of all ranks in order; ranks that are late are missing."""
    give_up = time.monotonic() + WAIT_SECONDS
    found: dict[int, RankLine] = {}
    while len(found) < num_ranks and time.monotonic() < give_up:
        for rank in set(range(num_ranks)) - found.keys():
            file = place / f"rank{rank}.json"
            try:
                if time.time() - file.stat().st_mtime < OLD_SECONDS:
                    found[rank] = from_builtins(read_json(file), RankLine)
            except (DamagedRun, OSError):
                continue
        time.sleep(0.02)
    return [found[rank] for rank in sorted(found)]


def print_lines(console: Console, lines: Sequence[RankLine], *, is_json: bool) -> None:
    for line in lines:
        text = json.dumps(to_builtins(line)) if is_json else describe_line(line)
        console.print(clean_lines(text), soft_wrap=True, markup=False)


def describe_line(line: RankLine) -> str:
    """A rank in one line."""
    placement = line.placement
    parts = [
        describe_member(line.member),
        placement.host,
        f"mask {placement.mask} (cores {format_cores(placement.cores)})",
        f"NUMA {describe_nodes(placement)}",
        f"device {describe_device(placement)}",
        f"threads {line.threads or '–'}",
    ]
    if line.memory_bytes_per_second is not None and line.flops_per_second is not None:
        parts.append(describe_copy(line.memory_bytes_per_second, line.copy_bytes))
        parts.append(f"{line.flops_per_second / 1e9:.3g} GFLOP/s")
    return " · ".join(parts)


def list_mistakes(lines: Sequence[RankLine], ranks: Sequence[int]) -> list[DoctorCheck]:
    """What is wrong among these ranks, including ranks that sent nothing."""
    checks = [
        DoctorCheck(name="mpi4py", grade=Grade.FAILED, detail=line.difference) for line in lines if line.difference
    ]
    missing = sorted(set(ranks) - {line.member.rank for line in lines})
    if missing:
        checks.append(
            DoctorCheck(
                name="ranks",
                grade=Grade.FAILED,
                detail=f"no line from {len(missing)} of {len(ranks)} ranks within {WAIT_SECONDS:.0f} s:"
                f" {', '.join(map(str, missing))}",
                next_step="use a --runs-dir that all nodes share",
            )
        )
    checks += [
        DoctorCheck(name="cores", grade=Grade.WARNING, detail=mistake.message, next_step=mistake.next_step)
        for mistake in find_mistakes([line.placement for line in lines])
    ]
    unmeasured = {(line.placement.host, line.unmeasured) for line in lines if line.unmeasured}
    checks += [
        DoctorCheck(name="roofline", grade=Grade.WARNING, detail=f"{host}: {why}") for host, why in sorted(unmeasured)
    ]
    tried = [(line.placement.host, line.nccl) for line in lines if line.nccl is not None]
    checks += [replace(nccl, detail=f"{host}: {nccl.detail}") for host, nccl in tried]
    return checks


def print_mistakes(console: Console, checks: Sequence[DoctorCheck], *, is_json: bool) -> int:
    """Print problems as lines or JSON; returns the exit code."""
    for check in checks:
        print_check(console, check, is_json=is_json)
    return 1 if any(check.grade is Grade.FAILED for check in checks) else 0

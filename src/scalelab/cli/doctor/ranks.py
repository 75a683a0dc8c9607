"""The doctor under a launcher: one line per rank, and what is wrong among them.

Every rank writes its line into a shared directory named after the launch, and rank 0 prints them in order: overlapping
masks are visible only side by side. If no variable names the launch, `--mpi` gets a name from MPI; otherwise every rank
prints its own line in any order.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from scalelab.cli.doctor.grades import DoctorCheck, Grade, print_check
from scalelab.cli.doctor.host import ask_mpi, describe_device, describe_member, describe_nodes
from scalelab.cli.doctor.trials import describe_copy, look_at_nccl, measure_roofs
from scalelab.errors import DamagedRun
from scalelab.launch.ranks.discovery import Membership
from scalelab.launch.ranks.placement import Placement, find_mistakes, read_placement
from scalelab.launch.ranks.topology import format_cores
from scalelab.records.files import read_json, storage_errors, write_json
from scalelab.records.trial import from_builtins, to_builtins

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
        console.print(text, soft_wrap=True, markup=False)


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
    """Print problems as lines or JSON; gives the exit code."""
    for check in checks:
        print_check(console, check, is_json=is_json)
    return 1 if any(check.grade is Grade.FAILED for check in checks) else 0

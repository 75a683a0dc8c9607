"""How the ranks of a cluster launch meet: the time and the files that it takes, for up to 1,024 ranks.

The ranks are pretended in one process, everything else is real: each leaves word where it is, reads rank 0's address
from the trial's directory, connects to it over loopback, says who it is and is told its place. Rank 0 is a thread of
its own. Files opened are counted by an audit hook. What must not happen is that every rank opens one of every other.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scalelab.launch.ranks.discovery import Membership
from scalelab.launch.rendezvous import Meeting, visit
from scalelab.launch.supervisor import Seat, arrive, meet
from scalelab.records.trial import Trial

SIZES = (64, 256, 1024)
MOST_SECONDS = 2.0
MOST_FILES_PER_RANK = 4
NUM_TIMES = 5


class FileCount:
    """Counts the files that this process opens in a directory; a hook cannot be removed."""

    def __init__(self) -> None:
        self.place = ""
        self.num_files = 0
        sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and self.place and str(arguments[0]).startswith(self.place):
            self.num_files += 1


def meet_all(num_ranks: int, count: FileCount) -> tuple[float, int]:
    """Seconds until all of them have met, and how many files they opened."""
    trial = Trial(configuration="m", workload="mlp", strategy="ddp", num_ranks=num_ranks, global_batch=num_ranks)
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(1) as rank_0:
        seats = [make_seat(trial, rank, Path(place)) for rank in range(num_ranks)]
        count.num_files, count.place = 0, place
        start = time.perf_counter()
        first = rank_0.submit(meet, seats[0])
        with ExitStack() as stack:
            arrived = [arrive(seat) for seat in seats[1:]]
            visits = [stack.enter_context(visit(*one)) for one in arrived]
            meetings = [one.wait_for_answer(where) for one, (where, _) in zip(visits, arrived, strict=True)]
        meetings.append(first.result())
        seconds, count.place = time.perf_counter() - start, ""
    check_meetings(meetings, num_ranks)
    return seconds, count.num_files


def make_seat(trial: Trial, rank: int, directory: Path) -> Seat:
    member = Membership(launcher="", rank=rank, num_ranks=trial.num_ranks, num_nodes=1)
    return Seat(directory=directory, launch="m", trial=trial, member=member, deadline=time.monotonic() + 60)


def check_meetings(meetings: list[Meeting], num_ranks: int) -> None:
    """All met at one port, and each has its own place; the socket is given back."""
    assert len({meeting.port for meeting in meetings}) == 1
    assert sorted(meeting.neighbours.position for meeting in meetings) == list(range(num_ranks))
    for meeting in meetings:
        if meeting.listen_fd is not None:
            os.close(meeting.listen_fd)


def main() -> int:
    count = FileCount()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # both ends of every connection are in this process
    table = Table(title=f"Ranks that meet, fastest of {NUM_TIMES}", title_justify="left")
    for header in ("ranks", "time [s]", "files opened", "files per rank"):
        table.add_column(header, justify="right")
    seconds, num_files = 0.0, 0
    for num_ranks in SIZES:
        seconds, num_files = min(meet_all(num_ranks, count) for _ in range(NUM_TIMES))
        table.add_row(f"{num_ranks:,}", f"{seconds:.3f}", f"{num_files:,}", f"{num_files / num_ranks:.1f}")
    Console(width=100).print(table)
    holds = seconds < MOST_SECONDS and num_files < MOST_FILES_PER_RANK * SIZES[-1]
    print(f"meeting: {seconds:.2f} s for {SIZES[-1]:,} ranks (bar < {MOST_SECONDS:g} s)")
    return 0 if holds else 1


if __name__ == "__main__":
    raise SystemExit(main())

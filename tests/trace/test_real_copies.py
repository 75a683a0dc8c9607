"""Jobs of four ranks made of every public trace with collectives: whatever is changed, the late rank is named, or the
doubt is."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from scalelab.trace.files.reader import find_trace_files
from scalelab.trace.job_trace import JobTrace, find_match_doubts, read_ranks
from scalelab.trace.kinds import HOST_COMMUNICATION, RECORD, REQUEST
from tests.trace.real import RUNTIME, SETS, TRACES, load, needs_traces

pytestmark = needs_traces

NUM_RANKS, LATE = 4, 2
MOST_COLLECTIVES = 60
Event = dict[str, Any]
Change = Callable[[int, list[Event], list[Event]], None]


def is_collective(event: Event) -> bool:
    on_device = event.get("cat") == "kernel" and "nccl" in event["name"].lower()
    return on_device or bool(HOST_COMMUNICATION.match(event["name"]))


@cache
def list_events(name: str) -> tuple[list[Event], list[Event]]:
    """The first collectives of a set that have a length, and what the host said and did for them."""
    events = [event for event in load(find_trace_files([TRACES / name])[0])["traceEvents"] if event.get("ph") == "X"]
    collectives = sorted((e for e in events if is_collective(e) and e["dur"] >= 10), key=lambda e: float(e["ts"]))
    chosen = collectives[:MOST_COLLECTIVES]
    numbers = {event["args"].get("correlation") for event in chosen} - {None}
    last = max((event["ts"] for event in chosen), default=0)
    around = [
        event
        for event in events
        if (event["cat"].lower() in RUNTIME and event["args"].get("correlation") in numbers)
        or ((event["name"] == RECORD or REQUEST.match(event["name"])) and event["ts"] <= last)
        or event["name"].startswith("ProfilerStep")
    ]
    return chosen, around


def build_job(name: str, directory: Path, change: Change) -> JobTrace:
    """Every rank has the events of the set; the late one comes for the last tenth of every collective."""
    files = []
    for rank in range(NUM_RANKS):
        collectives, around = ([{**e, "args": dict(e.get("args", {}))} for e in events] for events in list_events(name))
        for event in collectives:
            length = event["dur"] / 10 if rank == LATE else event["dur"] - 0.2 * rank
            event["ts"], event["dur"] = round(event["ts"] + event["dur"] - length, 3), round(length, 3)
        change(rank, collectives, around)
        path = directory / f"rank{rank}.json"
        info = {"backend": "nccl", "rank": rank, "world_size": NUM_RANKS}
        path.write_text(json.dumps({"distributedInfo": info, "traceEvents": [*around, *collectives]}))
        files.append(path)
    return read_ranks(files)


def keep(rank: int, collectives: list[Event], around: list[Event]) -> None:
    """Nothing else."""


def rename(rank: int, collectives: list[Event], around: list[Event]) -> None:
    for event in collectives:
        if event["cat"] == "kernel":
            event["name"] = "fabric::ringAllReduceStep<4>(x)"


def regroup(rank: int, collectives: list[Event], around: list[Event]) -> None:
    for event in (*collectives, *around):
        for key in ("Process Group Name", "Process Group Ranks", "Process Group Description", "Group size", "Seq"):
            event["args"].pop(key, None)


def shift(rank: int, collectives: list[Event], around: list[Event]) -> None:
    for event in (*collectives, *around):
        event["ts"] += (0, 1_000_000, -1_000_000, 500_000)[rank]


def drop(rank: int, collectives: list[Event], around: list[Event]) -> None:
    if rank == 1:
        del collectives[::7]


def drop_early(rank: int, collectives: list[Event], around: list[Event]) -> None:
    """A trace that begins later, by another clock."""
    shift(rank, collectives, around)
    if rank == 3:
        del collectives[: max(1, len(collectives) // 4)]


CHANGES: dict[str, Change] = {one.__name__: one for one in (keep, rename, regroup, shift, drop, drop_early)}
SMALL_GROUPS = "hta_nccl_parser_config"
"""Its groups have two ranks: four of one name are doubted, unless the names are gone."""
COMMUNICATING = [
    name for name in SETS if name not in ("kineto_resnet50_nw0", "kineto_resnet50_nw4", "hta_ns_resolution")
]


def find_answer(job: JobTrace) -> tuple[int | None, Counter[str]]:
    arrivals = job.arrivals
    last = arrivals.last.rank if arrivals is not None and arrivals.last is not None else None
    return last, Counter(doubt.kind for doubt in (*job.doubts, *find_match_doubts(job)))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", COMMUNICATING)
def test_the_late_rank_is_named_or_the_doubt_is(name: str, change: str, tmp_path: Path) -> None:
    last, doubts = find_answer(build_job(name, tmp_path, CHANGES[change]))
    if name == SMALL_GROUPS and change != "regroup":
        assert (last, doubts["unmatched-collectives"]) == (None, NUM_RANKS)
    else:
        assert last == LATE
    if change.startswith("drop"):
        assert doubts["unmatched-collectives"] or doubts["no-device-activity"]

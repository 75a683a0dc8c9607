"""Traces of real accelerators: steps by launches, who asked for a kernel, who waits for whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelab.answers.trace.report import describe_traces
from scalelab.answers.trace.view import TraceView, make_counters
from scalelab.trace.files.reader import find_trace_files
from scalelab.trace.idle import LaneCounter
from scalelab.trace.job_trace import JobTrace, find_match_doubts, read_ranks
from scalelab.trace.linking import StepBasis
from scalelab.trace.rank_trace import read_rank
from tests.trace.real import (
    DEVICE,
    SETS,
    TRACES,
    Document,
    copy_set,
    list_spans,
    load,
    needs_traces,
    read_set,
)

pytestmark = needs_traces


def test_steps_span_the_kernels_that_the_host_launched_in_them() -> None:
    off = {}
    for name in SETS:
        for path, trace in zip(find_trace_files([TRACES / name]), read_set(name).ranks, strict=True):
            if trace.tables.has_device:
                found = {step: parts.span_ns / 1000 for step, parts in trace.breakdown.by_step.items()}
                if found != pytest.approx(list_spans(load(path)), abs=1):
                    off[path.name] = found
    assert not off


def test_marks_on_the_device_do_not_cut_a_step_short() -> None:
    (trace,) = read_set("tracelens_mi300_resnet_ddp8").ranks
    assert trace.tables.step_basis is StepBasis.LAUNCHES
    assert round(sum(trace.breakdown.by_step[step].span_ns for step in (15, 16)) / 1000) == 37_963


def test_all_to_alls_of_older_traces_are_found_by_their_launch_and_matched() -> None:
    job = read_set("dlrm_8rank")
    arrivals = job.arrivals
    assert arrivals is not None
    kinds = sorted(collective.kind for collective in job.ranks[0].collectives)
    assert kinds == ["all_reduce"] * 3 + ["all_to_all"] * 5
    assert all(collective.payload_bytes for trace in job.ranks for collective in trace.collectives)
    waiting, transfer = (sum(getattr(one, name) for one in arrivals.by_rank) for name in ("waiting_ns", "transfer_ns"))
    assert round(waiting / (waiting + transfer), 3) == 0.964
    assert name_last(job) == (7, 5, 8)


def name_last(job: JobTrace) -> tuple[int, int, int]:
    """The rank that is waited for longest, how often it is last, and of how many collectives."""
    arrivals = job.arrivals
    assert arrivals is not None
    assert arrivals.last is not None
    return arrivals.last.rank, arrivals.last.num_last, arrivals.num_matched


def test_kernels_with_other_names_are_found_by_a_word_or_by_their_launch(tmp_path: Path) -> None:
    names = ("fabric::ringAllReduceStep<4>(x)", "kernel_0042")

    def rename(rank: int, document: Document) -> None:
        for event in document["traceEvents"]:
            if event.get("cat") == "kernel" and "nccl" in event["name"]:
                event["name"] = names["SendRecv" in event["name"]]

    job = copy_set("dlrm_8rank", tmp_path, rename)
    assert name_last(job) == (7, 5, 8)
    assert [doubt.kind for doubt in job.doubts] == ["generic-communication"]
    assert job.doubts[0].message.startswith("100 % of the time in communication kernels")
    before = read_set("dlrm_8rank").ranks
    assert [trace.breakdown for trace in job.ranks] == [trace.breakdown for trace in before]


def list_communication(document: Document) -> list[dict[str, Any]]:
    found = [event for event in document["traceEvents"] if event.get("cat") == "kernel" and "nccl" in event["name"]]
    return sorted(found, key=lambda event: float(event["ts"]))


def test_clocks_a_second_apart_change_nothing(tmp_path: Path) -> None:
    def shift(rank: int, document: Document) -> None:
        for event in document["traceEvents"]:
            if "ts" in event:
                event["ts"] += (0, 1_000_000, -1_000_000)[rank % 3]

    assert name_last(copy_set("dlrm_8rank", tmp_path, shift)) == (7, 5, 8)


@pytest.mark.parametrize("dropped", [0, 3, 7])
def test_a_collective_that_one_rank_lacks_shifts_no_other(tmp_path: Path, dropped: int) -> None:
    def drop(rank: int, document: Document) -> None:
        if rank == 2:
            document["traceEvents"].remove(list_communication(document)[dropped])

    before, after = read_set("dlrm_8rank").matching, copy_set("dlrm_8rank", tmp_path, drop).matching
    assert before is not None
    assert after is not None
    assert (after.num_matched, after.num_unmatched) == (7, {rank: int(rank != 2) for rank in range(8)})
    waiting = [np.concatenate([one.waiting_ns for one in matching.groups]).tolist() for matching in (before, after)]
    assert [row for row in waiting[1] if row not in waiting[0]] == []


def test_a_rank_that_comes_late_is_named(tmp_path: Path) -> None:
    late_us = 2_000

    def delay(rank: int, document: Document) -> None:
        for event in list_communication(document):
            if rank == 3:  # it comes when the others have waited, and all leave later
                event["ts"] += event["dur"] - 1 + late_us
                event["dur"] = 1
            else:
                event["dur"] += late_us

    assert name_last(copy_set("dlrm_8rank", tmp_path, delay)) == (3, 8, 8)


@pytest.mark.parametrize("others", [[], [[0, 1], [2, 3]]])
def test_collectives_without_a_group_find_the_one_that_fits_their_ranks(
    tmp_path: Path, others: list[list[int]]
) -> None:
    def regroup(rank: int, document: Document) -> None:
        sets = [list(range(8)), *(members for members in others if rank in members), [rank]]
        groups = [{"pg_name": str(place), "pg_size": len(one), "ranks": one} for place, one in enumerate(sets)]
        document["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 8, "pg_config": groups}
        for event in document["traceEvents"]:
            event.get("args", {}).pop("Process Group Name", None)

    job = copy_set("dlrm_8rank", tmp_path, regroup)
    assert name_last(job) == (7, 5, 8)
    assert {doubt.kind for doubt in find_match_doubts(job)} <= {"inferred-groups"}


def test_a_graph_that_launches_everything_keeps_steps_and_the_last_rank(tmp_path: Path) -> None:
    def capture(rank: int, document: Document) -> None:
        events = document["traceEvents"]
        step = next(event for event in events if event.get("name", "").startswith("ProfilerStep"))
        calls = [event for event in events if event.get("cat") == "cuda_runtime"]
        kept = {"name": "cudaGraphLaunch", "ts": step["ts"] + 1, "dur": 5, "args": {"correlation": 77}}
        events[:] = [event for event in events if event.get("cat") not in ("cuda_runtime", "ac2g")] + [calls[0] | kept]
        for event in events:
            if event.get("cat") in DEVICE:
                event["args"] = {"correlation": 77, "stream": event["args"]["stream"], "device": 0}

    job = copy_set("dlrm_8rank", tmp_path, capture)
    before = read_set("dlrm_8rank")
    assert [trace.tables.step_basis for trace in job.ranks] == [StepBasis.LAUNCHES] * 8
    assert [trace.breakdown.whole for trace in job.ranks] == [trace.breakdown.whole for trace in before.ranks]
    doubts = {doubt.kind for doubt in (*job.doubts, *find_match_doubts(job))}
    assert name_last(job)[0] == 7 or doubts & {"uncertain-pairing", "unmatched-collectives"}


def test_broadcasts_of_the_host_do_not_head_the_collectives_of_a_device(tmp_path: Path) -> None:
    def broadcast(rank: int, document: Document) -> None:
        first = min(float(event["ts"]) for event in document["traceEvents"] if event.get("cat") == "kernel")
        for number in range(3):
            span = {"ph": "X", "cat": "user_annotation", "ts": first + 90_000 * number, "dur": 80_000}
            document["traceEvents"].append(span | {"name": "gloo:broadcast", "pid": 1, "tid": 9, "args": {}})

    files = [trace.path for trace in copy_set("dlrm_8rank", tmp_path, broadcast).ranks]
    document = describe_traces(TraceView(job=read_ranks(files, counters=make_counters(None))))
    (head,) = [finding for finding in document.findings if finding.kind == "collective"]
    assert head.subject == "all_to_all"
    tables = {table.title: table for section in document.sections for table in section.tables}
    assert [str(row[0].value) for row in tables["Collectives by kind"].rows][-1] == "broadcast (on the host)"
    assert any(finding.kind == "last-rank" and finding.subject == "rank 7" for finding in document.findings)


def test_a_job_of_a_gpu_without_its_kernels_says_so_first_and_gives_no_shares(tmp_path: Path) -> None:
    def drop(rank: int, document: Document) -> None:
        events = document["traceEvents"]
        events[:] = [event for event in events if event.get("cat") not in (*DEVICE, "gpu_user_annotation")]

    files = [trace.path for trace in copy_set("tracelens_mi300_resnet_ddp8", tmp_path, drop).ranks]
    view = TraceView(job=read_ranks(files, counters=make_counters(None)))
    document = describe_traces(view)
    assert [finding.kind for finding in document.findings] == ["host-only", "longest"]
    assert "AMD Instinct MI300X" in document.findings[0].text
    assert [caution.kind for caution in document.cautions] == ["no-device-activity"]
    titles = [table.title for section in document.sections for table in section.tables]
    assert "Every rank" not in titles
    assert "Every step" not in titles


@pytest.mark.parametrize(("name", "share"), [("hta_ns_resolution", 0.5), ("tracelens_mi300_resnet_ddp8", 0.01)])
def test_gaps_of_a_few_microseconds_between_queued_kernels_are_kernel_wait(name: str, share: float) -> None:
    path = read_set(name).ranks[0].path
    (lanes,) = read_rank(path, counters=[LaneCounter]).counted
    assert 1_000 < lanes.kernel_wait_limit_ns <= 10_000
    waits = {part: sum(getattr(lane, part) for lane in lanes.idle) for part in ("idle_ns", "kernel_wait_ns")}
    assert waits["kernel_wait_ns"] > share * waits["idle_ns"]


def test_names_are_whole_in_exports_and_waiting_heads_the_answer() -> None:
    files = [trace.path for trace in read_set("dlrm_8rank").ranks]
    document = describe_traces(TraceView(job=read_ranks(files, counters=make_counters(None))))
    assert "most of it waiting for other ranks" in document.findings[0].text
    (table,) = [table for section in document.sections for table in section.tables if table.title == "Kernels"]
    names = [row[0].whole or row[0].value for row in table.rows]
    known = {name for trace in read_set("dlrm_8rank").ranks for name in trace.tables.names}
    assert [name for name in names if name not in known] == []
    assert any(row[0].whole for row in table.rows)

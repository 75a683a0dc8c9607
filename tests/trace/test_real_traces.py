"""Traces of real accelerators: steps by launches, who asked for a kernel, who waits for whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelab.answers.trace.report import describe_traces
from scalelab.answers.trace.view import TraceView, make_counters
from scalelab.trace.idle import LaneCounter
from scalelab.trace.job_trace import JobTrace, find_trace_files, read_ranks
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


def test_gaps_of_a_few_microseconds_between_queued_kernels_are_kernel_wait() -> None:
    path = read_set("hta_ns_resolution").ranks[0].path
    (lanes,) = read_rank(path, counters=[LaneCounter]).counted
    assert 1_000 < lanes.kernel_wait_limit_ns < 10_000
    waits = {name: sum(getattr(lane, name) for lane in lanes.idle) for name in ("idle_ns", "kernel_wait_ns")}
    assert waits["kernel_wait_ns"] > 0.5 * waits["idle_ns"]


def test_names_are_whole_in_exports_and_waiting_heads_the_answer() -> None:
    files = [trace.path for trace in read_set("dlrm_8rank").ranks]
    document = describe_traces(TraceView(job=read_ranks(files, counters=make_counters(None))))
    assert "most of it waiting for other ranks" in document.findings[0].text
    (table,) = [table for section in document.sections for table in section.tables if table.title == "Kernels"]
    names = [row[0].whole or row[0].value for row in table.rows]
    known = {name for trace in read_set("dlrm_8rank").ranks for name in trace.tables.names}
    assert [name for name in names if name not in known] == []
    assert any(row[0].whole for row in table.rows)

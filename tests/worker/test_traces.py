"""What the parent reads off the ranks' traces, and that a trace never fails a trial."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalelab.launch.agreement import trace_file
from scalelab.launch.outcome import add_traced_steps, summarise_traces
from scalelab.records.observations import RankReport
from tests.trace.jobs import reduce_on_time, write_job

REPORTS = (RankReport(rank=0), RankReport(rank=1))


def write_traces(directory: Path, num_ranks: int = 2) -> None:
    """Two steps of two collectives; rank 1 comes 10 µs late to the first of each; 400 µs of computing alone."""
    builders = reduce_on_time([(0, 10), (0, 0), (0, 10), (0, 0)])
    (directory / "trace").mkdir(parents=True)
    for builder in builders[:num_ranks]:
        for number in range(2):
            builder.step(number, 2000 * number - 10, 1990)
            builder.kernel("a_kernel", 2000 * number + 400, 400)
        builder.write(trace_file(directory, builder.rank), gz=True)


def test_steps_are_read_with_parts_that_add_up_and_with_waiting(tmp_path: Path) -> None:
    write_traces(tmp_path)
    early, late = add_traced_steps(REPORTS, tmp_path)
    for report in (early, late):
        assert len(report.traced_steps) == 2
        for step in report.traced_steps:
            assert step.span_ns == step.compute_ns + step.exposed_ns + step.copy_ns + step.idle_ns
            assert (step.compute_ns, step.overlapped_ns) == (400_000, 0)
            assert (step.num_collectives, step.payload_bytes, step.transfer_ns) == (2, 2 * 4096, 100_000)
    assert [step.waiting_ns for step in early.traced_steps] == [10_000, 10_000]
    assert [step.waiting_ns for step in late.traced_steps] == [0, 0]
    assert [step.exposed_ns for step in early.traced_steps] == [110_000, 110_000]


def test_one_rank_has_steps_and_nobody_to_wait_for(tmp_path: Path) -> None:
    write_traces(tmp_path, num_ranks=1)
    (report,) = add_traced_steps(REPORTS[:1], tmp_path)
    assert [(step.transfer_ns, step.waiting_ns) for step in report.traced_steps] == [(None, None)] * 2
    assert [step.num_collectives for step in report.traced_steps] == [2, 2]


def test_a_trial_without_traces_stays_as_it_is(tmp_path: Path) -> None:
    assert add_traced_steps(REPORTS, tmp_path) == REPORTS
    assert add_traced_steps((), tmp_path) == ()


@pytest.mark.parametrize("content", [b"", b"{", b"\x1f\x8bnothing", b'{"traceEvents": [}'])
def test_a_trace_that_cannot_be_read_is_no_failure_of_the_trial(tmp_path: Path, content: bytes) -> None:
    write_traces(tmp_path)
    trace_file(tmp_path, 1).write_bytes(content)
    assert add_traced_steps(REPORTS, tmp_path) == REPORTS


def test_a_trace_of_one_rank_that_is_missing_leaves_all_out(tmp_path: Path) -> None:
    write_traces(tmp_path, num_ranks=1)
    assert add_traced_steps(REPORTS, tmp_path) == REPORTS


def test_a_trace_without_steps_has_none(tmp_path: Path) -> None:
    assert summarise_traces(write_job(tmp_path, reduce_on_time([(0, 1)]))) == {0: (), 1: ()}

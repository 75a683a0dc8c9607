"""The document of a job's traces, from traces that were built for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalelab.answers.trace.diff import compare_traces
from scalelab.answers.trace.hta import describe_hta
from scalelab.answers.trace.report import describe_traces
from scalelab.answers.trace.view import LONGEST_NAME, TraceView, make_counters, shorten_names
from scalelab.errors import UsageError
from scalelab.report.document import Document, Table
from scalelab.report.findings import select
from scalelab.trace.hta import HtaBreakdown
from scalelab.trace.job_trace import read_ranks
from tests.answers.traces import build_rank
from tests.trace.build import TraceBuilder


def view_traces(
    directory: Path, *builders: TraceBuilder, steps: frozenset[int] | None = None, top: int = 10
) -> TraceView:
    directory.mkdir(exist_ok=True)
    files = [builder.write(directory / f"rank{builder.rank}.json") for builder in builders]
    return TraceView(job=read_ranks(files, counters=make_counters(steps)), steps=steps, top=top)


def find_table(document: Document, title: str) -> Table:
    (table,) = (table for table in document.tables if table.title.startswith(title))
    return table


def read_table(table: Table) -> list[dict[str, object]]:
    keys = [column.key for column in table.columns]
    return [dict(zip(keys, (cell.value for cell in row), strict=True)) for row in table.rows]


def list_titles(document: Document) -> list[str]:
    return [table.title for table in document.tables]


def test_parts_add_up_and_every_share_names_what_it_is_of(tmp_path: Path) -> None:
    document = describe_traces(view_traces(tmp_path, build_rank(0), build_rank(1, late_us=200)))
    first, second = read_table(find_table(document, "Every rank"))
    assert first["span_seconds"] == pytest.approx(1800e-6)
    assert first["compute_seconds"] == pytest.approx(600e-6)
    assert first["exposed_seconds"] == pytest.approx(960e-6)
    assert first["copy_seconds"] == pytest.approx(40e-6)
    assert first["idle_seconds"] == pytest.approx(200e-6)
    assert first["exposed_share"] == pytest.approx(960 / 1800)
    assert second["exposed_seconds"] == pytest.approx(560e-6)
    for table in document.tables:
        for column in table.columns:
            if column.quantity == "share":
                assert " / " in column.header, f"{table.title}: of what is {column.header}?"
    assert len(find_table(document, "Every step").rows) == 4


def test_the_rank_that_is_waited_for_is_named_with_numbers(tmp_path: Path) -> None:
    document = describe_traces(view_traces(tmp_path, build_rank(0), build_rank(1, late_us=200)))
    (latest,) = select(document.findings, "last-rank", "rank 1")
    assert latest.values["num_last"] == latest.values["num_matched"] == 2
    assert latest.values["late_seconds"] == pytest.approx(200e-6, rel=0.01)
    (exposed,) = select(document.findings, "exposed-share")
    assert exposed.values["share"] == pytest.approx(0.42, abs=0.01)
    assert (exposed.values["rank"], exposed.values["most_share"]) == (0, pytest.approx(960 / 1800))
    waiting, last = read_table(find_table(document, "Arrivals"))
    assert (waiting["waiting_seconds"], waiting["num_last"]) == (pytest.approx(400e-6), 0)
    assert (last["waiting_seconds"], last["num_last"]) == (0, 2)
    assert not document.cautions


def test_collectives_have_sizes_and_bandwidth_with_and_without_waiting(tmp_path: Path) -> None:
    document = describe_traces(view_traces(tmp_path, build_rank(0), build_rank(1, late_us=200)))
    (seen,) = read_table(find_table(document, "Collectives by kind"))
    (matched,) = read_table(find_table(document, "Collectives matched"))
    assert (seen["kind"], seen["num_collectives"], seen["payload_bytes"]) == ("all_reduce", 4, 4 * 4096)
    assert seen["bus_bandwidth"] == pytest.approx(4 * 4096 / 1520e-6)
    assert (matched["num_collectives"], matched["payload_bytes"]) == (2, 2 * 4096)
    assert matched["bus_bandwidth"] == pytest.approx(2 * 4096 / 560e-6)


def test_kernels_operators_launches_queues_and_gaps_have_tables(tmp_path: Path) -> None:
    document = describe_traces(view_traces(tmp_path, build_rank(0), build_rank(1)))
    kernels = read_table(find_table(document, "Kernels"))
    assert [row["kind"] for row in kernels] == ["communication", "compute", "copy"]
    assert sum(float(str(row["kernel_share"])) for row in kernels) == pytest.approx(1)
    operators = read_table(find_table(document, "Operators"))
    assert operators[0]["operator"] == "aten::addmm"
    launches = read_table(find_table(document, "Launches"))
    assert [row["num_launches"] for row in launches] == [4, 2, 4, 2]
    assert [row["longest_queue"] for row in read_table(find_table(document, "Queues"))] == [2, 1, 2, 1]
    assert find_table(document, "Idle streams").rows
    assert find_table(document, "Largest gaps").rows
    (left_out,) = [section for section in document.sections if section.heading == "Left out"]
    assert all("record with profile(" in words for words in left_out.paragraphs)


def test_a_trace_without_a_device_leaves_its_tables_out_and_says_so(tmp_path: Path) -> None:
    builder = TraceBuilder(num_ranks=1, backend="gloo").operator("aten::mm", 0, 10).operator("aten::relu", 15, 5)
    document = describe_traces(view_traces(tmp_path, builder))
    assert list_titles(document) == ["Every rank", "Operators on the host", "Largest gaps"]
    (left_out,) = (section for section in document.sections if section.heading == "Left out")
    assert [words.partition(":")[0] for words in left_out.paragraphs] == [
        "Kernels, idle streams, launches and queues",
        "Steps",
        "Collectives",
    ]
    assert "copies" not in [column.header for column in document.tables[0].columns]


def test_steps_can_be_chosen_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    builders = build_rank(0), build_rank(1, late_us=50)
    document = describe_traces(view_traces(tmp_path, *builders, steps=frozenset({2})))
    (row, _) = read_table(find_table(document, "Every rank"))
    assert row["span_seconds"] == pytest.approx(0.8e-3)
    assert len(find_table(document, "Every step").rows) == 2
    (kinds,) = read_table(find_table(document, "Collectives by kind"))
    assert kinds["num_collectives"] == 2
    assert [row["num_collectives"] for row in read_table(find_table(document, "Arrivals"))] == [1, 1]
    assert [row["num_collectives"] for row in read_table(find_table(document, "Collectives matched"))] == [1]
    (latest,) = select(document.findings, "last-rank", "rank 1")
    assert (latest.values["num_last"], latest.values["num_matched"]) == (1, 1)
    with pytest.raises(UsageError, match=r"--step 7 is in no trace; the traces have steps 1, 2"):
        view_traces(tmp_path, *builders, steps=frozenset({2, 7})).check()


def test_many_ranks_share_a_row_per_step_and_top_bounds_the_rows(tmp_path: Path) -> None:
    builders = [build_rank(rank, num_ranks=5, num_steps=4, late_us=10 * rank) for rank in range(5)]
    document = describe_traces(view_traces(tmp_path, *builders, top=2))
    steps = find_table(document, "Every step")
    assert [row[0].value for row in steps.rows] == ["step 1", "step 2"]
    assert read_table(steps)[0]["compute_seconds"] == pytest.approx(320e-6)
    assert "the 2 longest of 4 steps; --top shows more" in steps.notes
    assert len(find_table(document, "Idle streams").rows) == 2


def test_no_communication_in_a_job_of_several_ranks_is_a_caution_with_the_next_step(tmp_path: Path) -> None:
    builder = TraceBuilder().kernel("secret_exchange", 0, 10)
    document = describe_traces(view_traces(tmp_path, builder))
    (caution,) = (caution for caution in document.cautions if caution.kind == "no-communication")
    assert "--communication" in caution.next_step


def test_events_that_cannot_be_used_are_counted(tmp_path: Path) -> None:
    builder = (
        TraceBuilder(num_ranks=1).kernel("gemm", 0, 10).event({"ph": "X", "cat": "kernel", "name": "x", "ts": "?"})
    )
    document = describe_traces(view_traces(tmp_path, builder))
    (caution,) = (caution for caution in document.cautions if caution.kind == "unusable-events")
    assert caution.values["num_events"] == 1


def test_an_empty_trace_has_a_document_too(tmp_path: Path) -> None:
    document = describe_traces(view_traces(tmp_path, TraceBuilder(num_ranks=1, backend="gloo")))
    assert [finding.kind for finding in document.findings] == ["empty"]


def test_long_names_are_shortened_and_stay_different() -> None:
    gemm = "void cutlass::Kernel2<" + "x" * 100
    add = "void at::native::add_kernel<4>(" + "int, " * 30 + ")"
    names = ["aten::mm", gemm + "_a>(Params)", gemm + "_b>(Params)", add]
    short = shorten_names(names)
    assert short[0] == "aten::mm"
    assert short[3] == "at::native::add_kernel<4>"
    assert len(set(short)) == 4
    assert all(len(name) <= LONGEST_NAME for name in short)
    assert shorten_names([gemm, gemm])[0].startswith("cutlass::Kernel2<x")


def test_a_comparison_names_what_changed_per_step(tmp_path: Path) -> None:
    a = view_traces(tmp_path / "a", build_rank(0), build_rank(1))
    slow = build_rank(0, late_us=200, num_steps=3).kernel("extra", 4500, 10)
    b = view_traces(tmp_path / "b", slow, build_rank(1, late_us=200, num_steps=3))
    document = compare_traces(a, b, ("a", "b"))
    slower = read_table(document.sections[0].tables[0])[0]
    assert [section.heading for section in document.sections] == ["", "Kernels"]
    assert (slower["name"], slower["seconds_a"]) == ("gemm", pytest.approx(3e-4))
    assert slower["seconds_b"] == pytest.approx(5e-4)
    assert (slower["count_a"], slower["count_b"]) == (1, 1)
    (changes,) = select(document.findings, "changes", "kernels")
    assert (changes.values["added"], changes.values["removed"]) == (1, 0)
    assert slower["change"] == "slower"
    assert not document.cautions
    totals = {row["total"]: (row["seconds_a"], row["seconds_b"]) for row in read_table(find_table(document, "Totals"))}
    assert totals["all kernels"][1] - totals["all kernels"][0] == pytest.approx(slower["more_seconds"], abs=3e-4)
    (span,) = select(document.findings, "changed-span")
    assert (span.values["a"], span.values["b"]) == totals["span"]


def test_collectives_of_the_host_do_not_head_those_of_a_device(tmp_path: Path) -> None:
    builder = build_rank(0).annotation("gloo:broadcast", 0, 9000, tid=9)
    document = describe_traces(view_traces(tmp_path, builder))
    rows = read_table(find_table(document, "Collectives by kind"))
    assert [row["kind"] for row in rows] == ["all_reduce", "broadcast (on the host)"]
    (longest,) = select(document.findings, "collective")
    assert (longest.subject, longest.values["share"]) == ("all_reduce", 1)


@pytest.mark.parametrize(("microseconds", "is_found"), [(50, False), (5000, True)])
def test_short_collectives_of_the_host_are_no_finding_of_a_device(
    tmp_path: Path, microseconds: int, is_found: bool
) -> None:
    builder = TraceBuilder(num_ranks=1).kernel("gemm", 0, 10_000).annotation("gloo:barrier", 0, microseconds, tid=9)
    document = describe_traces(view_traces(tmp_path, builder))
    assert bool(list(select(document.findings, "collective"))) is is_found


def test_graphs_come_first_where_they_start_most_kernels(tmp_path: Path) -> None:
    builder = build_rank(0).launch("cudaGraphLaunch", 3000, 5, correlation=77)
    for number in range(9):
        builder.kernel("node", 3100 + 10 * number, 5, correlation=77)
    table = find_table(describe_traces(view_traces(tmp_path, builder)), "Launches")
    first = read_table(table)[0]
    assert (first["call"], first["num_launches"], first["num_kernels"]) == ("cudaGraphLaunch", 1, 9)
    assert any(note.startswith("graphs start 60 %") for note in table.notes)


def test_traces_that_cannot_be_compared_per_step_are_compared_whole_with_a_caution(tmp_path: Path) -> None:
    a = view_traces(tmp_path / "a", build_rank(0))
    b = view_traces(tmp_path / "b", TraceBuilder().kernel("gemm", 0, 10), build_rank(1))
    document = compare_traces(a, b, ("a", "b"))
    assert "whole traces" in document.setting
    assert [caution.kind for caution in document.cautions] == ["whole-traces", "other-ranks"]


def test_the_numbers_of_hta_have_a_document_of_their_own() -> None:
    found = HtaBreakdown(kernel_us=100, idle_us=20, compute_us=50, non_compute_us=30, overlap=0.25, num_kernels=3)
    document = describe_hta({0: found, 1: HtaBreakdown()})
    first, empty = read_table(document.tables[0])
    assert (first["compute_share"], first["overlap_share"]) == (0.5, 0.25)
    assert empty["compute_share"] is None
    assert [(caution.kind, caution.subject) for caution in document.cautions] == [("no-kernels", "rank 1")]


def test_streams_of_several_devices_are_told_apart(tmp_path: Path) -> None:
    first, second = (TraceBuilder(rank=rank, num_ranks=1).kernel("a", 0, 5).kernel("b", 9, 5) for rank in (0, 1))
    first.events += second.events
    rows = read_table(find_table(describe_traces(view_traces(tmp_path, first)), "Idle streams"))
    assert sorted(str(row["stream"]) for row in rows) == ["0/7", "1/7"]


def test_a_barrier_is_not_said_to_lack_a_size(tmp_path: Path) -> None:
    builder = TraceBuilder().collective("barrier", 0, 5).collective("allreduce", 10, 5, dtype="?")
    notes = find_table(describe_traces(view_traces(tmp_path, builder)), "Collectives by kind").notes
    assert [note for note in notes if "unknown" in note] == ["size unknown: 1 of 1 all_reduce"]


def test_long_names_that_differ_in_the_middle_stay_different() -> None:
    middles = ("cta" + "z" * 40 + "1", "cta" + "z" * 40 + "2", "warp" + "z" * 41)
    names = [f"void split_embedding_backward_{'x' * 40}kernel_{middle}{'y' * 60}(float, long)" for middle in middles]
    short = shorten_names([*names, "gemm"])
    assert short[3] == "gemm"
    assert "warp" in short[2]
    assert len(set(short)) == 4
    assert all(len(one) <= LONGEST_NAME for one in short)

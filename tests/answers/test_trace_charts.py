"""The timeline of a profiled step: what is drawn, what is merged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scalelab.answers.trace.charts import (
    MOST_MARKS,
    RESOLUTION,
    Span,
    Timeline,
    TimelineCounter,
    draw_timelines,
    merge_all,
    merge_spans,
    read_recorded,
)
from scalelab.trace.job_trace import JobTrace, read_ranks
from tests.answers.traces import build_rank
from tests.report.charts.figures import list_values


def read_job(directory: Path, num_steps: int = 3) -> JobTrace:
    files = [
        build_rank(rank, late_us=100 * rank, num_steps=num_steps).write(directory / f"rank{rank}.json")
        for rank in (0, 1)
    ]
    return read_ranks(files, counters=[TimelineCounter])


def spans(*ends: tuple[int, int]) -> Sequence[Span]:
    return [Span(start, end, f"{start}", end - start) for start, end in ends]


def test_the_middle_step_is_drawn_with_communication_over_compute(tmp_path: Path) -> None:
    job = read_job(tmp_path)
    timeline = job.by_rank[1].counted[0]
    assert timeline.step == 2
    assert [(s.start_ns, s.end_ns, s.name) for s in timeline.lanes["compute"]] == [(2_100_000, 2_500_000, "gemm")]
    chart = draw_timelines(job, {rank: trace.counted[0] for rank, trace in job.by_rank.items()})
    assert chart is not None
    values = list_values(chart, "bar")
    assert {value["series"] for value in values} == {"communication", "compute", "copies"}
    assert "Profiler step 2" in chart.caption
    (layer,) = chart.spec["layer"]
    assert layer["encoding"]["color"]["scale"]["domain"] == ["compute", "communication", "copies"]  # as of the parts
    (late,) = (v for v in values if v["lane"] == "rank 1 compute")
    assert late["start"] == 0.0  # from the first kernel of the step
    assert late["duration_text"] == "400 µs"


def test_short_neighbours_become_one_and_long_ones_stay() -> None:
    merged = merge_spans(spans((0, 10), (11, 20), (500, 900), (900, 1500)), 100)
    assert [(span.start_ns, span.end_ns, span.count) for span in merged] == [(0, 20, 2), (500, 900, 1), (900, 1500, 1)]


def test_no_mark_covers_time_in_which_only_another_lane_ran() -> None:
    merged = merge_spans(spans((0, 10), (20, 30), (40, 50)), 100, spans((30, 40)))
    assert [(span.start_ns, span.end_ns) for span in merged] == [(0, 30), (40, 50)]


def test_what_runs_inside_another_is_not_drawn() -> None:
    merged = merge_spans(spans((0, 1000), (10, 500), (600, 900)), 10)
    assert [(span.start_ns, span.end_ns, span.count) for span in merged] == [(0, 1000, 1)]


def test_a_merged_event_is_called_by_its_longest() -> None:
    (merged,) = merge_spans([Span(0, 2, "short", 2), Span(3, 9, "long", 6), Span(9, 10, "tiny", 1)], 100)
    assert (merged.name, merged.count, merged.longest_ns) == ("long", 3, 6)


def test_marks_are_bounded_whatever_a_step_holds() -> None:
    many = [Span(10 * n, 10 * n + 4, "k", 4) for n in range(20_000)]
    shortest, merged = merge_all({0: Timeline(step=1, low_ns=0, high_ns=200_000, lanes={"compute": many})}, 200_000)
    assert sum(len(found) for found in merged[0].values()) <= MOST_MARKS
    assert sum(span.count for span in merged[0]["compute"]) == len(many)
    assert shortest >= 200_000 // RESOLUTION


def test_a_trial_without_traces_has_no_timeline(tmp_path: Path) -> None:
    assert read_recorded(tmp_path) is None
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "rank0.json").write_text("no trace")
    assert read_recorded(tmp_path) is None

"""The page of all events: it holds what the files have, on one clock, and draws it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelab.cli.trace import main
from scalelab.errors import UsageError
from scalelab.report.renderers.theme import DARK, LIGHT
from scalelab.trace import timeline
from scalelab.trace.files.reader import find_trace_files
from scalelab.trace.job_trace import JobTrace, read_ranks
from scalelab.trace.timeline import EventCounter, PackedTimeline, RankEvents, pack_job, split_by_depth
from scalelab.trace.windows import RECORD
from tests.answers.traces import build_rank
from tests.report.browser import Seen, start_browser
from tests.trace.real import TRACES, load, needs_traces

LATE_US = 100
PIXEL = """([x, y]) => {
  const ratio = window.devicePixelRatio, copy = document.createElement("canvas");
  const pen = copy.getContext("2d", { willReadFrequently: true });
  pen.drawImage(document.getElementById("canvas"), Math.floor(x * ratio), Math.floor(y * ratio), 1, 1, 0, 0, 1, 1);
  const colour = [...pen.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  return "#" + colour.map((one) => one.toString(16).padStart(2, "0")).join("");
}"""
FRAME = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def write_job(directory: Path) -> list[Path]:
    """Two ranks; the second is late by 100 µs in each of two steps, and its clock is ahead by a second."""
    builders = [build_rank(0), build_rank(1, late_us=LATE_US)]
    for event in builders[1].events:
        event["ts"] += 1_000_000
    directory.mkdir(exist_ok=True)
    return [one.write(directory / f"rank{one.rank}.json") for one in builders]


def read_packed(files: list[Path], **options: Any) -> tuple[JobTrace, PackedTimeline]:
    job = read_ranks(files, counters=[lambda tables: EventCounter(tables, **options)])
    events: dict[int, RankEvents] = {rank: trace.counted[-1] for rank, trace in job.by_rank.items()}
    return job, pack_job(job, events)


def list_events(packed: PackedTimeline) -> Iterator[tuple[int, str, str, int, int]]:
    """Rank, lane, name, start and duration, as a page adds them up."""
    columns, about, place = packed.columns, packed.about, 0
    long_gaps, long_durations = iter(columns["long_gap"].tolist()), iter(columns["long_duration"].tolist())
    rows = zip(columns["row_lane"].tolist(), columns["row_count"].tolist(), strict=True)
    for lane_number, count in rows:
        time, lane = 0, about["lanes"][lane_number]
        for index in range(place, place + count):
            gap, length = int(columns["gap"][index]), int(columns["duration"][index])
            start = time + int(next(long_gaps) if gap == timeline.LARGEST else gap)
            length = int(next(long_durations) if length == timeline.LARGEST else length)
            yield lane["rank"], lane["name"], about["names"][columns["name"][index]], start, length
            time = start + length
        place += count


def test_it_holds_every_event_on_one_clock(tmp_path: Path) -> None:
    _, packed = read_packed(write_job(tmp_path / "job"))
    found = list(list_events(packed))
    assert min(start for *_, start, _ in found) == 0
    assert (packed.about["numEvents"], packed.about["numDropped"]) == (len(found), 0)
    ends = {rank: [s + d for r, _, name, s, d in found if r == rank and "ncclDev" in name] for rank in (0, 1)}
    assert ends[0] == ends[1]  # their clocks differ by a second in the files
    lengths = {rank: [d for r, _, name, _, d in found if r == rank and name == "gemm"] for rank in (0, 1)}
    assert lengths == {0: [300_000] * 2, 1: [400_000] * 2}
    collectives = packed.columns
    assert collectives["collective_match"].tolist() == [0, 1, 0, 1]
    assert collectives["collective_waiting"].tolist() == [LATE_US * 1000] * 2 + [0] * 2


def test_events_inside_more_than_254_others_are_left_out_and_counted() -> None:
    """The depth of a row is one byte of the page."""
    records = np.zeros(257, RECORD)
    records["start"] = np.arange(257)
    records["end"] = 600 - records["start"]
    rows = timeline._Rows()
    rows.add(records, records["start"], 0, np.zeros(1, dtype=np.int64))
    assert rows.rows == [(0, depth, 1) for depth in range(255)]
    assert rows.num_too_deep == 2


@needs_traces
def test_it_holds_the_events_of_real_files(tmp_path: Path) -> None:
    files = find_trace_files([TRACES / "dlrm_8rank"])
    job, packed = read_packed(list(files))
    found: dict[int, Counter[tuple[str, int]]] = {rank: Counter() for rank in job.by_rank}
    for rank, _, name, _, length in list_events(packed):
        found[rank][name, length] += 1
    kinds = ("kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cpu_op")
    for rank, trace in job.by_rank.items():
        events = [e for e in load(trace.path)["traceEvents"] if e.get("ph") == "X" and e["cat"].lower() in kinds]
        wanted = Counter((event["name"], round(event["dur"] * 1000)) for event in events)
        assert not wanted - found[rank]
        named = {event["name"] for event in load(trace.path)["traceEvents"] if event.get("cat") == "user_annotation"}
        assert {name for name, _ in found[rank] - wanted} <= named


def test_rows_hold_what_does_not_overlap() -> None:
    generator = np.random.default_rng(22)
    start = np.sort(generator.integers(0, 10_000, 500))
    end = start + generator.integers(0, 400, 500)
    order = np.lexsort((-end, start))
    start, end = start[order], end[order]
    rows = list(split_by_depth(start, end))
    assert sorted(np.concatenate(rows).tolist()) == list(range(500))
    for row in rows:
        assert (start[row][1:] >= end[row][:-1]).all()
    for above, below in pairwise(rows):  # nothing is lower than it has to be
        assert all(((start[above] <= start[one]) & (end[above] > start[one])).any() for one in below)


def test_a_chain_of_overlaps_takes_two_rows() -> None:
    start = np.arange(0, 1000, 10)
    assert [len(row) for row in split_by_depth(start, start + 11)] == [50, 50]


def test_long_times_are_kept(tmp_path: Path) -> None:
    files = write_job(tmp_path / "job")
    builder = build_rank(0)
    builder.kernel("long", 10_000_000, 5_000_000, correlation=900)
    builder.write(files[0])
    _, packed = read_packed(files[:1])
    (found,) = [(start, length) for *_, name, start, length in list_events(packed) if name == "long"]
    assert found == (10_000_000_000 - 1_000_000, 5_000_000_000)  # the first event begins at 1 ms


def test_of_too_many_events_the_longest_are_kept(tmp_path: Path) -> None:
    _, whole = read_packed(write_job(tmp_path / "job"))
    _, packed = read_packed(write_job(tmp_path / "job"), most=5)
    lengths = sorted((length for rank, *_, length in list_events(whole) if rank == 0), reverse=True)
    kept = [length for rank, *_, length in list_events(packed) if rank == 0]
    assert len(kept) <= 5
    assert sorted(kept, reverse=True) == lengths[: len(kept)]
    assert packed.about["numDropped"] == whole.about["numEvents"] - packed.about["numEvents"]
    assert packed.about["longestDropped"] >= lengths[len(kept)]


def test_it_is_refused_where_there_are_no_events(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--timeline cannot be used with --hta"):
        main([str(tmp_path), "--timeline", str(tmp_path / "page.html"), "--hta"])


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    directory = tmp_path_factory.mktemp("timeline")
    write_job(directory / "job")
    made = directory / "timeline.html"
    assert main([str(directory / "job"), "--timeline", str(made), "--json", str(directory / "unused.json")]) == 0
    with start_browser() as seen:
        seen.page.goto(made.as_uri())
        seen.page.wait_for_selector(
            "html[data-painted]", state="attached", timeout=30_000
        )  # no eval: the page forbids it
        yield seen
        assert seen.take_complaints() == []


def find_place(seen: Seen, name: str, rank: int, share: float = 0.9) -> tuple[float, float]:
    """A point in the first event of a name on a rank."""
    look = """([name, rank, share]) => {
      const line = scalelabTimeline, { data } = line;
      const has = (row) => Array.from(data.name.slice(row.from, row.to)).some((one) => data.names[one].includes(name));
      const item = line.items().find((one) => one.lane && one.lane.rank === rank && has(one.rows[0]));
      const row = item.rows[0];
      let event = row.from;
      while (!data.names[data.name[event]].includes(name)) event++;
      const x = line.toX(data.start[event] + share * (data.end[event] - data.start[event]));
      return [x, line.axis - line.state.scroll + item.y + 7];
    }"""
    x, y = seen.page.evaluate(look, [name, rank, share])
    return float(x), float(y)


def point_at(seen: Seen, name: str, rank: int) -> str:
    x, y = find_place(seen, name, rank)
    box = seen.page.locator("#canvas").bounding_box()
    assert box is not None
    seen.page.mouse.move(box["x"] + x, box["y"] + y)
    seen.page.wait_for_selector("#tip.shown", timeout=5_000)
    return str(seen.page.inner_text("#tip"))


def test_events_are_drawn_where_they_are(page: Seen) -> None:
    x, y = find_place(page, "gemm", 1)
    assert page.page.evaluate(PIXEL, [x, y]) == LIGHT.series[0]
    x, y = find_place(page, "ncclDev", 1)
    assert page.page.evaluate(PIXEL, [x, y]) == LIGHT.series[1]
    x, y = find_place(page, "gemm", 1, share=-0.2)
    assert page.page.evaluate(PIXEL, [x, y]) == LIGHT.background


def test_waiting_is_hatched(page: Seen) -> None:
    """Rank 0 waits 100 of 480 µs, rank 1 not at all; the letters of both end before 10 % of the width."""
    page.page.evaluate("scalelabTimeline.choose(scalelabTimeline.data.collectives.event[0])")
    page.page.evaluate("scalelabTimeline.fitChosen()")
    page.page.evaluate("scalelabTimeline.choose(-1)")
    page.page.evaluate(FRAME)
    colours: dict[int, list[str]] = {}
    for rank in (0, 1):
        places = [find_place(page, "ncclDev", rank, share / 200) for share in range(24, 40)]
        colours[rank] = [page.page.evaluate(PIXEL, place) for place in places]
    page.page.evaluate("scalelabTimeline.show(0, scalelabTimeline.data.high)")
    page.page.evaluate(FRAME)
    assert set(colours[1]) == {LIGHT.series[1]}
    assert colours[0].count(LIGHT.series[1]) < len(colours[0]) / 2


def test_pointing_says_what_it_is(page: Seen) -> None:
    words = point_at(page, "gemm", 1)
    assert words.splitlines()[0] == "gemm"
    assert "400.0 µs · compute · rank 1 · stream 7 · step 1" in words
    words = point_at(page, "ncclDev", 0)
    assert "waits 100.0 µs, then transfers 380.0 µs · 2 ranks, rank 1 starts last" in words
    assert "all_reduce" in words


def test_search_counts_and_finds(page: Seen) -> None:
    page.page.keyboard.press("/")
    page.page.keyboard.type("GEMM")
    assert page.page.inner_text("#count") == "4 events, 1.400 ms"
    page.page.keyboard.press("Enter")
    assert page.page.inner_text("#details").startswith("gemm")
    page.page.keyboard.press("Escape")
    assert page.page.inner_text("#count") == ""


def test_keys_zoom_and_return(page: Seen) -> None:
    span = "scalelabTimeline.state.high - scalelabTimeline.state.low"
    page.page.keyboard.press("0")
    whole = page.page.evaluate(span)
    for _ in range(3):
        page.page.keyboard.press("w")
    assert page.page.evaluate(span) == pytest.approx(whole * 0.7**3)
    page.page.keyboard.press("Home")
    assert page.page.evaluate(span) == whole
    page.page.keyboard.press("h")
    page.page.evaluate(FRAME)
    assert "thread" in str(
        page.page.evaluate("scalelabTimeline.items().filter((one) => one.lane).map((one) => one.lane.name)")
    )
    page.page.keyboard.press("h")


def test_a_dark_screen_gets_dark_colours(page: Seen) -> None:
    page.page.emulate_media(color_scheme="dark")
    page.page.evaluate(FRAME)
    assert page.page.evaluate(PIXEL, find_place(page, "gemm", 1)) == DARK.series[0]
    page.page.emulate_media(color_scheme="light")
    page.page.evaluate(FRAME)

"""One file of all ranks: valid, on one clock, with the numbers of the files that it was made from."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scalelab.cli.trace import main
from scalelab.errors import TraceUnreadable
from scalelab.trace.files.reader import find_trace_files
from scalelab.trace.job_trace import JobTrace, read_ranks
from scalelab.trace.matching import MatchedGroup
from scalelab.trace.merged import _list_arrows, _Rank, write_merged, write_us
from scalelab.trace.rank_trace import read_rank
from tests.answers.traces import build_rank
from tests.trace.real import TRACES, needs_traces


def split(path: Path, job: JobTrace, directory: Path) -> Iterator[Path]:
    """The ranks of a merged file, each in a file with the header that it had."""
    events = json.loads(path.read_text())["traceEvents"]
    for rank, trace in job.by_rank.items():
        info = trace.header.distributed
        assert info is not None
        groups = [{"pg_name": g.pg_name, "pg_size": g.pg_size, "ranks": g.ranks} for g in info.pg_config]
        header = {"backend": info.backend, "rank": rank, "world_size": info.world_size, "pg_config": groups}
        own = [event for event in events if event["pid"] == rank]
        copy = directory / f"rank{rank}.json"
        copy.write_text(json.dumps({"distributedInfo": header, "traceEvents": own}))
        yield copy


def check_numbers(job: JobTrace, merged: Path, directory: Path) -> JobTrace:
    directory.mkdir()
    again = read_ranks(list(split(merged, job, directory)))
    for before, after in zip(job.ranks, again.ranks, strict=True):
        assert after.num_events == before.num_events
        assert after.breakdown == before.breakdown
        pairs = zip(before.collectives, after.collectives, strict=True)
        assert all(a.kind == b.kind and a.end_ns - a.start_ns == b.end_ns - b.start_ns for a, b in pairs)
    return again


@pytest.fixture
def job(tmp_path: Path) -> JobTrace:
    """Two ranks whose clocks differ by a second."""
    builders = [build_rank(0), build_rank(1, late_us=100)]
    for event in builders[1].events:
        event["ts"] += 1_000_000
    return read_ranks([one.write(tmp_path / f"rank{one.rank}.json") for one in builders])


def test_it_has_the_same_numbers_on_one_clock(job: JobTrace, tmp_path: Path) -> None:
    merged = tmp_path / "merged.json"
    assert write_merged(job, merged) == 0
    again = check_numbers(job, merged, tmp_path / "split")
    assert again.matching is not None
    assert again.matching.clocks[1].offset_ns == 0
    first, second = ([one.end_ns for one in trace.collectives] for trace in again.ranks)
    assert first == second


def test_arrows_lead_from_the_last_rank_into_the_collectives_of_others(job: JobTrace, tmp_path: Path) -> None:
    merged = tmp_path / "merged.json"
    write_merged(job, merged)
    events = json.loads(merged.read_text())["traceEvents"]
    arrows: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event.get("cat") == "collective":
            arrows.setdefault(event["id"], []).append(event)
    kernels = [event for event in events if event["ph"] == "X" and event["name"].startswith("nccl")]
    assert len(arrows) == 2
    for begin, end in arrows.values():
        assert (begin["ph"], begin["pid"], end["ph"], end["pid"]) == ("s", 1, "f", 0)
        assert begin["ts"] <= end["ts"]
        around = [k for k in kernels if (k["pid"], k["tid"]) == (0, end["tid"]) and k["ts"] <= end["ts"]]
        assert end["ts"] < around[-1]["ts"] + around[-1]["dur"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}


def test_a_merged_trace_is_not_read_as_a_rank(job: JobTrace, tmp_path: Path) -> None:
    merged = tmp_path / "merged.json.gz"
    write_merged(job, merged)
    assert json.loads(gzip.decompress(merged.read_bytes()))["mergedRanks"] == [0, 1]
    with pytest.raises(TraceUnreadable, match="a merged trace of 2 ranks"):
        read_rank(merged)


def test_the_command_writes_it(job: JobTrace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    merged = tmp_path / "all" / "merged.json"
    assert main([*(str(trace.path) for trace in job.ranks), "--merged", str(merged)]) == 0
    assert f"Wrote {merged}" in capsys.readouterr().err
    assert json.loads(merged.read_text())["mergedRanks"] == [0, 1]


@needs_traces
def test_real_ranks_keep_their_numbers(tmp_path: Path) -> None:
    job = read_ranks(find_trace_files([TRACES / "dlrm_8rank"]))
    write_merged(job, tmp_path / "merged.json")
    check_numbers(job, tmp_path / "merged.json", tmp_path / "split")


def test_microseconds_have_three_decimals_and_a_sign_below_zero() -> None:
    found = [bytes(write_us(nanoseconds)) for nanoseconds in (0, 1, -1, 999, 1000, -1_234_567)]
    assert found == [b"0.000", b"0.001", b"-0.001", b"0.999", b"1.000", b"-1234.567"]


@pytest.mark.parametrize(("num_waiting", "num_arrows"), [(1, 1), (32, 32), (33, 17), (65, 22)])
def test_of_many_ranks_that_wait_every_second_or_third_gets_an_arrow(
    monkeypatch: pytest.MonkeyPatch, num_waiting: int, num_arrows: int
) -> None:
    """The last comes at 100 ns; the one that leaves a nanosecond later had no time to wait."""
    monkeypatch.setitem(_list_arrows.__globals__, "_place", lambda *_: {})
    ends = np.array([[101, *[102] * num_waiting, 150]])
    starts = np.array([[0] * (num_waiting + 1) + [100]])
    group = MatchedGroup(
        name="", ranks=tuple(range(num_waiting + 2)), group_size=None, sender=None, kinds=("all_reduce",),
        payload_bytes=(None,), places=np.zeros_like(starts), start_ns=starts, end_ns=ends, duration_ns=ends - starts,
    )  # fmt: skip
    ranks = {rank: SimpleNamespace(origin_ns=0) for rank in group.ranks}
    arrows = list(_list_arrows(group, 0, ranks))  # type: ignore[arg-type]
    assert len(arrows) == num_arrows
    assert [(one["ph"], one["ts"]) for one in arrows[0]] == [("s", write_us(100)), ("f", write_us(101))]


def test_threads_are_numbered_from_one_in_the_order_in_which_they_are_met() -> None:
    one = _Rank(rank=0, trace=None, clock=None, origin_ns=0, ns_per_tick=1)  # type: ignore[arg-type]
    names = (("python", "1"), ("stream", "7"), ("python", "1"), ("python", "7"))
    assert [one.number_thread(*name) for name in names] == [1, 2, 1, 3]

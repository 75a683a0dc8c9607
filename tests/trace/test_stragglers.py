"""Stragglers of jobs whose causes are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelab.answers.trace.overview import describe_fleet, format_ranks, is_spread
from scalelab.answers.trace.view import TraceView
from scalelab.trace.files.events import GroupInfo
from scalelab.trace.job_trace import JobTrace, read_ranks
from scalelab.trace.stragglers import (
    Fleet,
    Place,
    SlowPart,
    _drop_harmless,
    build_replay,
    find_places,
    inspect_fleet,
)
from tests.trace.build import TraceBuilder

OWN_US, TRANSFER_US, STEPS = 100.0, 20.0, 4
ROW, HOST = 4, 2


class FleetBuilder(TraceBuilder):
    """A rank of a mesh of 16: all-to-alls in rows, all-reduces in columns, two ranks on a host."""

    @property
    def groups(self) -> dict[str, list[int]]:
        row, column = divmod(self.rank, ROW)
        rows, columns = list(range(row * ROW, (row + 1) * ROW)), list(range(column, self.num_ranks, ROW))
        return {f"mesh_ep {row}": rows, f"mesh_pp {column}": columns}

    @property
    def header(self) -> dict[str, Any]:
        groups = [
            {"pg_name": name, "pg_desc": name.split()[0], "pg_size": len(ranks), "ranks": ranks}
            for name, ranks in self.groups.items()
        ]
        header = super().header | {"host_name": f"node{self.rank // HOST}"}
        header["distributedInfo"]["pg_config"] = groups
        return header


def build_fleet(directory: Path, slow: Mapping[int, float], slow_link: int = -1, noise: float = 0.01) -> Sequence[Path]:
    """Every step: own time, an all-to-all of the row, own time, an all-reduce of the column."""
    generator = np.random.default_rng(3)
    builders = [FleetBuilder(rank=rank, num_ranks=16) for rank in range(16)]
    now = np.zeros(16)
    factor = np.array([slow.get(rank, 1.0) for rank in range(16)])
    for step in range(STEPS):
        for place, kind in enumerate(("all_to_all", "allreduce")):
            now = now + OWN_US * factor * (1 + noise * generator.standard_normal(16))
            ends = now.copy()
            for members in {tuple(list(builder.groups.values())[place]) for builder in builders}:
                length = TRANSFER_US * (2.0 if slow_link in members else 1.0)
                ends[list(members)] = now[list(members)].max() + length
            for builder in builders:
                low, high = round(now[builder.rank], 3), round(ends[builder.rank], 3)
                group, ranks = list(builder.groups.items())[place]
                args = {"Group size": len(ranks), "Process Group Name": group}
                builder.collective(kind, low, round(high - low, 3), correlation=2 * step + place + 1, **args)
                builder.launch("cudaLaunchKernel", low - 5, 1, correlation=2 * step + place + 1)
            now = ends
    for step in range(STEPS):
        for builder in builders:
            builder.step(step, step * now.max() / STEPS, now.max() / STEPS - 1)
    return [builder.write(directory / f"rank{builder.rank}.json") for builder in builders]


def inspect(directory: Path, slow: Mapping[int, float], slow_link: int = -1, noise: float = 0.01) -> Fleet:
    fleet = inspect_fleet(read_ranks(build_fleet(directory, slow, slow_link, noise)))
    assert fleet is not None
    return fleet


def test_a_slow_rank_a_slow_host_and_a_slow_link_are_told_apart(tmp_path: Path) -> None:
    fleet = inspect(tmp_path, {5: 1.3, 12: 1.2, 13: 1.2}, slow_link=10)
    assert {(one.kind, one.name, one.ranks) for one in fleet.stragglers} == {
        ("rank", "rank 5", (5,)),
        ("host", "host node6", (12, 13)),
        ("link", "link of rank 10", (10,)),
    }
    slower = {one.kind: one.slower for one in fleet.stragglers}
    assert slower == pytest.approx({"rank": 0.3, "host": 0.2, "link": 1.0}, abs=0.03)
    assert fleet.saved > max(one.saved for one in fleet.stragglers)


def test_equal_ranks_have_no_straggler(tmp_path: Path) -> None:
    fleet = inspect(tmp_path, {}, noise=0.03)
    assert fleet.stragglers == ()
    assert [(one.name, len(one.ranks)) for one in fleet.alike] == [("usual", 16)]
    assert 0 < fleet.saved_if_equal < 0.1


def test_the_job_without_its_slow_rank_is_replayed_exactly(tmp_path: Path) -> None:
    fleet = inspect(tmp_path, {5: 1.5}, noise=0.0)
    (one,) = fleet.stragglers
    # The first own time lies before the recording: 7 own times and 8 transfers remain, of which 7 are longer.
    measured, without = 7 * 1.5 * OWN_US + 8 * TRANSFER_US, 7 * OWN_US + 8 * TRANSFER_US
    origin = 0.5 * OWN_US  # the first to arrive was there so much earlier
    assert fleet.span_ns == 1000 * (measured + origin)
    assert one.saved == fleet.saved_if_equal == pytest.approx(1 - (without + origin) / (measured + origin))
    assert fleet.places[9] == Place(host="node4", rail=1, stage=2)
    late = [one for one in fleet.lateness if one[2]]
    assert late[:2] == [(5, pytest.approx(5e-5), pytest.approx(5e-5)), (4, pytest.approx(1.7e-4), pytest.approx(5e-5))]
    usual, slow = fleet.alike
    assert (usual.own_ns, slow.own_ns) == (7 * 1000 * OWN_US / STEPS, 7 * 1500 * OWN_US / STEPS)
    assert (usual.waiting_ns, slow.waiting_ns) == (7 * 500 * OWN_US / STEPS, 0)


def test_a_stage_is_named_where_all_of_it_is_slow(tmp_path: Path) -> None:
    (one,) = inspect(tmp_path, dict.fromkeys(range(4, 8), 1.2)).stragglers
    assert (one.kind, one.name, one.ranks) == ("stage", "stage 1", (4, 5, 6, 7))


class PipelineBuilder(FleetBuilder):
    """A rank of four pipelines with two stages: rank 2k sends to rank 2k + 1."""

    @property
    def groups(self) -> dict[str, list[int]]:
        return {f"mesh_pp {self.rank // 2}": [self.rank // 2 * 2, self.rank // 2 * 2 + 1], "dp": list(range(8))}


def build_pipelines(directory: Path, long_us: float) -> Sequence[Path]:
    """Every step, four batches pass two stages, then all ranks reduce; the second stage computes for `long_us`."""
    builders = [PipelineBuilder(rank=rank, num_ranks=8) for rank in range(8)]
    now, step_us = 0.0, 4 * max(OWN_US, long_us) + min(OWN_US, long_us) + 2 * TRANSFER_US
    for step in range(STEPS):
        for builder in builders:
            stage, free, number = builder.rank % 2, now, 100 * step
            builder.step(step, now - 8, step_us)
            for batch in range(4):
                sent = now + (batch + 1) * OWN_US
                peer = builder.groups[f"mesh_pp {builder.rank // 2}"][1 - stage]
                args = {"Group size": 2, "Process Group Name": f"mesh_pp {builder.rank // 2}", "Seq": 7 * stage + batch}
                args |= {"Src Rank" if stage else "Dst Rank": peer}
                begin = free if stage else sent
                met = max(sent, now if stage == 0 else free)
                if stage == 0:  # the second stage takes the next batch after it computed the last one
                    met = max(sent, now + 1 + (0 if not batch else OWN_US + TRANSFER_US + batch * long_us))
                builder.collective(
                    "recv" if stage else "send", begin, met + 1 - begin, correlation=number + batch, **args
                )
                builder.launch("cudaLaunchKernel", begin - 5, 1, correlation=number + batch)
                free = met + 1
                builder.kernel("gemm", sent - OWN_US if stage == 0 else free, OWN_US if stage == 0 else long_us)
                free += long_us if stage else 0.0
            low = free if stage else now + 4 * OWN_US
            args = {"Group size": 8, "Process Group Name": "dp"}
            builder.collective("allreduce", low, now + step_us - 10 - low, correlation=number + 50, **args)
            builder.launch("cudaLaunchKernel", low - 5, 1, correlation=number + 50)
        now += step_us
    return [builder.write(directory / f"rank{builder.rank}.json") for builder in builders]


def test_a_long_stage_is_named_with_the_time_of_equal_ones(tmp_path: Path) -> None:
    job = read_ranks(build_pipelines(tmp_path, 2 * OWN_US))
    assert job.matching is not None
    assert (job.matching.num_point_to_point, {g.sender for g in job.matching.groups}) == (0, {None, 0, 2, 4, 6})
    fleet = inspect_fleet(job)
    assert fleet is not None
    (one,) = fleet.stragglers
    assert (one.kind, one.name, one.ranks) == ("long stage", "stage 1", (1, 3, 5, 7))
    assert one.slower == pytest.approx(1 / 3, abs=0.01)
    assert 0.05 < one.saved < 0.3
    (first, *_) = describe_fleet(TraceView(job=job)).findings
    assert "Stage 1 computes 33 % longer than the mean of all stages; with layers spread evenly" in first.text


def test_equal_stages_are_not_long(tmp_path: Path) -> None:
    fleet = inspect_fleet(read_ranks(build_pipelines(tmp_path, OWN_US)))
    assert fleet is not None
    assert fleet.stragglers == ()


def test_a_replay_of_what_was_measured_gives_what_was_measured(tmp_path: Path) -> None:
    job = read_ranks(build_fleet(tmp_path, {5: 1.3}))
    assert job.matching is not None
    replay = build_replay(job.matching.groups, job.by_rank)
    ends = [group.end_ns.max() for group in job.matching.groups]
    starts = [group.start_ns.min() for group in job.matching.groups]
    assert replay.run(replay.own, replay.tail) == pytest.approx(max(ends) - min(starts), abs=1)


def test_several_processes_read_the_same(tmp_path: Path) -> None:
    files, said = build_fleet(tmp_path, {}), list[int]()
    jobs = [read_ranks(files, num_processes=n, say=lambda _, number: said.append(number)) for n in (1, 2)]
    assert said == [*range(1, 17)] * 2
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]  # it would end with this process
    alone, together = ([(t.rank, t.breakdown, list(t.collectives)) for t in job.ranks] for job in jobs)
    assert alone == together


def test_the_overview_says_who_is_slow(tmp_path: Path) -> None:
    job = read_ranks(build_fleet(tmp_path, {5: 1.3}))
    document = describe_fleet(TraceView(job=job))
    first = document.findings[0]
    assert (first.kind, first.subject) == ("trace-straggler", "rank 5")
    assert document.sections[0].heading == "Stragglers"
    assert len(document.sections[0].charts) == 1
    clean = describe_fleet(TraceView(job=replace_ranks(job, job.ranks[:1])))
    assert all(finding.kind != "trace-straggler" for finding in clean.findings)


def replace_ranks(job: JobTrace, ranks: Sequence[Any]) -> JobTrace:
    return replace(job, ranks=tuple(ranks))


def test_ranks_are_written_as_ranges() -> None:
    assert format_ranks([0, 1, 2, 5, 7, 8]) == "0–2, 5, 7–8"


def test_of_parts_that_hide_each_other_all_are_kept_and_harmless_ones_are_dropped() -> None:
    delays = {"rank 1": 0.3, "rank 2": 0.3, "rank 3": 0.002}
    parts = [SlowPart(kind="rank", name=name, ranks=(0,), slower=delay) for name, delay in delays.items()]

    def save(gone: list[SlowPart]) -> float:
        """The slowest that is left decides."""
        return 0.3 - max([delay for name, delay in delays.items() if name not in {one.name for one in gone}] or [0.0])

    assert {one.name for one in _drop_harmless(parts, save)} == {"rank 1", "rank 2"}


def test_uneven_work_is_named_if_another_rank_is_slow_each_time(tmp_path: Path) -> None:
    for noise, is_named in ((0.3, True), (0.001, False)):
        directory = tmp_path / str(noise)
        directory.mkdir()
        document = describe_fleet(TraceView(job=read_ranks(build_fleet(directory, {}, noise=noise))))
        (without,) = [one for one in document.findings if one.kind == "without-stragglers"]
        saved, if_equal = (float(without.values[name] or 0) for name in ("saved", "if_equal"))
        assert (if_equal - saved > 0.05) == is_named
        assert ("uneven" in without.text) == is_named


def test_work_is_not_uneven_if_the_same_ranks_are_late(tmp_path: Path) -> None:
    fleet = inspect(tmp_path, {5: 1.5, 9: 1.5})
    assert not is_spread(fleet)
    assert is_spread(replace(fleet, lateness=[(rank, 0.0, 0.1) for rank in range(16)]))


def test_a_rank_does_not_wait_for_what_it_sends(tmp_path: Path) -> None:
    """Rank 0 sends four batches: each of its own times counts from before them; the receiver's from the last."""
    job = read_ranks(build_pipelines(tmp_path, OWN_US))
    assert job.matching is not None
    replay = build_replay(job.matching.groups, job.by_rank)
    sent = {number for number, group in enumerate(job.matching.groups) if group.sender is not None}
    is_transfer = np.isin(replay.groups, list(sent))[replay.row]
    waited_for = replay.before[replay.before >= 0]
    senders = {job.matching.groups[number].sender for number in sent}
    assert senders == {0, 2, 4, 6}
    assert not any(replay.rank[one] in senders for one in waited_for if is_transfer[one])
    assert any(replay.rank[one] not in senders for one in waited_for if is_transfer[one])


def test_a_pipeline_of_one_rank_has_no_stages(tmp_path: Path) -> None:
    builder = FleetBuilder(rank=3, num_ranks=4)
    trace = read_ranks([builder.kernel("gemm", 0, 1).write(tmp_path / "t.json")]).ranks[0]
    for ranks, stage in (([3], None), ([1, 3], 1), ([0, 1], None)):
        trace.header.distributed.pg_config = [GroupInfo(pg_name="0", pg_desc="mesh_pp", ranks=ranks)]  # type: ignore[union-attr]
        assert find_places({3: trace}) == {3: Place(host="node1", rail=None, stage=stage)}


def test_two_hosts_of_two_ranks_have_rails(tmp_path: Path) -> None:
    builders = [FleetBuilder(rank=rank, num_ranks=4).kernel("gemm", 0, 1) for rank in range(4)]
    paths = [builder.write(tmp_path / f"rank{builder.rank}.json") for builder in builders]
    job = read_ranks(paths)
    assert [place.rail for place in find_places(job.by_rank).values()] == [0, 1, 0, 1]
    three = read_ranks(paths[:3])
    assert [place.rail for place in find_places(three.by_rank).values()] == [None] * 3
    one = read_ranks(paths[:2])
    assert [place.rail for place in find_places(one.by_rank).values()] == [None] * 2

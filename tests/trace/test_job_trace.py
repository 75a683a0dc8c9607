"""The files of a job: found, ordered, doubted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from scalelab.errors import TraceUnreadable, UsageError
from scalelab.trace.files.reader import find_trace_files
from scalelab.trace.job_trace import find_match_doubts, has_one_thread, read_ranks
from tests.trace.build import TraceBuilder
from tests.trace.jobs import GroupedBuilder, reduce_on_time, write_job


def write_trace(path: Path, rank: int = 0, num_ranks: int = 2) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return TraceBuilder(rank=rank, num_ranks=num_ranks).collective("allreduce", 0, 5).write(path)


def test_a_directory_gives_its_traces_by_number(tmp_path: Path) -> None:
    for rank in (10, 9, 1):
        write_trace(tmp_path / f"rank{rank}.json", rank)
    (tmp_path / "notes.txt").write_text("no trace")
    assert [file.name for file in find_trace_files([tmp_path])] == ["rank1.json", "rank9.json", "rank10.json"]


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "host_12.178.pt.trace.json", "host_12.178.pt.trace.json.gz"])
def test_names_that_profilers_give_are_found(tmp_path: Path, name: str) -> None:
    assert find_trace_files([tmp_path]) if write_trace(tmp_path / name) else None


def test_the_directory_of_a_trial_and_of_a_run_with_one_of_them_will_do(tmp_path: Path) -> None:
    for name in ("run.json", "document.json", "environment.json"):
        (tmp_path / name).write_text("{}")
    trial = tmp_path / "trials" / "ddp-2-r1"
    files = [write_trace(trial / "trace" / f"rank{rank}.json.gz", rank) for rank in range(2)]
    for name in ("trial.json", "result.json", "start.json"):
        (trial / name).write_text("{}")
    assert find_trace_files([trial.parent]) == files
    assert find_trace_files([trial]) == find_trace_files([tmp_path]) == find_trace_files([trial, *files]) == files


def test_a_run_with_several_traced_trials_asks_which(tmp_path: Path) -> None:
    for name in ("ddp-1-r1", "ddp-2-r1"):
        write_trace(tmp_path / "trials" / name / "trace" / "rank0.json")
    with pytest.raises(UsageError, match=r"2 recordings \(trials/ddp-1-r1, .*: give one, such as .*ddp-2-r1$"):
        find_trace_files([tmp_path])


def test_a_recording_with_a_directory_of_its_own_is_found_where_it_is_the_only_one(tmp_path: Path) -> None:
    names = [f"probe-{rank}-of-2.json" for rank in range(2)]
    files = [write_trace(tmp_path / "trace" / "probe_1nodes_S4_R2_1" / name) for name in names]
    (files[0].parent / "probe-0-of-2.txt").write_text("key averages")
    assert find_trace_files([tmp_path]) == find_trace_files([tmp_path / "trace"]) == files
    write_trace(tmp_path / "trace" / "probe_1nodes_S4_R2_2" / names[0])
    with pytest.raises(UsageError, match=r"2 recordings \([^…]*\): give one"):
        find_trace_files([tmp_path])


def test_what_is_not_there_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no trace .*--profile-steps"):
        find_trace_files([tmp_path])
    with pytest.raises(UsageError, match="nowhere does not exist"):
        find_trace_files([tmp_path / "nowhere"])
    with pytest.raises(UsageError, match="give a trace file"):
        find_trace_files([])


def test_ranks_come_in_order_whatever_the_order_of_the_files(tmp_path: Path) -> None:
    files = [write_trace(tmp_path / f"{name}.json", rank, 3) for name, rank in (("a", 2), ("b", 0), ("c", 1))]
    job = read_ranks(files)
    assert [trace.rank for trace in job.ranks] == [0, 1, 2] == list(job.by_rank)
    assert (job.num_ranks, job.doubts) == (3, ())


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    files = [write_trace(tmp_path / name) for name in ("a.json", "b.json")]
    with pytest.raises(TraceUnreadable, match=r"a.json and .*b.json are both of rank 0"):
        read_ranks(files)


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    job = read_ranks([write_trace(tmp_path / f"{rank}.json", rank, 4) for rank in (0, 2)])
    (doubt,) = job.doubts
    assert doubt.kind == "missing-ranks"
    assert "rank 1, 3 of 4" in doubt.message
    for size, listed in ((10, "1, 3, 4, 5, 6, 7, 8, 9"), (11, "1, 3, 4, 5, 6, 7, 8, 9 …")):
        job = read_ranks([write_trace(tmp_path / f"{rank}.json", rank, size) for rank in (0, 2)])
        assert f"rank {listed} of {size}:" in job.doubts[0].message


def test_a_header_may_claim_any_number_of_ranks(tmp_path: Path) -> None:
    files = [write_trace(tmp_path / f"{rank}.json", rank, 2) for rank in (0, 1)]
    for file in files:
        text = re.sub(r'("world_size"|"pg_size"|"Group size"): 2', rf"\1: {10**18}", file.read_text())
        file.write_text(text)
    job = read_ranks(files)
    assert "rank 2, 3, 4, 5, 6, 7, 8, 9 … of 1000" in job.doubts[0].message
    assert job.ranks[0].collectives[0].group_size is None


def test_one_file_of_many_ranks_is_no_reason_to_doubt(tmp_path: Path) -> None:
    job = read_ranks([write_trace(tmp_path / "a.json", 3, 8)])
    assert (job.doubts, job.matching, job.arrivals) == ((), None, None)


def test_jobs_of_different_sizes_are_doubted(tmp_path: Path) -> None:
    job = read_ranks([write_trace(tmp_path / "a.json", 0, 2), write_trace(tmp_path / "b.json", 1, 4)])
    assert job.doubts[0].kind == "mixed-jobs"


def test_several_ranks_without_communication_are_doubted_with_the_next_step(tmp_path: Path) -> None:
    job = read_ranks([TraceBuilder().kernel("a_kernel", 0, 5).write(tmp_path / "a.json")])
    (doubt,) = job.doubts
    assert doubt.kind == "no-communication"
    assert "--communication" in doubt.next_step
    (doubt,) = read_ranks([TraceBuilder(backend="gloo").operator("aten::mm", 0, 5).write(tmp_path / "a.json")]).doubts
    assert "record devices too" in doubt.next_step
    (doubt,) = read_ranks([TraceBuilder().operator("aten::mm", 0, 5).write(tmp_path / "a.json")]).doubts
    assert doubt.kind == "no-device-activity"


def test_files_that_do_not_say_their_rank_follow_the_others(tmp_path: Path) -> None:
    text = '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 2, "pid": 1, "tid": 1}]}'
    for name in ("x.json", "y.json"):
        (tmp_path / name).write_text(text)
    job = read_ranks([tmp_path / "x.json", write_trace(tmp_path / "z.json", 1), tmp_path / "y.json"])
    assert [trace.path.name for trace in job.ranks] == ["z.json", "x.json", "y.json"]
    assert list(job.by_rank) == [1, 2, 3]
    assert "unknown-rank" in [doubt.kind for doubt in job.doubts]


def test_collectives_without_a_counterpart_are_told(tmp_path: Path) -> None:
    builders = reduce_on_time([(0, 10)] * 10)
    del builders[1].events[3:6]
    job = write_job(tmp_path, builders)
    (doubt,) = find_match_doubts(job)
    assert (doubt.kind, doubt.subject) == ("unmatched-collectives", "rank 0")
    assert doubt.message.startswith("3 of 10 collectives")
    assert job.arrivals is not None
    assert job.arrivals.num_matched == 7


def test_a_named_recording_is_found_from_its_trial_and_its_run(tmp_path: Path) -> None:
    trial = tmp_path / "trials" / "train-r1"
    file = write_trace(trial / "trace" / "probe_1nodes_S4_R1_1" / "probe-0-of-1.json")
    for name in (tmp_path / "run.json", trial / "trial.json", trial / "start.json"):
        name.write_text("{}")
    assert find_trace_files([tmp_path]) == find_trace_files([trial]) == [file]


def test_several_devices_in_one_trace_are_doubted(tmp_path: Path) -> None:
    first, second = TraceBuilder(rank=0).kernel("gemm", 0, 5), TraceBuilder(rank=1).collective("allreduce", 0, 5)
    first.events += second.events
    messages = [doubt.message for doubt in read_ranks([first.write(tmp_path / "t.json")]).doubts]
    assert len(messages) == 1
    assert "2 devices" in messages[0]


def test_collectives_of_the_host_beside_a_device_are_doubted(tmp_path: Path) -> None:
    builder = TraceBuilder(backend="gloo").kernel("gemm", 0, 5).annotation("gloo:all_reduce", 5, 5, tid=9)
    path = builder.write(tmp_path / "rank0.json")
    assert [doubt.kind for doubt in read_ranks([path]).doubts] == ["host-collectives"]
    builder.collective("allreduce", 20, 5).write(path)
    assert not read_ranks([path]).doubts


def test_clocks_that_a_single_collective_sets_are_doubted(tmp_path: Path) -> None:
    job = write_job(tmp_path, reduce_on_time([(0, 10)]))
    assert [doubt.kind for doubt in find_match_doubts(job)] == ["uncertain-clocks"]
    assert not list(find_match_doubts(write_job(tmp_path, reduce_on_time([(0, 10), (5, 0)]))))


def test_clocks_that_broadcasts_set_are_doubted(tmp_path: Path) -> None:
    builders = [TraceBuilder(rank=rank) for rank in range(2)]
    for rank, builder in enumerate(builders):
        for number in range(9):
            builder.collective("broadcast", 1000 * number + 37 * number**2 + 100 * rank, 5 + 15 * rank)
    (doubt,) = find_match_doubts(write_job(tmp_path, builders))
    assert doubt.kind == "uncertain-clocks"
    for builder in builders:
        builder.collective("allreduce", 20_000, 5).collective("allreduce", 30_000, 5)
    assert not list(find_match_doubts(write_job(tmp_path, builders)))


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_collectives_whose_group_is_not_recorded_say_so(tmp_path: Path, backend: str) -> None:
    builders: list[TraceBuilder] = []
    for rank in range(3):
        builder = GroupedBuilder(rank=rank, num_ranks=3, backend=backend)
        builder.groups = {"0": (0, 1, 2), "1": (0, 1)}
        builders.append(builder.kernel("gemm", 0, 1) if backend == "nccl" else builder)
        for number in range(6):  # at unrelated times: neither group is confirmed
            builder.annotation("gloo:all_reduce", 1000 * number + (137 * rank * number**3) % 991, 5, tid=9)
    doubts = [
        doubt for doubt in find_match_doubts(write_job(tmp_path, builders)) if doubt.kind == "unmatched-collectives"
    ]
    assert ["process group is not recorded" in doubt.message for doubt in doubts] == [True] * 3
    assert {"gloo" in doubt.next_step for doubt in doubts} == {True}


def forget_groups(groups: dict[str, tuple[int, ...]]) -> list[TraceBuilder]:
    builders = reduce_on_time([(0, 10), (5, 0)])
    for builder in builders:
        builder.__class__ = GroupedBuilder
        builder.groups = groups  # type: ignore[attr-defined]
        for event in builder.events:
            del event["args"]["Process Group Name"]
    return builders


def test_the_only_group_is_not_inferred(tmp_path: Path) -> None:
    assert "inferred-groups" not in {
        doubt.kind for doubt in find_match_doubts(write_job(tmp_path, forget_groups({"0": (0, 1)})))
    }


def test_groups_that_were_inferred_are_told(tmp_path: Path) -> None:
    (doubt,) = find_match_doubts(write_job(tmp_path, forget_groups({"0": (0, 1), "tp": (0, 1)})))
    assert doubt.kind == "inferred-groups"
    assert doubt.message.startswith("4 of 4 collectives")


def test_a_process_with_threads_is_not_forked() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert not has_one_thread()
    finally:
        done.set()
        thread.join()


@pytest.mark.skipif(sys.platform != "linux", reason="threads of libraries are counted on Linux only")
def test_what_reads_traces_starts_no_thread_and_can_be_forked() -> None:
    program = (
        "from scalelab.cli.trace import freeze_modules; from scalelab.trace.job_trace import has_one_thread;"
        "freeze_modules(); print(has_one_thread())"
    )
    command = [sys.executable, "-c", program]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "True"


@pytest.mark.parametrize(
    ("backend", "has_runtime", "device"),
    [("gloo", True, "calls of its library on the host"), ("gloo", False, ""), ("xccl", False, "backend xccl")],
)
def test_a_trace_without_kernels_may_be_of_a_job_on_a_device(
    tmp_path: Path, backend: str, has_runtime: bool, device: str
) -> None:
    builder = TraceBuilder(backend=backend, num_ranks=1).operator("aten::mm", 0, 10)
    if has_runtime:
        builder.launch("cudaLaunchKernel", 2, 3, 1)
    assert read_ranks([builder.write(tmp_path / "t.json")]).ranks[0].tables.missing_device == device

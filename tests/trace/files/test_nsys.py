"""Exports of Nsight Systems: the same job says the same as a trace of torch's profiler."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from scalelab.answers.trace.report import describe_traces
from scalelab.answers.trace.view import TraceView, make_counters
from scalelab.cli.trace import main
from scalelab.errors import TraceUnreadable
from scalelab.trace.files import nsys
from scalelab.trace.files.nsys import NsysFile
from scalelab.trace.files.reader import find_trace_files, peek_rank
from scalelab.trace.job_trace import JobTrace, read_ranks

SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
    globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, text TEXT,
    globalTid INTEGER, textId INTEGER);
CREATE TABLE TARGET_INFO_GPU (id INTEGER NOT NULL, name TEXT, totalMemory INTEGER);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER);
CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT NOT NULL, value TEXT NOT NULL);
"""
"""Of the documented tables, the columns that matter."""
PROCESS = (1 << 48) + (4242 << 24)
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


class Export:
    """Writes an export, times in microseconds."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.path = path
        self.database = sqlite3.connect(path)
        self.database.executescript(SCHEMA)
        self.texts: dict[str, int] = {}
        self.add("TARGET_INFO_GPU", 0, "NVIDIA A100-SXM4-40GB", 42_000_000_000)
        self.add("TARGET_INFO_SESSION_START_TIME", 1_700_000_000_000_000_000)
        self.add("TARGET_INFO_SYSTEM_ENV", "Hostname", "node7")

    def add(self, table: str, *values: object) -> None:
        marks = ", ".join("?" * len(values))
        self.database.execute(f"INSERT INTO {table} VALUES ({marks})", values)

    def text(self, value: str) -> int:
        if value not in self.texts:
            self.texts[value] = len(self.texts) + 1
            self.add("StringIds", self.texts[value], value)
        return self.texts[value]

    def kernel(self, name: str, start: int, length: int, number: int, stream: int = 7, process: int = PROCESS) -> None:
        called = 1000 * (start - 10)
        call = self.text("cudaLaunchKernel_v7000")
        self.add("CUPTI_ACTIVITY_KIND_RUNTIME", called, called + 2000, 0, process + 4243, number, call, 0)
        times = (1000 * start, 1000 * (start + length))
        self.add("CUPTI_ACTIVITY_KIND_KERNEL", *times, 0, 1, stream, number, process, self.text(name), self.text("k"))

    def mark(self, name: str, start: int, length: int, kind: int = 59) -> None:
        self.add("NVTX_EVENTS", 1000 * start, 1000 * (start + length), kind, None, name, PROCESS + 4243, None)

    def write(self) -> Path:
        self.database.commit()
        self.database.close()
        return self.path


def write_job(directory: Path, late: int = 1) -> list[Path]:
    """Two ranks, three steps: a product, then an all-reduce that ends on both at once; one rank computes longer."""
    paths = []
    for rank in range(2):
        export = Export(directory / f"rank{rank}.sqlite")
        for step, begin in enumerate((100, 1200, 2370)):
            export.mark(f"step {step}", begin - 50, 900)
            export.mark("forward", begin - 40, 100, kind=60)
            work = 500 if rank == late else 300
            export.kernel("gemm", begin, work, 10 * step + 1)
            export.kernel(ALL_REDUCE, begin + work, 600 - work, 10 * step + 2, stream=20)
            copied = (1000 * (begin + 620), 1000 * (begin + 640))
            export.add("CUPTI_ACTIVITY_KIND_MEMCPY", *copied, 0, 1, 7, 10 * step + 3, PROCESS, 4096, 1)
        paths.append(export.write())
    return paths


def read_job(paths: list[Path]) -> JobTrace:
    return read_ranks(paths, counters=make_counters(None))


def test_steps_parts_and_the_late_rank_of_an_export(tmp_path: Path) -> None:
    job = read_job(find_trace_files([write_job(tmp_path)[0].parent]))
    first = job.by_rank[0]
    assert [step.number for step in first.tables.steps] == [0, 1, 2]
    parts = first.breakdown.by_step[1]
    assert (parts.compute_ns, parts.exposed_ns) == (300_000, 300_000)
    assert first.breakdown.whole.copy_ns == 3 * 20_000
    assert first.header.host_name == "node7"
    assert first.header.base_ns == 1_700_000_000_000_000_000
    assert [one.kind for one in first.collectives] == ["all_reduce"] * 3
    assert job.arrivals is not None
    assert job.arrivals.last is not None
    assert (job.arrivals.last.rank, job.arrivals.last.num_last) == (1, 3)


def test_the_report_names_device_calls_and_ranges(tmp_path: Path) -> None:
    document = describe_traces(TraceView(job=read_job(write_job(tmp_path))))
    text = str(document)
    assert "cudaLaunchKernel" in text
    assert "cudaLaunchKernel_v7000" not in text
    assert "Memcpy HtoD" in text
    assert "forward" in text


def test_operators_of_emit_nvtx_have_their_number(tmp_path: Path) -> None:
    export = Export(tmp_path / "rank0.sqlite")
    export.mark("aten::mm, seq = 12, op_id = 5", 80, 100)
    export.kernel("gemm", 100, 50, 1)
    trace = read_job([export.write()]).ranks[0]
    operators = trace.counted[1]
    assert [one.name for one in operators if "::" in one.name] == ["aten::mm"]


def test_processes_that_count_alike_do_not_mix(tmp_path: Path) -> None:
    export = Export(tmp_path / "both.sqlite")
    export.kernel("gemm", 100, 50, 1)
    export.kernel("other", 300, 50, 1, process=PROCESS + (1 << 24))
    trace = read_job([export.write()]).ranks[0]
    (launches,) = trace.counted[2].launches
    assert (launches.count, launches.num_kernels) == (2, 2)
    assert launches.median_delay_ns == pytest.approx(10_000, rel=0.01)


def test_rows_become_events_of_their_process_device_and_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsys, "BATCH_ROWS", 2)
    export = Export(tmp_path / "rank0.sqlite")
    export.kernel("gemm", 100, 50, 5, stream=7)
    for number, (kind, device) in enumerate({1: 0, 2: 3, 8: 0, 10: 0, 99: 0}.items()):
        times = (1000 * number, 1000 * number + 500)
        export.add("CUPTI_ACTIVITY_KIND_MEMCPY", *times, device, 1, 9, 6, PROCESS + (1 << 24), 4096, kind)
    export.mark("aten::mm, seq = 12", 80, 100)
    export.mark("Iteration_4", 70, 300)
    export.mark("lonely", 70, 300, kind=61)
    batches = list(NsysFile(export.write()).batches())
    found = [
        (one.cat, one.name, one.pid, one.tid, one.args.correlation, one.args.sequence_number, int(start), int(end))
        for batch in batches
        for one, start, end in zip(batch.events, batch.start_ns, batch.end_ns, strict=True)
    ]
    second = 6 + (1 << 40)  # of the second process that is met
    assert found == [
        ("kernel", "gemm", 0, 7, 5, -1, 100_000, 150_000),
        ("gpu_memcpy", "Memcpy HtoD", 0, 9, second, -1, 0, 500),
        ("gpu_memcpy", "Memcpy DtoH", 3, 9, second, -1, 1000, 1500),
        ("gpu_memcpy", "Memcpy DtoD", 0, 9, second, -1, 2000, 2500),
        ("gpu_memcpy", "Memcpy PtoP", 0, 9, second, -1, 3000, 3500),
        ("gpu_memcpy", "Memcpy", 0, 9, second, -1, 4000, 4500),
        ("cuda_runtime", "cudaLaunchKernel", 4242, 4243, 5, -1, 90_000, 92_000),
        ("cpu_op", "aten::mm", 4242, 4243, -1, 12, 80_000, 180_000),
        ("user_annotation", "ProfilerStep#4", 4242, 4243, -1, -1, 70_000, 370_000),
    ]
    assert [len(batch.events) for batch in batches] == [1, 2, 2, 1, 1, 2]


def test_the_rank_comes_from_the_name(tmp_path: Path) -> None:
    assert [peek_rank(path) for path in write_job(tmp_path)] == [0, 1]


def test_rows_without_an_end_are_left_out_and_counted(tmp_path: Path) -> None:
    export = Export(tmp_path / "rank0.sqlite")
    export.kernel("gemm", 100, 50, 1)
    export.add("NVTX_EVENTS", 5000, None, 59, None, "open", PROCESS + 1, None)
    export.add("CUPTI_ACTIVITY_KIND_KERNEL", "soon", "late", 0, 1, 7, 3, PROCESS, 1, 1)
    trace = read_job([export.write()]).ranks[0]
    assert trace.num_unusable == 2
    assert trace.breakdown.whole.compute_ns == 50_000


def test_a_database_of_something_else_or_a_broken_one_is_named(tmp_path: Path) -> None:
    other, broken = tmp_path / "other.sqlite", tmp_path / "broken.sqlite"
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE people (name TEXT)")
    database.close()
    with pytest.raises(TraceUnreadable, match=r"other\.sqlite: the database has no activity of CUDA"):
        read_job([other])
    broken.write_bytes(write_job(tmp_path)[0].read_bytes()[:5000])
    with pytest.raises(TraceUnreadable, match=r"broken\.sqlite: not a readable SQLite database"):
        read_job([broken])


@pytest.mark.parametrize("flags", [["--hta"], ["--merged", "job.json"]])
def test_what_needs_the_files_of_torch_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TraceUnreadable, match="a database of Nsight Systems"):
        main([str(path) for path in write_job(tmp_path)] + flags)

"""Device time by what asked for it, and the work of products: whatever was open where the host launched the kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from scalelab.answers.trace.efficiency import find_rate, find_roof, list_exchanges, thin_memory
from scalelab.answers.trace.report import describe_traces
from scalelab.answers.trace.view import TraceView, make_counters
from scalelab.predict.devices import DEVICES, recognize_device
from scalelab.report.document import Document
from scalelab.trace import windows
from scalelab.trace.attribution import (
    Attribution,
    AttributionCounter,
    Caller,
    CallerTime,
    WorkTime,
    add_asked,
    find_distinct_columns,
)
from scalelab.trace.files.events import Arguments
from scalelab.trace.files.reader import find_trace_files
from scalelab.trace.job_trace import read_ranks
from scalelab.trace.rank_trace import read_rank
from scalelab.trace.work import read_work
from tests.trace.build import HOST_PID, TraceBuilder
from tests.trace.jobs import write_job
from tests.trace.real import TRACES, needs_traces


def call_python(builder: TraceBuilder, name: str, start: float, length: float) -> None:
    event = {"ph": "X", "cat": "python_function", "name": name, "pid": HOST_PID, "tid": 1, "ts": start, "dur": length}
    builder.event(event | {"args": {}})


def build() -> TraceBuilder:
    """A linear layer in a model: forward, its backward on another thread, the optimizer, and a graph."""
    builder = TraceBuilder(num_ranks=1)
    call_python(builder, "train.py(10): step", 0, 100)
    call_python(builder, "torch/nn/modules/linear.py(9): forward", 12, 50)
    call_python(builder, "nn.Module: Model_0", 10, 60)
    call_python(builder, "nn.Module: Linear_1", 12, 50)
    shapes = {"Input Dims": [[4], [8, 16], [16, 4]], "Input type": ["float"] * 3}
    builder.annotation("my part", 11, 52)
    builder.operator("aten::linear", 20, 30).operator("aten::addmm", 22, 25, **{"Sequence number": 7}, **shapes)
    builder.launch("cudaLaunchKernel", 25, 2, 1).kernel("gemm", 200, 10, correlation=1)
    builder.launch("cudaLaunchKernel", 28, 2, 2).kernel("splitk", 215, 5, correlation=2)
    node = {"Sequence number": 7}
    builder.operator("autograd::engine::evaluate_function: AddmmBackward0", 110, 40, tid=2, **node)
    builder.operator("aten::mm", 115, 30, tid=2).launch("cudaLaunchKernel", 120, 2, 3, tid=2)
    builder.kernel("gemm", 230, 20, correlation=3)
    builder.annotation("Optimizer.step#Adam.step", 160, 20).operator("aten::add_", 162, 10)
    builder.launch("cudaLaunchKernel", 165, 2, 4).kernel("add", 260, 3, correlation=4)
    builder.launch("cudaGraphLaunch", 185, 2, 5).kernel("in graph", 270, 7, correlation=5)
    return builder.kernel("in graph", 280, 8, correlation=5).kernel("from before", 300, 1, correlation=999)


def count(builder: TraceBuilder, directory: Path) -> Attribution:
    (found,) = read_rank(builder.write(directory / "t.json"), counters=[AttributionCounter]).counted
    assert isinstance(found, Attribution)
    return found


@pytest.mark.parametrize("piece_records", [1 << 17, 4])
def test_a_kernel_belongs_to_what_was_open_where_it_was_launched(
    tmp_path: Path, piece_records: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "PIECE_RECORDS", piece_records)
    found = count(build(), tmp_path)
    modules = ("nn.Module: Model_0", "nn.Module: Linear_1")
    where: dict[str, Any] = {"modules": modules, "annotation": "my part", "source": "train.py(10): step"}
    assert {one.asked: (one.count, one.total_ns) for one in found.times} == {
        Caller("forward", "aten::addmm", **where): (2, 15_000),
        Caller("backward", "aten::mm", **where): (1, 20_000),
        Caller("optimizer", "aten::add_"): (1, 3_000),
        Caller("unattributed", "CUDA graph"): (2, 15_000),
        Caller("no recorded launch", ""): (1, 1_000),
    }
    (work,) = found.works
    assert (work.count, work.total_ns, work.work.num_operations) == (1, 15_000, 2 * 8 * 16 * 4)
    assert work.work.num_bytes == 4 * (8 * 16 + 16 * 4 + 8 * 4)
    assert found.has_modules
    assert found.has_sources


def test_an_operator_that_took_no_time_asked_for_nothing(tmp_path: Path) -> None:
    builder = TraceBuilder(num_ranks=1).operator("aten::mm", 0, 0).launch("cudaLaunchKernel", 1, 2, 1)
    (found,) = count(builder.kernel("gemm", 10, 5, correlation=1), tmp_path).times
    assert found.asked == Caller("unattributed", "cudaLaunchKernel")


def read(name: str, shapes: list[Any], concrete: list[str] | None = None, kind: str = "c10::BFloat16") -> Any:
    args = Arguments(
        input_dims=msgspec.Raw(msgspec.json.encode(shapes)),
        input_types=msgspec.Raw(msgspec.json.encode([kind] * len(shapes))),
        concrete_inputs=msgspec.Raw(msgspec.json.encode(concrete or [])),
    )
    return read_work(name, args)


FLASH, EFFICIENT, CUDNN = (f"aten::_scaled_dot_product_{name}_attention" for name in ("flash", "efficient", "cudnn"))


@pytest.mark.parametrize(
    ("name", "shapes", "causal", "operations", "elements"),
    [
        ("aten::mm", [[3, 4], [4, 5]], None, 120, 47),
        ("aten::_scaled_mm", [[3, 4], [4, 5]], None, 120, 47),
        ("aten::addmm", [[5], [3, 4], [4, 5]], None, 120, 47),
        ("aten::baddbmm", [[2, 3, 5], [2, 3, 4], [2, 4, 5]], None, 240, 94),
        ("aten::linear", [[2, 3, 4], [5, 4]], None, 240, 74),
        ("aten::convolution_backward", [[1, 8, 4, 4], [1, 3, 6, 6], [8, 3, 3, 3]], None, 13824, 904),
        (FLASH, [[1, 2, 8, 4]] * 3, 4, 2048, 256),
        (EFFICIENT, [[1, 2, 8, 4]] * 3, 6, 2048, 256),
        (CUDNN, [[1, 2, 8, 4]] * 3, 6, 2048, 256),
        (f"{FLASH}_backward", [[1, 2, 8, 4]] * 4, 11, 5120, 512),
        (f"{EFFICIENT}_backward", [[1, 2, 8, 4]] * 4, 11, 5120, 512),
    ],
)
def test_every_formula_counts_operations_and_elements(
    name: str, shapes: list[Any], causal: int | None, operations: int, elements: int
) -> None:
    found = read(name, shapes)
    assert (found.num_operations, found.num_bytes) == (operations, 2 * elements)
    if causal is not None:
        masked = read(name, shapes, [*([""] * causal), "True"])
        assert (masked.num_operations, masked.num_bytes) == (operations / 2, 2 * elements)


def test_operations_follow_from_shapes() -> None:
    assert read("aten::bmm", [[2, 3, 4], [2, 4, 5]]).num_operations == 2 * 2 * 3 * 4 * 5
    assert read("aten::linear", [[2, 3, 4], [5, 4]]).num_operations == 2 * 6 * 4 * 5
    convolution = read(
        "aten::convolution", [[10, 64, 56, 56], [128, 64, 3, 3]], ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False"]
    )
    assert convolution.num_operations == 2 * (10 * 128 * 28 * 28) * 64 * 9
    assert convolution.num_bytes == 2 * (10 * 64 * 56 * 56 + 128 * 64 * 9 + 10 * 128 * 28 * 28)
    flash = "aten::_scaled_dot_product_flash_attention"
    queries = [[2, 8, 128, 64]] * 3
    assert read(flash, queries, ["", "", "", "0.", "False"]).num_operations == 4 * 2 * 8 * 128 * 128 * 64
    assert read(flash, queries, ["", "", "", "0.", "True"]).num_operations == 2 * 2 * 8 * 128 * 128 * 64
    assert read(flash, queries).dtype == "bfloat16"


@pytest.mark.parametrize(
    "shapes", [[], [[3, 4]], [[3, 4], [5, 6]], [["x", 4], [4, 5]], [None, 1], [[10**9, 10**9], [10**9, 1]]]
)
def test_shapes_that_make_no_sense_have_no_work(shapes: list[Any]) -> None:
    assert read("aten::mm", shapes) is None


def test_the_roof_of_a_product_is_the_peak_or_the_memory() -> None:
    device = DEVICES["v100"]
    small, large = (WorkTime(read("aten::mm", [[n, n], [n, n]], kind="c10::Half"), 1, 1000) for n in (8, 8192))
    assert find_roof(large, device) == device.peaks["float16"]
    assert find_roof(small, device) == device.memory_rate * (2 * 8**3) / (3 * 2 * 64)
    assert find_rate(small) == pytest.approx(2 * 8**3 / 1e-6)


def test_devices_are_known_by_the_names_of_their_drivers() -> None:
    names = {
        "Tesla V100-SXM2-32GB": "v100", "NVIDIA A100-SXM4-80GB": "a100-80gb", "NVIDIA H100 80GB HBM3": "h100-sxm",
        "NVIDIA H100 PCIe": "h100-pcie", "NVIDIA B200": "b200", "AMD Instinct MI300X": "mi300x", "NVIDIA A10G": "a10",
    }  # fmt: skip
    assert {name: recognize_device(name, 80 * 2**30) for name in names} == {
        name: DEVICES[device] for name, device in names.items()
    }
    assert recognize_device("NVIDIA A100-PG509-200", 40 * 2**30) is DEVICES["a100-40gb"]
    assert recognize_device("Ascend910B", 2**36) is None


def test_uneven_all_to_alls_name_the_rank_that_gets_most(tmp_path: Path) -> None:
    builders = [TraceBuilder(rank=rank) for rank in range(2)]
    for number, step in enumerate((100, 217, 345, 481)):
        for rank, builder in enumerate(builders):
            amounts = {"in_elements": 1000, "out_elements": 500 + 1000 * rank}
            builder.collective("all_to_all", step, 30, Seq=number, **amounts)
    view = TraceView(job=write_job(tmp_path, builders))
    (row,) = list_exchanges(view)
    assert (row.num_collectives, row.sent, row.received, row.rank) == (4, 1.0, 1.5, 1)


def test_memory_keeps_its_peak_in_few_points(tmp_path: Path) -> None:
    builder = build()
    for number in range(2000):
        held = {"Device Type": 1, "Device Id": 0, "Bytes": 1, "Total Allocated": number % 777, "Total Reserved": 4096}
        builder.event({"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": number, "args": held})
    builder.event({"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": 5, "args": {"Bytes": 4, "Device Type": 0}})
    memory = read_rank(builder.write(tmp_path / "t.json")).memory
    assert len(memory) == 2000
    thin = thin_memory(memory)
    assert thin[thin[:, 1].argmax()].tolist() == [776_000, 776, 4096]
    assert 100 < len(thin) < 400


def describe(paths: list[Path]) -> Document:
    return describe_traces(TraceView(job=read_ranks(paths, counters=make_counters(None))))


def test_what_was_not_recorded_is_named_with_the_flag_that_records_it(tmp_path: Path) -> None:
    builder = TraceBuilder(num_ranks=1).launch("cudaLaunchKernel", 0, 2, 1).kernel("k", 10, 10, correlation=1)
    document = describe([builder.write(tmp_path / "t.json")])
    left_out = " ".join(document.sections[-1].paragraphs)
    assert all(flag in left_out for flag in ("with_stack=True", "record_shapes=True", "profile_memory=True"))


@needs_traces
def test_modules_lines_and_work_of_a_real_trace() -> None:
    document = describe(find_trace_files([TRACES / "tracelens_mi300_resnet_ddp8"]))
    tables = {table.title: table for section in document.sections for table in section.tables}
    sources = {str(row[0].value) for row in tables["Device time by source line"].rows}
    assert "train_ddp.py(82): train_step" in sources
    shares = [row[-1].value for row in tables["Device time by module"].rows]
    assert all(isinstance(share, float) and 0 <= share <= 1 for share in shares)
    (used,) = [finding for finding in document.findings if finding.kind == "flop-utilization"]
    assert "bfloat16 peak of mi300x" in used.text
    charts = [chart.title for section in document.sections for chart in section.charts]
    assert "Device time by what asked for it" in charts


@pytest.mark.parametrize("largest", [3, 10**9])
def test_equal_columns_have_one_number_however_large_their_values(largest: int) -> None:
    values = np.random.default_rng(3).integers(-1, largest, (6, 40))
    table = np.hstack([values, values[:, ::-1]])
    firsts, places = find_distinct_columns(table)
    assert (table[:, firsts][:, places] == table).all()
    assert len({tuple(column) for column in table[:, firsts].T.tolist()}) == len(firsts)


def test_a_table_without_columns_has_no_numbers() -> None:
    firsts, places = find_distinct_columns(np.empty((6, 0), dtype=np.int64))
    assert not len(firsts)
    assert not len(places)


def test_callers_of_several_ranks_are_added_up_the_most_time_first() -> None:
    mm, relu, add = (Caller("forward", f"aten::{name}") for name in ("mm", "relu", "add"))
    times = [CallerTime(mm, 1, 10), CallerTime(relu, 2, 30), CallerTime(add, 1, 25), CallerTime(mm, 3, 15)]
    assert add_asked(times) == [CallerTime(relu, 2, 30), CallerTime(add, 1, 25), CallerTime(mm, 4, 25)]

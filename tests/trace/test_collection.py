"""The collectives of one rank: from kernels, from the host's records, from gloo's threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scalelab.trace.collectives import Collective, CollectiveList
from scalelab.trace.rank_trace import read_rank
from tests.trace.build import TraceBuilder
from tests.trace.jobs import GroupedBuilder

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GENERIC = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"


def collect(builder: TraceBuilder, directory: Path) -> list[Collective]:
    return list(read_rank(builder.write(directory / "trace.json")).collectives)


def one(builder: TraceBuilder, directory: Path) -> Collective:
    (found,) = collect(builder, directory)
    return found


def gloo(num_ranks: int = 2) -> TraceBuilder:
    return TraceBuilder(num_ranks=num_ranks, backend="gloo")


def test_a_kernel_says_everything_itself(tmp_path: Path) -> None:
    builder = TraceBuilder(num_ranks=4).collective("_allgather_base", 10, 5, in_elements=8, out_elements=32, Seq=3)
    assert one(builder, tmp_path) == Collective(
        kind="all_gather",
        start_ns=10_000,
        end_ns=15_000,
        payload_bytes=128,
        group="0",
        group_size=4,
        sequence=3,
        name="ncclDevKernel_allgather_base_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        on_device=True,
        stream=0,
    )


@pytest.mark.parametrize(
    ("collective", "kernel", "kind", "ran_as"),
    [
        ("allreduce", NCCL, "all_reduce", ""),
        ("allreduce", GENERIC, "all_reduce", ""),
        ("_reduce_scatter_base", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", "reduce_scatter", ""),
        ("all_to_allv", "ncclDevKernel_SendRecv(x)", "all_to_all", ""),
        ("barrier", NCCL, "barrier", "all_reduce"),
        ("coalesced", "ncclDevKernel_AllGather_RING_LL(x)", "all_gather", ""),
    ],
)
def test_the_kind_is_what_was_asked_for(tmp_path: Path, collective: str, kernel: str, kind: str, ran_as: str) -> None:
    found = one(TraceBuilder().collective(collective, 0, 1, name=kernel), tmp_path)
    assert (found.kind, found.ran_as) == (kind, ran_as)


def test_a_barrier_has_no_size(tmp_path: Path) -> None:
    assert one(TraceBuilder().collective("barrier", 0, 1, name=NCCL), tmp_path).payload_bytes is None


def test_a_kernel_without_a_record_has_the_kind_of_its_name_and_no_size(tmp_path: Path) -> None:
    found = one(TraceBuilder().kernel(NCCL, 0, 1), tmp_path)
    assert (found.kind, found.payload_bytes, found.group, found.group_size) == ("all_reduce", None, "0", 2)


def test_a_bare_kernel_is_filled_from_the_hosts_record_of_its_call(tmp_path: Path) -> None:
    record = {"Collective name": "allreduce", "In msg nelems": 16, "Out msg nelems": 16, "dtype": "Half", "Seq": 7}
    builder = TraceBuilder().operator("record_param_comms", 0, 2, **{"External id": 55, **record})
    found = one(builder.kernel(GENERIC, 10, 5, **{"External id": 55}), tmp_path)
    assert (found.kind, found.payload_bytes, found.sequence) == ("all_reduce", 32, 7)


def test_a_bare_record_takes_kind_and_size_of_the_operator_around_it(tmp_path: Path) -> None:
    dims = {"Input Dims": [[64], [32]], "Input type": ["float", "float"]}
    builder = TraceBuilder().operator("c10d::_allgather_base_", 0, 9, **dims)
    builder.operator("record_param_comms", 1, 2, **{"External id": 55})
    found = one(builder.kernel(GENERIC, 10, 5, **{"External id": 55}), tmp_path)
    assert (found.kind, found.payload_bytes) == ("all_gather", 256)


def test_an_operator_on_another_thread_or_at_another_time_is_not_around_it(tmp_path: Path) -> None:
    dims = {"Input Dims": [[64], [32]], "Input type": ["float", "float"]}
    builder = TraceBuilder().operator("c10d::_allgather_base_", 0, 9, tid=2, **dims)
    builder.operator("c10d::_allgather_base_", 20, 9, **dims)
    builder.operator("record_param_comms", 1, 2, **{"External id": 55})
    found = one(builder.kernel(GENERIC, 10, 5, **{"External id": 55}), tmp_path)
    assert (found.kind, found.payload_bytes) == ("other", None)


def test_annotations_of_nccl_are_not_counted_again(tmp_path: Path) -> None:
    builder = TraceBuilder().collective("allreduce", 10, 5)
    builder.annotation("nccl:all_reduce", 0, 2).device_annotation("nccl:all_reduce", 10, 5)
    builder.operator("c10d::allreduce_", 0, 3).operator("record_param_comms", 1, 1)
    assert len(collect(builder, tmp_path)) == 1


def test_gloo_has_its_size_from_the_operator_and_the_type_from_the_annotation(tmp_path: Path) -> None:
    called = {"Input Dims": [[[100], [28]], []], "Input type": ["TensorList", ""]}
    builder = gloo().operator("c10d::allreduce_", 0, 2, **called)
    builder.annotation("gloo:all_reduce", 1, 5, tid=9, **{"Input Dims": [[128]], "Input type": ["float"]})
    found = one(builder, tmp_path)
    assert (found.kind, found.payload_bytes, found.group_size, found.on_device) == ("all_reduce", 512, 2, False)


def test_gloo_without_sizes_on_its_annotations_takes_the_operators(tmp_path: Path) -> None:
    builder = gloo().operator(
        "c10d::_allgather_base_", 0, 2, **{"Input Dims": [[64], [32]], "Input type": ["float"] * 2}
    )
    found = one(builder.annotation("gloo:all_gather", 1, 5, tid=9), tmp_path)
    assert (found.kind, found.payload_bytes) == ("all_gather", 256)


def test_gloo_runs_a_reduce_scatter_as_an_all_reduce_of_the_whole(tmp_path: Path) -> None:
    dims = {"Input Dims": [[32], [64]], "Input type": ["float", "float"]}
    builder = gloo().operator("c10d::_reduce_scatter_base_", 0, 2, **dims)
    builder.annotation("gloo:all_reduce", 1, 5, tid=9, **{"Input Dims": [[64]], "Input type": ["float"]})
    found = one(builder, tmp_path)
    assert (found.kind, found.ran_as, found.payload_bytes) == ("reduce_scatter", "all_reduce", 256)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_piece_is_counted_once_for_every_rank(tmp_path: Path, num_ranks: int) -> None:
    dims = {"Input Dims": [[32]], "Input type": ["float"]}
    found = one(gloo(num_ranks).annotation("gloo:all_gather", 1, 5, tid=9, **dims), tmp_path)
    assert found.payload_bytes == 128 * num_ranks


def test_without_shapes_the_size_is_unknown(tmp_path: Path) -> None:
    builder = gloo().operator("c10d::allreduce_", 0, 2).annotation("gloo:all_reduce", 1, 5, tid=9)
    found = one(builder, tmp_path)
    assert (found.kind, found.payload_bytes) == ("all_reduce", None)


@pytest.mark.parametrize("prefix", ["gloo", "mpi"])
def test_one_collective_inside_another_of_its_thread_is_the_same(tmp_path: Path, prefix: str) -> None:
    builder = gloo().annotation(f"{prefix}:all_reduce", 0, 10, tid=9).annotation(f"{prefix}:all_reduce", 0, 10, tid=9)
    builder.annotation(f"{prefix}:all_reduce", 2, 5, tid=9).annotation(f"{prefix}:all_reduce", 2, 5, tid=10)
    assert [(c.start_ns, c.end_ns) for c in collect(builder, tmp_path)] == [(0, 10_000), (2_000, 7_000)]


def test_zero_length_collectives_of_one_thread_all_count(tmp_path: Path) -> None:
    builder = gloo().annotation("gloo:barrier", 1, 0, tid=9).annotation("gloo:barrier", 2, 0, tid=9)
    assert len(collect(builder, tmp_path)) == 2


def test_with_several_groups_an_annotation_does_not_say_which(tmp_path: Path) -> None:
    builder = GroupedBuilder(num_ranks=4, backend="gloo")
    builder.groups = {"0": (0, 1, 2, 3), "1": (0, 1)}
    found = one(builder.annotation("gloo:all_reduce", 0, 1, tid=9), tmp_path)
    assert (found.group, found.group_size) == ("", None)


def test_a_group_has_the_size_that_the_header_says(tmp_path: Path) -> None:
    builder = GroupedBuilder(num_ranks=4)
    builder.groups = {"0": (0, 1, 2, 3), "tp": (0, 1)}
    found = one(builder.collective("allreduce", 0, 1, **{"Process Group Name": "tp", "Group size": -1}), tmp_path)
    assert (found.group, found.group_size) == ("tp", 2)


@pytest.mark.parametrize("name", ["Seq", "Group size", "External id", "In msg nelems"])
def test_broken_numbers_are_unknown_and_no_failure(tmp_path: Path, name: str) -> None:
    values: dict[str, Any] = {name: 2**63 - 1, "Out msg nelems": 2**63 - 1}
    found = one(TraceBuilder().collective("allreduce", 0, 1, **values), tmp_path)
    assert found.payload_bytes is None
    assert name != "Seq" or found.sequence is None


def test_collectives_come_in_the_order_of_their_start(tmp_path: Path) -> None:
    builder = TraceBuilder()
    for start in (30, 10, 20):
        builder.collective("allreduce", start, 5)
    builder.annotation("gloo:barrier", 15, 1, tid=3)
    found = read_rank(builder.write(tmp_path / "trace.json")).collectives
    assert [c.start_ns for c in found] == [10_000, 15_000, 20_000, 30_000] == list(found.start_ns)
    assert found[-1].start_ns == 30_000
    assert [c.start_ns for c in found[1:3]] == [15_000, 20_000]
    with pytest.raises(IndexError, match="collective 4 of 4"):
        found[4]


def test_no_collectives_are_an_empty_list() -> None:
    assert list(CollectiveList()) == []


def test_a_recorded_group_of_one_is_one(tmp_path: Path) -> None:
    builder = GroupedBuilder(num_ranks=4)
    builder.groups = {"0": (0, 1, 2, 3), "1": (0, 1)}
    for size, name in ((1, "alone"), (0, "1"), (3, "1"), (0, "alone")):
        args = {"Group size": size, "Process Group Name": name}
        builder.collective("allreduce", 10 * size + 100 * len(name), 5, **args)
    found = read_rank(builder.write(tmp_path / "t.json")).collectives
    assert [(one.group, one.group_size) for one in found] == [("1", 2), ("1", 3), ("alone", None), ("alone", 1)]

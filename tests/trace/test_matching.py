"""The same collective in several traces: transfer, waiting, clocks, groups."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.trace.build import TraceBuilder
from tests.trace.jobs import SECOND_US, GroupedBuilder, match, reduce_on_time, write_job

UNEVEN = [(0, 100), (300, 0), (0, 0), (20, 60), (0, 5), (7, 0), (100, 0), (0, 100), (50, 60), (0, 10)]


@pytest.mark.parametrize("with_sequence", [True, False])
def test_transfer_is_the_shortest_time_and_waiting_the_rest(tmp_path: Path, with_sequence: bool) -> None:
    job = write_job(tmp_path, reduce_on_time([(0, 100), (300, 0), (0, 0)], with_sequence=with_sequence))
    (group,) = match(job).groups
    assert group.transfer_ns.tolist() == [50_000] * 3
    assert group.waiting_ns.tolist() == [[100_000, 0], [0, 300_000], [0, 0]]


@pytest.mark.parametrize("ahead_us", [(0, 3 * SECOND_US), (5 * SECOND_US, 0), (0, 0.001)])
def test_clocks_seconds_apart_are_brought_together(tmp_path: Path, ahead_us: tuple[float, float]) -> None:
    matching = match(write_job(tmp_path, reduce_on_time(UNEVEN, ahead_us=ahead_us)))
    assert matching.clocks[1].offset_ns == round(1000 * (ahead_us[1] - ahead_us[0]))
    (group,) = matching.groups
    assert np.array_equal(group.end_ns[:, 0], group.end_ns[:, 1])
    assert (group.start_ns[:, 1] - group.start_ns[:, 0]).tolist() == [1000 * (b - a) for a, b in UNEVEN]


def test_a_clock_that_drifts_is_followed(tmp_path: Path) -> None:
    arrivals = [(0, 10)] * 40
    builders = reduce_on_time(arrivals, ahead_us=(0, SECOND_US), drift=(0, 5e-5), period_us=100_000)
    (group,) = match(write_job(tmp_path, builders)).groups
    assert np.abs(group.end_ns[:, 1] - group.end_ns[:, 0]).max() <= 20
    assert np.abs(group.start_ns[:, 1] - group.start_ns[:, 0] - 10_000).max() <= 20


def test_the_base_times_of_the_headers_count(tmp_path: Path) -> None:
    builders = reduce_on_time([(0, 10)] * 3)
    builders[1].base_ns = 2_000_000_000
    matching = match(write_job(tmp_path, builders))
    assert matching.clocks[1].offset_ns == 2_000_000_000
    assert matching.groups[0].waiting_ns.tolist() == [[10_000, 0]] * 3


def test_a_base_time_that_no_clock_gives_is_none(tmp_path: Path) -> None:
    builders = reduce_on_time([(0, 10)] * 3)
    builders[1].base_ns = 10**30
    assert match(write_job(tmp_path, builders)).clocks[1].offset_ns == 0


@pytest.mark.parametrize("with_sequence", [True, False])
@pytest.mark.parametrize("missing", [0, 4, 9])
def test_what_one_trace_lacks_is_left_out_and_counted(tmp_path: Path, missing: int, with_sequence: bool) -> None:
    builders = reduce_on_time(UNEVEN, ahead_us=(0, SECOND_US), with_sequence=with_sequence)
    for builder in builders:
        for number, event in enumerate(builder.events):
            event["args"]["In msg nelems"] = event["args"]["Out msg nelems"] = 100 + number
    del builders[1].events[missing]
    matching = match(write_job(tmp_path, builders))
    assert (matching.num_matched, matching.num_unmatched) == (9, {0: 1, 1: 0})
    (group,) = matching.groups
    assert group.transfer_ns.tolist() == [50_000] * 9
    assert matching.clocks[1].offset_ns == 1_000_000_000


@pytest.mark.parametrize("missing", [0, 9])
def test_where_all_look_alike_the_ends_decide(tmp_path: Path, missing: int) -> None:
    builders = reduce_on_time(UNEVEN, with_sequence=False, ahead_us=(0, SECOND_US))
    for builder in builders:  # unequal distances, or one answer would be as good as the other
        for number, event in enumerate(builder.events):
            event["ts"] += 1000 * number * number
    del builders[1].events[missing]
    matching = match(write_job(tmp_path, builders))
    assert matching.clocks[1].offset_ns == 1_000_000_000
    assert matching.num_matched == 9


def test_steps_tell_which_collectives_are_missing(tmp_path: Path) -> None:
    builders = reduce_on_time([(0, 10)] * 6, with_sequence=False, ahead_us=(0, SECOND_US))
    for builder, ahead in zip(builders, (0, SECOND_US), strict=True):
        for number in range(3):
            builder.step(number, ahead + 2000 * number - 1, 1998)
    builders[1].events = [event for event in builders[1].events if event["ts"] >= SECOND_US + 1999]
    matching = match(write_job(tmp_path, builders))
    assert (matching.num_matched, matching.num_unmatched) == (4, {0: 2, 1: 0})
    assert matching.clocks[1].offset_ns == 1_000_000_000


def test_steps_that_are_numbered_differently_do_not_prevent_it(tmp_path: Path) -> None:
    builders = reduce_on_time([(0, 10)] * 6, with_sequence=False)
    for number, builder in enumerate(builders):
        builder.step(10 * number, -1, 5999)
    del builders[1].events[5]
    assert match(write_job(tmp_path, builders)).num_matched == 5


def test_several_kernels_of_one_call_keep_their_order(tmp_path: Path) -> None:
    builders = [TraceBuilder(rank=rank) for rank in range(2)]
    for builder in builders:
        builder.collective("allreduce", 0, 10 + builder.rank, Seq=1).collective("allreduce", 20, 5, Seq=1)
    (group,) = match(write_job(tmp_path, builders)).groups
    assert group.duration_ns.tolist() == [[10_000, 11_000], [5_000, 5_000]]


def test_the_same_number_for_another_kind_is_another_collective(tmp_path: Path) -> None:
    builders = [TraceBuilder(rank=0).collective("allreduce", 0, 1, Seq=1)]
    builders.append(TraceBuilder(rank=1).collective("broadcast", 0, 1, Seq=1))
    assert match(write_job(tmp_path, builders)).num_matched == 0


def make_grid() -> list[TraceBuilder]:
    """Four ranks: two pairs, and two pairs across; within each the second rank comes 10 µs later."""
    groups = {"0": (0, 1, 2, 3), "a": (0, 1), "b": (2, 3), "c": (0, 2), "d": (1, 3)}
    builders: list[TraceBuilder] = []
    for rank in range(4):
        builder = GroupedBuilder(rank=rank, num_ranks=4)
        builder.groups = groups
        ahead = 1000 * rank * rank
        for number in range(5):
            for place, name in enumerate(("ab"[rank // 2], "cd"[rank % 2])):
                is_second = groups[name].index(rank)
                start = 500 * number + 100 * place + 10 * is_second + ahead
                record = {"Process Group Name": name, "Group size": 2, "Seq": number}
                builder.collective("allreduce", start, 40 - 10 * is_second, **record)
        builders.append(builder)
    return builders


def test_groups_smaller_than_the_world_are_matched_within(tmp_path: Path) -> None:
    matching = match(write_job(tmp_path, make_grid()))
    assert {(group.name, group.ranks, len(group)) for group in matching.groups} == {
        ("a", (0, 1), 5),
        ("b", (2, 3), 5),
        ("c", (0, 2), 5),
        ("d", (1, 3), 5),
    }
    assert all(group.waiting_ns.tolist() == [[10_000, 0]] * 5 for group in matching.groups)
    assert matching.num_unmatched == dict.fromkeys(range(4), 0)


def test_a_clock_is_set_through_others_where_ranks_share_no_group(tmp_path: Path) -> None:
    clocks = match(write_job(tmp_path, make_grid())).clocks
    assert [clocks[rank].offset_ns for rank in range(4)] == [0, 1_000_000, 4_000_000, 9_000_000]
    assert {clock.reference for clock in clocks.values()} == {0}


def test_ranks_that_share_nothing_have_clocks_of_their_own(tmp_path: Path) -> None:
    builders = make_grid()
    for builder in builders:
        builder.events = [e for e in builder.events if e["args"]["Process Group Name"] in "ab"]
    clocks = match(write_job(tmp_path, builders)).clocks
    assert [clocks[rank].reference for rank in range(4)] == [0, 0, 2, 2]


def test_a_group_that_is_not_recorded_is_the_only_one_that_fits(tmp_path: Path) -> None:
    builders: list[TraceBuilder] = []
    for rank in range(2):
        builder = GroupedBuilder(rank=rank, num_ranks=2, backend="gloo")
        builder.groups = {"0": (0, 1), "1": (0,)}
        builders.append(builder.annotation("gloo:all_reduce", 0, 5, tid=9))
    matching = match(write_job(tmp_path, builders))
    assert (matching.num_matched, matching.num_inferred) == (1, {0: 1, 1: 1})


def test_of_several_groups_that_fit_the_one_whose_ranks_end_together_is_taken(tmp_path: Path) -> None:
    builders = make_grid()
    for builder in builders:
        builder.groups = {"0": (0, 1, 2, 3), "a": (0, 1), "b": (2, 3), "c": (0, 2), "d": (1, 3)}  # type: ignore[attr-defined]
        builder.events = [event for event in builder.events if event["args"]["Process Group Name"] in "ab"]
        for number, event in enumerate(builder.events):
            event["ts"] += 37 * number * number + 5 * (builder.rank // 2) * number**3
            del event["args"]["Process Group Name"], event["args"]["Seq"]
    matching = match(write_job(tmp_path, builders))
    assert {(group.ranks, len(group)) for group in matching.groups} == {((0, 1), 5), ((2, 3), 5)}
    assert all(group.waiting_ns.tolist() == [[10_000, 0]] * 5 for group in matching.groups)
    assert matching.num_inferred == dict.fromkeys(range(4), 5)


def test_exchanges_of_unequal_sizes_are_matched_by_their_order(tmp_path: Path) -> None:
    builders = [TraceBuilder(rank=rank) for rank in range(2)]
    for rank, builder in enumerate(builders):
        for number in range(4):
            builder.collective("all_to_allv", 100 * number, 10, in_elements=100 + 7 * rank + number)
    matching = match(write_job(tmp_path, builders))
    assert matching.num_matched == 4
    assert matching.num_unmatched == {0: 0, 1: 0}


def test_several_groups_of_one_name_are_not_taken_for_one(tmp_path: Path) -> None:
    builders = [GroupedBuilder(rank=rank, num_ranks=4) for rank in range(4)]
    for builder in builders:
        builder.groups = {"": ()}
        builder.collective("allreduce", 0, 10, **{"Group size": 2, "Process Group Name": "1"})
    matching = match(write_job(tmp_path, builders))
    assert (matching.num_matched, matching.num_unmatched) == (0, dict.fromkeys(range(4), 1))


def test_a_group_of_one_rank_has_no_counterpart_to_miss(tmp_path: Path) -> None:
    builders = reduce_on_time([(0, 10), (5, 0)], with_sequence=False)
    builders[0].collective("allreduce", 50, 5, **{"Group size": 1, "Process Group Name": "alone"})
    matching = match(write_job(tmp_path, builders))
    assert (matching.num_matched, matching.num_unmatched) == (2, {0: 0, 1: 0})


def test_a_send_is_matched_with_its_receive(tmp_path: Path) -> None:
    builders = reduce_on_time([(0, 10, 5)] * 2)
    for number in range(3):
        for rank, what, late in ((0, "send 0->2", 0), (2, "recv 2<-0", 30)):
            start, builder = 5000 + 100 * number, builders[rank]
            builder.annotation(f"nccl:{what}", start - 20, 9).launch("cudaLaunchKernel", start - 18, 2, 70 + number)
            builder.kernel("ncclDevKernel_SendRecv(x)", start + late, 50 - late, 31, correlation=70 + number)
    matching = match(write_job(tmp_path, builders))
    (transfer,) = [group for group in matching.groups if set(group.kinds) == {"send_recv"}]
    assert (transfer.name, transfer.ranks, len(transfer)) == ("0 → 2", (0, 2), 3)
    assert transfer.waiting_ns.tolist() == [[30_000, 0]] * 3
    assert matching.num_point_to_point == 0


def test_point_to_point_that_time_does_not_confirm_is_counted_and_left_out(tmp_path: Path) -> None:
    builders = reduce_on_time([(0, 10, 0)])
    for number in range(4):
        builders[0].collective("send", 500 + 90 * number, 10, Seq=number)
        builders[1].collective("recv", 500 + 370 * number * number, 10, Seq=number)
    matching = match(write_job(tmp_path, builders))
    assert (matching.num_matched, matching.num_point_to_point) == (1, 8)
    assert matching.num_unmatched == {0: 0, 1: 0, 2: 0}


def test_clocks_are_not_set_by_broadcasts_where_there_is_better(tmp_path: Path) -> None:
    builders = reduce_on_time([(0, 10)])
    for builder in builders:
        for number in range(1, 6):
            builder.collective("broadcast", 100 * number, 10 + 50 * builder.rank, Seq=number)
    assert match(write_job(tmp_path, builders)).clocks[1].offset_ns == 0


def test_three_ranks_are_matched_where_all_of_them_are(tmp_path: Path) -> None:
    builders = reduce_on_time([(0, 10, 20)] * 5)
    del builders[2].events[1]
    matching = match(write_job(tmp_path, builders))
    assert (matching.num_matched, matching.num_unmatched) == (4, {0: 1, 1: 1, 2: 0})

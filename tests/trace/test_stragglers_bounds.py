"""From which time on a rank, a unit, a stage or a link is slow, on replays without a trace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from scalelab.trace.stragglers import (
    Place,
    Replay,
    SlowPart,
    attribute,
    find_long_stage,
    find_slow_links,
    score_ranks,
)


def make_replay(durations: NDArray[np.float64], **fields: Any) -> Replay:
    """Collectives of all ranks, a row each, with these durations: each rank computes for its column of `own`."""
    num_rows, num_ranks = durations.shape
    zeros = np.zeros(durations.size)
    known = {
        "rank": np.tile(np.arange(num_ranks), num_rows),
        "own": zeros,
        "tail": zeros,
        "before": np.full(durations.size, -1),
        "origin": zeros,
        "edges": np.arange(0, durations.size + 1, num_ranks),
        "step": np.repeat(np.arange(num_rows), num_ranks),
        "start": zeros,
        "duration": durations.reshape(-1),
        "groups": np.zeros(num_rows, dtype=np.int64),
        "index": np.repeat(np.arange(num_rows), num_ranks),
        "role": np.zeros(durations.size, dtype=np.int64),
    }
    return Replay(**known | fields)


def test_a_rank_is_slow_by_the_median_over_steps_beyond_three_percent_and_six_deviations() -> None:
    own = np.ones((4, 5)) * 100
    own[:, 3] = [103.1, 103.1, 102.9, 103.1]
    own[:, 4] = [500, 100, 100, 100]  # one slow step is no straggler
    usual = np.full(20, 100.0)
    assert score_ranks(make_replay(own, own=own.reshape(-1)), usual) == {3: pytest.approx(0.031)}
    own[:, 3] = 102.9
    assert score_ranks(make_replay(own, own=own.reshape(-1)), usual) == {}
    wide = 100.0 * np.tile([1.0, 1.01, 0.99, 1.02, 1.0, 1.0], (4, 1))
    wide[:, 3] = 106.1
    usual = np.full(24, 100.0)
    assert score_ranks(make_replay(wide, own=wide.reshape(-1)), usual) == {3: pytest.approx(0.061)}
    scattered = 100.0 * np.tile([1.0, 1.02, 0.98, 1.061, 1.01, 0.99], (4, 1))  # six deviations are 13 %
    assert score_ranks(make_replay(scattered, own=scattered.reshape(-1)), usual) == {}
    assert score_ranks(make_replay(own[:, 2:4], own=own[:, 2:4].reshape(-1)), usual[:8]) == {}, "of two, none is usual"


def test_of_two_steps_the_sums_are_compared() -> None:
    own = np.full((2, 4), 100.0)
    own[:, 0] = 160, 100
    found = score_ranks(make_replay(own, own=own.reshape(-1)), np.full(8, 100.0))
    assert found == {0: pytest.approx(0.3)}


def test_a_unit_is_slow_if_three_quarters_of_its_ranks_are() -> None:
    places = {rank: Place(host=f"node{rank // 4}", rail=rank % 4, stage=rank // 8) for rank in range(16)}
    assert attribute(dict.fromkeys(range(6), 0.1) | {8: 0.2}, places) == [
        SlowPart(kind="stage", name="stage 0", ranks=tuple(range(8)), slower=0.1),
        SlowPart(kind="rank", name="rank 8", ranks=(8,), slower=0.2),
    ]
    assert attribute({4: 0.1, 5: 0.2, 7: 0.4}, places) == [
        SlowPart(kind="host", name="host node1", ranks=(4, 5, 6, 7), slower=0.2)
    ]
    assert attribute({4: 0.1, 5: 0.2}, places) == [
        SlowPart(kind="rank", name=f"rank {rank}", ranks=(rank,), slower=0.1 * (rank - 3)) for rank in (4, 5)
    ]
    rail = attribute({1: 0.1, 5: 0.1, 9: 0.1}, places)
    assert rail == [SlowPart(kind="rail", name="rail 1", ranks=(1, 5, 9, 13), slower=0.1)]
    assert [one.kind for one in attribute({0: 0.1}, {0: Place(host="a"), 1: Place(host="b")})] == ["rank"]
    assert [one.kind for one in attribute({0: 0.1, 1: 0.1}, {0: Place(host="a"), 1: Place(host="a")})] == ["rank"] * 2


@pytest.mark.parametrize(("scale", "slower"), [(1 / 1.06, 0.06), (1 / 1.04, None)])
def test_a_stage_is_long_beyond_five_percent(scale: float, slower: float | None) -> None:
    replay = make_replay(np.zeros((1, 4)))
    places = {rank: Place(stage=rank % 2) for rank in range(4)}
    found = find_long_stage(replay, places, np.array([1.1, scale, 1.1, scale]))
    part = SlowPart(kind="long stage", name="stage 1", ranks=(1, 3), slower=pytest.approx(slower))
    assert found == ([] if slower is None else [part])


def test_a_link_is_slow_if_all_groups_of_its_rank_are_and_else_the_group() -> None:
    """Six pairs of ranks, each a group with one collective of two durations; the shortest counts."""
    members = [(0, 1), (2, 3), (4, 5), (0, 2), (1, 3), (3, 5)]
    places = {rank: Place(host=f"node{rank}") for rank in range(6)}
    rows = np.repeat([100.0, 100.0, 100.0, 100.0, 100.0, 100.0], 2).reshape(6, 2)
    replay = make_replay(
        rows, rank=np.array(members).reshape(-1), groups=np.arange(6), index=np.zeros(12, dtype=np.int64)
    )

    def find(*slow: int, by: float = 1.2) -> list[SlowPart]:
        durations = rows * 1.0
        durations[list(slow)] *= by
        durations[:, 1] += 50
        return find_slow_links(replace(replay, duration=durations.reshape(-1)), members, places)

    assert find() == find(0, by=1.09) == []
    assert find(1, 3) == [SlowPart(kind="link", name="link of rank 2", ranks=(2,), slower=pytest.approx(0.2))]
    assert find(1) == [SlowPart(kind="group", name="group of ranks 2, 3", ranks=(2, 3), slower=pytest.approx(0.2))]
    assert [one.ranks for one in find(0, 4)] == [(1,)]


def test_ranks_with_other_lists_are_compared_at_no_place() -> None:
    replay = make_replay(np.zeros((3, 4)), role=np.tile([0, 1, 1, 2], 3))
    assert len(set(replay.positions.tolist())) == 9
    assert len(set(replay.positions[1::4].tolist())) == 3
    assert (replay.positions[1::4] == replay.positions[2::4]).all()
    assert replay.row.tolist() == np.repeat([0, 1, 2], 4).tolist()


def test_a_link_between_hosts_is_slow_whatever_the_groups_within_them_are() -> None:
    members = [(0, 1), (2, 3), (4, 5), (0, 2), (1, 3), (3, 5), (2, 4)]
    replay = make_replay(
        np.full((7, 2), 100.0), rank=np.array(members).reshape(-1), index=np.zeros(14, dtype=np.int64),
        groups=np.arange(7),
    )  # fmt: skip
    replay.duration[[6, 7, 12, 13]] = 130.0
    hosts = {rank: Place(host=f"node{rank // 2}") for rank in range(6)}
    (link,) = find_slow_links(replay, members, hosts)
    assert (link.kind, link.ranks, link.slower) == ("link", (2,), pytest.approx(0.3))
    unknown = dict.fromkeys(range(6), Place())
    assert [one.kind for one in find_slow_links(replay, members, unknown)] == ["group"] * 2


def test_slow_links_of_one_host_are_that_of_the_host() -> None:
    pairs = [(2, 4), (2, 6), (3, 5), (3, 7), (0, 4), (0, 6), (1, 5), (1, 7), (4, 8), (5, 9), (6, 8), (7, 9)]
    replay = make_replay(
        np.repeat([130.0, 100.0], [8, 16]).reshape(12, 2), rank=np.array(pairs).reshape(-1),
        index=np.zeros(24, dtype=np.int64), groups=np.arange(12),
    )  # fmt: skip
    (link,) = find_slow_links(replay, pairs, {rank: Place(host=f"node{rank // 2}") for rank in range(10)})
    assert (link.kind, link.name, link.ranks) == ("link", "link of host node1", (2, 3))
    (link,) = find_slow_links(replay, pairs, {rank: Place(host=f"node{rank}") for rank in range(10)})
    assert (link.name, link.ranks) == ("links of ranks 2, 3", (2, 3))

"""What a rank that somebody else launched makes of where the others are."""

from __future__ import annotations

from pathlib import Path

from scalelab.launch.joined import describe_member
from scalelab.launch.ranks.discovery import Membership
from scalelab.records.schema import write_trial
from scalelab.records.trial import Trial
from scalelab.worker.entry.member import choose_cores, list_neighbours


def choose_all(directory: Path, masks: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    trial = Trial(configuration="t", workload="mlp", strategy="ddp", num_ranks=len(masks), threads_per_rank=2)
    write_trial(directory, trial)
    places = [("n1", mask) for mask in masks]
    return [choose_cores(str(directory), places, rank) for rank in range(len(masks))]


def test_ranks_share_out_the_cores_that_they_were_given_together(tmp_path: Path) -> None:
    everywhere, socket = (0, 1, 2, 3), (8, 9, 10, 11)
    assert choose_all(tmp_path, [everywhere, everywhere]) == [(0, 1), (2, 3)]
    assert choose_all(tmp_path, [everywhere, everywhere, socket, socket]) == [(0, 1), (2, 3), (8, 9), (10, 11)]
    assert choose_all(tmp_path, [(0, 1), (2, 3)]) == [(), ()], "what the launcher gave each stands"


def test_ranks_of_one_host_are_counted_in_turn() -> None:
    places: list[tuple[str, tuple[int, ...]]] = [("n1", (0,)), ("n2", (0,)), ("n1", (0,)), ("n2", (0,))]
    assert [list_neighbours(places, rank).index(rank) for rank in range(4)] == [0, 0, 1, 1]


def test_a_local_rank_that_nobody_says_is_not_zero() -> None:
    own = Membership(launcher="environment", rank=1, num_ranks=2)
    assert "LOCAL_RANK" not in describe_member(own, None)

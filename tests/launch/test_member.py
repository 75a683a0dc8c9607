"""What a rank that another launcher started makes of where the others are."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalelab.launch.joined import choose_own_cores, find_meeting_place
from scalelab.launch.ranks.discovery import Membership
from scalelab.launch.rendezvous import Guest, seat_guests
from tests.worker.trials import make_trial


def choose_all(masks: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    trial = make_trial(num_ranks=len(masks), threads_per_rank=2, global_batch=len(masks))
    seats = seat_guests([Guest(rank=rank, node="n1", mask=mask) for rank, mask in enumerate(masks)])
    chosen = []
    for rank, mask in enumerate(masks):
        monkeypatch.setattr("scalelab.launch.joined.read_mask", lambda mask=mask: mask)
        chosen.append(choose_own_cores(trial, seats[rank]))
    return chosen


def test_ranks_share_out_the_cores_that_they_were_given_together(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere, socket = (0, 1, 2, 3), (8, 9, 10, 11)
    assert choose_all([everywhere, everywhere], monkeypatch) == [(0, 1), (2, 3)]
    four = choose_all([everywhere, everywhere, socket, socket], monkeypatch)
    assert four == [(0, 1), (2, 3), (8, 9), (10, 11)]
    assert choose_all([(0, 1), (2, 3)], monkeypatch) == [(), ()], "what the launcher gave each stands"


def test_ranks_meet_where_a_user_says_but_not_where_torchruns_agents_listen(tmp_path: Path) -> None:
    told = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    by_hand = Membership(launcher="environment", rank=1, num_ranks=2)
    place = find_meeting_place(by_hand, tmp_path, told)
    assert (place.address, place.port, place.file) == ("n1", 29500, None)
    by_torchrun = Membership(launcher="torchrun", rank=1, num_ranks=2, launch="none.n1.29500")
    assert find_meeting_place(by_torchrun, tmp_path, told).file == tmp_path / "rendezvous-none.n1.29500.json"

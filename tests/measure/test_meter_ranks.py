"""Who a process is, and how ranks agree on a run without a collective."""

from __future__ import annotations

from datetime import timedelta

import pytest

from scalelab.errors import StoreError, UsageError
from scalelab.measure import meter_ranks
from scalelab.measure.meter import Meter
from scalelab.measure.meter_ranks import NothingAgreed, Place, agree, find_place, open_rendezvous


class FakeRendezvous:
    """A store as torch's are, where waiting for what is not there times out at once."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def set(self, key: str, text: str) -> None:
        self.texts[key] = text

    def get(self, key: str) -> bytes:
        return self.texts[key].encode()

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        if not set(keys) <= set(self.texts):
            raise RuntimeError(f"wait timeout after {timeout}")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


def test_a_process_on_its_own_is_rank_0_of_1(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_place() == Place(0, 1)
    assert open_rendezvous(Place(0, 1)) is None
    monkeypatch.setenv("RANK", "3")
    assert find_place() == Place(0, 1)


def test_a_launcher_s_variables_say_which_rank_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert find_place() == Place(3, 8)


def test_ranks_that_cannot_meet_yet_are_told_when_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = r"WORLD_SIZE is 2.*make the Meter after torch\.distributed\.init_process_group"
    with pytest.raises(UsageError, match=words), Meter("my-run"):
        pass


def test_every_rank_gets_what_rank_0_makes() -> None:
    store = FakeRendezvous()
    assert agree(Place(0, 2), store, "key", lambda: "runs/here") == "runs/here"
    assert agree(Place(1, 2), store, "key", lambda: "never called") == "runs/here"


def test_ranks_are_not_left_waiting_when_rank_0_fails() -> None:
    store = FakeRendezvous()

    def fail() -> str:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        agree(Place(0, 2), store, "key", fail)
    with pytest.raises(NothingAgreed):
        agree(Place(1, 2), store, "key", fail)


def test_a_rank_does_not_wait_for_ever() -> None:
    with pytest.raises(StoreError, match="rank 0 has made no Meter of this name within 60 s"):
        agree(Place(1, 2), FakeRendezvous(), "key", lambda: "")


def test_a_rank_that_is_left_alone_trains_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = FakeRendezvous()
    monkeypatch.setattr("scalelab.measure.meter.find_place", lambda: Place(1, 2))
    monkeypatch.setattr("scalelab.measure.meter.open_rendezvous", lambda place: store)
    with Meter("alone") as meter:
        assert list(meter.steps([1, 2])) == [1, 2]
    assert "on rank 1 (rank 0 has made no Meter" in capsys.readouterr().err
    store.set("scalelab/meter/0/2/alone", meter_ranks.UNUSABLE)
    with Meter("alone") as meter:
        assert list(meter.steps([1, 2])) == [1, 2]
    assert capsys.readouterr().err == ""

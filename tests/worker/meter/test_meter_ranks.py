"""Who a process is, and how ranks agree on a run without a collective."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

import pytest

from scalelab.errors import StoreError, UsageError
from scalelab.records.store import RunStore, find_runs
from scalelab.worker.meter import ranks as meter_ranks
from scalelab.worker.meter.meter import Meter
from scalelab.worker.meter.ranks import NothingAgreed, RankPlace, agree, find_place, open_rendezvous


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
    assert find_place() == RankPlace(0, 1)
    assert open_rendezvous(RankPlace(0, 1)) is None
    monkeypatch.setenv("RANK", "3")
    assert find_place() == RankPlace(0, 1)


def test_a_launcher_s_variables_say_which_rank_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert find_place() == RankPlace(3, 8)


@pytest.mark.parametrize(("rank", "num_ranks"), [("0", "0"), ("2", "2"), ("-1", "2"), ("0", "many")])
def test_variables_that_name_no_rank_are_not_heeded(monkeypatch: pytest.MonkeyPatch, rank: str, num_ranks: str) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", num_ranks)
    assert find_place() == RankPlace(0, 1)


def train_unrecorded(capsys: pytest.CaptureFixture[str], runs_dir: Path) -> str:
    """Train with a Meter that can record nothing; returns the one line that it says."""
    with Meter("my-run", runs_dir=runs_dir) as meter:
        assert list(meter.steps([1, 2])) == [1, 2]
    assert not runs_dir.exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: Meter 'my-run' stopped recording")
    assert line.endswith("; training continues")
    return line


def test_ranks_that_cannot_meet_yet_train_on_and_are_told_when_they_can(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = train_unrecorded(capsys, tmp_path / "runs")
    assert "WORLD_SIZE is 2" in line
    assert "create the Meter after torch.distributed.init_process_group" in line


@pytest.mark.parametrize("port", [None, "", "99999", "closed"])
def test_a_store_that_cannot_be_reached_is_no_end_of_a_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, port: str | None
) -> None:
    with socket.socket() as closed:  # bound and not listening: nothing else can take the port meanwhile
        closed.bind(("127.0.0.1", 0))
        found = str(closed.getsockname()[1]) if port == "closed" else port
        variables = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1"}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("MASTER_PORT", raising=False)
        if found is not None:
            monkeypatch.setenv("MASTER_PORT", found)
        line = train_unrecorded(capsys, tmp_path / "runs")
    assert f"on rank 0 (cannot reach torchrun's store at 127.0.0.1:{found or ''}: " in line


def test_variables_that_cannot_be_read_are_no_end_of_a_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "two")
    assert "ValueError: invalid literal" in train_unrecorded(capsys, tmp_path / "runs")


def test_a_batch_that_the_ranks_cannot_share_is_refused_in_the_words_of_the_script(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = r"^global_batch=9 is not divisible by 2 ranks: use a multiple of 2$"
    with pytest.raises(UsageError, match=words), Meter("my-run", global_batch=9, runs_dir=tmp_path):
        pass


def test_every_rank_gets_what_rank_0_makes() -> None:
    store = FakeRendezvous()
    assert agree(RankPlace(0, 2), store, "key", lambda: "runs/here") == "runs/here"
    assert agree(RankPlace(1, 2), store, "key", lambda: "never called") == "runs/here"


def test_ranks_are_not_left_waiting_when_rank_0_fails() -> None:
    store = FakeRendezvous()

    def fail() -> str:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        agree(RankPlace(0, 2), store, "key", fail)
    with pytest.raises(NothingAgreed):
        agree(RankPlace(1, 2), store, "key", fail)


def test_a_rank_does_not_wait_for_ever() -> None:
    with pytest.raises(StoreError, match="rank 0 created no Meter of this name within 60 s"):
        agree(RankPlace(1, 2), FakeRendezvous(), "key", lambda: "")


def test_a_rank_that_is_left_alone_trains_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = FakeRendezvous()
    monkeypatch.setattr("scalelab.worker.meter.meter.find_place", lambda: RankPlace(1, 2))
    monkeypatch.setattr("scalelab.worker.meter.meter.open_rendezvous", lambda place: store)
    with Meter("alone") as meter:
        assert list(meter.steps([1, 2])) == [1, 2]
    assert "on rank 1 (rank 0 created no Meter" in capsys.readouterr().err
    store.set("scalelab/meter/0/2/alone", meter_ranks.UNUSABLE)
    with Meter("alone") as meter:
        assert list(meter.steps([1, 2])) == [1, 2]
    assert capsys.readouterr().err == ""


def test_a_world_without_a_rank_is_not_recorded_as_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with Meter("my-run", runs_dir=tmp_path) as meter:
        assert list(meter.steps(range(3))) == [0, 1, 2]
    assert "WORLD_SIZE is 2, but neither RANK nor a process group says which rank" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_a_library_starts_late_are_found_at_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FakeRendezvous()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with Meter("my-run", runs_dir=tmp_path, global_batch=8) as meter:
        monkeypatch.setattr("scalelab.worker.meter.meter.find_place", lambda: RankPlace(0, 2))
        monkeypatch.setattr("scalelab.worker.meter.meter.open_rendezvous", lambda place: store)
        monkeypatch.setattr("scalelab.worker.meter.meter.WAIT_SECONDS", 0.0)
        assert len(list(meter.steps(range(3)))) == 3
    (path,) = find_runs(tmp_path)
    assert RunStore.open(path).trials()[0].num_ranks == 2

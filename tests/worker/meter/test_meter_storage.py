"""A Meter that cannot write says so once, and the training goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scalelab.records.store import RunStore, find_runs
from scalelab.records.trial import Status
from scalelab.worker.meter.meter import Meter
from scalelab.worker.meter.step_log import MOST_WAITING


def train(meter: Meter, num_steps: int = 3) -> list[int]:
    seen = []
    with meter:
        for number in meter.steps(range(num_steps)):
            with meter.phase("forward"):
                seen.append(number)
            meter.loss(1.0)
    return seen


def test_a_place_that_cannot_be_written_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    occupied = tmp_path / "runs"
    occupied.write_text("")
    assert train(Meter("my-run", runs_dir=occupied)) == [0, 1, 2]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: Meter 'my-run' stopped recording (File exists: ")
    assert line.endswith("; training continues")


def test_a_file_system_that_takes_no_files_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert train(Meter("my-run", runs_dir="/proc/runs")) == [0, 1, 2]
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_disk_that_is_full_from_the_start(
    make_small_disk: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    disk = make_small_disk(4096)
    (disk / "filler").write_bytes(bytes(4096))
    assert train(Meter("my-run", runs_dir=disk)) == [0, 1, 2]
    (line,) = capsys.readouterr().err.splitlines()
    assert "No space left on device" in line


def test_a_disk_that_fills_up_keeps_what_was_written_before(
    make_small_disk: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    disk = make_small_disk(1 << 20)
    meter = Meter("my-run", runs_dir=disk)
    seen = 0
    with meter:
        for number in meter.steps(range(4 * MOST_WAITING)):
            if number == 2 * MOST_WAITING + 1:
                with pytest.raises(OSError, match="No space"):
                    (disk / "filler").write_bytes(bytes(1 << 20))
            if number == 4 * MOST_WAITING - 1:
                (disk / "filler").unlink()
            seen += 1
    assert seen == 4 * MOST_WAITING
    warning, saved = capsys.readouterr().err.splitlines()
    assert "No space left on device" in warning
    assert saved.startswith("Saved to")
    store = RunStore.open(find_runs(disk)[0])
    result = store.result(store.record.trials[0])
    assert result.status is Status.CRASHED
    assert result.reason == f"rank 0 could record only {2 * MOST_WAITING} steps: No space left on device"
    assert len(result.samples) >= 2 * MOST_WAITING


def test_trouble_at_the_end_does_not_replace_the_training_s_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr("scalelab.worker.meter.meter.save_and_tidy", fail)
    with pytest.raises(ValueError, match="theirs"), Meter("my-run", runs_dir=tmp_path):
        raise ValueError("theirs")
    assert "a mistake of ours" in capsys.readouterr().err
    assert not RunStore.open(find_runs(tmp_path)[0]).is_running()

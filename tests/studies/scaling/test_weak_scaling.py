"""Weak scaling, end to end with a fake launcher: more work in the same time."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalelab.errors import NothingMeasured
from scalelab.launch.fake import FakeLauncher
from scalelab.records.trial import Status, Trial
from scalelab.report.document import read_document
from tests.studies.answers import (
    ONE_RANK_SECONDS,
    answer,
    covers,
    find_caution,
    find_finding,
    find_row,
    find_tables,
    list_kinds,
    make_weak,
    set_machine,
)


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 16)


def stay_as_fast(_: Trial) -> float:
    """Perfect weak scaling."""
    return ONE_RANK_SECONDS


def obey_gustafson(serial: float) -> object:
    return lambda trial: ONE_RANK_SECONDS * trial.num_ranks / (trial.num_ranks - serial * (trial.num_ranks - 1))


def exchange(trial: Trial) -> float:
    return 0.0 if trial.num_ranks == 1 else 0.02


def test_perfect_scaling_does_the_work_of_n_and_is_called_linear(tmp_path: Path) -> None:
    _, document = answer(make_weak(batch_per_rank=8), tmp_path, stay_as_fast)
    main, _, laws = find_tables(document)
    for num_ranks in (1, 2, 4):
        row = find_row(main, f"ddp × {num_ranks}")
        assert row["step_seconds"].value == pytest.approx(ONE_RANK_SECONDS)
        assert row["samples_per_second"].value == pytest.approx(8 * num_ranks / ONE_RANK_SECONDS)
        assert row["speedup"].value == pytest.approx(num_ranks)
        assert row["efficiency"].value == pytest.approx(1.0)
        assert find_row(laws, num_ranks)["law"].value == pytest.approx(num_ranks)
        assert find_row(laws, num_ranks)["karp_flatt"].value is None
    assert find_finding(document, "speedup", "ddp × 4").values["speedup"].value == pytest.approx(4.0)
    assert find_finding(document, "linearity").values["verdict"] == "no difference"
    assert "batch 8 per rank" in document.setting


@pytest.mark.parametrize("serial", [0.1, 0.5])
def test_a_known_serial_fraction_is_recovered(tmp_path: Path, serial: float) -> None:
    _, document = answer(make_weak(), tmp_path, obey_gustafson(serial))
    laws = find_tables(document)[2]
    for num_ranks in (1, 2, 4):
        row = find_row(laws, num_ranks)
        assert row["law"].value == pytest.approx(num_ranks - serial * (num_ranks - 1))
        assert row["measured"].value == pytest.approx(num_ranks - serial * (num_ranks - 1))
    assert find_finding(document, "gustafson").values["serial_fraction"].value == pytest.approx(serial)
    assert "amdahl" not in list_kinds(document)


def test_known_communication_is_recovered_by_ablation_and_by_subtraction(tmp_path: Path) -> None:
    launcher = FakeLauncher(lambda trial: ONE_RANK_SECONDS + exchange(trial), comm_seconds=exchange)
    _, document = answer(make_weak(), tmp_path, launcher)
    for num_ranks in (2, 4):
        row = find_row(find_tables(document)[1], f"ddp × {num_ranks}")
        assert row["exposed_seconds"].value == pytest.approx(0.02)
        assert row["excess_seconds"].value == pytest.approx(0.02)
    assert find_finding(document, "communication-methods").values["agree"] is True


def test_known_communication_is_covered_under_noise(tmp_path: Path) -> None:
    launcher = FakeLauncher(lambda trial: ONE_RANK_SECONDS + exchange(trial), comm_seconds=exchange, noise=0.02)
    _, document = answer(make_weak(), tmp_path, launcher)
    row = find_row(find_tables(document)[1], "ddp × 4")
    assert covers(row["exposed_seconds"], 0.02)
    assert covers(row["excess_seconds"], 0.02)


def test_efficiency_drops_where_it_drops_most(tmp_path: Path) -> None:
    def seconds(trial: Trial) -> float:
        return ONE_RANK_SECONDS * {1: 1.0, 2: 1.05, 4: 2.0}[trial.num_ranks]

    _, document = answer(make_weak(), tmp_path, seconds)
    linearity = find_finding(document, "linearity")
    assert linearity.values["verdict"] == "slower"
    assert "it drops most from 2 to 4 ranks (95 % to 50 %)" in linearity.text


def test_a_configuration_that_fails_keeps_its_row(tmp_path: Path) -> None:
    launcher = FakeLauncher(stay_as_fast, failures={"ddp-4": Status.OUT_OF_MEMORY})
    _, document = answer(make_weak(), tmp_path, launcher)
    main = document.tables[0]
    assert find_row(main, "ddp × 4")["step_seconds"].value == "out of memory"
    assert find_row(main, "ddp × 2")["efficiency"].value == pytest.approx(1.0)
    assert "--memory-limit" in find_caution(document, "failed", "ddp × 4").next_step
    assert document.findings[0].subject == "ddp × 2"


def test_when_every_trial_fails_nothing_was_measured(tmp_path: Path) -> None:
    names = ("single-1", "control", "ddp-1", "ddp-2", "ddp-4")
    with pytest.raises(NothingMeasured, match="no trial completed; single-1 of --workload mlp was out of memory"):
        answer(make_weak(), tmp_path, FakeLauncher(stay_as_fast, failures=dict.fromkeys(names, Status.OUT_OF_MEMORY)))


def test_ranks_that_share_cores_are_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 1)
    _, document = answer(make_weak(ranks=(1, 2)), tmp_path, stay_as_fast)
    assert find_row(document.tables[0], "ddp × 2")["run"].mark == "†"
    assert len(document.tables) == 2
    assert "linearity" not in list_kinds(document)
    assert "oversubscribed-rows" in list_kinds(document)


def test_the_document_on_disk_is_the_one_that_was_given_back(tmp_path: Path) -> None:
    store, document = answer(make_weak(), tmp_path, FakeLauncher(stay_as_fast, noise=0.05))
    text = store.read_document_text()
    assert text is not None
    assert read_document(text) == document

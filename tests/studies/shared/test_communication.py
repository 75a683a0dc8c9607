"""Communication by every way to it, and the breakdown of every rank, in the scaling studies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scalelab.launch.fake import FakeLauncher
from scalelab.runs.experiment import run_study
from scalelab.studies.shared.study import Sampling
from tests.studies.answers import answer, find_caution, find_finding, find_row, make_strong, make_weak, set_machine
from tests.studies.uneven import UnevenLauncher

SAMPLING = Sampling(rounds=6, steps=12, phase_steps=6, comm_free_steps=4)


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 4)


def test_ways_that_must_agree_do_and_subtraction_counts_what_does_not_shrink(tmp_path: Path) -> None:
    study = make_strong(sampling=SAMPLING)
    _, document = run_study(study, runs_dir=tmp_path, launcher=UnevenLauncher(exchange=0.008, noise=0.01))
    (ways,) = (table for table in document.tables if "every method" in table.title)
    assert find_row(ways, "phases")["seconds"].value == pytest.approx(0.008)
    assert find_row(ways, "DDP counters")["seconds"].value == pytest.approx(0.008)
    assert find_row(ways, "ablation")["seconds"].value == pytest.approx(0.008, rel=0.2)
    assert find_row(ways, "subtraction")["seconds"].value == pytest.approx(0.008 + 0.0075, rel=0.1)
    assert find_finding(document, "communication-methods").values["phases"].value == pytest.approx(0.008)


def test_every_rank_of_the_largest_row_is_broken_down_without_a_rest(tmp_path: Path) -> None:
    study = make_weak(sampling=SAMPLING, ranks=(1, 2))
    _, document = run_study(study, runs_dir=tmp_path, launcher=UnevenLauncher(own={1: {"forward": 0.040}}))
    (parts,) = (table for table in document.tables if table.title == "Every rank of ddp × 2")
    for rank in (0, 1):
        row = find_row(parts, f"rank {rank}")
        known = ("input", "compute", "exposed", "waiting", "stalled", "rest")
        total = sum(float(row[f"{name}_seconds"].value or 0.0) for name in known)
        assert total == pytest.approx(row["step_seconds"].value)
        assert row["rest_share"].value == pytest.approx(0)
    assert find_row(parts, "rank 0")["waiting_seconds"].value == pytest.approx(0.010)
    assert find_finding(document, "waiting", "rank 0").values["seconds"].value == pytest.approx(0.010)


def test_a_strategy_without_last_gradients_has_a_reason_instead_of_parts(tmp_path: Path) -> None:
    _, document = answer(make_strong(strategy="fsdp-full"), tmp_path)
    (parts,) = (table for table in document.tables if table.title == "Every rank of fsdp-full × 4")
    assert all(cell.value is None for row in parts.rows for cell in row[1:])
    assert "no moment exists" in parts.notes[0]
    assert not any("every method" in table.title for table in document.tables)


def test_ranks_on_several_hosts_have_no_parts_because_their_clocks_differ(tmp_path: Path) -> None:
    class Spread(UnevenLauncher):
        def launch(self, trial, directory):  # type: ignore[no-untyped-def]
            result = super().launch(trial, directory)
            ranks = tuple(replace(report, host=f"host{report.rank}") for report in result.ranks)
            samples = tuple(s._replace(start_seconds=s.start_seconds + 1e5 * s.rank) for s in result.samples)
            return replace(result, ranks=ranks, samples=samples)

    study = make_strong(sampling=SAMPLING, ranks=(1, 2))
    _, document = run_study(study, runs_dir=tmp_path, launcher=Spread(exchange=0.008, buffer_bytes=4))
    (parts,) = (table for table in document.tables if table.title == "Every rank of ddp × 2")
    (ways,) = (table for table in document.tables if "every method" in table.title)
    assert all(cell.value is None for row in parts.rows for cell in row[1:])
    assert parts.notes == ("its ranks are on several hosts, whose clocks cannot be compared",)
    assert find_row(ways, "phases")["seconds"].value is None
    assert find_row(ways, "DDP counters")["seconds"].value == pytest.approx(0.008)


def test_parts_that_do_not_add_up_are_warned_of(tmp_path: Path) -> None:
    class Slower(UnevenLauncher):
        def launch(self, trial, directory):  # type: ignore[no-untyped-def]
            result = super().launch(trial, directory)
            samples = tuple(
                sample._replace(step_seconds=1.2 * sample.step_seconds) if sample.kind == "clean" else sample
                for sample in result.samples
            )
            return type(result)(trial=trial, status=result.status, samples=samples, ranks=result.ranks)

    _, document = run_study(make_strong(sampling=SAMPLING), runs_dir=tmp_path, launcher=Slower())
    assert find_caution(document, "unexplained-time").values["share"] == pytest.approx(1 / 6, abs=0.01)


def test_without_phases_there_is_no_breakdown(tmp_path: Path) -> None:
    sampling = Sampling(rounds=3, steps=12, phase_steps=0, comm_free_steps=2)
    _, document = answer(make_strong(sampling=sampling), tmp_path, FakeLauncher(lambda trial: 0.4 / trial.num_ranks))
    assert len(document.tables) == 3

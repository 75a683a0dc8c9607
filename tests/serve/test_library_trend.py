"""One configuration over time: which runs belong to it, and whether it got slower."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scalelab import FakeLauncher, Job, Sampling, StrongScaling, run_study
from scalelab.errors import UsageError
from scalelab.serve.library import STEP, TREND, collect_points, describe_trend, find_alike, judge_series, read_steps
from scalelab.serve.listing import Index


def play(place: Path, seconds: float, *, batch: int = 64, rounds: int = 2) -> str:
    study = StrongScaling(job=Job(workload="mlp"), global_batch=batch, ranks=(1, 2), sampling=Sampling(rounds=rounds))
    launcher = FakeLauncher(lambda trial: seconds / trial.num_ranks, noise=0.001)
    return run_study(study, runs_dir=place, launcher=launcher)[0].name


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six runs that get slower by 10 % each, and one with another batch."""
    found = tmp_path_factory.mktemp("trend")
    for number in range(6):
        name = play(found, 1.1**number, rounds=2 + number % 2)
        record = json.loads((found / name / "run.json").read_text())
        record["created_at"] = f"2026-01-{number + 1:02d}T00:00:00.000000+00:00"
        (found / name / "run.json").write_text(json.dumps(record))
    play(found, 1.0, batch=32)
    return found


def test_runs_that_differ_only_in_rounds_are_alike(place: Path) -> None:
    lines = Index(runs_dir=place).list_lines()
    oldest = min(lines, key=lambda line: line.created_at)
    alike = find_alike(place / oldest.name, lines)
    assert [line.created_at[:10] for line in alike] == [f"2026-01-0{day}" for day in range(1, 7)]


def test_steps_are_those_of_the_stored_answer(place: Path) -> None:
    lines = sorted(Index(runs_dir=place).list_lines(), key=lambda line: line.created_at)
    steps = read_steps(place / lines[0].name)
    assert {name: round(step.value, 1) for name, step in steps.items()} == {
        "plain loop": 1.0,
        "control": 1.0,
        "ddp × 1": 1.0,
        "ddp × 2": 0.5,
    }
    assert all(step.low is not None and step.high is not None for step in steps.values())


def test_a_row_that_got_slower_is_said_to_have(place: Path) -> None:
    lines = Index(runs_dir=place).list_lines()
    oldest = min(lines, key=lambda line: line.created_at)
    document = describe_trend(place, oldest.name, lines)
    found = [finding for finding in document.findings if finding.kind == TREND.name]
    assert found
    for finding in found:
        assert finding.values["change"] == pytest.approx(0.5, abs=0.1)
        assert finding.values["num_runs"] == 6
    (table,) = document.sections[1].tables
    assert STEP in [column.key for column in table.columns]


def test_few_runs_have_no_trend(place: Path) -> None:
    lines = sorted(Index(runs_dir=place).list_lines(), key=lambda line: line.created_at)[:3]
    points = collect_points(place, lines)
    (finding, *_) = judge_series({"row": [point for point in points if point.series == points[0].series]})
    assert finding.values["change"] is None


def test_a_run_without_an_answer_has_no_trend(tmp_path: Path) -> None:
    name = play(tmp_path, 1.0)
    (tmp_path / name / "document.json").unlink()
    with pytest.raises(UsageError, match="computes one"):
        describe_trend(tmp_path, name, Index(runs_dir=tmp_path).list_lines())

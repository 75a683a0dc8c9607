"""Throughput: rates, the stopwatch beside the median, and the larger model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalelab.errors import UsageError
from scalelab.launch.local import LocalLauncher
from scalelab.records.observations import RankReport
from scalelab.records.trial import Status, StepKind, StepSample, TrialResult
from scalelab.report.findings import MAIN
from scalelab.runs.experiment import run_study
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling
from scalelab.studies.throughput import ASSUMPTIONS, LARGER_MODEL, Throughput
from tests.records import count_steps
from tests.studies.answers import covers, find_kinds, find_row, set_machine
from tests.studies.sweeps import Shared, plan_names, run

STEP = 0.25
TOKENS = 8 * 1024


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 16)


def make(**fields: Any) -> Throughput:
    return Throughput(**({"job": Job(workload="gpt2", options={"size": "small"}, device="cpu")} | fields))


def test_the_measurement_is_five_steps_of_warm_up_and_twenty_timed() -> None:
    (first, *_) = make().plan()
    assert count_steps(first) == 25
    assert make().sampling.warmup == 5
    assert plan_names(make()) == ["throughput"]


def test_an_own_workload_has_the_tokens_and_operations_that_its_ranks_say() -> None:
    study = make(
        job=Job(workload="hf:llama", device="cpu"), sampling=Sampling(rounds=1, steps=25, warmup=5, control=False)
    )
    (trial,) = study.plan()
    assert (trial.workload, trial.instruments) == ("hf:llama", ("flops",))
    rank = RankReport(rank=0, tokens_per_sample=16.0, flops_per_sample=1e6)
    samples = tuple(StepSample(0, step, StepKind.CLEAN, float(step), STEP) for step in range(25))
    result = TrialResult(trial=trial, status=Status.COMPLETED, samples=samples, ranks=(rank,))
    row = find_row(study.conclude([result]).tables[0], "hf:llama")
    assert row["tokens_per_second"].value == pytest.approx(8 * 16 / STEP)
    assert row["operations_per_second"].value == pytest.approx(8 * 1e6 / STEP)


def test_tokens_steps_and_operations_per_second_follow_from_the_step(tmp_path: Path) -> None:
    document = run(make(), tmp_path, lambda trial: STEP)
    row = find_row(document.tables[0], "gpt2 small")
    assert row["steps_per_second"].value == pytest.approx(1 / STEP)
    assert row["tokens_per_second"].value == pytest.approx(TOKENS / STEP)
    assert row["stopwatch_rate"].value == pytest.approx(TOKENS / STEP)
    assert row["num_parameters"].value == 124_439_808
    found = document.findings[0]
    assert (found.kind, found.subject, found.weight) == ("throughput", "gpt2 small", MAIN)
    assert found.values["tokens_per_second"].value == pytest.approx(TOKENS / STEP)


def test_the_larger_model_is_as_much_slower_as_it_is_larger(tmp_path: Path) -> None:
    document = run(make(), tmp_path, lambda trial: STEP)
    (cells,) = document.tables[1].rows
    row = dict(zip((column.key for column in document.tables[1].columns), cells, strict=True))
    rate = TOKENS / STEP * 124_439_808 / 1e12
    assert row["tokens_per_second"].value == pytest.approx(rate)
    assert row["days"].value == pytest.approx(1e13 / rate / 86400)
    assert row["years"].value == pytest.approx(1e13 / rate / 86400 / 365)
    assert find_kinds(document, LARGER_MODEL)[""].values["days"].value == row["days"].value
    assert find_kinds(document, ASSUMPTIONS)


def test_intervals_propagate(tmp_path: Path) -> None:
    document = run(make(), tmp_path, lambda trial: STEP, noise=0.05)
    (cells,) = document.tables[1].rows
    assert covers(cells[2], TOKENS / STEP * 124_439_808 / 1e12)
    assert covers(cells[3], 1e13 / (TOKENS / STEP * 124_439_808 / 1e12) / 86400)


def test_a_stopwatch_sees_long_steps_that_the_median_does_not(tmp_path: Path) -> None:
    def stumble(result: TrialResult) -> TrialResult:
        samples = (s._replace(step_seconds=10 * STEP) if s.step == 20 else s for s in result.samples)
        return replace(result, samples=tuple(samples))

    row = find_row(run(make(), tmp_path, lambda trial: STEP, change=stumble).tables[0], "gpt2 small")
    assert row["tokens_per_second"].value == pytest.approx(TOKENS / STEP)
    assert row["stopwatch_rate"].value == pytest.approx(TOKENS / STEP * 20 / 29)


def test_ranks_add_up(tmp_path: Path) -> None:
    row = find_row(run(make(ranks=2), tmp_path, lambda trial: STEP).tables[0], "gpt2 small")
    assert row["tokens_per_second"].value == pytest.approx(2 * TOKENS / STEP)


def test_a_workload_without_tokens_counts_samples_and_has_no_larger_model(tmp_path: Path) -> None:
    document = run(make(job=Job(workload="mlp", device="cpu")), tmp_path, lambda trial: STEP)
    assert find_row(document.tables[0], "mlp 8192×6")["samples_per_second"].value == pytest.approx(8 / STEP)
    assert len(document.tables) == 1
    assert not find_kinds(document, LARGER_MODEL)
    assert "No extrapolation" in find_kinds(document, ASSUMPTIONS)[""].text


def test_a_failure_and_nothing_at_all_are_told() -> None:
    study = make()
    failed = [TrialResult(trial=study.plan()[0], status=Status.OUT_OF_MEMORY, reason="no memory")]
    assert find_row(study.conclude(failed).tables[0], "gpt2 small")["step_seconds"].value == "out of memory"
    assert study.conclude(failed).summary == ()
    assert study.conclude([]).tables[0].rows == ()


@pytest.mark.parametrize("fields", [{"target_parameters": 0.0}, {"target_tokens": -1.0}, {"ranks": 0}])
def test_fields_that_cannot_work_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        make(**fields)


@pytest.mark.ranks
def test_real_tokens_are_counted(tmp_path: Path, launcher: LocalLauncher) -> None:
    sampling = Sampling(rounds=1, steps=4, warmup=1, phase_steps=0, comm_free_steps=0, control=False)
    job = Job(workload="gpt2", options={"sequence": 8}, device="cpu", threads_per_rank=1)
    _, document = run_study(
        Throughput(job=job, sampling=sampling, batch_per_rank=2), runs_dir=tmp_path, launcher=Shared(launcher)
    )
    row = find_row(document.tables[0], "gpt2 tiny")
    step, rate = row["step_seconds"].value, row["tokens_per_second"].value
    assert isinstance(step, float)
    assert rate == pytest.approx(16 / step)

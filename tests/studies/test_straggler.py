"""`straggler`: the slow rank, its phase and its delay are found from samples; the cost is held against the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scalelab.errors import UsageError
from scalelab.launch.local import LocalLauncher
from scalelab.records.settings import Perturbation, Phase
from scalelab.records.trial import PHASES, Status
from scalelab.report.document import Document
from scalelab.report.findings import MAIN
from scalelab.runs.experiment import run_study
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling
from scalelab.studies.straggler import Straggler
from tests.studies.answers import covers, find_caution, find_finding, find_row, set_machine
from tests.studies.uneven import EVEN, UnevenLauncher

SAMPLING = Sampling(rounds=6, steps=12, phase_steps=12, comm_free_steps=0, control=False)


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 4)


def make_study(*, delay: str = "0s", phase: Phase = "backward", rank: int | None = None, **fields: Any) -> Straggler:
    told = Perturbation(delay=delay, delay_phase=phase, delay_rank=rank)
    job = Job(workload="mlp", options={"dim": 8, "depth": 2}, device="cpu", perturbation=told)
    return Straggler(**({"job": job, "sampling": SAMPLING} | fields))


def conclude(study: Straggler, directory: Path, **fields: Any) -> Document:
    return run_study(study, runs_dir=directory, launcher=UnevenLauncher(**fields))[1]


@pytest.mark.parametrize("phase", PHASES)
def test_an_injected_delay_is_named_and_costs_what_the_model_says(phase: Phase, tmp_path: Path) -> None:
    document = conclude(make_study(delay="20ms", phase=phase, rank=1), tmp_path, noise=0.01)
    main = find_finding(document, "straggler", "delayed")
    assert (main.weight, main.values["rank"], main.values["phase"]) == (MAIN, 1, phase)
    assert find_finding(document, "injected-delay").values["is_found"] is True
    assert find_finding(document, "delay-model").values["verdict"] == "no difference"
    assert find_finding(document, "straggler", "no delay").values["verdict"] == "none"
    row = find_row(document.tables[0], "delayed")
    assert (row["slow_rank"].value, row["slow_phase"].value) == ("rank 1", phase)
    assert covers(row["excess_seconds"], 0.020)
    assert covers(row["waiting_seconds"], 0.020)
    assert find_row(document.tables[0], "no delay")["slow_rank"].value == "none"


def test_the_others_wait_as_long_as_the_delay_and_the_slow_one_does_not(tmp_path: Path) -> None:
    document = conclude(make_study(delay="20ms", rank=0, ranks=4), tmp_path)
    (parts,) = (table for table in document.tables if table.title == "Every rank of delayed")
    assert find_row(parts, "rank 0")["waiting_seconds"].value == pytest.approx(0)
    for rank in (1, 2, 3):
        assert find_row(parts, f"rank {rank}")["waiting_seconds"].value == pytest.approx(0.020)
        assert find_row(parts, f"rank {rank}")["rest_seconds"].value == pytest.approx(0)


def test_without_a_delay_the_job_is_diagnosed_as_it_is(tmp_path: Path) -> None:
    slow = {1: {"forward": EVEN["forward"] + 0.010}}
    document = conclude(make_study(), tmp_path, own=slow, noise=0.01)
    main = find_finding(document, "straggler").values
    assert (main["rank"], main["phase"], main["verdict"]) == (1, "forward", "slow")
    assert covers(find_row(document.tables[0], "ddp × 2")["excess_seconds"], 0.005)
    assert find_finding(document, "straggler-gain", "rank 1").values["seconds"] == main["seconds"]
    assert [row[0].value for row in document.tables[0].rows] == ["ddp × 2"]


def test_the_diagnosis_does_not_believe_the_flag(tmp_path: Path) -> None:
    """What the trials are told to delay is not what they do."""
    study = make_study(delay="20ms", phase="input", rank=0)
    launcher = UnevenLauncher(own={1: {"optimizer": 0.050}})
    launcher._draw = lambda trial, rank, rng: (  # type: ignore[method-assign]
        UnevenLauncher(own=launcher.own)._draw(make_study().plan()[0], rank, rng)
    )
    document = run_study(study, runs_dir=tmp_path, launcher=launcher)[1]
    main = find_finding(document, "straggler", "delayed").values
    assert (main["rank"], main["phase"]) == (1, "optimizer")
    assert find_finding(document, "injected-delay").values["is_found"] is False


def test_a_rank_that_only_lost_its_core_to_others_is_not_slow(tmp_path: Path) -> None:
    document = conclude(make_study(), tmp_path, stall=0.030, noise=0.01)
    assert find_finding(document, "straggler").values["verdict"] == "none"
    (parts,) = (table for table in document.tables if table.title == "Every rank of ddp × 2")
    assert find_row(parts, "rank 0")["stalled_seconds"].value == pytest.approx(0.030)


def test_a_slow_input_of_rank_0_is_found_though_others_wait_for_its_buffers(tmp_path: Path) -> None:
    document = conclude(make_study(delay="20ms", phase="input", rank=0), tmp_path, buffer_bytes=400)
    main = find_finding(document, "straggler", "delayed").values
    assert (main["rank"], main["phase"]) == (0, "input")
    assert main["seconds"].value == pytest.approx(0.020, rel=0.05)
    assert "--no-broadcast-buffers" in find_caution(document, "buffer-broadcast").next_step


def test_without_last_gradients_only_input_and_optimizer_are_compared(tmp_path: Path) -> None:
    study = make_study(delay="20ms", phase="optimizer", rank=1, strategy="fsdp-full")
    document = conclude(study, tmp_path, knows_ready=False)
    main = find_finding(document, "straggler", "delayed").values
    assert (main["rank"], main["phase"]) == (1, "optimizer")
    assert find_caution(document, "partly-compared").subject == "delayed"
    (parts,) = (table for table in document.tables if table.title == "Every rank of delayed")
    assert all(cell.value is None for row in parts.rows for cell in row[1:])
    assert "communicates in forward and backward" in parts.notes[0]


def test_that_no_rank_is_slow_is_said_of_no_phase_that_was_not_compared(tmp_path: Path) -> None:
    document = conclude(make_study(strategy="fsdp-full"), tmp_path, knows_ready=False)
    main = find_finding(document, "straggler")
    assert main.values["verdict"] == "none"
    assert "in input or optimizer, the only phases compared" in main.text


def test_two_launches_that_disagree_are_unresolved(tmp_path: Path) -> None:
    sampling = Sampling(rounds=2, steps=12, phase_steps=12, comm_free_steps=0, control=False)
    document = conclude(make_study(sampling=sampling), tmp_path, noise=0.3)
    assert find_finding(document, "straggler").values["verdict"] == "unresolved"


def test_a_row_that_failed_leaves_the_rest(tmp_path: Path) -> None:
    study = make_study(delay="20ms", rank=0)
    document = conclude(study, tmp_path, failures={"undisturbed": Status.OUT_OF_MEMORY})
    assert find_row(document.tables[0], "no delay")["step_seconds"].value == "out of memory"
    main = find_finding(document, "straggler").values
    assert (main["rank"], main["phase"]) == (0, "backward")
    assert study.conclude([]).tables[0].rows == ()
    lost = conclude(study, tmp_path, failures={"disturbed": Status.CRASHED})
    assert lost.summary == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"delay": "5ms"}, "delays all ranks: add --delay-rank 0"),
        ({"delay": "5ms", "rank": 2}, "--delay-rank 2 does not exist"),
        ({"ranks": 1}, "--ranks must be"),
        ({"strategy": "dp"}, "one process"),
        ({"sampling": Sampling(phase_steps=0)}, "--phase-steps 0"),
        ({"global_batch": 3}, "3"),
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_study(**fields)


@pytest.mark.ranks
@pytest.mark.alone
def test_a_delay_on_real_ranks_is_found(launcher: LocalLauncher, tmp_path: Path) -> None:
    told = Perturbation(delay="15ms", delay_phase="backward", delay_rank=1)
    job = Job(workload="mlp", options={"dim": 32, "depth": 2}, device="cpu", threads_per_rank=1, perturbation=told)
    sampling = Sampling(rounds=2, steps=4, warmup=1, phase_steps=10, comm_free_steps=0, control=False)
    study = Straggler(global_batch=16, job=job, sampling=sampling)
    results = [_launch(launcher, trial, tmp_path) for trial in study.plan()]
    document = study.conclude(results)
    main = find_finding(document, "straggler", "delayed").values
    assert (main["rank"], main["phase"]) == (1, "backward")
    assert main["seconds"].value == pytest.approx(0.015, rel=0.1)


def _launch(launcher: LocalLauncher, trial: Any, directory: Path) -> Any:
    from tests.worker.trials import launch

    return launch(launcher, trial, directory / trial.name)

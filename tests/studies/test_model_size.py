"""`model-size`: bytes and operations by closed form, and what dominates as measured, whatever the size suggests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scalelab.errors import UsageError
from scalelab.records.trial import Status, Trial
from scalelab.report.document import Document
from scalelab.runs.experiment import run_study
from scalelab.studies.model_size import ModelSize
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling
from tests.studies.answers import find_caution, find_finding, find_row, set_machine
from tests.studies.uneven import UnevenLauncher

SAMPLING = Sampling(rounds=6, steps=12, phase_steps=6, comm_free_steps=4)
SMALL, LARGE = "dim=64 depth=2 × 2", "dim=512 depth=2 × 2"


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 4)


def make_study(**fields: Any) -> ModelSize:
    sizes = ("dim=64,depth=2", "dim=512,depth=2")
    job = Job(workload="mlp", device="cpu")
    return ModelSize(**({"job": job, "sampling": SAMPLING, "sizes": sizes} | fields))


class SizedLauncher(UnevenLauncher):
    """The exchange takes one time for the small model and another for the large one."""

    exchanges: dict[object, float]

    def launch(self, trial: Trial, directory: Path) -> Any:
        self.exchange = self.exchanges[trial.options["dim"]]
        return super().launch(trial, directory)


def conclude(directory: Path, study: ModelSize | None = None, *, small: float, large: float, **fields: Any) -> Document:
    launcher = SizedLauncher(**fields)
    launcher.exchanges = {64: small, 512: large}
    return run_study(study or make_study(), runs_dir=directory, launcher=launcher)[1]


def test_what_dominates_is_what_was_measured(tmp_path: Path) -> None:
    document = conclude(tmp_path, small=0.2, large=0.004, noise=0.01)
    assert find_finding(document, "dominant-part", SMALL).values["part"] == "exposed"
    assert find_finding(document, "dominant-part", LARGE).values["part"] == "compute"
    assert find_finding(document, "exposed-communication-by-size").values["verdict"] == "less"


def test_a_large_model_may_wait_more(tmp_path: Path) -> None:
    document = conclude(tmp_path, small=0.004, large=0.2, noise=0.01)
    assert find_finding(document, "dominant-part", LARGE).values["part"] == "exposed"
    assert find_finding(document, "exposed-communication-by-size").values["verdict"] == "more"


def test_bytes_and_operations_grow_together_in_a_perceptron(tmp_path: Path) -> None:
    document = conclude(tmp_path, small=0.01, large=0.01)
    work = document.tables[1]
    small, large = find_row(work, SMALL), find_row(work, LARGE)
    parameters = 2 * (512 * 512 + 512)
    assert large["num_parameters"].value == parameters
    assert large["gradient_bytes"].value == 4 * parameters
    assert large["rank_operations"].value == 6 * 2 * 512 * 512 * 32
    assert small["bytes_per_operation"].value == pytest.approx(large["bytes_per_operation"].value, rel=0.02)
    assert find_finding(document, "bytes-per-flop").values["ratio"] == pytest.approx(1.0, abs=0.02)


def test_every_way_to_communication_finds_the_same(tmp_path: Path) -> None:
    document = conclude(tmp_path, small=0.02, large=0.02)
    main, _, parts = document.tables[:3]
    assert find_row(main, SMALL)["exposed_seconds"].value == pytest.approx(0.02)
    row = find_row(parts, SMALL)
    assert row["phases_seconds"].value == pytest.approx(0.02)
    assert row["counted_seconds"].value == pytest.approx(0.02)
    assert row["dominant"].value == "computation"


def test_gradients_of_a_cast_model_are_as_long_as_its_type(tmp_path: Path) -> None:
    study = make_study(job=Job(workload="mlp", device="cpu", dtype="bfloat16"))
    document = conclude(tmp_path, study, small=0.01, large=0.01)
    assert find_row(document.tables[1], LARGE)["gradient_bytes"].value == 2 * 2 * (512 * 512 + 512)


def test_a_size_that_fails_leaves_the_other(tmp_path: Path) -> None:
    failures = {"size2-ddp-2": Status.OUT_OF_MEMORY}
    document = conclude(tmp_path, small=0.01, large=0.01, failures=failures)
    assert find_row(document.tables[0], LARGE)["step_seconds"].value == "out of memory"
    assert find_finding(document, "dominant-part").subject == SMALL
    assert find_caution(document, "failed", LARGE).values["status"] == "out_of_memory"
    assert make_study().conclude([]).tables[0].rows == ()


def test_every_size_is_measured_on_one_rank_too() -> None:
    trials = make_study(ranks=(2, 4)).plan()
    assert {(trial.options["dim"], trial.num_ranks) for trial in trials} == {
        (dim, ranks) for dim in (64, 512) for ranks in (1, 2, 4)
    }


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((), "--sizes"),
        (("dim=8", "dim=8"), "each once"),
        (("width=8",), "width"),
        (("dim",), "is not a set of options"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_study(sizes=sizes).plan()

"""The example workloads train, on one rank and on two, and are short enough to be read."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

from scalelab.cli.study_flags import parse_study
from scalelab.launch.local import LocalLauncher
from scalelab.records.tasks import Measure
from scalelab.records.trial import Status, StepPlan
from tests.worker.trials import launch, make_trial

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
WORKLOADS = [file for file in EXAMPLES if file.name != "my_study.py"]
NEEDS = {"hf_gpt2.py": "transformers", "convnet.py": "sklearn"}
PLAN = StepPlan(lead_in_steps=2, clean_steps=6, phase_steps=1, comm_free_steps=1, cycles=1)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_an_example_has_fewer_than_forty_lines(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) < 40


@pytest.mark.parametrize("file", WORKLOADS, ids=lambda file: file.name)
def test_the_parameters_of_an_example_are_free_to_be_flags(file: Path) -> None:
    study, _ = parse_study("strong-scaling", ["--workload", f"{file}:build", "--ranks", "1", "2"])
    assert {trial.workload for trial in study.plan()} == {f"{file}:build"}


@pytest.mark.ranks
@pytest.mark.parametrize("file", WORKLOADS, ids=lambda file: file.name)
def test_an_example_trains_on_two_ranks(file: Path, launcher: LocalLauncher, tmp_path: Path) -> None:
    needed = NEEDS.get(file.name)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{file.name} needs {needed}, which is not installed: pip install 'scalelab[examples]'")
    trial = make_trial(configuration="example-2", workload=f"{file}:build", task=Measure(plan=PLAN))
    result = launch(launcher, trial, tmp_path / "trial")
    assert result.status is Status.COMPLETED, result.reason
    assert len(result.losses()) >= PLAN.clean_steps
    assert all(math.isfinite(loss) for loss in result.losses().values())

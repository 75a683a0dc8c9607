"""Training runs that continue: bit for bit on the same mesh, within rounding on another mesh, strategy or rank count.

Each layout trains four steps with a checkpoint after the second, and the next one in the list goes on from there: every
layout is read by another. Losses after the change agree with one rank's within `ROUNDING`, as they do from the start.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from scalelab.launch.local import LocalLauncher
from scalelab.records.settings import Spreading, StepShape
from scalelab.records.trial import Status, Trial, TrialResult
from tests.worker.strategies.cases import CASES, MOE
from tests.worker.strategies.test_equality import ROUNDING
from tests.worker.test_training_run import forget_the_end, make_course, read_losses, run
from tests.worker.trials import launch

pytestmark = pytest.mark.ranks

LAYOUTS: list[dict[str, Any]] = [
    {"strategy": "single", "num_ranks": 1},
    {"strategy": "tp", "num_ranks": 4, "spreading": Spreading(mesh="fsdp=2,tp=2")},
    {"strategy": "pp", "num_ranks": 2, "spreading": Spreading(pipeline_schedule="zbv")},
    {"strategy": "zero1", "num_ranks": 2, "shape": StepShape(micro_batch=1)},
    {"strategy": "pp", "num_ranks": 4, "spreading": Spreading(mesh="pp=2,fsdp=2")},
]


def make_gpt2(layout: dict[str, Any], **settings: Any) -> Trial:
    return make_course(4, **CASES["gpt2"] | layout | settings)


@pytest.fixture(scope="module")
def wholes(launcher: LocalLauncher, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[TrialResult, Path]]:
    """Every layout's whole run, and where it is."""
    made = []
    for layout in LAYOUTS:
        directory = tmp_path_factory.mktemp(layout["strategy"])
        made.append((run(launcher, make_gpt2(layout, checkpoint_every=2), directory), directory))
    return made


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=lambda number: f"{LAYOUTS[number]['strategy']}-{number}")
def test_a_run_continues_on_its_own_mesh_and_on_another(
    number: int, wholes: list[tuple[TrialResult, Path]], launcher: LocalLauncher, tmp_path: Path
) -> None:
    alone = list(wholes[0][0].losses().values())
    whole, directory = wholes[number]
    assert list(whole.losses().values()) == pytest.approx(alone, rel=ROUNDING)
    shutil.copytree(wholes[number - 1][1] / "checkpoints" / "step-00000002", tmp_path / "kept" / "step-00000002")
    elsewhere = run(launcher, make_gpt2(LAYOUTS[number], checkpoints=str(tmp_path / "kept")), tmp_path / "t")
    assert list(elsewhere.losses()) == [2, 3]
    assert list(elsewhere.losses().values()) == pytest.approx(alone[2:], rel=ROUNDING)
    if number == 0:
        return  # the plain loop is in test_training_run.py
    shutil.copytree(directory, tmp_path / "same")
    forget_the_end(whole, tmp_path / "same", 2)
    again = run(launcher, make_gpt2(LAYOUTS[number], checkpoint_every=2), tmp_path / "same")
    assert read_losses(again) == read_losses(whole)


def test_experts_are_read_by_a_layout_that_holds_them_all_and_back(launcher: LocalLauncher, tmp_path: Path) -> None:
    layouts: list[dict[str, Any]] = [
        {"strategy": "ep", "num_ranks": 2},
        {"strategy": "ddp", "num_ranks": 2},
        {"strategy": "ep", "num_ranks": 4, "spreading": Spreading(mesh="dp=2,ep=2")},
    ]
    whole = run(launcher, make_course(4, **MOE | layouts[0], checkpoint_every=1), tmp_path / "whole")
    place = tmp_path / "whole" / "checkpoints"
    for number, layout in enumerate(layouts[1:]):
        (newest,) = sorted(place.glob("step-*"))[-2:-1]  # the last but one: the end is not continued
        shutil.copytree(newest, tmp_path / f"kept{number}" / newest.name)
        trial = make_course(4, **MOE | layout, checkpoints=str(tmp_path / f"kept{number}"), checkpoint_every=1)
        found = list(run(launcher, trial, tmp_path / f"t{number}").losses().items())
        assert found == [(3, pytest.approx(whole.losses()[3], rel=ROUNDING))], layout
        place = tmp_path / f"kept{number}"


def test_what_changes_learning_is_refused(
    wholes: list[tuple[TrialResult, Path]], launcher: LocalLauncher, tmp_path: Path
) -> None:
    shutil.copytree(wholes[0][1] / "checkpoints", tmp_path / "kept")
    layout = {"strategy": "ddp", "num_ranks": 2, "spreading": Spreading(gradient_hook="fp16")}
    refused = launch(launcher, make_gpt2(layout, checkpoints=str(tmp_path / "kept")), tmp_path / "t")
    assert refused.status is Status.INVALID
    assert "belongs to a different run: its gradient_hook is none, this run's is fp16" in refused.reason

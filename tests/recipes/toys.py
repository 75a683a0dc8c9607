"""A recipe of microseconds: a row that is run, one that reads it, one that fails as it should, one that is not run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from scalelab.launch.fake import FakeLauncher
from scalelab.recipes.recipe import Answer, Check, Outcomes, Recipe, Row, Size
from scalelab.recipes.reproduce import Reproduce
from scalelab.records.trial import Trial, TrialResult
from scalelab.studies.dimensions import Dimensions
from scalelab.studies.scaling.study import StrongScaling
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling

SAMPLING = Sampling(rounds=2, steps=6, phase_steps=0, comm_free_steps=0, control=False)
STRONG = StrongScaling(
    ranks=(1, 2),
    job=Job(workload="mlp", options={"dim": 8, "depth": 2}, device="cpu", threads_per_rank=1),
    sampling=SAMPLING,
)
UNEQUAL = Dimensions(
    vary=("features=16",),
    job=Job(workload="transformer", options={"features": 8, "d_model": 8}, device="cpu", threads_per_rank=1),
    sampling=SAMPLING,
)


def make_rows(size: Size) -> tuple[Row, ...]:
    def count_arms(outcomes: Outcomes) -> Answer:
        return Answer(sentences=tuple(f"{len(outcome.arms)} arms of {size}" for outcome in outcomes.values()))

    return (
        Row(id="S1", title="First", parts={"strong": STRONG}, conclude=count_arms),
        Row(id="S2", title="Second", parts={"strong": STRONG}, conclude=count_arms, reads="S1"),
        Row(id="S3", title="Third", parts={"unequal": UNEQUAL}, conclude=count_arms),
        Row(id="S4", title="Fourth", reason="two nodes are needed"),
        Row(id="S6", title="Sixth", state="this document"),
    )


TOY = Recipe(
    name="scaling",
    title="A toy",
    make_rows=make_rows,
    make_checks=lambda: (
        Check(id="S1", claim="two", computed="2", holds=True),
        Check(id="S3", claim="four", computed="3", holds=False),
    ),
)
"""In the place of a recipe that has a name on the command line."""


def make_toy(*only: str) -> Reproduce:
    return Reproduce(recipe="scaling", only=only, device="cpu")


def take_turns(trial: Trial) -> float:
    return 0.1 / trial.num_ranks


class ImpatientLauncher(FakeLauncher):
    """Is interrupted before its n-th trial."""

    def __init__(self, before: int, step_seconds: Callable[[Trial], float] = take_turns) -> None:
        super().__init__(step_seconds)
        self._before = before

    def launch(self, trial: Trial, directory: Path) -> TrialResult:
        if len(self.launched) + 1 == self._before:
            raise KeyboardInterrupt
        return super().launch(trial, directory)

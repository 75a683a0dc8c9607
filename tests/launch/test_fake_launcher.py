"""The fake launcher plays what it is told to: exact without noise, the same again with it."""

from __future__ import annotations

import statistics
from inspect import getmembers, isfunction, signature
from pathlib import Path

import pytest

from scalelab.launch.fake import WARMUP_FACTORS, FakeLauncher
from scalelab.launch.hosts import HostsLauncher
from scalelab.launch.launcher import Launcher
from scalelab.launch.local import LocalLauncher
from scalelab.launch.stepped import StepLauncher
from scalelab.records.trial import PHASES, Status, StepKind, StepPlan, TrialResult
from tests.records import make_record

PLAN = StepPlan(lead_in_steps=5, clean_steps=20, phase_steps=4, comm_free_steps=4, cycles=2)


def play(launcher: FakeLauncher, **fields: object) -> TrialResult:
    defaults = {"configuration": "ddp-2", "strategy": "ddp", "num_ranks": 2, "plan": PLAN}
    return launcher.launch(make_record(**(defaults | fields)), Path("unused"))


@pytest.mark.parametrize("kind", [FakeLauncher, LocalLauncher, HostsLauncher, StepLauncher])
def test_it_has_every_method_of_a_launcher_with_the_same_parameters(kind: type[Launcher]) -> None:
    methods = {name: list(signature(method).parameters) for name, method in getmembers(Launcher, isfunction)}
    asked = {name: parameters for name, parameters in methods.items() if not name.startswith("_")}
    assert set(asked) == {"check", "launch", "close"}
    assert {name: list(signature(getattr(kind, name)).parameters) for name in asked} == asked


def test_every_rank_gives_every_step_of_the_plan() -> None:
    result = play(FakeLauncher(lambda _: 0.1))
    kinds = [kind for kind, count in PLAN.blocks for _ in range(count)]
    assert result.status is Status.COMPLETED
    for rank in range(2):
        own = [sample for sample in result.samples if sample.rank == rank]
        assert [(sample.step, sample.kind) for sample in own] == list(enumerate(kinds))
    assert len(result.losses()) == PLAN.num_steps - PLAN.comm_free_steps


def test_without_noise_steps_after_the_warm_up_take_exactly_what_was_asked_for() -> None:
    result = play(FakeLauncher(lambda trial: 0.4 / trial.num_ranks))
    times = list(result.step_seconds(StepKind.CLEAN).values())
    warmup = len(WARMUP_FACTORS)
    assert times[:warmup] == pytest.approx([0.2 * factor for factor in WARMUP_FACTORS])
    assert times[warmup:] == [0.2] * (25 - warmup)


def test_comm_free_steps_lack_what_is_exposed() -> None:
    result = play(FakeLauncher(lambda _: 0.2, comm_seconds=lambda _: 0.05))
    assert list(result.step_seconds(StepKind.COMM_FREE).values()) == pytest.approx([0.15] * 4)


def test_phases_sum_to_the_step() -> None:
    timed = [s for s in play(FakeLauncher(lambda _: 0.2)).samples if s.kind is StepKind.PHASES]
    for sample in timed:
        assert sum(getattr(sample, f"{phase}_seconds") for phase in PHASES) == pytest.approx(sample.step_seconds)


def test_the_same_trial_gives_the_same_samples_and_another_round_or_seed_does_not() -> None:
    def times(seed: int = 0, **fields: object) -> dict[int, float]:
        return play(FakeLauncher(lambda _: 0.2, noise=0.05, seed=seed), **fields).step_seconds(StepKind.CLEAN)

    assert times() == times()
    assert times() != times(round=2)
    assert times() != times(seed=1)


def test_noise_spreads_around_what_was_asked_for() -> None:
    launcher = FakeLauncher(lambda _: 0.2, noise=0.05)
    medians = [
        statistics.median(play(launcher, round=number).step_seconds(StepKind.CLEAN).values()) for number in range(1, 20)
    ]
    assert statistics.median(medians) == pytest.approx(0.2, rel=0.05)
    assert len(set(medians)) == 19


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.COMPLETED])
def test_a_configuration_fails_as_it_is_told_to(status: Status) -> None:
    launcher = FakeLauncher(lambda _: 0.1, failures={"ddp-2": status})
    failed, other = play(launcher), play(launcher, configuration="ddp-4")
    assert failed.status is status
    assert failed.reason
    assert failed.samples == ()
    assert other.status is Status.COMPLETED
    assert launcher.launched == ["ddp-2-r1", "ddp-4-r1"]

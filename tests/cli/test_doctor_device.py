"""The self-test of a kind of device: every path of scalelab really runs on the CPU, and what is wrong is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from scalelab.cli.doctor.device import examine_device, judge_paths, list_paths, run_paths
from scalelab.cli.doctor.host import Grade
from scalelab.launch.local import LocalLauncher
from scalelab.records.environment import Gpu
from scalelab.records.trial import Status, StepKind, TrialResult

pytestmark = pytest.mark.ranks
H100 = Gpu(name="NVIDIA H100 80GB HBM3", memory_bytes=80 * 2**30, driver="550")

Results = dict[str, TrialResult]


@pytest.fixture(scope="module")
def results(launcher: LocalLauncher) -> Results:
    """Of every trial, on the CPU."""
    return run_paths(launcher, list_paths("cpu", 2))


def test_every_path_is_right_on_a_cpu(results: Results) -> None:
    checks = {check.name: check for check in judge_paths(results)}
    assert set(checks) >= {"ddp", "fsdp2", "tp", "autocast", "loss scale", "memory forecast", "memory limit", "trace"}
    assert {name: check.figure for name, check in checks.items() if not check.is_right} == {}


def spoil(result: TrialResult, factor: float) -> TrialResult:
    return replace(
        result, samples=tuple(s if s.loss is None else s._replace(loss=factor * s.loss) for s in result.samples)
    )


FAULTS: dict[str, Callable[[Results], Results]] = {
    "ddp": lambda r: r | {"ddp": spoil(r["ddp"], 1.01)},
    "loss scale": lambda r: r | {"loss scale": replace(r["loss scale"], status=Status.INVALID, samples=())},
    "memory limit": lambda r: r | {"memory limit": replace(r["memory limit"], status=Status.CRASHED)},
    "memory forecast": lambda r: r | {"forecast": replace(r["forecast"], ranks=())},
    "trace": lambda r: r | {"plain loop": replace(r["plain loop"], ranks=drop_traces(r["plain loop"]))},
    "plain loop": lambda r: r | {"plain loop": replace(r["plain loop"], status=Status.CRASHED, reason="no kernel")},
}


def drop_traces(result: TrialResult) -> tuple[object, ...]:
    return tuple(replace(rank, traced_steps=()) for rank in result.ranks)


@pytest.mark.parametrize("name", FAULTS)
def test_a_path_that_is_wrong_is_found(name: str, results: Results) -> None:
    wrong = [check.name for check in judge_paths(FAULTS[name](results)) if check.is_right is False]
    assert wrong == [name]


def test_a_link_below_its_nominal_rate_is_found(results: Results) -> None:
    wrong = [check for check in judge_paths(results, [H100, H100]) if check.is_right is False]
    assert [check.name for check in wrong] == ["all-reduce"]
    assert "450 GB/s nominal" in wrong[0].expectation


def test_steps_that_take_longer_freely_are_found(results: Results) -> None:
    plain = results["plain loop"]
    clean = [s for s in plain.samples if s.kind is StepKind.CLEAN]
    free = [s._replace(kind=StepKind.FREE, step=1000 + s.step, step_seconds=9 * s.step_seconds) for s in clean]
    slow = replace(plain, samples=(*plain.samples, *free))
    assert [one.name for one in judge_paths(results | {"plain loop": slow}) if one.is_right is False] == ["host-bound"]


def test_a_bundle_has_checks_trials_and_environment(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scalelab.cli.doctor.device.try_module", lambda *words: ([], ""))
    monkeypatch.setattr("scalelab.cli.doctor.device.run_paths", lambda *words: results)
    checks = list(examine_device("cpu", tmp_path / "bundle.json", LocalLauncher()))
    assert {check.grade for check in checks} == {Grade.OK}
    bundle = json.loads((tmp_path / "bundle.json").read_text())
    assert len(bundle["checks"]) == len(checks)
    assert set(bundle["trials"]) == set(results)
    assert bundle["environment"]["variables"] is not None

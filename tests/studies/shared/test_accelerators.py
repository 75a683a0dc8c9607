"""Host-bound time, energy, clocks and tenants, from samples and sensors that are played."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalelab.launch.fake import FakeLauncher
from scalelab.records.observations import DeviceLoad, RankReport
from scalelab.records.trial import StepKind, StepPlan, TrialResult
from scalelab.report.findings import select
from scalelab.studies.shared.accelerators import (
    CLOCK_MOVED,
    ENERGY,
    HOST_BOUND,
    SHARED_GPU,
    SLOWED,
    look_at_devices,
    make_device_sections,
    measure_host_bound,
    name_device_findings,
)
from scalelab.studies.shared.arms import Arm, group_arms
from tests.records import make_record

PLAN = StepPlan(lead_in_steps=4, clean_steps=20, phase_steps=0, comm_free_steps=0, free_steps=8)


def play(rounds: int = 6, free: float = 0.8, **sensors: Any) -> list[Arm]:
    """Launches whose synchronized steps take 0.1 s, on two GPUs that say the same in every step."""
    launcher = FakeLauncher(lambda _: 0.1)
    found = []
    for number in range(1, rounds + 1):
        trial = make_record(configuration="ddp-2", strategy="ddp", num_ranks=2, plan=PLAN, round=number)
        result = launcher.launch(trial, Path("unused"))
        samples = tuple(
            s._replace(step_seconds=free * s.step_seconds) if s.kind is StepKind.FREE else s for s in result.samples
        )
        result = replace(result, samples=samples, ranks=(RankReport(rank=0, tokens_per_sample=10.0),))
        found.append(replace(result, loads=tuple(list_loads(result, sensors)) if sensors else ()))
    return list(group_arms(found, 4).values())


def list_loads(result: TrialResult, sensors: dict[str, Any]) -> list[DeviceLoad]:
    starts = sorted({sample.start_seconds for sample in result.samples})
    return [
        DeviceLoad(seconds=start, device=f"gpu {gpu}", busy=1.0, **{k: v(n) for k, v in sensors.items()})
        for n, start in enumerate(starts)
        for gpu in (0, 1)
    ]


def test_what_a_synchronized_step_takes_longer_is_host_bound() -> None:
    (arm,) = play()
    (finding,) = select(name_device_findings([arm]), HOST_BOUND)
    host = measure_host_bound(arm)
    assert host is not None
    assert host.value == pytest.approx(0.02)
    assert finding.values["free_step_seconds"].value == pytest.approx(0.08)  # type: ignore[union-attr]
    assert "20.0 ± 0.0 ms longer" in finding.text


def test_where_nothing_ran_freely_nothing_is_said() -> None:
    (arm,) = play()
    quiet = replace(arm, free=[[] for _ in arm.clean])
    assert measure_host_bound(quiet) is None
    assert list(name_device_findings([quiet])) == []
    assert list(make_device_sections([quiet])) == []
    assert list(look_at_devices([quiet])) == []


def test_energy_is_the_power_of_all_gpus_times_the_step() -> None:
    arms = play(power_watts=lambda _: 300.0)
    (finding,) = select(name_device_findings(arms), ENERGY)
    assert finding.values["step_joules"].value == pytest.approx(2 * 300 * 0.1)  # type: ignore[union-attr]
    assert finding.values["unit_joules"].value == pytest.approx(60 / (10 * arms[0].step_samples))  # type: ignore[union-attr]
    assert "J per token" in finding.text
    (section,) = make_device_sections(arms)
    assert section.tables[0].rows


def test_a_clock_that_moved_is_named_and_one_that_stayed_is_not() -> None:
    (moved,) = look_at_devices(play(clock_hertz=lambda n: 1.41e9 if n % 2 else 1.2e9))
    assert (moved.kind, moved.values["low_hertz"], moved.values["high_hertz"]) == (CLOCK_MOVED.name, 1.2e9, 1.41e9)
    assert list(look_at_devices(play(clock_hertz=lambda n: 1.41e9 - n))) == []


def test_a_slowed_or_shared_gpu_is_named() -> None:
    arms = play(slowed=lambda n: ("power brake",) if n % 2 else (), num_others=lambda _: 1)
    found = {caution.kind: caution for caution in look_at_devices(arms)}
    assert set(found) == {SLOWED.name, SHARED_GPU.name}
    share = found[SLOWED.name].values["share"]
    assert isinstance(share, float)
    assert 0.4 < share < 0.6
    assert "power brake" in found[SLOWED.name].message

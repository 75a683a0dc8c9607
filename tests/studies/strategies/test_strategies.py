"""The comparison of strategies, on machines whose answer is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalelab import run_study
from scalelab.errors import UsageError
from scalelab.launch.local import LocalLauncher
from scalelab.records.settings import Spreading
from scalelab.records.trial import Status, TrialResult
from scalelab.report.findings import MAIN
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling
from scalelab.studies.strategies.study import Strategies
from tests.studies.answers import covers, find_caution, find_finding, find_row, list_kinds, set_machine
from tests.studies.spreads import JOB, conclude, hold, look_at, make_strategies


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 2)


def test_every_strategy_trains_the_same_global_batch_and_single_on_one_rank() -> None:
    trials = make_strategies().plan()
    first = [trial for trial in trials if trial.round == 1]
    assert [(t.configuration, t.num_ranks, t.global_batch) for t in first] == [
        ("single-1", 1, 64),
        ("control", 1, 64),
        ("dp-2", 2, 64),
        ("ddp-2", 2, 64),
        ("fsdp-full-2", 2, 64),
    ]
    assert all("utilization" in trial.instruments for trial in trials)
    assert all(("replicas" in trial.instruments) == (trial.strategy == "dp") for trial in trials)


def test_ranks_that_share_samples_need_not_divide_the_batch() -> None:
    study = Strategies(strategies=("single", "tp"), ranks=4, global_batch=6, job=Job(workload="gpt2"))
    assert {trial.batch_per_rank for trial in study.plan()} == {6}
    with pytest.raises(UsageError, match="6 is not divisible by 4 ranks"):
        replace(study, strategies=("single", "ddp", "tp")).plan()
    with pytest.raises(UsageError, match="--mesh tp=3 is for 3 ranks, got 4"):
        replace(study, job=replace(study.job, spreading=Spreading(mesh="tp=3"))).plan()


def test_the_fastest_is_named_with_its_lead(tmp_path: Path) -> None:
    document = conclude(make_strategies(), tmp_path)
    fastest = find_finding(document, "fastest", "ddp × 2")
    assert (fastest.weight, fastest.values["verdict"]) == (MAIN, "slower")
    assert fastest.text.startswith("ddp × 2 is the fastest, 200")
    assert "the next, dp × 2 (emulated), takes 1.50" in fastest.text
    row = find_row(document.tables[0], "ddp × 2")
    assert covers(row["step_ratio"], 0.5)
    assert covers(row["step_seconds_p95"], 0.2)
    assert row["variation"].value == pytest.approx(0.0)


def test_strategies_that_take_equally_long_cannot_be_told_apart(tmp_path: Path) -> None:
    document = conclude(make_strategies(strategies=("fsdp-full", "fsdp2")), tmp_path)
    assert "cannot be distinguished" in find_finding(document, "fastest").text
    assert find_finding(document, "verdict", "fsdp2 × 2").values["verdict"] == "no difference"


def test_a_device_that_waits_is_seen_to_idle(tmp_path: Path) -> None:
    def busy(device: str) -> float:
        return {"replica 1": 0.4, "rank 1": 0.05}.get(device, 0.9)

    document = conclude(make_strategies(), tmp_path, look_at(busy))
    _, devices, over_time, _ = document.tables
    second = find_row(devices, "dp × 2 (emulated), replica 1")
    assert second["busy"].value == pytest.approx(0.4)
    assert second["busy"].low is not None
    assert (second["busy_p5"].value, second["busy_p95"].value) == pytest.approx((0.4, 0.4))
    assert second["idle"].value == 0.0
    assert find_row(devices, "ddp × 2, rank 1")["idle"].value == 1.0
    assert find_row(devices, "dp × 2 (emulated), all replicas")["busy"].value == pytest.approx(0.65)
    tenths = [cell.value for cell in find_row(over_time, "dp × 2 (emulated), replica 1").values()][1:]
    assert tenths == pytest.approx([0.4] * 10)
    busy_now = find_finding(document, "utilization", "dp × 2 (emulated)")
    assert busy_now.values == {"least": pytest.approx(0.4), "most": pytest.approx(0.9)}
    assert "Device 0 alone takes the batch and updates the parameters, 12 % of the step" in busy_now.text
    assert not {"no-utilization", "other-programs"} & list_kinds(document)


def test_the_excess_of_device_0_is_found_and_said(tmp_path: Path) -> None:
    sizes = {"dp": (300, 100), "ddp": (200, 200), "single": (400,), "fsdp-full": (100, 100)}
    document = conclude(make_strategies(), tmp_path, hold(lambda name: sizes[name]))
    main, devices = document.tables[:2]
    assert covers(find_row(main, "dp × 2 (emulated)")["device_0_excess_bytes"], 200)
    assert covers(find_row(main, "ddp × 2")["device_0_excess_bytes"], 0)
    assert find_row(main, "plain loop")["device_0_excess_bytes"].value is None
    assert find_row(devices, "plain loop, rank 0")["memory_bytes"].value == 400
    assert find_row(devices, "dp × 2 (emulated), replica 1")["memory_bytes"].value == 100
    excess = find_finding(document, "device-0-memory", "dp × 2 (emulated)")
    assert "device 0 holds 200 ± 0 B more than the others, which hold 100 B (sum of tensors)" in excess.text


def test_equal_losses_are_said_to_be_equal(tmp_path: Path) -> None:
    document = conclude(make_strategies(), tmp_path)
    losses = find_finding(document, "losses-equal")
    assert losses.values == {"is_equal": True, "difference": pytest.approx(0, abs=1e-11)}
    assert find_row(document.tables[-1], "ddp × 2")["largest_difference"].value == pytest.approx(0, abs=1e-11)


@pytest.mark.parametrize(("factor", "is_equal"), [(1 + 1e-5, True), (1.5, False)])
def test_a_strategy_that_trains_something_else_is_found_out(tmp_path: Path, factor: float, is_equal: bool) -> None:
    def spoil(result: TrialResult) -> TrialResult:
        if result.trial.strategy != "fsdp-full":
            return result
        samples = [s._replace(loss=s.loss * (factor if s.step > 5 else 1)) for s in result.samples if s.loss]
        return replace(result, samples=tuple(samples))

    document = conclude(make_strategies(), tmp_path, spoil)
    assert find_finding(document, "losses-equal").values["is_equal"] is is_equal
    difference = find_row(document.tables[-1], "fsdp-full × 2")["largest_difference"].value
    assert difference == pytest.approx(factor - 1, rel=1e-3)


def test_what_could_not_be_looked_at_is_said(tmp_path: Path) -> None:
    document = conclude(make_strategies(), tmp_path)
    assert "plain loop" in find_caution(document, "no-utilization").subject
    assert find_row(document.tables[1], "ddp × 2, rank 0")["busy"].value is None


def test_launches_that_are_too_short_are_said_to_be(tmp_path: Path) -> None:
    def look_once(result: TrialResult) -> TrialResult:
        return replace(result, loads=look_at(lambda _: 1.0)(result).loads[:2])

    assert "too short" in find_caution(conclude(make_strategies(), tmp_path, look_once), "no-utilization").message


def test_a_rank_on_another_node_is_looked_at_by_its_own_clock(tmp_path: Path) -> None:
    """What it did while it loaded lies between the clocks of the two nodes, and is no part of its steps."""

    def look_elsewhere(result: TrialResult) -> TrialResult:
        seen = look_at(lambda _: 0.9)(result)
        samples = [s._replace(start_seconds=s.start_seconds + 1000 * (s.rank == 1)) for s in seen.samples]
        loads = [replace(load, seconds=load.seconds + 1000 * (load.device == "rank 1")) for load in seen.loads]
        loading = [replace(load, seconds=load.seconds - 500, busy=0.0) for load in loads if load.device == "rank 1"]
        return replace(seen, samples=tuple(samples), loads=(*loads, *loading))

    _, devices, *_ = conclude(make_strategies(), tmp_path, look_elsewhere).tables
    assert find_row(devices, "ddp × 2, rank 1")["busy"].value == pytest.approx(0.9)


def test_other_programs_on_the_cores_are_said(tmp_path: Path) -> None:
    document = conclude(make_strategies(strategies=("ddp", "fsdp-full")), tmp_path, look_at(lambda _: 0.5, others=0.3))
    others = find_caution(document, "other-programs")
    assert (others.subject, others.values["share"]) == ("ddp × 2, fsdp-full × 2", pytest.approx(0.3))


def test_a_strategy_that_fails_leaves_the_others_rows_intact(tmp_path: Path) -> None:
    failures = {"fsdp-full-2": Status.OUT_OF_MEMORY, "single-1": Status.CRASHED}
    document = conclude(make_strategies(), tmp_path, look_at(lambda _: 0.5), failures=failures)
    main = document.tables[0]
    assert find_row(main, "fsdp-full × 2")["step_seconds"].value == "out of memory"
    assert find_row(main, "plain loop")["step_seconds"].value == "crashed"
    assert covers(find_row(main, "ddp × 2")["step_seconds"], 0.2)
    assert find_row(main, "ddp × 2")["step_ratio"].value is None
    assert find_finding(document, "fastest").subject == "ddp × 2"


def test_nothing_measured_is_no_answer_and_no_error() -> None:
    document = make_strategies().conclude([])
    assert document.tables[0].rows == ()
    assert document.summary == ()


def test_settings_reach_the_strategies_that_know_them() -> None:
    job = replace(JOB, spreading=Spreading(bucket_mb=2.0, sync_batch_norm=True))
    by_name = {trial.configuration: trial.spreading for trial in make_strategies(job=job).plan()}
    assert by_name["ddp-2"] == job.spreading
    assert by_name["fsdp-full-2"] == Spreading(sync_batch_norm=True)
    assert by_name["dp-2"] == by_name["single-1"] == Spreading()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"strategies": ()}, "--strategies needs at least one name"),
        ({"strategies": ("ddp", "ddp")}, "--strategies ddp ddp names a strategy twice"),
        ({"ranks": 3}, "--global-batch-size 64"),
        ({"ranks": 0}, "--ranks must be"),
        ({"global_batch": 0}, "--global-batch-size must be"),
    ],
)
def test_fields_that_cannot_work_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_strategies(**fields)


def test_a_setting_that_no_strategy_knows_is_refused() -> None:
    job = replace(JOB, spreading=Spreading(bucket_mb=2.0))
    with pytest.raises(UsageError, match="--bucket-cap-mb has no effect with --strategies single dp"):
        make_strategies(strategies=("single", "dp"), job=job).plan()


@pytest.mark.ranks
def test_real_ranks_are_compared(launcher: LocalLauncher, tmp_path: Path) -> None:
    class Shared:
        """The launcher of all tests, which must outlive the run."""

        launch = launcher.launch

        def close(self) -> None:
            """Others need it still."""

    study = Strategies(
        job=Job(workload="mlp", options={"dim": 32, "depth": 2}, device="cpu", threads_per_rank=1),
        sampling=Sampling(rounds=1, steps=40, phase_steps=2, comm_free_steps=0, control=False),
        global_batch=16,
    )
    _, document = run_study(study, runs_dir=tmp_path, launcher=Shared())
    assert [row[0].value for row in document.tables[0].rows] == [
        "plain loop", "dp × 2 (emulated)", "ddp × 2", "fsdp-full × 2",
    ]  # fmt: skip
    excess = find_row(document.tables[0], "dp × 2 (emulated)")["device_0_excess_bytes"].value
    assert isinstance(excess, float)
    assert excess > 0
    assert find_finding(document, "losses-equal").values["is_equal"] is True

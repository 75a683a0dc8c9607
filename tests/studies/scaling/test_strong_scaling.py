"""Strong scaling, end to end with a fake launcher: what is played is what the document says."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from scalelab.analysis.estimate import Estimate
from scalelab.errors import NothingMeasured
from scalelab.launch.fake import FakeLauncher
from scalelab.records.store import RunStore
from scalelab.records.trial import Status, StepKind, StepSample, Trial, TrialResult
from scalelab.report.document import Cell, read_document, render_json
from scalelab.report.findings import ASIDE, MAIN
from scalelab.report.tables import shorten
from scalelab.studies.scaling.answer import _split_loss
from scalelab.studies.shared.study import Sampling
from tests.records import replace_losses
from tests.studies.answers import (
    ONE_RANK_SECONDS,
    SAMPLING,
    AlteredLauncher,
    answer,
    covers,
    find_caution,
    find_finding,
    find_row,
    find_tables,
    list_kinds,
    make_strong,
    obey_amdahl,
    set_machine,
    share_evenly,
)

LABELS = ["plain loop", "control", "ddp × 1", "ddp × 2", "ddp × 4"]


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 16)


def test_perfect_scaling_is_fully_efficient_and_called_linear(tmp_path: Path) -> None:
    _, document = answer(make_strong(), tmp_path)
    main, _, laws = find_tables(document)
    assert [row[0].value for row in main.rows] == LABELS
    for num_ranks in (1, 2, 4):
        row = find_row(main, f"ddp × {num_ranks}")
        assert row["step_seconds"].value == pytest.approx(ONE_RANK_SECONDS / num_ranks)
        assert row["samples_per_second"].value == pytest.approx(64 * num_ranks / ONE_RANK_SECONDS)
        assert row["speedup"].value == pytest.approx(num_ranks)
        assert row["efficiency"].value == pytest.approx(1.0)
        assert row["efficiency_over_one_rank"].value == pytest.approx(1.0)
        assert find_row(laws, num_ranks)["law"].value == pytest.approx(num_ranks)
    assert find_finding(document, "linearity").values["verdict"] == "no difference"
    assert document.findings[-1].kind == "control", "the control is the least of the findings"
    (main_finding,) = (finding for finding in document.findings if finding.weight == MAIN)
    assert (main_finding.kind, main_finding.subject) == ("speedup", "ddp × 4")
    assert main_finding.values["speedup"].value == pytest.approx(4.0)
    for num_ranks in (2, 4):
        efficiency = find_finding(document, "efficiency", f"ddp × {num_ranks}")
        assert efficiency.values["efficiency"].value == pytest.approx(1.0)


def test_the_reference_has_no_interval_and_no_speedup_over_the_strategy(tmp_path: Path) -> None:
    _, document = answer(make_strong(), tmp_path, FakeLauncher(share_evenly, noise=0.02))
    row = find_row(document.tables[0], "plain loop")
    assert row["speedup"] == row["efficiency"] == Cell(value=1.0)
    assert row["speedup_over_one_rank"] == row["exposed_share"] == Cell()


@pytest.mark.parametrize("serial", [0.05, 0.2, 0.6])
def test_a_known_serial_fraction_is_recovered(tmp_path: Path, serial: float) -> None:
    _, document = answer(make_strong(), tmp_path, obey_amdahl(serial))
    laws = find_tables(document)[2]
    for num_ranks in (1, 2, 4):
        truth = 1 / (serial + (1 - serial) / num_ranks)
        row = find_row(laws, num_ranks)
        assert row["measured"].value == pytest.approx(truth)
        assert row["law"].value == pytest.approx(truth)
        assert row["usl"].value == pytest.approx(truth)
        assert row["ideal"].value == num_ranks
    assert find_row(laws, 1)["karp_flatt"].value is None
    assert find_row(laws, 2)["karp_flatt"].value == pytest.approx(serial)
    assert find_row(laws, 4)["karp_flatt"].value == pytest.approx(serial)
    assert find_finding(document, "amdahl").values["serial_fraction"].value == pytest.approx(serial)
    assert find_finding(document, "linearity").values["verdict"] == "slower"


def test_a_serial_fraction_is_covered_by_its_interval_under_noise(tmp_path: Path) -> None:
    launcher = FakeLauncher(obey_amdahl(0.3), noise=0.03)
    _, document = answer(make_strong(sampling=replace(SAMPLING, rounds=12, steps=30)), tmp_path, launcher)
    row = find_row(find_tables(document)[2], 4)
    assert covers(row["karp_flatt"], 0.3)
    assert covers(row["law"], 1 / (0.3 + 0.7 / 4))
    assert row["karp_flatt"].low != row["karp_flatt"].high


def exchange(trial: Trial) -> float:
    """What the gradient exchange costs: nothing alone, more with more ranks."""
    return 0.0 if trial.num_ranks == 1 else 0.01 * trial.num_ranks


def test_known_communication_is_recovered_by_ablation_and_by_subtraction(tmp_path: Path) -> None:
    launcher = FakeLauncher(lambda trial: share_evenly(trial) + exchange(trial), comm_seconds=exchange)
    _, document = answer(make_strong(), tmp_path, launcher)
    main, time, _ = find_tables(document)
    for num_ranks in (2, 4):
        row = find_row(time, f"ddp × {num_ranks}")
        seconds = 0.01 * num_ranks
        assert row["exposed_seconds"].value == pytest.approx(seconds)
        assert row["excess_seconds"].value == pytest.approx(seconds)
        share = seconds / (ONE_RANK_SECONDS / num_ranks + seconds)
        assert find_row(main, f"ddp × {num_ranks}")["exposed_share"].value == pytest.approx(share)
    assert find_row(time, "plain loop")["exposed_seconds"].value is None
    assert find_row(time, "ddp × 1")["excess_seconds"].value is None
    assert find_finding(document, "communication-methods").values["agree"] is True
    loss = find_finding(document, "scaling-loss", "ddp × 4").values
    assert loss["excess_seconds"].value == pytest.approx(0.04)
    assert loss["exposed_seconds"].value == pytest.approx(0.04)
    assert loss["rest_seconds"] == pytest.approx(0.0, abs=1e-9)
    assert find_finding(document, "exposed-communication").values["seconds"].value == pytest.approx(0.04)


def test_what_is_not_communication_is_not_blamed_on_it(tmp_path: Path) -> None:
    _, document = answer(make_strong(), tmp_path, obey_amdahl(0.3))
    row = find_row(find_tables(document)[1], "ddp × 4")
    assert row["exposed_seconds"].value == pytest.approx(0.0)
    assert row["excess_seconds"].value == pytest.approx(0.3 * ONE_RANK_SECONDS * 0.75)
    assert find_finding(document, "communication-methods").values["agree"] is False
    loss = find_finding(document, "scaling-loss").values
    assert loss["rest_seconds"] == pytest.approx(loss["excess_seconds"].value)


@pytest.mark.parametrize(("exposed", "is_known"), [(0.0512, True), (0.1, True), (0.0, False)])
def test_the_parts_of_a_loss_add_up_to_it_as_they_are_printed(exposed: float, is_known: bool) -> None:
    half = 0.001 if is_known else 0.02
    excess = Estimate(value=0.0954, low=0.094, high=0.096)
    words = _split_loss(excess, Estimate(value=exposed, low=exposed - half, high=exposed + half), is_strong=True)
    printed = [float(number) for number in re.findall(r"([0-9.]+) ms", words)]
    if is_known:
        assert printed[0] + (printed[1] if exposed < excess.value else -printed[1]) == pytest.approx(95.4)
    else:
        assert words.startswith("too noisy to split (exposed communication: at most ")


def test_a_loss_that_may_be_none_is_not_split() -> None:
    excess, exposed = Estimate(value=0.042, low=-0.001, high=0.085), Estimate(value=0.019, low=0.015, high=0.023)
    words = _split_loss(excess, exposed, is_strong=True)
    assert words == "too noisy to split (exposed communication: 19 ± 4 ms); use more --rounds"


def test_phases_are_medians_of_the_steps_that_were_timed(tmp_path: Path) -> None:
    _, document = answer(make_strong(), tmp_path)
    row = find_row(find_tables(document)[1], "ddp × 2")
    phases = [row[f"{phase}_seconds"].value for phase in ("input", "forward", "backward", "optimizer")]
    assert phases == pytest.approx([0.2 * share for share in (0.02, 0.3, 0.58, 0.1)])
    assert row["skew_seconds"].value == 0.0


@pytest.mark.parametrize("status", [Status.OUT_OF_MEMORY, Status.CRASHED, Status.TIMED_OUT, Status.INVALID])
def test_a_configuration_that_fails_keeps_its_row_and_the_others_their_numbers(tmp_path: Path, status: Status) -> None:
    _, document = answer(make_strong(), tmp_path, FakeLauncher(share_evenly, failures={"ddp-2": status}))
    main, time, laws = find_tables(document)
    assert [row[0].value for row in main.rows] == LABELS
    failed = find_row(main, "ddp × 2")
    assert failed["step_seconds"].value == status.replace("_", " ")
    assert {cell.value for key, cell in failed.items() if key not in ("run", "step_seconds")} == {None}
    assert find_row(main, "ddp × 4")["efficiency"].value == pytest.approx(1.0)
    assert "ddp × 2" not in [row[0].value for row in time.rows]
    assert [row[0].value for row in laws.rows] == [1, 4]
    caution = find_caution(document, "failed", "ddp × 2")
    assert (caution.severity, caution.values["status"]) == ("failure", status)
    assert shorten(document).failures == (caution,), "a row that did not run heads the answer"


def fail_in_round(number: int, configuration: str = "ddp-2") -> AlteredLauncher:
    def change(result: TrialResult) -> TrialResult:
        if result.trial.configuration == configuration and result.trial.round == number:
            return TrialResult(trial=result.trial, status=Status.CRASHED, reason="rank 1 was killed by SIGKILL")
        return result

    return AlteredLauncher(change)


def test_a_configuration_that_fails_once_is_answered_from_its_other_rounds(tmp_path: Path) -> None:
    _, document = answer(make_strong(), tmp_path, fail_in_round(2))
    assert find_row(document.tables[0], "ddp × 2")["efficiency"].value == pytest.approx(1.0)
    caution = find_caution(document, "failed", "ddp × 2")
    assert caution.values == {"status": "crashed", "failed": 1, "rounds": 6}
    assert "rank 1 was killed by SIGKILL" in caution.message
    assert "trials/ddp-2-r2" in caution.next_step


def test_without_the_plain_loop_one_rank_is_the_reference(tmp_path: Path) -> None:
    failures = {"single-1": Status.INVALID}
    _, document = answer(make_strong(), tmp_path, FakeLauncher(share_evenly, failures=failures))
    main = document.tables[0]
    assert find_row(main, "ddp × 1")["speedup"] == Cell(value=1.0)
    assert find_row(main, "ddp × 4")["speedup"].value == pytest.approx(4.0)
    assert any("ddp × 1" in note for note in main.notes)
    assert "control" not in list_kinds(document)


@pytest.mark.parametrize(("status", "code"), [(Status.INVALID, 1), (Status.CRASHED, 1), (Status.TIMED_OUT, 124)])
def test_when_every_trial_fails_the_first_failure_is_the_error(tmp_path: Path, status: Status, code: int) -> None:
    names = ("single-1", "control", "ddp-1", "ddp-2", "ddp-4")
    with pytest.raises(
        NothingMeasured, match=f"no trial completed; single-1 of --workload mlp was {status.words}"
    ) as caught:
        answer(make_strong(), tmp_path, FakeLauncher(share_evenly, failures=dict.fromkeys(names, status)))
    assert caught.value.exit_code == code
    (run,) = tmp_path.iterdir()
    results, damaged = RunStore.open(run).results()
    assert len(results) == 5 * SAMPLING.rounds
    assert damaged == []
    assert (run / "document.json").is_file()


def test_the_error_of_a_failed_run_carries_the_users_own_frames(tmp_path: Path) -> None:
    def change(result: TrialResult) -> TrialResult:
        return TrialResult(trial=result.trial, status=Status.INVALID, reason="KeyError: 'x'", traceback="own.py line 3")

    with pytest.raises(NothingMeasured) as caught:
        answer(make_strong(), tmp_path, AlteredLauncher(change))
    assert caught.value.__notes__ == ["own.py line 3"]


def test_oversubscribed_rows_are_marked_and_left_out_of_the_laws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_machine(monkeypatch, 2)

    def crowd(trial: Trial) -> float:
        return obey_amdahl(0.2)(trial) if trial.num_ranks <= 2 else 5.0

    _, document = answer(make_strong(), tmp_path, crowd)
    main, time, laws = find_tables(document)
    for table in (main, time):
        marks = {row[0].value: row[0].mark for row in table.rows}
        assert marks == dict.fromkeys(LABELS[:4], "") | {"ddp × 4": "†"}
    assert any(note.startswith("† oversubscribed") for note in main.notes)
    assert [row[0].value for row in laws.rows] == [1, 2]
    assert find_row(laws, 2)["law"].value == pytest.approx(1 / 0.6)
    assert any("oversubscribed rows are left out" in note for note in laws.notes)
    assert any("two sizes determine the Amdahl fit exactly" in note for note in laws.notes)
    assert find_finding(document, "speedup", "ddp × 2").weight == MAIN
    assert find_finding(document, "speedup", "ddp × 4").weight == ASIDE
    assert "oversubscribed-rows" in list_kinds(document)


def test_two_sizes_are_too_few_for_the_universal_law(tmp_path: Path) -> None:
    _, document = answer(make_strong(ranks=(1, 2)), tmp_path)
    laws = find_tables(document)[2]
    assert find_row(laws, 2)["usl"].value is None
    assert any("needs three sizes" in note for note in laws.notes)


def test_a_single_number_of_ranks_has_no_law(tmp_path: Path) -> None:
    _, document = answer(make_strong(ranks=(1,)), tmp_path)
    assert len(document.tables) == 2
    assert "amdahl" not in list_kinds(document)


def test_a_peak_beyond_what_was_measured_is_called_an_extrapolation(tmp_path: Path) -> None:
    def cohere(trial: Trial) -> float:
        n = trial.num_ranks
        return ONE_RANK_SECONDS / n * (1 + 0.02 * (n - 1) + 0.005 * n * (n - 1))

    _, document = answer(make_strong(), tmp_path, cohere)
    peak = math.sqrt(0.98 / 0.005)
    assert find_finding(document, "usl").values["peak_ranks"] == pytest.approx(peak)
    assert find_caution(document, "extrapolated").values == {"ranks": pytest.approx(peak), "largest_ranks": 4}


def test_a_loss_that_is_not_finite_marks_its_row(tmp_path: Path) -> None:
    def change(result: TrialResult) -> TrialResult:
        return replace_losses(result, math.nan) if result.trial.configuration == "ddp-2" else result

    _, document = answer(make_strong(), tmp_path, AlteredLauncher(change))
    main, time, _ = find_tables(document)
    assert find_row(main, "ddp × 2")["run"].mark == find_row(time, "ddp × 2")["run"].mark == "‡"
    assert find_row(main, "ddp × 4")["run"].mark == ""
    assert find_row(main, "ddp × 2")["efficiency"].value == pytest.approx(1.0)
    assert any(note.startswith("‡ its loss became NaN") for note in main.notes)
    assert find_caution(document, "non-finite", "ddp × 2").values == {"step": 0, "round": 1, "rank": 0}


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.0, "no difference"), (1.01, "no difference"), (1.2, "slower"), (0.8, "faster")]
)
def test_the_control_says_whether_the_machine_can_be_trusted(tmp_path: Path, factor: float, verdict: str) -> None:
    def seconds(trial: Trial) -> float:
        return share_evenly(trial) * (factor if trial.configuration == "control" else 1.0)

    _, document = answer(make_strong(), tmp_path, seconds)
    values = find_finding(document, "control").values
    assert (values["ratio"].value, values["verdict"]) == (pytest.approx(factor), verdict)
    assert ("control-failed" in list_kinds(document)) is (verdict != "no difference")


def test_what_the_strategy_costs_alone_is_told_apart_from_scaling(tmp_path: Path) -> None:
    def seconds(trial: Trial) -> float:
        return share_evenly(trial) * (1.1 if trial.strategy == "ddp" else 1.0)

    _, document = answer(make_strong(), tmp_path, seconds)
    row = find_row(document.tables[0], "ddp × 4")
    assert row["efficiency"].value == pytest.approx(1 / 1.1)
    assert row["efficiency_over_one_rank"].value == pytest.approx(1.0)
    assert find_finding(document, "ddp-overhead").values["ratio"].value == pytest.approx(1.1)
    assert find_finding(document, "linearity").values["verdict"] == "no difference"


def test_the_warm_up_of_the_launches_is_found_and_dropped(tmp_path: Path) -> None:
    _, document = answer(make_strong(), tmp_path)
    assert "6 launches × 12 steps, first 3 dropped as warm-up (auto)" in document.setting


def test_a_warm_up_that_is_given_is_used(tmp_path: Path) -> None:
    _, document = answer(make_strong(sampling=replace(SAMPLING, warmup=5)), tmp_path)
    assert "first 5 dropped as warm-up" in document.setting
    assert find_row(document.tables[0], "ddp × 2")["step_seconds"].value == pytest.approx(0.2)


def test_without_comm_free_steps_nothing_is_said_of_the_exchange(tmp_path: Path) -> None:
    sampling = Sampling(rounds=3, steps=12, phase_steps=0, comm_free_steps=0)
    _, document = answer(make_strong(sampling=sampling), tmp_path, obey_amdahl(0.2))
    main, time, _ = find_tables(document)
    assert find_row(main, "ddp × 4")["exposed_share"].value is None
    assert find_row(time, "ddp × 4")["forward_seconds"].value is None
    assert find_row(time, "ddp × 4")["excess_seconds"].value is not None
    assert not {"exposed-communication", "scaling-loss"} & list_kinds(document)


def test_one_round_is_answered_without_intervals_and_with_a_warning(tmp_path: Path) -> None:
    _, document = answer(make_strong(sampling=replace(SAMPLING, rounds=1)), tmp_path)
    row = find_row(document.tables[0], "ddp × 4")
    assert row["speedup"].value == pytest.approx(4.0)
    assert row["speedup"].low is None
    assert find_caution(document, "few-launches").values == {"launches": 1}
    assert find_finding(document, "linearity").values["verdict"] == "unresolved"


def test_the_document_on_disk_is_the_one_that_was_given_back(tmp_path: Path) -> None:
    launcher = FakeLauncher(obey_amdahl(0.1), noise=0.05, failures={"ddp-2": Status.CRASHED})
    store, document = answer(make_strong(), tmp_path, launcher)
    text = store.read_document_text()
    assert text is not None
    assert text == render_json(document)
    assert read_document(text) == document


def test_the_raw_samples_of_every_launch_are_kept(tmp_path: Path) -> None:
    store, _ = answer(make_strong(), tmp_path)
    results, _ = store.results()
    assert len(results) == 5 * SAMPLING.rounds
    for result in results:
        assert len(result.step_seconds(StepKind.CLEAN)) == SAMPLING.steps


def test_a_control_that_differs_is_the_first_warning(tmp_path: Path) -> None:
    def favour_control(trial: Trial) -> float:
        return (0.8 if trial.configuration == "control" else 1.0) / trial.num_ranks

    _, document = answer(make_strong(), tmp_path, FakeLauncher(favour_control))
    assert document.cautions[0].kind == "control-failed"


def test_a_few_very_long_steps_are_told_with_the_throughput_they_leave(tmp_path: Path) -> None:
    store, _ = answer(make_strong(), tmp_path)
    results, _ = store.results()

    def slow_down(sample: StepSample) -> StepSample:
        return sample._replace(step_seconds=sample.step_seconds * (9 if sample.step % 4 == 3 else 1))

    slowed = [replace(result, samples=tuple(map(slow_down, result.samples))) for result in results]
    document = make_strong().conclude(slowed)
    assert "plain loop 3.0× (" in find_caution(document, "heavy-tail").message

"""Communication volume, with messages whose bytes are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalelab.errors import UsageError
from scalelab.records.observations import Message, MessageBasis, RankReport, ScriptReport
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.findings import MAIN
from scalelab.runs.experiment import run_study
from scalelab.studies.comm_volume.study import CommVolume
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.script import ScriptSource
from scalelab.studies.shared.study import Sampling
from tests.report.charts.figures import draw, list_values
from tests.studies.answers import AlteredLauncher, find_caution, find_finding, find_row, list_kinds, set_machine
from tests.studies.spreads import JOB, SAMPLING, conclude, make_comm_volume, send
from tests.worker.trials import write_workload

RESNET18 = replace(JOB, workload="resnet18", options={})


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 2)


def send_by_strategy(trial: Trial) -> tuple[Message, ...]:
    """A model of two units, one of them the root, with 400 bytes of parameters."""
    if trial.strategy == "ddp":
        found = [make("all_reduce", "gradients", "backward", 400, 2)]
        if trial.spreading.broadcast_buffers:
            found.insert(0, make("broadcast", "buffers", "forward", 40))
        return tuple(found)
    again = () if trial.strategy == "fsdp-grad-op" else (make("all_gather", "parameters", "backward", 300),)
    return (
        make("all_gather", "parameters", "forward", 400, 2),
        *again,
        make("reduce_scatter", "gradients", "backward", 400, 2),
    )


def make(kind: str, purpose: str, phase: str, payload: int, count: int = 1) -> Message:
    return Message(kind=kind, purpose=purpose, phase=phase, payload_bytes=payload, count=count)


SENT = send(send_by_strategy, unit_bytes=(100, 300), buffer_bytes=40)


def test_resnet18_also_runs_without_buffers_synchronized_and_without_norms() -> None:
    trials = [trial for trial in make_comm_volume(job=RESNET18).plan() if trial.round == 1]
    found = {trial.configuration: trial for trial in trials}
    assert list(found) == [
        "ddp-2", "control", "fsdp-full-2", "fsdp-grad-op-2", "fsdp2-2", "ddp-unsent", "ddp-synced", "ddp-no-norm",
    ]  # fmt: skip
    assert not found["ddp-unsent"].spreading.broadcast_buffers
    assert found["ddp-synced"].spreading.sync_batch_norm
    assert found["ddp-no-norm"].options == {"norm": "none"}
    assert all(trial.global_batch == 16 for trial in trials)


@pytest.mark.parametrize(
    ("job", "fields"),
    [
        (JOB, {}),
        (RESNET18, {"batch_norm": False}),
        (RESNET18, {"strategies": ("fsdp-full",)}),
        (replace(RESNET18, options={"norm": "none"}), {}),
    ],
)
def test_rows_about_batch_norm_are_only_where_they_say_something(job: Job, fields: dict[str, Any]) -> None:
    names = {trial.configuration for trial in make_comm_volume(job=job, **fields).plan()}
    assert not {"ddp-unsent", "ddp-synced", "ddp-no-norm"} & names


def test_counted_bytes_stand_beside_those_of_theory(tmp_path: Path) -> None:
    document = conclude(make_comm_volume(), tmp_path, SENT)
    main, kinds = document.tables
    ddp = find_row(main, "ddp × 2")
    assert (ddp["num_messages"].value, ddp["payload_bytes"].value, ddp["expected_bytes"].value) == (3, 440, 440)
    assert ddp["wire_bytes"].value == 400 + 20
    full, kept = find_row(main, "fsdp-full × 2"), find_row(main, "fsdp-grad-op × 2")
    assert (full["payload_bytes"].value, full["wire_bytes"].value) == (1100, 550)
    assert (kept["payload_bytes"].value, kept["wire_bytes"].value) == (800, 400)
    assert len(kinds.rows) == 2 + 3 + 2 + 3
    gradients = document.findings[0]
    assert (gradients.kind, gradients.weight) == ("gradient-volume", MAIN)
    assert gradients.values == {"payload_bytes": 400, "bytes_per_parameter": 4.0, "messages": 2, "wire_bytes": 400}
    assert "400 bytes of gradients per step (4 for each of 100 parameters) in 2 messages" in gradients.text
    assert find_finding(document, "theory").values == {"rows": 4, "differing": 0}
    assert find_finding(document, "wire-ratio", "fsdp-grad-op × 2").values["ratio"] == pytest.approx(400 / 420)
    buffers = find_finding(document, "buffers")
    assert (buffers.values["payload_bytes"], buffers.values["share"]) == (40, pytest.approx(40 / 440))
    assert any("gloo runs a reduce-scatter" in note for note in main.notes)


def test_bytes_that_theory_does_not_know_are_warned_of(tmp_path: Path) -> None:
    def send_more(trial: Trial) -> tuple[Message, ...]:
        return (*send_by_strategy(trial), make("all_reduce", "", "forward", 8))

    document = conclude(make_comm_volume(strategies=("ddp",)), tmp_path, send(send_more, buffer_bytes=40))
    assert find_finding(document, "theory", "ddp × 2").values == {"rows": 1, "differing": 1}
    assert "all-reduce in forward 8 B instead of 0 B" in find_caution(document, "not-theory", "ddp × 2").message


def test_what_a_script_sends_itself_is_counted_and_no_fault_of_its_strategy(tmp_path: Path) -> None:
    def send_norm(trial: Trial) -> tuple[Message, ...]:
        return (make("all_reduce", "gradients", "backward", 400, 2), make("all_reduce", "", "other", 4))

    def see_script(result: TrialResult) -> TrialResult:
        sent = send(send_norm)(result)
        seen = ScriptReport(num_optimizers=1, num_passes=1, strategy="ddp")
        return replace(sent, ranks=tuple(replace(one, script=seen) for one in sent.ranks))

    job = Job(script=ScriptSource(target="/train.py", arguments=("{batch_per_rank}",)), device="cpu")
    _, document = run_study(make_comm_volume(job=job), runs_dir=tmp_path, launcher=AlteredLauncher(see_script))
    assert "not-theory" not in [one.kind for one in document.cautions]
    theory = find_finding(document, "theory")
    assert theory.values == {"rows": 1, "differing": 0}
    assert (
        theory.text
        == "The messages of 1 configuration match theory to the byte, besides 4 bytes that the script sends itself."
    )


def test_a_message_that_is_missing_is_warned_of(tmp_path: Path) -> None:
    document = conclude(make_comm_volume(strategies=("ddp",)), tmp_path, send(send_by_strategy, buffer_bytes=50))
    assert "broadcast in forward 40 B instead of 50 B" in find_caution(document, "not-theory", "ddp × 2").message


def test_synchronized_batch_norm_is_priced_in_messages(tmp_path: Path) -> None:
    def send_statistics(trial: Trial) -> tuple[Message, ...]:
        if not trial.spreading.sync_batch_norm:
            return send_by_strategy(trial)
        statistics = (
            make("all_gather", "batch norm", "forward", 4 * 2 * 9, 1),
            make("all_reduce", "batch norm", "backward", 4 * 8, 1),
        )
        return (*send_by_strategy(trial), *statistics)

    study = make_comm_volume(job=RESNET18, strategies=("ddp",))
    document = conclude(study, tmp_path, send(send_statistics, buffer_bytes=40))
    synced = find_finding(document, "sync-batch-norm")
    assert synced.values["messages"] == 2
    assert "Synchronized batch norm adds 2 messages, 104 bytes in all" in synced.text
    assert "a step takes as long as with ddp: 1.0" in synced.text
    assert find_finding(document, "no-batch-norm").values["payload_bytes"] == 440


def test_a_model_of_the_users_own_without_buffers_leaves_those_rows_out(tmp_path: Path) -> None:
    job = replace(JOB, workload=write_workload(tmp_path, ""), options={})
    study = make_comm_volume(job=job, strategies=("ddp",))
    document = conclude(study, tmp_path / "runs", send(lambda _: (make("all_reduce", "gradients", "backward", 400),)))
    assert [row[0].value for row in document.tables[0].rows] == ["ddp × 2", "control"]
    assert "not-run" not in list_kinds(document)


def test_a_strategy_that_fails_leaves_the_others_rows_intact(tmp_path: Path) -> None:
    document = conclude(
        make_comm_volume(), tmp_path, SENT, failures={"ddp-2": Status.CRASHED, "control": Status.CRASHED}
    )
    main = document.tables[0]
    assert find_row(main, "ddp × 2")["step_seconds"].value == "crashed"
    assert find_row(main, "fsdp2 × 2")["payload_bytes"].value == 1100


def test_nothing_measured_is_no_answer_and_no_error() -> None:
    document = make_comm_volume().conclude([])
    assert document.tables[0].rows == ()
    assert document.summary == ()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"strategies": ("ddp", "dp")}, "--strategies dp sends no messages"),
        ({"strategies": ()}, "--strategies needs at least one name"),
        ({"ranks": 1}, "--ranks must be"),
        ({"batch_per_rank": 0}, "--batch-size-per-rank must be"),
    ],
)
def test_fields_that_cannot_work_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_comm_volume(**fields)


def test_a_run_read_back_is_the_same_study() -> None:
    assert CommVolume(sampling=Sampling(rounds=2)).sampling.comm_free_steps == 8
    assert CommVolume().sampling.comm_free_steps == SAMPLING.comm_free_steps == 0


def test_messages_are_drawn_beside_theory_and_by_kind(tmp_path: Path) -> None:
    document = conclude(make_comm_volume(), tmp_path, SENT)
    charts = {chart.title: chart for section in document.sections for chart in section.charts}
    payload, kinds = charts["Bytes per step"], charts["Payload per step by kind"]
    assert {value["series"] for value in list_values(payload, "bar")} == {
        "payload, counted", "payload by theory", "on the wire",
    }  # fmt: skip
    assert "all-reduce of gradients" in {value["series"] for value in list_values(kinds, "bar")}
    draw(payload)
    draw(kinds)


def test_a_fake_answer_counts_without_a_clock_and_says_so_everywhere() -> None:
    study = make_comm_volume(job=replace(JOB, device="cuda"), ranks=1024, strategies=("ddp",), fake=True)
    (trial,) = study.plan()
    assert (trial.num_ranks, trial.num_processes, trial.device, trial.is_forecast) == (1024, 1, "cuda", True)
    message = Message(kind="all_reduce", count=2, payload_bytes=400, purpose="gradients", phase="backward")
    basis = MessageBasis(gradient_bytes=400, num_gradients=100)
    rank = RankReport(rank=0, messages=(message,), message_basis=basis, num_parameters=100, num_passes=1)
    document = study.conclude([TrialResult(trial=trial, status=Status.COMPLETED, ranks=(rank,))])
    assert document.title == "Communication volume (fake)"
    assert "fake: nothing was started" in document.setting
    assert document.cautions[0].kind == "fake"
    (table, *_) = document.sections[0].tables
    assert [column.key for column in table.columns][:3] == ["run", "num_messages", "payload_bytes"]
    assert [cell.value for cell in table.rows[0]][1:4] == [2, 400, 400]
    with pytest.raises(UsageError, match="--fake looks for no device"):
        make_comm_volume(job=replace(JOB, device="auto"), fake=True)

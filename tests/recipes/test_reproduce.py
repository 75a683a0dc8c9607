"""A recipe is one run: planned once, resumed, concluded row by row, whatever became of its trials."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import psutil
import pytest

from scalelab.analysis.estimate import Estimate
from scalelab.cli import reproduce as command
from scalelab.cli import resume
from scalelab.cli.measuring import measure_and_report
from scalelab.cli.output import Output
from scalelab.errors import UsageError
from scalelab.launch.fake import FakeLauncher
from scalelab.recipes.feasibility import count_state_bytes, find_lack_of_memory
from scalelab.recipes.recipe import Main, Row, Size
from scalelab.recipes.report import (
    AGREES,
    IMPRECISE,
    OTHER_SETUP,
    ROW,
    Found,
    judge_main,
    merge_cautions,
    say_main,
)
from scalelab.recipes.reproduce import RECIPES, Reproduce
from scalelab.records.settings import Optimization
from scalelab.records.store import RunStore, find_runs
from scalelab.records.trial import Status, Trial
from scalelab.report.document import Document, Section
from scalelab.report.findings import CautionKind, Known, select
from scalelab.runs.experiment import find_failed, run_study, start_run
from scalelab.studies.catalogue import read_study
from scalelab.studies.shared.cautions import FAILED, LOADED_HOST, NOT_SETTLED
from tests.recipes.toys import STRONG, TOY, UNEQUAL, ImpatientLauncher, make_toy, take_turns

UNEQUAL_ROW = "s3.unequal.features-16"


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, TOY.name, TOY)


def run_toy(runs_dir: Path, launcher: FakeLauncher | None = None, *only: str) -> tuple[RunStore, Document]:
    return run_study(make_toy(*only), runs_dir=runs_dir, launcher=launcher or FakeLauncher(take_turns))


def find_section(document: Document, row: str) -> Section:
    (section,) = (section for section in document.sections if section.heading.startswith(f"{row} · "))
    return section


def read_states(document: Document) -> dict[object, object]:
    return {row[0].value: row[-1].value for row in document.tables[1].rows}


def test_trials_are_named_by_row_and_part_and_a_part_that_two_rows_read_is_run_once() -> None:
    names = [trial.name for trial in make_toy().plan()]
    assert len(set(names)) == len(names)
    assert {name.rsplit(".", 1)[0] for name in names} == {"s1.strong", "s3.unequal"}
    assert "s1.strong.ddp-2-r1" in names


def test_every_row_is_in_the_document_with_what_became_of_it(tmp_path: Path) -> None:
    _, document = run_toy(tmp_path)
    assert read_states(document) == {
        "S1": "run", "S2": "read from S1", "S3": "run", "S4": "not run", "S6": "this document",
    }  # fmt: skip
    assert find_section(document, "S4").paragraphs == ("Not run: two nodes are needed.",)
    assert find_section(document, "S1").paragraphs[1] == "3 arms of small"
    rows = {finding.subject: finding.text for finding in select(document.findings, ROW)}
    assert rows == {"S1": "S1: 3 arms of small", "S2": "S2: 3 arms of small", "S3": "S3: 2 arms of small"}


def test_a_row_that_reads_another_shows_its_own_finding_and_not_the_tables_again(tmp_path: Path) -> None:
    _, document = run_toy(tmp_path)
    assert find_section(document, "S1").tables
    assert not find_section(document, "S2").tables


def test_a_row_that_reads_another_runs_alone_too(tmp_path: Path) -> None:
    store, document = run_toy(tmp_path, None, "s2")
    assert all(name.startswith("s1.strong.") for name in store.record.trials)
    assert find_section(document, "S2").tables


def test_checks_are_those_of_the_rows_that_were_asked_for(tmp_path: Path) -> None:
    _, document = run_toy(tmp_path)
    assert [[cell.value for cell in row] for row in document.tables[-1].rows] == [
        ["S1", "yes", "two → 2"], ["S3", "no", "four → 3"],
    ]  # fmt: skip
    _, part = run_toy(tmp_path, None, "S3")
    assert [row[0].value for row in part.tables[-1].rows] == ["S3"]


def test_an_unknown_row_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"S7.*S1, S2, S3"):
        make_toy("S7")
    with pytest.raises(UsageError, match=r"P1, P2.*, P9, P10"):
        Reproduce(recipe="polaris", only=("P11",))


def test_rows_may_be_named_with_commas() -> None:
    assert [row.id for row in make_toy("s1,S3").rows] == ["S1", "S3"]
    assert [row.id for row in make_toy("S1, s3", "S2").rows] == ["S1", "S2", "S3"]


def test_rows_that_cannot_be_run_alone_say_why() -> None:
    with pytest.raises(UsageError, match="S4: two nodes are needed"):
        make_toy("S4").plan()


def test_a_dry_run_says_what_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["scaling", "--device", "cpu", "--dry-run", "--runs-dir", str(tmp_path)]) == 0
    assert "S4 does not run, or only in part: two nodes are needed" in capsys.readouterr().out


def test_a_row_that_measures_nothing_says_so_alone() -> None:
    with pytest.raises(UsageError, match="S6: it measures nothing itself"):
        make_toy("S6").plan()


def test_nothing_measured_is_a_document_too() -> None:
    document = make_toy().conclude([])
    assert read_states(document)["S1"] == "not run yet"
    assert document.summary == ()


def test_a_failing_trial_leaves_the_rest_intact_and_gives_exit_code_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeLauncher(take_turns, failures={"s1.strong.ddp-2": Status.CRASHED})
    store = start_run(make_toy(), tmp_path, ["scalelab"])
    assert measure_and_report(store, make_toy(), fake, Output()) == 3
    text = capsys.readouterr().out
    assert "crashed" in text
    assert "S3: 2 arms of small" in text
    assert {result.trial.configuration for result in find_failed(store, read_study(store))} == {"s1.strong.ddp-2"}


@pytest.mark.parametrize("status", [Status.INVALID, Status.OUT_OF_MEMORY])
def test_a_published_failure_is_a_failure_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: Status
) -> None:
    fake = FakeLauncher(take_turns, failures={UNEQUAL_ROW: status})
    store = start_run(make_toy(), tmp_path, ["scalelab"])
    assert measure_and_report(store, make_toy(), fake, Output()) == 3
    assert status.words in capsys.readouterr().out


def test_a_failure_that_a_study_looks_for_is_no_failure_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(type(UNEQUAL), "expects", lambda _, result: result.status is Status.INVALID, raising=False)
    fake = FakeLauncher(take_turns, failures={UNEQUAL_ROW: Status.INVALID})
    store = start_run(make_toy(), tmp_path, ["scalelab"])
    assert measure_and_report(store, make_toy(), fake, Output()) == 0
    assert "Failed" not in capsys.readouterr().out


def test_an_interrupted_recipe_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["scaling", "--device", "cpu", "--runs-dir", str(tmp_path)]
    launchers = [ImpatientLauncher(4), FakeLauncher(take_turns), FakeLauncher(take_turns), FakeLauncher(take_turns)]
    waiting = iter(launchers)

    def start() -> FakeLauncher:
        launcher = next(waiting)
        launcher.check = lambda: None  # type: ignore[attr-defined]
        return launcher

    monkeypatch.setattr(command, "choose_launcher", lambda *_: start())
    assert command.main(arguments) == 130
    assert command.main(arguments) == 0
    assert "Resuming" in capsys.readouterr().err
    first, second = launchers[0].launched, launchers[1].launched
    assert len(find_runs(tmp_path)) == 1
    assert len(first) == 3
    assert not set(first) & set(second)
    assert len(first) + len(second) == len(make_toy().plan())

    assert command.main(arguments) == 0
    assert len(launchers[2].launched) == len(make_toy().plan()), "a run that is over is not gone on with"
    assert command.main([*arguments, "--only", "S1"]) == 0
    assert len(find_runs(tmp_path)) == 3


def test_resume_goes_on_with_a_recipe_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = start_run(make_toy(), tmp_path, ["scalelab"])
    assert measure_and_report(store, read_study(store), ImpatientLauncher(3), Output()) == 130
    rest = FakeLauncher(take_turns)
    monkeypatch.setattr(resume, "choose_launcher", lambda *_: rest)
    assert resume.main(["last", "--runs-dir", str(tmp_path)]) == 0
    assert len(rest.launched) == len(make_toy().plan()) - 2
    assert "S6" in capsys.readouterr().out


def test_an_interrupted_run_is_found_by_its_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = start_run(make_toy(), tmp_path, ["scalelab"])
    assert measure_and_report(store, read_study(store), ImpatientLauncher(2), Output()) == 130
    capsys.readouterr()
    found = command.find_interrupted(make_toy(), tmp_path)
    assert found is not None
    assert found.path == store.path
    assert command.find_interrupted(make_toy("S1"), tmp_path) is None


def test_an_interrupted_run_is_found_however_its_rows_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = start_run(make_toy("S1", "S3"), tmp_path, ["scalelab"])
    assert measure_and_report(store, read_study(store), ImpatientLauncher(2), Output()) == 130
    capsys.readouterr()
    found = command.find_interrupted(make_toy("s3", "s1", "S3"), tmp_path)
    assert found is not None
    assert found.path == store.path


def test_what_was_measured_elsewhere_is_shown_where_it_could_not_be_run(tmp_path: Path) -> None:
    store, _ = run_toy(tmp_path)
    results, _ = store.results()
    elsewhere = Reproduce(recipe="scaling", device="cuda")
    assert elsewhere.obstacles
    assert read_states(elsewhere.conclude(results))["S1"] == "run"


def test_parts_that_need_a_gpu_say_so_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scalelab.studies.shared.job.find_gpus", tuple)
    document = Reproduce(recipe="scaling", device="cuda").conclude([])
    assert find_section(document, "S1").paragraphs[0].startswith("Not run: ")
    assert "nvidia-smi lists no GPU" in find_section(document, "S1").paragraphs[0]
    assert read_states(document)["S1"] == "not run"


def test_a_row_of_which_a_part_cannot_be_run_is_run_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = Row(id="S1", title="Both", parts={"strong": STRONG, "unequal": UNEQUAL})
    monkeypatch.setitem(RECIPES, TOY.name, replace(TOY, make_rows=lambda _: (both,)))
    lacking = {UNEQUAL.job.workload: "it is too large"}
    monkeypatch.setattr("scalelab.recipes.reproduce.find_obstacle", lambda study: lacking.get(study.job.workload))
    _, document = run_toy(tmp_path)
    assert read_states(document) == {"S1": "run in part"}
    assert find_section(document, "S1").paragraphs[0] == "Incomplete: unequal: it is too large."


def test_advice_names_the_command_that_has_its_flags(tmp_path: Path) -> None:
    _, document = run_toy(tmp_path)
    steps = [caution.next_step for caution in document.cautions if caution.severity == "noise"]
    assert steps
    assert all("scalelab run " in step for step in steps)


def make_found(row: str, kind: CautionKind, subject: str, command: str = "", **values: Known) -> Found:
    caution = kind(subject, f"{subject} is off", "more", **values)
    return Found(row=row, caution=caution, command=command)


def test_warnings_of_one_kind_become_one_that_names_rows_and_configurations() -> None:
    found = [
        make_found("S1", NOT_SETTLED, "ddp × 1", "scalelab run a"),
        make_found("S1", NOT_SETTLED, "ddp × 2", "scalelab run a"),
        make_found("S3", NOT_SETTLED, "dim 8", "scalelab run b"),
        make_found("S3", LOADED_HOST, ""),
    ]
    settled, loaded = merge_cautions(found)
    assert (settled.kind, settled.subject, settled.severity) == ("not-settled", "S1, S3", "noise")
    assert settled.message == "S1, S3: ddp × 1 is off (also S1 ddp × 2, S3 dim 8)"
    assert settled.next_step == "more, with scalelab run and the study of each row"
    assert loaded.subject == "S3"


def test_rows_that_failed_in_different_ways_are_told_apart() -> None:
    found = [make_found("S1", FAILED, "a", status="crashed"), make_found("S2", FAILED, "b", status="invalid")]
    assert [caution.subject for caution in merge_cautions(found)] == ["S1", "S2"]
    assert {caution.severity for caution in merge_cautions(found)} == {"failure"}


def test_advice_after_a_failure_names_the_trial_of_this_run(tmp_path: Path) -> None:
    _, document = run_toy(tmp_path, FakeLauncher(take_turns, failures={"s1.strong.ddp-2": Status.CRASHED}))
    (failed,) = document.failures
    assert failed.subject == "S1"
    assert failed.next_step.endswith("logs: trials/s1.strong.ddp-2-r1")


@pytest.mark.parametrize(
    ("main", "size", "verdict"),
    [
        (None, "small", None),
        (Main("ratio", "speedup", None, 2.0), "small", None),
        (Main("ratio", "speedup", 2.0), "small", None),
        (Main("seconds", "step", 2.0, 2.0), "small", OTHER_SETUP),
        (Main("seconds", "step", 2.0, 2.0), "full", AGREES),
        (Main("count", "bytes", 8, 8, is_ratio=True), "small", AGREES),
        (Main("ratio", "speedup", Estimate(value=1.9, low=1.7, high=2.1), 2.0), "small", AGREES),
        (Main("ratio", "speedup", Estimate(value=1.4, low=0.8, high=2.0), 1.5), "small", IMPRECISE),
        (Main("ratio", "speedup", Estimate(value=1.5, low=1.4, high=1.6), 2.0), "small", "0.750×"),
        (Main("share", "waiting", Estimate(value=0.01, low=-0.02, high=0.04), 0.5), "small", "lower"),
        (Main("ratio", "speedup", Estimate(value=1.2, low=0.4, high=3.0), 1.5), "small", IMPRECISE),
    ],
)
def test_a_verdict_compares_what_belongs_to_no_machine(main: Main | None, size: Size, verdict: str | None) -> None:
    assert judge_main(main, size) == verdict


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        (Estimate(value=0.23, low=-0.22, high=0.52), "23 % (0 % to 52 %)"),
        (Estimate(value=0.23, low=0.03, high=0.52), "23 % (3 % to 52 %)"),
        (Estimate(value=0.23, low=0.2, high=0.26), "23 ± 3 %"),
        (Estimate(value=-0.1, low=-0.3, high=-0.05), "−10 % (−30 % to −5 %)"),
        (None, None),
    ],
)
def test_a_main_number_that_is_hardly_known_has_no_half_width(ours: Estimate | None, words: str | None) -> None:
    assert say_main(Main("share", "communication", ours)) == words


@pytest.mark.parametrize(
    ("strategy", "optimization", "copies"),
    [
        ("single", Optimization(optimizer="sgd"), 2),
        ("single", Optimization(optimizer="sgd", momentum=0.9), 3),
        ("single", Optimization(optimizer="adam"), 4),
        ("fsdp-none", Optimization(optimizer="adam"), 4),
        ("fsdp-full", Optimization(optimizer="adam"), 2),
    ],
)
def test_states_are_counted_by_optimizer_and_sharding(strategy: str, optimization: Optimization, copies: int) -> None:
    trial = Trial(
        configuration="a",
        workload="mlp",
        options={"dim": 1000, "depth": 1},
        strategy=strategy,
        num_ranks=1 if strategy == "single" else 2,
        optimization=optimization,
    )
    assert count_state_bytes(trial) == 1_001_000 * 4 * copies


def test_states_that_do_not_fit_into_the_machine_are_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    large = Trial(
        configuration="a", workload="mlp", options={"dim": 1000, "depth": 1}, strategy="ddp", num_ranks=2, label="wide"
    )
    assert count_state_bytes(large) == 1_001_000 * 4 * 5
    needed = 2 * count_state_bytes(large)
    there = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: there._replace(total=needed))
    assert find_lack_of_memory([large]) is None
    monkeypatch.setattr(psutil, "virtual_memory", lambda: there._replace(total=needed - 1))
    assert "wide holds at least 40.0 MB" in (find_lack_of_memory([large]) or "")


def test_what_fits_is_run_beside_what_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two_ranks = 2 * count_state_bytes(next(trial for trial in STRONG.plan() if trial.num_ranks == 2))
    there = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: there._replace(total=two_ranks - 1))
    store = start_run(make_toy("S1"), tmp_path, ["scalelab"])
    assert measure_and_report(store, read_study(store), FakeLauncher(take_turns), Output()) == 0
    by_ranks = {(result.trial.num_ranks, result.status) for result in store.results()[0]}
    assert by_ranks == {(1, Status.COMPLETED), (2, Status.NOT_RUN)}
    assert "holds at least" in capsys.readouterr().out


def test_on_a_cpu_every_rank_of_full_size_has_a_share_of_the_memory() -> None:
    small, full = (Reproduce(recipe="scaling", size=size, device="cpu").plan() for size in get_args(Size))
    assert {trial.memory_limit_bytes for trial in small} == {None}
    limits = {trial.memory_limit_bytes for trial in full if trial.configuration.startswith("s1.")}
    assert limits == {int(0.8 * psutil.virtual_memory().total / 2)}


def test_repeated_training_runs_of_a_row_take_turns() -> None:
    """Launch by launch, every second one backwards: a machine that gets slower slows all strategies alike."""
    trials = Reproduce(recipe="gpt2", only=("G5",), device="cpu").plan()
    runs = [trial for trial in trials if trial.training_run]
    strategies = [trial.strategy for trial in runs if trial.round == 1]
    assert [trial.round for trial in runs] == sorted(trial.round for trial in runs)
    assert [trial.strategy for trial in runs if trial.round == 2] == strategies[::-1]
    assert {trial.round for trial in runs} == set(range(1, 6))


def test_training_runs_compare_launch_by_launch(tmp_path: Path) -> None:
    """Launches get slower by a half, all strategies alike: totals are wide, their ratio is not."""
    slow = FakeLauncher(lambda trial: 0.01 * trial.batch_per_rank * (1 + 0.1 * trial.round))
    _, document = run_study(Reproduce(recipe="gpt2", only=("G5",), device="cpu"), runs_dir=tmp_path, launcher=slow)
    (found,) = select(document.findings, "row")
    speedup = found.values["ours"]
    assert isinstance(speedup, Estimate)
    assert speedup.value == pytest.approx(2, rel=0.01)
    assert speedup.half_width == pytest.approx(0, abs=0.02)

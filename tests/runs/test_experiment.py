"""A run from beginning to end: measured, interrupted, resumed, and concluded from whatever there is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from scalelab.errors import DamagedRun, NothingMeasured, RunBusy, UnknownName, UsageError
from scalelab.launch.fake import FakeLauncher
from scalelab.records.observations import RankReport
from scalelab.records.store import RunStore
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.document import Document, read_document
from scalelab.runs.experiment import describe_environment, execute_run, look_at_hosts, run_study, start_run
from scalelab.runs.scheduler import Event, TrialStarted, ignore_event
from scalelab.studies.catalogue import derive_document, read_study
from scalelab.studies.shared.job import Job
from tests.records import make_environment, make_record, make_result, make_store
from tests.studies.answers import SAMPLING, find_row, make_strong, set_machine, share_evenly, warn_all

STUDY = make_strong(ranks=(1, 2))
NUM_TRIALS = 4 * SAMPLING.rounds


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 16)


class StoppingLauncher(FakeLauncher):
    """Is interrupted after some trials, and remembers whether it was closed."""

    def __init__(self, num_trials: int = NUM_TRIALS) -> None:
        super().__init__(share_evenly)
        self.num_trials = num_trials
        self.is_closed = False

    def launch(self, trial: Trial, directory: Path) -> TrialResult:
        if len(self.launched) == self.num_trials:
            raise KeyboardInterrupt
        return super().launch(trial, directory)

    def close(self) -> None:
        self.is_closed = True


def interrupt(runs_dir: Path, num_trials: int) -> RunStore:
    """A run that was stopped after some of its trials."""
    store = start_run(STUDY, runs_dir, ["scalelab", "run", "strong-scaling"])
    launcher = StoppingLauncher(num_trials)
    with pytest.raises(KeyboardInterrupt):
        execute_run(store, read_study(store), launcher, ignore_event)
    assert launcher.is_closed
    return store


def drop_environment(document: Document) -> Document:
    return replace(document, environment=())


def test_a_run_without_results_is_concluded_without_rows(tmp_path: Path) -> None:
    store = start_run(STUDY, tmp_path, [])
    document = derive_document(store)
    assert document.tables[0].rows == ()
    assert document.summary == ()
    assert f"{NUM_TRIALS} of {NUM_TRIALS} trials have not run yet -> scalelab resume {store.name}" in warn_all(document)


def test_a_run_that_was_stopped_is_concluded_from_what_it_has(tmp_path: Path) -> None:
    # One whole round of four configurations, and the first of the second, which runs backwards.
    document = derive_document(interrupt(tmp_path, 5))
    main = document.tables[0]
    assert [row[0].value for row in main.rows] == ["plain loop", "control", "ddp × 1", "ddp × 2"]
    assert find_row(main, "ddp × 2")["speedup"].value == pytest.approx(2.0)
    assert f"{NUM_TRIALS - 5} of {NUM_TRIALS} trials have not run yet" in document.cautions[0].message


def test_a_run_that_was_stopped_in_its_first_round_has_rows_for_what_ran(tmp_path: Path) -> None:
    document = derive_document(interrupt(tmp_path, 1))
    assert [row[0].value for row in document.tables[0].rows] == ["plain loop"]


def test_a_stopped_run_is_free_and_has_no_document_yet(tmp_path: Path) -> None:
    store = interrupt(tmp_path, 3)
    assert not store.is_running()
    assert store.read_document_text() is None


def test_resuming_repeats_nothing_and_gives_the_same_answer(tmp_path: Path) -> None:
    store = interrupt(tmp_path / "a", 7)
    launcher = StoppingLauncher()
    resumed = execute_run(RunStore.open(store.path), read_study(store), launcher, ignore_event)
    assert launcher.launched == list(store.record.trials[7:])
    _, whole = run_study(STUDY, runs_dir=tmp_path / "b", launcher=StoppingLauncher())
    assert drop_environment(resumed) == drop_environment(whole)
    text = store.read_document_text()
    assert text is not None
    assert read_document(text) == resumed


def test_resuming_a_complete_run_launches_nothing(tmp_path: Path) -> None:
    store, document = run_study(STUDY, runs_dir=tmp_path, launcher=StoppingLauncher())
    launcher = StoppingLauncher(0)
    assert execute_run(store, read_study(store), launcher, ignore_event) == document


def test_a_result_that_was_damaged_is_a_caution_and_resuming_measures_it_again(tmp_path: Path) -> None:
    store, whole = run_study(STUDY, runs_dir=tmp_path, launcher=StoppingLauncher())
    file = store.trial_directory("ddp-2-r3") / "samples.csv"
    file.write_text("cut")
    damaged = derive_document(store)
    assert str(file) in damaged.cautions[0].message
    assert damaged.cautions[0].next_step == f"scalelab resume {store.name} measures it again"
    assert "have not run yet" not in warn_all(damaged)
    assert find_row(damaged.tables[0], "ddp × 2")["speedup"].value == pytest.approx(2.0)
    launcher = StoppingLauncher()
    assert execute_run(store, read_study(store), launcher, ignore_event) == whole
    assert launcher.launched == ["ddp-2-r3"]


def test_a_run_that_another_process_executes_is_left_alone(tmp_path: Path) -> None:
    store = start_run(STUDY, tmp_path, [])
    launcher = StoppingLauncher()
    with store.claim(), pytest.raises(RunBusy):
        execute_run(RunStore.open(store.path), read_study(store), launcher, ignore_event)
    assert launcher.launched == []


def test_the_listener_is_told_of_the_run(tmp_path: Path) -> None:
    heard: list[Event] = []
    run_study(STUDY, runs_dir=tmp_path, launcher=StoppingLauncher(), listener=heard.append)
    assert sum(isinstance(event, TrialStarted) for event in heard) == NUM_TRIALS
    assert len(heard) == 2 * NUM_TRIALS


def test_a_study_that_cannot_work_makes_no_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        start_run(make_strong(job=Job(workload="mlp", options={"dim": 0}, device="cpu")), tmp_path / "runs", [])
    assert not (tmp_path / "runs").exists()


def test_a_run_is_concluded_where_its_workload_is_not(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("def build(batch_size): ...\n")
    study = make_strong(job=Job(workload=str(own), device="cpu"))
    store, document = run_study(study, runs_dir=tmp_path / "runs", launcher=FakeLauncher(share_evenly))
    own.unlink()
    assert derive_document(RunStore.open(store.path)) == document
    assert document.setting.startswith("own.py:build · ddp")


def test_a_failed_run_of_an_own_workload_is_named_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def build(batch_size): ...\n")
    study = make_strong(ranks=(1,), job=Job(workload=f"{tmp_path}/own.py:build", device="cpu"))
    failures = dict.fromkeys(("single-1", "control", "ddp-1"), Status.NOT_RUN)
    with pytest.raises(
        NothingMeasured,
        match=r"^no trial completed; single-1 of --workload own\.py:build was not run: simulated by the fake",
    ):
        run_study(study, runs_dir=tmp_path / "runs", launcher=FakeLauncher(share_evenly, failures=failures))


def test_fields_that_no_study_has_written_are_damage(tmp_path: Path) -> None:
    for fields in ({"ranks": "all"}, {"ranks": [0]}, {"sampling": {"steps": "many"}}):
        store = make_store(tmp_path, fields=fields)
        with pytest.raises(DamagedRun, match=r"run\.json is damaged"):
            derive_document(store)


def test_a_study_that_this_version_does_not_have_is_named(tmp_path: Path) -> None:
    store = make_store(tmp_path, study="weather")
    with pytest.raises(UnknownName, match=r"unknown study 'weather'.*Known: .*metered, .*strong-scaling, .*train"):
        derive_document(store)


def test_a_run_without_its_environment_names_the_file(tmp_path: Path) -> None:
    store, _ = run_study(STUDY, runs_dir=tmp_path, launcher=StoppingLauncher())
    (store.path / "environment.json").unlink()
    with pytest.raises(DamagedRun, match=r"environment\.json is missing"):
        derive_document(store)


def test_the_environment_is_told_in_words(tmp_path: Path) -> None:
    store = make_store(tmp_path, command=["/usr/bin/scalelab", "run", "strong-scaling", "--ranks", "1"])
    rows = dict(describe_environment(make_environment(), store))
    assert rows["run"] == store.name
    assert rows["command"] == "scalelab run strong-scaling --ranks 1"
    assert rows["measured"] == store.record.created_at[:19].replace("T", " ") + " UTC"
    assert rows["host"] == "node1, Linux 6.1 x86_64"
    assert rows["processor"] == "Xeon, 4 of 8 cores usable"
    assert rows["memory"] == "16 GB"
    assert rows["GPUs"] == "H100 (80 GB)"
    assert rows["load before"] == "0.25"
    assert rows["git"] == "0123456789ab with uncommitted changes"
    assert rows["OMP_NUM_THREADS"] == "1"


def test_what_is_unknown_of_the_environment_is_a_dash(tmp_path: Path) -> None:
    unknown = make_environment(
        torch=None, processor=None, gpus=(), load_average=None, git_commit=None, git_is_dirty=None, variables={}
    )
    rows = dict(describe_environment(unknown, make_store(tmp_path)))
    assert rows["processor"] == "–, 4 of 8 cores usable"
    assert rows["GPUs"] == "none"
    assert [rows[name] for name in ("command", "load before", "torch", "git")] == ["–"] * 4


def test_the_environment_of_a_run_is_in_its_document(tmp_path: Path) -> None:
    store, document = run_study(STUDY, runs_dir=tmp_path, launcher=StoppingLauncher())
    assert document.environment == describe_environment(store.environment(), store)
    stored = json.loads((store.path / "run.json").read_text())
    assert stored["study"] == "strong-scaling"
    assert stored["fields"]["ranks"] == [1, 2]


def test_a_run_whose_ranks_were_on_other_nodes_than_the_described_one_says_so() -> None:
    ranks = tuple(RankReport(rank=rank, host=f"nid00{rank}") for rank in range(3))
    by_srun = [make_result(make_record(launcher="slurm"), ranks=ranks)]
    (caution,) = look_at_hosts(by_srun, make_environment(host="login1"))
    assert (caution.kind, caution.values) == ("other-host", {"num_hosts": 3})
    assert "nid000 and 2 more" in caution.message
    assert caution.message.endswith(" are those of login1")
    assert not list(look_at_hosts(by_srun, make_environment(host="nid002")))
    here = [make_result(make_record(), ranks=ranks)]
    assert not list(look_at_hosts(here, make_environment(host="login1"))), "emulated hosts are this machine"

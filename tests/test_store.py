"""The directory of a run: what is complete, what is damaged, whose it is, and how it is found again."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings

from scalelab.errors import DamagedRun, NotWritable, RunBusy, StoreError, UnknownName, UsageError
from scalelab.records import running as running_module
from scalelab.records import store as store_module
from scalelab.records.files import SCHEMA_VERSION, write_json
from scalelab.records.running import find_holder
from scalelab.records.store import RunStore, find_runs, find_workload_name, has_failed, open_run
from scalelab.records.trial import Status, StepSample, TrialResult, not_run, with_samples
from tests.records import draw_results, draw_samples, make_environment, make_record, make_result, make_store


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def save_all(store: RunStore) -> None:
    for trial in store.trials():
        store.save_result(make_result(trial))


def test_a_run_opened_again_is_the_one_that_was_made(tmp_path: Path) -> None:
    made = make_store(tmp_path / "runs", command=["scalelab", "run", "x\udc80"], fields={"ranks": [1, 2]})
    opened = RunStore.open(made.path)
    assert opened.record == made.record
    assert opened.record.command == ("scalelab", "run", "x\udc80")
    assert opened.record.fields == {"ranks": [1, 2]}
    assert opened.trials() == tuple(make_record(round=number) for number in (1, 2, 3))
    assert opened.environment() == make_environment()
    assert opened.name.endswith("-strong-scaling")


def test_a_study_without_trials_makes_no_directory(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="'strong-scaling' planned no trial"):
        make_store(tmp_path / "runs", trials=[])
    assert list(tmp_path.iterdir()) == []


def test_a_runs_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(NotWritable, match="choose another --runs-dir"):
        make_store(tmp_path / "runs")


def test_a_result_read_back_is_the_one_that_was_saved(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    result = make_result(store.trials()[0], wall_seconds=1 / 3, load_before=0.1, reason="half \ud800")
    store.save_result(result)
    assert RunStore.open(store.path).result(result.trial.name) == result


@given(draw_results(), draw_samples())
@settings(deadline=None, max_examples=30)
def test_any_result_survives_the_disk(
    tmp_path_factory: pytest.TempPathFactory, result: TrialResult, sample: StepSample
) -> None:
    store = RunStore(tmp_path_factory.getbasetemp() / "any-result", None)  # type: ignore[arg-type]
    full = with_samples(result, [sample])
    store.save_result(full)
    assert repr(store.result(result.trial.name)) == repr(full)


def test_a_trial_is_complete_only_with_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path)
    first, second, _ = store.trials()
    store.save_result(make_result(first))

    def die(path: Path, data: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "write_json", die)
        with pytest.raises(KeyboardInterrupt):
            store.save_result(make_result(second))
    assert (store.trial_directory(second.name) / "samples.csv").is_file()
    again = RunStore.open(store.path)
    assert [again.has_result(name) for name in again.record.trials] == [True, False, False]
    results, damaged = again.results()
    assert [result.trial for result in results] == [first]
    assert damaged == []
    again.save_result(make_result(second))
    assert again.result(second.name) == make_result(second)


def test_results_come_in_the_order_of_the_plan(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    for trial in reversed(store.trials()):
        store.save_result(not_run(trial, "no reason"))
    results, _ = store.results()
    assert [result.trial.round for result in results] == [1, 2, 3]
    assert {result.status for result in results} == {Status.NOT_RUN}


def test_runs_that_start_in_the_same_second_have_directories_of_their_own(tmp_path: Path) -> None:
    stores = [make_store(tmp_path, trials=[make_record(seed=seed)]) for seed in range(3)]
    assert len({store.path for store in stores}) == 3
    assert [RunStore.open(store.path).trials()[0].seed for store in stores] == [0, 1, 2]


def test_threads_that_start_runs_at_once_never_share_a_directory(tmp_path: Path) -> None:
    barrier, stores = threading.Barrier(8), []

    def start(seed: int) -> None:
        barrier.wait()
        stores.append((seed, make_store(tmp_path, trials=[make_record(seed=seed)])))

    threads = [threading.Thread(target=start, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({store.path for _, store in stores}) == 8
    assert all(RunStore.open(store.path).trials()[0].seed == seed for seed, store in stores)


def run_at_once(program: str, arguments: list[list[str]]) -> list[str]:
    """What each process printed; all have loaded everything before the first goes on, and end when all are done."""
    preamble = (
        "import sys\nfrom pathlib import Path\nfrom scalelab.errors import RunBusy\n"
        "from scalelab.records.store import *\nfrom tests.records import *\n"
    )
    ready = "print('ready', flush=True)\nsys.stdin.readline()\n"
    command = [sys.executable, "-c", preamble + ready + program]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    root = Path(__file__).parent.parent
    children = [subprocess.Popen([*command, *own], cwd=root, **pipes) for own in arguments]
    try:
        for child in children:
            assert child.stdout.readline() == "ready\n"
        for child in children:
            child.stdin.write("go\n")
            child.stdin.flush()
        answers = [child.stdout.readline().strip() for child in children]
        for child in children:
            child.communicate("end\n", timeout=60)
        assert [child.returncode for child in children] == [0] * len(children)
        return answers
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_processes_that_start_runs_at_once_never_share_a_directory(tmp_path: Path) -> None:
    program = """
stores = [make_store(Path(sys.argv[1]), trials=[make_record(seed=int(sys.argv[2]))]) for _ in range(5)]
print(*(store.name for store in stores), flush=True)
"""
    answers = run_at_once(program, [[str(tmp_path), str(seed)] for seed in range(4)])
    names = [answer.split() for answer in answers]
    assert len({name for own in names for name in own}) == 20
    for seed, own in enumerate(names):
        assert [RunStore.open(tmp_path / name).trials()[0].seed for name in own] == [seed] * 5
    assert len(find_runs(tmp_path)) == 20


DAMAGES = {"cut": b'{"study": "stro', "empty": b"", "other": b"[]", "binary": b"\xff\xfe\x00\x01", "hollow": b"{}"}


@pytest.mark.parametrize("content", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_run_json_is_named(tmp_path: Path, content: bytes) -> None:
    path = make_store(tmp_path).path
    (path / "run.json").write_bytes(content)
    with pytest.raises(DamagedRun, match=r"run\.json"):
        RunStore.open(path)


@pytest.mark.parametrize("content", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_environment_json_is_named(tmp_path: Path, content: bytes) -> None:
    store = make_store(tmp_path)
    (store.path / "environment.json").write_bytes(content)
    with pytest.raises(DamagedRun, match=r"environment\.json"):
        store.environment()


@pytest.mark.parametrize("content", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_trial_json_is_named(tmp_path: Path, content: bytes) -> None:
    store = make_store(tmp_path)
    (store.trial_directory("single-1-r2") / "trial.json").write_bytes(content)
    with pytest.raises(DamagedRun, match=r"single-1-r2/trial\.json"):
        store.trials()


def test_a_trial_json_whose_values_cannot_be_is_damage_and_no_usage_error(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    edit_json(store.trial_directory("single-1-r2") / "trial.json", num_ranks=0)
    with pytest.raises(DamagedRun, match=r"single-1-r2/trial\.json is damaged: .*must be at least 1, got 0"):
        store.trials()


@pytest.mark.parametrize("file", ["result.json", "samples.csv"])
@pytest.mark.parametrize("content", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_result_is_named_and_the_others_are_kept(tmp_path: Path, file: str, content: bytes) -> None:
    store = make_store(tmp_path)
    save_all(store)
    (store.trial_directory("single-1-r2") / file).write_bytes(content)
    results, damaged = store.results()
    assert [result.trial.round for result in results] == [1, 3]
    assert len(damaged) == 1
    assert f"single-1-r2/{file}" in str(damaged[0])


def test_a_result_whose_samples_are_gone_is_damaged(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    save_all(store)
    (store.trial_directory("single-1-r1") / "samples.csv").unlink()
    results, (error,) = store.results()
    assert len(results) == 2
    assert "samples.csv cannot be read" in str(error)


def test_a_directory_without_run_json_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"is not a run: no run\.json"):
        RunStore.open(tmp_path)


def test_a_run_of_a_newer_version_asks_for_an_upgrade(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    save_all(store)
    newer = SCHEMA_VERSION + 1
    edit_json(store.trial_directory("single-1-r1") / "result.json", schema_version=newer)
    with pytest.raises(DamagedRun, match=rf"result\.json has schema {newer}.*upgrade scalelab"):
        store.result("single-1-r1")
    edit_json(store.path / "run.json", schema_version=newer)
    with pytest.raises(DamagedRun, match=rf"run\.json has schema {newer}.*upgrade scalelab"):
        RunStore.open(store.path)


def test_a_result_set_aside_is_kept_and_the_trial_has_none(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    save_all(store)
    file = store.trial_directory("single-1-r2") / "result.json"
    file.write_text("damaged")
    store.set_aside("single-1-r2")
    assert not store.has_result("single-1-r2")
    assert (file.parent / "result.json.damaged").read_text() == "damaged"


def test_the_document_is_kept_as_it_was_written(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    assert store.read_document_text() is None
    store.save_document("± – 漢\n")
    assert store.read_document_text() == "± – 漢\n"
    (store.path / "document.json").write_bytes(b"\xff")
    with pytest.raises(DamagedRun, match=r"document\.json cannot be read"):
        store.read_document_text()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Another living process."""
    with subprocess.Popen(["sleep", "600"]) as child:
        yield child
        child.kill()


def mark(store: RunStore, pid: int, **changes: Any) -> Path:
    """The marker of the process that has this number now."""
    holder = {"pid": pid, "host": socket.gethostname(), "started": psutil.Process(pid).create_time()} | changes
    marker = store.path / "running.json"
    marker.write_text(json.dumps(holder))
    return marker


def test_a_run_is_held_for_as_long_as_it_is_executed(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    with store.claim():
        assert store.is_running()
        holder = find_holder(store.path / "running.json")
        assert holder is not None
        assert holder["pid"] == os.getpid()
        with pytest.raises(RunBusy, match=f"process {os.getpid()}"), RunStore.open(store.path).claim():
            pass
        assert store.is_running()
    assert not store.is_running()
    names = sorted(entry.name for entry in store.path.iterdir())
    assert names == ["environment.json", "origin.json", "run.json", "trials"]


def test_a_run_is_free_again_after_an_error(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    with pytest.raises(KeyboardInterrupt), store.claim():
        raise KeyboardInterrupt
    assert not store.is_running()


def test_a_run_that_a_living_process_holds_is_busy(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    store = make_store(tmp_path)
    marker = mark(store, sleeper.pid)
    before = marker.read_text()
    with pytest.raises(
        RunBusy, match=rf"process {sleeper.pid} on .*: wait for it, or stop it and remove .*running\.json"
    ):
        store.claim().__enter__()
    assert marker.read_text() == before


def test_the_marker_of_a_dead_process_is_taken_over(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    store = make_store(tmp_path)
    marker = mark(store, sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    assert not store.is_running()
    with store.claim():
        assert json.loads(marker.read_text())["pid"] == os.getpid()
    assert not marker.exists()


def test_a_process_that_got_the_number_of_a_dead_one_is_not_taken_for_it(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    store = make_store(tmp_path)
    mark(store, sleeper.pid, started=psutil.Process(sleeper.pid).create_time() - 3600)
    with store.claim():
        assert store.is_running()


def test_a_process_on_another_host_counts_as_living(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    mark(store, os.getpid(), host="elsewhere", started=0.0)
    with pytest.raises(RunBusy, match=f"process {os.getpid()} on elsewhere"):
        store.claim().__enter__()


@pytest.mark.parametrize("content", ["", "{", "[]", "12", "{}", '{"host": "elsewhere"}', '{"pid": "x"}', "\ufffd"])
def test_a_damaged_marker_holds_nothing(tmp_path: Path, content: str) -> None:
    store = make_store(tmp_path)
    (store.path / "running.json").write_text(content)
    assert not store.is_running()
    with store.claim():
        assert store.is_running()
    assert not (store.path / "running.json").exists()


def test_a_process_that_takes_the_run_while_another_looks_at_a_stale_marker_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: subprocess.Popen[bytes]
) -> None:
    store = make_store(tmp_path)
    marker = store.path / "running.json"
    marker.write_text("stale")
    looks: list[Any] = []

    def look_and_be_overtaken(path: Path) -> dict[str, Any] | None:
        looks.append(find_holder(path))
        if len(looks) == 1:
            mark(store, sleeper.pid)
        return looks[-1]

    monkeypatch.setattr(running_module, "find_holder", look_and_be_overtaken)
    with pytest.raises(RunBusy, match="another process just claimed run"):
        store.claim().__enter__()
    assert looks[0] is None
    assert json.loads(marker.read_text())["pid"] == sleeper.pid
    assert len(list(store.path.iterdir())) == 5


def test_a_takeover_under_way_is_not_disturbed(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    (store.path / "running.json").write_text("stale")
    ticket = store.path / "running.takeover"
    ticket.touch()
    with pytest.raises(RunBusy, match=r"wait for it, or remove .*running\.takeover"):
        store.claim().__enter__()
    assert ticket.exists()


@pytest.mark.parametrize("is_stale", [False, True])
def test_of_processes_that_want_a_run_at_once_one_gets_it(tmp_path: Path, is_stale: bool) -> None:
    store = make_store(tmp_path)
    if is_stale:
        mark(store, os.getpid(), started=0.0)
    program = """
try:
    with RunStore.open(Path(sys.argv[1])).claim():
        print("mine", flush=True)
        sys.stdin.readline()
except RunBusy:
    print("busy", flush=True)
"""
    answers = run_at_once(program, [[str(store.path)]] * 5)
    assert sorted(answers) == ["busy"] * 4 + ["mine"]
    assert not store.is_running()


def make_dated_runs(runs_dir: Path) -> list[str]:
    """Three runs whose dates are in another order than their names."""
    names = []
    for number in range(3):
        store = make_store(runs_dir)
        edit_json(store.path / "run.json", created_at=f"2026-01-0{3 - number}T00:00:00+00:00")
        store.path.rename(runs_dir / f"run-{number}")
        names.append(f"run-{number}")
    return names


def test_runs_are_found_oldest_first(tmp_path: Path) -> None:
    names = make_dated_runs(tmp_path)
    (tmp_path / "no-run").mkdir()
    (tmp_path / "file").write_text("")
    assert [path.name for path in find_runs(tmp_path)] == names[::-1]


def test_runs_of_the_same_minute_keep_their_order(tmp_path: Path) -> None:
    made = [make_store(tmp_path).path for _ in range(12)]
    assert find_runs(tmp_path) == made


def test_a_damaged_run_is_found_too(tmp_path: Path) -> None:
    make_dated_runs(tmp_path)
    (tmp_path / "run-1" / "run.json").write_bytes(b"\xff")
    assert {path.name for path in find_runs(tmp_path)} == {"run-0", "run-1", "run-2"}


def test_a_place_without_runs_has_none(tmp_path: Path) -> None:
    assert find_runs(tmp_path / "nowhere") == []
    with pytest.raises(UnknownName, match=r"unknown run 'last'\. Known: none yet\. Searched .*--runs-dir"):
        open_run("last", tmp_path / "nowhere")


def test_a_run_is_opened_by_last_by_name_by_its_beginning_or_by_path(tmp_path: Path) -> None:
    make_dated_runs(tmp_path)
    (tmp_path / "run-2").rename(tmp_path / "run-10")
    assert open_run("last", tmp_path).name == "run-0"
    assert open_run("run-10", tmp_path).name == "run-10"
    assert open_run("run-1", tmp_path).name == "run-1"
    assert open_run("run-0", tmp_path).name == "run-0"
    assert open_run(str(tmp_path / "run-1"), tmp_path / "nowhere").name == "run-1"
    (tmp_path / "run-1").rename(tmp_path / "other")
    assert open_run("run-1", tmp_path).name == "run-10"


def test_a_run_is_opened_by_a_part_of_its_name_or_by_its_workload(tmp_path: Path) -> None:
    older, newer = make_store(tmp_path).path, make_store(tmp_path).path
    edit_json(older / "run.json", fields={"job": {"workload": "/home/nets/unet.py:build"}})
    newer.rename(tmp_path / "2026-01-01-1200-base-line-2")
    (tmp_path / "2026-01-01-1200-base-line-2" / "run.json").write_bytes(b"\xff")
    assert open_run("unet", tmp_path).path == older
    with pytest.raises(StoreError):  # found, and damaged
        open_run("base-line", tmp_path)


def test_a_run_in_which_every_trial_failed_is_not_the_last(tmp_path: Path) -> None:
    good, bad = make_store(tmp_path), make_store(tmp_path)
    for name in bad.record.trials:
        (bad.trial_directory(name) / "result.json").write_text('{"status": "invalid"}')
    assert [has_failed(store.path) for store in (good, bad)] == [False, True]
    assert open_run("last", tmp_path).path == good.path
    (good.path / "run.json").unlink()
    assert open_run("last", tmp_path).path == bad.path


@pytest.mark.parametrize(
    ("job", "name"),
    [
        ({"workload": "gpt2"}, "gpt2"),
        ({"workload": "models/own.py:build"}, "own.py:build"),
        ({"workload": "gpt2", "script": {"target": "jobs/train.py"}}, "train.py"),
        ({"workload": "gpt2", "script": {"target": "pkg.train", "is_module": True}}, "pkg.train"),
        (None, ""),
    ],
)
def test_a_run_is_known_by_what_it_trained(job: dict[str, Any] | None, name: str, tmp_path: Path) -> None:
    assert find_workload_name(replace(make_store(tmp_path).record, fields={"job": job})) == name


def test_an_unknown_run_lists_the_known_ones_and_guesses(tmp_path: Path) -> None:
    make_dated_runs(tmp_path)
    with pytest.raises(UnknownName, match=r"unknown run 'rum-1'\. Did you mean 'run-1'\? Known: run-0, run-1, run-2\."):
        open_run("rum-1", tmp_path)


def test_a_beginning_that_fits_several_runs_lists_them(tmp_path: Path) -> None:
    make_dated_runs(tmp_path)
    make_store(tmp_path)
    with pytest.raises(UsageError, match="'run-' matches 3 runs: run-2, run-1, run-0; use more"):
        open_run("run-", tmp_path)


def test_no_name_is_not_the_beginning_of_every_name(tmp_path: Path) -> None:
    make_store(tmp_path)
    with pytest.raises(UnknownName, match="unknown run ''"):
        open_run("", tmp_path)


WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTorch())
"""


def test_a_run_is_read_and_concluded_without_torch(tmp_path: Path) -> None:
    fields = {"ranks": [1], "global_batch": 8, "sampling": {"control": False}, "job": {"workload": "mlp"}}
    store = make_store(tmp_path, fields=fields)
    save_all(store)
    program = """
from pathlib import Path
from scalelab.studies.catalogue import derive_document
from scalelab.records.store import open_run
store = open_run("last", Path(sys.argv[1]))
results, damaged = store.results()
print(len(results), len(damaged), len(results[0].samples), derive_document(store).title, "torch" in sys.modules)
"""
    command = [sys.executable, "-c", WITHOUT_TORCH + program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "3 0 3 Strong scaling False\n", done.stderr


def test_what_a_run_writes_is_plain_json(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    save_all(store)
    for file in store.path.rglob("*.json"):
        assert isinstance(json.loads(file.read_text(encoding="ascii")), dict)
    write_json(store.path / "run.json", json.loads((store.path / "run.json").read_text()))
    assert RunStore.open(store.path).record == store.record


def test_a_label_names_the_run_and_finds_its_newest(tmp_path: Path) -> None:
    first, second = (make_store(tmp_path, label="my-run") for _ in range(2))
    assert first.name.endswith("-my-run")
    assert second.name.endswith("-my-run-2")
    assert open_run("my-run", tmp_path).path == second.path
    assert open_run("my-r", tmp_path).path == second.path
    with pytest.raises(UnknownName):
        open_run("your-run", tmp_path)

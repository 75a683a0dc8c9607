"""A bundle has what reproduces a report, and nothing that is there already is touched."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from scalelab import FakeLauncher, Job, Sampling, StrongScaling, run_study
from scalelab.errors import UsageError
from scalelab.export.bundle import check_bundle, place_runs, render_script, write_bundle
from scalelab.records.store import RunStore


def make_run(place: Path, workload: str = "mlp") -> RunStore:
    study = StrongScaling(job=Job(workload=workload), sampling=Sampling(rounds=2))
    store, _ = run_study(study, runs_dir=place, launcher=FakeLauncher(lambda trial: 1.0 / trial.num_ranks))
    return store


def record_command(store: RunStore, *command: str) -> RunStore:
    file = store.path / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"command": list(command)}))
    return RunStore.open(store.path)


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    made = make_run(tmp_path / "runs")
    return record_command(made, "/usr/bin/scalelab", "run", "strong-scaling", "--workload", "mlp", "--json", "a b.json")


def test_a_bundle_has_every_raw_file_and_a_script_that_is_valid_shell(store: RunStore, tmp_path: Path) -> None:
    (store.path / "trials" / "ddp-2-r1" / "checkpoints").mkdir()
    target = tmp_path / "bundle"
    write_bundle(target, [store], ["report.pdf"])
    copied = target / "runs" / store.name
    results, damaged = RunStore.open(copied).results()
    assert results == store.results()[0]
    assert not damaged
    assert not list(copied.rglob("checkpoints"))
    subprocess.run(["sh", "-n", target / "reproduce.sh"], check=True)
    script = (target / "reproduce.sh").read_text()
    assert "scalelab run strong-scaling --workload mlp --runs-dir runs-again" in script
    assert "report.pdf" in (target / "README.md").read_text()


def test_the_users_own_workload_comes_along_unless_it_has_changed(tmp_path: Path) -> None:
    file = tmp_path / "my net.py"
    file.write_text("def build(batch_size):\n    raise NotImplementedError\n")
    made = make_run(tmp_path / "runs", f"{file}:build")
    store = record_command(made, "scalelab", "run", "strong-scaling", "--workload", f"{file}:build")
    write_bundle(tmp_path / "one", [store], [])
    assert (tmp_path / "one" / "workload" / "my net.py").read_text() == file.read_text()
    assert "'workload/my net.py:build'" in (tmp_path / "one" / "reproduce.sh").read_text()
    file.write_text("# something else\n")
    write_bundle(tmp_path / "two", [store], [])
    assert not (tmp_path / "two" / "workload").exists()
    assert "is missing or changed since" in (tmp_path / "two" / "README.md").read_text()


@pytest.mark.parametrize("typed", ["{}/nets/work.py", "nets.work", "nets.work:build"])
def test_a_workload_in_a_package_comes_with_what_it_imports_however_it_was_named(tmp_path: Path, typed: str) -> None:
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "__init__.py").write_text("")
    (tmp_path / "nets" / "layers.py").write_text("")
    (tmp_path / "nets" / "work.py").write_text("from . import layers\n\ndef build(batch_size): ...\n")
    made = make_run(tmp_path / "runs", f"{tmp_path}/nets/work.py:build")
    store = record_command(made, "scalelab", "run", "strong-scaling", "--workload", typed.format(tmp_path))
    write_bundle(tmp_path / "bundle", [store], [])
    copied = {file.name for file in (tmp_path / "bundle" / "workload" / "nets").iterdir()}
    assert copied == {"__init__.py", "layers.py", "work.py"}
    assert "--workload workload/nets/work.py:build " in (tmp_path / "bundle" / "reproduce.sh").read_text()


def test_what_the_command_reads_is_named_and_looked_for_before_anything_is_measured(
    store: RunStore, tmp_path: Path
) -> None:
    data = tmp_path / "my data"
    command = [
        "run",
        "strong-scaling",
        f"--data_path={data}",
        "--test-path",
        "val*.bin",
        "--checkpoints",
        "old",
        "--x=1",
    ]
    named = record_command(store, "scalelab", *command)
    target = tmp_path / "bundle"
    write_bundle(target, [named], [])
    page = (target / "README.md").read_text()
    assert f"`--data-path {data}` is not included: use `DATA_PATH=PATH ./reproduce.sh`" in page
    script = (target / "reproduce.sh").read_text()
    assert 'run strong-scaling --data-path "$DATA_PATH" --test-path "$TEST_PATH" --x=1 --runs-dir runs-again' in script
    program = tmp_path / "scalelab"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@" >> called\nexit 3\n')
    program.chmod(0o755)
    paths = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run([target / "reproduce.sh"], env=paths, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"{data} does not exist: use DATA_PATH=PATH ./reproduce.sh\n")
    assert not (target / "called").exists()
    subprocess.run([target / "reproduce.sh"], env=paths | {"DATA_PATH": str(tmp_path)}, check=False)
    called = (target / "called").read_text().splitlines()
    assert called[2:6] == ["--data-path", str(tmp_path), "--test-path", "val*.bin"]
    assert "compare" in called, "trials that failed, exit code 3, are compared as well"


def test_two_workloads_of_one_name_are_refused(tmp_path: Path) -> None:
    stores = []
    for place in (tmp_path / "a", tmp_path / "b"):
        place.mkdir()
        (place / "net.py").write_text(f"def build(batch_size):\n    return {place.name!r}\n")
        stores.append(make_run(place / "runs", f"{place / 'net.py'}:build"))
    renamed = stores[1].path.rename(stores[1].path.with_name("other"))
    with pytest.raises(UsageError, match=r"two different workloads are called net\.py"):
        write_bundle(tmp_path / "bundle", [stores[0], RunStore.open(renamed)], [])


def test_a_workload_is_found_however_it_was_typed(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("def build(batch_size):\n    raise NotImplementedError\n")
    made = make_run(tmp_path / "runs", f"{tmp_path / 'net.py'}:build")
    store = record_command(made, "scalelab", "run", "strong-scaling", "--workload=net.py:build")
    assert "--workload=workload/net.py:build" in render_script([store])


def test_a_run_that_a_program_made_is_named_and_not_guessed_at(store: RunStore) -> None:
    script = render_script([record_command(store, "bench.py", "--fast")])
    assert "# made by: bench.py --fast" in script
    assert "scalelab compare" not in script


def test_a_place_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(UsageError, match="is not empty"):
        check_bundle(tmp_path)
    with pytest.raises(UsageError, match="is a file"):
        check_bundle(tmp_path / "x")


def test_two_runs_of_one_name_are_refused(store: RunStore, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="two runs are called"):
        write_bundle(tmp_path / "bundle", [store, store], [])


def test_files_that_were_written_once_are_not_written_again() -> None:
    assert place_runs(["run", "x", "--html=a.html", "--runs-dir", "r", "--csv", "c"]) == [
        "run",
        "x",
        "--runs-dir",
        "runs-again",
    ]

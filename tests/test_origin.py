"""A run that somebody sent: shown, compared and listed, but nothing that it names is executed."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

import scalelab
from scalelab import FakeLauncher, Job, run_study
from scalelab.errors import UsageError
from scalelab.launch.batch.jobscripts import quote_text
from scalelab.launch.batch.site import Site
from scalelab.records.running import ORIGIN, read_key
from scalelab.records.store import RunStore
from tests.cli.commands import answer
from tests.studies.answers import make_strong, share_evenly

EVIL = "from pathlib import Path\nPath(__file__).with_name('executed').touch()\ndef build(): ...\nclass Study: ...\n"


@pytest.fixture
def sent(tmp_path: Path) -> Path:
    """A copy of a run whose workload leaves a trace when it is executed; one trial is missing."""
    (tmp_path / "evil.py").write_text(EVIL)
    study = make_strong(job=Job(workload=f"{tmp_path / 'evil.py'}:build"))
    store, _ = run_study(study, runs_dir=tmp_path / "made", launcher=FakeLauncher(share_evenly))
    assert store.is_own
    path = tmp_path / "sent" / store.name
    shutil.copytree(store.path, path)
    (path / "trials" / store.record.trials[-1] / "result.json").unlink()
    return path


def test_a_run_is_own_where_it_was_made_and_nowhere_else(sent: Path, tmp_path: Path) -> None:
    made = RunStore.open(tmp_path / "made" / sent.name)
    moved = made.path.rename(tmp_path / "moved")
    assert RunStore.open(moved).is_own
    assert not RunStore.open(sent).is_own
    for text in ("{}", "[", json.dumps({"seal": "0" * 64}), json.dumps({"seal": "é\ud800"})):
        (moved / ORIGIN).write_text(text)
        assert not RunStore.open(moved).is_own


def test_another_user_s_key_fits_no_run(sent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    made = RunStore.open(tmp_path / "made" / sent.name)
    assert read_key() is None
    assert not made.is_own
    assert read_key(make=True) == read_key()
    assert stat.S_IMODE((tmp_path / "other" / "scalelab" / "key").stat().st_mode) == 0o600
    assert not made.is_own


def test_resume_shows_what_a_sent_run_would_execute_and_needs_trust(sent: Path, tmp_path: Path) -> None:
    refused = answer("resume", sent, cwd=tmp_path)
    assert refused.returncode == 2
    assert f"executes: {tmp_path / 'evil.py'}:build" in refused.stderr
    assert "repeats: " in refused.stderr
    assert f"If you trust that: scalelab resume {sent} --trust" in " ".join(refused.stderr.split())
    again = answer("compare", sent, tmp_path / "made" / sent.name, "--interleave", cwd=tmp_path)
    assert (again.returncode, "was not made here" in again.stderr) == (2, True)
    with pytest.raises(UsageError, match="was not made here"):
        scalelab.resume(sent)
    for verb in (
        ["show", sent, "--refresh"],
        ["list", "--runs-dir", sent.parent],
        ["compare", sent, tmp_path / "made" / sent.name],
    ):
        assert answer(*verb, cwd=tmp_path).returncode == 0
    assert not (tmp_path / "executed").exists()
    with mock.patch("scalelab.cli.resume.choose_launcher", return_value=FakeLauncher(share_evenly)):
        assert answer("resume", sent, "--trust", cwd=tmp_path).returncode == 0
    assert RunStore.open(sent).is_own


def test_a_file_alone_and_programs_are_shown_too(sent: Path, tmp_path: Path) -> None:
    for file in sent.glob("trials/*/trial.json"):
        trial = json.loads(file.read_text())
        file.write_text(json.dumps(trial | {"workload": str(tmp_path / "evil.py"), "mpiexec": "./started-by"}))
    record = json.loads((sent / "run.json").read_text())
    record["fields"]["sides"] = [{"python": "./interpreter", "fields": {"job": {"mpiexec": "./inner"}}}]
    (sent / "run.json").write_text(json.dumps(record))
    refused = answer("resume", sent, cwd=tmp_path)
    assert refused.returncode == 2
    assert f"executes: ./inner, ./interpreter, ./started-by, {tmp_path / 'evil.py'}. If you" in refused.stderr
    assert not (tmp_path / "executed").exists()


def test_the_study_of_a_sent_run_is_never_imported(sent: Path, tmp_path: Path) -> None:
    record = json.loads((sent / "run.json").read_text())
    (sent / "run.json").write_text(json.dumps(record | {"study_class": f"{tmp_path / 'evil.py'}:Study"}))
    refreshed = answer("show", sent, "--refresh", cwd=tmp_path)
    assert refreshed.returncode == 2
    assert "was not made here, and its study is code" in refreshed.stderr
    assert answer("show", sent, cwd=tmp_path).returncode == 0
    assert answer("report", sent, "--markdown", "page.md", cwd=tmp_path).returncode == 0
    assert "this is the stored answer" in (tmp_path / "page.md").read_text()
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("mask", [0o027, 0o077, 0o002])
def test_the_files_of_a_run_have_the_modes_of_the_umask(mask: int, tmp_path: Path) -> None:
    previous = os.umask(mask)
    try:
        store, _ = run_study(make_strong(), runs_dir=tmp_path, launcher=FakeLauncher(share_evenly))
    finally:
        os.umask(previous)
    modes = {path.is_dir(): stat.S_IMODE(path.stat().st_mode) for path in store.path.rglob("*")}
    assert modes == {True: 0o777 & ~mask, False: 0o666 & ~mask}
    assert len({stat.S_IMODE(path.stat().st_mode) for path in store.path.rglob("*")}) == 2


@pytest.mark.parametrize(
    "text",
    [
        "$(touch executed)",
        "`touch executed`",
        '"; touch executed; "',
        "a\ntouch executed",
        "$[1+1]",
        "\\$(id)",
        "{a,b} * ~",
    ],
)
def test_no_value_of_a_job_script_is_a_command(text: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", f"printf %s {quote_text(text)}"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == text
    assert list(tmp_path.iterdir()) == []
    kept = subprocess.run(
        ["bash", "-c", f"printf %s {quote_text('$HOME/x')}"], capture_output=True, text=True, check=True
    )
    assert kept.stdout == f"{os.environ['HOME']}/x"


@pytest.mark.parametrize("name", ["account", "queue", "placement", "filesystems", "chunk"])
@pytest.mark.parametrize("value", ["a\n#SBATCH --uid=0", "a\r", "a b", "$(id)", "a;b", "a\n"])
def test_no_value_of_a_site_adds_a_line_to_a_script(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"--{name}"):
        replace(Site(), **{name: value})
    with pytest.raises(UsageError, match="--directives"):
        Site(directives=(f"qos={value}",))

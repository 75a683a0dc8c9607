"""WebDataset: exchanged with the library, tars of other programs, members that do not fit together."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelab.data.formats.stored import StoredSet
from scalelab.data.formats.writing import write_set
from scalelab.errors import DataUnreadable, UsageError
from tests.data.formats.sets import make_set, make_source


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    library = pytest.importorskip("webdataset.tariterators")
    source = make_source("webdataset")
    with make_set(tmp_path, "webdataset").open("rb") as file:
        members = library.tar_file_expander([{"stream": file, "url": "a.tar"}])
        samples = list(library.group_by_keys(members))
    assert [sample["__key__"] for sample in samples] == [f"{number:08}" for number in range(37)]
    for number in (0, 36):
        for name, array in source.items():
            assert np.array_equal(np.load(io.BytesIO(samples[number][f"{name}.npy"])), array[number])


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    source = make_source("webdataset")
    path = tmp_path / "a.tar"
    with webdataset.TarWriter(str(path)) as writer:
        for number in reversed(range(37)):
            columns: dict[str, Any] = {f"{name}.npy": array[number] for name, array in source.items()}
            writer.write({"__key__": f"some/place/{number:04}", **columns})
    found = StoredSet(path)
    for field, array in zip(found.fields, found.__getitems__([30, 2]), strict=True):
        assert np.array_equal(array, source[field.name][[30, 2]])


def test_tar_itself_reads_what_is_written(tmp_path: Path) -> None:
    with tarfile.open(make_set(tmp_path, "webdataset")) as tar:
        names = tar.getnames()
        member = tar.extractfile("00000007.signal.npy")
        assert member is not None
        assert np.array_equal(np.load(io.BytesIO(member.read())), make_source("webdataset")["signal"][7])
    assert names[:4] == [f"00000000.{name}.npy" for name in make_source("webdataset")]


def make_npy(array: Any, **settings: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(array), **settings)
    return file.getvalue()


def write_tar(path: Path, members: dict[str, bytes], form: int = tarfile.USTAR_FORMAT, **settings: Any) -> Path:
    with tarfile.open(path, "w", format=form) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for key, value in settings.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("mtime", [1, 1.5])
def test_extended_headers_are_understood(tmp_path: Path, mtime: float) -> None:
    """Long names and fractions of seconds are told in a member of their own before the one that they belong to."""
    names = ["a" * 90 + f"/{'b' * 120}{number}.x.npy" for number in range(3)]
    members = {name: make_npy([number, 7]) for number, name in enumerate(names)}
    path = write_tar(tmp_path / "a.tar", members, tarfile.PAX_FORMAT, mtime=mtime)
    assert StoredSet(path).__getitems__([2, 0])[0].tolist() == [[2, 7], [0, 7]]


def test_numbers_of_the_other_order_of_bytes_are_given_in_this_machines(tmp_path: Path) -> None:
    members = {f"{number}.x.npy": make_npy(np.array([number, 300], ">i4")) for number in range(3)}
    found = StoredSet(write_tar(tmp_path / "a.tar", members))
    assert found.fields[0].dtype == np.dtype("i4")
    assert found.__getitems__([2, 1])[0].tolist() == [[2, 300], [1, 300]]


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"0.x.npy": make_npy([1]), "1.y.npy": make_npy([1])}, "some samples lack 'y', such as '0'"),
        ({"0.x.npy": make_npy([1]), "1.x.npy": make_npy([1, 2])}, "in a different type or shape than '0.x.npy'"),
        ({"0.x.npy": make_npy([1]), "1.x.npy": make_npy([1.0])}, "in a different type or shape"),
        ({"0.x.npy": make_npy([1])[:-1]}, "in a different type or shape"),
        ({"0.x.npy": make_npy([["a", "b"]])}, "only booleans, integers and floats"),
        ({"0.x.npy": make_npy(np.zeros((2, 3)).T)}, "row-major"),
        ({"0.x.npy": make_npy(np.zeros((0, 3)))}, "has shape"),
        ({"0.x.npy": b"no array"}, "cannot be read"),
        ({"0.x.npy": b""}, "cannot be read"),
        ({"0.jpg": b"a jpeg"}, "only members that end in .npy"),
        ({"0.pth": b"a pickle"}, "only members that end in .npy"),
        ({"x\n.y\n.npy": make_npy([1])}, "is not a valid column name"),
        ({}, "contains no arrays"),
    ],
)
def test_members_that_do_not_fit_are_refused(tmp_path: Path, members: dict[str, bytes], words: str) -> None:
    path = write_tar(tmp_path / "a.tar", members)
    with pytest.raises(DataUnreadable, match=words) as refused:
        len(StoredSet(path))
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_are_refused(tmp_path: Path, kind: bytes) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("0.x.npy")
        info.type, info.linkname = kind, "/etc/passwd"
        tar.addfile(info)
    with pytest.raises(DataUnreadable, match="not a regular file"):
        len(StoredSet(path))


def test_a_shape_of_terabytes_is_not_believed(tmp_path: Path) -> None:
    content = make_npy(np.zeros(3)).replace(b"(3,), }        ", b"(2**40, 3), }  ")
    lying = make_npy(np.zeros(3)).replace(b"(3,), }             ", b"(1099511627776,), } ")
    for data in (content, lying):
        assert data != make_npy(np.zeros(3))
        with pytest.raises(DataUnreadable, match=r"cannot be read|different type or shape"):
            len(StoredSet(write_tar(tmp_path / "a.tar", {"0.x.npy": data})))


def test_a_member_twice_and_a_header_that_was_changed_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for _ in range(2):
            info = tarfile.TarInfo("0.x.npy")
            info.size = 136
            tar.addfile(info, io.BytesIO(make_npy(np.array([1]))))
    with pytest.raises(DataUnreadable, match=r"'0\.x\.npy' twice"):
        len(StoredSet(path))
    path = write_tar(tmp_path / "b.tar", {"0.x.npy": make_npy([1]), "1.x.npy": make_npy([2])})
    data = bytearray(path.read_bytes())
    data[1024 + 110] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataUnreadable, match="the header at byte 1024 does not match its checksum"):
        len(StoredSet(path))


def test_a_name_that_a_tar_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too long for a tar member"):
        write_set(tmp_path / "a.tar", {"x" * 95: np.arange(3)}, format="webdataset")
    assert not list(tmp_path.iterdir())

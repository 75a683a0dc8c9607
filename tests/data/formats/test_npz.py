""".npz: mapped where it is stored, inflated once where it is deflated, and NumPy's own files too."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from scalelab.data.formats import decoded, npz
from scalelab.data.formats.columns import OddColumn
from scalelab.data.formats.stored import StoredSet
from scalelab.data.formats.writing import write_set
from scalelab.errors import DataUnreadable, UsageError

NUMBERS = np.arange(60, dtype=np.float32).reshape(20, 3) / 7
LABELS = np.arange(20, dtype=np.int64)
ORDER = [7, 0, 19, 7]


@pytest.mark.parametrize("format_name", ["npz", "npz-compressed"])
def test_numpy_reads_what_is_written(tmp_path: Path, format_name: str) -> None:
    path = tmp_path / "a.npz"
    write_set(path, {"file": NUMBERS, "n" * 100: LABELS}, format=format_name)
    with np.load(path) as found:
        assert sorted(found.files) == ["file", "n" * 100]
        assert np.array_equal(found["file"], NUMBERS)
        assert np.array_equal(found["n" * 100], LABELS)
    assert zipfile.ZipFile(path).testzip() is None


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("eager", [False, True])
def test_what_numpy_writes_is_read(tmp_path: Path, save: object, eager: bool) -> None:
    path = tmp_path / "a.npz"
    arrays = {"x": NUMBERS, "y": LABELS, "fortran": np.asfortranarray(NUMBERS), "big": NUMBERS.astype(">f8")}
    save(path, **arrays)  # type: ignore[operator]
    with StoredSet(path, eager=eager) as stored:
        found = dict(zip((field.name for field in stored.fields), stored.__getitems__(ORDER), strict=True))
    for name, array in arrays.items():
        assert np.array_equal(found[name], array[ORDER])
        assert found[name].dtype.isnative


def test_stored_members_are_mapped_and_ours_are_aligned(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.npz", tmp_path / "theirs.npz"
    write_set(ours, {"x": NUMBERS, "yy": LABELS}, format="npz")
    np.savez(theirs, x=NUMBERS, yy=LABELS)
    for column in npz.open_set(ours, {}).columns:
        assert isinstance(column, npz.CheckedColumn)
        assert not isinstance(column.column, OddColumn)
        assert not column.column.array.flags.owndata  # type: ignore[attr-defined]
    assert any(isinstance(column.column, OddColumn) for column in npz.open_set(theirs, {}).columns)  # type: ignore[attr-defined]


def test_a_header_of_another_length_than_the_directory_tells_is_followed(tmp_path: Path) -> None:
    """The header in front of a member may have fields that the directory does not have."""
    path = tmp_path / "a.npz"
    content = io.BytesIO()
    np.save(content, LABELS)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("first.npy", content.getvalue())
        with archive.open("second.npy", "w", force_zip64=True) as member:
            member.write(content.getvalue())
    with StoredSet(path) as stored:
        assert all(np.array_equal(found, LABELS[ORDER]) for found in stored.__getitems__(ORDER))


def test_a_deflated_member_is_inflated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.npz"
    write_set(path, {"x": NUMBERS}, format="npz-compressed", options={"level": 9})
    calls = []
    real = npz.inflate_member
    monkeypatch.setattr(npz, "inflate_member", lambda *parts: calls.append(1) or real(*parts))
    with StoredSet(path) as stored:
        assert len(stored) == 20
        assert not calls
        for _ in range(3):
            assert np.array_equal(stored.__getitems__(ORDER)[0], NUMBERS[ORDER])
    assert len(calls) == 1


@pytest.mark.parametrize("format_name", ["npz", "npz-compressed"])
def test_a_changed_byte_is_found_by_the_sum_when_all_is_read(tmp_path: Path, format_name: str) -> None:
    path = tmp_path / "a.npz"
    write_set(path, {"x": NUMBERS}, format=format_name)
    data = bytearray(path.read_bytes())
    data[320] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataUnreadable, match=r"damaged|cannot be read"):
        len(StoredSet(path, eager=True))


def test_members_that_lie_about_their_size_are_refused(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (10**12, 100)})
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        path = tmp_path / f"{method}.npz"
        with zipfile.ZipFile(path, "w", method) as archive:
            archive.writestr("x.npy", header.getvalue() + bytes(1000))
        with pytest.raises(DataUnreadable, match=r"1000 bytes, which are not float32"):
            len(StoredSet(path))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compressions_are_refused_by_number(tmp_path: Path, method: int) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w", method) as archive:
        archive.writestr("x.npy", b"anything")
    with pytest.raises(DataUnreadable, match=f"method {method}: only stored and deflated"):
        len(StoredSet(tmp_path / "a.npz"))


@pytest.mark.parametrize("level", [-1, 10, "high", True])
def test_a_level_that_cannot_work_is_refused(tmp_path: Path, level: int) -> None:
    with pytest.raises(UsageError, match=f"level must be an integer, .*got {level}$"):
        write_set(tmp_path / "a.npz", {"x": NUMBERS}, format="npz-compressed", options={"level": level})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("codec", ["isal", "zlib"])
@pytest.mark.parametrize("num_bytes", [0, 1, 1000, 300_000])
def test_inflated_bytes_are_exactly_as_many_as_expected(
    monkeypatch: pytest.MonkeyPatch, codec: str, num_bytes: int
) -> None:
    import zlib

    if codec == "zlib":
        monkeypatch.setattr(decoded, "CODEC", zlib)
    elif decoded.CODEC is zlib:
        pytest.skip("isal is not installed")
    data = np.random.default_rng(0).bytes(num_bytes)
    packed = memoryview(zlib.compress(data))
    assert decoded.inflate(packed, num_bytes) == data
    wrong = [(packed, num_bytes + 1), (packed[:-1], num_bytes), (memoryview(zlib.compress(bytes(10**6))), 1000)]
    for part, expected in [*wrong, *([(packed, num_bytes - 1)] if num_bytes else [])]:
        with pytest.raises(ValueError, match="compressed data are damaged"):
            decoded.inflate(part, expected)


def test_a_bomb_is_not_inflated(tmp_path: Path) -> None:
    """A member that says more than its bytes could ever stand for, and one that holds more than it says."""
    path = tmp_path / "a.npz"
    write_set(path, {"x": np.zeros((1000, 1000), np.uint8)}, format="npz-compressed")
    data = path.read_bytes()
    told = (1000 * 1000 + 128).to_bytes(4, "little")
    place = data.rfind(told)  # in the directory at the end
    path.write_bytes(data[:place] + (2**31).to_bytes(4, "little") + data[place + 4 :])
    with pytest.raises(DataUnreadable, match="damaged: 'x' cannot hold 2147483648 bytes"):
        len(StoredSet(path))

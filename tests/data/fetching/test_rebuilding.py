"""The published bytes from pictures and from files that were compressed again."""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from scalelab.data.cifar10 import read_binary
from scalelab.data.fetching import known as rebuilding
from scalelab.data.fetching.known import (
    SHEETS,
    TEST_LABELS,
    TRAIN_LABELS,
    read_sheet,
    rebuild_from_sheets,
    restore_headers,
)
from scalelab.errors import DataUnreadable, UsageError

Image = pytest.importorskip("PIL.Image", reason="Pillow is absent")
NUM_IMAGES = 7


def write_sheet(path: Path, pixels: npt.NDArray[np.uint8]) -> None:
    """Every image, red plane first, as one row of a picture."""
    rows = np.ascontiguousarray(pixels.reshape(len(pixels), 3, 1024).transpose(0, 2, 1))
    Image.fromarray(rows).save(path, format="PNG", compress_level=1)


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A package of seven random images for each file."""
    monkeypatch.setattr(rebuilding, "IMAGES_PER_FILE", NUM_IMAGES)
    drawn = np.random.default_rng(0)
    (tmp_path / "package").mkdir()
    found = {name: tmp_path / "package" / name for name in SHEETS}
    for name, path in found.items():
        if name.endswith(".png"):
            write_sheet(path, drawn.integers(0, 256, (NUM_IMAGES, 3072), dtype=np.uint8))
    found[TRAIN_LABELS].write_text(json.dumps([number % 10 for number in range(5 * NUM_IMAGES)]))
    found[TEST_LABELS].write_text(json.dumps([9] * NUM_IMAGES))
    return found


def test_six_pictures_and_two_lists_become_six_files(parts: dict[str, Path], tmp_path: Path) -> None:
    drawn = np.random.default_rng(0)
    (tmp_path / "files").mkdir()
    rebuild_from_sheets(parts, tmp_path / "files")
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == names
    for number, name in enumerate(names):
        path = tmp_path / "files" / name
        pixels, labels = read_binary(path, path.read_bytes())
        assert np.array_equal(pixels, drawn.integers(0, 256, (NUM_IMAGES, 3072), dtype=np.uint8))
        expected = [9] * NUM_IMAGES if number == 5 else [(number * NUM_IMAGES + i) % 10 for i in range(NUM_IMAGES)]
        assert labels.tolist() == expected


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (TRAIN_LABELS, b"[1, 2]", r"train_lables\.json is not a list of 35 labels from 0 to 9"),
        (TEST_LABELS, b"[10, 1, 1, 1, 1, 1, 1]", r"test_lables\.json is not a list of 7 labels"),
        (TEST_LABELS, b"{", r"test_lables\.json is not a list of labels"),
        ("data_batch_3.png", b"GIF89a", r"data_batch_3\.png is not a readable image"),
    ],
)
def test_a_part_that_is_something_else_is_named(
    parts: dict[str, Path], tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    parts[name].write_bytes(content)
    with pytest.raises(DataUnreadable, match=words):
        rebuild_from_sheets(parts, tmp_path)


def test_a_picture_of_another_size_or_cut_short_is_refused(parts: dict[str, Path], tmp_path: Path) -> None:
    path = parts["test_batch.png"]
    path.write_bytes(path.read_bytes()[:-3000])
    with pytest.raises(DataUnreadable, match=r"test_batch\.png is not a readable image"):
        read_sheet(path)
    write_sheet(path, np.zeros((NUM_IMAGES + 1, 3072), dtype=np.uint8))
    with pytest.raises(DataUnreadable, match=r"is a \(1024, 8\) RGB image, not \(1024, 7\) RGB"):
        read_sheet(path)


def test_without_pillow_the_error_says_how_to_get_it(
    parts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UsageError, match=r"needs Pillow, which is not installed: pip install 'scalelab\[fetch\]'"):
        rebuild_from_sheets(parts, tmp_path)


def test_a_file_compressed_again_gets_its_published_header(tmp_path: Path) -> None:
    name = "t10k-labels-idx1-ubyte.gz"
    content = bytes(range(10)) * 1000
    (tmp_path / name).write_bytes(gzip.compress(content, mtime=1_591_347_949))
    (tmp_path / "out").mkdir()
    restore_headers({name: tmp_path / name}, tmp_path / "out")
    restored = (tmp_path / "out" / name).read_bytes()
    assert restored[:4] == b"\x1f\x8b\x08\x08"
    assert int.from_bytes(restored[4:8], "little") == 1_504_176_627  # 31 August 2017
    assert restored[10:33] == b"t10k-labels-idx1-ubyte\0"
    assert gzip.decompress(restored) == content
    assert restored[33:] == (tmp_path / name).read_bytes()[10:]
    (tmp_path / "again").mkdir()
    restore_headers({name: tmp_path / "out" / name}, tmp_path / "again")
    assert (tmp_path / "again" / name).read_bytes() == restored
    assert zlib.decompress(restored[33:-8], wbits=-15) == content

"""Fashion-MNIST from files of its form: grey, small, and put into CIFAR-10's shape."""

from __future__ import annotations

import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest

from scalelab.data import fashion_mnist
from scalelab.data.fashion_mnist import check_fashion_mnist, load_fashion_mnist, parse_idx
from scalelab.data.fetching.checksums import Published
from scalelab.errors import UsageError


def write_idx(path: Path, array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> Published:
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    data = gzip.compress(head + array.tobytes(), mtime=0)
    path.write_bytes(data)
    return Published(len(data), hashlib.md5(data).hexdigest())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six training and three test images, published as such."""
    made = tmp_path / "fashion-mnist"
    made.mkdir()
    published = {}
    for prefix, number in (("train", 6), ("t10k", 3)):
        images = np.arange(number * 784, dtype=np.uint64).astype(np.uint8).reshape(number, 28, 28)
        labels = np.arange(number, dtype=np.uint8)
        for name, array in ((f"{prefix}-images-idx3-ubyte.gz", images), (f"{prefix}-labels-idx1-ubyte.gz", labels)):
            published[name] = write_idx(made / name, array)
    monkeypatch.setattr(fashion_mnist, "PUBLISHED", published)
    return made


def test_images_get_a_border_and_three_channels(folder: Path) -> None:
    for place in (folder, folder.parent):
        check_fashion_mnist(place)
        train, test = load_fashion_mnist(place, "train"), load_fashion_mnist(place, "test")
        assert (len(train), len(test)) == (6, 3)
        assert train.labels.tolist() == list(range(6))
        inner = train.images[1, :, 2:30, 2:30]
        assert np.array_equal(inner[0].ravel(), np.arange(784, 2 * 784).astype(np.uint8))
        assert np.array_equal(inner[0], inner[1])
        assert np.array_equal(inner[0], inner[2])
        assert train.images.sum() == train.images[:, :, 2:30, 2:30].sum()


def test_an_absent_file_is_named_with_the_command_that_gets_it(folder: Path) -> None:
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    for place in (folder, folder.parent):
        with pytest.raises(UsageError) as caught:
            check_fashion_mnist(place)
        assert str(caught.value) == (
            f"Fashion-MNIST: {folder}/t10k-labels-idx1-ubyte.gz not found:"
            f" get it with 'scalelab data fetch fashion-mnist --out {folder.parent}'"
        )


def test_a_damaged_file_is_named(folder: Path) -> None:
    path = folder / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    check_fashion_mnist(folder)
    with pytest.raises(UsageError, match=r"train-images-idx3-ubyte\.gz is damaged: .*has the md5 .*data fetch"):
        load_fashion_mnist(folder, "train")
    path.write_bytes(whole[:-1])
    with pytest.raises(UsageError, match=r"is damaged: it has \d+ bytes, not \d+"):
        check_fashion_mnist(folder)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not that of an IDX file of uint8 with 1 axes"),
        (bytes([0, 0, 13, 1, 0, 0, 0, 1, 5]), "not that of an IDX file"),
        (bytes([0, 0, 8, 1, 0, 0, 0, 9, 5]), r"it holds 1 values, not \(9,\)"),
    ],
)
def test_what_is_no_array_of_bytes_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_idx(Path("a.gz"), data, 1)

"""CIFAR-10: both forms give the same arrays, and only the published files are read."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelab.data import cifar10
from scalelab.data.cifar10 import BINARY, PYTHON, check_cifar10, load_cifar10
from scalelab.data.fetching.checksums import Published
from scalelab.errors import UsageError
from tests.data.shared import SHARED_DATA, needs

NAMES = ["data_batch_1", "data_batch_2", "test_batch"]
NUM_IMAGES = 7


def make_batch(number: int) -> tuple[np.ndarray, list[int]]:
    generator = np.random.default_rng(number)
    return generator.integers(0, 256, (NUM_IMAGES, 3072), dtype=np.uint8), generator.integers(
        0, 10, NUM_IMAGES
    ).tolist()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with small files of both forms, which are taken for the published ones."""
    for layout in (BINARY, PYTHON):
        (tmp_path / layout.folder).mkdir()
    for number, name in enumerate(NAMES):
        pixels, labels = make_batch(number)
        records = np.concatenate([np.array(labels, dtype=np.uint8)[:, None], pixels], axis=1)
        batch = {b"data": pixels, b"labels": labels, b"filenames": [b"a.png"] * NUM_IMAGES}
        publish(tmp_path / BINARY.folder / f"{name}.bin", records.tobytes(), monkeypatch)
        publish(tmp_path / PYTHON.folder / name, pickle.dumps(batch, protocol=4), monkeypatch)
    return tmp_path


def publish(path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a file and take it for the published one."""
    path.write_bytes(data)
    monkeypatch.setitem(cifar10.PUBLISHED, path.name, Published(len(data), hashlib.md5(data).hexdigest()))


def test_both_forms_give_identical_arrays(folder: Path) -> None:
    for split in ("train", "test"):
        first, second = (load_cifar10(folder / layout.folder, split, 2) for layout in (BINARY, PYTHON))
        assert np.array_equal(first.images, second.images)
        assert np.array_equal(first.labels, second.labels)


def test_the_files_are_joined_in_order_with_red_first(folder: Path) -> None:
    found = load_cifar10(folder, "train", 2)
    assert found.images.shape == (2 * NUM_IMAGES, 3, 32, 32)
    assert found.images.dtype == np.uint8
    assert found.labels.dtype == np.int64
    pixels, labels = make_batch(1)
    assert np.array_equal(found.images[NUM_IMAGES:, 0].reshape(NUM_IMAGES, -1), pixels[:, :1024])
    assert found.labels[NUM_IMAGES:].tolist() == labels
    assert found.mean == (0.4914, 0.4822, 0.4465)
    assert found.std == (0.2023, 0.1994, 0.2010)


@pytest.mark.parametrize("layout", [BINARY, PYTHON])
def test_the_folder_or_the_one_around_it_may_be_named(folder: Path, layout: cifar10.Cifar10Layout) -> None:
    (other,) = {BINARY, PYTHON} - {layout}
    for file in (folder / other.folder).iterdir():
        file.unlink()
    inside, around = load_cifar10(folder / layout.folder, "test"), load_cifar10(folder, "test")
    assert np.array_equal(inside.images, around.images)


def test_fewer_training_files_are_enough_when_fewer_are_asked_for(folder: Path) -> None:
    assert len(load_cifar10(folder, "train", 1)) == NUM_IMAGES
    check_cifar10(folder, 2)
    with pytest.raises(UsageError, match=r"cifar-10-batches-py/data_batch_3.*cifar-10-python\.tar\.gz.*tar -xzf"):
        load_cifar10(folder, "train", 3)


@pytest.mark.parametrize("num_files", [0, 6])
def test_there_are_five_training_files(folder: Path, num_files: int) -> None:
    with pytest.raises(UsageError, match="1 to 5"):
        check_cifar10(folder, num_files)


@pytest.mark.parametrize("call", [check_cifar10, lambda directory: load_cifar10(directory, "train")])
def test_absent_files_are_named_with_how_to_get_them(tmp_path: Path, call: Any) -> None:
    with pytest.raises(UsageError) as refused:
        call(tmp_path)
    words = str(refused.value)
    assert str(tmp_path / "cifar-10-batches-py" / "data_batch_1") in words
    assert "www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz" in words
    assert f"tar -xzf cifar-10-python.tar.gz -C {tmp_path}" in words


def test_the_binary_form_is_suggested_where_it_has_begun(folder: Path) -> None:
    (folder / PYTHON.folder).rename(folder / "elsewhere")
    with pytest.raises(UsageError, match=r"data_batch_3\.bin.*cifar-10-binary\.tar\.gz"):
        check_cifar10(folder, 3)


@pytest.mark.parametrize("layout", [BINARY, PYTHON])
def test_a_truncated_file_is_refused_before_and_while_loading(folder: Path, layout: cifar10.Cifar10Layout) -> None:
    path = folder / layout.folder / f"data_batch_1{layout.suffix}"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    for call in (lambda: check_cifar10(path.parent, 1), lambda: load_cifar10(path.parent, "train", 1)):
        with pytest.raises(
            UsageError,
            match=rf"{path} is damaged: it has {size - 1} bytes, not {size}; run"
            r" .*download",
        ):
            call()


@pytest.mark.parametrize("layout", [BINARY, PYTHON])
def test_a_changed_byte_is_found_by_the_checksum(folder: Path, layout: cifar10.Cifar10Layout) -> None:
    path = folder / layout.folder / f"test_batch{layout.suffix}"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    check_cifar10(path.parent, 1)
    with pytest.raises(UsageError, match="its md5 is"):
        load_cifar10(path.parent, "test")


class Malicious:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


def test_no_pickle_can_run_code(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trap = tmp_path / "trap"
    data = pickle.dumps({b"data": Malicious(trap), b"labels": []})
    publish(folder / PYTHON.folder / "test_batch", data, monkeypatch)
    with pytest.raises(UsageError, match=r"loads posix\.mkdir, but only arrays are allowed"):
        load_cifar10(folder / PYTHON.folder, "test")
    assert not trap.exists()


@pytest.mark.parametrize(
    "batch",
    [
        [1, 2],
        {b"labels": [1]},
        {b"data": [1], b"labels": [1]},
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]},
        {b"data": np.zeros((1, 3072), np.float32), b"labels": [1]},
        {b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]},
    ],
    ids=["no dict", "no data", "no array", "too many", "no bytes", "no such class"],
)
def test_a_pickle_of_something_else_is_damaged(folder: Path, monkeypatch: pytest.MonkeyPatch, batch: Any) -> None:
    publish(folder / PYTHON.folder / "test_batch", pickle.dumps(batch, protocol=4), monkeypatch)
    with pytest.raises(UsageError, match="test_batch is damaged"):
        load_cifar10(folder / PYTHON.folder, "test")


def test_an_old_pickle_of_two_pythons_ago_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The published files were written by Python 2 and name a place that NumPy has left since."""
    pixels, labels = make_batch(2)
    data = pickle.dumps({"data": pixels, "labels": labels}, protocol=4).replace(
        b"\x8c\x16numpy._core.multiarray", b"\x8c\x15numpy.core.multiarray"
    )
    assert b"numpy.core.multiarray" in data
    frame = len(data) - 11
    data = data[:3] + frame.to_bytes(8, "little") + data[11:]
    batch = cifar10.ArrayUnpickler(io.BytesIO(data)).load()
    assert np.array_equal(batch["data"], pixels)


REAL = ("cifar-10-batches-bin/data_batch_1.bin", "cifar-10-batches-bin/test_batch.bin")


@needs(*REAL)
def test_the_real_files_are_what_they_should_be() -> None:
    check_cifar10(SHARED_DATA, 1)
    test = load_cifar10(SHARED_DATA, "test")
    assert test.images.shape == (10_000, 3, 32, 32)
    assert np.bincount(test.labels).tolist() == [1000] * 10
    train = load_cifar10(SHARED_DATA / "cifar-10-batches-bin", "train", 1)
    assert len(train) == 10_000
    assert train.labels[:5].tolist() == [6, 9, 9, 4, 1]
    mean = train.images.mean(axis=(0, 2, 3)) / 255
    assert mean == pytest.approx(train.mean, abs=0.005)


@needs(*REAL)
def test_a_training_file_that_is_not_there_is_named_beside_real_ones() -> None:
    with pytest.raises(UsageError, match=r"cifar-10-batches-bin/data_batch_2\.bin"):
        load_cifar10(SHARED_DATA, "train")

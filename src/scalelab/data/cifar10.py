"""CIFAR-10 from its original files, in either published form.

    cifar-10-batches-py/    data_batch_1 … 5, test_batch        pickled dicts of an array and a list of labels
    cifar-10-batches-bin/   data_batch_1.bin … 5, test_batch    1 label byte + 3072 pixel bytes per image

Both hold the same images in the same order, red plane first. Size and md5 must match the published file: half a
download would train silently to a wrong accuracy. The unpickler accepts only arrays, so no file can run code. The md5
of the pickled files are torchvision's; those of the binary files are checked by several public projects beside the
archive's own (c32a1d4ab5d03f1284b67883e8d87530).

Source: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from scalelab.data.fetching.checksums import Published
from scalelab.data.images import NUM_CHANNELS, SIDE, ImageSet
from scalelab.errors import UsageError

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2023, 0.1994, 0.2010)
NUM_CLASSES = 10
NUM_TRAIN_FILES = 5
PIXEL_BYTES = NUM_CHANNELS * SIDE * SIDE
ADDRESS = "https://www.cs.toronto.edu/~kriz"


@dataclass(frozen=True)
class Cifar10Layout:
    """One of the two published forms."""

    folder: str
    suffix: str
    archive: str

    def list_files(self, names: Sequence[str]) -> list[str]:
        return [name + self.suffix for name in names]


BINARY = Cifar10Layout("cifar-10-batches-bin", ".bin", "cifar-10-binary.tar.gz")
PYTHON = Cifar10Layout("cifar-10-batches-py", "", "cifar-10-python.tar.gz")
LAYOUTS = (PYTHON, BINARY)


PUBLISHED = {
    "data_batch_1": Published(31_035_704, "c99cafc152244af753f735de768cd75f"),
    "data_batch_2": Published(31_035_320, "d4bba439e000b95fd0a9bffe97cbabec"),
    "data_batch_3": Published(31_035_999, "54ebc095f3ab1f0389bbae665268c751"),
    "data_batch_4": Published(31_035_696, "634d18415352ddfa80567beed471001a"),
    "data_batch_5": Published(31_035_623, "482c414d41f54cd18b22e5b47cb7c3cb"),
    "test_batch": Published(31_035_526, "40351d587109b95175f43aff81a1287e"),
    "data_batch_1.bin": Published(30_730_000, "5dd7e06a14cb22eb9f671a540d1b7c25"),
    "data_batch_2.bin": Published(30_730_000, "5ea93a67294ea407fff1d09f752e9692"),
    "data_batch_3.bin": Published(30_730_000, "942cd6a4bcdd0dd3c604fbe906cb4421"),
    "data_batch_4.bin": Published(30_730_000, "ae636b3ba5c66a11e91e8cb52e771fcb"),
    "data_batch_5.bin": Published(30_730_000, "53f37980c15c3d472c316c40844f3f0d"),
    "test_batch.bin": Published(30_730_000, "803d5f7f4d78ea53de84dbe85f74fb6d"),
}


def load_cifar10(directory: Path, split: Literal["train", "test"], num_files: int = NUM_TRAIN_FILES) -> ImageSet:
    """The test images, or those of the first `num_files` training files.

    `directory`: the folder of the files, or its parent.
    """
    names = list_names(num_files) if split == "train" else ["test_batch"]
    parts = [read_batch(path) for path in find_files(directory, names)]
    return ImageSet(
        images=np.concatenate([images for images, _ in parts]),
        labels=np.concatenate([labels for _, labels in parts]),
        mean=MEAN,
        std=STD,
    )


def check_cifar10(directory: Path, num_files: int = NUM_TRAIN_FILES) -> None:
    """Raise an error for missing files or wrong sizes, without reading them."""
    for path in [*find_files(directory, list_names(num_files)), *find_files(directory, ["test_batch"])]:
        check_size(path, path.stat().st_size)


def list_names(num_files: int) -> list[str]:
    """Training files, without suffix."""
    if not 1 <= num_files <= NUM_TRAIN_FILES:
        raise UsageError(f"CIFAR-10 has {NUM_TRAIN_FILES} training files, not {num_files}: use 1 to {NUM_TRAIN_FILES}")
    return [f"data_batch_{number}" for number in range(1, num_files + 1)]


def find_files(directory: Path, names: Sequence[str]) -> list[Path]:
    """The paths of the files, all of one form; otherwise the error names the first missing one."""
    places = [(place, layout) for layout in LAYOUTS for place in (directory / layout.folder, directory)]
    for place, layout in places:
        paths = [place / file for file in layout.list_files(names)]
        if all(path.is_file() for path in paths):
            return paths
    begun = [(place, layout) for place, layout in places if any(place.glob(f"*_batch*{layout.suffix}"))]
    named = [(directory, layout) for layout in LAYOUTS if directory.name == layout.folder]
    place, layout = (begun or named or places)[0]
    missing = next(path for file in layout.list_files(names) if not (path := place / file).is_file())
    raise UsageError(f"CIFAR-10: {missing} not found: {explain_download(place, layout)}")


def explain_download(place: Path, layout: Cifar10Layout) -> str:
    target = place.parent if place.name == layout.folder else place
    return (
        f"run 'scalelab data fetch cifar10 --out {target}', or download {ADDRESS}/{layout.archive} and unpack it with"
        f" 'tar -xzf {layout.archive} -C {target}'"
    )


def read_batch(path: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Images and labels of one verified file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"CIFAR-10: {path} cannot be read: {error.strerror}") from error
    check_size(path, len(data))
    found, expected = hashlib.md5(data, usedforsecurity=False).hexdigest(), PUBLISHED[path.name].digest
    if found != expected:
        raise _damaged(path, f"its md5 is {found}, not {expected}")
    pixels, labels = (read_binary if path.suffix == BINARY.suffix else read_pickle)(path, data)
    if labels.size and not 0 <= labels.min() <= labels.max() < NUM_CLASSES:
        raise _damaged(path, f"its labels range from {labels.min()} to {labels.max()}, not from 0 to {NUM_CLASSES - 1}")
    return pixels.reshape(-1, NUM_CHANNELS, SIDE, SIDE), labels


def check_size(path: Path, num_bytes: int) -> None:
    expected = PUBLISHED[path.name].num_bytes
    if num_bytes != expected:
        raise _damaged(path, f"it has {num_bytes} bytes, not {expected}")


def read_binary(path: Path, data: bytes) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Pixels (samples, 3072) and labels."""
    if len(data) % (1 + PIXEL_BYTES):
        raise _damaged(path, f"its {len(data)} bytes are not a whole number of {1 + PIXEL_BYTES}-byte records")
    records = np.frombuffer(data, dtype=np.uint8).reshape(-1, 1 + PIXEL_BYTES)
    return records[:, 1:], records[:, 0].astype(np.int64)


def read_pickle(path: Path, data: bytes) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Pixels (samples, 3072) and labels."""
    try:
        batch = ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()
        pixels, labels = batch[b"data"], np.array(batch[b"labels"], dtype=np.int64)
    except Exception as error:
        raise _damaged(path, f"it cannot be unpickled: {error}") from error
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape != (len(labels), PIXEL_BYTES):
        raise _damaged(path, f"its data are not a uint8 array of {len(labels)} × {PIXEL_BYTES}")
    return pixels, labels


# NumPy 2 moved the function that pickled arrays name; the array knows where it is.
REBUILD_ARRAY = np.empty(0).__reduce__()[0]
ALLOWED = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): REBUILD_ARRAY,
    ("numpy._core.multiarray", "_reconstruct"): REBUILD_ARRAY,
}


class ArrayUnpickler(pickle.Unpickler):
    """Unpickles arrays, numbers, strings, lists and dicts; refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it loads {module}.{name}, but only arrays are allowed")
        return ALLOWED[module, name]


def _damaged(path: Path, what: str) -> UsageError:
    layout = BINARY if path.suffix == BINARY.suffix else PYTHON
    return UsageError(f"CIFAR-10: {path} is damaged: {what}; {explain_download(path.parent, layout)}")

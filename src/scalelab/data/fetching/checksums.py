"""What a published file must be: its bytes and its checksum."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from scalelab.errors import DataUnreadable


@dataclass(frozen=True)
class Published:
    """Size and checksum, as they were published."""

    num_bytes: int
    digest: str
    algorithm: Literal["md5", "sha256"] = "md5"


def check_file(path: Path, published: Published) -> None:
    """Raise an error if a file is missing or differs from the published one."""
    if not path.is_file():
        raise DataUnreadable(f"{path.name} is missing")
    num_bytes = path.stat().st_size
    if num_bytes != published.num_bytes:
        raise DataUnreadable(f"{path.name} has {num_bytes} bytes, not {published.num_bytes}")
    found = digest_file(path, published.algorithm)
    if found != published.digest:
        raise DataUnreadable(f"{path.name} has the {published.algorithm} {found}, not {published.digest}")


def check_files(directory: Path, files: Mapping[str, Published]) -> None:
    for name, published in files.items():
        check_file(directory / name, published)


def digest_file(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()

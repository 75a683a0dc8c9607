"""Files of other machines by their address: s3://, gs://, hf://, http://, memory:// and whatever else fsspec opens.

They are copied into a temporary directory, which is gone when they have been read: a trace is read in several passes,
and by several processes. A directory gives its files with the wanted endings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from scalelab.errors import UsageError
from scalelab.records.running import hold_directory

ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)", re.DOTALL)
"""A path has lost the second slash of `s3://`."""


@contextmanager
def fetch_remote(paths: Sequence[Path], endings: tuple[str, ...] = ("",)) -> Iterator[tuple[Path, ...]]:
    """The paths, with copies in place of addresses; a path that exists is never an address."""
    if not any(map(is_remote, paths)):
        yield tuple(paths)
        return
    with hold_directory("fetch") as directory:
        found: list[Path] = []
        for number, path in enumerate(paths):
            found.append(copy_files(path, directory / str(number), endings) if is_remote(path) else path)
        yield tuple(found)


def is_remote(path: Path) -> bool:
    return ADDRESS.fullmatch(str(path)) is not None and not path.exists()


def copy_files(path: Path, target: Path, endings: tuple[str, ...]) -> Path:
    """A copy of what is behind an address: one file, or a directory with those of the wanted endings."""
    match = ADDRESS.fullmatch(str(path))
    assert match is not None
    address = f"{match[1]}://{match[2]}"
    try:
        import fsspec
    except ImportError:
        raise UsageError(f"{address} needs fsspec: pip install 'scalelab[remote]'") from None
    target.mkdir(parents=True)
    try:
        system, place = fsspec.core.url_to_fs(address)
        if system.isfile(place):
            system.get_file(place, str(target / PurePosixPath(place).name))
            return target / PurePosixPath(place).name
        if not system.exists(place):
            raise FileNotFoundError("no such file or directory")
        files = sorted(str(file) for file in system.find(place) if str(file).endswith(endings))
        for file in files:
            copy = (target / file.removeprefix(place).lstrip("/")).resolve()
            if not copy.is_relative_to(target.resolve()):
                raise ValueError(f"{file} leads out of the directory")
            copy.parent.mkdir(parents=True, exist_ok=True)
            system.get_file(file, str(copy))
    except Exception as error:
        raise UsageError(f"{address} cannot be read: {type(error).__name__}: {error}") from error
    if not files:
        raise UsageError(f"{address} has no file that ends in {' or '.join(endings)}")
    return target

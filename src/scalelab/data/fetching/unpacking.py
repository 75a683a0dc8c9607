"""The parts of a set, found in whatever carries them: a directory, an archive, a Debian package, or a single file.

What something is called decides nothing; what it is does. From an archive only regular files with a wanted name are
taken, under that name and no path, so that no archive can write anywhere else.
"""

from __future__ import annotations

import lzma
import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from scalelab.errors import DataUnreadable, UsageError

DEBIAN_MAGIC = b"!<arch>\ndebian-binary"


def find_parts(carrier: Path, wanted: Collection[str], scratch: Path) -> dict[str, Path]:
    """Those of the wanted files that there are, by name; what is in an archive is unpacked into `scratch`."""
    if carrier.is_dir():
        return find_files(carrier, wanted)
    with unpacking_errors(carrier):
        if is_debian_package(carrier):
            with opening_debian_package(carrier) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
                return extract_parts(archive, wanted, scratch)
        if tarfile.is_tarfile(carrier):
            with tarfile.open(carrier, mode="r|*") as archive:
                return extract_parts(archive, wanted, scratch)
    return {carrier.name: carrier} if carrier.name in wanted else {}


def find_files(directory: Path, wanted: Collection[str]) -> dict[str, Path]:
    """In a directory and below it; those nearer to it come first."""
    found: dict[str, Path] = {}
    for path in sorted(directory.rglob("*"), key=lambda path: (len(path.parts), path)):
        if path.name in wanted and path.name not in found and path.is_file():
            found[path.name] = path
    return found


def extract_parts(archive: tarfile.TarFile, wanted: Collection[str], scratch: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for member in archive:
        name = Path(member.name).name
        source = archive.extractfile(member) if member.isreg() and name in wanted and name not in found else None
        if source is not None:
            found[name] = scratch / name
            with source, found[name].open("wb") as file:
                shutil.copyfileobj(source, file, 2**20)
    return found


def is_debian_package(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(DEBIAN_MAGIC)) == DEBIAN_MAGIC


@contextmanager
def opening_debian_package(path: Path) -> Iterator[IO[bytes]]:
    """The files of a package as one stream, by the program that knows how they are compressed."""
    program = shutil.which("dpkg-deb")
    if program is None:
        raise UsageError(f"{path} needs dpkg-deb, which is not installed: unpack it elsewhere and name the directory")
    arguments = [program, "--fsys-tarfile", str(path)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            yield process.stdout
            process.stdout.read()
        finally:
            process.stdout.close()
            words = process.stderr.read().decode(errors="replace").strip()
    if process.returncode:
        raise DataUnreadable(f"{path.name} cannot be unpacked: {words.splitlines()[0] if words else 'dpkg-deb failed'}")


@contextmanager
def unpacking_errors(path: Path) -> Iterator[None]:
    """Whatever is wrong inside an archive, in one sentence; a disk that is full is not its fault."""
    try:
        yield
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataUnreadable(f"{path.name} cannot be unpacked: {error}") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise DataUnreadable(f"{path.name} cannot be unpacked: {error}") from error  # gzip's own, such as a wrong CRC

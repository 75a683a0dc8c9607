"""Convert samples from one format to another, in bounded memory, verified before the file takes its place.

Arrays of a memory-mapped file go to the writer directly; what must be inflated is spooled to scratch files in parts
that end at chunks, so each chunk is inflated once. Only a compressed `.npz` is inflated in memory. The new file is read
back and both are hashed column by column; nothing stays after a failure.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scalelab.data.chunks import ColumnChunks, describe_chunks
from scalelab.data.formats.catalogue import ENTRIES, find_format, load_format
from scalelab.data.formats.columns import Array, ArrayColumn, Arrays, Settings, check_arrays, refuse_options
from scalelab.data.formats.stored import StoredSet, reading_errors
from scalelab.data.formats.writing import count_bytes, make_native, taking_place
from scalelab.errors import DataUnreadable, UsageError
from scalelab.records.files import storage_errors

PART_BYTES = 32 * 2**20
"""Samples in memory at once."""

Progress = Callable[[str, int, int], None]
"""Stage, samples done, samples in total."""


@dataclass(frozen=True, kw_only=True)
class Converted:
    num_samples: int
    sample_bytes: int
    source_bytes: int
    result_bytes: int
    digest: str
    """Of all samples, equal in both files."""
    left_out: tuple[str, ...] = ()
    """What else the source contains, in words; not written."""


def name_format(path: Path) -> str:
    """The format of a file name's suffix."""
    for name, entry in ENTRIES.items():
        if entry.suffix and entry.suffix == path.suffix:
            return name
    known = ", ".join(dict.fromkeys(entry.suffix for entry in ENTRIES.values() if entry.suffix))
    raise UsageError(f"--out {path} has an unknown suffix: use {known}, or set --format")


def convert(
    source: Path,
    out: Path,
    *,
    source_format: str = "",
    format: str = "",  # noqa: A002
    options: Settings | None = None,
    overwrite: bool = False,
    progress: Progress = lambda *_: None,
) -> Converted:
    """Write the samples of a dataset in another format."""
    options = options or {}
    from_format, to_format = source_format or find_format(source), format or name_format(out)
    check_places(source, out, overwrite)
    form = load_format(to_format)
    refuse_options(to_format, options, form.write_options)
    columns = describe_chunks(source, from_format)
    with StoredSet(source, format=from_format, options=limit_cache(from_format, columns)) as stored:
        num_samples, part = len(stored), choose_part(columns)
        with taking_place(out) as scratch, gathering(stored, scratch, part, progress) as arrays:
            check_arrays(arrays)
            progress(f"writing {to_format}", 0, num_samples)
            form.write(scratch, {name: make_native(array) for name, array in arrays.items()}, options)
            limits = limit_cache(to_format, describe_chunks(scratch, to_format))
            with StoredSet(scratch, format=to_format, options=limits) as written:
                digest = verify(stored, written, part, progress)
        sample_bytes, left_out = sum(field.num_bytes for field in stored.fields), stored.left_out
    return Converted(
        num_samples=num_samples,
        sample_bytes=sample_bytes,
        source_bytes=count_bytes(source),
        result_bytes=count_bytes(out),
        digest=digest,
        left_out=left_out,
    )


def check_places(source: Path, out: Path, overwrite: bool) -> None:
    if out.exists() and source.exists() and out.samefile(source):
        raise UsageError(f"--out {out} is the input file: choose another name")
    if out.exists() and not overwrite:
        raise UsageError(f"--out {out} already exists: choose another name, or use --overwrite")


def choose_part(columns: Sequence[ColumnChunks]) -> int:
    """Samples per part: whole chunks, about `PART_BYTES`."""
    longest = max(column.chunk_samples for column in columns)
    wanted = max(1, PART_BYTES // max(1, sum(column.sample_bytes for column in columns)))
    return min(columns[0].num_samples, max(1, wanted // longest) * longest if longest <= wanted else wanted)


def limit_cache(name: str, columns: Sequence[ColumnChunks]) -> Settings:
    """A reader cache of one row of chunks per column; the default would fill memory."""
    if "cache_bytes" not in load_format(name).open_options:
        return {}
    row_bytes = max(column.chunk_samples * column.sample_bytes for column in columns)
    return {"cache_bytes": len(columns) * max(PART_BYTES, row_bytes)}


def name_column(name: str) -> str:
    """A column name for every format: HDF5 groups have slashes."""
    return name.replace("/", "-")


@contextmanager
def gathering(stored: StoredSet, beside: Path, part: int, progress: Progress) -> Iterator[Arrays]:
    """All columns as arrays: mapped if possible, otherwise in scratch files."""
    names = [name_column(field.name) for field in stored.fields]
    if len(set(names)) < len(names):
        raise DataUnreadable(f"{stored.path} has two columns that would get the same name: {', '.join(names)}")
    with reading_errors(stored.path):
        opened = load_format(stored.format).open(stored.path, {})
    try:
        mapped = [column.array for column in opened.columns if isinstance(column, ArrayColumn)]
        if len(mapped) == len(names):
            yield dict(zip(names, mapped, strict=True))
            return
    finally:
        opened.close()
    spool = beside.with_name(f"{beside.name}.spool")
    try:
        with storage_errors(spool, "--out"):
            shutil.rmtree(spool, ignore_errors=True)
            spool.mkdir()
            arrays = spool_columns(stored, spool, part, progress)
        yield dict(zip(names, arrays, strict=True))
    finally:
        shutil.rmtree(spool, ignore_errors=True)


def spool_columns(stored: StoredSet, spool: Path, part: int, progress: Progress) -> list[Array]:
    """Columns in scratch files, preallocated: a full disk would otherwise end in SIGBUS."""
    shapes = [(len(stored), *field.shape) for field in stored.fields]
    arrays: list[Array] = []
    for number, (field, shape) in enumerate(zip(stored.fields, shapes, strict=True)):
        path = spool / f"{number}"
        num_bytes = max(1, field.num_bytes * len(stored))
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        arrays.append(np.memmap(path, dtype=field.dtype, mode="r+", shape=shape))
    for start in range(0, len(stored), part):
        end = min(start + part, len(stored))
        for array, samples in zip(arrays, stored.__getitems__(np.arange(start, end)), strict=True):
            array[start:end] = samples
        progress("reading", end, len(stored))
    return [array.view(np.ndarray) for array in arrays]


def verify(source: StoredSet, written: StoredSet, part: int, progress: Progress) -> str:
    """The digest of the samples; raises an error if the two differ."""
    if len(written) != len(source):
        raise DataUnreadable(f"{written.path} has {len(written)} samples after writing, not {len(source)}: try again")
    places = match_columns(source, written)
    digests = [[hashlib.blake2b(digest_size=16) for _ in places] for _ in range(2)]
    for start in range(0, len(source), part):
        numbers = np.arange(start, min(start + part, len(source)))
        before = source.__getitems__(numbers)
        found = written.__getitems__(numbers)
        after = [found[place] for place in places]
        for own, arrays in zip(digests, (before, after), strict=True):
            for digest, array in zip(own, arrays, strict=True):
                digest.update(np.ascontiguousarray(make_native(array)).data.cast("B"))
        progress("verifying", int(numbers[-1]) + 1, len(source))
    first, second = (tuple(digest.hexdigest() for digest in own) for own in digests)
    if first != second:
        raise DataUnreadable(f"{written.path} differs from {source.path} after writing: try another disk")
    return hashlib.blake2b("".join(first).encode(), digest_size=8).hexdigest()


def match_columns(source: StoredSet, written: StoredSet) -> Sequence[int]:
    """The index of each source column among those written: formats may sort or rename them."""
    names = [field.name for field in written.fields]
    places = []
    for field in source.fields:
        is_alone = len(names) == len(source.fields) == 1
        place = 0 if is_alone else names.index(name_column(field.name))
        other = written.fields[place]
        if (other.dtype, other.shape) != (field.dtype.newbyteorder("="), field.shape):
            raise DataUnreadable(f"the format stores {field.words} as {other.words}: choose another --format")
        places.append(place)
    return places

"""Token shards: files of tokens, memory-mapped.

    v1    256 int32 header (magic 20240520, version 1, number of tokens), then uint16 tokens
    v7    256 int32 header (magic 20240801, version 7, number of tokens), then uint32 tokens
    raw   no header, uint16 tokens

Little-endian. v1 and v7 are llm.c's formats, raw is nanoGPT's. Ranks of one host share a memory map, and opening takes
no time. The file size must match the header: a truncated shard would fail in the middle of an epoch.
"""

from __future__ import annotations

import functools
import glob
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from scalelab.errors import UsageError
from scalelab.records.files import replacing

Tokens = npt.NDArray[Any]
"""Any integer type."""
ShardKind = Literal["v1", "v7", "raw"]

NUM_HEADER_WORDS = 256
HEADER_BYTES = 4 * NUM_HEADER_WORDS
CHUNK_TOKENS = 1 << 20
"""Tokens processed at once."""


@dataclass(frozen=True)
class ShardFormat:
    """The layout of a kind of shard."""

    dtype: np.dtype[Any]
    magic: int | None = None
    version: int | None = None

    @property
    def header_bytes(self) -> int:
        return 0 if self.magic is None else HEADER_BYTES

    @property
    def most_token(self) -> int:
        return int(np.iinfo(self.dtype).max)


FORMATS: dict[ShardKind, ShardFormat] = {
    "v1": ShardFormat(np.dtype("<u2"), 20240520, 1),
    "v7": ShardFormat(np.dtype("<u4"), 20240801, 7),
    "raw": ShardFormat(np.dtype("<u2")),
}


@dataclass(frozen=True)
class Shard:
    """An open shard; the tokens are a read-only memory map."""

    path: Path
    kind: ShardKind
    tokens: Tokens

    def __len__(self) -> int:
        return len(self.tokens)


def find_shards(pattern: str) -> list[Path]:
    """The sorted files of a path, a directory (its *.bin, or else its *.raw) or a pattern with *."""
    path = Path(pattern).expanduser()
    if path.is_dir():
        found = sorted(path.glob("*.bin")) or sorted(path.glob("*.raw"))
        if not found:
            raise UsageError(f"no shards in {path}: it has no *.bin files; create some with `scalelab data tokenize`")
        return found
    if path.is_file():
        return [path]
    found = sorted(match for text in glob.glob(str(path), recursive=True) if (match := Path(text)).is_file())  # noqa: PTH207
    if not found:
        raise UsageError(f"no shards match {pattern}: create some with `scalelab data tokenize`")
    return found


def split_shards(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Training and test shards: the latter end in `_val` or `_test`, with an optional number."""
    tests = [path for path in paths if re.search(r"_(val|test)(_\d+)?$", path.stem)]
    return [path for path in paths if path not in tests], tests


def open_shard(path: Path) -> Shard:
    """Memory-map a shard; raises an error if the file does not match its header. A .raw file has none."""
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
    except OSError as error:
        raise UsageError(f"shard {path} cannot be read: {error.strerror}") from error
    if path.suffix == ".raw":
        kind: ShardKind = "raw"
        if find_kind(header) is not None:
            raise UsageError(f"shard {path} has a header: rename it so it does not end in .raw")
        num_tokens, rest = divmod(num_bytes, FORMATS[kind].dtype.itemsize)
        if rest:
            raise UsageError(f"shard {path} is damaged: {num_bytes} bytes are not a whole number of uint16 tokens")
    else:
        kind, num_tokens = read_header(path, header)
        check_size(path, kind, num_tokens, num_bytes)
    if num_tokens == 0:
        raise UsageError(f"shard {path} is empty: it has 0 tokens, expected at least 1")
    form = FORMATS[kind]
    tokens = np.memmap(path, dtype=form.dtype, mode="r", offset=form.header_bytes, shape=(num_tokens,))
    return Shard(path, kind, tokens)


def find_kind(header: bytes) -> ShardKind | None:
    """The kind with this magic number and version."""
    begins = [int(word) for word in np.frombuffer(header[:8], dtype="<i4")] if len(header) >= 8 else []
    return next((kind for kind, form in FORMATS.items() if [form.magic, form.version] == begins), None)


def read_header(path: Path, header: bytes) -> tuple[ShardKind, int]:
    """Kind and number of tokens, from the first bytes."""
    if len(header) < HEADER_BYTES:
        raise UsageError(
            f"shard {path} is truncated: {len(header)} bytes where the header alone has {HEADER_BYTES}"
            " (raw tokens without a header need a name that ends in .raw)"
        )
    magic, version, num_tokens = (int(word) for word in np.frombuffer(header, dtype="<i4")[:3])
    kind = next((kind for kind, form in FORMATS.items() if form.magic == magic), None)
    if kind is None:
        known = " or ".join(str(form.magic) for form in FORMATS.values() if form.magic is not None)
        raise UsageError(
            f"shard {path} is not a token shard: it starts with {magic}, expected {known}"
            " (raw tokens without a header need a name that ends in .raw)"
        )
    if version != FORMATS[kind].version:
        raise UsageError(f"shard {path} has version {version}, expected {FORMATS[kind].version} with magic {magic}")
    if num_tokens < 0:
        raise UsageError(f"shard {path} is damaged: its header lists {num_tokens} tokens, expected at least 1")
    return kind, num_tokens


def check_size(path: Path, kind: ShardKind, num_tokens: int, num_bytes: int) -> None:
    item = FORMATS[kind].dtype.itemsize
    expected = HEADER_BYTES + item * num_tokens
    if num_bytes != expected:
        state = "truncated" if num_bytes < expected else "damaged"
        raise UsageError(
            f"shard {path} is {state}: {num_bytes} bytes, expected {expected}"
            f" (a header of {HEADER_BYTES} and {num_tokens} tokens of {item})"
        )


def write_shard(path: Path, tokens: Tokens, kind: ShardKind = "v1") -> None:
    """Write a shard atomically; tokens must fit its type."""
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise UsageError(
            f"shard {path}: tokens must be a 1-D integer array, got {tokens.dtype} of shape {tokens.shape}"
        )
    starts = range(0, len(tokens), CHUNK_TOKENS)
    write_shard_parts(path, (tokens[start : start + CHUNK_TOKENS] for start in starts), len(tokens), kind)


def write_shard_parts(path: Path, parts: Iterable[Tokens], num_tokens: int, kind: ShardKind = "v1") -> None:
    """The same from parts with so many tokens in total, one in memory at a time."""
    form = FORMATS[kind]
    if not 0 < num_tokens < 2**31:
        raise UsageError(f"shard {path}: the number of tokens must be 1 to {2**31 - 1}, got {num_tokens}")
    with replacing(path) as scratch, scratch.open("wb") as file:
        if form.magic is not None:
            header = np.zeros(NUM_HEADER_WORDS, dtype="<i4")
            header[:3] = form.magic, form.version, num_tokens
            file.write(header.tobytes())
        for part in parts:
            _check_fit(path, part, kind)
            file.write(part.astype(form.dtype).tobytes())
        file.flush()
        os.fsync(file.fileno())


def _check_fit(path: Path, tokens: Tokens, kind: ShardKind) -> None:
    form = FORMATS[kind]
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most > form.most_token:
        wrong = least if least < 0 else most
        advice = "use v7, which has uint32" if 0 <= wrong < 2**32 else "tokens must be between 0 and 2³² − 1"
        raise UsageError(f"shard {path}: token {wrong} does not fit {form.dtype.name} of format {kind}: {advice}")


def find_largest_token(shard: Shard) -> int:
    starts = range(0, len(shard), CHUNK_TOKENS)
    return max(int(shard.tokens[start : start + CHUNK_TOKENS].max()) for start in starts)


def read_largest_token(path: Path) -> int:
    """The largest token of a file, scanned once per process unless it changes."""
    open_shard(path)
    found = path.stat()
    return _scan(path.absolute(), found.st_size, found.st_mtime_ns)


@functools.cache
def _scan(path: Path, num_bytes: int, modified_ns: int) -> int:  # noqa: ARG001 - what tells a changed file
    return find_largest_token(open_shard(path))

"""From texts to shards: encode once, then cut.

How many tokens a text has is known only when all of it is encoded, and the share to test on is counted in tokens. So
tokens first go to one scratch file in the shards' own type, and the shards are copied from it part by part: no more
than a part is in memory. The first tokens are those to test on, the rest is spread evenly over as many shards as
needed: a short last one might be too small for a batch. Shards take their places only when all are written, so that a
failure leaves none behind.
"""

from __future__ import annotations

import glob
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scalelab.data.encoders import Encoder
from scalelab.data.shards import CHUNK_TOKENS, FORMATS, ShardKind, Tokens, write_shard_parts
from scalelab.errors import UsageError
from scalelab.records.files import storage_errors


@dataclass(frozen=True)
class Tokenized:
    """What was written."""

    train: list[Path]
    test: list[Path]
    num_train: int
    num_test: int


def tokenize_files(
    files: Sequence[Path],
    encoder: Encoder,
    *,
    directory: Path,
    name: str,
    kind: ShardKind = "v1",
    test_share: float = 0.1,
    test_tokens: int | None = None,
    tokens_per_shard: int = 100_000_000,
) -> Tokenized:
    """Write `name_val_000000` and `name_train_000001` … into the directory; `test_tokens` overrules `test_share`."""
    check_room(directory, name, kind, encoder.vocabulary)
    with storage_errors(directory, "--out"):
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=directory) as place:
            spool = Path(place) / "tokens"
            num_tokens = spool_tokens(files, encoder, spool, kind)
            num_test = round(num_tokens * test_share) if test_tokens is None else test_tokens
            if num_test >= num_tokens:
                raise UsageError(
                    f"--test-tokens {num_test} leaves nothing to train on: there are only {num_tokens} tokens"
                )
            cuts = [(name_shard(name, "val", 0, kind), 0, num_test)] if num_test else []
            for number, (first, end) in enumerate(cut_evenly(num_test, num_tokens, tokens_per_shard), start=1):
                cuts.append((name_shard(name, "train", number, kind), first, end))
            for file, first, end in cuts:
                parts = read_spool(spool, first, end, kind)
                write_shard_parts(Path(place) / file, parts, end - first, kind)
            paths = [(Path(place) / file).replace(directory / file) for file, _, _ in cuts]
    num_test_files = 1 if num_test else 0
    return Tokenized(
        train=paths[num_test_files:], test=paths[:num_test_files], num_train=num_tokens - num_test, num_test=num_test
    )


def check_room(directory: Path, name: str, kind: ShardKind, vocabulary: int) -> None:
    """Refuse what would mix new shards with old ones, and a type that the tokens do not fit."""
    if vocabulary - 1 > FORMATS[kind].most_token:
        raise UsageError(
            f"--format {kind} stores tokens up to {FORMATS[kind].most_token}, but the vocabulary has {vocabulary - 1}:"
            " use v7"
        )
    suffix = suffix_of(kind)
    literal = glob.escape(name)
    old = [*directory.glob(f"{literal}_train_*{suffix}"), *directory.glob(f"{literal}_val_*{suffix}")]
    if old:
        raise UsageError(f"{min(old)} already exists: remove {name}_*{suffix} there, or choose another --out")


def spool_tokens(files: Sequence[Path], encoder: Encoder, spool: Path, kind: ShardKind) -> int:
    """Write all tokens of all files into a scratch file; gives their number."""
    num_tokens = 0
    with spool.open("wb") as file:
        for path in files:
            for part in encoder.encode_file(path):
                part.astype(FORMATS[kind].dtype).tofile(file)
                num_tokens += len(part)
    if num_tokens == 0:
        raise UsageError(f"nothing to tokenize: {', '.join(map(str, files))} {_is_or_are(files)} empty")
    return num_tokens


def read_spool(spool: Path, first: int, end: int, kind: ShardKind) -> Iterator[Tokens]:
    """Tokens `first` to before `end` of the scratch file; a memory map of it would count as memory."""
    dtype = FORMATS[kind].dtype
    with spool.open("rb") as file:
        file.seek(first * dtype.itemsize)
        for start in range(first, end, CHUNK_TOKENS):
            yield np.fromfile(file, dtype, min(CHUNK_TOKENS, end - start))


def cut_evenly(first: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """Bounds of as few parts as have at most so many tokens each; their sizes differ by one at most."""
    size, num_parts = end - first, -(-(end - first) // most)
    for number in range(num_parts):
        yield first + number * size // num_parts, first + (number + 1) * size // num_parts


def name_shard(name: str, split: str, number: int, kind: ShardKind) -> str:
    return f"{name}_{split}_{number:06}{suffix_of(kind)}"


def suffix_of(kind: ShardKind) -> str:
    """The suffix of a shard's name, which marks files without a header."""
    return ".raw" if kind == "raw" else ".bin"


def _is_or_are(files: Sequence[Path]) -> str:
    return "is" if len(files) == 1 else "are"

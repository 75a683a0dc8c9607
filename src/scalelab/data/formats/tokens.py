"""A token shard (`data/shards.py`) as a dataset.

A sample is a row of `sequence` tokens, by default one; the remainder is not read. Memory-mapped. Tokens are written as
uint16, or as uint32 (version 7) if one does not fit; a .raw file has no header.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from scalelab.data.formats.columns import (
    Arrays,
    Opened,
    Settings,
    StorageFormat,
    make_array_column,
    read_count,
    refuse_options,
)
from scalelab.data.shards import FORMATS as KINDS
from scalelab.data.shards import ShardKind, open_shard, write_shard
from scalelab.errors import UsageError

COLUMN = "tokens"
OPEN_OPTIONS = ("sequence",)


def write(path: Path, arrays: Arrays, _: Settings) -> None:
    if len(arrays) > 1:
        raise UsageError(f"a token shard has one column, got {len(arrays)} ({', '.join(arrays)})")
    name, array = next(iter(arrays.items()))
    if array.dtype.kind not in "iu":
        raise UsageError(f"{name} is {array.dtype}: tokens must be integers")
    kind: ShardKind = "raw" if path.suffix == ".raw" else "v1"
    if kind == "v1" and array.size and int(array.max()) > KINDS["v1"].most_token:
        kind = "v7"
    write_shard(path, np.ascontiguousarray(array).reshape(-1), kind)


def open_set(path: Path, options: Settings) -> Opened:
    refuse_options("tokens", options, OPEN_OPTIONS)
    sequence = read_count(options, "sequence", 1, least=1)
    tokens = open_shard(path).tokens
    num_samples = len(tokens) // sequence
    if not num_samples:
        raise UsageError(f"sequence={sequence} is longer than {path}: it has {len(tokens)} tokens")
    rows = tokens if sequence == 1 else tokens[: num_samples * sequence].reshape(num_samples, sequence)
    return Opened(columns=(make_array_column(COLUMN, rows),), watched=(path,), survives_fork=True)


FORMATS = {"tokens": StorageFormat(name="tokens", write=write, open=open_set, open_options=OPEN_OPTIONS)}

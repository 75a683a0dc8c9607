"""Shards of tokens as sets of samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scalelab.data.formats.stored import StoredSet
from scalelab.data.formats.writing import write_set
from scalelab.data.shards import open_shard
from scalelab.errors import UsageError
from tests.data.shared import SHARED_DATA, needs

TOKENS = np.arange(103) * 7


@pytest.mark.parametrize(
    ("name", "tokens", "kind"),
    [("a.bin", TOKENS, "v1"), ("a.bin", TOKENS + 2**16, "v7"), ("a.raw", TOKENS, "raw")],
)
def test_a_shard_is_written_in_the_smallest_kind_and_read_by_token(
    tmp_path: Path, name: str, tokens: np.ndarray[tuple[int], np.dtype[np.int64]], kind: str
) -> None:
    write_set(tmp_path / name, {"tokens": tokens}, format="tokens")
    assert open_shard(tmp_path / name).kind == kind
    with StoredSet(tmp_path / name) as stored:
        assert (len(stored), stored.fields[0].shape) == (103, ())
        assert np.array_equal(stored.__getitems__([102, 0])[0], tokens[[102, 0]])


def test_a_sample_may_be_a_row_of_tokens(tmp_path: Path) -> None:
    write_set(tmp_path / "a.bin", {"tokens": TOKENS}, format="tokens")
    with StoredSet(tmp_path / "a.bin", options={"sequence": 10}) as stored:
        assert (len(stored), stored.fields[0].shape) == (10, (10,))
        assert np.array_equal(stored.__getitems__([9, 1])[0], TOKENS[:100].reshape(10, 10)[[9, 1]])


def test_rows_are_written_one_behind_the_other(tmp_path: Path) -> None:
    write_set(tmp_path / "a.bin", {"x": TOKENS[:100].reshape(10, 10)}, format="tokens")
    with StoredSet(tmp_path / "a.bin") as stored:
        assert np.array_equal(stored.__getitems__(range(100))[0], TOKENS[:100])


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": TOKENS, "y": TOKENS}, r"one column, got 2 \(x, y\)"),
        ({"x": TOKENS / 2}, "x is float64: tokens must be integers"),
        ({"x": TOKENS - 1}, "token -1 does not fit"),
        ({"x": TOKENS + 2**40}, "does not fit uint32"),
    ],
)
def test_what_is_no_row_of_tokens_is_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray[tuple[int], np.dtype[np.int64]]], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        write_set(tmp_path / "a.bin", arrays, format="tokens")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("sequence", "words"), [(0, "must be an integer, at least 1"), (104, "=104 is longer than")])
def test_a_sequence_that_cannot_work_is_refused(tmp_path: Path, sequence: int, words: str) -> None:
    write_set(tmp_path / "a.bin", {"tokens": TOKENS}, format="tokens")
    with pytest.raises(UsageError, match=f"sequence ?{words}"):
        len(StoredSet(tmp_path / "a.bin", options={"sequence": sequence}))


@needs("token_shards")
def test_published_shards_are_read() -> None:
    path = min((SHARED_DATA / "token_shards").rglob("*.bin"))
    with StoredSet(path, options={"sequence": 64}) as stored:
        assert np.array_equal(stored[1][0], open_shard(path).tokens[64:128])

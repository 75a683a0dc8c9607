"""Token shards: written and read back, and refused when they are not what they say."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelab.data import shards
from scalelab.data.shards import (
    HEADER_BYTES,
    ShardKind,
    find_largest_token,
    find_shards,
    open_shard,
    read_largest_token,
    split_shards,
    write_shard,
)
from scalelab.errors import UsageError
from tests.data.shared import SHARED_DATA, needs

TOKENS = np.arange(100, dtype=np.int64) * 7


@pytest.mark.parametrize(("kind", "item", "header"), [("v1", 2, 1024), ("v7", 4, 1024), ("raw", 2, 0)])
def test_what_is_written_is_read_back(tmp_path: Path, kind: ShardKind, item: int, header: int) -> None:
    path = tmp_path / ("a.raw" if kind == "raw" else "a.bin")
    write_shard(path, TOKENS, kind)
    assert path.stat().st_size == header + item * len(TOKENS)
    shard = open_shard(path)
    assert (shard.kind, len(shard), shard.tokens.dtype.itemsize) == (kind, 100, item)
    assert np.array_equal(shard.tokens, TOKENS)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("kind", "begins"), [("v1", (20240520, 1, 100)), ("v7", (20240801, 7, 100))])
def test_the_header_is_256_little_endian_words(tmp_path: Path, kind: ShardKind, begins: tuple[int, ...]) -> None:
    write_shard(tmp_path / "a.bin", TOKENS, kind)
    header = np.frombuffer((tmp_path / "a.bin").read_bytes()[:HEADER_BYTES], "<i4")
    assert tuple(header[:3]) == begins
    assert not header[3:].any()


def test_the_tokens_are_mapped_and_cannot_be_written(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", TOKENS)
    shard = open_shard(tmp_path / "a.bin")
    assert isinstance(shard.tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        shard.tokens[0] = 1


def test_a_name_that_ends_in_raw_says_that_there_is_no_header(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.raw", TOKENS, "raw")
    assert open_shard(tmp_path / "a.raw").kind == "raw"


@given(kind=st.sampled_from(["v1", "v7", "raw"]), length=st.integers(1, 50), data=st.data())
def test_any_tokens_of_the_type_survive(
    kind: ShardKind, length: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    most = shards.FORMATS[kind].most_token
    values = data.draw(st.lists(st.integers(0, most), min_size=length, max_size=length))
    path = tmp_path_factory.getbasetemp() / ("survives.raw" if kind == "raw" else "survives.bin")
    write_shard(path, np.array(values, dtype=np.int64), kind)
    shard = open_shard(path)
    assert shard.tokens.tolist() == values
    assert find_largest_token(shard) == max(values)


def test_parts_of_a_long_shard_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "CHUNK_TOKENS", 7)
    write_shard(tmp_path / "a.bin", TOKENS)
    shard = open_shard(tmp_path / "a.bin")
    assert np.array_equal(shard.tokens, TOKENS)
    assert find_largest_token(shard) == TOKENS[-1]


def count_scans(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The shards that are read through from now on."""
    scanned: list[Path] = []

    def scan(shard: shards.Shard) -> int:
        scanned.append(shard.path)
        return find_largest_token(shard)

    monkeypatch.setattr(shards, "find_largest_token", scan)
    return scanned


def test_a_file_is_read_through_once_unless_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scanned = count_scans(monkeypatch)
    path = tmp_path / "a.bin"
    write_shard(path, TOKENS)
    assert [read_largest_token(path) for _ in range(3)] == [TOKENS[-1]] * 3
    assert scanned == [path]
    write_shard(path, TOKENS + 1)
    os.utime(path, (1, 1))
    assert read_largest_token(path) == TOKENS[-1] + 1
    assert scanned == [path] * 2
    path.unlink()
    with pytest.raises(UsageError, match=r"a\.bin cannot be read"):
        read_largest_token(path)


@pytest.mark.parametrize(
    ("tokens", "kind", "words"),
    [
        ([1, 65536], "v1", "token 65536 does not fit uint16 of format v1: use v7"),
        ([-1, 5], "v7", "token -1 does not fit uint32"),
        ([2**32], "v7", "token 4294967296 does not fit"),
        ([], "v1", "got 0"),
        ([0.5], "v1", "integer array"),
        ([[1]], "v1", "1-D integer array"),
    ],
)
def test_tokens_that_do_not_fit_are_not_written(tmp_path: Path, tokens: list[int], kind: ShardKind, words: str) -> None:
    array = np.array(tokens) if tokens else np.array([], dtype=np.int64)
    with pytest.raises(UsageError, match=words):
        write_shard(tmp_path / "a.bin", array, kind)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_the_shard_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "CHUNK_TOKENS", 2)
    write_shard(tmp_path / "a.bin", TOKENS)
    with pytest.raises(UsageError):
        write_shard(tmp_path / "a.bin", np.array([1, 2, 3, 70000]))
    assert np.array_equal(open_shard(tmp_path / "a.bin").tokens, TOKENS)
    assert len(list(tmp_path.iterdir())) == 1


def make_file(path: Path, header: tuple[int, ...], num_bytes: int) -> Path:
    words = np.zeros(256, "<i4")
    words[: len(header)] = header
    path.write_bytes((words.tobytes() + bytes(10_000))[:num_bytes])
    return path


@pytest.mark.parametrize(
    ("header", "num_bytes", "words"),
    [
        ((20240520, 1, 100), 1223, ["truncated", "1223 bytes", "expected 1224"]),
        ((20240520, 1, 100), 1225, ["damaged", "1225 bytes", "expected 1224"]),
        ((20240520, 1, 100), 1024, ["truncated", "1024 bytes", "1224"]),
        ((20240520, 1, 100), 1000, ["truncated", "1000 bytes", "1024"]),
        ((20240520, 1, 100), 0, ["truncated", "0 bytes", "1024"]),
        ((20240801, 7, 100), 1224, ["truncated", "1224 bytes", "expected 1424"]),
        ((20240521, 1, 100), 1224, ["starts with 20240521", "expected 20240520 or 20240801"]),
        ((20240520, 7, 100), 1224, ["version 7", "expected 1 with magic 20240520"]),
        ((20240801, 1, 100), 1424, ["version 1", "expected 7 with magic 20240801"]),
        ((20240520, 1, 0), 1024, ["empty", "0 tokens", "expected at least 1"]),
        ((20240520, 1, -5), 1024, ["-5 tokens", "expected at least 1"]),
    ],
)
def test_a_file_that_is_not_what_it_says_is_refused(
    tmp_path: Path, header: tuple[int, ...], num_bytes: int, words: list[str]
) -> None:
    path = make_file(tmp_path / "a.bin", header, num_bytes)
    with pytest.raises(UsageError) as refused:
        open_shard(path)
    assert all(word in str(refused.value) for word in [str(path), *words])


@pytest.mark.parametrize(("num_bytes", "words"), [(7, "7 bytes are not a whole number"), (0, "is empty")])
def test_a_headerless_file_is_checked_too(tmp_path: Path, num_bytes: int, words: str) -> None:
    path = tmp_path / "a.raw"
    path.write_bytes(bytes(num_bytes))
    with pytest.raises(UsageError, match=words):
        open_shard(path)


def test_a_header_is_never_read_as_tokens(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.raw", TOKENS)
    with pytest.raises(UsageError, match="has a header"):
        open_shard(tmp_path / "a.raw")


def test_a_shard_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        open_shard(tmp_path / "a.bin")


def test_shards_are_found_by_file_directory_and_pattern(tmp_path: Path) -> None:
    for name in ("b.bin", "a.bin", "c.txt", "d.raw"):
        (tmp_path / name).touch()
    expected = [tmp_path / "a.bin", tmp_path / "b.bin"]
    assert find_shards(str(tmp_path)) == expected
    assert find_shards(str(tmp_path / "*.bin")) == expected
    assert find_shards(str(tmp_path / "b.bin")) == expected[1:]
    for path in expected:
        path.unlink()
    assert find_shards(str(tmp_path)) == [tmp_path / "d.raw"]


@pytest.mark.parametrize("pattern", [".", "*.bin", "a.bin"])
def test_no_shards_is_an_error_that_names_the_place(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(UsageError, match=str(tmp_path)):
        find_shards(str(tmp_path / pattern))


def test_names_tell_what_is_tested_on() -> None:
    names = ["x_train_000001.bin", "x_val_000000.bin", "y_val.bin", "z_test_3.bin", "a_value.bin", "q_val_train_1.bin"]
    train, test = split_shards([Path(name) for name in names])
    assert [path.name for path in train] == ["x_train_000001.bin", "a_value.bin", "q_val_train_1.bin"]
    assert [path.name for path in test] == ["x_val_000000.bin", "y_val.bin", "z_test_3.bin"]


REAL = {"sotu_train_000001": 500_000, "sotu_train_000004": 74_512, "tiny_shakespeare_val": 32_768}


@needs("token_shards")
@pytest.mark.parametrize(("name", "num_tokens"), REAL.items())
def test_real_shards_are_read(name: str, num_tokens: int) -> None:
    shard = open_shard(SHARED_DATA / "token_shards" / f"{name}.bin")
    assert (shard.kind, len(shard), find_largest_token(shard)) == ("v1", num_tokens, 50256)

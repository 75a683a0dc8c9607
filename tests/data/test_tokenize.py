"""Shards cut from texts: all of the tokens, in order, or none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelab.data.shards import Tokens, find_shards, open_shard, split_shards
from scalelab.data.tokenize import ByteEncoder, Tokenized, tokenize_files
from scalelab.errors import UsageError

CONTENT = bytes(range(100)) * 10


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(CONTENT)
    return path


def tokenize(text: Path, **fields: Any) -> Tokenized:
    defaults: dict[str, Any] = {"directory": text.parent / "out", "name": "x"}
    return tokenize_files([text], ByteEncoder(), **(defaults | fields))


@pytest.mark.parametrize("kind", ["v1", "v7", "raw"])
def test_test_and_training_shards_are_all_tokens_in_order(text: Path, kind: Any) -> None:
    written = tokenize(text, kind=kind, test_share=0.25, tokens_per_shard=400)
    assert (written.num_test, written.num_train) == (250, 750)
    suffix = ".raw" if kind == "raw" else ".bin"
    names = [path.name for path in [*written.test, *written.train]]
    assert names == [f"x_val_000000{suffix}", f"x_train_000001{suffix}", f"x_train_000002{suffix}"]
    shards = [open_shard(path) for path in [*written.test, *written.train]]
    assert [len(shard) for shard in shards] == [250, 375, 375]
    assert bytes(np.concatenate([shard.tokens for shard in shards]).astype(np.uint8)) == CONTENT
    assert split_shards(find_shards(str(text.parent / "out"))) == (written.train, written.test)


def test_no_shard_is_much_smaller_than_the_others(text: Path) -> None:
    written = tokenize(text, test_share=0.0, tokens_per_shard=333)
    assert [len(open_shard(path)) for path in written.train] == [250, 250, 250, 250]
    assert written.test == []


def test_a_number_of_tokens_overrules_the_share(text: Path) -> None:
    assert tokenize(text, test_tokens=3).num_test == 3


def test_a_shard_can_have_an_exact_number_of_tokens(text: Path) -> None:
    written = tokenize_files(
        [text, text.with_name("never read")], ByteEncoder(part_size=300), directory=text.parent, name="x",
        max_tokens=777, test_tokens=77,
    )  # fmt: skip
    assert (written.num_test, written.num_train) == (77, 700)
    tokens = [open_shard(path).tokens for path in (*written.test, *written.train)]
    assert bytes(np.concatenate(tokens).astype(np.uint8)) == CONTENT[:777]
    assert tokenize(text, max_tokens=5000).num_train == 900, "all there are"


def test_several_texts_follow_each_other(text: Path) -> None:
    other = text.with_name("other.txt")
    other.write_bytes(b"\xff\xfe")
    written = tokenize_files([other, text], ByteEncoder(), directory=text.parent, name="x", test_share=0)
    tokens = open_shard(written.train[0]).tokens
    assert tokens[:3].tolist() == [255, 254, 0]
    assert len(tokens) == 1002


class FailingEncoder:
    vocabulary = 256

    def encode_files(self, paths: Sequence[Path]) -> Iterator[Tokens]:
        yield np.arange(10)
        raise OSError("the disk is gone")


def test_a_failure_leaves_no_file(text: Path) -> None:
    out = text.parent / "out"
    with pytest.raises(OSError, match="the disk is gone"):
        tokenize_files([text], FailingEncoder(), directory=out, name="x")
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("name", ["x", "x[1]"])
def test_old_shards_of_the_name_are_not_mixed_with_new_ones(text: Path, name: str) -> None:
    tokenize(text, name=name)
    tokenize(text, name="y")
    with pytest.raises(UsageError, match="already exists: remove"):
        tokenize(text, name=name)


class LargeEncoder(ByteEncoder):
    vocabulary = 65537


def test_a_vocabulary_that_does_not_fit_is_refused_before_anything_is_read(text: Path) -> None:
    with pytest.raises(UsageError, match="--format v1 stores tokens up to 65535, but the vocabulary has 65536: use v7"):
        tokenize_files([text], LargeEncoder(), directory=text.parent / "out", name="x")
    assert not (text.parent / "out").exists()
    tokenize_files([text], LargeEncoder(), directory=text.parent / "out", name="x", kind="v7")


def test_there_must_be_something_to_train_on(text: Path) -> None:
    with pytest.raises(UsageError, match="--test-tokens 1000 leaves nothing"):
        tokenize(text, test_tokens=1000)
    text.write_bytes(b"")
    with pytest.raises(UsageError, match=r"nothing to tokenize: .* is empty"):
        tokenize(text)

"""Text becomes the same tokens however it is read in parts."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelab.data.tokenize import (
    ByteEncoder,
    PairEncoder,
    Piece,
    decode_parts,
    find_cut,
    load_pair_encoder,
    split_documents,
)
from scalelab.errors import UsageError
from tests.data.shared import SHARED_DATA, needs

texts = st.text(alphabet="ab'1 \n\t.é", max_size=60)


class WordTokenizer:
    """A token for every character: enough to see where documents begin."""

    def encode_batch(self, texts: list[str]) -> list[SimpleNamespace]:
        return [SimpleNamespace(ids=[ord(character) for character in text]) for text in texts]

    def get_vocab_size(self) -> int:
        return 1000


def encode(path: Path, separator: str | None, part_size: int = 1 << 20) -> list[int]:
    encoder = PairEncoder(WordTokenizer(), 999, separator, part_size, piece_size=part_size // 2 + 1)
    return [int(token) for part in encoder.encode_files([path]) for token in part]


def expected_tokens(text: str, separator: str | None) -> list[int]:
    documents = text.split(separator) if separator else [text]
    whole = [document + (separator or "") for document in documents[:-1]] + [last for last in documents[-1:] if last]
    return [token for document in whole for token in (999, *map(ord, document))]


@given(text=texts, part_size=st.integers(1, 20), separator=st.sampled_from([None, "\n\n", "a", ".\n."]))
def test_documents_begin_with_the_end_of_text_however_the_file_is_read(
    text: str, part_size: int, separator: str | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "text.txt"
    path.write_bytes(text.encode())
    assert encode(path, separator, part_size) == expected_tokens(text, separator)


@pytest.mark.parametrize(("num_files", "num_words"), [(1, 30), (6, 5)])
def test_long_texts_and_many_short_ones_are_encoded_in_pieces_side_by_side(
    num_files: int, num_words: int, tmp_path: Path
) -> None:
    """The package encodes the texts of a batch on all cores."""
    batches: list[list[str]] = []

    class CountingTokenizer(WordTokenizer):
        def encode_batch(self, texts: list[str]) -> list[SimpleNamespace]:
            batches.append(texts)
            return super().encode_batch(texts)

    paths = [tmp_path / str(number) for number in range(num_files)]
    for path in paths:
        path.write_text(" word" * num_words)
    encoder = PairEncoder(CountingTokenizer(), 999, part_size=1000, piece_size=50)
    (tokens,) = encoder.encode_files(paths)
    assert tokens.tolist() == num_files * expected_tokens(" word" * num_words, None)
    (batch,) = batches
    assert max(map(len, batch)) <= 50
    assert 3 <= len(batch) <= 6


def test_bytes_are_the_tokens_of_any_file(tmp_path: Path) -> None:
    path = tmp_path / "any"
    path.write_bytes(bytes(range(256)) * 3)
    encoder = ByteEncoder(part_size=100)
    parts = list(encoder.encode_files([path]))
    assert max(len(part) for part in parts) == 100
    assert np.concatenate(parts).tolist() == list(range(256)) * 3
    assert encoder.vocabulary == 256


@pytest.mark.parametrize(
    ("text", "most", "place"),
    [
        ("one two", 7, 3),
        ("one two three", 13, 7),
        ("one two three", 6, 3),
        ("one  two", 8, 3),
        ("onetwo", 6, 0),
        (" a", 2, 0),
    ],
)
def test_a_cut_is_between_a_character_and_white_space(text: str, most: int, place: int) -> None:
    assert find_cut(text, most) == place


def test_a_long_document_is_given_in_pieces_of_which_only_the_first_begins_one() -> None:
    assert list(split_documents(iter(["one two ", "three"]), None, 8)) == [
        Piece(True, "one two"),
        Piece(False, " three"),
    ]


@pytest.mark.parametrize("part_size", [1, 2, 3, 100])
def test_text_that_is_no_utf8_is_refused_with_the_place(tmp_path: Path, part_size: int) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("né".encode() + b"\xff!")
    with pytest.raises(UsageError, match=r"a\.txt is not valid UTF-8 .* at byte 3.*--tokenizer bytes"):
        list(decode_parts(path, part_size))
    path.write_bytes("né".encode()[:-1])
    with pytest.raises(UsageError, match="unexpected end of data at byte 1"):
        list(decode_parts(path, part_size))


def test_line_ends_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\r\nb\rc\n")
    assert "".join(decode_parts(tmp_path / "a.txt", 3)) == "a\r\nb\rc\n"


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r"pip install 'scalelab\[text\]'"):
        load_pair_encoder(tmp_path / "encoder.json", tmp_path / "vocab.bpe")


def test_files_that_are_no_encoding_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    vocabulary, merges = tmp_path / "encoder.json", tmp_path / "vocab.bpe"
    with pytest.raises(UsageError, match=r"--vocab .*encoder\.json: file not found"):
        load_pair_encoder(vocabulary, merges)
    vocabulary.write_text("{")
    with pytest.raises(UsageError, match=r"--merges .*vocab\.bpe: file not found"):
        load_pair_encoder(vocabulary, merges)
    merges.write_text("#version: 0.2\n")
    with pytest.raises(UsageError, match="are not a valid byte-pair encoding"):
        load_pair_encoder(vocabulary, merges)
    vocabulary.write_text('{"a": 0}')
    with pytest.raises(UsageError, match="lacks <|endoftext|>".replace("|", r"\|")):
        load_pair_encoder(vocabulary, merges)


BPE = ("gpt2_bpe/encoder.json", "gpt2_bpe/vocab.bpe")


@pytest.fixture(scope="module")
def encoder() -> PairEncoder:
    pytest.importorskip("tokenizers")
    return load_pair_encoder(*(SHARED_DATA / name for name in BPE))


@needs(*BPE)
def test_gpt2_knows_its_tokens(encoder: PairEncoder, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Hello world")
    (tokens,) = encoder.encode_files([tmp_path / "a.txt"])
    assert tokens.tolist() == [50256, 15496, 995]
    assert encoder.vocabulary == 50257


@needs(*BPE)
@settings(max_examples=50)
@given(text=st.text(alphabet="ab's1 \n\r\t.é\u3000", max_size=60), data=st.data())
def test_cutting_a_text_does_not_change_its_tokens(encoder: PairEncoder, text: str, data: st.DataObject) -> None:
    place = find_cut(text, data.draw(st.integers(0, len(text))))
    left, right, whole = encoder.tokenizer.encode_batch([text[:place], text[place:], text])
    assert left.ids + right.ids == whole.ids

"""From text to tokens: bytes as they are, or GPT-2's byte-pair encoding.

    bytes   every byte is a token: 256 of them, any file, nothing to install
    gpt2    byte-level byte-pair encoding by the `tokenizers` package, from OpenAI's encoder.json and vocab.bpe; every
            document begins with <|endoftext|>

Texts are read in parts, so that memory does not grow with them. For bytes any part will do. A byte-pair encoding may
be cut where its result does not change: between a character and the white space after it, since GPT-2 splits a text
into words, each with the one space before it, before it looks at pairs (A. Radford et al., Language Models are
Unsupervised Multitask Learners, 2019). Only a text with no white space for a long while is held in memory whole.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from scalelab.data.shards import Tokens
from scalelab.errors import UsageError

END_OF_TEXT = "<|endoftext|>"
PART_SIZE = 1 << 20
"""Bytes that are read at once, and characters that are encoded at once."""


class Encoder(Protocol):
    """Gives the tokens of a file part by part."""

    @property
    def vocabulary(self) -> int:
        """Number of different tokens."""
        ...

    def encode_file(self, path: Path) -> Iterator[Tokens]: ...


@dataclass(frozen=True)
class ByteEncoder:
    """Every byte is a token."""

    part_size: int = PART_SIZE

    @property
    def vocabulary(self) -> int:
        return 256

    def encode_file(self, path: Path) -> Iterator[Tokens]:
        for part in read_parts(path, self.part_size):
            yield np.frombuffer(part, dtype=np.uint8)


@dataclass(frozen=True)
class PairEncoder:
    """GPT-2's byte-pair encoding."""

    tokenizer: Any
    end_of_text: int
    separator: str | None = None
    """What documents end with; None: a file is one document."""
    part_size: int = PART_SIZE

    @property
    def vocabulary(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    def encode_file(self, path: Path) -> Iterator[Tokens]:
        pieces: list[Piece] = []
        num_characters = 0
        for piece in split_documents(decode_parts(path, self.part_size), self.separator, self.part_size):
            pieces.append(piece)
            num_characters += len(piece.text)
            if num_characters >= self.part_size:
                yield self._encode(pieces)
                pieces, num_characters = [], 0
        if pieces:
            yield self._encode(pieces)

    def _encode(self, pieces: Sequence[Piece]) -> Tokens:
        tokens: list[int] = []
        for piece, encoding in zip(pieces, self.tokenizer.encode_batch([piece.text for piece in pieces]), strict=True):
            if piece.is_beginning:
                tokens.append(self.end_of_text)
            tokens += encoding.ids
        return np.array(tokens, dtype=np.int64)


def load_pair_encoder(vocabulary: Path, merges: Path, separator: str | None = None) -> PairEncoder:
    """GPT-2's encoding from its two files, encoder.json and vocab.bpe."""
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers
    except ImportError:
        raise UsageError(
            "--tokenizer gpt2 needs the tokenizers package: pip install 'scalelab[text]', or use --tokenizer bytes"
        ) from None
    for flag, path in (("--vocab", vocabulary), ("--merges", merges)):
        if not path.is_file():
            raise UsageError(f"{flag} {path}: file not found")
    try:
        tokenizer = Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
    except Exception as error:  # the package raises nothing more special
        raise UsageError(
            f"--vocab {vocabulary} and --merges {merges} are not a valid byte-pair encoding: {error}"
        ) from error
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    if end_of_text is None:
        raise UsageError(
            f"--vocab {vocabulary} lacks {END_OF_TEXT}, which separates documents: use GPT-2's encoder.json"
        )
    return PairEncoder(tokenizer, end_of_text, separator)


class Piece(NamedTuple):
    """A part of a text that can be encoded by itself."""

    is_beginning: bool
    """Whether a document begins with it."""
    text: str


def split_documents(parts: Iterator[str], separator: str | None, part_size: int) -> Iterator[Piece]:
    """The documents of a text, each with the separator that ends it; long ones in pieces."""
    held, is_beginning = "", True
    for part in parts:
        held += part
        if separator:
            *whole, held = held.split(separator)
            for text in whole:
                yield Piece(is_beginning, text + separator)
                is_beginning = True
        if len(held) >= part_size and (end := find_cut(held, len(held) - len(separator or ""))):
            yield Piece(is_beginning, held[:end])
            held, is_beginning = held[end:], False
    if held:
        yield Piece(is_beginning, held)


def find_cut(text: str, most: int) -> int:
    """The last place up to `most` with a character before and white space after it; 0: there is none.

    A separator of which the beginning has already been read lies behind `most`.
    """
    for place in range(min(most, len(text) - 1), 0, -1):
        if text[place].isspace() and not text[place - 1].isspace():
            return place
    return 0


def read_parts(path: Path, part_size: int) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while part := file.read(part_size):
                yield part
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def decode_parts(path: Path, part_size: int) -> Iterator[str]:
    """A file's text, with its line ends as they are."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    num_decoded = 0
    for part in itertools.chain(read_parts(path, part_size), (b"",)):
        num_held = len(decoder.getstate()[0])
        try:
            yield decoder.decode(part, final=not part)
        except UnicodeDecodeError as error:
            place = num_decoded - num_held + error.start
            raise UsageError(
                f"{path} is not valid UTF-8 ({error.reason} at byte {place}): use --tokenizer bytes"
            ) from None
        num_decoded += len(part)

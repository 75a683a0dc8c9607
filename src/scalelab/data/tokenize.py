"""Turn text into token shards.

    bytes   every byte is a token: 256 of them, any file, nothing to install
    gpt2    byte-level BPE by the `tokenizers` package, from OpenAI's encoder.json and vocab.bpe; every document begins
            with <|endoftext|>

Files are read in parts, in bounded memory, and encoded in pieces on all cores. BPE may be cut between a character and
the white space after it, because GPT-2 splits text into words with their leading space before it merges pairs (A.
Radford et al., Language Models are Unsupervised Multitask Learners, 2019). Only a long text without white space is held
in memory whole.

The number of tokens is known only after encoding, so tokens are spooled to a scratch file and shards are copied from
it. The first tokens are the test shard; the rest is spread evenly, because a short last shard might be too small for a
batch. Shards take their places only when all are written.
"""

from __future__ import annotations

import codecs
import glob
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from scalelab.data.shards import CHUNK_TOKENS, FORMATS, ShardKind, Tokens, write_shard_parts
from scalelab.errors import UsageError
from scalelab.records.files import storage_errors

END_OF_TEXT = "<|endoftext|>"
PART_SIZE = 1 << 20
"""Bytes read at once, and characters encoded at once."""
PIECE_SIZE = 1 << 16
"""Characters of a long text that one core encodes at once."""


class Encoder(Protocol):
    """Yields the tokens of files in parts."""

    @property
    def vocabulary(self) -> int:
        """Number of different tokens."""
        ...

    def encode_files(self, paths: Sequence[Path]) -> Iterator[Tokens]: ...


@dataclass(frozen=True)
class ByteEncoder:
    """Every byte is a token."""

    part_size: int = PART_SIZE

    @property
    def vocabulary(self) -> int:
        return 256

    def encode_files(self, paths: Sequence[Path]) -> Iterator[Tokens]:
        for path in paths:
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
    piece_size: int = PIECE_SIZE

    @property
    def vocabulary(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    def encode_files(self, paths: Sequence[Path]) -> Iterator[Tokens]:
        pieces: list[Piece] = []
        num_characters = 0
        for path in paths:
            for piece in split_documents(decode_parts(path, self.part_size), self.separator, self.part_size):
                pieces += cut_piece(piece, self.piece_size)
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
    """GPT-2's encoding from encoder.json and vocab.bpe."""
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
    except Exception as error:  # the package raises nothing more specific
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
    """A part of a text that can be encoded alone."""

    is_beginning: bool
    """Whether a document begins here."""
    text: str


def split_documents(parts: Iterator[str], separator: str | None, part_size: int) -> Iterator[Piece]:
    """The documents of a text, each with its closing separator; long ones in pieces."""
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


def cut_piece(piece: Piece, most: int) -> Iterator[Piece]:
    """The same in pieces of at most `most` characters, as far as white space allows."""
    is_beginning, text = piece
    while len(text) > most and (end := find_cut(text, most)):
        yield Piece(is_beginning, text[:end])
        is_beginning, text = False, text[end:]
    yield Piece(is_beginning, text)


def find_cut(text: str, most: int) -> int:
    """The last place up to `most` with a character before and white space after it; 0 if there is none.

    A partly read separator lies behind `most`.
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
    """A file's text, line ends unchanged."""
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


@dataclass(frozen=True)
class Tokenized:
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
    max_tokens: int | None = None,
    tokens_per_shard: int = 100_000_000,
) -> Tokenized:
    """Write `name_val_000000` and `name_train_000001` … ; `test_tokens` overrides `test_share`.

    Reads no further than `max_tokens`, which counts the test set."""
    check_room(directory, name, kind, encoder.vocabulary)
    with storage_errors(directory, "--out"):
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=directory) as place:
            spool = Path(place) / "tokens"
            num_tokens = spool_tokens(files, encoder, spool, kind, max_tokens)
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
    """Refuse to mix new shards with old ones, and a type too small for the vocabulary."""
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


def spool_tokens(files: Sequence[Path], encoder: Encoder, spool: Path, kind: ShardKind, most: int | None) -> int:
    """Write the tokens, up to `most`, to a scratch file; returns their number."""
    num_tokens = 0
    with spool.open("wb") as file:
        for part in encoder.encode_files(files):
            kept = part if most is None else part[: most - num_tokens]
            kept.astype(FORMATS[kind].dtype).tofile(file)
            num_tokens += len(kept)
            if num_tokens == most:
                break
    if num_tokens == 0:
        raise UsageError(f"nothing to tokenize: {', '.join(map(str, files))} {_is_or_are(files)} empty")
    return num_tokens


def read_spool(spool: Path, first: int, end: int, kind: ShardKind) -> Iterator[Tokens]:
    """Tokens `first` to `end` of the scratch file; a memory map would count as memory."""
    dtype = FORMATS[kind].dtype
    with spool.open("rb") as file:
        file.seek(first * dtype.itemsize)
        for start in range(first, end, CHUNK_TOKENS):
            yield np.fromfile(file, dtype, min(CHUNK_TOKENS, end - start))


def cut_evenly(first: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """The fewest parts of at most `most` tokens, of nearly equal size."""
    size, num_parts = end - first, -(-(end - first) // most)
    for number in range(num_parts):
        yield first + number * size // num_parts, first + (number + 1) * size // num_parts


def name_shard(name: str, split: str, number: int, kind: ShardKind) -> str:
    return f"{name}_{split}_{number:06}{suffix_of(kind)}"


def suffix_of(kind: ShardKind) -> str:
    return ".raw" if kind == "raw" else ".bin"


def _is_or_are(files: Sequence[Path]) -> str:
    return "is" if len(files) == 1 else "are"

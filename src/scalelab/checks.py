"""What we did not write: invalid values get an error that names them, and text is shown but never obeyed.

Error messages of workloads, names in somebody else's run directory and logs may hold terminal sequences: colours,
window titles, links, movements of the cursor, letters that run backwards. `clean_text` (one line) and `clean_lines` (a
log or a traceback) take out colours and spell every other control character, `\\x1b`. Renderers use them for each text
of a document; the command line prints through a `GuardedStream`, so that no message is forgotten.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TextIO, TypeVar, cast

from scalelab.errors import UsageError

T = TypeVar("T")


FLAGS = {
    "batch_per_rank": "batch-size-per-rank",
    "bucket_mb": "bucket-cap-mb",
    "checkpointing": "activation-checkpointing",
    "global_batch": "global-batch-size",
    "gradient_hook": "comm-hook",
}
"""Fields whose flag has torch's name instead of their own."""


def flag(name: str) -> str:
    """The flag that sets a field."""
    return f"--{FLAGS.get(name, name.replace('_', '-'))}"


def check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UsageError(f"{flag(name)} must be at least {least}, got {value}")


def check_positive(name: str, value: float) -> None:
    if not value > 0 or math.isinf(value):
        raise UsageError(f"{flag(name)} must be a finite number > 0, got {value:g}")


def check_not_negative(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise UsageError(f"{flag(name)} must be a finite number ≥ 0, got {value:g}")


def check_share(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise UsageError(f"{flag(name)} must be at least 0 and less than 1, got {value:g}")


def check_one_of(name: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise UsageError(f"{flag(name)} must be one of {', '.join(known)}, got {value!r}")


def check_divisible(global_batch: int, num_ranks: int) -> None:
    """Every rank must get the same number of samples: otherwise they do different work."""
    if global_batch % num_ranks:
        below, above = global_batch // num_ranks * num_ranks, (global_batch // num_ranks + 1) * num_ranks
        options = f"{below} or {above}" if below else f"{above}"
        raise UsageError(f"{flag('global_batch')} {global_batch} is not divisible by {num_ranks} ranks: use {options}")


def read_flag(name: str, text: str, parse: Callable[[str], T]) -> T:
    """The value of a flag; the error for text that `parse` rejects names the flag."""
    try:
        return parse(text)
    except UsageError as error:
        raise UsageError(f"{flag(name)} {error}") from None


_COLOURS = re.compile(r"(?:\x1b\[|\x9b)[0-9;:]*m")
"""Select Graphic Rendition (ECMA-48): tools colour their messages, and the words are the same without."""
_BREAKS = "\t\n\v\f\r\x1c\x1d\x1e\x1f\x85\u2028\u2029"
_JOINERS = "\xad\u200b\u200c\u200d\u2060\ufeff"
"""They shape or break words and take no room: nothing is lost without them."""


def clean_text(text: str) -> str:
    """One line of harmless text: line breaks become blanks, control and direction characters are spelled."""
    if not text.isprintable():  # as nearly every text is
        text = "".join(" " if one in _BREAKS else _spell_control(one) for one in _COLOURS.sub("", text))
    return re.sub(" +", " ", text).strip(" ")


def clean_lines(text: str) -> str:
    """Lines of harmless text: a log, a traceback or a message, with its line breaks and tabs."""
    if text.replace("\n", "").isprintable():
        return text
    plain = _COLOURS.sub("", text).replace("\r\n", "\n")
    return "".join(one if one in "\n\t" else _spell_control(one) for one in plain)


def _spell_control(character: str) -> str:
    """A character as it is, or as Python spells it if a terminal would obey it or hide it."""
    if character in _JOINERS:
        return ""
    is_obeyed = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    return character.encode("unicode_escape").decode() if is_obeyed else character


def defuse_formula(text: str) -> str:
    """One clean line of text that no spreadsheet takes for a formula."""
    cleaned = clean_text(text)
    return f"'{cleaned}" if cleaned.startswith(("=", "+", "-", "@", "＝", "＋", "－", "＠")) else cleaned


class GuardedStream:
    """A text stream on which every message is harmless; `unguarded` is for what we composed of clean parts."""

    def __init__(self, stream: TextIO) -> None:
        self.unguarded = stream

    def write(self, text: str) -> int:
        self.unguarded.write(clean_lines(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unguarded, name)


class ForgivingStream:
    """Standard error: no closed terminal and no full disk may end a study whose progress it shows."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def forgive_stream(stream: TextIO) -> TextIO:
    return cast("TextIO", ForgivingStream(stream))


def guard_stream(stream: TextIO) -> TextIO:
    return cast("TextIO", GuardedStream(stream))


def find_unguarded(stream: TextIO) -> TextIO:
    """The stream itself, for colours, progress bars and formats that are clean by their renderer."""
    return stream.unguarded if isinstance(stream, GuardedStream) else stream

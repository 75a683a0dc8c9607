"""What we did not write: invalid values get an error that names them, and text is shown but never obeyed.

Error messages of workloads, names in somebody else's run directory and logs may hold terminal sequences: colours,
window titles, links, movements of the cursor, letters that run backwards. `clean_text` (one line) and `clean_lines` (a
log or a traceback) take out colours and spell every other control character, `\\x1b`. Renderers use them for each text
of a document; the command line prints through a `GuardedStream`, so that no message is forgotten.

`parse_*` read sizes, times and rates as a person types them.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from typing import Any, TextIO, TypeVar, cast

from scalelab.errors import UsageError
from scalelab.units import GROUP_SEPARATOR

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


_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "p": 2**50}
_BYTES = re.compile(r"([0-9]{1,24}(?:\.[0-9]{1,24})?)\s*([kmgtp]?)(i?)b?", re.IGNORECASE)
_SECONDS = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,24})?)\s*(ns|us|µs|μs|ms|min|m|s|h|d)\s*")
_SECONDS_PER = {
    "ns": Fraction(1, 10**9), "us": Fraction(1, 10**6), "µs": Fraction(1, 10**6), "μs": Fraction(1, 10**6),
    "ms": Fraction(1, 1000), "s": Fraction(1), "m": Fraction(60), "min": Fraction(60), "h": Fraction(3600),
    "d": Fraction(86400),
}  # fmt: skip


def parse_bytes(text: str) -> int:
    """A size as a person types it: decimal (512MB, 1.5G) or binary (2GiB), or bare bytes."""
    match = _BYTES.fullmatch(text.replace(GROUP_SEPARATOR, "").strip())
    factors = _BINARY if match and match[3] else _DECIMAL
    if match is None or match[2].lower() not in factors:
        raise UsageError(f"{text!r} is not a valid size: use a form such as 512MB, 2GiB, 1.5G or 4096")
    return round(Fraction(match[1]) * factors[match[2].lower()])


@lru_cache(maxsize=256)
def parse_seconds(text: str) -> float:
    """A time as a person types it: 30s, 10min, 1.5h, 200ms, "1 min 20 s", or bare seconds."""
    stripped = text.replace(GROUP_SEPARATOR, "").strip()
    if re.fullmatch(r"[0-9]{1,15}(?:\.[0-9]{1,24})?", stripped):
        stripped += "s"
    parts = _SECONDS.findall(stripped)
    if not parts or _SECONDS.sub("", stripped):
        raise UsageError(
            f"{text!r} is not a valid duration: use a form such as 30s, 10min, 1.5h, 200ms or 90 (seconds)"
        )
    return float(sum(Fraction(number) * _SECONDS_PER[symbol] for number, symbol in parts))


def parse_bit_rate(text: str) -> float:
    """Bits per second as tc takes them: 1gbit, 100mbit, 2.5gbit, 64kbit; a trailing /s is allowed."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,24})?) ?([kmgt]?)bit(?:/s)?", text.strip().lower())
    rate = float(match[1]) * 1000 ** " kmgt".index(match[2] or " ") if match else 0.0
    if rate < 1:
        raise UsageError(f"{text!r} is not a valid rate: use a form such as 1gbit, 100mbit or 64kbit")
    return rate


def parse_percent(text: str) -> float:
    """A share from 5% or 0.05."""
    plain = text.strip()
    try:
        share = float(plain.removesuffix("%")) / (100 if plain.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise UsageError(f"{text!r} is not a valid percentage: use a form such as 5%")
    return share

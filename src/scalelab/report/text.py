"""Lines of text for people: clean them, measure them, break them.

Text that comes from users (names, paths, messages of failures) must not be able to steer a terminal, hide
itself or run backwards, so every text passes `clean_text` before it is printed. Widths are those of a
terminal, where a Chinese character takes two columns and an accent none (Unicode Standard Annex 11).
"""

from __future__ import annotations

import re
import unicodedata
from typing import Literal

Align = Literal["left", "right"]

_TERMINAL_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # colours, movements of the cursor
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # window titles, links
    r"|\x1b[ -/]*[0-~]"
)
_BREAK = re.compile(r"(?<!±) (?![±%])")
"""A blank at which a line may end: "1.92 ± 0.02" and "96 %" stay whole."""


def clean_text(text: str) -> str:
    """One line of harmless text: no terminal sequences, no control or direction characters, single blanks."""
    if not text.isprintable():  # as nearly every text is
        visible = _TERMINAL_SEQUENCE.sub("", text)
        text = "".join(_clean_character(character) for character in visible)
    return re.sub(" +", " ", text).strip(" ")


def _clean_character(character: str) -> str:
    if character in "\t\n\v\f\r\x1c\x1d\x1e\x1f\x85\u2028\u2029":
        return " "
    category = unicodedata.category(character)
    if category in ("Cc", "Cs"):
        return "\ufffd"
    return "" if category == "Cf" else character


def measure_text(text: str) -> int:
    """How many columns of a terminal a text takes."""
    return len(text) if text.isascii() else sum(map(_measure_character, text))


def _measure_character(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def pad_text(text: str, width: int, align: Align) -> str:
    """A text with blanks up to a width."""
    blanks = " " * (width - measure_text(text))
    return text + blanks if align == "left" else blanks + text


def split_words(text: str) -> list[str]:
    """The parts of a text between which a line may end."""
    return _BREAK.split(text)


def wrap_text(text: str, width: int) -> list[str]:
    """The lines of a text, broken between words, and inside only those words that are too long for a line."""
    lines = [""]
    for word in split_words(text):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if measure_text(joined) <= width:
            lines[-1] = joined
        else:
            lines += _chop_word(word, width)
    return lines if lines[0] or len(lines) == 1 else lines[1:]


def _chop_word(word: str, width: int) -> list[str]:
    """A word in pieces of at most a width, though never less than a character."""
    pieces = [""]
    for character in word:
        if pieces[-1] and measure_text(pieces[-1] + character) > width:
            pieces.append("")
        pieces[-1] += character
    return pieces

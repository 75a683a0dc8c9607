"""Which characters a typeset page can show.

A PDF carries its fonts, and those that come with typst and vl-convert have Latin, Greek and Cyrillic letters and the
usual signs. A letter that they lack would be printed as an empty box, on one machine and not on the next. So it is
spelled out by its number, as <U+6D4B>: whoever reads the page knows that something stood there, and what.
"""

from __future__ import annotations

import re

from scalelab.report.text import clean_text

SHOWN = (
    (0x20, 0x7E),
    (0xA0, 0x17F),
    (0x391, 0x3C9),
    (0x401, 0x45F),
    (0x2010, 0x2027),
    (0x202F, 0x2030),
    (0x2032, 0x2033),
    (0x2039, 0x203A),
    (0x20AC, 0x20AC),
    (0x2122, 0x2122),
    (0x2190, 0x2195),
    (0x2202, 0x2202),
    (0x220F, 0x220F),
    (0x2211, 0x2212),
    (0x221A, 0x221A),
    (0x221E, 0x221E),
    (0x2248, 0x2248),
    (0x2260, 0x2265),
    (0x2500, 0x2503),
)
"""Ranges of characters that all fonts of a report have."""
REPLACED = {"₀": "0", "₁": "1", "₂": "2", "₃": "3", "ⁿ": "n", "ᵢ": "i", "✓": "yes", "✗": "no", "⟨": "<", "⟩": ">"}
"""Signs that have a plain form."""

_UNSHOWN = re.compile("[^" + "".join(f"{chr(low)}-{chr(high)}" for low, high in SHOWN) + "]")


def spell_out(text: str) -> str:
    """One line of text in characters that are shown everywhere; any other is spelled as its number."""
    return _UNSHOWN.sub(_spell, clean_text(text))


def _spell(match: re.Match[str]) -> str:
    return REPLACED.get(match[0], f"<U+{ord(match[0]):04X}>")

"""Which characters a typeset page can show.

A PDF carries its fonts, and those that come with typst and vl-convert have Latin, Greek and Cyrillic letters and the
usual signs. A letter that they lack would be taken from a font of the machine, or be an empty box on the next one. So
it is spelled out by its number, as <U+6D4B>: whoever reads the page knows that something stood there, and what.
"""

from __future__ import annotations

import re

from scalelab.report.text import clean_text

SHOWN = (
    (0x20, 0x7E),
    (0xA0, 0x17F),
    (0x391, 0x3A1),
    (0x3A3, 0x3C9),
    (0x401, 0x45F),
    (0x2012, 0x2022),
    (0x2026, 0x2026),
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
    (0x2260, 0x2260),
    (0x2264, 0x2265),
    (0x2500, 0x2500),
    (0x2502, 0x2502),
)
"""Ranges of characters that both fonts have: Libertinus Serif of the text, Liberation Sans of the charts."""
SUBSCRIPTS = {chr(0x2080 + digit): str(digit) for digit in range(10)}
REPLACED = SUBSCRIPTS | {"ⁿ": "n", "ᵢ": "i", "✓": "yes", "✗": "no", "⟨": "<", "⟩": ">", "\u2010": "-", "\u2011": "-"}
"""Signs that have a plain form."""
RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-", strict=True))

_POWER = re.compile(f"[{''.join(RAISED)}]+")
_UNSHOWN = re.compile("[^" + "".join(f"{chr(low)}-{chr(high)}" for low, high in SHOWN) + "]")


def spell_out(text: str) -> str:
    """One line of text in characters that are shown everywhere; any other is spelled as its number."""
    return _UNSHOWN.sub(_spell, _POWER.sub(_spell_power, clean_text(text)))


def _spell_power(match: re.Match[str]) -> str:
    """As it is where it can be drawn, as in m²; otherwise 10^6: a number beside its base would be another number."""
    if not _UNSHOWN.search(match[0]):
        return match[0]
    return "^" + "".join(RAISED[character] for character in match[0])


def _spell(match: re.Match[str]) -> str:
    return REPLACED.get(match[0], f"<U+{ord(match[0]):04X}>")

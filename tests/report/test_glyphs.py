"""Characters that a typeset page can show, and those that it spells out."""

from __future__ import annotations

import pytest

from scalelab.report.renderers.pictures import spell_out


@pytest.mark.parametrize("text", ["1.92 ± 0.02 µs − 96 %", "Straße, naïve, Łódź", "σ → 3.1 ≤ 4 · 2³", "Москва"])
def test_what_the_fonts_have_stays(text: str) -> None:
    assert spell_out(text) == text


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("模型", "<U+6A21><U+578B>"),
        ("run 😀", "run <U+1F600>"),
        ("עברית", "<U+05E2><U+05D1><U+05E8><U+05D9><U+05EA>"),
        ("n₁ ✓", "n1 yes"),
        ("2²⁰ bytes, 10⁶ of 10⁻⁹ m²", "2^20 bytes, 10^6 of 10^-9 m²"),
    ],
)
def test_what_they_lack_is_spelled_out_or_has_a_plain_form(text: str, spelled: str) -> None:
    assert spell_out(text) == spelled


def test_a_text_cannot_run_backwards_or_steer() -> None:
    assert spell_out("a\u202eb\x1b[31mc\n d") == r"a\u202ebc d"

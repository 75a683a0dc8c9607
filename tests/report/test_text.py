"""Text from users is cleaned, measured and broken without loss."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelab.checks import clean_text
from scalelab.report.tables import measure_text, pad_text, wrap_text
from tests.report.samples import HOSTILE_TEXTS


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07after", r"\x1b]0;title\x07after"),
        ("\x1b]8;;http://x\x1b\\link", r"\x1b]8;;http://x\x1b\link"),
        ("two\nlines\r\nand\ta tab", "two lines and a tab"),
        ("bell\x07", r"bell\x07"),
        ("half \ud800", r"half \ud800"),
        ("\u202ereversed", r"\u202ereversed"),
        ("[red]markup[/red]", "[red]markup[/red]"),
        ("1\u202f234 ± 2 %", "1\u202f234 ± 2 %"),
    ],
)
def test_what_could_steer_a_terminal_is_taken_out(text: str, cleaned: str) -> None:
    assert clean_text(text) == cleaned


@given(st.text(st.characters()) | st.sampled_from(HOSTILE_TEXTS))
def test_clean_text_is_one_line_without_control_characters(text: str) -> None:
    cleaned = clean_text(text)
    assert not {unicodedata.category(character) for character in cleaned} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert clean_text(cleaned) == cleaned


@given(st.text(), st.integers(2, 40))
def test_wrapped_lines_fit_and_lose_nothing_but_blanks(text: str, width: int) -> None:
    cleaned = clean_text(text)
    lines = wrap_text(cleaned, width)
    assert all(measure_text(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == cleaned.replace(" ", "")


def test_a_number_stays_with_its_interval_and_its_percent_sign() -> None:
    assert wrap_text("it ran 1.92 ± 0.02 times", 14) == ["it ran", "1.92 ± 0.02", "times"]
    assert wrap_text("about 96 % of it", 8) == ["about", "96 % of", "it"]


def test_wide_characters_take_two_columns_and_accents_none() -> None:
    assert measure_text("漢字") == 4
    assert measure_text("e\u0301") == 1
    assert pad_text("漢字", 6, "right") == "  漢字"
    assert pad_text("漢字", 6, "left") == "漢字  "

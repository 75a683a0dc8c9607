"""One screen: 40 lines of 100 columns."""

from __future__ import annotations

from scalelab.report.text import measure_text

MOST_LINES = 40
WIDTH = 100
PLACE_LINES = 2
"""The answer of a run ends with where the run is: an empty line and one more, as wide as the path."""


def check_screen(lines: list[str], most: int) -> None:
    assert 3 <= len(lines) <= most, "\n".join(lines)
    assert max(map(measure_text, lines)) <= WIDTH

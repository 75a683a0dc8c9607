"""One screen: 40 lines of 100 columns; and what no sentence may say."""

from __future__ import annotations

import re
from typing import Any

from scalelab.report.tables import measure_text

MOST_LINES = 40
WIDTH = 100
PLACE_LINES = 2
"""The answer of a run ends with where the run is: an empty line and one more, as wide as the path."""


def check_screen(lines: list[str], most: int) -> None:
    assert 3 <= len(lines) <= most, "\n".join(lines)
    assert max(map(measure_text, lines)) <= WIDTH


def check_sentences(document: dict[str, Any]) -> None:
    """No finding prints an interval that is wider than its number, or a share of a step above all of it."""
    for finding in document["findings"]:
        text = finding["text"].replace("\u202f", "").replace("−", "-")
        for number, width in re.findall(r"(-?\d[\d.]*) ± (\d[\d.]*)", text):
            assert float(width) <= abs(float(number)), text
        for share in re.findall(r"(-?\d[\d.]*) % of (?:the|its own|a profiled) step", text):
            assert 0 <= float(share) <= 100, text

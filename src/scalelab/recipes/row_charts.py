"""The charts of a recipe's row: the main one of each of its parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from scalelab.report.document import Chart, Document

MOST_CHARTS = 4
"""Of one row; the others are in the parts' own studies."""


def choose_charts(documents: Mapping[str, Document | None]) -> Iterator[Chart]:
    """The first chart of every part, with the part's name where there are several; the last says what is left out."""
    mains = {key: find_main_chart(document) for key, document in documents.items() if document is not None}
    found = {key: chart for key, chart in mains.items() if chart is not None}
    left_out = list(found)[MOST_CHARTS:]
    for number, (key, chart) in enumerate(list(found.items())[:MOST_CHARTS], start=1):
        named = replace(chart, title=f"{chart.title} ({key})") if len(found) > 1 else chart
        if number == MOST_CHARTS and left_out:
            rest = f"Not drawn here: {', '.join(left_out)}."
            named = replace(named, caption=f"{named.caption} {rest}".strip())
        yield named


def find_main_chart(document: Document) -> Chart | None:
    return next((chart for section in document.sections for chart in section.charts), None)

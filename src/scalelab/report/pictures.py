"""The charts of a document as pictures: SVG for a page, PDF for a typeset report; both are vectors.

vl-convert draws Vega-Lite without a browser. Every text is reduced to characters that the picture's font has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from scalelab.errors import UsageError
from scalelab.report.document import Chart, Document
from scalelab.report.glyphs import spell_out
from scalelab.report.theme import FONT, apply_theme

PICTURE_WIDTH = 620
"""Pixels: a page's text is about as wide."""
PICTURE_FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
"""vl-convert has the first with it, so that a picture is the same on every machine; the second is just as wide."""
NO_PICTURES = "charts are drawn by vl-convert, which is not installed: pip install 'scalelab[report]'"


def list_charts(document: Document) -> tuple[Chart, ...]:
    """The charts of all sections, in their order."""
    return tuple(chart for section in document.sections for chart in section.charts)


def draw_svg(chart: Chart, *, width: int = PICTURE_WIDTH) -> str:
    """A chart as an SVG file."""
    svg: str = load_converter().vegalite_to_svg(prepare_spec(chart, width))
    return svg


def draw_pdf(chart: Chart, *, width: int = PICTURE_WIDTH) -> bytes:
    """A chart as a page of PDF of its own size, with its fonts."""
    pdf: bytes = load_converter().vegalite_to_pdf(prepare_spec(chart, width))
    return pdf


def draw_pictures(document: Document, stem: str) -> dict[str, str]:
    """An SVG for every chart of a document by file name: `report-1-speedup.svg`."""
    charts = enumerate(list_charts(document), start=1)
    return {f"{stem}-{number}{_slug(chart.title)}.svg": draw_svg(chart) for number, chart in charts}


def prepare_spec(chart: Chart, width: int) -> dict[str, Any]:
    """The specification in the light theme, at a width, in characters that can be drawn."""
    themed = apply_theme(chart.spec, is_dark=False, width=width)
    spelled: dict[str, Any] = _spell_all(themed)
    return spelled


def load_converter() -> Any:
    """vl-convert, which only pictures need."""
    try:
        import vl_convert
    except ImportError as error:
        raise UsageError(NO_PICTURES) from error
    return vl_convert


def _spell_all(value: Any) -> Any:
    """Every text in a specification in characters that can be drawn, in a font that has them; numbers stay."""
    if isinstance(value, str):
        return PICTURE_FONT if value == FONT else spell_out(value)
    if isinstance(value, Mapping):
        return {key: _spell_all(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_spell_all(inner) for inner in value]
    return value


def _slug(title: str) -> str:
    """A title as the end of a file name; empty where nothing of it can be one."""
    words = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:40].strip("-")
    return f"-{words}" if words else ""

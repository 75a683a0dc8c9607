"""The charts of a document as vector pictures: SVG beside Markdown, PDF for a typeset report.

vl-convert draws Vega-Lite without a browser. The fonts that come with typst and vl-convert have Latin, Greek and
Cyrillic letters and the usual signs. Any other character would come from a font of this machine, or be an empty box on
the next one, so it is spelled out by its number: <U+6D4B>.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from scalelab.checks import clean_text
from scalelab.errors import UsageError
from scalelab.report.document import Chart, Document
from scalelab.report.renderers.theme import FONT, apply_theme

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
    """A title as the end of a file name; empty if nothing of it can be one."""
    words = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:40].strip("-")
    return f"-{words}" if words else ""

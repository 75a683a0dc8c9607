"""What figures hold, read back from their specifications."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from scalelab.report.document import Chart


def list_layers(chart: Chart, mark: str) -> list[dict[str, Any]]:
    """The layers of one kind of mark."""
    return [layer for layer in chart.spec["layer"] if layer["mark"]["type"] == mark]


def list_values(chart: Chart, mark: str) -> list[dict[str, Any]]:
    """The rows of all of them."""
    return [value for layer in list_layers(chart, mark) for value in layer["data"]["values"]]


def list_texts(chart: Chart) -> Iterator[str]:
    """What is written into the figure."""
    for layer in list_layers(chart, "text"):
        text = layer["encoding"]["text"]
        field = text.get("field") or text["condition"]["field"]
        yield from (str(value[field]) for value in layer["data"]["values"])


def draw(chart: Chart) -> str:
    """The figure as SVG, by Vega itself: a specification that it cannot draw raises."""
    vl_convert = pytest.importorskip("vl_convert", reason="figures are drawn by vl-convert-python")
    svg: str = vl_convert.vegalite_to_svg(dict(chart.spec, width=400))
    return svg

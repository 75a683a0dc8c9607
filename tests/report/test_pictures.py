"""Charts as pictures, and pages that show them."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree

import pytest

from scalelab.errors import UsageError
from scalelab.report.charts.plot import Axis, plot_lines
from scalelab.report.document import Chart, Document, Section
from scalelab.report.renderers import pictures
from scalelab.report.renderers.markdown import render_markdown
from scalelab.report.renderers.pictures import draw_pdf, draw_pictures, draw_svg, list_charts


def build_chart(title: str = "Speedup", series: str = "ddp") -> Chart:
    rows = [{"series": series, "ranks": n, "speedup": 0.9 * n} for n in (1, 2, 4)]
    x, y = Axis(field="ranks", title="ranks", quantity="count"), Axis(field="speedup", title="speedup")
    return plot_lines(title=title, x=x, y=y, rows=[*rows, *({**row, "series": "other"} for row in rows)])


def build_document(*charts: Chart) -> Document:
    return Document(title="Strong scaling", sections=(Section(heading="Results", charts=charts),))


def test_a_picture_is_svg_that_names_its_series_and_axes() -> None:
    svg = draw_svg(build_chart())
    texts = {element.text for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")}
    assert {"ddp", "other", "ranks", "speedup"} <= texts


def test_hostile_names_are_text_in_a_picture() -> None:
    svg = draw_svg(build_chart(series="<script>alert(1)</script> \u202e模"))
    root = ElementTree.fromstring(svg)
    assert not [element for element in root.iter() if element.tag.endswith("script")]
    assert any("<script>" in (element.text or "") and "<U+6A21>" in (element.text or "") for element in root.iter())


def test_a_picture_of_pdf_is_one_page() -> None:
    assert draw_pdf(build_chart()).startswith(b"%PDF-")


def test_pictures_are_named_by_number_and_title() -> None:
    document = build_document(build_chart(), build_chart("../Über: 50 % / x"), build_chart("模型"))
    assert list(draw_pictures(document, "report")) == ["report-1-speedup.svg", "report-2-ber-50-x.svg", "report-3.svg"]


def test_a_page_shows_each_picture_before_the_tables_of_its_section() -> None:
    first, second = build_chart("Speedup [a](b)"), build_chart("Time")
    document = Document(title="t", sections=(Section(charts=(first,)), Section(heading="Next", charts=(second,))))
    page = render_markdown(document, ["one 1.svg", "two.svg"])
    assert (
        page.index("**Speedup [a\\](b)**\n\n![Speedup (a)(b)](one%201.svg)")
        < page.index("## Next")
        < page.index("![Time](two.svg)")
    )
    odd = render_markdown(document, ["\udc80.svg", "é.svg"])  # any byte may be in a file's name
    assert "(%80.svg)" in odd
    assert "(%C3%A9.svg)" in odd


def test_a_page_without_pictures_says_nothing_of_charts() -> None:
    assert "![" not in render_markdown(build_document(build_chart()))
    assert len(list_charts(build_document(build_chart()))) == 1


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(UsageError, match=r"pip install 'scalelab\[report\]'"):
        pictures.load_converter()

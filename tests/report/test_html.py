"""The page as text: what is in it, in which order, and what it may do."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from scalelab.errors import UsageError
from scalelab.records.files import pack_runs
from scalelab.report.document import Chart, Document, Section, render_json
from scalelab.report.renderers.html import count_values, load_script, name_file, render_html, set_table
from tests.records import make_result, make_store
from tests.report.samples import as_findings, build_strong_scaling, build_troubled_table

pytest.importorskip("vl_convert", reason="pages need the extra scalelab[report]")


class Reader(HTMLParser):
    """The words of a page in their order, and its elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._inside: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._inside:
            while self._inside.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self._inside):
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def test_the_finding_comes_first_and_the_raw_data_last() -> None:
    text = Reader(render_html(build_strong_scaling())).text
    order = ["1.92 ± 0.02 times faster", "Karp–Flatt", "Results", "Environment", "Raw data"]
    places = [text.index(words) for words in order]
    assert places == sorted(places)


def test_every_number_of_a_table_is_in_the_page_and_unknown_is_a_dash() -> None:
    page = Reader(set_table(build_troubled_table(), "troubled")).text
    assert "out of memory" in page
    assert "–" in page
    assert "†" in page


def test_a_page_may_run_its_own_scripts_and_load_nothing() -> None:
    page = render_html(build_strong_scaling())
    policy = next(
        str(values["content"]) for tag, values in Reader(page).elements if values.get("http-equiv") and tag == "meta"
    )
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 2
    for script in scripts:
        assert f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy
    linked = [values.get(name) for _, values in Reader(page).elements for name in ("src", "href") if values.get(name)]
    assert all(str(place).startswith(("#", "data:")) for place in linked)


def test_a_page_without_charts_is_small() -> None:
    document = build_strong_scaling()
    bare = replace(document, sections=tuple(replace(section, charts=()) for section in document.sections))
    assert len(render_html(bare)) < 60_000


def test_the_whole_document_is_in_the_page_and_nothing_in_it_ends_the_script() -> None:
    document = replace(build_strong_scaling(), setting="</script><script>alert(1)</script> \u2028 <!--")
    page = render_html(document)
    (held,) = re.findall(r'<script type="application/json" id="document">(.*?)</script>', page, re.DOTALL)
    assert json.loads(held) == json.loads(render_json(document))
    assert "alert(1)</script>" not in page


def test_a_number_that_json_cannot_hold_is_null_in_the_page() -> None:
    spec = {"data": {"values": [{"y": float("nan")}]}, "mark": "point"}
    page = render_html(Document(title="t", sections=(Section(charts=(Chart(spec=spec),)),)))
    assert '"values":[{"y":null}]' in page


def test_tables_have_headers_for_rows_and_columns_and_scroll_in_their_own_box() -> None:
    elements = Reader(render_html(build_strong_scaling())).elements
    scopes = [values.get("scope") for tag, values in elements if tag == "th"]
    assert scopes.count("col") == 7
    assert scopes.count("row") == 2
    assert any(values.get("role") == "region" and values.get("tabindex") == "0" for _, values in elements)


def test_a_chart_is_named_for_those_who_cannot_see_it() -> None:
    document = Document(title="t", sections=(Section(charts=(Chart(title="Speed", caption="By rank.", spec={}),)),))
    elements = Reader(render_html(document)).elements
    plots = [values for _, values in elements if values.get("role") == "img"]
    assert [values["aria-label"] for values in plots] == ["Speed: By rank."]
    buttons = [values for name, values in elements if name == "button" and "data-format" in values]
    assert [values["aria-label"] for values in buttons] == ["SVG of Speed", "PNG of Speed"]
    assert [name for name, _ in elements if name in ("header", "main")] == ["header", "main"]  # one of each landmark


def test_rows_of_data_are_counted_wherever_they_lie() -> None:
    inner = {"data": {"values": [1, 2]}}
    assert count_values({"layer": [inner, inner], "data": {"values": [3]}}) == 5
    assert name_file("Speedup / ranks!") == "speedup-ranks"
    assert name_file("🚀") == "chart"


def test_the_program_is_kept_and_a_damaged_copy_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("vl_convert.javascript_bundle", lambda snippet: made.append(snippet) or "a = '</script>';")
    script = load_script()
    assert "</script" not in script
    assert load_script() == script
    assert len(made) == 1
    (kept,) = (tmp_path / "scalelab").iterdir()
    kept.write_text(kept.read_text().replace("a =", "b ="))
    assert load_script() == script
    assert len(made) == 2


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("vl_convert.javascript_bundle", lambda _: "a = 1;")
    assert "a = 1;" in load_script()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scalelab.report.renderers.html.PACKAGE", "no-such-package")
    with pytest.raises(UsageError, match=r"pip install 'scalelab\[report\]'"):
        load_script()


def test_raw_files_are_packed_small_ones_first_and_what_is_left_out_is_named(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    for trial in store.trials():
        store.save_result(make_result(trial))
    whole = pack_runs([store.path])
    assert whole.name == f"{store.name}.zip"
    assert whole.left_out == ()
    assert pack_runs([store.path]).content == whole.content
    large = store.trial_directory(store.trials()[0].name) / "samples.csv"
    large.write_bytes(large.read_bytes() * 2000)
    part = pack_runs([store.path], most_bytes=60_000)
    assert part.num_files == whole.num_files - 1
    assert part.left_out == (f"{store.name}/{large.relative_to(store.path)}",)
    page = render_html(build_strong_scaling(), archive=part)
    assert f"Too large for this page: {part.left_out[0]}" in Reader(page).text


def test_the_weightiest_findings_are_shown_and_the_rest_is_folded() -> None:
    sentences = [f"finding {number}" for number in range(7)]
    page = render_html(Document(title="t", findings=as_findings(sentences)))
    shown, folded = page.split('<section id="findings">')[1].split("<details>")[:2]
    assert [one for one in sentences if one in shown] == sentences[1:5]
    assert "2 more findings" in folded
    assert "<details>" not in render_html(Document(title="t", findings=as_findings(sentences[:6]))), "never fold one"

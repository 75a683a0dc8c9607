"""A document as a typeset report, looked at as text and as a page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scalelab.analysis.estimate import Estimate
from scalelab.errors import UsageError
from scalelab.report.document import Chart, Column, Document, Section, Table, cut_text, read_document, render_json
from scalelab.report.findings import Caution
from scalelab.report.renderers.pdf import (
    MOST_DRAWN,
    PAGE,
    TABLES,
    Cut,
    arrange_charts,
    describe_document,
    list_choices,
    list_cuts,
    render_pdf,
)
from scalelab.report.tables import INTERVAL_NOTE
from tests.report.samples import as_findings, build_strong_scaling, build_troubled_scaling, make_row
from tests.report.test_pictures import build_chart

HOSTILE = (
    '<script>alert("x")</script>',
    "#set page(width: 1cm)",
    "$x^2$ *bold* _it_ `raw` @cite \\ \"quoted\" 'single'",
    "a\u202eb עברית 😀 模型",
    "x" * 300,
)
A4_POINTS = (595, 842)

needs_poppler = pytest.mark.skipif(shutil.which("pdftotext") is None, reason="poppler-utils is not installed")


def read_text(pdf: bytes, order: str = "-layout") -> str:
    """As it looks; with `-raw` as it was set, one column after the other."""
    done = subprocess.run(["pdftotext", order, "-", "-"], input=pdf, capture_output=True, check=True)
    return done.stdout.decode()


def find_words(pdf: bytes, place: Path) -> list[tuple[float, float]]:
    """Where every word begins and ends across its page, in points."""
    file = place / "report.pdf"
    file.write_bytes(pdf)
    done = subprocess.run(["pdftotext", "-bbox", file, "-"], capture_output=True, text=True, check=True)
    return [(float(low), float(high)) for low, high in re.findall(r'xMin="([\d.]+)".*?xMax="([\d.]+)"', done.stdout)]


def with_charts(document: Document) -> Document:
    sections = [replace(section, charts=()) for section in document.sections]
    return replace(document, sections=(replace(sections[0], charts=(build_chart(),)), *sections[1:]))


@needs_poppler
def test_a_report_says_title_findings_table_chart_and_environment() -> None:
    text = read_text(render_pdf(with_charts(build_strong_scaling())))
    for expected in ("Strong scaling", "1.92 ± 0.02 times faster", "214.7 ± 1.4", "Speedup", "2.13.0", "1/1"):
        assert expected in text.replace("\u00a0", " "), expected


@needs_poppler
def test_failures_and_what_is_unknown_are_printed() -> None:
    document = build_troubled_scaling()
    document = replace(document, sections=tuple(replace(section, charts=()) for section in document.sections))
    text = read_text(render_pdf(document))
    assert "out of memory" in text.replace("\u00a0", " ")
    assert "–" in text


@needs_poppler
def test_hostile_texts_are_text_and_stay_on_the_page(tmp_path: Path) -> None:
    table = Table(
        title=HOSTILE[1],
        columns=(Column(key="a", header=HOSTILE[0], align="left"), Column(key="b", header="b", align="left")),
        rows=tuple(make_row(text, text) for text in HOSTILE),
    )
    document = Document(
        title=HOSTILE[4],
        question=HOSTILE[2],
        setting=HOSTILE[3],
        findings=as_findings(HOSTILE),
        cautions=tuple(Caution(message=text, next_step=text) for text in HOSTILE),
        sections=(Section(heading=HOSTILE[0], paragraphs=HOSTILE, tables=(table,), charts=(build_chart(HOSTILE[4]),)),),
        environment=tuple(("run", text) for text in HOSTILE),
    )
    pdf = render_pdf(document)
    text = read_text(pdf)
    assert '<script>alert("x")</script>' in text.replace("\u200b", "")
    assert "<U+1F600>" in text.replace("\u200b", "")
    assert "#set page" in text
    words = find_words(pdf, tmp_path)
    assert min(low for low, _ in words) >= 0
    assert max(high for _, high in words) <= A4_POINTS[0] - 30


@needs_poppler
def test_a_report_looks_the_same_on_every_machine(tmp_path: Path) -> None:
    file = tmp_path / "report.pdf"
    file.write_bytes(render_pdf(with_charts(replace(build_strong_scaling(), title="2²⁰ n₁ ✓ 模"))))
    done = subprocess.run(["pdffonts", file], capture_output=True, text=True, check=True)
    names = {re.split(r"[+\s]", line)[1] for line in done.stdout.splitlines()[2:]}
    assert {name.partition("-")[0] for name in names} == {"LibertinusSerif", "LiberationSans"}


@needs_poppler
def test_names_of_rows_are_never_set_over_the_next_column(tmp_path: Path) -> None:
    columns = [Column(key="name", header="rank", align="left")]
    columns += [Column(key=f"c{i}", header=f"part {i} of a step", quantity="seconds") for i in range(9)]
    estimate = Estimate(value=0.0995, low=0.0825, high=0.1665)
    rows = tuple(make_row(f"dim=1024 depth=2 × 2, rank {i}", *[estimate] * 9) for i in range(4))
    pdf = render_pdf(
        Document(title="Long names", sections=(Section(tables=(Table(columns=tuple(columns), rows=rows),)),))
    )
    (tmp_path / "report.pdf").write_bytes(pdf)
    done = subprocess.run(
        ["pdftotext", "-bbox", tmp_path / "report.pdf", "-"], capture_output=True, text=True, check=True
    )
    boxes = [
        tuple(map(float, found))
        for found in re.findall(r'xMin="(.+?)" yMin="(.+?)" xMax="(.+?)" yMax="(.+?)"', done.stdout)
    ]
    over = [
        (a, b) for a in boxes for b in boxes if a < b and min(a[2], b[2]) - max(a[0], b[0]) > 1 and abs(a[1] - b[1]) < 4
    ]
    assert len(boxes) > 60
    assert not over


@needs_poppler
def test_a_short_table_stays_on_one_page_with_its_notes(tmp_path: Path) -> None:
    columns = (Column(key="a", header="a", align="left"), Column(key="b", header="b", quantity="count"))
    rows = tuple(make_row(f"row {i}", i) for i in range(12))
    tables = tuple(Table(title=f"Table {i}", columns=columns, rows=rows, notes=(f"note {i}",)) for i in range(7))
    pages = read_text(render_pdf(Document(title="Many", sections=(Section(tables=tables),)))).split("\f")
    assert len(pages) > 2
    for i in range(7):
        (page,) = [page for page in pages if f"Table {i}" in page]
        assert f"note {i}" in page


@needs_poppler
def test_a_wide_table_is_split_and_nothing_of_it_is_lost(tmp_path: Path) -> None:
    columns = tuple(Column(key=f"c{i}", header=f"header number {i}", quantity="number") for i in range(30))
    table = Table(columns=columns, rows=(make_row(*(1001 + i for i in range(30))),))
    pdf = render_pdf(Document(title="Wide", sections=(Section(tables=(table,)),)))
    words = read_text(pdf).split()
    assert [words.count(str(1001 + i)) for i in range(1, 30)] == [1] * 29
    assert words.count("1001") >= 2, "the first column is repeated"
    assert max(high for _, high in find_words(pdf, tmp_path)) <= A4_POINTS[0] - 30


def make_charts(*heights: int) -> list[Chart]:
    return [Chart(title=f"{number}", spec={"height": height}) for number, height in enumerate(heights)]


def arrange(*heights: int) -> list[list[str]]:
    """The titles of every column of every block."""
    return [["".join(chart.title for chart in own) for own in block] for block in arrange_charts(make_charts(*heights))]


def test_charts_fill_two_columns_and_leave_no_hole() -> None:
    assert arrange(200, 200) == [["0", "1"]]
    assert arrange(600, 150, 150, 150) == [["0", "123"]], "short charts stand beside a tall one"
    assert arrange(200) == [["0"]], "a chart alone takes the full width"
    assert arrange(200, 200, 200) == [["0", "1"], ["2"]]
    assert arrange() == []


def test_a_chart_of_several_views_takes_the_full_width() -> None:
    narrow, other = make_charts(200, 200)
    wide = Chart(title="w", spec={"hconcat": []})
    assert list(arrange_charts([narrow, wide, other])) == [[[narrow]], [[wide]], [[other]]]


def test_single_steps_of_a_recipe_fill_the_last_page_or_one_of_their_own() -> None:
    chart = replace(build_chart(), caption="Steps.")
    choices = list(list_choices((chart,) * 7))
    assert [len(charts) for charts in choices] == [MOST_DRAWN - 1, 3, 2, 2], "the one most wanted first"
    assert {charts[-1].caption for charts in choices} == {"Steps. An HTML report draws more of them."}
    assert next(list_choices((chart,) * 2)) == (chart,) * 2
    assert list(list_choices(())) == []


def make_answers(*sections: Section) -> Document:
    return Document(title="Rows", sections=sections)


@needs_poppler
def test_charts_of_single_steps_stand_on_the_last_page_where_they_fit() -> None:
    steps = Section(heading="Step by step", charts=tuple(replace(build_chart(), title=f"steps {i}") for i in range(4)))
    short = Section(heading="A1 · One", paragraphs=("One.",), num_answers=1)
    empty = Section(heading="A2 · Not run yet")
    pages = read_text(render_pdf(make_answers(short, empty, steps))).split("\f")
    assert "steps 0" in pages[0]
    long = replace(short, paragraphs=("One.",) * 40, num_answers=40)
    first, second, *_ = read_text(render_pdf(make_answers(long, steps))).split("\f")
    assert "Step by step" not in first
    assert "steps 3" in second, "a page of their own has all"


@needs_poppler
def test_tables_come_before_a_chart_that_goes_to_the_next_page() -> None:
    columns = (Column(key="a", header="a", align="left"), Column(key="b", header="b", quantity="count"))
    tables = tuple(Table(title=f"Table {i}", columns=columns, rows=(make_row("row", i),)) for i in range(2))
    chart = replace(build_chart(), title="steps")
    text = {}
    for num in (3, 34):
        section = Section(
            heading="A1 · One", paragraphs=("One.",) * num, num_answers=num, tables=tables, charts=(chart,)
        )
        text[num] = read_text(render_pdf(make_answers(section)))
    assert text[3].index("Table 0") < text[3].index("A1 · steps") < text[3].index("Table 1")
    assert text[34].index("Table 1") < text[34].index("\f") < text[34].index("A1 · steps")


@needs_poppler
def test_a_brief_report_has_the_longest_answers_that_fit_on_two_pages() -> None:
    words = "Yes. " + "It follows from the numbers. " * 60
    few, many = (
        make_answers(*(Section(heading=f"A{i} · One", paragraphs=(words,), num_answers=1) for i in range(number)))
        for number in (3, 30)
    )
    long, short = (read_text(render_pdf(document, is_brief=True)) for document in (few, many))
    assert long.count("follows") == 3 * 60
    assert short.count("\f") == 2
    assert 30 * 10 < short.count("follows") < 30 * 60
    parts = [part.count("follows") for part in re.split(r"A\d+ · One", short)[1:]]
    assert len(set(parts)) > 1, "what is left of the pages goes to the answers sentence by sentence"


def test_a_brief_report_takes_the_sentences_that_are_left_and_then_further_tables() -> None:
    (table,) = build_strong_scaling().tables[:1]
    words = "It is so. And that is why."
    sections = [Section(heading="R1", paragraphs=(words,), num_answers=1, tables=(table, table))]
    document = Document(title="t", sections=tuple(sections))
    cut = Cut(most=5)
    longer = cut.lengthen(document, (0, 0))
    assert longer is not None
    assert longer.apply(document).sections[0].paragraphs == (words,)
    assert longer.lengthen(document, (0, 0)) is None, "it is whole"
    more = cut.lengthen(document, TABLES)
    assert more is not None
    assert len(more.apply(document).tables) == 2
    assert more.lengthen(document, TABLES) is None
    assert cut.list_places(document) == [(0, 0), TABLES]


def test_a_document_with_nothing_in_it_is_a_page() -> None:
    assert render_pdf(Document(title="")).startswith(b"%PDF-")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typst", None)
    with pytest.raises(UsageError, match=r"pip install 'scalelab\[report\]'"):
        render_pdf(Document(title="t"))


def test_a_brief_text_ends_with_a_sentence() -> None:
    words = "Yes: 1.5 of 2.0 ms. It follows. And so on."
    assert cut_text(words, 25) == "Yes: 1.5 of 2.0 ms."
    assert cut_text(words, 5) == "Yes: 1.5 of 2.0 ms.", "at least one"
    assert cut_text(words, 100) == words


def test_a_brief_document_without_answers_keeps_findings_and_its_main_table() -> None:
    document = with_charts(build_strong_scaling())
    brief = document.shorten()
    assert brief.summary == document.summary
    assert len(brief.tables) == 1
    assert not any(section.charts for section in brief.sections)


def test_a_brief_report_has_further_tables_as_far_as_two_pages_reach() -> None:
    """The first to go are those of the last sections, and no answer is cut for one."""
    (table,) = build_strong_scaling().tables[:1]
    words = "It is so. " * 20
    sections = [
        Section(heading=f"R{n}", paragraphs=(words,), num_answers=1, tables=(table, table, table)) for n in range(12)
    ]
    document = Document(title="t", sections=tuple(sections))
    briefs = [cut.apply(document) for cut in list_cuts(document)]
    counts = [[len(section.tables) for section in brief.sections] for brief in briefs]
    assert counts[0] == [3] * 12
    assert counts[5] == [3] * 7 + [2] * 5
    assert counts[12] == [2] * 12
    assert counts[17] == [2] * 7 + [1] * 5
    assert counts[24] == [1] * 12
    assert all(section.paragraphs == (words,) for brief in briefs[:25] for section in brief.sections)
    assert len(PAGE.findall(render_pdf(document, is_brief=True))) == 2


@needs_poppler
def test_what_was_run_is_on_the_page_of_its_first_answer() -> None:
    """Whatever comes before: a setting alone at the foot of a page is read as having no answer."""
    for num_lines in range(36, 46):
        filler = Section(heading="R0", paragraphs=("It is so.",) * num_lines, num_answers=1)
        asked = Section(heading="R1", paragraphs=("Setting: small", "Why? " + "Because. " * 60), num_answers=2)
        text = read_text(render_pdf(Document(title="t", sections=(filler, asked))))
        (page,) = (page for page in text.split("\f") if "Setting: small" in page)
        assert "Because." in page, num_lines


def test_a_brief_report_keeps_the_charts_that_were_asked_for(tmp_path: Path) -> None:
    """Small, without captions, and only as long as two pages hold them; a written document knows which."""
    chart = replace(build_chart(), caption="Long words.")
    asked = Section(heading="R1", paragraphs=("Yes.",), num_answers=1, charts=(chart,) * 7, is_plot_asked=True)
    other = replace(asked, heading="R2", charts=(chart,), is_plot_asked=False)
    document = read_document(render_json(make_answers(asked, other)))
    assert document.sections[-2:] == (asked, other)
    first, *_, last = (cut.apply(document) for cut in list_cuts(document))
    assert [len(section.charts) for section in first.sections] == [7, 0]
    assert not any(section.charts for section in last.sections)
    assert not any(section.charts for section in document.shorten().sections)
    described = describe_document(first, tmp_path, is_brief=True)
    (rows,) = (section["charts"] for section in described["sections"] if section["charts"])
    assert [[len(own) for own in row] for row in rows] == [[1] * 5, [1, 1, 0, 0, 0]], "as small in the last row"
    assert all(chart["caption"] == "" for row in rows for own in row for chart in own)
    assert len(PAGE.findall(render_pdf(document, is_brief=True))) == 1


@needs_poppler
def test_a_brief_report_ends_with_the_worst_warnings_and_says_once_what_an_interval_is() -> None:
    table = replace(build_strong_scaling().tables[0], notes=(INTERVAL_NOTE,))
    section = Section(heading="R1 · One", paragraphs=("Yes.",), num_answers=1, tables=(table,))
    noise = [Caution(message="noisy", next_step="wait", severity="noise", rows=(f"R{n}",)) for n in (2, 1)]
    others = [Caution(message=f"noise {n}", next_step="wait", severity="wrong-work") for n in range(6)]
    cautions = [*others[:4], *noise, *others[4:]]
    failure = Caution(message="it crashed", next_step="look", severity="failure")
    document = replace(make_answers(section, replace(section, heading="R2 · Two")), cautions=(*cautions, failure))
    text = re.sub(r"\s+", " ", read_text(render_pdf(document, is_brief=True)))
    assert text.count(INTERVAL_NOTE) == 1
    assert text.index("R2 · Two") < text.index("Warnings") < text.index("noise 0") < text.index("noise 4")
    assert "2 more warnings are in the full report" in text
    assert "it crashed" in text
    assert "noise 5" not in text
    assert "wait" not in text


def test_a_brief_table_keeps_twelve_rows_as_long_as_short_answers_fit() -> None:
    (table,) = build_strong_scaling().tables[:1]
    long = replace(table, rows=table.rows[:1] * 12)
    document = make_answers(Section(heading="R1 · One", paragraphs=("Yes.",), num_answers=1, tables=(long,)))
    counts = [len(cut.apply(document).tables[0].rows) for cut in list_cuts(document)]
    assert counts == [12] * (len(counts) - 1) + [8]


def test_a_document_of_before_charts_could_be_asked_for_is_read() -> None:
    data = json.loads(render_json(build_strong_scaling()))
    for section in data["sections"]:
        del section["is_plot_asked"]
    assert read_document(json.dumps(data)) == read_document(render_json(build_strong_scaling()))

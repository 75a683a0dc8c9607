"""A document as a typeset A4 report, by typst.

The template `assets/report.typ` reads the document as data, so no text of it is ever parsed as markup. Charts are
vectors with embedded fonts. typst measures the columns: a table too wide for the page is set smaller, then split into
tables below each other that repeat the first column, as in a terminal. Characters that the fonts lack are spelled out.

Narrow charts fill two columns, each chart going to the shorter one, so that pages fill; a chart that would leave a
hole beside it takes the full width. Charts float: one that does not fit stands at the foot of the next page, and what
follows takes its place. Those of a recipe's row stay with its text, and have the name of the row in their title.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from scalelab.errors import UsageError
from scalelab.records.running import hold_directory
from scalelab.report.document import BRIEF_CHARACTERS, BRIEF_ROWS, Chart, Document, Section, Table
from scalelab.report.findings import Caution
from scalelab.report.renderers.pictures import draw_pdf, spell_out
from scalelab.report.renderers.theme import is_wide
from scalelab.report.tables import INTERVAL_NOTE, TextColumn, format_columns, list_notes, replace_details
from scalelab.units import PLUS_MINUS

NO_TYPST = "a PDF is set by typst, which is not installed: pip install 'scalelab[report]'"
NO_BREAK = "\u00a0"
FIGURE_BLANK = "\u2007"
"""As wide as a digit."""
FULL_WIDTH, HALF_WIDTH = 780, 390
"""Pixels of a chart in one column or in one of two: its letters are then about as large as those of captions."""
BRIEF_COLUMNS, BRIEF_WIDTH = 5, 230
"""Charts beside each other in a brief report, and pixels of each: their letters are smaller than those of captions."""
WORDS_HEIGHT = 90
"""Roughly what title, legend and caption add to a chart, in pixels."""
PAGE = re.compile(rb"/Type\s*/Page\b")
BRIEF_PAGES = 2
BRIEF_LENGTHS = (2000, 1600, 1400, 1200, 1050, 950, 850, 760, 680, 610, 550, 500, 460, BRIEF_CHARACTERS)
"""Characters of an answer in a brief report: the first with which it has no more pages."""
MORE_ROWS, FEWEST_ROWS = 16, 8
"""Rows of a table in a brief report, where all answers fit, and where not even short ones do."""
ROW = " · "
"""In the heading of a recipe's row, between its name and its title."""
MOST_DRAWN = 5
"""Charts of single steps after the answers of a recipe."""


def render_pdf(document: Document, *, is_brief: bool = False) -> bytes:
    """The whole document, its environment last; or a brief one, set smaller, its answers as long as two pages allow."""
    try:
        import typst
    except ImportError as error:
        raise UsageError(NO_TYPST) from error
    with hold_directory("pdf") as directory:
        template = files("scalelab.report").joinpath("assets", "report.typ").read_text(encoding="utf-8")
        (directory / "report.typ").write_text(template, encoding="utf-8")
        drawn: dict[tuple[int, int], str] = {}

        def typeset(one: Document) -> bytes:
            described = describe_document(one, directory, drawn, is_brief=is_brief) | {"brief": is_brief}
            (directory / "report.json").write_text(json.dumps(described), encoding="utf-8")
            return typst.compile(str(directory / "report.typ"), root=str(directory), ignore_system_fonts=True)

        return fill_pages(document, lambda one: typeset(trim_tables(one))) if is_brief else typeset(document)


def fill_pages(document: Document, typeset: Callable[[Document], bytes]) -> bytes:
    """The longest brief report that fits; then, sentence by sentence and table by table, what the pages still hold."""
    pdf, cut = b"", Cut()
    for cut in list_cuts(document):
        pdf = typeset(cut.apply(document))
        if len(PAGE.findall(pdf)) <= BRIEF_PAGES:
            break
    waiting = cut.list_places(document)
    while waiting:
        place = waiting.pop(0)
        longer = cut.lengthen(document, place)
        if longer is None:
            continue
        own = typeset(longer.apply(document))
        if len(PAGE.findall(own)) <= BRIEF_PAGES:
            pdf, cut = own, longer
            waiting.append(place)
    return pdf


Place = tuple[int, int]
"""The numbers of a section with answers and of a paragraph there; `TABLES` stands for further tables."""
TABLES = (-1, -1)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What of a document stands in a brief report: the arguments of `Document.shorten`."""

    most: int = BRIEF_CHARACTERS
    num_more: int = 0
    rows: int = BRIEF_ROWS
    is_drawn: bool = False
    lengths: Mapping[Place, int] = field(default_factory=dict)

    def apply(self, document: Document) -> Document:
        return document.shorten(self.most, self.num_more, self.rows, is_drawn=self.is_drawn, lengths=self.lengths)

    def list_places(self, document: Document) -> list[Place]:
        """What can be longer: answers in the order of the report, tables, then what the answers leave out."""
        answered = [section for section in document.sections if section.num_answers is not None]
        answers = [(n, number) for n, section in enumerate(answered) for number in range(section.num_answers or 0)]
        every = [(n, number) for n, section in enumerate(answered) for number in range(len(section.paragraphs))]
        return [*answers, TABLES, *(place for place in every if place not in answers)]

    def lengthen(self, document: Document, place: Place) -> Cut | None:
        """With one more sentence of an answer, or one more table; None where it is whole."""
        if place == TABLES:
            return replace(self, num_more=self.num_more + 1) if self.num_more < count_more(document) else None
        section = [section for section in document.sections if section.num_answers is not None][place[0]]
        words, is_there = section.paragraphs[place[1]], place in self.lengths or place[1] < (section.num_answers or 0)
        now = len(section.cut_answer(words, self.lengths.get(place, self.most))) if is_there else 0
        longer = (len(section.cut_answer(words, most)) for most in range(now + 1, len(words) + 1))
        length = next((length for length in longer if length > now), None)
        return None if length is None else replace(self, lengths={**self.lengths, place: length})


def list_cuts(document: Document) -> Iterator[Cut]:
    """From the longest to the shortest: it loses further tables, those of the last rows first, then ends of answers.

    Charts that were asked for go last of all.
    """
    for is_drawn in (True, False) if any(section.is_plot_asked for section in document.sections) else (False,):
        cut = Cut(most=BRIEF_LENGTHS[0], is_drawn=is_drawn)
        yield from (replace(cut, num_more=more, rows=MORE_ROWS) for more in range(count_more(document), -1, -1))
        yield from (replace(cut, most=most) for most in BRIEF_LENGTHS)
        yield replace(cut, most=BRIEF_CHARACTERS, rows=FEWEST_ROWS)


def count_more(document: Document) -> int:
    """The further tables of as many sections as have answers, each taken to have as many as the one with most."""
    answered = sum(section.num_answers is not None for section in document.sections)
    return answered * (max((len(section.tables) for section in document.sections), default=1) - 1)


def trim_tables(document: Document) -> Document:
    """Tables without details, and what ± means once below the title instead of below every table."""
    tables = {id(table): replace_details(table) for table in document.tables}
    bare = {
        key: replace(table, notes=tuple(note for note in table.notes if note != INTERVAL_NOTE))
        for key, table in tables.items()
    }
    sections = tuple(
        replace(section, tables=tuple(bare[id(table)] for table in section.tables)) for section in document.sections
    )
    is_said = any(INTERVAL_NOTE in table.notes for table in tables.values())
    setting = " · ".join(filter(None, (document.setting, INTERVAL_NOTE if is_said else "")))
    return replace(document, sections=sections, setting=setting)


def describe_document(
    document: Document, directory: Path, drawn: dict[tuple[int, int], str] | None = None, *, is_brief: bool = False
) -> dict[str, Any]:
    """The document as the template reads it; its charts become files in a directory, but for those `drawn` there."""
    is_recipe = any(section.num_answers is not None for section in document.sections)
    known = {} if drawn is None else drawn

    def draw(charts: Sequence[Chart]) -> list[list[list[dict[str, str]]]]:
        """Blocks of columns of charts; a chart that stands in several arrangements is drawn once in each width."""
        return [
            [[_describe_chart(chart, directory, known, len(columns)) for chart in own] for own in columns]
            for columns in (arrange_rows(charts) if is_brief else arrange_charts(charts))
        ]

    return {
        "headline": spell_out(document.headline),
        "title": spell_out(document.title),
        "question": spell_out(document.question),
        "setting": spell_out(document.setting),
        "footer": spell_out(next((value for name, value in document.environment if name == "run"), document.title)),
        "summary": [spell_out(finding) for finding in document.summary],
        "failures": [_describe_caution(caution) for caution in document.failures],
        "cautions": [_describe_caution(caution) for caution in document.warnings],
        "sections": [
            {
                "heading": spell_out(section.heading or "Results"),
                "answers": section.num_answers is not None or (is_recipe and ROW in section.heading),
                "paragraphs": [[*map(spell_out, section.split_question(words))] for words in section.paragraphs],
                "charts": draw(name_rows(section) if is_recipe else section.charts)
                if not (is_recipe and section.is_drawn)
                else [],
                "choices": [draw(charts) for charts in list_choices(section.charts)]
                if is_recipe and section.is_drawn
                else [],
                "tables": [_describe_table(table) for table in section.tables],
            }
            for section in document.sections
            if not section.is_empty
        ],
        "environment": [[spell_out(name), spell_out(value)] for name, value in document.environment],
    }


def _describe_caution(caution: Caution) -> dict[str, str]:
    return {"message": spell_out(caution.message), "next_step": spell_out(caution.next_step)}


def name_rows(section: Section) -> tuple[Chart, ...]:
    """Its charts, of a recipe's row with the row in their title, as they may stand beside another row."""
    row, named, _ = section.heading.partition(ROW)
    if not named:
        return section.charts
    return tuple(replace(chart, title=f"{row} · {chart.title}") for chart in section.charts)


def list_choices(charts: Sequence[Chart]) -> Iterator[tuple[Chart, ...]]:
    """What may be drawn of single steps after the answers of a recipe: a page full first, two charts last."""
    most = charts[:MOST_DRAWN]
    blocks = list(arrange_charts(most)) if most else []
    if len(blocks) > 1 and len(blocks[-1]) == 1:  # it would stand alone on the last page
        most = most[:-1]
    for kept in (most, most[:3], most[:2], charts[1:3]):
        if kept and len(kept) == len(charts):
            yield tuple(kept)
        elif kept:
            yield (*kept[:-1], replace(kept[-1], caption=f"{kept[-1].caption} An HTML report draws more of them."))


def arrange_rows(charts: Sequence[Chart]) -> Iterator[list[list[Chart]]]:
    """Small charts beside each other, in a brief report; their captions are in the full one. The last row is filled."""
    for start in range(0, len(charts), BRIEF_COLUMNS):
        row = [[replace(chart, caption="")] for chart in charts[start : start + BRIEF_COLUMNS]]
        yield row + [[]] * (BRIEF_COLUMNS - len(row))


def arrange_charts(charts: Sequence[Chart]) -> Iterator[list[list[Chart]]]:
    """Blocks from top to bottom, each of one column or of two; a block ends where both columns are about as high."""
    for wide, run in itertools.groupby(charts, key=is_wide):
        if wide:
            yield from ([[chart]] for chart in run)
            continue
        columns: list[list[Chart]] = [[], []]
        heights = [0.0, 0.0]
        *most, last = run
        for chart in most:
            shorter = heights.index(min(heights))
            columns[shorter].append(chart)
            heights[shorter] += _measure_height(chart)
            if abs(heights[0] - heights[1]) <= _measure_height(chart) / 2:
                yield columns
                columns, heights = [[], []], [0.0, 0.0]
        fills_hole = max(heights) - min(heights) >= _measure_height(last) / 2
        if fills_hole:
            columns[heights.index(min(heights))].append(last)
        if any(columns):
            yield columns
        if not fills_hole:
            yield [[last]]


def _measure_height(chart: Chart) -> float:
    return float(chart.spec.get("height", 0)) + WORDS_HEIGHT


def _describe_chart(
    chart: Chart, directory: Path, drawn: dict[tuple[int, int], str], num_columns: int
) -> dict[str, str]:
    """Its words and its picture, which is drawn once for each width."""
    width = {1: FULL_WIDTH, 2: HALF_WIDTH}.get(num_columns, BRIEF_WIDTH)
    key = id(chart.spec), width
    if key not in drawn:
        drawn[key] = f"chart{len(drawn)}.pdf"
        (directory / drawn[key]).write_bytes(draw_pdf(chart, width=width))
    return {"title": spell_out(chart.title), "caption": spell_out(chart.caption), "file": drawn[key]}


def _describe_table(table: Table) -> dict[str, Any]:
    columns = format_columns(table)
    return {
        "title": spell_out(table.title),
        "columns": [
            {"header": spell_out(column.header), "align": column.align, "prose": column.is_prose} for column in columns
        ],
        "rows": [[_set_cell(column, row) for column in columns] for row in range(len(table.rows))],
        "notes": [spell_out(note) for note in list_notes(table)],
    }


def _set_cell(column: TextColumn, row: int) -> str:
    """Words as they are; a number in one piece, with blanks as wide as digits where others have more of them."""
    text, mark = column.cells[row], column.marks[row]
    if column.is_prose:
        return spell_out(text + mark)
    number, sign, interval = text.partition(PLUS_MINUS)
    missing = FIGURE_BLANK * (len(interval) - len(interval.lstrip(" ")))
    beside = FIGURE_BLANK * (column.mark_width - len(mark))
    spelled = spell_out(number) + sign + missing + spell_out(interval) + spell_out(mark) + beside
    return spelled.replace(" ", NO_BREAK)

"""Markdown shows what the document says, and interprets none of it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from scalelab.checks import clean_text
from scalelab.report.document import Document
from scalelab.report.renderers.markdown import escape_markdown, render_markdown
from tests.report.samples import (
    HOSTILE_TEXTS,
    build_hostile_document,
    build_strong_scaling,
    build_troubled_scaling,
    draw_documents,
)

PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
marked_up = st.text("ab1 .)|`*_~<>&#[]()!-+=\\^:$\n\"'", max_size=30)


def read_cells(markdown: str) -> list[str]:
    tokens = PARSER.parse(markdown)
    pairs = itertools.pairwise(tokens)
    return [inline.content for opened, inline in pairs if opened.type in ("th_open", "td_open")]


@given(st.text() | marked_up | st.sampled_from(HOSTILE_TEXTS))
@example("1. first")
@example("[a]: http://x")
def test_an_escaped_text_reads_as_it_was(text: str) -> None:
    shown = clean_text(text)
    tokens = PARSER.parse(escape_markdown(text))
    inlines = [token for token in tokens if token.type == "inline"]
    assert [token.type for token in tokens] in ([], ["paragraph_open", "inline", "paragraph_close"])
    children = [child for token in inlines for child in token.children or []]
    assert all(child.type == "text" for child in children)
    assert "".join(child.content for child in children).strip() == shown.strip()


@given(marked_up)
def test_a_cell_never_breaks_its_table(text: str) -> None:
    markdown = render_markdown(build_hostile_document(text))
    tables = [token for token in PARSER.parse(markdown) if token.type == "table_open"]
    assert len(tables) == 2
    assert len(read_cells(markdown)) == 2 + 4


@settings(max_examples=30)
@given(draw_documents())
def test_any_document_has_all_its_tables(document: Document) -> None:
    markdown = render_markdown(document)
    opened = [token.type for token in PARSER.parse(markdown)]
    assert opened.count("table_open") == len(document.tables)
    assert opened.count("td_open") == sum(len(table.rows) * len(table.columns) for table in document.tables)


def test_columns_are_aligned_in_the_source_and_on_the_page() -> None:
    lines = [line for line in render_markdown(build_strong_scaling()).splitlines() if line.startswith("| ")]
    assert lines[:3] == [
        "| ranks |   step [ms] | samples/s |     speedup | efficiency | exposed comm | Amdahl |",
        "| ----: | ----------: | --------: | ----------: | ---------: | -----------: | -----: |",
        "|     1 | 413.0 ± 2.0 |       155 |        1.00 |      100 % |          0 % |   1.00 |",
    ]


def test_the_summary_comes_first_and_the_environment_last() -> None:
    markdown = render_markdown(build_troubled_scaling())
    headings = [line for line in markdown.splitlines() if line.startswith("#")]
    assert headings == [
        "# Strong scaling: how much faster does the same job get with more ranks?",
        "## Summary",
        "## Results",
        "## What failed",
        "### Failures",
        "## Warnings",
        "## Environment",
    ]
    assert markdown.endswith("| cpu   | Xeon \\| 8 cores |\n")


def test_warnings_are_a_list_with_next_steps() -> None:
    warning = "- The load of this machine was 3.1 before the run. → stop other programs and repeat"
    assert warning in render_markdown(build_troubled_scaling()).splitlines()


@pytest.mark.parametrize("number", ["1.92 ± 0.02", "96 %", "2.13.0", "step [ms]"])
def test_what_is_harmless_stays_readable_in_the_source(number: str) -> None:
    assert escape_markdown(number) == number

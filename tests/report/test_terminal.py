"""A terminal shows the example of the house style, at any width, and obeys no text."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings

from scalelab.checks import clean_text
from scalelab.report.document import Document, Section, Table
from scalelab.report.findings import Caution, Finding
from scalelab.report.renderers.terminal import find_width, render_terminal, takes_styles
from scalelab.report.tables import MOST_LINES, format_columns, measure_text
from tests.report.samples import (
    HOSTILE_TEXTS,
    build_hostile_document,
    build_strong_scaling,
    build_troubled_scaling,
    build_wide_table,
    draw_documents,
)

EXAMPLE = """\
Strong scaling: how much faster does the same job get with more ranks?
  gpt-tiny · ddp · float32 · gloo · global batch 64 · 30 steps after 5 warm-up

  ranks     step [ms]   samples/s       speedup   efficiency   exposed comm   Amdahl
 ───────────────────────────────────────────────────────────────────────────────────
      1   413.0 ± 2.0         155          1.00        100 %            0 %     1.00
      2   214.7 ± 1.4         298   1.92 ± 0.02         96 %            3 %     1.92
                                                     ± is a 95 % confidence interval

Summary
  ddp on 2 ranks ran 1.92 ± 0.02 times faster than on 1 rank.
  4.0 % of the step does not shrink with ranks (Karp–Flatt); 3.1 % is exposed all-reduce.
"""

TROUBLED_ROWS = """\
                                                              exposed
  ranks       step [ms]   samples/s      speedup  efficiency     comm  Amdahl
 ────────────────────────────────────────────────────────────────────────────
      1        413 ±  2         155         1.00       100 %      0 %    1.00
      2        215 ± 12         298  1.92 ± 0.12        96 %     −1 %    1.92
      4   out of memory           –            –           –        –    3.57
      8†       191 ± 12†        334  2.16 ± 0.15        27 %     42 %    6.24
                                              ± is a 95 % confidence interval
                                                      † more ranks than cores
"""


def render(document: Document, width: int = 120, *, is_full: bool = True) -> str:
    return render_terminal(document, width, is_full=is_full)


def wrap_table(table: Table) -> Document:
    return Document(title="Wide", sections=(Section(tables=(table,)),))


def test_the_example_of_the_house_style_looks_as_it_should() -> None:
    assert render(build_strong_scaling()) == EXAMPLE


def test_failures_marks_and_negative_shares_keep_the_columns_straight() -> None:
    assert TROUBLED_ROWS in render(build_troubled_scaling(), width=80)


def test_every_warning_comes_with_its_next_step() -> None:
    text = render(build_troubled_scaling(), width=80)
    assert text.endswith(
        "Warnings\n"
        "  8 ranks shared 4 cores, so that their row says nothing about scaling.\n"
        "    → measure it on a machine with 8 cores, or leave it out: --ranks 1 2 4\n"
        "  The load of this machine was 3.1 before the run.\n"
        "    → stop other programs and repeat\n"
    )


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("document", [build_strong_scaling(), build_troubled_scaling(), wrap_table(build_wide_table())])
def test_every_number_is_whole_at_any_width(document: Document, width: int) -> None:
    text = render(document, width)
    assert "…" not in text
    assert max(map(measure_text, text.splitlines())) <= width
    for table in document.tables:
        for column in format_columns(table):
            assert column.is_prose or all(cell in text for cell in column.cells)


def test_a_table_that_is_too_wide_repeats_its_first_column() -> None:
    text = render(wrap_table(build_wide_table()), width=80)
    assert text.count("strategy") == text.count("fsdp-grad-op") == text.count("──\n") > 1


@settings(max_examples=50)
@given(draw_documents())
def test_any_document_fits_a_terminal_of_80_columns(document: Document) -> None:
    lines = render(document, width=80).split("\n")
    assert max(map(measure_text, lines)) <= 80
    assert all(line == line.rstrip(" ") for line in lines)


@pytest.mark.parametrize("hostile", HOSTILE_TEXTS)
def test_text_of_users_is_shown_and_never_obeyed(hostile: str) -> None:
    text = render(build_hostile_document(hostile), width=200)
    assert clean_text(hostile) in text
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800]", text)


def test_colours_change_no_word() -> None:
    coloured = render_terminal(build_troubled_scaling(), 120, is_full=True, is_styled=True)
    assert "\x1b[1m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == render(build_troubled_scaling())


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variables", "on_terminal", "in_pipe"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"TERM": "dumb"}, False, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
    ],
)
def test_styles_are_for_terminals_and_no_color_wins(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], on_terminal: bool, in_pipe: bool
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (takes_styles(FakeTerminal()), takes_styles(io.StringIO())) == (on_terminal, in_pipe)


@pytest.mark.parametrize(("columns", "width"), [("132", 132), ("0", 80), ("wide", 80)])
def test_columns_set_the_width(monkeypatch: pytest.MonkeyPatch, columns: str, width: int) -> None:
    def fail(_: int) -> None:
        raise OSError

    monkeypatch.setattr("os.get_terminal_size", fail)
    monkeypatch.setenv("COLUMNS", columns)
    assert find_width() == width


def test_a_table_without_rows_still_shows_its_header() -> None:
    table = build_wide_table()
    assert "strategy" in render(wrap_table(Table(columns=table.columns, rows=())), width=80)


@pytest.mark.parametrize("width", [1, 5, 12])
def test_even_an_absurdly_narrow_terminal_gets_the_whole_story(width: int) -> None:
    squeezed = "".join(render(build_troubled_scaling(), width=width).split())
    assert "…" not in squeezed
    assert "Strongscaling:howmuchfaster" in squeezed
    assert squeezed.endswith("stopotherprogramsandrepeat")


def test_one_screen_of_a_short_answer_is_the_whole_answer() -> None:
    assert render(build_strong_scaling(), is_full=False) == EXAMPLE


def build_long_document() -> Document:
    """More of everything than a screen has room for; one row failed."""
    table = build_wide_table()
    found = [Finding(kind="k", text=f"Finding {n} " + "and more words " * 9, weight=n) for n in range(9)]
    noise = [Caution(kind="noise", message=f"noise {n}", next_step="wait", severity="noise") for n in range(6)]
    failure = Caution(kind="failed", message="ddp × 4 ran out of memory", next_step="less", severity="failure")
    long = replace(table, rows=table.rows * 20)
    return Document(
        title="Long",
        sections=(Section(tables=(long, table)), Section(tables=(table,))),
        findings=tuple(found),
        cautions=(*noise, failure),
    )


def test_a_long_answer_fits_one_screen_and_says_what_it_leaves_out() -> None:
    lines = render(build_long_document(), width=100, is_full=False).splitlines()
    assert len(lines) <= MOST_LINES
    assert lines.index("Failed") < next(n for n, line in enumerate(lines) if "─" in line)
    assert "  ddp × 4 ran out of memory → less" in lines
    found = [line.split()[1] for line in lines if line.startswith("  Finding")]
    assert found == ["8", "7", "6", "5", "4"]
    assert " ".join(lines[-2:]).count("more") >= 4
    assert "--full" in " ".join(lines[-2:])


def test_everything_is_one_flag_away() -> None:
    text = render(build_long_document(), width=100)
    assert all(f"Finding {n}" in text and f"noise {n}" in text for n in range(6))
    assert text.index("ddp × 4 ran out of memory") < text.index("noise 0")


def test_the_same_warning_of_several_rows_takes_one_line() -> None:
    noise = [
        Caution(kind="not-settled", subject=row, message=f"{row}: not settled", next_step="", severity="noise")
        for row in ("ddp × 1", "ddp × 2", "ddp × 4")
    ]
    lines = render(Document(title="T", cautions=tuple(noise)), width=100, is_full=False).splitlines()
    assert [line for line in lines if "settled" in line] == ["  ddp × 1: not settled (also ddp × 2, ddp × 4)"]


@settings(max_examples=50)
@given(draw_documents())
def test_one_screen_of_any_document_fits_100_columns(document: Document) -> None:
    lines = render(document, width=100, is_full=False).split("\n")
    assert max(map(measure_text, lines)) <= 100

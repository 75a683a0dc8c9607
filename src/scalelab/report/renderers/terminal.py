"""A document in a terminal of any width; without colours it has the same words.

A table that is too wide wraps its headers and prose, then moves its columns closer together, and is finally split into
tables below each other that repeat the first column. No entry is ever truncated: where two columns do not fit, entries
wrap.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TextIO

from scalelab.checks import clean_text
from scalelab.report.document import Document, Section, Table
from scalelab.report.findings import Caution
from scalelab.report.tables import (
    FEWEST_ROWS,
    MOST_LINES,
    TextColumn,
    format_columns,
    list_notes,
    measure_text,
    pad_text,
    shorten,
    split_words,
    wrap_text,
)

GAPS = (3, 2)
"""The blanks between two columns, in the order in which they are tried."""
MAX_HEADER_LINES = 2
MAX_WORD = 20
"""A longer word in prose, such as a path, may be broken."""
USUAL_WIDTH = 80
ANSI = {"bold": "1", "dim": "2", "red": "31", "yellow": "33"}
"""The codes of styles (ECMA-48, Select Graphic Rendition)."""


def find_width() -> int:
    """Columns of the terminal that any standard stream belongs to; COLUMNS overrides it."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns):
        return int(columns)
    for stream in range(3):
        try:
            return os.get_terminal_size(stream).columns or USUAL_WIDTH
        except OSError:
            continue
    return USUAL_WIDTH


def takes_styles(stream: TextIO) -> bool:
    """Whether bold and colours may be written: to a terminal or with FORCE_COLOR, and never with NO_COLOR."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown"):
        return False
    return stream.isatty() or bool(os.environ.get("FORCE_COLOR"))


class ColumnSize(NamedTuple):
    """How wide a column would be, and how narrow it can be."""

    natural: int
    least: int
    is_prose: bool = False
    """Whether any width between the two is of use."""


class Part(NamedTuple):
    """Some columns of a table, by index, with their widths."""

    columns: tuple[int, ...]
    widths: tuple[int, ...]
    gap: int

    @property
    def width(self) -> int:
        return sum(self.widths) + self.gap * (len(self.widths) - 1)


def measure_column(column: TextColumn) -> ColumnSize:
    """Natural is all on one line; least has headers and prose broken between words, but numbers whole."""
    natural = max(1, *map(measure_text, (column.header, *column.cells)))
    least = next(width for width in range(1, natural + 1) if _is_short_enough(column.header, width))
    for cell in column.cells:
        words = split_words(cell) if column.is_prose else [cell]
        longest = max(map(measure_text, words))
        least = max(least, min(longest, MAX_WORD) if column.is_prose else longest)
    return ColumnSize(natural + column.mark_width, least + column.mark_width, column.is_prose)


def _is_short_enough(header: str, width: int) -> bool:
    """Whether a header takes few enough lines of a width, with every word whole."""
    is_whole = all(measure_text(word) <= width for word in split_words(header))
    return is_whole and len(wrap_text(header, width)) <= MAX_HEADER_LINES


def arrange_columns(sizes: Sequence[ColumnSize], available: int) -> tuple[Part, ...]:
    """The table in as few parts as fit into the available width, all about as wide."""
    num_parts = len(_group_columns(sizes, available))
    groups = next(
        groups
        for groups in (_group_columns(sizes, limit) for limit in range(available + 1))
        if len(groups) == num_parts
    )
    return tuple(_set_group(sizes, group, available) for group in groups)


def fill_width(sizes: Sequence[ColumnSize], available: int) -> Part:
    """As many of the first columns as fit, for a table of which only that part is shown."""
    return _set_group(sizes, _group_columns(sizes, available)[0], available)


def _set_group(sizes: Sequence[ColumnSize], group: Sequence[int], available: int) -> Part:
    return _fit_columns(sizes, group, available) or _squeeze_columns(sizes, group, available)


def _group_columns(sizes: Sequence[ColumnSize], limit: int) -> list[list[int]]:
    """The columns in groups that are no wider than a limit; each begins with the first column."""
    groups = [[0]]
    for index in range(1, len(sizes)):
        if len(groups[-1]) > 1 and _fit_columns(sizes, [*groups[-1], index], limit) is None:
            groups.append([0])
        groups[-1].append(index)
    return groups


def _fit_columns(sizes: Sequence[ColumnSize], group: Sequence[int], available: int) -> Part | None:
    """The columns with their widths, the fewest headers broken; None if they do not fit."""
    least = [sizes[index].least for index in group]
    for gap in GAPS:
        spare = available - sum(least) - gap * (len(group) - 1)
        if spare >= 0:
            widths = _widen_columns([sizes[index] for index in group], spare)
            return Part(columns=tuple(group), widths=tuple(widths), gap=gap)
    return None


def _widen_columns(sizes: Sequence[ColumnSize], spare: int) -> list[int]:
    """The least widths, and the spare width given to prose first, then to headers, the most modest first."""
    widths = [size.least for size in sizes]
    missing_widths = [size.natural - size.least for size in sizes]
    order = sorted(range(len(sizes)), key=lambda index: (not sizes[index].is_prose, missing_widths[index]))
    for index in order:
        missing = missing_widths[index]
        if missing <= spare or sizes[index].is_prose:
            widths[index] += min(missing, spare)
            spare -= min(missing, spare)
    return widths


def _squeeze_columns(sizes: Sequence[ColumnSize], group: Sequence[int], available: int) -> Part:
    """One or two columns that do not fit: the first gets at most half, the other one the rest."""
    gap = GAPS[-1]
    if len(group) == 1:
        return Part(columns=(0,), widths=(max(1, available),), gap=gap)
    first = max(1, min(sizes[0].least, (available - gap) // 2))
    return Part(columns=tuple(group), widths=(first, max(1, available - gap - first)), gap=gap)


def set_header(columns: Sequence[TextColumn], part: Part) -> list[str]:
    """The lines of a part's header, bottom aligned."""
    return _set_row(columns, part, [(column.header, "") for column in columns], fill_above=True)


def set_rows(columns: Sequence[TextColumn], part: Part) -> list[str]:
    """The lines of a part's rows."""
    rows = range(len(columns[0].cells))
    cells = ([(column.cells[row], column.marks[row]) for column in columns] for row in rows)
    return [line for row in cells for line in _set_row(columns, part, row)]


def _set_row(
    columns: Sequence[TextColumn], part: Part, cells: Sequence[tuple[str, str]], *, fill_above: bool = False
) -> list[str]:
    """The lines of one row of texts with their marks; a row is as high as its highest cell."""
    blocks = []
    for column, width, (text, mark) in zip(columns, part.widths, cells, strict=True):
        inner = max(1, width - column.mark_width)
        lines = [pad_text(line, inner, column.align) for line in wrap_text(text, inner)]
        blocks.append([pad_text(lines[0] + mark, width, "left"), *lines[1:]])
    height = max(map(len, blocks))
    for block, width in zip(blocks, part.widths, strict=True):
        missing = [" " * width] * (height - len(block))
        block[:] = missing + block if fill_above else block + missing
    return [(" " * part.gap).join(lines) for lines in zip(*blocks, strict=True)]


INDENT = "  "


class StyledLine(NamedTuple):
    """One line of output and its style."""

    text: str = ""
    style: str = ""

    def render(self, *, is_styled: bool) -> str:
        plain = self.text.rstrip(" ")
        codes = ";".join(ANSI[word] for word in self.style.split())
        return f"\x1b[{codes}m{plain}\x1b[0m" if is_styled and codes and plain else plain


def render_terminal(
    document: Document, width: int, *, is_full: bool = False, is_styled: bool = False, rest: str = "--full prints"
) -> str:
    """A document on one screen, or with everything in it; `rest` says what shows the rest."""
    lines = _set_document(document, width) if is_full else _set_brief(document, width, rest)
    return "".join(f"{line.render(is_styled=is_styled)}\n" for line in lines)


def _set_brief(document: Document, width: int, rest: str) -> Iterator[StyledLine]:
    """What failed, the main table as far as it fits, findings, one line per warning, what is left out."""
    brief = shorten(document)
    head = [*_set_text(document.headline, width, style="bold"), *_set_text(document.setting, width, INDENT)]
    if brief.failures:
        head += [StyledLine(), StyledLine("Failed", "bold red"), *_set_failures(brief.failures, width)]
    tail = _set_list("Summary", [line for one in brief.findings for line in _set_text(one.text, width, INDENT)], "bold")
    num_more = len(brief.warnings) + 2 if brief.warnings else 0
    room = MOST_LINES - len(head) - len(tail) - num_more - 2
    body, more = _set_main_table(brief.table, width, room) if brief.table else ([], "")
    tail += _set_list("Warnings", _set_warnings(brief.warnings, width, room - len(body)), "bold yellow")
    left_out = ", ".join(words for words in (more, brief.left_out) if words)
    yield from (*head, *body, *tail)
    if left_out:
        them = "it" if left_out.startswith("1 ") and "," not in left_out else "them"
        yield from (StyledLine(), *_set_text(f"Not shown: {left_out}; {rest} {them}.", width, style="dim"))


def _set_list(title: str, lines: list[StyledLine], style: str) -> list[StyledLine]:
    return [StyledLine(), StyledLine(title, style), *lines] if lines else []


def _set_failures(failures: Sequence[Caution], width: int) -> list[StyledLine]:
    """The first whole, because its end says what to do; one line for each of the others."""
    first = [_set_warning(failures[0], width)]
    if first[0].text.endswith("…"):
        first = list(_set_text(failures[0].message, width, INDENT))
    return [*first, *(_set_warning(one, width) for one in failures[1:])]


def _set_warnings(warnings: Sequence[Caution], width: int, room: int) -> list[StyledLine]:
    """One line each; a message that would be cut is printed whole as long as the screen has lines to spare."""
    lines: list[StyledLine] = []
    for caution in warnings:
        set_lines = [_set_warning(caution, width)]
        whole = list(_set_text(caution.message, width, INDENT))
        if set_lines[0].text.endswith("…") and len(whole) - 1 <= room:
            room -= len(whole) - 1
            set_lines = whole
        lines += set_lines
    return lines


def _set_warning(caution: Caution, width: int) -> StyledLine:
    """A caution on one line: what is wrong, and the next step where it fits."""
    message, step = clean_text(caution.message), clean_text(caution.next_step)
    room = width - len(INDENT)
    whole = f"{message} → {step}" if step else message
    if measure_text(whole) <= room:
        return StyledLine(INDENT + whole)
    first = wrap_text(message, room if measure_text(message) <= room else room - 2)[0]
    return StyledLine(INDENT + (first if first == message else f"{first} …"))


def _set_main_table(table: Table, width: int, room: int) -> tuple[list[StyledLine], str]:
    """The rows and columns that fit, and what does not in words."""
    columns = format_columns(table)
    part = fill_width([measure_column(column) for column in columns], max(1, width - len(INDENT)))
    chosen = [columns[index] for index in part.columns]
    notes = [line for note in list_notes(table)[:3] for line in wrap_text(note, width - len(INDENT))][:4]
    header = [StyledLine(INDENT + line, "bold") for line in set_header(chosen, part)]
    blocks = [set_rows([cut_column(column, row) for column in chosen], part) for row in range(len(table.rows))]
    room = max(FEWEST_ROWS, room - len(header) - len(notes) - 3)
    shown = 0
    rows: list[str] = []
    while shown < len(blocks) and len(rows) + len(blocks[shown]) <= room:
        rows += blocks[shown]
        shown += 1
    lines = [
        StyledLine(),
        *_set_text(table.title, width, INDENT),
        *header,
        StyledLine(INDENT[1:] + "─" * (part.width + 1), "dim"),
    ]
    lines += [StyledLine(INDENT + line) for line in rows]
    lines += [StyledLine(INDENT + pad_text(line, part.width, "right"), "dim") for line in notes]
    missing = ((len(blocks) - shown, "row"), (len(columns) - len(chosen), "column"))
    more = ", ".join(f"{number} more {what}{'s' if number > 1 else ''}" for number, what in missing if number)
    return lines, more


def cut_column(column: TextColumn, row: int) -> TextColumn:
    """One row of a column, as wide as it was."""
    return replace(column, cells=(column.cells[row],), marks=(column.marks[row],))


def _set_document(document: Document, width: int) -> Iterator[StyledLine]:
    yield from _set_text(document.headline, width, style="bold")
    yield from _set_text(document.setting, width, INDENT)
    if document.failures:
        yield from (StyledLine(), StyledLine("Failed", "bold red"), *_set_cautions(document.failures, width))
    for section in document.sections:
        if section.paragraphs or section.tables or not section.charts:  # of figures alone there is nothing to print
            yield from _set_section(section, width)
    if document.summary:
        yield from (StyledLine(), StyledLine("Summary", "bold"))
    for finding in document.summary:
        yield from _set_text(finding, width, INDENT)
    if document.warnings:
        yield from (StyledLine(), StyledLine("Warnings", "bold yellow"), *_set_cautions(document.warnings, width))


def _set_cautions(cautions: Sequence[Caution], width: int) -> Iterator[StyledLine]:
    """What is wrong, and below it the next step."""
    for caution in cautions:
        yield from _set_text(caution.message, width, INDENT)
        for number, line in enumerate(_set_text(caution.next_step, width, 3 * INDENT, "dim")):
            yield line if number else StyledLine(2 * INDENT + "→ " + line.text.lstrip(" "), line.style)


def _set_section(section: Section, width: int) -> Iterator[StyledLine]:
    if section.heading or section.paragraphs:
        yield StyledLine()
    yield from _set_text(section.heading, width, style="bold")
    for paragraph in section.paragraphs:
        yield from _set_text(paragraph, width, INDENT)
    for table in section.tables:
        yield from _set_table(table, width)


def _set_text(text: str, width: int, indent: str = "", style: str = "") -> Iterator[StyledLine]:
    cleaned = clean_text(text)
    if cleaned:
        yield from (StyledLine(indent + line, style) for line in wrap_text(cleaned, width - len(indent)))


def _set_table(table: Table, width: int) -> Iterator[StyledLine]:
    columns = format_columns(table)
    parts = arrange_columns([measure_column(column) for column in columns], max(1, width - len(INDENT)))
    if table.title:
        yield StyledLine()
        yield from _set_text(table.title, width, INDENT)
    for part in parts:
        chosen = [columns[index] for index in part.columns]
        yield StyledLine()
        yield from (StyledLine(INDENT + line, "bold") for line in set_header(chosen, part))
        yield StyledLine(INDENT[1:] + "─" * (part.width + 1), "dim")
        yield from (StyledLine(INDENT + line) for line in set_rows(chosen, part))
    for note in list_notes(table):
        for line in wrap_text(note, width - len(INDENT)):
            yield StyledLine(INDENT + pad_text(line, parts[-1].width, "right"), "dim")

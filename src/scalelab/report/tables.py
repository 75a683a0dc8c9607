"""Tables declared once: each column beside the way to read it from a row.

    make_table(
        arms,
        text_column("run", "run", lambda arm: arm.label),
        seconds_column("step_seconds", "step", lambda arm: arm.step),
        ratio_column("speedup", "speedup", lambda arm: answer.speedup(arm)),
        notes=(INTERVAL_NOTE,),
    )

A function per quantity keeps a declaration on one line; rows may be anything that the readers understand.

A table holds no impossible number: shares lie in [0, 1], other quantities are 0 or more, and intervals end there. A
value outside is unknown, with a note. Differences may be negative and ratios that are not parts may exceed 100 %: by
their keys (`analysis/estimate.py`), or by `domain="signed"` and `domain="amount"`.

The second half is what every format that a person reads has in common: which parts fit on one screen, cells as text,
lines of text. Every column gets one unit, in its header, and its ± are aligned. What one screen leaves out is in
`--full`, in the HTML and in the JSON. Every text passes `clean_text` before it is set. Widths are those of a terminal,
where a Chinese character takes two columns and an accent none (Unicode Standard Annex 11).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from scalelab.analysis.estimate import DOMAINS, Domain, confine, find_domain
from scalelab.checks import clean_text
from scalelab.report.document import Align, Cell, Column, Document, Table, make_cell
from scalelab.report.findings import Caution, Finding, Known, order_findings
from scalelab.units import PLUS_MINUS, UNKNOWN, Quantity, Unit, choose_unit, format_estimate

NOISE_NOTE = "– instead of a number: too noisy, the result was impossible (a time below 0, a share outside 0–100 %)"

INTERVAL_NOTE = "± is the 95 % CI half-width (the larger side)"

PAIRED_NOTE = "ratios are paired by round, so they differ from the ratio of the medians beside them"
"""Where arms were measured round by round: load that all arms of a round share cancels."""

Row = TypeVar("Row")


@dataclass(frozen=True, kw_only=True)
class Field(Generic[Row]):
    """A column, and how a row fills it."""

    column: Column
    read: Callable[[Row], Known | Cell]
    domain: Domain = "signed"


def make_column(
    quantity: Quantity,
    key: str,
    header: str,
    read: Callable[[Row], Known | Cell],
    *,
    domain: Domain | None = None,
    **options: Any,
) -> Field[Row]:
    """A column of any quantity; `options` are the other fields of `Column`."""
    column = Column(key=key, header=header, quantity=quantity, **options)
    return Field(column=column, read=read, domain=domain or find_domain(key, DOMAINS.get(quantity, "signed")))


def text_column(key: str, header: str, read: Callable[[Row], Known | Cell], **options: Any) -> Field[Row]:
    """Words, to the left."""
    return make_column("text", key, header, read, **({"align": "left"} | options))


def seconds_column(key: str, header: str, read: Callable[[Row], Known | Cell], **options: Any) -> Field[Row]:
    return make_column("seconds", key, header, read, **options)


def bytes_column(key: str, header: str, read: Callable[[Row], Known | Cell], **options: Any) -> Field[Row]:
    """Bytes."""
    return make_column("bytes", key, header, read, **options)


def rate_column(key: str, header: str, read: Callable[[Row], Known | Cell], **options: Any) -> Field[Row]:
    """Per second."""
    return make_column("rate", key, header, read, **options)


def ratio_column(key: str, header: str, read: Callable[[Row], Known | Cell], **options: Any) -> Field[Row]:
    return make_column("ratio", key, header, read, **options)


def share_column(key: str, header: str, read: Callable[[Row], Known | Cell], **options: Any) -> Field[Row]:
    """A ratio in [0, 1], printed in percent."""
    return make_column("share", key, header, read, **options)


def count_column(key: str, header: str, read: Callable[[Row], Known | Cell], **options: Any) -> Field[Row]:
    return make_column("count", key, header, read, **options)


def make_table(
    rows: Iterable[Row],
    *fields: Field[Row] | None,
    title: str = "",
    notes: Sequence[str] = (),
    status: Callable[[Row], str | None] | None = None,
) -> Table:
    """One row of cells per row; a field that is None is left out.

    `status` says what stands instead of numbers in a row that has none, such as `out of memory`: it takes the first
    column after the name that one screen shows, and the rest of the row is unknown. None: the row is read.
    """
    chosen = [one for one in fields if one is not None]
    place = next((index for index, one in enumerate(chosen) if index and not one.column.is_detail), 1)
    made = []
    is_noisy = False
    for row in rows:
        words = None if status is None else status(row)
        if words is None:
            cells = [to_cell(one.read(row)) for one in chosen]
            made.append(tuple(confine_cell(cell, one.domain) for cell, one in zip(cells, chosen, strict=True)))
            is_noisy = is_noisy or any(
                before.value is not None and after.value is None for before, after in zip(cells, made[-1], strict=True)
            )
        else:
            rest = (make_cell(words) if index == place else Cell() for index in range(1, len(chosen)))
            made.append((to_cell(chosen[0].read(row)), *rest))
    every = (*notes, NOISE_NOTE) if is_noisy else tuple(notes)
    return Table(title=title, columns=tuple(one.column for one in chosen), rows=tuple(made), notes=every)


def confine_cell(cell: Cell, domain: Domain) -> Cell:
    """The cell, its interval cut to the domain; unknown if its value is outside."""
    estimate = cell.estimate
    if estimate is None:
        return cell
    possible = confine(estimate, domain)
    if possible is estimate:
        return cell
    return Cell(mark=cell.mark) if possible is None else make_cell(possible, mark=cell.mark)


def to_cell(source: Known | Cell) -> Cell:
    return source if isinstance(source, Cell) else make_cell(source)


_BREAK = re.compile(r"(?<!±) (?![±%])")
"""A blank at which a line may end: "1.92 ± 0.02" and "96 %" stay whole."""


def measure_text(text: str) -> int:
    """How many columns of a terminal a text takes."""
    return len(text) if text.isascii() else sum(map(_measure_character, text))


def _measure_character(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def pad_text(text: str, width: int, align: Align) -> str:
    """A text with blanks up to a width."""
    blanks = " " * (width - measure_text(text))
    return text + blanks if align == "left" else blanks + text


def split_words(text: str) -> list[str]:
    """The parts of a text between which a line may end."""
    return _BREAK.split(text)


def wrap_text(text: str, width: int) -> list[str]:
    """The lines of a text, broken between words, and inside only those words that are too long for a line."""
    lines = [""]
    for word in split_words(text):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if measure_text(joined) <= width:
            lines[-1] = joined
        else:
            lines += _chop_word(word, width)
    return lines if lines[0] or len(lines) == 1 else lines[1:]


def _chop_word(word: str, width: int) -> list[str]:
    """A word in pieces of at most a width, though never less than a character."""
    pieces = [""]
    for character in word:
        if pieces[-1] and measure_text(pieces[-1] + character) > width:
            pieces.append("")
        pieces[-1] += character
    return pieces


MOST_LINES = 38
"""Lines of one screen, less the two that say where the run is."""
MOST_FINDINGS = 5
MOST_WARNINGS = 4
FEWEST_ROWS = 6
"""A table always shows this many."""


@dataclass(frozen=True, kw_only=True)
class Brief:
    """What of a document fits on one screen."""

    failures: tuple[Caution, ...]
    table: Table | None
    findings: tuple[Finding, ...]
    warnings: tuple[Caution, ...]
    left_out: str
    """What is not shown, in words; empty: nothing."""


def shorten(document: Document) -> Brief:
    """Choose by severity and weight; how many rows and columns of the table fit is for the renderer to see."""
    failures, warnings = document.failures, merge_alike(document.warnings)
    findings = order_findings(document.findings)
    tables = document.tables
    main = replace_details(tables[0]) if tables else None
    rest = (
        (len(tables) - 1, "table"),
        (len(findings) - MOST_FINDINGS, "finding"),
        (len(failures) - MOST_WARNINGS, "failure"),
        (len(warnings) - MOST_WARNINGS, "warning"),
    )
    left_out = ", ".join(f"{number} more {what}{'s' if number > 1 else ''}" for number, what in rest if number > 0)
    return Brief(
        failures=tuple(failures[:MOST_WARNINGS]),
        table=main,
        findings=tuple(findings[:MOST_FINDINGS]),
        warnings=tuple(warnings[:MOST_WARNINGS]),
        left_out=left_out,
    )


def merge_alike(cautions: Sequence[Caution]) -> list[Caution]:
    """One caution of each kind, which names the other subjects that it holds for."""
    by_kind: dict[str, list[Caution]] = {}
    for number, caution in enumerate(cautions):
        by_kind.setdefault(caution.kind if caution.subject else f"{caution.kind} {number}", []).append(caution)
    merged = []
    for first, *others in by_kind.values():
        subjects = [one.subject for one in others if one.subject != first.subject]
        also = f" (also {', '.join(dict.fromkeys(subjects))})" if subjects else ""
        merged.append(replace(first, message=f"{first.message}{also}"))
    return merged


def replace_details(table: Table) -> Table:
    """The table without the columns that are for the full report."""
    kept = [index for index, column in enumerate(table.columns) if not column.is_detail]
    return replace(
        table,
        columns=tuple(table.columns[index] for index in kept),
        rows=tuple(tuple(row[index] for index in kept) for row in table.rows),
    )


LONGEST_NAME = 20
"""Names of rows up to this long are never broken into lines."""


@dataclass(frozen=True, kw_only=True)
class TextColumn:
    """A column as text."""

    header: str
    align: Align
    cells: tuple[str, ...]
    marks: tuple[str, ...]
    """The footnote sign beside each number, or an empty text; a word has its sign in its cell."""
    is_prose: bool
    """Whether the cells are words, which may be broken into lines."""

    @property
    def mark_width(self) -> int:
        """What the marks take beside the column, so that its numbers stay below each other."""
        return max(map(measure_text, self.marks), default=0)


def format_columns(table: Table) -> tuple[TextColumn, ...]:
    """The columns of a table, ready to be set."""
    cells = [[row[i] for row in table.rows] for i in range(len(table.columns))]
    by_key = {column.key: own for column, own in zip(table.columns, cells, strict=True)}
    columns = [
        _format_column(column, own, by_key.get(column.unit_of, ()))
        for column, own in zip(table.columns, cells, strict=True)
    ]
    names = columns[0]
    if max(map(measure_text, names.cells), default=0) <= LONGEST_NAME:
        columns[0] = replace(names, is_prose=False)
    return tuple(columns)


def list_notes(table: Table) -> tuple[str, ...]:
    """What is printed below a table: its notes, then what its columns mean."""
    meanings = (f"{column.header}: {column.note}" for column in table.columns if column.note)
    return tuple(clean_text(note) for note in (*table.notes, *meanings))


def _format_column(column: Column, cells: Sequence[Cell], scaled_as: Sequence[Cell]) -> TextColumn:
    is_prose = column.quantity == "text"
    if not column.shows_interval:
        cells = [replace(cell, low=None, high=None) for cell in cells]
    quantity = "number" if is_prose else column.quantity
    unit = choose_unit(quantity, [cell.estimate for cell in cells], [cell.estimate for cell in scaled_as])
    header = clean_text(column.header)
    formatted = tuple(_format_cell(cell, unit) for cell in cells)
    texts = formatted if is_prose else _align_widths(formatted)
    marks = tuple(clean_text(cell.mark) for cell in cells)
    if column.align == "left":
        texts, marks = tuple(map("".join, zip(texts, marks, strict=True))), ("",) * len(cells)
    return TextColumn(
        header=f"{header} [{unit.symbol}]" if unit.symbol and not unit.suffix else header,
        align=column.align,
        cells=texts,
        marks=marks,
        is_prose=is_prose,
    )


def _format_cell(cell: Cell, unit: Unit) -> str:
    if isinstance(cell.value, str):
        return clean_text(cell.value)
    if isinstance(cell.value, bool):
        return "yes" if cell.value else "no"
    return UNKNOWN if cell.estimate is None else format_estimate(cell.estimate, unit)


def _align_widths(texts: Sequence[str]) -> tuple[str, ...]:
    """The same texts with what follows ± padded, so that the signs are aligned."""
    parts = [text.partition(PLUS_MINUS) for text in texts]
    widest = max((len(after) for _, sign, after in parts if sign), default=0)
    return tuple(before + sign + (after.rjust(widest) if sign else "") for before, sign, after in parts)

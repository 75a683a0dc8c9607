"""Tables declared once: each column beside the way to read it from a row.

    make_table(
        arms,
        text_column("run", "run", lambda arm: arm.label),
        seconds_column("step_seconds", "step", lambda arm: arm.step),
        ratio_column("speedup", "speedup", lambda arm: answer.speedup(arm)),
        notes=(INTERVAL_NOTE,),
    )

A function per quantity keeps a declaration on one line; rows may be anything that the readers understand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from scalelab.report.document import Cell, Column, Table, make_cell
from scalelab.report.findings import Known
from scalelab.units import Quantity

INTERVAL_NOTE = "± is the 95 % CI half-width (the larger side)"

Row = TypeVar("Row")


@dataclass(frozen=True, kw_only=True)
class Field(Generic[Row]):
    """A column, and how a row fills it."""

    column: Column
    read: Callable[[Row], Known | Cell]


def make_column(
    quantity: Quantity, key: str, header: str, read: Callable[[Row], Known | Cell], **options: Any
) -> Field[Row]:
    """A column of any quantity; `options` are the other fields of `Column`."""
    return Field(column=Column(key=key, header=header, quantity=quantity, **options), read=read)


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
    for row in rows:
        words = None if status is None else status(row)
        if words is None:
            made.append(tuple(to_cell(one.read(row)) for one in chosen))
        else:
            rest = (make_cell(words) if index == place else Cell() for index in range(1, len(chosen)))
            made.append((to_cell(chosen[0].read(row)), *rest))
    return Table(title=title, columns=tuple(one.column for one in chosen), rows=tuple(made), notes=tuple(notes))


def to_cell(source: Known | Cell) -> Cell:
    return source if isinstance(source, Cell) else make_cell(source)

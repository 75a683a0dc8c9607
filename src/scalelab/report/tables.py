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
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from scalelab.analysis.estimate import DOMAINS, Domain, confine, find_domain
from scalelab.report.document import Cell, Column, Table, make_cell
from scalelab.report.findings import Known
from scalelab.units import Quantity

NOISE_NOTE = "– instead of a number: too noisy, it came out impossible (a time below 0, a share outside 0–100 %)"

INTERVAL_NOTE = "± is the 95 % CI half-width (the larger side)"

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

"""What may change between two answers to the same question, and what may not.

Words may: titles, headers, notes, sentences, the names of rows. There may be more tables, columns and charts. Numbers
may not change, and neither tables, columns nor rows may get lost: a table is known by the keys of its columns, a row by
its place, or by its numbers where there are fewer or more rows. Tables may stand in another order.

0.1.0 printed impossible numbers where a run was noisy: times below 0, shares outside [0, 1]. Such a value may be
unknown now, and such an end of an interval may be the edge of what is possible.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

Json = dict[str, Any]

RELATIVE = 1e-9
"""How far two numbers may be apart, relative to the larger one: what another order of additions makes."""
ABSOLUTE = 1e-15
"""The same for numbers that should be 0."""

RENAMED: dict[str, str] = {"more than the law": "more", "less than the law": "less"}
"""Words that have another name since: the old one, and the new one."""
DOMAINS = {"share": (0.0, 1.0)} | dict.fromkeys(("seconds", "bytes", "rate", "ratio", "count"), (0.0, math.inf))
"""What numbers can be, by quantity."""
FIXED_WORDS = frozenset(
    {
        *("completed", "out of memory", "invalid", "crashed", "timed out", "not run", "not run yet", "ran", "run"),
        *("faster", "slower", "no difference", "unresolved", "same", "added", "removed"),
        *("more than the law", "less than the law", "as the law", "yes", "no", "slow", "none"),
        *("computation", "communication", "input", "forward", "backward", "optimizer"),
    }
)
"""Statuses and verdicts: words that are answers. Others may be put differently."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table without its words."""

    title: str
    keys: tuple[str, ...]
    quantities: tuple[str, ...]
    rows: tuple[tuple[Json, ...], ...]

    def __str__(self) -> str:
        return f"table {self.title!r} ({', '.join(self.keys)})"


def list_tables(document: Json) -> list[Grid]:
    """The tables of all sections, in order."""
    return [
        Grid(
            title=table["title"] or section["heading"],
            keys=tuple(column["key"] for column in table["columns"]),
            quantities=tuple(column["quantity"] for column in table["columns"]),
            rows=tuple(tuple(row) for row in table["rows"]),
        )
        for section in document["sections"]
        for table in section["tables"]
    ]


def drop_column(document: Json, key: str, titles: Collection[str] = ()) -> Json:
    """The document without a column, in the tables of these titles; in all of them if none is named."""
    kept = copy.deepcopy(document)
    for section in kept["sections"]:
        for table in section["tables"]:
            if titles and (table["title"] or section["heading"]) not in titles:
                continue
            places = [place for place, column in enumerate(table["columns"]) if column["key"] != key]
            table["columns"] = [table["columns"][place] for place in places]
            table["rows"] = [[row[place] for place in places] for row in table["rows"]]
    return kept


def count_charts(document: Json) -> int:
    return sum(len(section["charts"]) for section in document["sections"])


def list_sentences(document: Json) -> list[str]:
    """What was found, in words: schema 1 had nothing else."""
    return [finding["text"] for finding in document["findings"]] if "findings" in document else document["summary"]


def take_tables(document: Json, titles: Collection[str]) -> tuple[Json, list[Grid]]:
    """The document without the tables of these titles, and those tables."""
    taken = [table for table in list_tables(document) if table.title in titles]
    kept = copy.deepcopy(document)
    for section in kept["sections"]:
        section["tables"] = [one for one in section["tables"] if (one["title"] or section["heading"]) not in titles]
    return kept, taken


def list_scattered(old: Sequence[Grid], new: Json) -> list[str]:
    """The numbers of a column `ours` of some tables that no table of the new document has."""
    cells = [cell for table in list_tables(new) for row in table.rows for cell in row]
    return [
        f"{table}: {cell['value']} is in no table"
        for table in old
        for row in table.rows
        for key, cell in zip(table.keys, row, strict=True)
        if key == "ours" and is_number(cell["value"]) and not any(is_equal(cell, one) for one in cells)
    ]


def compare_documents(
    old: Json, new: Json, timed: frozenset[str] = frozenset(), respread: frozenset[str] = frozenset()
) -> list[str]:
    """What the new document has lost or changed.

    `timed` are columns that are measured anew at every call, `respread` those whose intervals are found in another way.
    """
    differences = list(compare_tables(list_tables(old), list_tables(new), timed, respread))
    if count_charts(new) < count_charts(old):
        differences.append(f"{count_charts(new)} charts, there were {count_charts(old)}")
    if list_sentences(old) and not list_sentences(new):
        differences.append("nothing is said in the summary")
    return differences


def compare_tables(
    old: Sequence[Grid], new: Sequence[Grid], timed: frozenset[str], respread: frozenset[str]
) -> Iterator[str]:
    """Every old table against a new one with all its columns, the one that differs least; each is used once."""
    left = list(range(len(new)))
    for table in old:
        places = [place for place in left if set(table.keys) <= set(new[place].keys)]
        if not places:
            yield f"{table} is lost"
            continue
        found = {place: list(compare_rows(table, new[place], timed, respread)) for place in places}
        best = min(places, key=lambda place: len(found[place]))
        yield from (f"{table}: {difference}" for difference in found[best])
        left.remove(best)


def compare_rows(old: Grid, new: Grid, timed: frozenset[str], respread: frozenset[str]) -> Iterator[str]:
    """What differs between two tables, cell by cell; the new one has all columns of the old one."""
    if len(old.rows) != len(new.rows):
        yield from list_lost_rows(old, new, timed, respread)
        return
    for number, (old_row, new_row) in enumerate(zip(old.rows, new.rows, strict=True), start=1):
        cells = dict(zip(new.keys, new_row, strict=True))
        for place, (key, quantity, cell) in enumerate(zip(old.keys, old.quantities, old_row, strict=True)):
            is_name = place == 0 and isinstance(cell["value"], str)
            is_same = is_alike if is_name or key in timed else is_equal
            if key in respread and not isinstance(cell["value"], str):
                is_same = is_same_value
            if not is_same(cell, cells[key]) and not is_confined(cell, cells[key], quantity):
                yield f"row {number}, {key}: {describe(cells[key])}, it was {describe(cell)}"


def list_lost_rows(old: Grid, new: Grid, timed: frozenset[str], respread: frozenset[str]) -> Iterator[str]:
    """The old rows that no new one repeats; further new ones are let through."""
    left = list(new.rows)
    for number, row in enumerate(old.rows, start=1):
        alone = replace(old, rows=(row,))
        alike = [one for one in left if not any(compare_rows(alone, replace(new, rows=(one,)), timed, respread))]
        if alike:
            left.remove(alike[0])
        else:
            yield f"row {number} is lost ({', '.join(describe(cell) for cell in row[:2])})"


def is_equal(old: Json, new: Json) -> bool:
    """Whether a cell holds the same number with the same interval, the same truth, or nothing still."""
    before, after = old["value"], new["value"]
    if isinstance(before, str):
        return before not in FIXED_WORDS or after in (before, RENAMED.get(before, before))
    return all(is_close(old[part], new[part]) for part in ("value", "low", "high"))


def is_same_value(old: Json, new: Json) -> bool:
    """Whether the number is the same; its interval may be another, or unknown."""
    return is_close(old["value"], new["value"])


def is_alike(old: Json, new: Json) -> bool:
    """Whether there is a number where there was one."""
    return is_number(old["value"]) == is_number(new["value"])


def is_confined(old: Json, new: Json, quantity: str) -> bool:
    """Whether the old cell held an impossible number and the new one only leaves that out."""
    least, most = DOMAINS.get(quantity, (-math.inf, math.inf))
    if not is_number(old["value"]) or quantity not in DOMAINS:
        return False
    if not least <= old["value"] <= most:
        return new["value"] is None
    if old["low"] is not None and not old["low"] <= old["value"] <= old["high"]:
        return is_close(old["value"], new["value"]) and new["low"] is None
    ends = {part: None if old[part] is None else min(max(old[part], least), most) for part in ("low", "high")}
    return is_close(old["value"], new["value"]) and all(
        is_close(end, new[part]) or is_close(old[part], new[part]) for part, end in ends.items()
    )


def is_close(old: Any, new: Any) -> bool:
    if not is_number(old):
        return type(old) is type(new) and bool(old == new)
    if not is_number(new):
        return False
    return math.isclose(old, new, rel_tol=RELATIVE, abs_tol=ABSOLUTE) or (math.isnan(old) and math.isnan(new))


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def describe(cell: Json) -> str:
    interval = f" ({cell['low']} to {cell['high']})" if cell["low"] is not None or cell["high"] is not None else ""
    return f"{cell['value']!r}{interval}"

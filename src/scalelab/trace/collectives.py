"""Collectives of one rank in compact form: rows of numbers, made into records when they are asked for."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

import numpy as np

from scalelab.trace.classify import MOST_NAMES
from scalelab.trace.sizes import MessageSize


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One collective on one rank."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, broadcast, all_to_all …; `other`: unknown."""
    start_ns: int
    end_ns: int
    payload_bytes: int | None = None
    """Of the whole tensor: what an all-gather gives and what a reduce-scatter takes, not one rank's piece of it."""
    group: str = ""
    """The name of the process group; empty: unknown."""
    group_size: int | None = None
    sequence: int | None = None
    """Its number in the group, where recorded."""
    name: str = ""
    """Of the kernel or annotation."""
    on_device: bool = False
    ran_as: str = ""
    """The kind that was really run where it is another one: gloo runs a reduce-scatter as an all-reduce."""

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


class Row(NamedTuple):
    """A collective or an operator, in numbers; -1 is unknown, texts are numbers in a table."""

    start_ns: int
    end_ns: int
    kind: int
    ran_as: int
    name: int
    thread: int
    on_device: int
    group: int
    group_size: int
    sequence: int
    payload_bytes: int
    external_id: int
    num_elements: int
    element_bytes: int
    is_piece: int
    is_record: int
    """Whether it is torch's record of a call, and not the operator around it."""

    @property
    def size(self) -> MessageSize:
        return MessageSize(
            None if self.num_elements < 0 else self.num_elements,
            None if self.element_bytes < 0 else self.element_bytes,
            bool(self.is_piece),
        )


@dataclass
class Rows:
    """Rows in a flat array."""

    _numbers: array[int] = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self._numbers) // len(Row._fields)

    def append(self, row: Row) -> None:
        self._numbers.extend(row)

    def __getitem__(self, index: int) -> Row:
        width = len(Row._fields)
        return Row(*self._numbers[index * width : (index + 1) * width])

    def column(self, name: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """A copy, so that rows may still be added."""
        table = np.array(self._numbers, dtype=np.int64).reshape(-1, len(Row._fields))
        return table[:, Row._fields.index(name)].copy()


@dataclass
class Texts:
    """Texts by number; beyond the largest number of them, all are empty."""

    texts: list[str] = field(default_factory=lambda: [""])
    _numbers: dict[str, int] = field(default_factory=lambda: {"": 0})

    def number(self, text: str) -> int:
        found = self._numbers.get(text)
        if found is None:
            if len(self.texts) >= MOST_NAMES:
                return 0
            found = self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return found


class Collectives(Sequence[Collective]):
    """The collectives of a rank in the order of their start; each is made when it is asked for."""

    def __init__(self, rows: Rows | None = None, texts: Sequence[str] = ("",)) -> None:
        self._rows = rows if rows is not None else Rows()
        self._texts = texts

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Collective: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Collective]: ...
    def __getitem__(self, index: int | slice) -> Collective | Sequence[Collective]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"collective {index} of {len(self)}")
        row = self._rows[index % len(self)]
        text = self._texts
        return Collective(
            kind=text[row.kind],
            start_ns=row.start_ns,
            end_ns=row.end_ns,
            payload_bytes=None if row.payload_bytes < 0 else row.payload_bytes,
            group=text[row.group],
            group_size=None if row.group_size < 1 else row.group_size,
            sequence=None if row.sequence < 0 else row.sequence,
            name=text[row.name],
            on_device=bool(row.on_device),
            ran_as=text[row.ran_as],
        )

    def __iter__(self) -> Iterator[Collective]:
        return (self[place] for place in range(len(self)))

    @property
    def num_on_device(self) -> int:
        return int(self._rows.column("on_device").sum())

    @property
    def start_ns(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Of all of them."""
        return self._rows.column("start_ns")

    @property
    def end_ns(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Of all of them."""
        return self._rows.column("end_ns")

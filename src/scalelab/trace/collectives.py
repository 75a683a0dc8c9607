"""Collectives of one rank in compact form, and the sizes of their messages.

A size comes from one of three places: NCCL kernels, and the record that torch makes when it launches them, carry the
number and type of input and output elements; operators of torch's process groups, and annotations of gloo and MPI
threads, carry tensor shapes if shapes were recorded. All sizes are those of the whole message, as
`analysis/traffic.py` defines it. What cannot be read is unknown, never 0.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload

import msgspec
import numpy as np

from scalelab.trace.files.events import Arguments
from scalelab.trace.kinds import MOST_NAMES

LARGEST_BYTES = 2**60
"""A size beyond is a broken number."""

_ELEMENT_BYTES = {
    "bool": 1,
    "byte": 1,
    "char": 1,
    "unsigned char": 1,
    "signed char": 1,
    "short": 2,
    "short int": 2,
    "half": 2,
    "bfloat16": 2,
    "uint16": 2,
    "int": 4,
    "uint32": 4,
    "float": 4,
    "long": 8,
    "long int": 8,
    "uint64": 8,
    "double": 8,
    "complexhalf": 4,
    "complexfloat": 8,
    "complexdouble": 16,
    "complex<c10::half>": 4,
    "complex<float>": 8,
    "complex<double>": 16,
}
"""As torch names the types of elements: in its own words, or in those of C++."""


class Request(NamedTuple):
    """How an operator of torch's process groups asks for a collective."""

    kind: str
    tensor: int
    """Which of its inputs says the size; -1: none."""
    is_piece: bool = False
    """Whether that is one rank's piece of the message."""


REQUESTS: dict[str, Request] = {
    "allreduce_": Request("all_reduce", 0),
    "allreduce_coalesced_": Request("all_reduce", 0),
    "allgather_": Request("all_gather", 1, is_piece=True),
    "allgather_coalesced_": Request("all_gather", 1, is_piece=True),
    "_allgather_base_": Request("all_gather", 0),
    "allgather_into_tensor_coalesced_": Request("all_gather", 0),
    "reduce_scatter_": Request("reduce_scatter", 0, is_piece=True),
    "_reduce_scatter_base_": Request("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": Request("reduce_scatter", 1),
    "broadcast_": Request("broadcast", 0),
    "reduce_": Request("reduce", 0),
    "gather_": Request("gather", 1, is_piece=True),
    "scatter_": Request("scatter", 0, is_piece=True),
    "alltoall_": Request("all_to_all", 1),
    "alltoall_base_": Request("all_to_all", 1),
    "send": Request("send", 0),
    "recv_": Request("recv", 0),
    "recv_any_source_": Request("recv", 0),
    "barrier": Request("barrier", -1),
    "monitored_barrier_": Request("barrier", -1),
}
"""The operators by their name after `c10d::`."""

ANNOTATED: dict[str, bool] = {
    "all_reduce": False,
    "all_gather": True,
    "reduce_scatter": False,
    "broadcast": False,
    "reduce": False,
    "all_to_all": False,
    "gather": True,
    "send": False,
    "recv": False,
}
"""Annotations of collectives that a thread runs: whether the tensor that they name is one rank's piece."""


class MessageSize(NamedTuple):
    """As much of a message's size as is known."""

    num_elements: int | None = None
    element_bytes: int | None = None
    is_piece: bool = False

    def count_bytes(self, group_size: int | None) -> int | None:
        """Of the whole message."""
        if self.num_elements is None or self.element_bytes is None or (self.is_piece and not group_size):
            return None
        total = self.num_elements * self.element_bytes * ((group_size or 1) if self.is_piece else 1)
        return total if total <= LARGEST_BYTES else None


def find_element_bytes(name: str) -> int | None:
    """The size of one element, by the name of its type."""
    plain = name.lower().removeprefix("c10::").removeprefix("at::").strip()
    return 1 if plain.startswith("float8") else _ELEMENT_BYTES.get(plain)


def count_recorded_bytes(kind: str, args: Arguments) -> int | None:
    """What a kernel or a record of NCCL says itself.

    The larger side is the whole message, but for an all-to-all, where it is what goes in. A record without elements is
    that of a barrier or of several calls together, and says nothing.
    """
    num_elements = args.in_elements if kind == "all_to_all" else max(args.in_elements, args.out_elements)
    if num_elements <= 0:
        return None
    return MessageSize(num_elements, find_element_bytes(args.element_type)).count_bytes(None)


def count_received_bytes(kind: str, args: Arguments) -> int | None:
    """What an all-to-all gives a rank."""
    if kind != "all_to_all" or args.out_elements <= 0:
        return None
    return MessageSize(args.out_elements, find_element_bytes(args.element_type)).count_bytes(None)


def read_operator_message(request: Request, args: Arguments) -> MessageSize:
    """What the shapes of an operator's tensors say."""
    return MessageSize() if request.tensor < 0 else _read_tensor(args, request.tensor, request.is_piece)


def read_annotated_message(kind: str, args: Arguments) -> MessageSize:
    """What the shapes of an annotation's tensors say, or those of another library's operator: its first tensor."""
    if kind not in ANNOTATED:
        return MessageSize()
    shapes = _decode(args.input_dims)
    return _read_tensor(args, next((place for place, shape in enumerate(shapes) if shape), 0), ANNOTATED[kind])


def _read_tensor(args: Arguments, index: int, is_piece: bool) -> MessageSize:
    shapes, types = _decode(args.input_dims), _decode(args.input_types)
    if index >= len(shapes):
        return MessageSize()
    name = types[index] if index < len(types) else None
    element_bytes = find_element_bytes(name) if isinstance(name, str) else None
    is_scalar = shapes[index] == [] and element_bytes is not None
    return MessageSize(1 if is_scalar else _count_elements(shapes[index]), element_bytes, is_piece)


def _decode(raw: msgspec.Raw) -> list[Any]:
    try:
        found = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    return found if isinstance(found, list) else []


def _count_elements(shape: Any) -> int | None:
    """Of one tensor, or of a list of tensors; None if the shape was not recorded."""
    if not isinstance(shape, list) or not shape:
        return None
    if all(isinstance(part, list) for part in shape):
        counts = [_multiply(part) for part in shape]
        return None if None in counts else sum(count for count in counts if count is not None)
    return _multiply(shape)


def _multiply(lengths: list[Any]) -> int | None:
    product = 1
    for length in lengths:
        if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length <= LARGEST_BYTES:
            return None
        product = min(product * length, LARGEST_BYTES + 1)
    return product


class Collective(NamedTuple):
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
    step: int | None = None
    """The number of the step in which it was launched; None: in none, or unknown."""
    peer: int | None = None
    """Of a send or a receive: the rank at the other end, counted within the group."""
    stream: int = -1
    """The lane of its device or thread."""
    received_bytes: int | None = None
    """What an all-to-all gives this rank, where recorded."""

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


class CollectiveRow(NamedTuple):
    """A collective or an operator, in numbers; -1 is unknown, texts are numbers in a table."""

    start_ns: int
    end_ns: int
    thread: int
    sequence: int
    external_id: int
    correlation: int
    step: int
    kind: int
    """This and what follows is the same for all calls of one thing."""
    ran_as: int
    name: int
    on_device: int
    group: int
    group_size: int
    payload_bytes: int
    peer: int
    num_elements: int
    element_bytes: int
    is_piece: int
    received_bytes: int
    peer_rank: int
    """The peer's rank in the whole job, where the event says that."""
    is_record: int
    """Whether it is torch's record of a call, and not the operator around it or the annotation in it."""

    @property
    def size(self) -> MessageSize:
        return MessageSize(
            None if self.num_elements < 0 else self.num_elements,
            None if self.element_bytes < 0 else self.element_bytes,
            bool(self.is_piece),
        )


@dataclass
class CollectiveRows:
    """Rows in a flat array."""

    _numbers: array[int] = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self._numbers) // len(CollectiveRow._fields)

    def append(self, row: tuple[int, ...]) -> None:
        self._numbers.extend(row)

    def __getitem__(self, index: int) -> CollectiveRow:
        width = len(CollectiveRow._fields)
        return CollectiveRow(*self._numbers[index * width : (index + 1) * width])

    def column(self, name: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """A copy, so that rows may still be added."""
        table = np.frombuffer(self._numbers, dtype=np.int64).reshape(-1, len(CollectiveRow._fields))
        return table[:, CollectiveRow._fields.index(name)].copy()

    def set_column(self, name: str, values: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        table = np.frombuffer(self._numbers, dtype=np.int64).reshape(-1, len(CollectiveRow._fields))
        table[:, CollectiveRow._fields.index(name)] = values

    def take(self, places: np.ndarray[tuple[int], np.dtype[np.intp]]) -> CollectiveRows:
        """The rows at these places, in their order."""
        table = np.frombuffer(self._numbers, dtype=np.int64).reshape(-1, len(CollectiveRow._fields))
        return CollectiveRows(array("q", table[places].tobytes()))


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


class CollectiveList(Sequence[Collective]):
    """The collectives of a rank in the order of their start; each is made when it is asked for."""

    def __init__(self, rows: CollectiveRows | None = None, texts: Sequence[str] = ("",)) -> None:
        self._rows = rows if rows is not None else CollectiveRows()
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
            step=None if row.step < 0 else row.step,
            peer=None if row.peer < 0 else row.peer,
            stream=row.thread,
            received_bytes=None if row.received_bytes < 0 else row.received_bytes,
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

    @property
    def step_numbers(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Of all of them; negative: in none."""
        return self._rows.column("step")

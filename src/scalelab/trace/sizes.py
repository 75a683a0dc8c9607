"""The size of a collective's message, from what a trace says of it.

Three things may say it. NCCL's kernels, and the record that torch makes when it starts them, carry the number of
elements that go in and come out, and their type. The operators of torch's process groups, and the annotations of the
threads that run gloo and MPI, carry the shapes of their tensors where shapes were recorded. All sizes are those of
the whole message, as `analysis/bandwidth.py` defines it. What cannot be read is unknown, never 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from scalelab.trace.classify import Arguments

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
    "complex<half>": 4,
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


def read_operator_message(request: Request, args: Arguments) -> MessageSize:
    """What the shapes of an operator's tensors say."""
    return MessageSize() if request.tensor < 0 else _read_tensor(args, request.tensor, request.is_piece)


def read_annotated_message(kind: str, args: Arguments) -> MessageSize:
    """What the shapes of an annotation's tensors say."""
    return _read_tensor(args, 0, ANNOTATED[kind]) if kind in ANNOTATED else MessageSize()


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
    """Of one tensor, or of a list of tensors; None where the shape was not recorded."""
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

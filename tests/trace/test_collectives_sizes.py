"""The size of a message, from a record, an operator, an annotation."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalelab.trace import collectives
from scalelab.trace.collectives import (
    REQUESTS,
    Collective,
    CollectiveList,
    CollectiveRow,
    CollectiveRows,
    MessageSize,
    Texts,
    _count_elements,
    count_received_bytes,
    count_recorded_bytes,
    find_element_bytes,
    read_annotated_message,
    read_operator_message,
)
from scalelab.trace.files.events import Arguments


def record(num_in: int, num_out: int, dtype: str = "Float") -> Arguments:
    return Arguments(in_elements=num_in, out_elements=num_out, element_type=dtype)


def shapes(dims: Any, types: Any) -> Arguments:
    return Arguments(
        input_dims=msgspec.Raw(msgspec.json.encode(dims)), input_types=msgspec.Raw(msgspec.json.encode(types))
    )


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("Float", 4),
        ("float", 4),
        ("BFloat16", 2),
        ("c10::BFloat16", 2),
        ("c10::Half", 2),
        ("Float8_e4m3fn", 1),
        ("c10::Float8_e5m2", 1),
        ("long int", 8),
        ("Byte", 1),
        ("Double", 8),
        ("at::Half", 2),
        ("TensorList", None),
        ("", None),
    ],
)
def test_types_are_known_in_both_spellings(name: str, size: int | None) -> None:
    assert find_element_bytes(name) == size


TYPES = {
    torch.bool: ("bool",),
    torch.uint8: ("byte", "unsigned char"),
    torch.int8: ("char", "signed char"),
    torch.int16: ("short", "short int"),
    torch.uint16: ("UInt16",),
    torch.float16: ("Half", "c10::Half"),
    torch.bfloat16: ("BFloat16", "c10::BFloat16"),
    torch.int32: ("int",),
    torch.uint32: ("UInt32",),
    torch.float32: ("float",),
    torch.int64: ("long", "long int"),
    torch.uint64: ("UInt64",),
    torch.float64: ("double",),
    torch.complex32: ("ComplexHalf", "c10::complex<c10::Half>"),
    torch.complex64: ("ComplexFloat", "c10::complex<float>"),
    torch.complex128: ("ComplexDouble", "c10::complex<double>"),
    torch.float8_e4m3fn: ("Float8_e4m3fn", "c10::Float8_e4m3fn"),
}


@pytest.mark.parametrize("dtype", TYPES)
def test_elements_are_as_large_as_torch_has_them(dtype: torch.dtype) -> None:
    assert {find_element_bytes(name) for name in TYPES[dtype]} <= {dtype.itemsize}


def test_the_whole_message_is_what_a_gather_gives_and_what_a_scatter_takes() -> None:
    assert count_recorded_bytes("all_gather", record(100, 400)) == 1600
    assert count_recorded_bytes("reduce_scatter", record(400, 100)) == 1600
    assert count_recorded_bytes("all_reduce", record(100, 100, "Half")) == 200


def test_an_all_to_all_is_as_large_as_what_a_rank_sends() -> None:
    assert count_recorded_bytes("all_to_all", record(100, 300)) == 400


@pytest.mark.parametrize("args", [record(0, 0), record(-1, -1), record(9, 9, "a type"), record(2**61, 0), Arguments()])
def test_what_a_record_does_not_say_is_unknown(args: Arguments) -> None:
    assert count_recorded_bytes("all_reduce", args) is None


@pytest.mark.parametrize(
    ("operator", "dims", "types", "group_size", "expected"),
    [
        ("_allgather_base_", [[64], [32], [], []], ["float", "float", "", "Scalar"], None, 256),
        ("_reduce_scatter_base_", [[32], [64]], ["c10::BFloat16", "c10::BFloat16"], None, 128),
        ("alltoall_base_", [[8, 4], [8, 2]], ["float", "float"], None, 64),
        ("send", [[3, 5]], ["double"], None, 120),
        ("broadcast_", [[[7]]], ["float"], None, 28),
        ("allgather_", [[], [[32]]], ["", "float"], 4, 512),
        ("allgather_", [[], [[32]]], ["", "float"], None, None),
        ("allreduce_", [[[16], [2, 3]]], ["TensorList"], 2, None),
        ("barrier", [[]], ["float"], 2, None),
    ],
)
def test_operators_say_the_size_by_their_shapes(
    operator: str, dims: Any, types: Any, group_size: int | None, expected: int | None
) -> None:
    assert read_operator_message(REQUESTS[operator], shapes(dims, types)).count_bytes(group_size) == expected


WHOLE, PIECE, WHOLES, PIECES = [64], [16], [[16]] * 4, [[[16]] * 4]


@pytest.mark.parametrize(
    ("operator", "dims"),
    [
        ("allreduce_", [[WHOLE]]),
        ("allreduce_coalesced_", [[WHOLE]]),
        ("allgather_", [PIECES, [PIECE]]),
        ("allgather_coalesced_", [PIECES, [PIECE]]),
        ("_allgather_base_", [WHOLE, PIECE]),
        ("allgather_into_tensor_coalesced_", [[WHOLE], [PIECE]]),
        ("reduce_scatter_", [[PIECE], PIECES]),
        ("_reduce_scatter_base_", [PIECE, WHOLE]),
        ("reduce_scatter_tensor_coalesced_", [[PIECE], [WHOLE]]),
        ("broadcast_", [[WHOLE]]),
        ("reduce_", [[WHOLE]]),
        ("gather_", [PIECES, [PIECE]]),
        ("scatter_", [[PIECE], PIECES]),
        ("alltoall_", [[[7]] * 4, WHOLES]),
        ("alltoall_base_", [[28], WHOLE]),
        ("send", [[WHOLE]]),
        ("recv_", [[WHOLE]]),
        ("recv_any_source_", [[WHOLE]]),
    ],
)
def test_each_operator_of_torch_has_its_message_among_its_tensors(operator: str, dims: list[Any]) -> None:
    """As the schemas of `torch.ops.c10d` order them: outputs before inputs."""
    args = shapes(dims, ["float"] * len(dims))
    assert read_operator_message(REQUESTS[operator], args).count_bytes(4) == 256


def test_a_list_of_tensors_has_their_elements_together_and_no_type() -> None:
    found = read_operator_message(REQUESTS["allreduce_"], shapes([[[16], [2, 3], []]], ["TensorList"]))
    assert found == MessageSize(16 + 6 + 1, None, False)


def test_an_annotated_gather_names_one_piece() -> None:
    piece = read_annotated_message("all_gather", shapes([[32]], ["float"]))
    assert (piece.count_bytes(4), piece.count_bytes(None)) == (512, None)
    assert read_annotated_message("all_reduce", shapes([[]], ["float"])).count_bytes(None) == 4
    assert read_annotated_message("scatter", shapes([[32]], ["float"])) == MessageSize()


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=4) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=8,
)


@given(ANYTHING, ANYTHING, st.sampled_from(sorted(REQUESTS)))
def test_no_shape_whatever_raises(dims: Any, types: Any, operator: str) -> None:
    found = read_operator_message(REQUESTS[operator], shapes(dims, types)).count_bytes(2)
    assert found is None or found >= 0


@pytest.mark.parametrize("text", [b"nonsense", b'["flo\xe4t"]', b"[" * 5000])
def test_text_that_is_no_json_is_no_shape(text: bytes) -> None:
    broken = Arguments(input_dims=msgspec.Raw(b'[[1, "'), input_types=msgspec.Raw(text))
    assert read_annotated_message("all_reduce", broken) == MessageSize()


@pytest.mark.parametrize(
    ("shape", "count"),
    [([3, 4], 12), ([0, 4], 0), ([[2, 3], [0], [5]], 11), ([[2, 3], [-1]], None), ([True], None), ([], None)],
)
def test_an_empty_tensor_has_no_element_and_an_unknown_one_no_count(shape: Any, count: int | None) -> None:
    assert _count_elements(shape) == count


def test_a_message_of_which_anything_is_unknown_or_impossible_has_no_size() -> None:
    assert MessageSize(3, 4).count_bytes(None) == MessageSize(3, 4).count_bytes(5) == 12
    assert MessageSize(3, 4, True).count_bytes(5) == 60
    assert MessageSize(0, 4).count_bytes(None) == 0
    for size, group_size in ((MessageSize(3), 2), (MessageSize(None, 4), 2), (MessageSize(3, 4, True), 0)):
        assert size.count_bytes(group_size) is None
    assert MessageSize(2**60, 1).count_bytes(None) == 2**60
    assert MessageSize(2**60 + 1, 1).count_bytes(None) is None
    assert _count_elements([2**60, 1]) == 2**60
    assert _count_elements([2**60 + 1]) is None
    assert _count_elements([2**60, 2]) == 2**60 + 1, "too large, but not longer and longer"
    assert (_count_elements([[2, 3], [4]]), _count_elements([[2, -1], [4]]), _count_elements([True])) == (
        10,
        None,
        None,
    )


def test_what_an_all_to_all_gives_a_rank_is_known_if_it_is_recorded() -> None:
    assert count_received_bytes("all_to_all", record(100, 300)) == 1200
    assert count_received_bytes("all_to_all", record(100, 1)) == 4
    assert count_received_bytes("all_to_all", record(100, 0)) is None
    assert count_received_bytes("all_reduce", record(100, 300)) is None
    assert count_recorded_bytes("all_reduce", record(1, 0)) == 4


def test_an_annotation_has_the_first_tensor_that_it_names() -> None:
    assert read_annotated_message("all_reduce", shapes([[], [8], [9]], ["", "float", "float"])).count_bytes(None) == 32
    for kind, is_piece in {"gather": True, "broadcast": False, "reduce": False, "send": False, "recv": False}.items():
        assert read_annotated_message(kind, shapes([[8]], ["float"])) == MessageSize(8, 4, is_piece)
    for kind in ("all_to_all", "reduce_scatter"):
        assert read_annotated_message(kind, shapes([[8]], ["float"])) == MessageSize(8, 4, False)
    assert read_annotated_message("all_reduce", shapes([[8]], [])) == MessageSize(8, None, False)


def test_rows_become_collectives_in_which_what_is_negative_is_unknown() -> None:
    rows, texts = CollectiveRows(), Texts()
    known = [texts.number(text) for text in ("all_reduce", "kernel", "group", "all_gather", "kernel")]
    assert known == [1, 2, 3, 4, 2]
    row = CollectiveRow(
        start_ns=5, end_ns=7, thread=9, sequence=0, external_id=-1, correlation=-1, step=0, kind=1, ran_as=4, name=2,
        on_device=1, group=3, group_size=1, payload_bytes=0, peer=0, num_elements=0, element_bytes=0, is_piece=1,
        received_bytes=0, peer_rank=-1, is_record=0,
    )  # fmt: skip
    rows.append(row)
    negative = ("sequence", "step", "payload_bytes", "peer", "num_elements", "element_bytes", "received_bytes")
    unknown = row._replace(**dict.fromkeys(negative, -1), group_size=0, on_device=0, start_ns=6, is_piece=0)
    rows.append(unknown)
    found = CollectiveList(rows, texts.texts)
    first = Collective(
        kind="all_reduce", start_ns=5, end_ns=7, payload_bytes=0, group="group", group_size=1, sequence=0,
        name="kernel", on_device=True, ran_as="all_gather", step=0, peer=0, stream=9, received_bytes=0,
    )  # fmt: skip
    second = Collective(
        kind="all_reduce", start_ns=6, end_ns=7, group="group", name="kernel", ran_as="all_gather", stream=9
    )
    assert list(found) == found[:] == [found[0], found[-1]] == [first, second]
    assert (len(found), found.num_on_device, found[1:], found[-2]) == (2, 1, [second], first)
    assert (row.size, unknown.size) == (MessageSize(0, 0, True), MessageSize())
    assert (found.start_ns.tolist(), found.step_numbers.tolist()) == ([5, 6], [0, -1])
    assert first.seconds == 2e-9
    for index in (2, -3):
        with pytest.raises(IndexError):
            found[index]
    rows.set_column("step", np.array([3, 4]))
    assert [one.step for one in CollectiveList(rows.take(np.array([1, 0])), texts.texts)] == [4, 3]


def test_beyond_the_largest_number_of_texts_all_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "MOST_NAMES", 2)
    texts = Texts()
    assert [texts.number(text) for text in ("a", "b", "a")] == [1, 0, 1]

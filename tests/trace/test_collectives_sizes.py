"""The size of a message, from a record, an operator, an annotation."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelab.trace.collectives import (
    REQUESTS,
    MessageSize,
    _count_elements,
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
        ("TensorList", None),
        ("", None),
    ],
)
def test_types_are_known_in_both_spellings(name: str, size: int | None) -> None:
    assert find_element_bytes(name) == size


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

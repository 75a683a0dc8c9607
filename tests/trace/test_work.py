"""Operations and bytes of single calls, counted by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from scalelab.trace import work as module
from scalelab.trace.files.events import Arguments
from scalelab.trace.work import Work, Works, read_work

HEADS, OTHER = [2, 3, 8, 16], [2, 3, 5, 16]
"""Batch × heads × length × width."""
ATTENTION, CAUSAL = 4 * 2 * 3 * 8 * 8 * 16, 4 * 2 * 3 * 8 * 8 * 16 // 2
NO = ["", "", "", "", "False"]


def make(dims: Any, concrete: Any = (), types: Any = None) -> Arguments:
    raws = (msgspec.Raw(msgspec.json.encode(one)) for one in (dims, types or ["float"] * len(dims), concrete))
    return Arguments(**dict(zip(("input_dims", "input_types", "concrete_inputs"), raws, strict=True)))


@pytest.mark.parametrize(
    ("name", "dims", "concrete", "num_operations", "num_elements"),
    [
        ("aten::mm", [[2, 3], [3, 5]], [], 2 * 2 * 3 * 5, 6 + 15 + 10),
        ("aten::_scaled_mm", [[2, 3], [3, 5]], [], 60, 31),
        ("aten::bmm", [[7, 2, 3], [7, 3, 5]], [], 7 * 60, 7 * 31),
        ("aten::addmm", [[5], [2, 3], [3, 5]], [], 60, 31),
        ("aten::baddbmm", [[7, 2, 5], [7, 2, 3], [7, 3, 5]], [], 7 * 60, 7 * 31),
        ("aten::linear", [[4, 2, 3], [5, 3], [5]], [], 2 * 8 * 3 * 5, 8 * 3 + 3 * 5 + 8 * 5),
        # 10 × 9 becomes 4 × 9: (10 + 2 − 2·2 − 1) // 2 + 1 and (9 + 2·2 − 4 − 1) // 1 + 1.
        (
            "aten::convolution",
            [[2, 6, 10, 9], [8, 3, 3, 5], [8]],
            ["", "", "", "[2, 1]", "[1, 2]", "[2, 1]", "False", "[0, 0]", "2"],
            2 * (2 * 8 * 4 * 9) * 3 * 15,
            2 * 6 * 90 + 8 * 3 * 15 + 2 * 8 * 4 * 9,
        ),
        (
            "aten::convolution_backward",
            [[2, 8, 4, 9], [2, 6, 10, 9], [8, 3, 3, 5]],
            [],
            4 * (2 * 8 * 4 * 9) * 3 * 15,
            2 * (2 * 8 * 36 + 2 * 6 * 90 + 8 * 3 * 15),
        ),
        ("aten::_scaled_dot_product_flash_attention", [HEADS] * 3, NO, ATTENTION, 4 * 768),
        ("aten::_scaled_dot_product_flash_attention", [HEADS] * 3, [*NO[:4], "True"], CAUSAL, 4 * 768),
        ("aten::_scaled_dot_product_flash_attention", [HEADS] * 3, [*NO[:4], "1"], CAUSAL, 4 * 768),
        ("aten::_scaled_dot_product_flash_attention", [HEADS] * 3, [*NO[:3], "True"], ATTENTION, 4 * 768),
        (
            "aten::_scaled_dot_product_flash_attention",
            [HEADS, OTHER, OTHER],
            [*NO[:4], "True"],
            4 * 2 * 3 * 8 * 5 * 16,
            2 * 768 + 2 * 480,
        ),
        ("aten::_scaled_dot_product_efficient_attention", [HEADS] * 3, [""] * 6 + ["True"], CAUSAL, 4 * 768),
        ("aten::_scaled_dot_product_cudnn_attention", [HEADS] * 3, [""] * 6 + ["True"], CAUSAL, 4 * 768),
        ("aten::_scaled_dot_product_cudnn_attention", [HEADS] * 3, [""] * 5 + ["True", ""], ATTENTION, 4 * 768),
        (
            "aten::_scaled_dot_product_flash_attention_backward",
            [[1], HEADS, HEADS, HEADS],
            [""] * 11 + ["True"],
            2.5 * CAUSAL,
            8 * 768,
        ),
        (
            "aten::_scaled_dot_product_efficient_attention_backward",
            [[1], HEADS, HEADS, HEADS],
            [""] * 10 + ["True"],
            2.5 * ATTENTION,
            8 * 768,
        ),
        (
            "aten::_scaled_dot_product_efficient_attention_backward",
            [[1], HEADS, HEADS, HEADS],
            [""] * 11 + ["True"],
            2.5 * CAUSAL,
            8 * 768,
        ),
    ],
)
def test_operations_and_bytes_follow_from_shapes(
    name: str, dims: Any, concrete: Any, num_operations: float, num_elements: int
) -> None:
    found = read_work(name, make(dims, concrete))
    assert found is not None
    assert (found.num_operations, found.num_bytes, found.dtype) == (num_operations, 4 * num_elements, "float32")


@pytest.mark.parametrize(
    ("name", "dims", "concrete", "types"),
    [
        ("aten::relu", [[2, 3]], [], None),
        ("aten::mm", [[2, 3], [4, 5]], [], None),
        ("aten::mm", [[2, 3]], [], None),
        ("aten::mm", [[2, 0], [0, 5]], [], None),
        ("aten::mm", [[10**9, 10**9], [10**9, 1]], [], None),
        ("aten::mm", [[2, 3], [3, 5]], [], ["TensorList", ""]),
        ("aten::convolution", [[1, 1, 4], [1, 1, 3]], ["", "", "", "[1]", "[0]", "[1]", "True"], None),
        ("aten::convolution", [[1, 1, 4], [1, 1, 3]], ["", "", "", "1", "[0]", "[1]", "False"], None),
    ],
)
def test_what_cannot_be_read_is_no_work(name: str, dims: Any, concrete: Any, types: Any) -> None:
    assert read_work(name, make(dims, concrete, types)) is None


def test_the_largest_amount_is_still_work() -> None:
    found = read_work("aten::mm", make([[10**6, 10**6], [10**6, 1]]))
    assert found is not None
    assert read_work("aten::mm", make([[10**9, 5 * 10**8], [5 * 10**8, 1]])) is not None  # 10^18 operations
    assert read_work("aten::mm", make([[10**9, 5 * 10**8 + 1], [5 * 10**8 + 1, 1]])) is None


def test_the_type_is_that_of_the_first_factor_and_the_shape_is_shown() -> None:
    types = ["double", "c10::BFloat16", "c10::BFloat16"]
    found = read_work("aten::addmm", make([[5], [2, 3], [3, 5]], [], types))
    assert found == Work("aten::addmm", "5 2×3 3×5", "bfloat16", 60.0, 62.0)
    float8 = read_work("aten::_scaled_mm", make([[2, 3], [3, 5], [], [1], [9]], [], ["c10::Float8_e4m3fn"] * 5))
    assert float8 == Work("aten::_scaled_mm", "2×3 3×5 1", "float8", 60.0, 31.0)


def test_equal_calls_have_one_number_and_those_without_work_none(monkeypatch: pytest.MonkeyPatch) -> None:
    works = Works()
    calls = [make([[2, 3], [3, 5]]), make([[2, 3], [3, 7]]), make([[2, 3], [3, 5]]), make([[2, 3], [4, 5]])]
    assert [works.number("aten::mm", call) for call in calls] == [0, 1, 0, -1]
    assert [one.num_operations for one in works.found] == [60, 84]
    monkeypatch.setattr(module, "MOST_WORKS", 3)
    assert [works.number("aten::mm", make([[1, 1], [1, n]])) for n in (2, 3, 2)] == [2, -1, 2]

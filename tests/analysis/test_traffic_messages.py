"""What theory says a step sends: published sizes, and the costs of collectives."""

from __future__ import annotations

import pytest

from scalelab.analysis.traffic import (
    MessageComparison,
    add_known,
    compare_messages,
    count_members,
    count_messages,
    count_wire_bytes,
    expect_messages,
    is_exact,
    sum_payload,
    sum_wire,
)
from scalelab.records.observations import Message, MessageBasis
from scalelab.records.settings import Spreading

RESNET18 = MessageBasis(gradient_bytes=44_695_848, num_gradients=11_173_962, buffer_bytes=4 * 9_600 + 8 * 20)
"""ResNet-18 for CIFAR-10, as it is published: its gradients, and the statistics of its batch norms."""
SHARDED = MessageBasis(gradient_bytes=0, num_gradients=0, unit_bytes=(10, 100, 200))


def sum_by_kind(strategy: str, basis: MessageBasis, **spreading: object) -> dict[str, int]:
    found: dict[str, int] = {}
    for message in expect_messages(strategy, 2, basis, Spreading(**spreading)):  # type: ignore[arg-type]
        found[message.kind] = found.get(message.kind, 0) + (message.payload_bytes or 0)
    return found


def test_ddp_sends_four_bytes_a_parameter_and_the_buffers() -> None:
    assert sum_by_kind("ddp", RESNET18) == {"all_reduce": 44_695_848, "broadcast": 38_560}
    assert sum_by_kind("ddp", RESNET18, broadcast_buffers=False) == {"all_reduce": 44_695_848}


@pytest.mark.parametrize("hook", ["fp16", "bf16"])
def test_a_hook_of_16_bits_halves_the_gradients(hook: str) -> None:
    assert sum_by_kind("ddp", RESNET18, gradient_hook=hook)["all_reduce"] == 22_347_924


def test_what_powersgd_sends_is_not_foretold() -> None:
    assert "all_reduce" not in sum_by_kind("ddp", RESNET18, gradient_hook="powersgd")
    assert not is_exact("ddp", Spreading(gradient_hook="powersgd"), 1)


@pytest.mark.parametrize(
    ("strategy", "gathered", "scattered", "reduced"),
    [("fsdp-full", 310 + 300, 310, 0), ("fsdp-grad-op", 310, 310, 0), ("fsdp2", 610, 310, 0), ("fsdp-none", 0, 0, 310)],
)
def test_sharding_gathers_units_and_scatters_their_gradients(
    strategy: str, gathered: int, scattered: int, reduced: int
) -> None:
    found = sum_by_kind(strategy, SHARDED)
    assert found.get("all_gather", 0) == gathered
    assert found.get("reduce_scatter", 0) == scattered
    assert found.get("all_reduce", 0) == reduced


def test_units_that_stay_gathered_are_gathered_once() -> None:
    assert sum_by_kind("fsdp2", SHARDED, reshard_after_forward=False)["all_gather"] == 310


def test_a_root_without_parameters_sends_nothing() -> None:
    basis = MessageBasis(gradient_bytes=0, num_gradients=0, unit_bytes=(0, 50, 50))
    counts = {(m.kind, m.phase): m.count for m in expect_messages("fsdp-full", 2, basis, Spreading())}
    assert counts == {("all_gather", "forward"): 2, ("all_gather", "backward"): 2, ("reduce_scatter", "backward"): 2}


def test_synchronized_batch_norm_gathers_and_reduces_its_statistics() -> None:
    basis = MessageBasis(gradient_bytes=100, num_gradients=25, norm_channels=(64, 128))
    messages = {(m.kind, m.purpose): m for m in expect_messages("ddp", 4, basis, Spreading())}
    gathered, reduced = messages["all_gather", "batch norm"], messages["all_reduce", "batch norm"]
    assert (gathered.count, gathered.payload_bytes) == (2, 4 * 4 * (2 * 64 + 1 + 2 * 128 + 1))
    assert (reduced.count, reduced.payload_bytes) == (2, 4 * 2 * (64 + 128))


def test_when_fsdp_gathers_between_passes_is_not_foretold() -> None:
    assert expect_messages("fsdp-full", 2, SHARDED, Spreading(), accumulation=2) == []
    assert not is_exact("fsdp-full", Spreading(), 2)
    assert is_exact("ddp", Spreading(), 2)


@pytest.mark.parametrize(
    ("kind", "num_ranks", "wire"),
    [
        ("all_reduce", 2, 100),
        ("all_reduce", 4, 150),
        ("all_gather", 4, 75),
        ("reduce_scatter", 4, 75),
        ("broadcast", 2, 50),
    ],
)
def test_a_ring_sends_what_patarasu_and_yuan_say(kind: str, num_ranks: int, wire: float) -> None:
    assert count_wire_bytes(kind, 100, num_ranks) == pytest.approx(wire)


def test_one_rank_sends_nothing_and_an_unknown_collective_is_unknown() -> None:
    assert count_wire_bytes("all_reduce", 100, 1) == 0
    assert count_wire_bytes("gather", 100, 2) is None


def test_an_all_reduce_costs_as_much_as_scattering_and_gathering() -> None:
    parts = [count_wire_bytes(kind, 1000, 8) or 0 for kind in ("reduce_scatter", "all_gather")]
    assert sum(parts) == count_wire_bytes("all_reduce", 1000, 8)


EVERY = MessageBasis(
    gradient_bytes=1000, num_gradients=250, buffer_bytes=7, unit_bytes=(10, 20, 0), regathered_bytes=90,
    shard_bytes=(5, 1), reduced_bytes=(100, 300), gathered_bytes=(11, 12), scattered_bytes=(13, 14), norm_bytes=15,
    hop_bytes=16, tied_bytes=17, expert_bytes=18, exchanged_bytes=19, averaged_bytes=21, attended_bytes=(22, 23),
    clip_bytes=4,
)  # fmt: skip
"""A size of its own for everything that some strategy sends."""
CLIPPED = ("all_reduce", "gradient norm", "optimizer", "", 4, 1)
SHARDED_SENDS = [
    ("all_gather", "parameters", "forward", "fsdp", 30, 2),
    ("all_gather", "parameters", "backward", "fsdp", 20, 1),
    ("reduce_scatter", "gradients", "backward", "fsdp", 30, 2),
    ("all_reduce", "gradients", "backward", "dp", 6, 2),
]


@pytest.mark.parametrize(
    ("strategy", "options", "expected"),
    [
        ("hsdp", {}, SHARDED_SENDS),
        ("hsdp", {"reshard_after_forward": False}, [SHARDED_SENDS[0], *SHARDED_SENDS[2:]]),
        (
            "tp",
            {},
            [
                ("all_reduce", "activations", "forward", "tp", 100, 0),
                ("all_reduce", "activations", "backward", "tp", 300, 0),
                *SHARDED_SENDS,
            ],
        ),
        (
            "tp",
            {"sequence_parallel": True},
            [
                ("all_gather", "activations", "forward", "tp", 11, 0),
                ("reduce_scatter", "activations", "forward", "tp", 13, 0),
                ("all_gather", "activations", "backward", "tp", 12, 0),
                ("reduce_scatter", "activations", "backward", "tp", 14, 0),
                ("all_reduce", "norm gradients", "backward", "tp", 15, 0),
                ("all_reduce", "activations", "forward", "tp", 100, 0),
                ("all_reduce", "activations", "backward", "tp", 300, 0),
                *SHARDED_SENDS,
            ],
        ),
        (
            "pp",
            {},
            [
                ("send", "activations", "forward", "pp", 16, 0),
                ("all_reduce", "tied weights", "forward", "pp", 17, 0),
                ("all_reduce", "activations", "forward", "tp", 100 + 300, 0),
                ("all_gather", "parameters", "forward", "fsdp", 30 + 90, 2),
                ("reduce_scatter", "gradients", "forward", "fsdp", 30, 2),
                ("all_reduce", "gradients", "forward", "dp", 6, 2),
            ],
        ),
        (
            "ep",
            {},
            [
                ("all_to_all", "tokens", "forward", "ep", 19, 0),
                ("all_to_all", "tokens", "backward", "ep", 19, 0),
                ("all_reduce", "gradients", "backward", "", 1000, 0),
                ("all_reduce", "expert gradients", "backward", "dp", 18, 0),
            ],
        ),
        (
            "cp",
            {},
            [
                ("all_gather", "keys and values", "forward", "cp", 22, 0),
                ("all_gather", "keys and values", "backward", "cp", 22, 0),
                ("all_to_all", "their gradients", "backward", "cp", 23, 0),
                ("all_reduce", "gradients", "backward", "", 1000, 0),
            ],
        ),
        (
            "zero1",
            {},
            [
                ("all_reduce", "gradients", "backward", "", 1000, 0),
                ("broadcast", "buffers", "forward", "", 7, 0),
                ("broadcast", "parameters", "optimizer", "", 1000, 0),
            ],
        ),
        ("local-sgd", {}, [("all_reduce", "parameters", "optimizer", "", 21, 0)]),
        (
            "deepspeed-2",
            {},
            [
                ("all_reduce", "gradients", "backward", "", 1000, 0),
                ("all_gather", "parameters", "optimizer", "", 30, 2),
            ],
        ),
        (
            "deepspeed-3",
            {},
            [
                ("all_gather", "parameters", "forward", "", 20, 1),
                ("reduce_scatter", "gradients", "backward", "", 30, 2),
                ("all_gather", "parameters", "optimizer", "", 10, 0),
            ],
        ),
    ],
)
def test_every_strategy_sends_its_own_sizes(
    strategy: str, options: dict[str, bool], expected: list[tuple[object, ...]]
) -> None:
    found = expect_messages(strategy, 2, EVERY, Spreading(**options))  # type: ignore[arg-type]
    told = [(one.kind, one.purpose, one.phase, one.axis, one.payload_bytes, one.count) for one in found]
    assert {*told} == {*expected, CLIPPED}
    assert len(told) == len(expected) + 1


def test_norms_are_gathered_in_every_pass() -> None:
    basis = MessageBasis(gradient_bytes=0, num_gradients=0, norm_channels=(8, 16, 4))
    gathered, reduced = expect_messages("ddp", 2, basis, Spreading(), accumulation=3)
    assert (gathered.count, gathered.payload_bytes) == (9, 3 * 4 * 2 * (17 + 33 + 9))
    assert (reduced.count, reduced.payload_bytes) == (9, 3 * 4 * 2 * (8 + 16 + 4))


def test_what_was_sent_stands_beside_what_theory_has() -> None:
    def make(kind: str, payload: int | None, count: int, **fields: str) -> Message:
        names = {"purpose": "gradients", "phase": "backward"} | fields
        return Message(kind=kind, count=count, payload_bytes=payload, **names)

    sent = [make("all_reduce", 100, 3), make("all_gather", 80, 2, axis="tp"), make("broadcast", None, 1)]
    theory = [make("all_reduce", 90, 0), make("send", 50, 0, purpose="tied weights")]
    lines = compare_messages(sent, theory, 4, {"tp": 2})
    assert [(one.kind, one.count, one.payload_bytes, one.expected_bytes, one.wire_bytes) for one in lines] == [
        ("all_reduce", 3, 100, 90, 150),
        ("all_gather", 2, 80, None, 40),
        ("broadcast", 1, None, None, None),
        ("send", None, 0, 50, 0),
    ]
    assert [one.told_purpose for one in lines] == ["gradients", "gradients over tp", "gradients", "tied weights"]
    assert lines[1].name == "all-gather"
    assert (sum_payload(lines), sum_wire(lines), count_messages(lines)) == (None, None, 6)
    assert (sum_payload(lines[:2]), sum_wire(lines[:2])) == (180, 190)
    assert (add_known([]), add_known([1.4, 1.2]), count_messages([])) == (None, 3, None)
    unknown = MessageComparison(
        kind="send", purpose="", phase="", count=1, payload_bytes=1, expected_bytes=None, wire_bytes=1.0
    )
    assert unknown.told_purpose == "unknown"


def test_a_message_concerns_the_ranks_of_its_axis_and_tied_weights_two() -> None:
    assert count_members("gradients", "", 8, None) == 8
    assert count_members("gradients", "dp", 8, {"dp": 4}) == 4
    assert count_members("gradients", "tp", 8, {"dp": 4}) == 8
    assert count_members("tied weights", "pp", 8, {"pp": 4}) == 2
    assert count_wire_bytes("send", 100, 4) == 100
    assert count_wire_bytes("all_to_all", 100, 4) == 75

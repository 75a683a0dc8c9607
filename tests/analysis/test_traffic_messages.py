"""What theory says a step sends: published sizes, and the costs of collectives."""

from __future__ import annotations

import pytest

from scalelab.analysis.traffic import count_wire_bytes, expect_messages, is_exact
from scalelab.records.observations import MessageBasis
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

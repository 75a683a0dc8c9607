"""What a strategy does to the memory of a plain step, by rule: two units of 100 bytes, each with a gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scalelab.analysis.memory import MemoryAccount, MemoryEvent, PhaseMark, account_step
from scalelab.analysis.memory_sharding import (
    MemoryRecording,
    Sharding,
    UnitMark,
    _Replay,
    adapt_to_mesh,
    find_largest_share,
    find_row_share,
    shard_recording,
    shard_standing,
)
from scalelab.records.strategies import ALL_PARTS, STRATEGIES
from scalelab.records.strategy import MemoryRules, Mesh, StatePart

UNIT = 100
STANDING = {"parameters": 2 * UNIT, "optimizer": 4 * UNIT}


def record_step() -> MemoryRecording:
    """A root without parameters around two units; every unit keeps 10 bytes and makes a gradient of 100."""
    events: list[MemoryEvent] = []
    marks: list[PhaseMark | UnitMark] = []

    def add(num_bytes: int, address: int) -> None:
        events.append(MemoryEvent(float(len(events)), num_bytes, address))

    def unit(number: int, moment: str, *gradients: int) -> None:
        marks.append(UnitMark(position=len(events), unit=number, moment=moment, gradients=gradients))

    def phase(name: str, named: dict[int, str] | None = None) -> None:
        marks.append(PhaseMark(phase=name, position=len(events), named=named or {}))

    phase("begin")
    phase("input")
    unit(0, "forward")
    for number in (1, 2):
        unit(number, "forward")
        add(10, number)
        unit(number, "forward_end")
    unit(0, "forward_end")
    phase("model")
    phase("forward")
    unit(0, "backward")
    for number in (2, 1):
        unit(number, "backward")
        add(UNIT, 10 + number)
        add(-10, number)
        unit(number, "gradients", 10 + number)
    phase("backward", {11: "gradients", 12: "gradients"})
    add(40, 30)
    add(-40, 30)
    add(-UNIT, 11)
    add(-UNIT, 12)
    phase("optimizer")
    return MemoryRecording(events, marks)


def account(strategy: str, num_ranks: int = 2, **fields: bool) -> MemoryAccount:
    sharding = Sharding(
        strategy=STRATEGIES[strategy],
        num_ranks=num_ranks,
        unit_bytes=(0, UNIT, UNIT),
        gradient_bytes=2 * UNIT,
        **fields,
    )
    events, marks = shard_recording(record_step(), sharding)
    return account_step(events, marks, shard_standing(STANDING, sharding))


def test_rows_that_do_not_divide_make_the_first_rank_the_fullest() -> None:
    assert find_row_share([(8, 800)], 4) == 0.25
    assert find_row_share([(4, 400)], 8) == 0.25, "four experts on eight ranks: one on each of the first four"
    assert find_row_share([(8, 800), (1, 200)], 4) == pytest.approx(0.4)


def test_a_plain_step_stays_as_it_is() -> None:
    plain = account("single", 1)
    assert plain.peak_bytes == 600 + 200 + 40
    assert plain.by_category == STANDING | {"gradients": 200, "temporary": 40}


def test_ddp_holds_every_gradient_once_more_in_its_buckets() -> None:
    assert account("ddp").peak_bytes == account("single", 1).peak_bytes + 200
    assert account("ddp").by_category["buckets"] == 200


def test_gradients_that_lie_in_the_buckets_are_not_held_twice() -> None:
    viewed = account("ddp", gradients_in_buckets=True)
    assert "gradients" not in viewed.by_category
    assert viewed.peak_bytes < account("ddp").peak_bytes


def test_full_sharding_leaves_an_nth_of_parameters_gradients_and_optimizer() -> None:
    four = account("fsdp-full", 4)
    assert four.by_category["parameters"] == 50
    assert four.by_category["optimizer"] == 100
    assert four.current_bytes == 150 + 2 * 25  # the pieces of gradients stay until the next forward


def test_the_pieces_of_gradients_are_gradients_at_the_peak() -> None:
    assert account("fsdp-none", 4).by_category["gradients"] == 200
    assert [point.category for point in account("fsdp-full", 4).timeline if point.num_bytes == 25] == ["gradients"] * 2


def test_full_sharding_gathers_the_unit_at_hand_and_the_next_in_backward() -> None:
    full = account("fsdp-full")
    # Gathered: both units; unit 2's gradient is there and is being joined.
    assert full.peak_bytes == 300 + 2 * UNIT + UNIT + UNIT + 10
    assert full.by_category["buckets"] == 2 * UNIT


def test_forward_of_full_sharding_has_one_unit_and_of_gradient_sharding_all() -> None:
    assert account("fsdp-full").phase_peaks["forward"] == 300 + UNIT + 2 * 10
    assert account("fsdp-grad-op").phase_peaks["forward"] == 300 + 2 * UNIT + 2 * 10


def test_no_sharding_costs_a_joined_gradient_at_a_time() -> None:
    assert account("fsdp-none").by_category["parameters"] == 200
    assert account("fsdp-none").current_bytes == 600 + 200


def test_fsdp2_releases_its_gradients_with_the_step() -> None:
    assert account("fsdp2").current_bytes == 300


def test_fsdp2_holds_what_it_sent_while_the_next_unit_computes_its_gradients() -> None:
    timeline = account("fsdp2").timeline
    gradients = [
        change.alive_bytes for change in timeline if (change.num_bytes, change.category) == (UNIT, "temporary")
    ]
    # Unit 2: its parameters, unit 1's arrived. Unit 1: its parameters, what unit 2 sent and its piece.
    assert gradients == [300 + 3 * UNIT + 2 * 10, 300 + 3 * UNIT + UNIT // 2 + 10]


def test_fsdp2_holds_what_arrived_until_it_is_copied_and_one_unit_ahead_in_backward() -> None:
    alive = [change.alive_bytes for change in account("fsdp2").timeline]
    forward = [400, 500, 510, 410, 510, 610, 510, 520, 420, 320]  # arrived, whole, kept, reshared; then unit 2
    second = [420, 520, 420, 520, 620, 610, 510, 610, 510, 560]  # arrived, whole, copied; unit 1 arrives; sent
    first = [660, 560, 660, 650, 550, 450, 550, 450, 500]
    assert alive == [*forward, *second, *first, 400, 420, 400, 350, 300]


def test_collectives_of_gloo_take_a_unit_more_while_they_run() -> None:
    assert account("fsdp-full", has_scratch=True).phase_peaks["forward"] == 300 + 2 * UNIT + 10


def test_what_the_optimizer_takes_goes_with_the_parameters() -> None:
    assert account("single", 1).phase_peaks["optimizer"] == 600 + 200 + 40
    assert account("fsdp-full", 2).phase_peaks["optimizer"] == 300 + 100 + 20


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp-full", "fsdp-grad-op", "fsdp-none", "fsdp2"])
def test_categories_add_up_under_every_strategy(strategy: str) -> None:
    found = account(strategy, has_scratch=True)
    assert sum(found.by_category.values()) == found.peak_bytes


def test_accumulated_passes_reduce_once() -> None:
    recording = record_step()
    early = [
        UnitMark(position=mark.position, unit=mark.unit, moment="gradients", gradients=())
        for mark in recording.marks
        if isinstance(mark, UnitMark) and mark.moment == "forward_end" and mark.unit
    ]
    at = next(n for n, mark in enumerate(recording.marks) if isinstance(mark, PhaseMark) and mark.phase == "model")
    marks = [*recording.marks[:at], *early, *recording.marks[at:]]
    sharding = Sharding(
        strategy=STRATEGIES["fsdp-full"], num_ranks=2, unit_bytes=(0, UNIT, UNIT), gradient_bytes=2 * UNIT
    )
    events, _ = shard_recording(MemoryRecording(recording.events, marks), sharding)
    assert events == shard_recording(recording, sharding)[0]


def test_a_strategy_of_axes_keeps_only_the_rules_of_those_that_its_mesh_has() -> None:
    ddp, tp = STRATEGIES["ddp"], STRATEGIES["tp"]
    assert tp.memory is not None
    assert adapt_to_mesh(ddp, Mesh(dp=2)) is ddp
    alone = adapt_to_mesh(tp, Mesh(tp=2))
    assert (alone.memory, alone.shards) == (MemoryRules(), ())
    sharded, added = adapt_to_mesh(tp, Mesh(fsdp=2, tp=2)), adapt_to_mesh(tp, Mesh(dp=2, tp=2))
    assert (sharded.memory, sharded.shards) == (tp.memory, ALL_PARTS)
    assert added.memory == replace(tp.memory, forward="", forward_end="", backward="")
    assert added.shards == ALL_PARTS


@pytest.mark.parametrize(
    ("sizes", "share"), [((5, 4, 3), 7 / 12), ((3, 4, 5), 7 / 12), ((9, 1, 1), 9 / 11), ((), 1.0), ((0, 0), 1.0)]
)
def test_whole_parameters_go_to_the_rank_with_the_least_so_far(sizes: tuple[int, ...], share: float) -> None:
    assert find_largest_share(sizes, 2) == pytest.approx(share)


def test_without_parameters_the_first_rank_has_all_of_nothing() -> None:
    assert find_row_share([], 4) == 1.0
    assert find_row_share([(0, 0), (4, 400)], 4) == 0.25


def cut(strategy: str, num_ranks: int, part: StatePart, share: float | None = None) -> int:
    sharding = Sharding(
        strategy=STRATEGIES[strategy], num_ranks=num_ranks, unit_bytes=(), gradient_bytes=0, largest_share=share
    )
    return sharding.cut(part, 101)


def test_a_share_is_rounded_up_and_that_of_the_fullest_rank_where_parts_are_uneven() -> None:
    assert [cut("fsdp-full", num_ranks, "parameters") for num_ranks in (1, 2, 4)] == [101, 51, 26]
    assert cut("fsdp-full", 2, "parameters", 0.6) == 51, "it cuts a flat list of numbers"
    assert cut("fsdp2", 2, "parameters", 0.6) == cut("zero1", 2, "optimizer", 0.6) == 61
    assert cut("fsdp2", 1, "parameters", 0.6) == cut("zero1", 2, "parameters", 0.6) == 101
    assert cut("zero1", 2, "optimizer") == 51


def test_the_unit_before_this_one_in_forward_is_the_next_in_backward() -> None:
    sharding = Sharding(strategy=STRATEGIES["fsdp-full"], num_ranks=2, unit_bytes=(), gradient_bytes=0)
    replay = _Replay(MemoryRecording([], []), sharding, order=[3, 1, 2])
    assert [replay._find_next(unit) for unit in (2, 1, 3, 9)] == [1, 3, None, None]

"""A mesh: its ranks, their coordinates, and what is refused before anything is launched."""

from __future__ import annotations

from typing import Any

import pytest

from scalelab.errors import UsageError
from scalelab.records.refusals import check_strategy
from scalelab.records.settings import Spreading, StepShape
from scalelab.records.strategies import arrange_ranks, choose_of_mesh, choose_strategy, find_strategy
from scalelab.records.strategy import Mesh, PipelineTimes, list_meshes, list_stages, parse_mesh
from tests.worker.trials import make_trial


def test_every_rank_has_its_own_coordinates_and_data_ranks_have_their_own_samples() -> None:
    mesh = parse_mesh("tp=2, dp=2,pp=2")
    assert (mesh.num_ranks, mesh.num_data_ranks, mesh.axes) == (8, 2, ("pp", "dp", "tp"))
    assert len({tuple(mesh.locate(rank).values()) for rank in range(8)}) == 8
    assert mesh.locate(1) == {"pp": 0, "dp": 0, "fsdp": 0, "ep": 0, "cp": 0, "tp": 1}, "tp is innermost"
    assert [mesh.find_data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [parse_mesh("dp=2,ep=2").find_data_rank(rank) for rank in range(4)] == [0, 1, 2, 3]
    assert parse_mesh(mesh.text) == mesh


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=2,xp=2", "unknown axis 'xp'; the axes are pp, dp, fsdp, ep, cp, tp"),
        ("dp=2,dp=2", "names dp twice"),
        ("tp=0", "the size of tp must be a whole number ≥ 1, got '0'"),
        ("tp=two", "got 'two'"),
        ("tp", "got ''"),
    ],
)
def test_a_mesh_that_cannot_be_read_is_refused_by_its_value(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Spreading(mesh=text)


def test_all_meshes_of_four_ranks_are_listed_once() -> None:
    found = list(list_meshes(4))
    assert len(set(found)) == len(found) == 21
    assert {mesh.num_ranks for mesh in found} == {4}


def test_a_strategy_without_a_mesh_puts_all_ranks_on_its_own_axis() -> None:
    plain = Spreading()
    assert arrange_ranks("tp", 4, plain) == Mesh(tp=4)
    assert arrange_ranks("hsdp", 4, plain) == Mesh(dp=2, fsdp=2)
    assert arrange_ranks("ep", 4, plain) == Mesh(ep=4)
    assert arrange_ranks("ddp", 4, plain) == Mesh(dp=4)


@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        (Mesh(dp=4), "ddp"),
        (Mesh(fsdp=4), "fsdp2"),
        (Mesh(dp=2, fsdp=2), "hsdp"),
        (Mesh(tp=2), "tp"),
        (Mesh(pp=2), "pp"),
        (Mesh(dp=2, ep=2), "ep"),
    ],
)
def test_the_plainest_strategy_runs_a_mesh(mesh: Mesh, strategy: str) -> None:
    assert choose_of_mesh(mesh) == strategy


def test_what_a_mesh_cannot_do_is_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match="--mesh dp=2,tp=2 is for 4 ranks, got 2"):
        make_trial(strategy="tp", spreading=Spreading(mesh="dp=2,tp=2"))
    with pytest.raises(UsageError, match="--strategy hsdp has no axis tp: use --strategy tp or pp"):
        make_trial(strategy="hsdp", spreading=Spreading(mesh="tp=2"))
    refused: list[tuple[str, dict[str, Any]]] = [
        ("2 stages, and 8 samples make 1 micro-batches: use at least 2", {"shape": StepShape(micro_batch=8)}),
        (
            "--pipeline-schedule zbv does not work with --mesh pp=2,dp=2: it computes gradients of weights later",
            {"num_ranks": 4, "spreading": Spreading(mesh="pp=2,dp=2", pipeline_schedule="zbv")},
        ),
        ("--compile True does not work with --strategy pp", {"shape": StepShape(compile=True)}),
        ("--static-graph does not apply to --strategy pp", {"spreading": Spreading(static_graph=True)}),
    ]
    for message, fields in refused:
        with pytest.raises(UsageError, match=message):
            check_strategy(make_trial(strategy="pp", **fields))
    with pytest.raises(UsageError, match="--mesh does not apply to --strategy ddp: use it with hsdp or tp or pp"):
        check_strategy(make_trial(strategy="ddp", spreading=Spreading(mesh="dp=2")))


def test_samples_are_shared_by_data_ranks_alone() -> None:
    trial = make_trial(strategy="tp", num_ranks=4, spreading=Spreading(mesh="dp=2,tp=2"))
    assert (trial.batch_per_rank, trial.num_data_ranks) == (4, 2)
    pipeline = make_trial(strategy="pp", shape=StepShape(micro_batch=2))
    assert (pipeline.batch_per_rank, pipeline.accumulation, pipeline.num_micro_batches) == (8, 1, 4)
    assert make_trial(strategy="pp").num_micro_batches == 4, "two per stage"


def test_the_bubble_of_theory_shrinks_with_micro_batches_and_stages_per_rank() -> None:
    def watch(num_micro_batches: int, stages_per_rank: int = 1) -> PipelineTimes:
        return PipelineTimes(
            schedule_seconds=(4.0, 2.0),
            busy_seconds=(3.0, 1.0),
            num_ranks=2,
            num_micro_batches=num_micro_batches,
            stages_per_rank=stages_per_rank,
        )

    assert (watch(1).bubble, watch(3).bubble) == (0.5, 0.25)
    assert watch(3, 2).bubble == pytest.approx(1 / 7)
    assert watch(1).idle_shares == (0.25, 0.5)
    assert watch(1, 2).bubble == pytest.approx(1 / 3)
    empty = PipelineTimes(schedule_seconds=(0.0, 1.0), busy_seconds=(0.0, 2.0), num_ranks=2, num_micro_batches=1)
    assert empty.idle_shares == (0.0,), "a schedule that took no time has no share, one shorter than its work idles not"


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        ("gpipe", [[0], [1], [2]]),
        ("1f1b", [[0], [1], [2]]),
        ("interleaved", [[0, 3], [1, 4], [2, 5]]),
        ("zero-bubble", [[0, 3], [1, 4], [2, 5]]),
        ("zbv", [[0, 5], [1, 4], [2, 3]]),
    ],
)
def test_the_stages_of_a_rank_are_every_so_many_or_a_v(schedule: str, stages: list[list[int]]) -> None:
    assert [list_stages(schedule, place, 3) for place in range(3)] == stages


def test_a_strategy_that_is_not_named_is_the_plain_loop_on_one_rank_and_ddp_on_more() -> None:
    assert [choose_strategy(None, num_ranks) for num_ranks in (1, 2)] == ["single", "ddp"]
    assert [choose_strategy("zero1", num_ranks) for num_ranks in (1, 2)] == ["zero1", "zero1"]
    assert [find_strategy("fsdp-full", num_ranks).name for num_ranks in (1, 2)] == ["fsdp-none", "fsdp-full"]


def test_only_what_a_strategy_shards_is_cut_into_as_many_pieces_as_ranks() -> None:
    zero1, plain = find_strategy("zero1"), find_strategy("single")
    assert [zero1.count_shards(part, 4) for part in ("parameters", "gradients", "optimizer")] == [1, 1, 4]
    assert (plain.count_ranks(4), zero1.count_ranks(4)) == (1, 4)
    assert (plain.name_on(4), zero1.name_on(4)) == ("single", "zero1 × 4")
    assert zero1.does_send("parameters", "optimizer")
    assert not zero1.does_send("parameters", "backward")

"""G6 from traces whose answer is known."""

from __future__ import annotations

import pytest

from scalelab.recipes.gpt2.rows import STRATEGIES, answer_g6, make_g6
from scalelab.recipes.recipe import Outcome
from scalelab.records.observations import Message, RankReport, TracedOperator, TracedStep
from scalelab.records.trial import TrialResult
from tests.records import make_record, make_result
from tests.studies.answers import find_row

MATMUL = TracedOperator(name="aten::mm", count=20, self_ns=8_000_000)
ALONE = TracedOperator(name="aten::only_alone", count=2, self_ns=1000)
EXCHANGE = TracedOperator(name="c10d::allreduce_", count=4, self_ns=2_000_000)


def make_traced(strategy: str, *operators: TracedOperator, overlapped_ns: int = 0, exposed_ns: int = 0) -> TrialResult:
    num_ranks = 1 if strategy == "single" else 2
    messages = (Message(kind="all_reduce", count=3, payload_bytes=600),) if num_ranks > 1 else ()
    step = TracedStep(
        span_ns=10_000_000,
        compute_ns=6_000_000,
        overlapped_ns=overlapped_ns,
        exposed_ns=exposed_ns,
        copy_ns=0,
        idle_ns=4_000_000 - exposed_ns,
        messages=messages,
    )
    reports = tuple(
        RankReport(rank=rank, traced_steps=(step, step), traced_operators=operators if rank == 0 else ())
        for rank in range(num_ranks)
    )
    trial = make_record(configuration=f"{strategy}-{num_ranks}", strategy=strategy, num_ranks=num_ranks)
    return make_result(trial, ranks=reports)


def make_outcome(*results: TrialResult) -> Outcome:
    return Outcome(study=make_g6("small").parts["traces"], results=results, document=None)


def test_parts_kinds_and_operators_are_read_off_the_traces() -> None:
    alone = make_traced("single", MATMUL, ALONE)
    ddp = make_traced("ddp", MATMUL, EXCHANGE, overlapped_ns=3_000_000, exposed_ns=1_000_000)
    finding = answer_g6({"traces": make_outcome(alone, ddp)})
    parts, kinds, operators = finding.tables
    assert find_row(parts, "single")["overlap_share"].value is None
    assert find_row(parts, "ddp")["overlap_share"].value == pytest.approx(0.75)
    assert find_row(parts, "ddp")["traced_exposed_seconds"].value == pytest.approx(0.001)
    assert [[cell.value for cell in row] for row in kinds.rows] == [["ddp", "all-reduce", 3, 600]]
    assert [[cell.value for cell in row[:4]] for row in operators.rows] == [
        ["ddp", "added", "c10d::allreduce_", 2],
        ["ddp", "removed", "aten::only_alone", 1],
    ]
    assert finding.sentences[0].endswith("ddp 1.00 ms (10 %), 75 % of its communication overlapped.")
    assert finding.sentences[1].endswith("ddp adds 1 and removes 1.")
    assert finding.sentences[2] == "The traces of single, ddp are in the directory of this run, a file per rank."


@pytest.mark.parametrize("results", [(), (make_traced("ddp", MATMUL),), (make_result(make_record()),)])
def test_what_is_missing_is_left_out(results: tuple[TrialResult, ...]) -> None:
    finding = answer_g6({"traces": make_outcome(*results)})
    assert not any(table.title.startswith("Operators") for table in finding.tables)
    assert answer_g6({}).tables == ()


def test_the_row_profiles_every_strategy_of_g5() -> None:
    trials = make_g6("small").parts["traces"].plan()
    assert {trial.strategy for trial in trials} == set(STRATEGIES)
    assert {trial.step_plan and trial.step_plan.profiled_steps for trial in trials} == {3}

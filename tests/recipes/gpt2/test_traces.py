"""G6 from traces whose answer is known."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from scalelab.recipes.gpt2.one_device import STRATEGIES
from scalelab.recipes.gpt2.traces import answer_g6, make_g6
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


def spread(strategy: str, *exposed_ns: int) -> list[TrialResult]:
    """A launch for each time of exposed communication, in a step of 10 ms."""
    made = [make_traced(strategy, MATMUL, exposed_ns=one) for one in exposed_ns]
    return [replace(one, trial=replace(one.trial, round=number)) for number, one in enumerate(made, 1)]


@pytest.mark.parametrize(
    ("exposed", "words"),
    [
        ((1_000_000, 1_000_000, 1_000_000), "ddp 1.00 ± 0.00 ms (10 %)"),
        ((100_000, 200_000, 4_000_000), "(at most "),
    ],
)
def test_a_time_and_its_share_are_of_the_same_number(exposed: tuple[int, ...], words: str) -> None:
    sentence = answer_g6({"traces": make_outcome(*spread("ddp", *exposed))}).sentences[0]
    milliseconds, share = re.findall(r"([\d.]+)(?: ± [\d.]+)? (?:ms|%)", sentence)[:2]
    assert float(share) == pytest.approx(10 * float(milliseconds), rel=0.05), sentence
    assert ("at most" in sentence) is ("at most" in words)


def make_unsharded(idle_ns: int) -> TrialResult:
    made = make_traced("fsdp-none", MATMUL)
    step = replace(made.ranks[0].traced_steps[0], span_ns=6_000_000 + idle_ns, idle_ns=idle_ns)
    return replace(made, ranks=tuple(replace(rank, traced_steps=(step, step)) for rank in made.ranks))


@pytest.mark.parametrize(
    ("idle_ns", "words"),
    [
        (9_000_000, "is 5.00 ms longer than one of ddp, by medians; the largest part of that is idle time and copies"),
        (1_000_000, "A profiled step of fsdp-none, which shards nothing, is not longer than one of ddp."),
    ],
)
def test_what_fsdp_costs_without_sharding_is_named_by_its_largest_part(idle_ns: int, words: str) -> None:
    results = (make_traced("ddp", MATMUL), make_unsharded(idle_ns))
    assert words in answer_g6({"traces": make_outcome(*results)}).sentences[1]


@pytest.mark.parametrize(("kind", "is_said"), [("reduce_scatter", True), ("all_reduce", False)])
def test_an_all_reduce_in_place_of_a_reduce_scatter_is_explained(kind: str, is_said: bool) -> None:
    made = make_traced("fsdp-full", MATMUL, TracedOperator(name="gloo:all_reduce", count=4, self_ns=1000))
    step = replace(made.ranks[0].traced_steps[0], messages=(Message(kind=kind, count=2, payload_bytes=600),))
    result = replace(made, ranks=tuple(replace(rank, traced_steps=(step,)) for rank in made.ranks))
    sentences = answer_g6({"traces": make_outcome(result)}).sentences
    assert any(sentence.startswith("gloo carries out a reduce-scatter") for sentence in sentences) is is_said


@pytest.mark.parametrize("results", [(), (make_traced("ddp", MATMUL),), (make_result(make_record()),)])
def test_what_is_missing_is_left_out(results: tuple[TrialResult, ...]) -> None:
    finding = answer_g6({"traces": make_outcome(*results)})
    assert not any(table.title.startswith("Operators") for table in finding.tables)
    assert answer_g6({}).tables == ()


def test_the_row_profiles_every_strategy_of_g5() -> None:
    trials = make_g6("small").parts["traces"].plan()
    assert {trial.strategy for trial in trials} == set(STRATEGIES)
    assert {trial.step_plan and trial.step_plan.profiled_steps for trial in trials} == {3}

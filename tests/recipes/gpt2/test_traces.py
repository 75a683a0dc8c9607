"""G6 from traces whose answer is known."""

from __future__ import annotations

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
    assert finding.sentences[0].endswith("ddp 1.00 ms or 10 % of it, with 75 % of its communication overlapped.")
    assert finding.sentences[1].endswith("ddp adds 1 and removes 1.")
    assert finding.sentences[2] == "The traces of single, ddp are in the directory of this run, a file per rank."


def spread(strategy: str, *exposed_ns: int) -> list[TrialResult]:
    """A launch for each time of exposed communication, in a step of 10 ms."""
    made = [make_traced(strategy, MATMUL, exposed_ns=one) for one in exposed_ns]
    return [replace(one, trial=replace(one.trial, round=number)) for number, one in enumerate(made, 1)]


@pytest.mark.parametrize(
    ("exposed", "words"),
    [
        ((1_000_000, 1_000_000, 1_000_000), "ddp 1.00 ± 0.00 ms or 10 ± 0 %"),
        ((100_000, 200_000, 4_000_000), "ddp 200 (0 to 5723) µs or 2 % (0 % to 57 %)"),
    ],
)
def test_a_time_and_its_share_are_of_the_same_number(exposed: tuple[int, ...], words: str) -> None:
    sentence = answer_g6({"traces": make_outcome(*spread("ddp", *exposed))}).sentences[0]
    assert words in sentence


def make_unsharded(*idle_and_compute: tuple[int, int]) -> list[TrialResult]:
    """A launch of fsdp-none for each pair; one of ddp has 4 ms of idle time and 6 ms of compute."""
    made = spread("fsdp-none", *(0 for _ in idle_and_compute))
    steps = [
        replace(one.ranks[0].traced_steps[0], span_ns=idle + compute, idle_ns=idle, compute_ns=compute)
        for one, (idle, compute) in zip(made, idle_and_compute, strict=True)
    ]
    return [
        replace(one, ranks=tuple(replace(rank, traced_steps=(step, step)) for rank in one.ranks))
        for one, step in zip(made, steps, strict=True)
    ]


MS = 1_000_000


@pytest.mark.parametrize(
    ("launches", "words"),
    [
        (((9 * MS, 6 * MS),) * 3, "is 5.00 ± 0.00 ms longer than one of ddp; the largest part of that is idle time"),
        (
            ((9 * MS, 6 * MS), (4 * MS, 11 * MS), (7 * MS, 8 * MS)),
            "longer than one of ddp; which part of it grows most",
        ),
        (((2 * MS, 6 * MS), (9 * MS, 6 * MS), (4 * MS, 6 * MS)), "is unresolved: it is by 750 ±"),
        (((1 * MS, 6 * MS),) * 3, "FSDP that shards nothing, is not longer than one of ddp."),
    ],
)
def test_a_largest_part_of_what_fsdp_costs_is_named_only_where_intervals_resolve_it(
    launches: tuple[tuple[int, int], ...], words: str
) -> None:
    results = (*spread("ddp", 0, 0, 0), *make_unsharded(*launches))
    sentences = answer_g6({"traces": make_outcome(*results)}).sentences
    assert [sentence for sentence in sentences if words in sentence], sentences


def test_operators_are_medians_over_launches() -> None:
    times = (90 * MS, 10 * MS, 12 * MS)
    ran = [make_traced("ddp", MATMUL, replace(EXCHANGE, self_ns=one), exposed_ns=MS) for one in times]
    ddp = [replace(one, trial=replace(one.trial, round=number)) for number, one in enumerate(ran, 1)]
    operators = answer_g6({"traces": make_outcome(make_traced("single", MATMUL), *ddp)}).tables[-1]
    assert find_row(operators, "ddp")["seconds"].value == pytest.approx(0.006)  # of two steps


def test_the_reason_why_fsdp_does_not_overlap_on_a_cpu_is_given() -> None:
    results = (*spread("ddp", MS), *spread("fsdp-full", MS))
    sentences = answer_g6({"traces": make_outcome(*results)}).sentences
    assert any("on a CPU each of its collectives blocks the rank" in sentence for sentence in sentences)


@pytest.mark.parametrize(("kind", "is_said"), [("reduce_scatter", True), ("all_reduce", False)])
def test_an_all_reduce_in_place_of_a_reduce_scatter_is_explained(kind: str, is_said: bool) -> None:
    made = make_traced("fsdp-full", MATMUL, TracedOperator(name="gloo:all_reduce", count=4, self_ns=1000))
    step = replace(made.ranks[0].traced_steps[0], messages=(Message(kind=kind, count=2, payload_bytes=600),))
    result = replace(made, ranks=tuple(replace(rank, traced_steps=(step,)) for rank in made.ranks))
    sentences = answer_g6({"traces": make_outcome(result)}).sentences
    assert any(sentence.startswith("gloo carries out a reduce-scatter") for sentence in sentences) is is_said


def count_messages(strategy: str, gathers: int, scatters: int) -> TrialResult:
    """A step of two passes on each of two ranks."""
    made = make_traced(strategy, MATMUL)
    kinds = {"all_gather": gathers, "reduce_scatter": scatters}
    messages = tuple(Message(kind=kind, count=count, payload_bytes=600) for kind, count in kinds.items())
    step = replace(made.ranks[0].traced_steps[0], messages=messages)
    reports = tuple(replace(rank, traced_steps=(step,), num_passes=2) for rank in made.ranks)
    return replace(made, ranks=reports)


@pytest.mark.parametrize(
    ("strategy", "gathers", "words"),
    [
        (
            "fsdp-full",
            18,
            "before each of 2 forwards and all but the root again before each backward, 2 × (5 + 4) = 18",
        ),
        ("fsdp-grad-op", 5, "fsdp-grad-op gathers each of 5 units once"),
        ("fsdp-full", 7, ""),
    ],
)
def test_all_gathers_are_explained_where_units_and_passes_give_their_number(
    strategy: str, gathers: int, words: str
) -> None:
    sentences = answer_g6({"traces": make_outcome(count_messages(strategy, gathers, 5))}).sentences
    found = [sentence for sentence in sentences if sentence.startswith("Counted per step: ")]
    assert (words in found[0]) if words else not found


@pytest.mark.parametrize("results", [(), (make_traced("ddp", MATMUL),), (make_result(make_record()),)])
def test_what_is_missing_is_left_out(results: tuple[TrialResult, ...]) -> None:
    finding = answer_g6({"traces": make_outcome(*results)})
    assert not any(table.title.startswith("Operators") for table in finding.tables)
    assert answer_g6({}).tables == ()


def test_the_row_profiles_every_strategy_of_g5() -> None:
    trials = make_g6("small").parts["traces"].plan()
    assert {trial.strategy for trial in trials} == set(STRATEGIES)
    assert {trial.step_plan and trial.step_plan.profiled_steps for trial in trials} == {3}

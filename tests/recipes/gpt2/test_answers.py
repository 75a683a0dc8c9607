"""G1, G4 and G5: what is said of opposite outcomes."""

from __future__ import annotations

from typing import Any

import pytest

from scalelab.analysis.estimate import Estimate
from scalelab.recipes.evidence import Compared
from scalelab.recipes.gpt2.batches import answer_sweep, name_fastest, note_missing
from scalelab.recipes.gpt2.one_device import explain_published
from scalelab.recipes.gpt2.rows import (
    answer_g5,
    describe_sharding,
    explain_loss,
    explain_unsharded,
    make_g5,
    name_slower,
)
from scalelab.recipes.recipe import Outcome
from scalelab.records.observations import RankReport
from scalelab.records.trial import StepKind, StepSample, TrialResult
from scalelab.studies.shared.arms import group_arms
from tests.records import make_record, make_result


def make_batch(batch: int, seconds: float, round: int) -> TrialResult:  # noqa: A002
    samples = tuple(StepSample(0, step, StepKind.CLEAN, step, seconds, loss=1.0) for step in range(8))
    trial = make_record(configuration=f"batch-{batch}", global_batch=batch, num_ranks=1, round=round)
    return make_result(trial, samples=samples)


def sweep(**seconds: tuple[float, ...]) -> str:
    """The answer from the step times of every launch, by b1, b4, …"""
    results = [
        make_batch(int(name[1:]), one, number) for name, own in seconds.items() for number, one in enumerate(own, 1)
    ]
    return answer_sweep(list(group_arms(results, 1).values()), "batch 64 does not fit")["batches"]


def test_throughput_grows_only_as_far_as_the_lower_end_is_above_one() -> None:
    grows = sweep(b1=(0.1, 0.1, 0.1), b4=(0.2, 0.2, 0.2), b8=(0.4, 0.4, 0.4))
    assert grows.startswith("Throughput grows up to batch 4; batch 8 has 2.00 ± 0.00 times the tokens/s of 1")
    assert "(from the published rates: 1.97). Memory keeps growing" in grows
    assert "batch 64 does not fit. Tokens/s over the batch before, with 95 % intervals: 2.0" in grows
    vague = sweep(b1=(0.1, 0.1, 0.1), b4=(0.2, 0.2, 0.2), b8=(0.38, 0.42, 0.4))
    assert vague.startswith("Throughput grows up to batch 4; whether it does at 8 is unresolved;")
    assert sweep(b1=(0.1, 0.1, 0.1), b4=(0.5, 0.5, 0.5)).startswith("No clear growth of throughput; batch 4")


def test_throughput_over_the_smallest_batch_is_told_where_its_neighbours_are_not() -> None:
    words = sweep(b1=(0.1, 0.1, 0.1), b4=(0.2, 0.45, 0.25), b8=(0.3, 0.31, 0.3))
    assert words.startswith("Throughput grows over that of batch 1 ("), words
    assert "where it stops growing is unresolved" in words


@pytest.mark.parametrize(
    ("small", "large", "words"),
    [
        ((0.1, 0.1, 0.1), (0.2, 0.2, 0.2), "The highest throughput is "),
        ((0.1, 0.1, 0.1), (0.2, 0.9, 0.3), "Which batch has the highest throughput is unresolved"),
    ],
)
def test_a_batch_is_called_the_fastest_only_where_it_is(
    small: tuple[float, ...], large: tuple[float, ...], words: str
) -> None:
    found = {1: small, 4: large}
    results = [make_batch(batch, one, number) for batch, own in found.items() for number, one in enumerate(own, 1)]
    assert name_fastest(list(group_arms(results, 1).values())).startswith(words)


def test_a_quotient_without_an_interval_is_marked() -> None:
    told, alone = (Compared(name, Estimate(value=1.7, low=low), 2.0) for name, low in (("batch 8", 1.2), ("32", None)))
    assert note_missing([told, alone]) == ("32: no interval, as fewer than two launches completed both batches",)
    assert not note_missing([told])


def test_what_keeps_ddp_below_its_ranks_is_told_in_time() -> None:
    gap = Estimate(value=0.05, low=0.04, high=0.06)
    words = explain_loss(Estimate(value=1.6, low=1.5, high=1.7), gap)
    assert "the mean of all 20 steps is 50 ± 10 ms longer than the baseline's over 2" in words
    assert not explain_loss(Estimate(value=1.6, low=1.5, high=2.1), gap)


def test_the_published_surplus_is_about_the_logits() -> None:
    words = explain_published()
    assert "1177.47 MB above the estimate: 1652 MB stayed allocated" in words
    assert "about the logits (1571 MB)" in words


def make_strategies(peak: int) -> dict[str, Outcome]:
    outcomes = {}
    for name in ("ddp", "fsdp-full"):
        part: Any = make_g5("small").parts[name]
        trial = part.plan()[0]
        ranks = tuple(RankReport(rank=rank, peak_memory_bytes=peak) for rank in range(2))
        outcomes[name] = Outcome(study=part, results=(make_result(trial, ranks=ranks),), document=None)
    return outcomes


@pytest.mark.parametrize(("peak", "is_hidden"), [(400_000_000, True), (30_000_000, False)])
def test_a_peak_that_is_mostly_torch_does_not_show_what_sharding_saves(peak: int, is_hidden: bool) -> None:
    words = describe_sharding(make_strategies(peak))
    assert "a rank holds: ddp 17.3 MB, fsdp-full 6.94 MB" in words
    assert ("mostly torch itself" in words) is is_hidden


def test_the_machinery_of_fsdp_is_blamed_only_where_it_costs() -> None:
    assert "its factor of 1.20 ± 0.10 is FSDP's own work" in explain_unsharded(Estimate(value=1.2, low=1.1, high=1.3))
    assert explain_unsharded(Estimate(value=1.2, low=0.9, high=1.5)) == ""
    assert explain_unsharded(Estimate(value=1.2)) == "", "one launch"


def test_a_training_run_of_several_launches_has_an_interval() -> None:
    """20 steps of 10 ms with DDP, a little more or less in every launch; the baseline takes twice as long."""

    def play(name: str, seconds: float) -> Outcome:
        part = make_g5("small").parts[name]
        results = []
        for trial in part.plan():
            own = seconds * (1 + 0.01 * trial.round)
            ranks = range(trial.num_ranks)
            steps = tuple(
                StepSample(rank, step, StepKind.CLEAN, step, own, loss=1.0) for step in range(20) for rank in ranks
            )
            results.append(make_result(trial, samples=steps))
        return Outcome(study=part, results=tuple(results), document=None)

    answer = answer_g5("small", {"single": play("single", 0.02), "ddp": play("ddp", 0.01)})
    assert answer.main is not None
    assert isinstance(answer.main.ours, Estimate)
    assert answer.main.ours.value == pytest.approx(2)
    assert answer.main.ours.low is not None
    (ddp,) = answer.questions
    assert "20 steps took 412 ± 8 ms on one rank and 206 ± 4 ms with DDP on 2, 2.00 ± 0.00 times as fast" in ddp.answer


def test_one_takes_longer_and_two_take_longer() -> None:
    assert [name_slower(names) for names in ((), ("fsdp-full",), ("fsdp-full", "fsdp-none"))] == [
        "",
        "fsdp-full takes longer than DDP. ",
        "fsdp-full and fsdp-none take longer than DDP. ",
    ]

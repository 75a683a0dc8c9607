"""G1, G4 and G5: what is said of opposite outcomes."""

from __future__ import annotations

from typing import Any

import pytest

from scalelab.recipes.gpt2.one_device import answer_sweep, explain_published
from scalelab.recipes.gpt2.rows import describe_sharding, explain_unsharded, make_g5
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


def test_throughput_clearly_grows_only_as_far_as_the_lower_end_is_above_one() -> None:
    grows = sweep(b1=(0.1, 0.1, 0.1), b4=(0.2, 0.2, 0.2), b8=(0.4, 0.4, 0.4))
    assert grows.startswith("Throughput clearly grows up to batch 4. Memory keeps growing")
    assert "batch 64 does not fit. Tokens/s over the batch before, with 95 % intervals: 2.0" in grows
    assert sweep(b1=(0.1, 0.1, 0.1), b4=(0.5, 0.5, 0.5)).startswith("No clear growth of throughput.")


def test_the_published_surplus_is_about_the_logits() -> None:
    words = explain_published()
    assert "1177.47 MB above the estimate: 1652 MB stayed allocated" in words
    assert "about the logits (1571 MB)" in words


def make_strategies(peak: int) -> dict[str, Outcome]:
    outcomes = {}
    for name in ("ddp", "fsdp-full"):
        part: Any = make_g5("small").parts[name]
        (trial,) = part.plan()
        ranks = tuple(RankReport(rank=rank, peak_memory_bytes=peak) for rank in range(2))
        outcomes[name] = Outcome(study=part, results=(make_result(trial, ranks=ranks),), document=None)
    return outcomes


@pytest.mark.parametrize(("peak", "is_hidden"), [(400_000_000, True), (30_000_000, False)])
def test_a_peak_that_is_mostly_torch_does_not_show_what_sharding_saves(peak: int, is_hidden: bool) -> None:
    words = describe_sharding(make_strategies(peak))
    assert "a rank holds besides activations: ddp 17.3 MB, fsdp-full 6.94 MB" in words
    assert ("mostly torch itself" in words) is is_hidden


def test_the_machinery_of_fsdp_is_blamed_only_where_it_costs() -> None:
    assert "factor of 1.20 is not the noise of one launch" in explain_unsharded({"fsdp-none": 1.2}, 1.0)
    assert explain_unsharded({"fsdp-none": 0.9}, 1.0) == ""

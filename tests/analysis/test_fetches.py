"""Batches grouped by pass and launch: first epochs apart, epochs cut short scaled up, the slowest rank counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scalelab.analysis.fetches import group_fetches
from scalelab.records.observations import Fetch, RankReport, ReadingReport
from scalelab.records.tasks import Measure, Pass
from scalelab.records.trial import Status, TrialResult
from tests.readings import make_reading_trial

MAIN = Pass()
REPORT = ReadingReport(num_samples=40, sample_bytes=128)


def make_fetch(rank: int, epoch: int, batch: int, seconds: float, one: Pass = MAIN) -> Fetch:
    return Fetch(rank, one.order, one.access, one.cache, epoch, batch, 4, 0.0, seconds, 0.001)


def make_result(fetches: list[Fetch], num_ranks: int = 1, round: int = 1) -> TrialResult:  # noqa: A002
    trial = make_reading_trial(num_ranks=num_ranks, passes=(MAIN, Pass(cache="cold")), round=round)
    ranks = tuple(RankReport(rank=rank, reading=REPORT) for rank in range(num_ranks))
    return TrialResult(trial=trial, status=Status.COMPLETED, fetches=tuple(fetches), ranks=ranks)


def test_a_batch_is_told_from_the_epochs_after_the_first() -> None:
    fetches = [make_fetch(0, epoch, batch, 0.1 if epoch else 0.5) for epoch in (0, 1, 2) for batch in range(10)]
    (series,) = group_fetches([make_result(fetches)]).values()
    assert series.main is not None
    assert series.main.fetch_seconds.value == pytest.approx(0.1)
    assert series.main.first_epoch_seconds.value == pytest.approx(10 * 0.501)
    assert series.main.epoch_seconds.value == pytest.approx(10 * 0.101)
    assert series.main.is_whole


def test_a_single_epoch_is_both_the_first_and_the_usual_one() -> None:
    cold = Pass(cache="cold")
    (series,) = group_fetches([make_result([make_fetch(0, 0, batch, 0.2, cold) for batch in range(10)])]).values()
    assert series.main is None
    assert series.passes[cold.name].fetch_seconds.value == pytest.approx(0.2)


def test_an_epoch_takes_what_its_slowest_rank_takes() -> None:
    fetches = [make_fetch(rank, 0, batch, 0.1 * (1 + rank)) for rank in (0, 1) for batch in range(5)]
    (series,) = group_fetches([make_result(fetches, num_ranks=2)]).values()
    assert series.main is not None
    assert series.main.epoch_seconds.value == pytest.approx(5 * 0.201)


def test_an_epoch_that_was_cut_short_is_scaled_up_and_says_so() -> None:
    (series,) = group_fetches([make_result([make_fetch(0, 0, batch, 0.3) for batch in range(2)])]).values()
    assert series.main is not None
    assert series.main.epoch_seconds.value == pytest.approx(10 * 0.301)
    assert not series.main.is_whole


def test_a_launch_in_which_a_rank_gave_nothing_keeps_its_place_and_does_not_count() -> None:
    half = make_result([make_fetch(0, 0, batch, 0.1) for batch in range(5)], num_ranks=2)
    whole = make_result([make_fetch(r, 0, b, 0.1) for r in (0, 1) for b in range(5)], num_ranks=2, round=2)
    (series,) = group_fetches([half, whole]).values()
    assert series.main is not None
    assert [len(launch) for launch in series.main.fetch] == [0, 10]


def test_the_slowest_batch_and_the_late_ones_are_told() -> None:
    fetches = [make_fetch(0, 0, batch, 0.01 * (1 + batch)) for batch in range(10)]
    (series,) = group_fetches([make_result(fetches)]).values()
    assert series.main is not None
    assert series.main.slowest_seconds == pytest.approx(0.1)
    assert 0.09 < series.main.late_seconds.value < 0.1


def test_memory_is_what_reading_adds_and_openings_are_medians() -> None:
    result = make_result([make_fetch(0, 0, batch, 0.1) for batch in range(10)])
    report = replace(REPORT, open_seconds=(0.1, 0.2, 0.9), private_bytes=5, resident_shares=(0.0, 0.4))
    rank = RankReport(rank=0, start_memory_bytes=100, peak_memory_bytes=130, reading=report)
    (series,) = group_fetches([replace(result, ranks=(rank,))]).values()
    assert series.open_seconds is not None
    assert series.open_seconds.value == pytest.approx(0.2)
    assert (series.peak_bytes, series.private_bytes, series.resident_share) == (30, 5, 0.4)


def test_trainings_are_left_out() -> None:
    task = Measure(dataset=make_reading_trial().dataset)
    trial = replace(make_reading_trial(), workload="transformer", strategy="single", task=task)
    assert group_fetches([TrialResult(trial=trial, status=Status.COMPLETED)]) == {}


def test_what_no_rank_measured_is_unknown_and_less_memory_than_before_is_nothing_more() -> None:
    result = make_result([make_fetch(0, 0, batch, 0.1) for batch in range(10)])
    ranks = (
        RankReport(rank=1, start_memory_bytes=100, peak_memory_bytes=90, reading=replace(REPORT, num_samples=41)),
        RankReport(rank=0, start_memory_bytes=100, reading=replace(REPORT, file_bytes=7)),
    )
    (series,) = group_fetches([replace(result, ranks=ranks)]).values()
    assert (series.peak_bytes, series.file_bytes, series.private_bytes) == (0, 7, None)
    assert series.num_samples == 40, "as rank 0 says"
    assert (series.open_seconds, series.write_seconds, series.resident_share) == (None, None, None)
    (silent,) = group_fetches([replace(result, ranks=())]).values()
    assert (silent.peak_bytes, silent.num_samples) == (None, silent.dataset.num_samples)
    assert silent.sample_bytes == silent.dataset.sample_bytes


def test_a_batch_in_twenty_is_later_than_the_centre_of_the_launches_quantiles() -> None:
    launches = [
        make_result([make_fetch(0, 0, batch, 0.01 * (batch + number)) for batch in range(21)], round=number)
        for number in (1, 2, 4)
    ]
    (series,) = group_fetches(launches).values()
    assert series.main is not None
    assert [len(launch) for launch in series.main.fetch] == [21, 21, 0, 21]
    assert series.main.late_seconds.value == pytest.approx(0.01 * (19 + 2.25)), "the centre of 1, 2 and 4"
    assert series.main.slowest_seconds == pytest.approx(0.24)
    assert series.failure is None

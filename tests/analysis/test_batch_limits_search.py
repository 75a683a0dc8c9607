"""The search for the largest batch, against memory of known shapes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from scalelab.analysis.batch_limits import (
    MOST_PROBES,
    MemoryLine,
    Probe,
    choose_next_batch,
    draw_line,
    find_largest,
    predict_largest,
)

Need = Callable[[int], float]


def search(need: Need, limit: int, *, start: int = 1, most: int | None = None, sees_peak: bool = True) -> list[Probe]:
    """Probe as the study does, until the search is over."""
    probes: list[Probe] = []
    while (batch := choose_next_batch(probes, limit_bytes=limit, start=start, most=most)) is not None:
        assert batch >= 1
        assert batch not in [probe.batch for probe in probes]
        taken = need(batch)
        fits = taken <= limit
        probes.append(Probe(batch=batch, fits=fits, peak_bytes=int(taken) if fits and sees_peak else None))
        assert len(probes) <= MOST_PROBES
    return probes


def count_failures(probes: list[Probe]) -> int:
    return sum(not probe.fits for probe in probes)


def is_exact(probes: list[Probe], need: Need, limit: int) -> bool:
    """Whether the answer ran, and one sample more has failed."""
    largest = find_largest(probes)
    if largest is None:
        return need(1) > limit
    tried = {probe.batch: probe.fits for probe in probes}
    return tried[largest] and not tried[largest + 1] and need(largest) <= limit < need(largest + 1)


def draw_linear(rng: random.Random) -> tuple[float, float, int]:
    """Fixed and per-sample bytes, and a limit that 1 to 1000 samples reach."""
    limit = int(10 ** rng.uniform(7.5, 11))
    fixed = limit * rng.uniform(0.001, 0.9)
    return fixed, (limit - fixed) / (10 ** rng.uniform(0, 3) + rng.random()), limit


def round_up(value: float, step: float) -> float:
    return math.ceil(value / step) * step


@pytest.mark.parametrize("rounding", [0.0, 0.1, 0.5, 1.0])
def test_where_memory_is_a_line_six_probes_and_two_failures_suffice(rounding: float) -> None:
    """Also where allocators round up, to as much as a sample takes."""
    rng = random.Random(1)
    for _ in range(1000):
        fixed, sample, limit = draw_linear(rng)
        step = rounding * sample or 1.0

        def need(batch: int, a: float = fixed, b: float = sample, step: float = step) -> float:
            return round_up(a + b * batch, step)

        probes = search(need, limit)
        assert is_exact(probes, need, limit)
        assert len(probes) <= 6
        assert count_failures(probes) <= 2


@pytest.mark.parametrize(("bend", "most_probes", "most_failures"), [(0.02, 8, 2), (0.1, 10, 4), (0.5, 14, 6)])
def test_where_memory_bends_upwards_the_answer_is_exact_after_more_probes(
    bend: float, most_probes: int, most_failures: int
) -> None:
    rng = random.Random(2)
    for _ in range(1000):
        fixed, sample, limit = draw_linear(rng)
        reach = (limit - fixed) / sample

        def need(batch: int, a: float = fixed, b: float = sample, reach: float = reach) -> float:
            return a + b * batch * (1 + bend * batch / reach / 2)

        probes = search(need, limit)
        assert is_exact(probes, need, limit)
        assert len(probes) <= most_probes
        assert count_failures(probes) <= most_failures


def test_where_the_peak_moves_to_another_place_of_the_step_the_answer_is_exact() -> None:
    rng = random.Random(3)
    for _ in range(1000):
        fixed, sample, limit = draw_linear(rng)
        corner = rng.uniform(0.02, 0.3) * (limit - fixed) / sample
        flat = rng.uniform(0.0, 0.9)

        def need(batch: int, a: float = fixed, b: float = sample, k: float = corner, flat: float = flat) -> float:
            return a + b * max(batch, k + flat * (batch - k))

        probes = search(need, limit)
        assert is_exact(probes, need, limit)
        assert len(probes) <= 16


def test_where_small_batches_need_less_the_answer_is_exact() -> None:
    """A library whose buffers appear from the second sample on."""
    rng = random.Random(4)
    for _ in range(1000):
        fixed, sample, limit = draw_linear(rng)

        def need(batch: int, a: float = fixed, b: float = sample, jump: float = 0.05 * limit) -> float:
            return a + b * batch + (jump if batch > 1 else 0.0)

        probes = search(need, limit)
        assert is_exact(probes, need, limit)
        assert len(probes) <= 9


def test_where_launches_differ_the_answer_has_run_and_the_next_has_not() -> None:
    rng = random.Random(5)
    for _ in range(1000):
        fixed, sample, limit = draw_linear(rng)
        probes = search(lambda batch, a=fixed, b=sample: a + b * (batch + rng.uniform(0, 0.3)), limit)  # type: ignore[misc]
        largest = find_largest(probes)
        if largest is not None:
            tried = {probe.batch: probe.fits for probe in probes}
            assert tried[largest]
            assert not tried[largest + 1]
        assert len(probes) <= 10


@pytest.mark.parametrize("start", [1, 3, 64, 5000])
def test_any_start_leads_to_the_same_answer(start: int) -> None:
    probes = search(lambda batch: 1e9 + 7e6 * batch, 2_000_000_000, start=start)
    assert probes[0].batch == start
    assert find_largest(probes) == 142


def test_nothing_fits() -> None:
    assert [probe.batch for probe in search(lambda batch: 100.0, 10)] == [1]
    assert [probe.batch for probe in search(lambda batch: 100.0, 10, start=32)] == [32, 1]


def test_exactly_one_sample_fits() -> None:
    probes = search(lambda batch: 60.0 * batch, 100)
    assert find_largest(probes) == 1
    assert (2, False) in [(probe.batch, probe.fits) for probe in probes]


def test_the_most_that_is_wanted_ends_the_search() -> None:
    probes = search(lambda batch: 1e6 * batch, 10**9, most=50)
    assert probes[-1] == Probe(batch=50, fits=True, peak_bytes=50_000_000)
    assert count_failures(probes) == 0


def test_without_peaks_it_doubles_and_bisects() -> None:
    probes = search(lambda batch: 1e6 * batch, 100_500_000, sees_peak=False)
    assert find_largest(probes) == 100
    assert [probe.batch for probe in probes[:9]] == [1, 2, 4, 8, 16, 32, 64, 128, 126]


def test_memory_that_does_not_grow_ends_the_search_too() -> None:
    probes = search(lambda batch: 1e6, 10**9)
    assert len(probes) == MOST_PROBES
    assert count_failures(probes) == 0


def test_the_line_is_drawn_between_far_ends() -> None:
    probes = [Probe(batch=b, fits=True, peak_bytes=1000 + 10 * b) for b in (1, 8, 90, 100)]
    line = draw_line([*probes, Probe(batch=200, fits=False)])
    assert line is not None
    assert (line.fixed_bytes, line.sample_bytes, line.lever) == (1000, 10, 92)
    assert line.predict_bytes(150) == 2500
    assert predict_largest(line, 2999) == 199


def test_one_probe_is_no_line_and_a_flat_line_predicts_nothing() -> None:
    assert draw_line([Probe(batch=1, fits=True, peak_bytes=5)]) is None
    line = draw_line([Probe(batch=b, fits=True, peak_bytes=5) for b in (1, 2)])
    assert line is not None
    assert predict_largest(line, 100) is None


@pytest.mark.parametrize(("bend", "most_probes", "most_failures"), [(0.0, 6, 2), (0.02, 6, 2), (0.1, 8, 3)])
def test_with_a_forecast_six_probes_and_two_failures_suffice_where_memory_bends_a_little_too(
    bend: float, most_probes: int, most_failures: int
) -> None:
    """The forecast knows the slope to a few percent, and nothing of what libraries take on top."""
    rng = random.Random(7)
    for _ in range(500):
        fixed, sample, limit = draw_linear(rng)
        largest = (limit - fixed) / sample

        def need(batch: int, a: float = fixed, b: float = sample, m: float = largest) -> float:
            return a + b * batch * (1 + bend * (batch / m - 1))

        slope = sample * rng.uniform(0.97, 1.03)
        hint = MemoryLine(fixed_bytes=fixed - limit * rng.uniform(0, 0.1), sample_bytes=slope, lever=48)
        probes: list[Probe] = []
        while (batch := choose_next_batch(probes, limit_bytes=limit, hint=hint)) is not None:
            fits = need(batch) <= limit
            probes.append(Probe(batch=batch, fits=fits, peak_bytes=int(need(batch)) if fits else None))
        assert is_exact(probes, need, limit)
        assert len(probes) <= most_probes
        assert count_failures(probes) <= most_failures


def test_samples_that_hide_in_what_the_process_takes_anyway_lead_on_in_small_steps() -> None:
    """A script's first batches need less than its imports did: both probes peak in the same place."""

    def need(batch: int) -> float:
        return max(3e8, 2.4e8 + 1e7 * batch)

    probes = search(need, 1_200_000_000)
    assert [probe.batch for probe in probes][:3] == [1, 4, 64]
    assert is_exact(probes, need, 1_200_000_000)
    assert (find_largest(probes), count_failures(probes)) == (96, 1)

"""Which batch is tried next, worked out by hand for memory whose line is known."""

from __future__ import annotations

import pytest

from scalelab.analysis.batch_limits import (
    MemoryLine,
    Probe,
    _count_surprises,
    _doubt_slope,
    _guess_batch,
    _step_back,
    choose_next_batch,
    draw_line,
    is_close,
)

FORECAST = MemoryLine(fixed_bytes=0, sample_bytes=1, lever=48)
GB, MB = 10**9, 10**6


def probe(batch: int, peak: int | None = None, *, fits: bool = True) -> Probe:
    return Probe(batch=batch, fits=fits, peak_bytes=peak)


def on_line(*batches: int) -> list[Probe]:
    """100 MB, and 1 MB for every sample."""
    return [probe(batch, 100 * MB + batch * MB) for batch in batches]


@pytest.mark.parametrize(
    ("options", "first"),
    [({}, 450), ({"start": 500}, 500), ({"most": 300}, 300), ({"hint": None}, 1), ({"hint": None, "start": 3}, 3)],
)
def test_a_forecast_puts_the_first_probe_halfway_to_nine_tenths_of_the_limit(
    options: dict[str, object], first: int
) -> None:
    assert choose_next_batch([], **{"limit_bytes": 1000, "hint": FORECAST, **options}) == first  # type: ignore[arg-type]


def test_the_second_probe_goes_by_the_mean_of_two_slopes_and_the_third_by_the_line() -> None:
    """450 took 900: a slope of 1 as forecast or of 2. Of the 100 left, nine tenths at 1.5 are 60 samples. These took 30
    more: nine tenths of the 70 left at a slope of ½ are 126."""
    first = [probe(450, 900)]
    assert choose_next_batch(first, limit_bytes=1000, hint=FORECAST) == 450 + 60
    assert choose_next_batch([*first, probe(510, 930)], limit_bytes=1000, hint=FORECAST) == 510 + 126


@pytest.mark.parametrize(
    ("failed", "hint", "following"), [(100, FORECAST, 25), (100, None, 1), (3, FORECAST, 1), (1, None, None)]
)
def test_a_first_probe_that_fails_is_followed_by_a_quarter_or_by_one(
    failed: int, hint: MemoryLine | None, following: int | None
) -> None:
    assert choose_next_batch([probe(failed, fits=False)], limit_bytes=1000, hint=hint) == following


@pytest.mark.parametrize(
    ("limit", "following"), [(10_000, 200), (10**6, 128 * 2), (150, 4 * 2)], ids=["in proportion", "most", "least"]
)
def test_one_probe_is_followed_by_what_its_peak_allows_within_bounds(limit: int, following: int) -> None:
    assert choose_next_batch([probe(2, 100)], limit_bytes=limit) == following


def test_a_long_line_is_followed_to_the_limit_and_a_short_one_part_of_the_way() -> None:
    """500 samples lie ahead of 100 and 400, no more than thrice their distance; 800 of 10 and 100, of which 0.6."""
    assert _guess_batch(on_line(100, 400), 400, GB, is_near=False) == 400 + 500
    assert _guess_batch(on_line(10, 100), 100, GB, is_near=False) == 100 + 480


def test_a_doubtful_line_and_one_after_a_failure_are_followed_as_far_as_is_safe() -> None:
    """A slope of 1 MB, 2 % and twice the noise of 1 MB over the lever: 1.02 MB + 2 MB / 300."""
    failed = [*on_line(100, 400), probe(950, fits=False)]
    assert _guess_batch(failed, 400, GB, is_near=False) == 400 + int(500 / (1.02 + 2 / 300))
    short = on_line(876, 882)  # 18 ahead, of which less than three quarters are on the safe side
    assert _guess_batch(short, 882, GB, is_near=True) == 882 + int(18 / (1.02 + 2 / 6))


@pytest.mark.parametrize(("limit", "noise"), [(GB, MB), (10 * MB, 64 * 1024)])
def test_a_slope_is_doubted_by_two_percent_and_by_noise_over_its_lever(limit: int, noise: int) -> None:
    probes = on_line(50, 100)
    line = draw_line(probes)
    assert line is not None
    assert _doubt_slope(probes, line, limit, 10.0) == pytest.approx(0.02 * MB + 2 * noise / 50)


def test_a_slope_that_held_as_far_as_the_limit_lies_is_doubted_by_what_was_seen() -> None:
    """The line through 10 and 20 missed 100 by 160 kB: 2 kB a sample over 80."""
    probes = [*on_line(10, 20), probe(100, 200 * MB + 160_000)]
    line = draw_line(probes)
    assert line is not None
    assert _doubt_slope(probes, line, GB, 80.0) == pytest.approx(2000)
    assert _doubt_slope(probes, line, GB, 81.0) == pytest.approx(0.02 * line.sample_bytes + 2 * MB / 80)


def test_below_a_failure_the_next_goes_back_by_two_percent_and_then_by_half() -> None:
    once, twice = [probe(100), probe(200, fits=False)], [probe(300, fits=False), probe(200, fits=False)]
    assert _step_back(once, 100, 200) == 200 - 2
    assert _step_back(twice, 100, 200) == 200 - 50
    assert _step_back(twice, 99, 200) == 200 - 51


@pytest.mark.parametrize(("failed", "expected"), [(111, True), (112, False)])
def test_a_failure_within_the_tolerance_ends_the_search(failed: int, expected: bool) -> None:
    probes = [probe(100), probe(failed, fits=False)]
    assert is_close(probes, None, 0.1) is expected
    assert not is_close(probes, None, 0.0)


@pytest.mark.parametrize(("limit", "expected"), [(1000, True), (1109, True), (1110, False), (990, False)])
def test_a_line_that_ends_within_the_tolerance_ends_the_search(limit: int, expected: bool) -> None:
    assert is_close([probe(50, 500), probe(100, 1000)], limit, 0.1) is expected


def test_a_probe_that_ran_beyond_its_line_is_a_surprise() -> None:
    assert _count_surprises([*on_line(10, 20), probe(950, GB)], GB) == 1
    assert _count_surprises([*on_line(10, 20), probe(900, GB)], GB) == 0
    assert _count_surprises([*on_line(10, 20), probe(950, fits=False)], GB) == 0

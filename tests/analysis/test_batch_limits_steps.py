"""Which batch is tried next, worked out by hand for memory whose line is known."""

from __future__ import annotations

import pytest

from scalelab.analysis.batch_limits import (
    MemoryLine,
    Probe,
    _count_surprises,
    _doubt_slope,
    _follow_hint,
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


@pytest.mark.parametrize(("limit", "sample"), [(1, 1), (2, 1), (1000, 0)])
def test_a_forecast_that_leaves_no_room_begins_with_one(limit: int, sample: int) -> None:
    hint = MemoryLine(fixed_bytes=0, sample_bytes=sample, lever=48)
    assert choose_next_batch([], limit_bytes=limit, hint=hint) == 1


def test_a_forecast_is_followed_by_what_the_first_probe_took_beyond_it() -> None:
    """(900 − 90) / 450 = 1.8, and the mean with 1 is 1.4: nine tenths of 100 are 64 samples."""
    hint = MemoryLine(fixed_bytes=90, sample_bytes=1, lever=48)
    assert _follow_hint([probe(450, 900)], hint, 1000) == 450 + 64
    assert _follow_hint([probe(1, 900)], FORECAST, 1000) == 1 + 1
    assert _follow_hint([probe(1, 100), probe(2, 900)], FORECAST, 1000) == 2 + 1


@pytest.mark.parametrize(("last", "following"), [(950, 550 + 90), (951, None)])
def test_a_third_approach_needs_a_twentieth_of_the_limit(last: int, following: int | None) -> None:
    assert _follow_hint([probe(450, 900), probe(550, last)], FORECAST, 1000) == following


@pytest.mark.parametrize(
    "probes",
    [
        [probe(4, 100), probe(8, 200), probe(16, 400)],
        [probe(4, 100), probe(8, fits=False)],
        [probe(4)],
        [probe(4, 100), probe(8)],
        [probe(4, 100), probe(8, 100)],
        [probe(4, 100), probe(4, 120)],
    ],
    ids=["third", "failed", "unknown", "last unknown", "flat", "same"],
)
def test_a_forecast_is_left_where_it_says_nothing(probes: list[Probe]) -> None:
    assert _follow_hint(probes, FORECAST, 1000) is None


def test_without_a_limit_or_a_slope_no_forecast_is_followed() -> None:
    assert _follow_hint([probe(4, 100)], FORECAST, None) is _follow_hint([probe(4, 100)], None, 1000) is None
    assert _follow_hint([probe(4, 100)], MemoryLine(fixed_bytes=0, sample_bytes=0, lever=1), 1000) is None


@pytest.mark.parametrize(
    ("num_failed", "is_near", "lever"), [(0, False, 25), (1, False, 25), (2, False, 2), (0, True, 2)]
)
def test_a_line_is_drawn_from_three_quarters_and_from_nearby_once_it_has_failed_twice(
    num_failed: int, is_near: bool, lever: int
) -> None:
    known = [probe(50, 200), probe(75, 210), probe(98, 290), probe(99, 295), probe(100, 300)]
    line = draw_line([*known, *(probe(120 + n, fits=False) for n in range(num_failed))], is_near=is_near)
    assert line is not None
    assert line.lever == lever


@pytest.mark.parametrize(("peak", "following"), [(0, 200), (1, 200), (2, 100)])
def test_a_first_peak_of_next_to_nothing_divides_the_limit_too(peak: int, following: int) -> None:
    assert _guess_batch([probe(2, peak)], 2, 100, is_near=False) == following


def test_after_a_failure_one_probe_is_followed_by_one_more_at_least() -> None:
    assert _guess_batch([probe(2, 100), probe(50, fits=False)], 2, 110, is_near=False) == 3


def test_probes_that_differ_by_noise_are_followed_by_fifteen_times_the_largest() -> None:
    """Two samples of 1 MB are twice the noise; one is less. 888 MB are left at 1 + 0.02 + 2 / 2 MB a sample."""
    assert _guess_batch(on_line(10, 12), 12, GB, is_near=False) == 12 + int(888 / 2.02)
    assert _guess_batch(on_line(10, 11), 11, GB, is_near=False) == 11 + 15 * 11


def test_the_next_is_one_more_at_least_and_twice_as_many_after_a_surprise() -> None:
    assert _guess_batch(on_line(100, 900), 900, GB + MB // 2, is_near=False) == 901
    surprise = [*on_line(10, 20), probe(950, 999 * MB)]
    assert _guess_batch(surprise, 950, GB, is_near=False) == 952


@pytest.mark.parametrize(("left", "ahead"), [(38, 38), (58, 56)])
def test_less_than_a_sample_of_doubt_is_none(left: int, ahead: int) -> None:
    """The slope is doubted by 2 % and by two noises over 300 samples: 0.9 of 38 samples, and 1.3 of 58."""
    failed = [*on_line(100, 400), probe(950, fits=False)]
    assert _guess_batch(failed, 400, (500 + left) * MB, is_near=False) == 400 + ahead


def test_a_single_failure_is_stepped_back_from_by_two_percent() -> None:
    assert _step_back([probe(200, fits=False)], 0, 200) == 200 - 4


def test_a_search_is_close_only_if_it_knows_of_a_limit_or_a_failure() -> None:
    line = [probe(50, 500), probe(100, 1000)]
    assert is_close(line, 1000, 0.1)
    assert not is_close(line, None, 0.1)
    assert not is_close(line[:1], 1000, 0.1)
    assert not is_close([probe(100, fits=False)], 1000, 0.1)


def test_two_failures_in_a_row_are_stepped_back_from_by_half_and_one_leaves_the_guess() -> None:
    """The line sees 487 more on the safe side; between 400 and 920 half-way is 660."""
    once = [*on_line(100, 400), probe(950, fits=False)]
    assert choose_next_batch(once, limit_bytes=GB) == 400 + int(500 / (1.02 + 2 / 300))
    assert choose_next_batch([*once, probe(920, fits=False)], limit_bytes=GB) == 920 - 260


@pytest.mark.parametrize(("failed", "following"), [(790, 789), (789, 789 - 8)])
def test_a_guess_of_what_has_failed_is_stepped_back_from(failed: int, following: int) -> None:
    """400 MB at 1.02 + 1.8 / 300 MB a sample are 389 more than 400."""
    probes = [*on_line(100, 400), probe(failed, fits=False)]
    assert choose_next_batch(probes, limit_bytes=900 * MB) == following

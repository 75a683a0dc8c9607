"""The line of a link: exact where times are one, robust where some are not, silent where sizes do not reach."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scalelab.analysis.link import fit_line, fit_links
from scalelab.analysis.stats import Rounds
from scalelab.analysis.traffic import bus_factor
from scalelab.launch.fake import FakeLauncher
from scalelab.records.trial import TrialResult
from tests.exchanges import make_exchange_trial

SIZES = tuple(4 * 4**k for k in range(13))
PUBLISHED = {
    2: ((1, 45.1, 23.25), (2, 51.13, 41.01), (4, 60.26, 69.61), (8, 87.36, 96.03), (16, 129.4, 129.65), (32,
        229, 146.52), (64, 404, 166.1), (128, 765.7, 175.28), (256, 1454.4, 184.57), (512, 2833.4, 189.48),
        (1024, 5453.4, 196.89)),
    8: ((1, 92.15, 19.91), (2, 92.97, 39.47), (4, 94.03, 78.06), (8, 129.8, 113.07), (16, 231, 127.08), (32,
        355.7, 165.1), (64, 579.6, 202.61), (128, 1166, 201.44), (256, 2158, 217.68), (512, 4187.6, 224.36),
        (1024, 8196.4, 229.25)),
}  # fmt: skip
"""NCCL's all-reduce, in place, on 2 and 8 A100 of one host: size in MiB, µs, bus bandwidth in GB/s (from the traces of
VIA-Research/vTrain)."""
ALPHA, BETA = 4e-5, 5e-10


def make_times(sizes: tuple[int, ...] = SIZES, noise: float = 0.0, num_rounds: int = 6) -> dict[int, Rounds]:
    rng = np.random.default_rng(1)
    return {
        size: [[(ALPHA + BETA * size) * np.exp(noise * rng.standard_normal())] for _ in range(num_rounds)]
        for size in sizes
    }


def test_times_on_a_line_give_it_back() -> None:
    line = fit_line(make_times())
    assert line is not None
    assert line.latency_seconds is not None
    assert line.bandwidth is not None
    assert line.half_bytes is not None
    assert line.latency_seconds.value == pytest.approx(ALPHA, rel=1e-6)
    assert line.bandwidth.value == pytest.approx(2e9, rel=1e-6)
    assert line.half_bytes.value == pytest.approx(ALPHA / BETA, rel=1e-6)
    assert line.residual_ratio < 1e-6
    assert line.misfits == ()
    assert (line.smallest_bytes, line.largest_bytes) == (SIZES[0], SIZES[-1])


def test_at_the_half_bandwidth_size_half_of_the_bandwidth_is_reached() -> None:
    line = fit_line(make_times())
    assert line is not None
    assert line.half_bytes is not None
    half = line.half_bytes.value
    assert half / line.predict_seconds(half) == pytest.approx(0.5 / BETA)


def test_intervals_cover_the_truth_and_come_from_the_rounds() -> None:
    line = fit_line(make_times(noise=0.05))
    assert line is not None
    for estimate, truth in ((line.latency_seconds, ALPHA), (line.byte_seconds, BETA), (line.half_bytes, ALPHA / BETA)):
        assert estimate is not None
        assert estimate.low is not None
        assert estimate.high is not None
        assert estimate.low < truth < estimate.high


def test_one_round_has_no_interval() -> None:
    line = fit_line(make_times(num_rounds=1))
    assert line is not None
    assert line.latency_seconds is not None
    assert line.latency_seconds.low is None


def test_a_size_that_is_off_is_named_and_hardly_bends_the_line() -> None:
    times = make_times()
    times[SIZES[6]] = [[3 * seconds for seconds in launch] for launch in times[SIZES[6]]]
    line = fit_line(times)
    assert line is not None
    assert line.latency_seconds is not None
    assert [misfit.payload_bytes for misfit in line.misfits] == [SIZES[6]]
    assert line.misfits[0].ratio == pytest.approx(3, rel=0.05)
    assert line.latency_seconds.value == pytest.approx(ALPHA, rel=0.05)


def test_small_messages_alone_show_no_bandwidth() -> None:
    line = fit_line(make_times(SIZES[:5]))
    assert line is not None
    assert line.latency_seconds is not None
    assert (line.byte_seconds, line.bandwidth, line.half_bytes) == (None, None, None)
    assert line.predict_seconds(SIZES[4]) == pytest.approx(ALPHA + BETA * SIZES[4], rel=1e-3)


def test_large_messages_alone_show_no_latency() -> None:
    line = fit_line(make_times(SIZES[-4:]))
    assert line is not None
    assert line.latency_seconds is None
    assert line.bandwidth is not None
    assert line.bandwidth.value == pytest.approx(2e9, rel=0.01)


def test_a_coefficient_that_is_not_told_is_still_part_of_the_line() -> None:
    """Up to half of the largest message's time: without it the line would seem to miss what it goes through."""
    sizes = (4, 16_000, 40_000, 72_000)
    line = fit_line(make_times(sizes))
    assert line is not None
    assert line.byte_seconds is None
    for size in sizes:
        assert line.predict_seconds(size) == pytest.approx(ALPHA + BETA * size, rel=1e-6)


def test_ranks_of_one_host_have_no_link_whatever_joins_hosts() -> None:
    launcher = FakeLauncher(lambda _: 0.1, transfer_seconds=lambda _, size: ALPHA + BETA * size)
    trials = [
        make_exchange_trial("broadcast", num_ranks, SIZES, link="1gbit", ranks_per_host=2) for num_ranks in (2, 4)
    ]
    fits = fit_links([launcher.launch(trial, Path("unused")) for trial in trials])
    assert [(fit.num_ranks, fit.link) for fit in fits] == [(2, ""), (4, "1gbit")]


def test_two_sizes_are_no_evidence_for_a_line() -> None:
    assert fit_line(make_times(SIZES[:2])) is None
    assert fit_line({}) is None


def play(operation: str, num_ranks: int, num_rounds: int = 2) -> list[TrialResult]:
    launcher = FakeLauncher(lambda _: 0.1, transfer_seconds=lambda _, size: ALPHA + BETA * size)
    trials = [make_exchange_trial(operation, num_ranks, SIZES, round=n + 1) for n in range(num_rounds)]
    return [launcher.launch(trial, Path("unused")) for trial in trials]


def test_every_exchange_of_a_run_has_its_fit_with_its_bus_bandwidth() -> None:
    fits = fit_links([*play("all_reduce", 4), *play("broadcast", 4)])
    assert [(fit.configuration, fit.operation, fit.num_ranks, fit.backend) for fit in fits] == [
        ("all_reduce-4", "all_reduce", 4, "gloo"),
        ("broadcast-4", "broadcast", 4, "gloo"),
    ]
    assert [fit.bus_bandwidth.value for fit in fits if fit.bus_bandwidth] == pytest.approx([3e9, 2e9], rel=1e-6)


@pytest.mark.parametrize("num_ranks", PUBLISHED)
def test_published_nccl_all_reduces_lie_on_a_line_and_have_our_bus_bandwidth(num_ranks: int) -> None:
    """NVLink carries 300 GB/s per direction there, of which NCCL uses two thirds."""
    factor = bus_factor("all_reduce", num_ranks)
    for mebibytes, microseconds, bus in PUBLISHED[num_ranks]:
        assert mebibytes * 2**20 / microseconds / 1e3 * factor == pytest.approx(bus, rel=0.01)
    line = fit_line({mebibytes * 2**20: [[us * 1e-6]] for mebibytes, us, _ in PUBLISHED[num_ranks]})
    assert line is not None
    assert line.latency_seconds is not None
    assert line.bandwidth is not None
    assert line.misfits == ()
    assert line.residual_ratio < 0.1
    assert 2e-5 < line.latency_seconds.value < 1e-4
    assert 180e9 < line.bandwidth.value * factor < 235e9


def test_three_sizes_are_evidence_for_a_line() -> None:
    line = fit_line(make_times(SIZES[::6]))
    assert line is not None
    assert line.fitted_byte_seconds == pytest.approx(BETA, rel=1e-6)


@pytest.mark.parametrize(("size", "is_known"), [(78_000, True), (82_000, False)])
def test_a_coefficient_is_known_where_it_makes_half_of_the_time(size: int, is_known: bool) -> None:
    """Latency and transfer of 80,000 bytes take as long as each other: below that latency does, above it transfer."""
    large, small = (fit_line(make_times(sizes)) for sizes in ((size, 10**6, 10**7), (4, 10**3, size)))
    assert large is not None
    assert small is not None
    assert (large.latency_seconds is not None, small.byte_seconds is not None) == (is_known, not is_known)
    assert (large.half_bytes is not None, small.half_bytes is not None) == (is_known, not is_known)


@pytest.mark.parametrize(("factor", "num_misfits"), [(1.2, 0), (1.3, 1), (0.8, 0), (0.7, 1)])
def test_a_size_is_named_from_a_quarter_off_its_line_on(factor: float, num_misfits: int) -> None:
    times = make_times()
    times[SIZES[6]] = [[factor * seconds for seconds in launch] for launch in times[SIZES[6]]]
    line = fit_line(times)
    assert line is not None
    assert len(line.misfits) == num_misfits
    assert line.residual_ratio == pytest.approx(abs(factor - 1) / 13**0.5, rel=0.15)


def test_rounds_whose_coefficients_move_together_know_the_half_bandwidth_size() -> None:
    """By a tenth each: Student's t of two degrees of freedom over √3."""
    line = fit_line({size: [[(ALPHA + BETA * size) * np.exp(0.1 * n)] for n in range(3)] for size in SIZES})
    assert line is not None
    assert line.latency_seconds is not None
    assert line.latency_seconds.high is not None
    assert line.half_bytes is not None
    arm = 4.302653 * 0.1 / np.sqrt(3)
    assert line.latency_seconds.high / line.latency_seconds.value == pytest.approx(np.exp(arm), rel=1e-5)
    assert line.byte_seconds is not None
    assert line.byte_seconds.high == pytest.approx(line.byte_seconds.value * np.exp(arm), rel=1e-5)
    assert line.half_bytes.half_width == pytest.approx(0, abs=1e-4 * ALPHA / BETA)


def test_rounds_whose_latency_moves_alone_know_the_bandwidth() -> None:
    line = fit_line({size: [[ALPHA * np.exp(0.1 * n) + BETA * size] for n in range(3)] for size in SIZES})
    assert line is not None
    assert line.latency_seconds is not None
    assert line.latency_seconds.high is not None
    assert line.byte_seconds is not None
    arm = 4.302653 * 0.1 / np.sqrt(3)
    assert line.latency_seconds.high / line.latency_seconds.value == pytest.approx(np.exp(arm), rel=1e-4)
    assert line.byte_seconds.half_width == pytest.approx(0, abs=1e-4 * BETA)

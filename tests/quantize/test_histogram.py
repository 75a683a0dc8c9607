"""Counts that do not show in which order or company numbers came."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scalelab.quantize.histogram import (
    BINS_PER_OCTAVE,
    NUM_BINS,
    ValueHistogram,
    count_values,
    merge_histograms,
    rebin,
)


def draw(num: int, seed: int = 0) -> torch.Tensor:
    """Numbers over thirty orders of magnitude, zeros of both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num, generator=generator) * 10 ** (30 * torch.rand(num, generator=generator) - 15)
    values[:10], values[10:20] = 0.0, -0.0
    return values


def test_merged_parts_are_the_whole_whatever_the_order() -> None:
    values = draw(2_000)
    whole = count_values(values)
    shuffled = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(1))]
    for parts in (shuffled.split(37), shuffled.split(1234)):
        forth, back = merge_histograms(map(count_values, parts)), merge_histograms(map(count_values, parts[::-1]))
        assert forth == whole == back
        assert (forth.mean, forth.deviation) == (whole.mean, whole.deviation)
    assert whole != count_values(values[:-1])


def test_every_number_is_counted_in_a_bin_that_holds_it() -> None:
    values = draw(5_000)
    bins = count_values(values).list_bins()
    assert bins.num_values == len(values)
    for value in values[:500].double().tolist():
        assert any((bins.lows <= value) & (value <= bins.highs))
    assert (np.diff(bins.middles) > 0).all()


def test_bins_are_as_narrow_as_they_promise() -> None:
    bins = count_values(draw(5_000)).list_bins()
    wide = bins.highs > bins.lows
    relative = (bins.highs - bins.lows)[wide] / np.minimum(np.abs(bins.lows), np.abs(bins.highs))[wide]
    assert relative.max() <= 1 / BINS_PER_OCTAVE * (1 + 1e-12)


def test_zero_and_minus_zero_are_one_number_in_a_bin_without_width() -> None:
    bins = count_values(torch.tensor([0.0, -0.0, 0.0])).list_bins()
    assert (bins.lows.tolist(), bins.highs.tolist(), bins.counts.tolist()) == ([0.0], [0.0], [3])


def test_least_and_largest_are_exact() -> None:
    histogram = count_values(torch.tensor([0.1, -0.3, 0.2]))
    assert histogram.least == float(np.float32(-0.3))
    assert histogram.largest == float(np.float32(0.2))
    assert not histogram.is_constant
    assert count_values(torch.full((5,), 2.5)).is_constant


def test_mean_and_deviation_are_within_the_width_of_a_bin() -> None:
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(3)) * 3 + 1
    histogram = count_values(values)
    assert histogram.mean == pytest.approx(float(values.double().mean()), rel=1e-3)
    assert histogram.deviation == pytest.approx(float(values.double().std(correction=0)), rel=1e-4)


def test_memory_is_bounded_whatever_is_counted() -> None:
    histogram = merge_histograms(count_values(draw(2_000, seed)) for seed in range(10))
    assert sum(len(counts) for counts in histogram.octaves.values()) <= NUM_BINS
    narrow = count_values(torch.rand(100_000) + 1)
    assert sum(counts.nbytes for counts in narrow.octaves.values()) == BINS_PER_OCTAVE * 8


def test_extreme_float32_numbers_are_counted() -> None:
    values = torch.tensor([3.4e38, -3.4e38, 1.2e-38, 1e-45, -1e-45])
    histogram = count_values(values)
    assert histogram.num_values == 5
    assert histogram.list_bins().highs.max() == histogram.largest


def test_nothing_is_counted_in_nothing() -> None:
    assert count_values(torch.zeros(0)) == ValueHistogram() == merge_histograms([])
    assert ValueHistogram().num_values == 0
    bins = ValueHistogram().list_bins()
    assert len(bins.lows) == len(bins.counts) == 0


def test_numbers_at_the_ends_of_the_range_are_counted_there() -> None:
    """As in images, most of whose numbers are black."""
    values = torch.cat([torch.full((800,), -1.0), torch.linspace(-0.99, 0.99, 100), torch.full((50,), 1.0)])
    counts = rebin(count_values(values).list_bins(), np.linspace(-1, 1, 21))
    assert (round(counts[0]), round(counts[-1])) == (805, 55)
    assert counts.sum() == pytest.approx(950)


def test_rebinning_keeps_all_that_lies_inside() -> None:
    values = torch.randn(50_000, generator=torch.Generator().manual_seed(4))
    bins = count_values(values).list_bins()
    edges = np.linspace(-8, 8, 129)
    counts = rebin(bins, edges)
    assert counts.sum() == pytest.approx(50_000)
    exact = np.histogram(values.numpy(), edges)[0]
    assert np.abs(counts - exact).max() <= 0.02 * exact.max()
    assert rebin(bins, np.array([0.0, 8.0])).sum() == pytest.approx(int((values > 0).sum()))


def test_rebinning_puts_zeros_where_zero_is() -> None:
    bins = count_values(torch.tensor([0.0] * 7 + [0.9])).list_bins()
    assert rebin(bins, np.array([0.0, 0.5, 1.0])).tolist() == [7.0, 1.0]
    assert rebin(bins, np.array([-1.0, -0.5, 0.0])).tolist() == [0.0, 7.0], "a zero on the last edge is inside"
    assert rebin(bins, np.array([0.5, 1.0])).tolist() == [1.0]
    assert rebin(bins, np.array([-1.0, -0.5])).tolist() == [0.0]

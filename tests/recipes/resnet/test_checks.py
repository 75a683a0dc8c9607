"""The resnet assignment's claims, to the digit of its description."""

from __future__ import annotations

import pytest

from scalelab.recipes.resnet.published import (
    count_epoch_steps,
    find_effective_bandwidth,
    find_speedup,
    make_checks,
    print_seconds,
    subtract_ideal,
    utilize_as_published,
)

CELLS = [(2, 32), (4, 32), (2, 128), (4, 128), (2, 512), (4, 512)]
"""Devices and batch, in the order in which the description lists them."""


@pytest.mark.parametrize(
    ("cell", "seconds"), list(zip(CELLS, ("4.389", "3.172", "0.693", "0.445", "0.130", "0.219"), strict=True))
)
def test_communication_by_the_published_method_is_what_was_printed(cell: tuple[int, int], seconds: str) -> None:
    assert print_seconds(subtract_ideal(*cell, as_used=True)) == seconds


@pytest.mark.parametrize(("num_devices", "seconds"), [(2, "0.160"), (4, "0.234")])
def test_the_logged_time_of_batch_512_gives_other_communication(num_devices: int, seconds: str) -> None:
    assert print_seconds(subtract_ideal(num_devices, 512, as_used=False)) == seconds


@pytest.mark.parametrize(
    ("cell", "percent"), list(zip(CELLS, ("1.13", "2.35", "7.17", "16.74", "38.20", "34.02"), strict=True))
)
def test_bandwidth_by_the_published_method_is_what_was_printed(cell: tuple[int, int], percent: str) -> None:
    assert f"{utilize_as_published(*cell):.2f}" == percent


@pytest.mark.parametrize(("cell", "steps"), list(zip(CELLS, (781, 390, 195, 97, 48, 24), strict=True)))
def test_an_epoch_has_whole_batches_only(cell: tuple[int, int], steps: int) -> None:
    assert count_epoch_steps(*cell) == steps


@pytest.mark.parametrize(
    ("cell", "gigabytes"), list(zip(CELLS, ("7.95", "8.24", "12.57", "14.61", "13.41", "6.88"), strict=True))
)
def test_with_an_exchange_in_every_step_the_bandwidth_is_above_the_assumed_one(
    cell: tuple[int, int], gigabytes: str
) -> None:
    assert f"{find_effective_bandwidth(*cell) / 1e9:.2f}" == gigabytes


def test_the_strong_point_is_four_times_32_against_one_times_128() -> None:
    assert f"{find_speedup((1, 128), (4, 32)):.2f}" == "2.02"


@pytest.mark.parametrize(("batch", "speedup"), [(32, "1.78"), (128, "1.96"), (512, "1.94")])
def test_speedups_from_two_to_four_devices_hold(batch: int, speedup: str) -> None:
    assert f"{find_speedup((2, batch), (4, batch)):.2f}" == speedup


def test_what_holds_and_what_does_not_is_said_with_both_numbers() -> None:
    by_claim = {check.claim: check for check in make_checks()}
    used = by_claim["communication at batch 512: 0.130/0.219 s on 2/4 devices"]
    assert not used.holds
    assert used.computed == (
        "published method: 0.130/0.219 s with 19.764; corrected: 0.160/0.234 s with the logged 19.704"
    )
    bandwidth = by_claim["bandwidth used at batch 512: 38.20/34.02 % of 0.9 GB/s on 2/4 devices"]
    assert not bandwidth.holds
    assert "38.20/34.02 %" in bandwidth.computed
    assert "13.41/6.88 GB/s" in bandwidth.computed
    assert "48/24" in bandwidth.computed
    strong = by_claim["the epoch has a fixed size, so this is strong scaling"]
    assert not strong.holds
    assert strong.computed.startswith("strong scaling per epoch, weak scaling per step")
    assert "128/256/512 samples" in strong.computed
    assert "at least 7.64 times the assumed bandwidth" in bandwidth.computed
    assert by_claim["M = 44,695,848 bytes"].holds
    assert "9,600 floats" in by_claim["DDP also communicates model buffers"].computed
    text = by_claim["the text says 22.66, 18.05, 19.4, 19.6 s for batch 32, 128, 512, 2048"]
    assert text.computed == "its own log and table give batch 32: 22.78 s, batch 2048: 19.7 s"
    assert by_claim["linear scaling: learning rate 0.1 becomes 6.4"].holds

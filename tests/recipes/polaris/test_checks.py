"""The polaris assignment's claims, to the digit of its description."""

from __future__ import annotations

import pytest

from scalelab.launch.ranks.placement import format_mask
from scalelab.recipes.polaris import published
from scalelab.recipes.polaris.published import (
    count_sample_bytes,
    count_static_bytes,
    find_bus_bandwidth,
    find_fetch_seconds,
    make_checks,
    make_model,
    take_remainders,
)


def find_checks(row: str) -> dict[str, bool]:
    return {check.computed: check.holds for check in make_checks() if check.id == row}


def test_the_model_has_its_published_parameters() -> None:
    assert make_model(512).count_parameters() == 44_140_544


@pytest.mark.parametrize(("d_model", "millions"), [(1024, "126.0"), (4096, "1,409.9")])
def test_the_scaled_up_models_have_their_published_parameters(d_model: int, millions: str) -> None:
    assert f"{make_model(d_model).count_parameters() / 1e6:,.1f}" == millions


@pytest.mark.parametrize(("dtype", "gibibytes"), [("bfloat16", "13.1"), ("float32", "26.3")])
def test_what_the_largest_model_holds_besides_activations(dtype: str, gibibytes: str) -> None:
    assert f"{count_static_bytes(4096, dtype) / 2**30:.1f}" == gibibytes


@pytest.mark.parametrize(("seconds", "gigabytes"), [(0.67721, "0.52"), (6.97e-3, "50.7")])
def test_bus_bandwidth_of_two_profiled_steps(seconds: float, gigabytes: str) -> None:
    found = find_bus_bandwidth(seconds) / 1e9
    assert f"{found:.{len(gigabytes.partition('.')[2])}f}" == gigabytes


def test_the_links_explain_24_of_97_times() -> None:
    words = " ".join(find_checks("P4"))
    assert "97 times" in words
    assert "Per call it is 70×, links differ 24× (600 and 25 GB/s): the other 2.9× is waiting" in words
    assert "0.52 GB/s" in words
    assert "50.7 GB/s" in words
    assert "22 calls between nodes, 16 inside one" in words
    assert list(find_checks("P4").values()) == [True, False, False]


def test_a_compressed_sample_takes_milliseconds_where_all_at_once_cost_nothing() -> None:
    assert count_sample_bytes() == 21 * 512 * 4
    assert find_fetch_seconds() == pytest.approx((59.90 - 2.89) / 2560)
    assert list(find_checks("P6").values()) == [False, True]


def test_bfloat16_used_less_memory_but_not_half() -> None:
    ((words, holds),) = find_checks("P7").items()
    assert holds
    assert "10% at length 50, 20% at length 100" in words
    assert "from 0.88 to 0.44 GB" in words


def test_the_peak_did_not_grow_with_the_square_of_the_dimension() -> None:
    checks = [check for check in make_checks() if check.id == "P8"]
    assert [check.holds for check in checks] == [False, None, False, False]
    assert checks[0].claim.startswith("3.9 times the peak")
    assert "parameters grow 11.2×" in checks[0].computed
    assert "take 14.1 GB; the other 1.7 GB" in checks[1].computed, "neither given nor refuted"


def test_float32_fits_on_the_cards_and_the_number_of_samples_does_not_matter() -> None:
    checks = [check for check in make_checks() if check.id == "P8"]
    assert "28.2 GB without activations" in checks[2].computed
    assert "40 GB" in checks[2].computed
    assert "however many samples there are" in checks[3].computed


def test_a_remainder_is_no_local_rank_where_nodes_are_uneven() -> None:
    assert take_remainders([[0, 1, 2, 3], [4, 5, 6, 7]], 4) == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert take_remainders([[0, 1, 2], [3, 4, 5, 6]], 4)[1] == [3, 0, 1, 2]
    assert take_remainders([[0, 2, 4, 6]], 4) == [[0, 2, 0, 2]]
    assert list(find_checks("P2").values()) == [False]


def test_published_masks_name_the_published_cores() -> None:
    """As the report lists them: cores 0-1, 8-9, 16-17 and 24-25."""
    assert published.MASKS == (0x3, 0x300, 0x30000, 0x3000000)
    cores = [[core for core in range(64) if mask >> core & 1] for mask in published.MASKS]
    assert cores == [[0, 1], [8, 9], [16, 17], [24, 25]]
    assert [format_mask(own) for own in cores] == [published.PRINTED["P2"][f"mask_{rank}"].text for rank in range(4)]

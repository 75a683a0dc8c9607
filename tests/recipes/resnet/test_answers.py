"""The answers of the resnet assignment follow the numbers, whichever way these turn out."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_location
from scalelab.recipes.evidence import (
    UNTOLD,
    Compared,
    compare_estimates,
    compare_independent,
    make_beside_table,
)
from scalelab.recipes.resnet.epochs import explain_crowd, judge_more_devices, list_shared
from scalelab.recipes.resnet.learning import (
    BESIDE,
    answer_learning,
    compare_seeds,
    compare_warmup,
    describe_training,
    explain_lag,
    explain_test,
    name_chance,
)
from scalelab.recipes.resnet.messages import judge_accuracy, judge_statistics, print_megabytes
from scalelab.recipes.resnet.rows import (
    FLAT,
    GROWS,
    explain_end,
    explain_floor,
    judge_flat,
    judge_growth,
    say_seconds,
)
from scalelab.recipes.resnet.training import TimedEpoch, make_timed_table
from scalelab.studies.large_batch.answer import SCALED, WARMED
from scalelab.studies.shared.arms import Arm


@pytest.mark.parametrize(
    ("low", "value", "high", "words"),
    [
        (1.2, 1.3, 1.4, "Throughput grows"),
        (0.97, 1.0, 1.03, "Throughput stays the same"),
        (0.7, 0.8, 0.9, "Throughput falls"),
        (0.62, 0.81, 0.99, "Throughput is flat or falls"),
        (0.96, 1.1, 1.3, "Throughput is flat or grows"),
        (0.5, 1.0, 1.5, UNTOLD),
    ],
)
def test_throughput_is_judged_by_the_ends_of_its_interval(low: float, value: float, high: float, words: str) -> None:
    assert judge_growth(Estimate(value=value, low=low, high=high)) == words


def test_the_reason_for_a_flat_end_is_not_given_where_throughput_still_grows() -> None:
    assert explain_end(Estimate(value=1.3, low=1.2, high=1.4)).endswith("that is not reached here.")
    assert "gains nothing more" in explain_end(Estimate(value=0.8, low=0.7, high=0.9))


def test_accuracy_decides_on_batch_norm_and_else_the_statistics_of_ranks() -> None:
    assert judge_accuracy(Estimate(value=0.05, low=0.02, high=0.08)).startswith("No")
    assert judge_accuracy(Estimate(value=0.0, low=-0.005, high=0.005)).startswith("Yes")
    assert judge_accuracy(Estimate(value=-0.02, low=-0.6, high=0.6)) == ""
    assert judge_statistics(0.016).startswith("Yes")
    assert judge_statistics(0.2).startswith("No")


def test_a_test_accuracy_below_that_of_training_is_explained_by_unfinished_averages() -> None:
    trained, tested = Estimate(value=0.29), {"large": ("large", Estimate(value=0.11))}
    assert "after 10 updates still consist to 35 % of their initial values (0.9^10)" in explain_test(
        trained, tested, {"large": 10}
    )
    assert not explain_test(trained, tested, {"large": 225})
    assert not explain_test(Estimate(value=0.1), tested, {"large": 10})


def test_a_remedy_that_helps_training_only_is_explained_by_averages_that_lag() -> None:
    trained, tested = (
        {SCALED: ("scaled", Estimate(value=value, low=value - 0.1, high=value + 0.1))} for value in (0.86, 0.2)
    )
    gains = {SCALED: Estimate(value=0.5, low=0.4, high=0.6)}
    words = explain_lag(trained, tested, {"large": 30}, gains)
    assert "with linear scaling, presumably" in words
    assert words.endswith("this was not tested.")
    assert "over about the last 10 of 30 updates" in words
    assert "over about all 10 updates" in explain_lag(trained, tested, {"large": 10}, gains)
    assert not explain_lag(trained, tested, {"large": 225}, gains)
    assert not explain_lag(trained, trained, {"large": 30}, gains)
    assert not explain_lag(trained, tested, {"large": 30}, {SCALED: Estimate(value=-0.5, low=-0.6, high=-0.4)})


@pytest.mark.parametrize(
    ("low", "value", "high", "is_chance"),
    [(0.06, 0.11, 0.16, True), (0.1013, 0.1014, 0.1015, True), (0.2, 0.29, 0.4, False)],
)
def test_an_accuracy_that_is_chance_is_called_so(low: float, value: float, high: float, is_chance: bool) -> None:
    assert bool(name_chance(Estimate(value=value, low=low, high=high))) is is_chance


def test_training_accuracy_comes_first() -> None:
    trained = {"small": ("small", Estimate(value=0.937)), "large": ("large", Estimate(value=0.293))}
    (words,) = describe_training(trained)
    assert words.startswith("Training accuracy in the last epoch is 29.30 % with the large batch and 93.70 % with the")
    assert not list(describe_training({"large": trained["large"]}))


@pytest.mark.parametrize(
    ("lows", "words"),
    [
        ((1.2, 1.5), "a speedup at every batch"),
        ((0.9, 1.5), "a speedup at some batches only"),
        ((0.8, 0.9), "no speedup is shown"),
    ],
)
def test_more_devices_are_judged_at_all_batches(lows: tuple[float, ...], words: str) -> None:
    assert judge_more_devices([Estimate(value=low + 0.1, low=low, high=low + 0.2) for low in lows]) == words


def test_an_epoch_is_timed_per_image() -> None:
    epoch = TimedEpoch("2 devices, batch 8", 1.28, 1280, "16.164 s")
    assert epoch.image_seconds == pytest.approx(0.001)
    table = make_timed_table([epoch], "Epoch 2")
    assert table is not None
    assert [column.key for column in table.columns] == ["what", "ours", "images", "image_seconds", "published"]
    assert make_timed_table([TimedEpoch("2 devices", None, None, "16.164 s")], "Epoch 2") is None


@dataclass(frozen=True)
class CrowdedTrial:
    num_ranks: int = 4
    is_oversubscribed: bool = True
    batch_per_rank: int = 8


@dataclass(frozen=True)
class CrowdedArm:
    """Four ranks that share two cores."""

    trial: CrowdedTrial = CrowdedTrial()

    @property
    def completed(self) -> list[Any]:
        return [SimpleNamespace(ranks=[SimpleNamespace(host="here", cores=(rank % 2,)) for rank in range(4)])]


def test_ranks_that_share_cores_are_the_reason_and_give_a_floor() -> None:
    crowded = cast(Arm, CrowdedArm())
    alone = cast(Arm, CrowdedArm(CrowdedTrial(is_oversubscribed=False)))
    assert explain_crowd([crowded]) == ", because 4 ranks share 2 cores, which 2 ranks already keep busy"
    assert not explain_crowd([alone])
    assert list_shared([(32, alone, crowded), (32, alone, alone)], "1 → ") == {
        "1 → 4 devices sharing cores, batch 8 (for 32)"
    }
    (floor,) = explain_floor([crowded])
    assert "4 ranks on 2 cores give at least 50 % without any" in floor
    assert not list(explain_floor([alone]))


def test_a_remedy_is_judged_seed_by_seed() -> None:
    """Seeds differ by 40 points, and a remedy adds 9 to 11 to each: accuracies overlap, their differences do not."""
    large = {1: 0.2, 2: 0.4, 3: 0.6}
    found = {"large": ("large", large), SCALED: ("scaled", {seed: 0.1 + value for seed, value in large.items()})}
    found[SCALED][1][3] += 0.01
    gains = compare_seeds(found)
    assert gains[SCALED].value == pytest.approx(0.1, abs=0.01)
    answer = answer_learning(
        {name: (label, estimate_location(list(seeds.values()))) for name, (label, seeds) in found.items()}
        | {"small": ("small", Estimate(value=0.9))},
        {"small": 225, "large": 30},
        gains=gains,
    )["remedies"]
    assert re.search(r"linear scaling 50 ", answer)
    assert "points: helps)" in answer
    assert "Warm-up against" not in answer, "it was not measured"
    assert "Why not" not in answer


def test_warm_up_is_compared_with_scaling_alone() -> None:
    """Both help by 30 points or more, and warm-up 10 points less than scaling alone."""
    large = {1: 0.2, 2: 0.25, 3: 0.3}
    found = {"large": ("large", large)} | {
        name: (name, {seed: value + more for seed, value in large.items()})
        for name, more in ((SCALED, 0.4), (WARMED, 0.3))
    }
    gains = compare_seeds(found)
    assert all(gains[name].low is not None and gains[name].value > 0.25 for name in (SCALED, WARMED))
    assert compare_warmup(gains[BESIDE]) == (
        " Warm-up against scaling alone: −10.0 ± 0.0 points, so it costs accuracy here."
    )
    assert compare_warmup(Estimate(value=-0.08, low=-0.2, high=0.04)).endswith("so no difference is resolved.")


def test_a_wide_interval_around_chance_is_not_called_chance() -> None:
    assert name_chance(Estimate(value=0.19, low=0.0, high=0.51)) == ""


def test_ratios_of_two_studies_differ_where_their_arms_add_up_to_less() -> None:
    one, other = (Estimate(value=value, low=value / 1.1, high=value * 1.1) for value in (1.17, 1.0))
    assert compare_estimates(one, other) == 0
    assert compare_independent(one, other) == 1
    assert compare_independent(other, one) == -1
    assert compare_independent(replace(one, value=1.1), other) == 0


def test_times_of_an_epoch_are_all_in_seconds() -> None:
    assert say_seconds(Estimate(value=0.906, low=0.48, high=1.332)) == "0.91 ± 0.43"
    assert say_seconds(Estimate(value=2.0, low=0.958, high=48.3)) == "2.00 (0.96 to 48.30)"


def test_lines_that_are_unlike_the_published_ones_are_not_divided_by_them() -> None:
    lines = [Compared("alike", 1.0, 2.0), Compared("unlike", 1.0, 2.0)]
    table = make_beside_table("ratio", lines, title="both", size="small", unlike={"unlike"})
    assert table is not None
    assert [row[-1].value for row in table.rows] == [0.5, None]
    table = make_beside_table("ratio", lines[1:], title="none", size="small", unlike={"unlike"})
    assert table is not None
    assert table.columns[-1].key == "published"


def test_where_throughput_flattens_is_said_first() -> None:
    flat, falls, _ = FLAT
    assert judge_flat([GROWS, flat], (8, 32, 128)) == "Yes, from batch 32 on."
    assert judge_flat([GROWS, flat, falls], (8, 32, 128, 512)) == "Yes, from batch 32 on, up to 128; then it rises."
    assert judge_flat([GROWS, falls], (8, 32, 128)) == "No, it falls up to batch 32 and then rises again."
    assert judge_flat([GROWS, flat, GROWS], (8, 32, 128, 512)) == "No, not up to batch 512."
    assert judge_flat([GROWS, "Throughput is flat or grows"], (8, 32, 128)) == f"{UNTOLD}."
    assert judge_flat([GROWS, UNTOLD], (8, 32, 128)) == "", "the verdict itself says so"


@pytest.mark.parametrize(("rate", "words"), [(19.2e6, "19"), (9.74e6, "9.7"), (362e6, "362"), (2.1e9, "2,100")])
def test_a_bandwidth_is_never_a_power_of_ten(rate: float, words: str) -> None:
    assert print_megabytes(rate) == words

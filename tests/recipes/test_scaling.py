"""The scaling assignment's one claim: bytes and operations grow alike."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from scalelab.analysis.estimate import Estimate
from scalelab.recipes.evidence import UNTOLD, compare_estimates, divide_speedups, divide_steps, say_wide
from scalelab.recipes.recipe import Outcome
from scalelab.recipes.scaling.comparisons import compare_computing, is_loss, judge_sizes
from scalelab.recipes.scaling.delays import (
    compare_cost,
    describe_curve,
    describe_model,
    explain_excess,
    relate_to_law,
)
from scalelab.recipes.scaling.limits import find_threshold, judge_losses
from scalelab.recipes.scaling.questions import describe_disturbed, explain_rest
from scalelab.recipes.scaling.rows import count_bytes, count_operations, make_checks
from scalelab.studies.shared.arms import Arm
from scalelab.units import choose_unit
from scalelab.workloads.catalogue import MlpOptions


@pytest.mark.parametrize(("dim", "depth"), [(1024, 2), (8192, 8), (8192, 6)])
def test_bytes_and_operations_are_both_proportional_to_parameters(dim: int, depth: int) -> None:
    options = MlpOptions(dim=dim, depth=depth)
    weights = dim * dim * depth
    assert count_bytes(options) == 4 * (weights + dim * depth)
    assert count_operations(options) == 6 * weights * 64


def test_a_larger_model_is_not_more_compute_by_itself() -> None:
    (check,) = make_checks()
    assert check.holds is None
    assert check.id == "S3"
    assert "4P" in check.computed
    assert "6PB" in check.computed


def play_arm(steps: Sequence[float]) -> Arm:
    """A launch of one step for each."""
    return cast(Arm, SimpleNamespace(clean=[[step] for step in steps]))


def around(value: float, width: float = 0.01) -> Estimate:
    return Estimate(value=value, low=value - width, high=value + width)


@pytest.mark.parametrize(
    ("change", "apart", "words"),
    [
        (0.4, 0.1, "does not degrade, it rises, and non-linearly: steep at first, flatter later"),
        (0.4, -0.1, "does not degrade, it rises, and non-linearly: flat at first, steeper later"),
        (-0.4, -0.1, "It degrades, and non-linearly: steep at first, flatter later"),
        (-0.4, 0.1, "It degrades, and non-linearly: flat at first, steeper later"),
        (-0.4, 0.001, "It degrades; whether linearly, this run does not show"),
        (0.001, 0.1, UNTOLD),
    ],
)
def test_a_curve_is_named_by_its_direction_and_its_bend(change: float, apart: float, words: str) -> None:
    assert words in describe_curve(around(change), around(apart))


@pytest.mark.parametrize(
    ("gains", "words"),
    [
        ({2: (1.2, 0.3), 4: (1.5, 0.1)}, "In the large one: clear on 4 ranks; not resolved on 2 ranks."),
        ({2: (0.5, 0.1), 4: (0.6, 0.1)}, "In the small one: clear on 2 and 4 ranks."),
        ({2: (0.5, 0.1), 4: (1.5, 0.1)}, "In the large one: clear on 4 ranks. In the small one: clear on 2 ranks."),
        ({2: (1.0, 0.01)}, "In neither: clear on 2 ranks."),
        ({2: (1.1, 0.2)}, f"{UNTOLD}, as the intervals include no difference; by the estimates, in the large one."),
        ({2: (1.1, 0.2), 4: (0.9, 0.2)}, f"{UNTOLD}, as the intervals include no difference."),
    ],
)
def test_the_model_that_gains_more_is_named_for_every_number_of_ranks(
    gains: dict[int, tuple[float, float]], words: str
) -> None:
    assert judge_sizes({ranks: around(*gain) for ranks, gain in gains.items()}) == words


def test_what_only_ranks_that_share_cores_show_is_said_to_be_theirs() -> None:
    gains: dict[int, Estimate | None] = {2: around(1.2, 0.3), 4: around(1.5, 0.1)}
    assert "clear only on 4 ranks, which share cores; not resolved on 2 ranks" in judge_sizes(gains, [4])
    assert "share cores" not in judge_sizes(gains | {2: around(1.5, 0.1)}, [4])


def test_speedups_of_the_same_rounds_compare_where_their_intervals_overlap() -> None:
    """Rounds differ by half, and all four arms with them: each speedup is wide, their ratio is not."""
    plain, spread = [1.0, 1.5, 2.0, 1.2, 1.7, 1.4], [0.8, 1.0, 0.7, 1.1, 0.9, 1.2]
    slow, fast = (play_arm([one * rank for one, rank in zip(plain, spread, strict=True)]), play_arm(plain))
    more = play_arm([one / 1.3 for one in plain])
    usual, better = (divide_steps(slow, arm) for arm in (fast, more))
    assert usual is not None
    assert better is not None
    assert compare_estimates(better, usual) == 0
    found = divide_speedups((slow, more), (slow, fast))
    assert found is not None
    assert found.value == pytest.approx(1.3)
    assert found.low == pytest.approx(1.3)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Estimate(value=2e-3, low=1e-3, high=12e-3), "2 (1 to 12) ms"),
        (Estimate(value=2e-3, low=-1e-3, high=5e-3), "2.0 (0.0 to 5.0) ms"),
        (Estimate(value=2e-3, low=1e-3, high=3e-3), "2.0 ± 1.0 ms"),
        (Estimate(value=-2e-3, low=-3e-3, high=1e-3), "unknown"),
    ],
)
def test_an_answer_has_its_number_however_wide_its_interval(value: Estimate, words: str) -> None:
    assert say_wide("seconds", value) == words


def play_ranks(num_ranks: int, steps: Sequence[float], alone: Sequence[float] = (), *, is_crowded: bool = False) -> Arm:
    """Launches of one step on so many ranks, and of one without the all-reduce."""
    trial = SimpleNamespace(
        num_ranks=num_ranks,
        batch_per_rank=32,
        is_oversubscribed=is_crowded,
        workload="mlp",
        options={"dim": 128, "depth": 2},
    )
    rounds = {"clean": [[step] for step in steps], "comm_free": [[step] for step in alone]}
    return cast(Arm, SimpleNamespace(trial=trial, **rounds))


def test_computing_that_is_not_shared_is_told_from_communication() -> None:
    one, wholly = play_ranks(1, [4.0, 4.1, 3.9, 4.0]), play_ranks(2, [3.0, 3.0, 3.1, 3.0], [2.0, 2.0, 2.0, 1.9])
    shared = compare_computing([(one, wholly)])
    assert shared.endswith(" of one rank's, 0.50 if all were shared.")
    unshared = compare_computing([(one, play_ranks(2, [5.0, 5.0, 5.1, 5.0], [4.0, 4.0, 4.1, 3.9]))])
    assert "0.50 if all were shared: compute is not shared in full" in unshared
    assert compare_computing([(one, play_ranks(2, [3.0, 3.0]))]) == "", "steps without communication were not measured"


def test_a_threshold_follows_from_fixed_and_growing_costs_of_computing() -> None:
    """64 samples take 1.5 and 32 take 1, so F = 0.5: an all-reduce of 3 is 0.5 + 2.5, which 160 samples take."""
    one, sending = play_ranks(1, [1.5] * 4), play_ranks(2, [4.0, 4.0, 4.04, 4.0], [1.0, 1.0, 1.0, 1.01])
    words = find_threshold([(one, sending)])
    assert words.startswith("When r, a step's exposed all-reduce over its computing, exceeds 1. mlp 128×2: r = 3.00 (")
    assert "on 2 ranks, so communication is the bottleneck." in words
    assert "Extrapolated, communication is the bottleneck below 160 (" in words
    assert "samples per rank for mlp 128×2 on 2 ranks (here 32)." in words
    assert "r is 1 at" not in words, "more ranks than these are beyond it too"


def test_a_threshold_in_ranks_takes_the_longer_all_reduce_and_the_smaller_batch() -> None:
    """F = 2, c·64 = 4, and 6·(N − 1)/N to all-reduce: 16 samples, or 2.5 ranks, as 3.6 = 2 + 4/2.5."""
    one, computing = play_ranks(1, [6.0] * 4), [4.0, 4.0, 4.0, 4.01]
    fair, crowded = (play_ranks(n, [7.0, 7.0, 7.04, 7.0], computing, is_crowded=n == 4) for n in (2, 4))
    words = find_threshold([(one, fair), (one, crowded)])
    assert "on 4 ranks, so computing is the bottleneck." in words
    assert "the bottleneck below 16 (" in words
    assert "so r there does not compare with r on fewer" in words
    assert "F, as a share of one rank's step, is 33 % for mlp 128×2." in words
    assert "r is 1 at 2.5 (2.5 to 2.5) ranks for mlp 128×2 (extrapolated" in words
    shared = find_threshold([(one, play_ranks(2, [5.0, 5.0, 5.04, 5.0], computing, is_crowded=True))])
    assert "samples per rank" not in shared, "cores that ranks share are not those that more ranks would have"


def test_an_all_reduce_shorter_than_the_fixed_cost_is_no_bottleneck_at_any_batch() -> None:
    """F = 2 of 6, and an all-reduce of 1."""
    one, spread = play_ranks(1, [6.0] * 4), play_ranks(2, [5.0, 5.0, 5.04, 5.0], [4.0, 4.0, 4.0, 4.01])
    words = find_threshold([(one, spread)])
    assert "the bottleneck at no batch for mlp 128×2 on 2 ranks (here 32)" in words
    assert "the all-reduce of mlp 128×2 takes less than F, so no batch is too small" in words
    assert "r is 1 at" not in words, "more ranks than samples"


def test_no_limit_is_extrapolated_where_a_share_of_the_batch_takes_as_long_as_all_of_it() -> None:
    one, spread = play_ranks(1, [4.0, 4.2, 3.9, 4.1]), play_ranks(2, [8.0, 8.1, 7.9, 8.2], [4.1, 3.9, 4.0, 4.2])
    words = find_threshold([(one, spread)])
    assert "this run does not show which is the bottleneck, as r may be 1." in words
    assert "No limit for mlp 128×2: a rank's share of the batch did not clearly take less time than all of it." in words
    assert "Extrapolated" not in words


def test_a_plain_loop_slower_than_ddp_on_one_rank_is_called_noise() -> None:
    plain, own, spread = play_ranks(1, [2.0] * 4), play_ranks(1, [1.0, 1.01, 0.99, 1.0]), play_ranks(2, [2.0] * 4)
    own.__dict__["label"] = "ddp × 1"
    words = describe_disturbed(plain, own, [spread])
    assert words.startswith("ddp × 1 ran 2.00")
    assert "Over ddp × 1, efficiency is 25" in words
    assert describe_disturbed(own, plain, [spread]) == "", "as it should be"


def play_delays(hidden: float = 0.0, *, is_crowded: bool = False) -> dict[tuple[int, float], Arm]:
    """Steps of 2 on one rank and 1.5 on two, and with a delay of 10, part of which two ranks hide."""
    one, two = [2.0, 2.1, 1.9, 2.0], [1.5, 1.6, 1.4, 1.5]
    steps = {(1, 0.0): one, (1, 10.0): [step + 10 for step in one], (2, 0.0): two}
    steps[2, 10.0] = [step + 10 - hidden for step in two]
    arms = {key: play_ranks(key[0], found, is_crowded=is_crowded and key[0] > 1) for key, found in steps.items()}
    for arm in arms.values():
        arm.__dict__["step"] = around(arm.clean[0][0])
    return arms


def test_more_than_the_model_is_explained_by_whether_ranks_share_cores() -> None:
    """Of a delay of 10, ranks that hide half of it gain more than the model; those that pay all of it do not."""
    found = {is_crowded: explain_excess(play_delays(5.0, is_crowded=is_crowded)) for is_crowded in (False, True)}
    assert all(words.startswith("More than the model on 2 ranks with 10000 ms: ") for words in found.values())
    assert "share cores" in found[True]
    assert "was not measured" in found[False]
    assert explain_excess(play_delays()) == ""


def test_the_additive_model_is_rejected_only_where_the_measurement_leaves_it() -> None:
    """(2 + 10)/(1.5 + 10) = 1.04."""
    words = describe_model(play_delays(), 2, [0.0, 10.0])
    assert "the speedup is S(d) = (T(1) + d)/(T(N) + d)" in words
    assert "This predicts 1.04 at 10000 ms (1.04 measured)" in words
    assert words.endswith("the measurement does not reject it.")
    assert describe_model(play_delays(5.0), 2, [0.0, 10.0]).endswith("the measurement rejects it at 10000 ms.")


def test_amdahls_law_has_the_delay_as_its_serial_part() -> None:
    """f = 10/12, so S = 1/(10/12 + 1/12) = 12/11 on two ranks, and at most 1.2."""
    words = relate_to_law(play_delays(), 2, [10.0])
    assert words.startswith("Amdahl's law is S = 1/(f + (1 − f)/N)")
    assert "S = 1.09 (at most 1/f = 1.20 on any number of ranks)" in words
    assert "We measured less, because the law" in words


def play_plain(batch: int, steps: Sequence[float]) -> Arm:
    trial = SimpleNamespace(global_batch=batch, strategy="single", num_ranks=1, options={})
    rounds = [[step] for step in steps]
    return cast(Arm, SimpleNamespace(trial=trial, clean=rounds, configuration=f"b{batch}", is_measured=True))


def test_what_is_left_over_is_split_into_the_smaller_batch_and_the_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2 ms beyond half of 4 ms: with half of the batch the plain loop takes 3 of 4 ms, so 1 ms more than half."""
    monkeypatch.setattr("scalelab.recipes.scaling.questions.describe_update", lambda _: "")
    steps = [4e-3, 4.04e-3, 3.96e-3, 4e-3]
    small, whole = play_plain(32, [3 / 4 * step for step in steps]), play_plain(64, steps)
    whole.__dict__["step"] = around(4e-3, 1e-5)
    batches = cast(Outcome, SimpleNamespace(arms={"small": small, "whole": whole}))
    unit = choose_unit("seconds", [4e-3])
    spread = play_ranks(2, steps)
    words = explain_rest(whole, spread, 2.0, unit, None, batches)
    assert "Of what is left over, 1.00 ± 0.00 ms come from work that does not shrink with the batch" in words
    assert "with 32 instead of 64 samples the plain loop still takes 0.750 ± 0.000 of its step, not 0.50: S5B" in words
    assert (
        "and 1.00 ms are not explained by this run (caches and memory that ranks share, and other programs, would"
        " add to them)" in words
    )
    one_rank = play_plain(64, [step + 0.4e-3 for step in steps])
    one_rank.trial.__dict__["strategy"], one_rank.__dict__["label"] = "ddp", "ddp × 1"
    words = explain_rest(whole, spread, 2.0, unit, None, batches, one_rank)
    assert "0.40 ± 0.00 ms come from ddp's own work, as on one rank (ddp × 1 less the plain loop)" in words
    assert "and 0.60 ms are not explained by this run" in words
    assert explain_rest(whole, spread, 0.5, unit, None, batches).startswith("That is no more than comes from work")
    crowded = explain_rest(whole, play_ranks(4, steps, is_crowded=True), 2.0, unit, 2, batches)
    assert "1.00 ms come from missing cores (4 ranks have those of 2: 1/2 − 1/4 of the plain loop)" in crowded
    assert explain_rest(whole, spread, 2.0, unit, None, None).startswith("What is left over is compute")


def test_a_slow_rank_costs_less_than_its_sleep_where_ranks_wait_anyway() -> None:
    cost, waiting = around(18e-3, 1e-3), around(2e-3, 1e-3)
    assert "a rank waits 2.0 ± 1.0 ms per step for the others anyway" in compare_cost(cost, 20e-3, waiting)
    assert compare_cost(cost, 20e-3).endswith("would explain that, and is not measured.")
    assert "consistent with 20 ms" in compare_cost(around(20e-3, 1e-3), 20e-3, waiting)


def test_ranks_that_lose_are_named_beside_those_that_gain() -> None:
    slow, even, fast = ([4.0, 4.1, 4.0, 3.9], [2.0, 2.05, 2.0, 1.95], [1.0, 1.02, 1.0, 0.98])
    found = {
        batch: (play_plain(batch, plain), play_ranks(2, spread))
        for batch, plain, spread in ((32, fast, even), (64, slow, even))
    }
    assert judge_losses(found) == ", but 2 ranks are slower than the plain loop at batch 32, and faster at 64"
    assert judge_losses({32: found[32]}).endswith("at every one of these batches")
    assert judge_losses({64: found[64]}) == ""


def test_a_loss_is_one_in_every_model() -> None:
    assert is_loss([around(0.7), around(0.3)])
    assert not is_loss([around(0.7), around(1.3)])
    assert not is_loss([around(0.7), around(0.95, 0.2)]), "it may be none"
    assert not is_loss([around(0.7), None])

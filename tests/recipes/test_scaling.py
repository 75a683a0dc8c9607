"""The scaling assignment's one claim: bytes and operations grow alike."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from scalelab.analysis.estimate import Estimate
from scalelab.recipes.evidence import UNTOLD, compare_estimates, divide_speedups, divide_steps, say_wide
from scalelab.recipes.scaling.challenge import describe_curve, explain_excess
from scalelab.recipes.scaling.rows import count_bytes, count_operations, make_checks
from scalelab.recipes.scaling.sizes import compare_computing, describe_balance, judge_sizes
from scalelab.studies.shared.arms import Arm
from scalelab.workloads.options import MlpOptions


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
        (0.4, 0.1, "does not degrade, it rises, and non-linearly: fast at first and then ever more slowly"),
        (0.4, -0.1, "does not degrade, it rises, and non-linearly: slowly at first and then ever faster"),
        (-0.4, -0.1, "It degrades, and non-linearly: fast at first and then ever more slowly"),
        (-0.4, 0.1, "It degrades, and non-linearly: slowly at first and then ever faster"),
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
        (Estimate(value=2e-3, low=1e-3, high=12e-3), "2.00 ms (1.00 ms to 12.0 ms)"),
        (Estimate(value=2e-3, low=-1e-3, high=5e-3), "2.00 ms (0 s to 5.00 ms)"),
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


def test_a_bottleneck_has_the_share_of_its_step_that_its_ratio_gives() -> None:
    words = describe_balance(play_ranks(2, [4.0, 4.0, 4.04, 4.0], [1.0, 1.0, 1.0, 1.01]))
    assert "exposed communication over computing is 3.0" in words
    assert "communication is the bottleneck, 75.00 % (" in words
    assert words.endswith(" of the step.")


def test_more_than_the_law_is_explained_by_whether_ranks_share_cores() -> None:
    """Of a delay of 10, ranks that hide half of it gain more than the law; those that pay all of it do not."""
    steps, hidden = [2.0, 2.1, 1.9, 2.0], [7.0, 7.1, 6.9, 7.0]
    one = {(1, 0.0): play_ranks(1, steps), (1, 10.0): play_ranks(1, [step + 10 for step in steps])}
    found = {
        is_crowded: explain_excess(
            one | {(2, 0.0): play_ranks(2, steps), (2, 10.0): play_ranks(2, hidden, is_crowded=is_crowded)}
        )
        for is_crowded in (False, True)
    }
    assert all(words.startswith("More than the law at 2 ranks with 10000 ms: ") for words in found.values())
    assert "share cores" in found[True]
    assert "not measured" in found[False]
    assert explain_excess(one | {(2, 0.0): one[1, 0.0], (2, 10.0): play_ranks(2, [12.0, 12.1, 11.9, 12.0])}) == ""

"""Where communication and fixed costs stop to matter: question 3 of task 3, and task 5B of the scaling assignment.

Task 3's limit follows from a model of a step, `BalanceModel`, and two numbers of ranks; task 5B's from the fit over
batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import communication_by_ablation
from scalelab.analysis.stats import Verdict, estimate_ratio, judge
from scalelab.recipes.evidence import (
    UNTOLD,
    count_parameters,
    divide_speedups,
    divide_steps,
    find_arm,
    list_arms,
    list_findings,
    list_spread,
    quote,
    say_wide,
)
from scalelab.recipes.recipe import Outcome
from scalelab.recipes.scaling.questions import (
    Answers,
    name_ranks,
)
from scalelab.records.trial import Option
from scalelab.studies.batch_scaling import DOUBLING, LARGE_GAIN
from scalelab.studies.batch_size import SATURATION, STEP_COST
from scalelab.studies.shared.arms import Arm, join_words
from scalelab.units import format_interval, format_share, is_known
from scalelab.workloads.catalogue import make_options

FIXED_COSTS = (2 - LARGE_GAIN) / (2 * LARGE_GAIN - 2)
"""c·b over F from which doubling b gains less than that: 2·(F + c·b)/(F + 2·c·b)."""


def join_ranks(ranks: Sequence[int]) -> str:
    """`2 and 4 ranks`."""
    return f"{' and '.join(map(str, ranks))} ranks"


@dataclass(frozen=True, kw_only=True)
class BalanceModel:
    """What a step takes, in steps of one rank: F + c·b to compute b samples, a·(N − 1)/N for a ring all-reduce.

    The ring is of Patarasuk and Yuan (2009). F and c follow from one rank with the whole batch B and n ranks with B/n
    each, without the all-reduce; a from r on these n ranks.
    """

    batch: int
    num_ranks: int
    kept: float
    """Of one rank's step, what n ranks still compute."""
    balance: Estimate
    """r on n ranks."""

    @property
    def per_batch(self) -> float:
        """c·B: at most the whole step, as where ranks compute in less than 1/n of it."""
        return min(1.0, max(0.0, self.num_ranks * (1 - self.kept) / (self.num_ranks - 1)))

    @property
    def fixed(self) -> float:
        """F."""
        return 1 - self.per_batch

    def find_samples(self, balance: float) -> float:
        """The samples per rank below which the all-reduce among n ranks takes longer; 0: it never does."""
        spare = max(0.0, balance * self.kept - self.fixed)
        return 0.0 if not spare else self.batch * spare / self.per_batch if self.per_batch > 0 else math.inf

    def find_sending(self, balance: float) -> float:
        """a."""
        return balance * self.kept * self.num_ranks / (self.num_ranks - 1)

    def find_ranks(self, balance: float) -> float:
        """The ranks that share B at which both take as long; infinite where the all-reduce never does."""
        sending = self.find_sending(balance)
        return (self.per_batch + sending) / (sending - self.fixed) if sending > self.fixed else math.inf


def make_model(one: Arm, arm: Arm, balance: Estimate) -> BalanceModel:
    kept = estimate_ratio(arm.comm_free, one.clean).value
    batch, ranks = arm.trial.batch_per_rank * arm.trial.num_ranks, arm.trial.num_ranks
    return BalanceModel(batch=batch, num_ranks=ranks, kept=kept, balance=balance)


def find_threshold(pairs: Sequence[tuple[Arm, Arm]]) -> str:
    """Where the exposed all-reduce of a step takes as long as its computing, for one rank and several of each model."""
    known = [(one, arm, ratio) for one, arm in pairs if (ratio := measure_balance(arm)) is not None]
    found = [(one, arm, ratio) for one, arm, ratio in known if ratio.low is not None]
    rule = "When r, a step's exposed all-reduce over its computing, exceeds 1"
    if not found:
        return f"{rule}. {UNTOLD}, as r has no interval."
    cases = [(arm, ratio) for _, arm, ratio in found]
    own = [(one, arm, ratio) for one, arm, ratio in found if not arm.trial.is_oversubscribed]
    fair = [(arm, make_model(one, arm, ratio)) for one, arm, ratio in own if is_fitted(one, arm, ratio)]
    unfitted = [name(arm) for one, arm, ratio in own if not is_fitted(one, arm, ratio)]
    return join_words(
        f"{rule}.",
        *judge_balances(cases),
        describe_samples(fair),
        f"No limit for {' and '.join(unfitted)}: a rank's share of the batch did not clearly take less time than all of"
        " it."
        if unfitted
        else "",
        name_crowded(cases),
        derive_limits(fair),
    )


def is_fitted(one: Arm, arm: Arm, ratio: Estimate) -> bool:
    """Whether a limit follows: r is above 0, and computing clearly shrinks with the batch of a rank."""
    kept = estimate_ratio(arm.comm_free, one.clean)
    return ratio.is_above(0) and judge(kept) is Verdict.FASTER


def name_case(arm: Arm) -> str:
    return f"{name(arm)} on {name_ranks(arm)}"


def judge_balances(found: Sequence[tuple[Arm, Estimate]]) -> Iterator[str]:
    """`mlp 128×2: r = 7 (4 to 11) on 2 ranks, so communication is the bottleneck.`, model by model."""
    by_model: dict[str, list[tuple[Arm, Estimate]]] = {}
    for arm, ratio in found:
        by_model.setdefault(name(arm), []).append((arm, ratio))
    for model, cases in by_model.items():
        balances = " and ".join(f"{format_interval('ratio', ratio)} on {arm.trial.num_ranks}" for arm, ratio in cases)
        verdicts: dict[str, list[int]] = {}
        for arm, ratio in cases:
            verdicts.setdefault(judge_balance(ratio), []).append(arm.trial.num_ranks)
        if len(verdicts) == 1:
            said = next(iter(verdicts))
        else:
            said = "; ".join(f"on {' and '.join(map(str, own))} {words}" for words, own in verdicts.items())
        yield f"{model}: r = {balances} ranks, so {said}."


def judge_balance(ratio: Estimate) -> str:
    """The bottleneck, by the interval of r."""
    if ratio.is_above(1):
        return "communication is the bottleneck"
    if ratio.is_below(1):
        return "computing is the bottleneck"
    return "this run does not show which is the bottleneck, as r may be 1"


def name_crowded(found: Sequence[tuple[Arm, Estimate]]) -> str:
    """Why r on ranks that share cores does not continue what it is on fewer."""
    crowded = sorted({arm.trial.num_ranks for arm, _ in found if arm.trial.is_oversubscribed})
    if not crowded:
        return ""
    return (
        f"On {join_ranks(crowded)}, which share cores, both parts include waiting for a core, so r there does not"
        " compare"
        " with r on fewer."
    )


def describe_samples(fair: Sequence[tuple[Arm, BalanceModel]]) -> str:
    """The samples per rank at which the two take as long, which were not measured."""
    said = [
        f"{say_limit(model.balance.map(model.find_samples))} for {name_case(arm)} (here"
        f" {model.batch // model.num_ranks})"
        for arm, model in fair
    ]
    return f"Extrapolated, communication is the bottleneck {', '.join(said)}." if said else ""


def say_limit(limit: Estimate) -> str:
    """`below 12 (9 to 15) samples per rank`."""
    if not math.isfinite(limit.value):
        return "at any batch"
    if limit.value > 0:
        return f"below {say_count(limit)} samples per rank"
    return "at no batch" if not limit.high else f"at no batch (at most below {limit.high:.0f} samples per rank)"


def derive_limits(fair: Sequence[tuple[Arm, BalanceModel]]) -> str:
    """How the limit in samples follows from r, and the one in ranks, where computing still takes longer."""
    if not fair:
        return ""
    ranks = " and ".join(map(str, sorted({model.num_ranks for _, model in fair})))
    samples = (
        "The limits are by a model: computing takes F + c·b for b samples per rank (F and c from a step on one rank and"
        f" one on {ranks} without its all-reduce), a ring all-reduce among N ranks a·(N − 1)/N whatever b is."
    )
    shares = ", ".join(f"{format_share(model.fixed)} for {name(arm)}" for arm, model in fair)
    fixed = f"F, as a share of one rank's step, is {shares}"
    never = [name(arm) for arm, model in fair if model.find_samples(model.balance.value) <= 0]
    short = f"; the all-reduce of {' and '.join(never)} takes less than F, so no batch is too small" if never else ""
    limits = [
        f"{say_count(limit)} ranks for {name(arm)}"
        for arm, model in fair
        if model.balance.value < 1 and (limit := model.balance.map(model.find_ranks)).value <= model.batch
    ]
    if not limits:
        return f"{samples} {fixed}{short}."
    return (
        f"{samples} {fixed}{short}. With the global batch B fixed, b = B/N: r is 1 at {', '.join(limits)}"
        " (extrapolated, if every rank has cores of its own)."
    )


def measure_balance(arm: Arm) -> Estimate | None:
    """Exposed communication over computing: a step over one without communication, less 1."""
    return estimate_ratio(arm.clean, arm.comm_free).map(lambda whole: whole - 1) if any(arm.comm_free) else None


def find_share(balance: Estimate) -> Estimate:
    """Of a step, what communication adds to it: r/(1 + r) for exposed communication over computing."""
    return balance.map(lambda ratio: max(0.0, ratio / (1 + ratio)))


def say_count(count: Estimate) -> str:
    """`12 (9 to 15)`; a small number with a decimal."""
    decimals = 0 if count.value >= 10 else 1
    if count.low is None or count.high is None:
        return f"{count.value:.{decimals}f}"
    high = f"to {count.high:.{decimals}f}" if math.isfinite(count.high) else "or more"
    return f"{count.value:.{decimals}f} ({count.low:.{decimals}f} {high})"


def measure_exposed(arm: Arm) -> Estimate | None:
    """The share of a step that communication adds to it; None on one rank."""
    balance = measure_balance(arm) if arm.trial.num_ranks > 1 else None
    return None if balance is None else find_share(balance)


def name(arm: Arm) -> str:
    return make_options(arm.trial.workload, arm.trial.options).label


def answer_batches(outcome: Outcome | None) -> Answers:
    pairs: dict[int, tuple[Arm, Arm]] = {}
    for arm in list_spread(outcome):
        plain = find_arm(outcome, num_ranks=1, global_batch=arm.trial.global_batch)
        if plain is not None:
            pairs[arm.trial.global_batch] = (plain, arm)
    if len(pairs) < 2:
        return {}
    first, last = min(pairs), max(pairs)
    gain = divide_speedups(pairs[last], pairs[first])
    same = "The gradients have the same bytes at every batch while computing grows with it"
    verdict, why = {
        Verdict.SLOWER: ("Yes", f"{same}, so their share of a step should shrink{compare_shares(pairs)}."),
        Verdict.FASTER: ("No, it gets worse", f"{same}: what grows here is not communication."),
        Verdict.NO_DIFFERENCE: ("No, it stays the same", f"{same}: little of it is exposed at any of these batches."),
        Verdict.UNRESOLVED: (
            f"By its bytes and operations it should. {UNTOLD}, as the interval includes no change",
            f"{same}, so a gain is expected where communication is exposed.",
        ),
    }[judge(gain) if gain is not None else Verdict.UNRESOLVED]
    times = f" (the last is {format_interval('ratio', gain)} times the first)" if gain is not None else ""
    listed = ", ".join(
        f"{say_wide('ratio', divide_steps(*pair))} at global batch {batch}" for batch, pair in sorted(pairs.items())
    )
    lost, by_fit = judge_losses(pairs), find_saturation(outcome, pairs[last][1].trial.num_ranks)
    return {
        "improve": f"{verdict}{lost}. Speedup over the plain loop: {listed}{times}. {why}",
        "saturate": join_words(
            *quote(outcome, DOUBLING.name),
            by_fit,
            "It saturates because a step costs F + c·b for b samples per rank, F for kernel launches, the all-reduce"
            " and"
            " the optimizer: throughput b/(F + c·b) is at half its maximum where c·b = F, and a doubling gains less"
            " than"
            f" {LARGE_GAIN:g} times only where c·b is over {FIXED_COSTS:.1f} F.",
            *quote(outcome, STEP_COST.name),
            *(() if by_fit else quote(outcome, SATURATION.name)),
        ),
    }


def find_saturation(outcome: Outcome | None, ranks: int) -> str:
    """The batch from which a doubling gains too little, by the fit; empty where one was measured, or none is known."""
    is_measured = any(one.values.get("global_batch") is not None for one in list_findings(outcome, DOUBLING))
    halves = [one.values.get("half_batch") for one in list_findings(outcome, SATURATION)]
    half = next((found for found in halves if isinstance(found, Estimate)), None)
    if half is None or is_measured:
        return ""
    each, shared = (
        f"{n * FIXED_COSTS * half.value:.0f}{say_ends(half, n * FIXED_COSTS)} {words}"
        for n, words in ((1, "samples per rank"), (ranks, "global"))
    )
    vague = "" if is_known(half) else "; the interval is wider than the number, so this is a rough limit"
    return (
        f"By the fit (extrapolated) it saturates at {each}, {shared}; half of its maximum is at {half.value:.0f} per"
        f" rank ({ranks * half.value:.0f} global){vague}."
    )


def say_ends(estimate: Estimate, factor: float) -> str:
    """` (12 to 15)`; empty without an interval."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f" ({factor * estimate.low:.0f} to {factor * estimate.high:.0f})"


def judge_losses(pairs: Mapping[int, tuple[Arm, Arm]]) -> str:
    """Where ranks gain nothing at all, whatever the trend."""
    found = {batch: judge(ratio) for batch, pair in sorted(pairs.items()) if (ratio := divide_steps(*pair)) is not None}
    slower = [batch for batch, verdict in found.items() if verdict is Verdict.FASTER]
    faster = [batch for batch, verdict in found.items() if verdict is Verdict.SLOWER]
    if not slower:
        return ""
    ranks = next(iter(pairs.values()))[1].trial.num_ranks
    where = "every one of these batches" if len(slower) == len(pairs) else f"batch {', '.join(map(str, slower))}"
    gain = f"faster at {', '.join(map(str, faster))}" if faster else "not clearly faster at any"
    rest = f", and {gain}" if len(slower) < len(pairs) else ""
    return f", but {ranks} ranks are slower than the plain loop at {where}{rest}"


def compare_shares(pairs: Mapping[int, tuple[Arm, Arm]]) -> str:
    """The exposed share of a step at the smallest and at the largest batch; empty where it was not measured."""
    ends = {batch: pairs[batch][1] for batch in (min(pairs), max(pairs))}
    if not all(any(arm.comm_free) for arm in ends.values()):
        return ""
    shares = {batch: communication_by_ablation(arm.clean, arm.comm_free).share for batch, arm in ends.items()}
    listed = ", ".join(f"{say_wide('share', share)} exposed at {batch}" for batch, share in shares.items())
    return f" (measured: {listed})"


def describe_exposed(outcome: Outcome | None) -> Iterator[str]:
    """The share of a step that communication adds to it, of every model on the most ranks that share no cores."""
    found = []
    for arms in list_sizes(outcome):
        fair = [arm for ranks, arm in arms.items() if ranks > 1 and not arm.trial.is_oversubscribed]
        arm = max(fair, key=lambda arm: arm.trial.num_ranks, default=None)
        ratio = measure_balance(arm) if arm is not None else None
        if arm is not None and ratio is not None:
            found.append(f"{format_interval('share', find_share(ratio))} for {name(arm)} on {name_ranks(arm)}")
    if found:
        yield f"Exposed communication, as a share of the step: {', '.join(found)}."


def list_sizes(outcome: Outcome | None) -> list[dict[int, Arm]]:
    """The arms of every model by number of ranks, one rank among them; the smallest model first."""
    found: dict[Option, dict[int, Arm]] = {}
    for arm in list_arms(outcome):
        found.setdefault(arm.trial.options["dim"], {}).setdefault(arm.trial.num_ranks, arm)
    complete = [arms for arms in found.values() if 1 in arms and len(arms) > 1]
    return sorted(complete, key=lambda arms: count_parameters(arms[1]))

"""Task 3 of the scaling assignment: a small and a large model, and where communication outweighs computing.

Where it does follows from a model of a step, `BalanceModel`, and two numbers of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import estimate_centre, scale_exposed
from scalelab.analysis.stats import Verdict, estimate_ratio, judge
from scalelab.recipes.evidence import (
    UNTOLD,
    compare_estimates,
    divide_speedups,
    divide_steps,
    list_arms,
    say_wide,
    scale,
)
from scalelab.recipes.recipe import Outcome
from scalelab.recipes.scaling.questions import (
    BYTES_PER_PARAMETER,
    Answers,
    count_parameters,
    join,
    name_ranks,
)
from scalelab.records.trial import Option
from scalelab.studies.shared.arms import Arm
from scalelab.units import format_bytes, format_interval, format_share
from scalelab.workloads.catalogue import make_options


def answer_sizes(outcome: Outcome | None) -> Answers:
    by_size = list_sizes(outcome)
    if len(by_size) < 2:
        return {}
    small, large = by_size[0], by_size[-1]
    speedups = {
        ranks: (divide_steps(small[1], small[ranks]), divide_steps(large[1], large[ranks]))
        for ranks in sorted(small.keys() & large.keys())
        if ranks > 1
    }
    known = {ranks: (one, other) for ranks, (one, other) in speedups.items() if one is not None and other is not None}
    if not known:
        return {}
    gains = {ranks: divide_speedups((large[1], large[ranks]), (small[1], small[ranks])) for ranks in known}
    listed = "; ".join(
        f"{name_ranks(large[ranks])}: {say_wide('ratio', of_large)} for {name(large[1])}, {say_wide('ratio', of_small)}"
        f" for {name(small[1])}"
        for ranks, (of_small, of_large) in known.items()
    )
    fair = max((ranks for ranks in known if not large[ranks].trial.is_oversubscribed), default=max(known))
    rates = [f"{find_flops(arms[1]) / 1e9:.3g} GFLOP/s ({name(arms[1])})" for arms in (small, large)]
    return {
        "efficient": join(
            judge_sizes(gains, [ranks for ranks in known if large[ranks].trial.is_oversubscribed]),
            f"The small model is {name(small[1])}, the large one {name(large[1])} (width × layers).",
            f"Speedup over one rank, {listed}.",
            "In both models more ranks are slower than one." if all(map(is_loss, speedups.values())) else "",
            describe_gains(gains),
        ),
        "differ": join(
            "Because costs that do not grow with the model (kernel launches, Python, the latency of an all-reduce)"
            " weigh more in a small one.",
            compare_bytes(small[fair], large[fair]),
            *describe_exposed(outcome),
            "Size alone does not decide: with P parameters and batch B, a step computes 6·P·B operations and"
            " all-reduces"
            f" 4·P bytes, the same ratio for both models. But one rank computes at {' and '.join(rates)}.",
            compare_computing([(arms[1], arms[fair]) for arms in (small, large)]),
        ),
        "bottleneck": find_threshold([(arms[1], arms[ranks]) for arms in (small, large) for ranks in known]),
    }


def name_better(outcome: Outcome | None) -> Iterator[str]:
    """For which model DDP is more efficient, for a summary: on the most ranks that share no cores."""
    sizes = list_sizes(outcome)
    shared = [n for n in sizes[0] if n in sizes[-1] and not sizes[-1][n].trial.is_oversubscribed] if sizes else []
    if len(sizes) < 2 or max(shared) == 1:
        return
    ranks, small, large = max(shared), sizes[0], sizes[-1]
    gain = divide_speedups((large[1], large[ranks]), (small[1], small[ranks]))
    words = {
        Verdict.SLOWER: "DDP is more efficient for the larger model",
        Verdict.FASTER: "DDP is more efficient for the smaller model",
        Verdict.NO_DIFFERENCE: "DDP is as efficient for both models",
        Verdict.UNRESOLVED: "This run does not show for which model DDP is more efficient",
    }[judge(gain) if gain is not None else Verdict.UNRESOLVED]
    of_small, of_large = (say_wide("ratio", divide_steps(arms[1], arms[ranks])) for arms in (small, large))
    yield f"{words}: on {ranks} ranks its speedup is {of_large} for {name(large[1])}, {of_small} for {name(small[1])}."


def is_loss(speedups: Sequence[Estimate | None]) -> bool:
    """Whether all of these are clearly below 1."""
    return all(speedup is not None and judge(speedup) is Verdict.FASTER for speedup in speedups)


def compare_bytes(small: Arm, large: Arm) -> str:
    """What a byte of gradients costs in either model: more in the small one where latency is most of it."""
    if not any(small.comm_free) or not any(large.comm_free):
        return ""
    costs = []
    for arm in (small, large):
        num_bytes = BYTES_PER_PARAMETER * count_parameters(arm)
        exposed = scale_exposed(arm.clean, arm.comm_free, estimate_centre(arm.clean).value)
        costs.append((exposed, num_bytes, scale(exposed, 1 / num_bytes) or exposed))
    listed = " and ".join(
        f"{say_wide('seconds', exposed)} for {format_bytes(size)} ({1e9 * each.value:.2g} ns per byte)"
        for exposed, size, each in costs
    )
    (_, _, of_small), (_, _, of_large) = costs
    order, more = compare_estimates(of_small, of_large), of_small.value / of_large.value if of_large.value > 0 else 0.0
    tends = f"by the estimates a byte costs {more:.1f} times as much in the small model, " if more > 1 else ""
    verdict = {
        1: "a byte costs more in the small model, so most of its communication is latency, not bytes",
        0: f"{tends}no difference beyond the intervals",
        -1: "a byte costs more in the large model",
    }[order]
    return f"The all-reduce on {name_ranks(small)} exposes {listed}: {verdict}."


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


def compare_computing(pairs: Sequence[tuple[Arm, Arm]]) -> str:
    """How much of one rank's step remains on several without the all-reduce: 1/N where computing is shared in full."""
    if not all(any(many.comm_free) for _, many in pairs):
        return ""
    share = 1 / pairs[0][1].trial.num_ranks
    left = [estimate_ratio(many.comm_free, one.clean) for one, many in pairs]
    listed = " and ".join(format_interval("ratio", ratio) for ratio in left)
    is_more = all(ratio.low is not None and ratio.low > share for ratio in left)
    cause = ": compute is not shared in full" if is_more else ""
    return f"Without the all-reduce a step takes {listed} of one rank's, {share:.2f} if all were shared{cause}."


def judge_sizes(gains: Mapping[int, Estimate | None], crowded: Collection[int] = ()) -> str:
    """Which model DDP speeds up more, by the large one's speedup over the small one's on every number of ranks.

    What only ranks show that share cores (`crowded`) is said to be theirs.
    """
    words = {
        Verdict.SLOWER: "In the large one",
        Verdict.FASTER: "In the small one",
        Verdict.NO_DIFFERENCE: "In neither",
    }
    verdicts = {ranks: judge(gain) for ranks, gain in gains.items() if gain is not None}
    clear = {verdict: [ranks for ranks, found in verdicts.items() if found is verdict] for verdict in words}
    shared = {True: "clear only on {}, which share cores", False: "clear on {}"}
    said = [
        f"{words[verdict]}: {shared[set(found) <= set(crowded)].format(join_ranks(found))}"
        for verdict, found in clear.items()
        if found
    ]
    open_ranks = [ranks for ranks, found in verdicts.items() if found is Verdict.UNRESOLVED]
    if not said:
        values = [gain.value for gain in gains.values() if gain is not None]
        higher = "large" if min(values) > 1 else "small" if max(values) < 1 else ""
        tends = f"; by the estimates, in the {higher} one" if higher else ""
        return f"{UNTOLD}, as the intervals include no difference{tends}."
    rest = f"; not resolved on {join_ranks(open_ranks)}" if open_ranks else ""
    return f"{'. '.join(said)}{rest}."


def describe_gains(gains: Mapping[int, Estimate | None]) -> str:
    """The speedup of the large model over that of the small one, round by round."""
    listed = ", ".join(
        f"{format_interval('ratio', gain)} on {ranks} ranks" for ranks, gain in gains.items() if gain is not None
    )
    return f"The large model's speedup over the small one's, round by round: {listed}." if listed else ""


def join_ranks(ranks: Sequence[int]) -> str:
    """`2 and 4 ranks`."""
    return f"{' and '.join(map(str, ranks))} ranks"


def find_flops(arm: Arm) -> float:
    """FLOP/s of a step on one rank."""
    options = make_options(arm.trial.workload, arm.trial.options)
    return options.flops_per_sample() * arm.trial.global_batch / estimate_centre(arm.clean).value


def list_sizes(outcome: Outcome | None) -> list[dict[int, Arm]]:
    """The arms of every model by number of ranks, one rank among them; the smallest model first."""
    found: dict[Option, dict[int, Arm]] = {}
    for arm in list_arms(outcome):
        found.setdefault(arm.trial.options["dim"], {}).setdefault(arm.trial.num_ranks, arm)
    complete = [arms for arms in found.values() if 1 in arms and len(arms) > 1]
    return sorted(complete, key=lambda arms: count_parameters(arms[1]))


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
    return join(
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
    return (ratio.low or 0.0) > 0 and judge(kept) is Verdict.FASTER


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
    if (ratio.low or 0.0) > 1:
        return "communication is the bottleneck"
    if ratio.high is not None and ratio.high < 1:
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


def name(arm: Arm) -> str:
    return make_options(arm.trial.workload, arm.trial.options).label

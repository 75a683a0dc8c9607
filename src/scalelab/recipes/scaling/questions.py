"""The eighteen questions of the scaling assignment, each answered with this run's numbers and a reason.

Every function gives the answers of one row, in the order of its questions; nothing where too little was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import Verdict, estimate_difference, estimate_location, estimate_ratio, judge, pair_medians
from scalelab.recipes.evidence import (
    UNTOLD,
    compare_estimates,
    divide_steps,
    find_arm,
    list_arms,
    list_spread,
    quote,
    say_wide,
    scale,
)
from scalelab.recipes.recipe import Outcome
from scalelab.records.strategies import find_strategy
from scalelab.records.trial import Option
from scalelab.studies.batch_scaling import DOUBLING
from scalelab.studies.delay import ADDED, AMDAHL_OVERLAY, format_delay, name_label
from scalelab.studies.model_size import EXPOSED_BY_SIZE
from scalelab.studies.reproducibility import MEAN_ERROR, OTHER_SEED, WARMUP
from scalelab.studies.scaling.answer import AMDAHL, LOSS
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.breakdown import WAITING
from scalelab.studies.shared.losses import LOSSES_EQUAL, find_first_difference, read_losses
from scalelab.studies.straggler import STRAGGLER
from scalelab.studies.strategies.report import EXCESS, UTILIZATION, VARIATION
from scalelab.units import format_bytes, format_interval, format_share, is_known
from scalelab.workloads.catalogue import make_options

BYTES_PER_PARAMETER = 4
Answers = dict[str, str]
"""By the name of the question."""


def answer_timing(outcome: Outcome | None) -> Answers:
    if not list_arms(outcome):
        return {}
    return {
        "warmup": join(
            "Because the first steps also pay what is paid once: memory and thread pools, lazy imports, DDP's buckets"
            " and connections, and on a GPU the CUDA context, kernel loading and autotuning, and clocks that rise.",
            *quote(outcome, WARMUP.name, MEAN_ERROR.name),
            "So they are run and not counted.",
        ),
        "randomness": join(
            "Because two runs must differ in nothing but what is compared. With one seed, weights, data and order are"
            " the same: equal losses prove that both did the same work, and a difference in time has one cause less.",
            *quote(outcome, LOSSES_EQUAL.name, OTHER_SEED.name),
        ),
    }


def answer_strong(outcome: Outcome | None) -> Answers:
    spread = list_spread(outcome)
    plain = choose_reference(outcome, spread)
    if plain is None or not spread:
        return {}
    over = "the plain loop" if find_strategy(plain.trial.strategy).is_plain else plain.trial.strategy
    fair = [arm for arm in spread if not arm.trial.is_oversubscribed]
    excess = {arm.trial.num_ranks: scale(divide_steps(arm, plain), arm.trial.num_ranks) for arm in fair}
    verdicts = {ranks: judge(ratio) for ranks, ratio in excess.items() if ratio is not None}
    below = [ranks for ranks, verdict in verdicts.items() if verdict is Verdict.SLOWER]
    is_resolved = bool(verdicts) and Verdict.UNRESOLVED not in verdicts.values()
    said = "No" if below else "Yes, within the error" if is_resolved else UNTOLD
    listed = "; ".join(
        f"{name_ranks(arm)}: speedup {say_wide('ratio', divide_steps(plain, arm))}, efficiency"
        f" {say_wide('share', scale(divide_steps(plain, arm), 1 / arm.trial.num_ranks))}"
        for arm in spread
    )
    place = "Nowhere significantly." if is_resolved else f"{UNTOLD}: the intervals include the ideal."
    if below:
        first = next(arm for arm in fair if arm.trial.num_ranks == below[0])
        efficiency = scale(divide_steps(plain, first), 1 / below[0])
        place = (
            f"At {below[0]} ranks, from 100 % to {say_wide('share', efficiency)}: the fewest that are significantly"
            " below ideal."
        )
    return {
        "linear": f"{said}. Over {over} on one rank, {listed}.",
        "drop": place,
        "quantitative": join(*quote(outcome, LOSS.name, AMDAHL.name)) or f"{UNTOLD}: the loss is within its interval.",
    }


def choose_reference(outcome: Outcome | None, spread: Sequence[Arm]) -> Arm | None:
    """The plain loop on one rank; where its intervals tell nothing, the strategy itself on one rank if that does."""
    ones = [find_arm(outcome, strategy="single"), find_arm(outcome, strategy="ddp", num_ranks=1)]
    found = [arm for arm in ones if arm is not None]
    telling = [
        arm for arm in found if all((ratio := divide_steps(arm, other)) and is_known(ratio) for other in spread[:1])
    ]
    return next(iter(telling or found), None)


def name_ranks(arm: Arm) -> str:
    """`4 ranks (oversubscribed)`."""
    return f"{arm.trial.num_ranks} ranks{' (oversubscribed)' if arm.trial.is_oversubscribed else ''}"


def answer_sizes(outcome: Outcome | None) -> Answers:
    cases = list_cases(outcome)
    if len(cases) < 2:
        return {}
    (small_one, small_many), (large_one, large_many) = cases[0], cases[-1]
    small, large = divide_steps(small_one, small_many), divide_steps(large_one, large_many)
    if small is None or large is None:
        return {}
    ranks = large_many.trial.num_ranks
    verdict = compare_estimates(large, small)
    which = {1: "In the large one", -1: "In the small one", 0: f"{UNTOLD}, as the intervals overlap"}[verdict]
    rates = [f"{find_flops(arm) / 1e9:.3g} GFLOP/s ({name(arm)})" for arm in (small_one, large_one)]
    differ = f"the speedups above {'do not differ' if verdict == 0 else 'differ'} beyond their intervals"
    return {
        "efficient": f"{which}. Speedup on {ranks} ranks over one: {say_wide('ratio', large)} for {name(large_one)},"
        f" {say_wide('ratio', small)} for {name(small_one)}.",
        "differ": join(
            "A step computes 6·P·B operations and all-reduces 4·P bytes, so per byte both models compute the same, and"
            " size alone does not decide. What does not grow with P can: kernel launches, Python, the latency of every"
            f" bucket; caches hold a small model only. Here, a step on {ranks} ranks takes"
            f" {say_wide('seconds', small_many.step)} and {say_wide('seconds', large_many.step)}, one rank computes at"
            f" {' and '.join(rates)}, and {differ}.",
            *quote(outcome, EXPOSED_BY_SIZE.name),
        ),
        "bottleneck": find_threshold([many for _, many in cases]),
    }


def find_flops(arm: Arm) -> float:
    """FLOP/s of a step on one rank."""
    options = make_options(arm.trial.workload, arm.trial.options)
    return options.flops_per_sample() * arm.trial.global_batch / arm.step.value


def list_cases(outcome: Outcome | None) -> list[tuple[Arm, Arm]]:
    """One rank and the most ranks with cores of their own of every model, the smallest model first."""
    found: dict[Option, list[Arm]] = {}
    for arm in list_arms(outcome):
        if arm.trial.is_oversubscribed:
            continue
        found.setdefault(arm.trial.options["dim"], []).append(arm)
    pairs = []
    for arms in found.values():
        ordered = sorted(arms, key=lambda arm: arm.trial.num_ranks)
        if ordered[0].trial.num_ranks == 1 < ordered[-1].trial.num_ranks:
            pairs.append((ordered[0], ordered[-1]))
    return sorted(pairs, key=lambda pair: count_parameters(pair[0]))


def find_threshold(cases: Sequence[Arm]) -> str:
    """Where the exposed all-reduce of a step takes as long as its computing, from steps with and without it.

    With b samples per rank, computing takes c·b and the all-reduce m·(N − 1)/N (a ring, Patarasu and Yuan 2009), so
    their ratio r is known from one measurement: it is 1 at r·b samples per rank, over a link r times as fast, or, with
    the global batch fixed, at 1 + (N − 1)/r ranks.
    """
    return join(
        "When the all-reduce of a step takes longer than its computing.",
        *(describe_balance(arm) for arm in cases),
        "Computing grows with the samples of a rank while the gradients keep their bytes.",
        "With the global batch fixed, the samples of a rank shrink as 1/N: more ranks end on the side of"
        " communication.",
    )


def describe_balance(arm: Arm) -> str:
    """Exposed communication over computing in one case, and what follows; within its interval."""
    ranks, batch = arm.trial.num_ranks, arm.trial.batch_per_rank
    where = f"{name(arm)} on {ranks} ranks with {batch} samples each"
    if not any(arm.comm_free):
        return f"{where}: not measured without communication."
    ratio = estimate_ratio(arm.clean, arm.comm_free).map(lambda whole: whole - 1)
    if ratio.low is None or ratio.high is None:
        return f"{where}: unknown, because this run has no interval."
    listed = f"{where}: exposed communication over computing is {ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
    if ratio.low <= 0:
        most = (
            f", so the threshold is below {max(0.0, ratio.high) * batch:.0f} samples per rank" if ratio.high < 1 else ""
        )
        return f"{listed}, which includes 0: this run does not show where the threshold lies{most}."
    threshold, limit = scale_text(ratio, batch), ratio.map(lambda r: 1 + (ranks - 1) / r)
    verdict = "this run does not show which of the two is the bottleneck"
    if ratio.low > 1:
        verdict = f"communication is the bottleneck; a link {ratio.value:.1f} times as fast would even them out"
    elif ratio.high < 1:
        verdict = f"computing is the bottleneck, up to {limit.value:.0f} ranks at this global batch"
    return f"{listed}, so the threshold is {threshold} samples per rank and {verdict}."


def scale_text(ratio: Estimate, factor: float) -> str:
    """`12 (9 to 15)`."""
    ends = (
        "" if ratio.low is None or ratio.high is None else f" ({ratio.low * factor:.0f} to {ratio.high * factor:.0f})"
    )
    return f"{ratio.value * factor:.0f}{ends}"


def answer_strategies(outcome: Outcome | None) -> Answers:
    dp, ddp = (find_arm(outcome, strategy=wanted) for wanted in ("dp", "ddp"))
    if dp is None or ddp is None:
        return {}
    ranks, model = ddp.trial.num_ranks, BYTES_PER_PARAMETER * count_parameters(ddp)
    through, each = 2 * (ranks - 1) * model, 2 * (ranks - 1) / ranks * model
    ratio = divide_steps(dp, ddp)
    emulated = " (DP's replicas are threads of one process here)" if dp.trial.is_emulated else ""
    verdict = judge(ratio) if ratio is not None else Verdict.UNRESOLVED
    return {
        "device_0": join(
            "Because one process drives all devices and device 0 is its hub: it scatters the batch, sends the model to"
            " every replica in every step, gathers all outputs, computes the loss, adds up all gradients and updates"
            f" alone. Of {format_bytes(model)} of parameters, {format_bytes(through)} pass through it in a step on"
            f" {ranks} devices.",
            *quote(outcome, UTILIZATION.name, EXCESS.name),
        ),
        "architecture": join(
            "Because no device is special: every rank is a process with its own interpreter, keeps its replica, and"
            " takes part in a ring all-reduce of gradients in which each rank sends 2·M·(N − 1)/N bytes,"
            f" {format_bytes(each)} here and never more than {format_bytes(2 * model)}, bucket by bucket while backward"
            " still runs. In DP the bytes through device 0, 2·M·(N − 1), grow with the devices.",
            f"Here a DP step takes {say_wide('ratio', ratio)} times as long as a DDP step{emulated}: {verdict}.",
            *quote(outcome, VARIATION.name),
        ),
        "acceptable": (
            "On one machine with two or so devices, when a step is long against copying the model"
            f" ({format_bytes(through)} here), as with a large batch or a small model, and when starting several"
            " processes is the harder part: notebooks, debugging, inference. The measure is DP's step over DDP's,"
            f" {say_wide('ratio', ratio)} here: within a few per cent of 1, DP costs nothing that matters."
        ),
    }


def answer_delay(outcome: Outcome | None) -> Answers:
    arms = {(arm.trial.num_ranks, arm.trial.perturbation.seconds): arm for arm in list_arms(outcome)}
    ranks = max((n for (n, _), arm in arms.items() if not arm.trial.is_oversubscribed), default=1)
    delays = sorted(delay for num_ranks, delay in arms if num_ranks == ranks and (1, delay) in arms)
    if ranks == 1 or len(delays) < 2:
        return {}
    speedups = {delay: divide_steps(arms[1, delay], arms[ranks, delay]) for delay in delays}
    curve = ", ".join(f"{say_wide('ratio', found)} at {1e3 * delay:g} ms" for delay, found in speedups.items())
    one = arms[1, 0.0].step.value
    laws = {delay: predict_speedup(arms, ranks, delay) for delay in delays if delay}
    law = ", ".join(f"{say_wide('ratio', found)} at {1e3 * delay:g} ms" for delay, found in laws.items())
    longest = delays[-1]
    serial = longest / (one + longest)
    return {
        "scaling": join(
            f"{judge_change(speedups[delays[0]], speedups[longest])}: speedup on {ranks} ranks is {curve}. All ranks"
            " sleep at once, so the delay is added to a step on any number of ranks and divided among none: it moves"
            " the speedup toward 1.",
            *quote_added(outcome, delays[1]),
        ),
        "linearly": f"{judge_curve(arms, ranks, delays)} By the model speedup(d) = (T₁ + d)/(T_N + d) it is a hyperbola"
        f" from T₁/T_N = {say_wide('ratio', speedups[0.0])} toward 1, which predicts {law}; measured: {curve}.",
        "amdahl": join(
            f"The delay is a serial part: of a step on one rank with {1e3 * longest:g} ms, f = d/(T₁ + d) ="
            f" {format_share(serial)} does not shrink, so by Amdahl's law no number of ranks gains more than 1/f ="
            f" {1 / serial:.1f} times.",
            *quote(outcome, AMDAHL_OVERLAY.name, subject=name_label("ddp", ranks, delays[1])),
        ),
    }


def predict_speedup(arms: Mapping[tuple[int, float], Arm], ranks: int, delay: float) -> Estimate | None:
    """(T₁ + d)/(T_N + d) from the steps without a delay, round by round, as the study's table has it."""
    one, many = ([[step + delay for step in steps] for steps in arms[n, 0.0].clean] for n in (1, ranks))
    return estimate_ratio(one, many)


def quote_added(outcome: Outcome | None, delay: float) -> Iterator[str]:
    """What a delay adds to a step, unless it came out impossible."""
    for finding in outcome.document.findings if outcome and outcome.document else ():
        is_wanted = finding.kind == ADDED.name and finding.subject == format_delay(delay)
        if is_wanted and finding.values.get("seconds") is not None:
            yield finding.text


def judge_change(before: Estimate | None, after: Estimate | None) -> str:
    if before is None or after is None:
        return UNTOLD
    words = {1: "It raises the speedup", -1: "It lowers the speedup", 0: f"{UNTOLD}, as the intervals overlap"}
    return words[compare_estimates(after, before)]


def judge_curve(arms: Mapping[tuple[int, float], Arm], ranks: int, delays: Sequence[float]) -> str:
    """Whether speedups between the shortest and the longest delay leave the straight line between those two."""
    if len(delays) < 3:
        return f"{UNTOLD}: a curve needs three delays."
    medians = pair_medians([arms[n, delay].clean for n in (1, ranks) for delay in delays])
    if medians.shape[1] < 2:
        return f"{UNTOLD}: too few launches completed."
    speedups, places = medians[: len(delays)] / medians[len(delays) :], np.asarray(delays)
    shares = ((places - places[0]) / (places[-1] - places[0]))[1:-1, None]
    apart = estimate_location((speedups[1:-1] - (1 - shares) * speedups[0] - shares * speedups[-1]).mean(axis=0))
    found = f"between the shortest and the longest delay it is {abs(apart.value):.2f}"
    if apart.high is not None and apart.high < 0:
        return f"Non-linearly, fast at first and then ever slower: {found} below the straight line."
    if apart.low is not None and apart.low > 0:
        return f"Non-linearly, slowly at first and then faster: {found} above the straight line."
    width = f" ± {apart.half_width:.2f}" if apart.half_width is not None else ""
    return f"{UNTOLD}: the deviation from a straight line is {apart.value:+.2f}{width}.".replace("-", "−")


def answer_batches(outcome: Outcome | None) -> Answers:
    speedups: dict[int, Estimate] = {}
    for arm in list_spread(outcome):
        plain = find_arm(outcome, num_ranks=1, global_batch=arm.trial.global_batch)
        found = divide_steps(plain, arm)
        if found is not None:
            speedups[arm.trial.global_batch] = found
    if len(speedups) < 2:
        return {}
    first, last = min(speedups), max(speedups)
    same = "The gradients have the same bytes at every batch while computing grows with it"
    verdict, why = {
        1: ("Yes", f"{same}, so their share of a step shrinks."),
        -1: ("No, it gets worse", f"{same}: what grows here is not communication."),
        0: (f"{UNTOLD}, as the intervals overlap", f"{same}, so a gain is expected where communication is exposed."),
    }[compare_estimates(speedups[last], speedups[first])]
    listed = ", ".join(
        f"{say_wide('ratio', found)} at global batch {batch}" for batch, found in sorted(speedups.items())
    )
    return {
        "improve": f"{verdict}. Speedup over one rank: {listed}. {why}",
        "saturate": join(*quote(outcome, DOUBLING.name)) or f"{UNTOLD}: no doubling is resolved.",
    }


def answer_straggler(outcome: Outcome | None) -> Answers:
    arms = list_arms(outcome)
    slow = next((arm for arm in arms if arm.trial.perturbation.seconds), None)
    if slow is None:
        return {}
    delay, ranks = slow.trial.perturbation.seconds, slow.trial.num_ranks
    usual = next((arm for arm in arms if not arm.trial.perturbation.seconds and arm.trial.num_ranks == ranks), None)
    cost = estimate_difference(slow.clean, usual.clean) if usual else None
    longer = UNTOLD
    if usual is not None and cost is not None:
        ratio, whole = divide_steps(slow, usual), usual.step.value + delay
        times = f", {format_interval('ratio', ratio)} times" if ratio is not None else ""
        is_longer = (cost.low or 0) > 0 or (ratio is not None and (ratio.low or 0) > 1)
        verdict = "Every step, and so the whole training run, gets longer" if is_longer else f"{UNTOLD} beyond doubt"
        longer = (
            f"{verdict}: from {say_wide('seconds', usual.step)} to {say_wide('seconds', slow.step)} per step{times}."
            f" One rank sleeps {1e3 * delay:g} ms and all wait for it; with all of its sleep added, a step would take"
            f" {say_wide('seconds', whole)}."
        )
    return {
        "training_time": longer,
        "synchronization": join(
            "That DDP is synchronous: the all-reduce of a bucket ends when the last rank has brought its gradients, so"
            f" a step takes as long as on the slowest of {ranks} ranks, and the others wait inside backward.",
            compare_losses(slow, usual),
            *quote(outcome, STRAGGLER.name, subject=slow.label),
            *quote(outcome, WAITING.name),
        ),
    }


def compare_losses(slow: Arm, usual: Arm | None) -> str:
    """Whether a slow rank changes what is learnt."""
    if usual is None or not read_losses(slow) or not read_losses(usual):
        return ""
    step = find_first_difference(read_losses(slow), read_losses(usual))
    return (
        "Losses are bit-equal with and without it: only time is lost."
        if step is None
        else (f"Losses differ from step {step} on.")
    )


def join(*sentences: str) -> str:
    return " ".join(sentence for sentence in sentences if sentence)


def name(arm: Arm) -> str:
    return make_options(arm.trial.workload, arm.trial.options).label


def count_parameters(arm: Arm) -> int:
    return make_options(arm.trial.workload, arm.trial.options).count_parameters()

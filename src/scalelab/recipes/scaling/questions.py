"""The eighteen questions of the scaling assignment, each answered with this run's numbers and a reason.

Every function gives the answers of one row, in the order of its questions; nothing where too little was measured.
"""

from __future__ import annotations

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import Verdict, judge
from scalelab.recipes.evidence import (
    compare_estimates,
    divide_steps,
    find_arm,
    list_arms,
    list_spread,
    quote,
    say,
    scale,
)
from scalelab.recipes.recipe import Outcome
from scalelab.records.trial import Option
from scalelab.studies.batch_scaling import DOUBLING
from scalelab.studies.delay import ADDED, AMDAHL_OVERLAY
from scalelab.studies.model_size import EXPOSED_BY_SIZE
from scalelab.studies.reproducibility import MEAN_ERROR, OTHER_SEED, WARMUP
from scalelab.studies.scaling.answer import AMDAHL, LOSS
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.losses import LOSSES_EQUAL
from scalelab.studies.straggler import COST, STRAGGLER
from scalelab.studies.strategies.report import EXCESS, UTILIZATION, VARIATION
from scalelab.units import format_bytes, format_quantity, format_share
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
    plain, spread = find_arm(outcome, strategy="single"), list_spread(outcome)
    if plain is None or not spread:
        return {}
    excess = {arm.trial.num_ranks: scale(divide_steps(arm, plain), arm.trial.num_ranks) for arm in spread}
    verdicts = {ranks: judge(ratio) for ranks, ratio in excess.items() if ratio is not None}
    below = [ranks for ranks, verdict in verdicts.items() if verdict is Verdict.SLOWER]
    is_resolved = Verdict.UNRESOLVED not in verdicts.values()
    said = "No" if below else "Yes, within the error" if is_resolved else "Unresolved"
    listed = ", ".join(
        f"{arm.trial.num_ranks} ranks are {say('ratio', divide_steps(plain, arm))} times as fast as the plain loop"
        f" (efficiency {say('share', scale(divide_steps(plain, arm), 1 / arm.trial.num_ranks))})"
        for arm in spread
    )
    place = "Nowhere significantly." if is_resolved else "Unresolved: the intervals include the ideal."
    if below:
        place = f"At {below[0]} ranks, the first that are significantly below ideal."
    return {
        "linear": f"{said}: {listed}.",
        "drop": place,
        "quantitative": join(*quote(outcome, LOSS.name, AMDAHL.name)) or "The parts of a step were not resolved.",
    }


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
    which = {1: "In the large one", -1: "In the small one", 0: "In neither: the intervals overlap"}[verdict]
    return {
        "efficient": f"{which}: on {ranks} ranks {name(large_one)} runs {say('ratio', large)} times as fast as on one,"
        f" {name(small_one)} {say('ratio', small)} times.",
        "differ": join(
            "A step computes 6·P·B operations and all-reduces 4·P bytes, so both grow with the parameters P: per byte,"
            " both models compute the same. What differs is what does not grow: launching kernels, Python and the"
            " latency of every bucket, which are a large part of a step of"
            f" {format_quantity('seconds', small_many.step.value)} and a small part of one of"
            f" {format_quantity('seconds', large_many.step.value)}; and caches, which hold the small model only.",
            *quote(outcome, EXPOSED_BY_SIZE.name),
        ),
        "bottleneck": find_threshold(large_one, large_many),
    }


def list_cases(outcome: Outcome | None) -> list[tuple[Arm, Arm]]:
    """One rank and the most ranks of every model, the smallest model first."""
    found: dict[Option, list[Arm]] = {}
    for arm in list_arms(outcome):
        found.setdefault(arm.trial.options["dim"], []).append(arm)
    pairs = []
    for arms in found.values():
        ordered = sorted(arms, key=lambda arm: arm.trial.num_ranks)
        if ordered[0].trial.num_ranks == 1 < ordered[-1].trial.num_ranks:
            pairs.append((ordered[0], ordered[-1]))
    return sorted(pairs, key=lambda pair: count_parameters(pair[0]))


def find_threshold(one: Arm, many: Arm) -> str:
    """The batch per rank below which the all-reduce takes longer than computing.

    Computing takes 6·P·b/F, a ring all-reduce 8·P·(N − 1)/(N·W) (Patarasu and Yuan 2009): equal at
    b = 8·(N − 1)·F/(6·N·W), for FLOP/s F and bytes/s W, whatever P.
    """
    ranks = many.trial.num_ranks
    rate = make_options(one.trial.workload, one.trial.options).flops_per_sample() * one.trial.global_batch
    flops = rate / one.step.value
    words = (
        "When the all-reduce of a step, 8·P·(N − 1)/(N·W) seconds over a link of W bytes/s, takes longer than its"
        " computing, 6·P·b/F seconds at F FLOP/s and b samples per rank: below b = 8·(N − 1)·F/(6·N·W), whatever the"
        f" size of the model. Here F is {flops / 1e9:.3g} GFLOP/s on one rank"
    )
    excess = many.step.value - one.step.value / ranks
    if excess <= 0:
        return f"{words}; a step on {ranks} ranks has no time beyond its share of computing, so W is not resolved."
    share = (ranks - 1) / ranks
    bandwidth = 2 * BYTES_PER_PARAMETER * count_parameters(one) * share / excess
    batch = 8 * share * flops / (6 * bandwidth)
    per_rank = many.trial.batch_per_rank
    verdict = "below it: communication is the bottleneck" if per_rank < batch else "above it: computing is"
    return (
        f"{words}, and a step on {ranks} ranks exceeds its share of computing by {say('seconds', excess)}, which makes"
        f" W {format_bytes(bandwidth)}/s: the threshold is {batch:.0f} samples per rank. The {per_rank} of this run are"
        f" {verdict}. The two are equal with {batch:.0f} samples per rank, or with a link"
        f" {max(batch / per_rank, per_rank / batch):.1f} times {'faster' if per_rank < batch else 'slower'}. With the"
        " global batch fixed, b shrinks as 1/N, so more ranks end on the side of communication."
    )


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
            f"Here a DP step takes {say('ratio', ratio)} times as long as a DDP step{emulated}: {verdict}.",
            *quote(outcome, VARIATION.name),
        ),
        "acceptable": (
            "On one machine with two or so devices, when a step is long against copying the model"
            f" ({format_bytes(through)} here), as with a large batch or a small model, and when starting several"
            " processes is the harder part: notebooks, debugging, inference. The measure is DP's step over DDP's,"
            f" {say('ratio', ratio)} here: within a few per cent of 1, DP costs nothing that matters."
        ),
    }


def answer_delay(outcome: Outcome | None) -> Answers:
    arms = {(arm.trial.num_ranks, arm.trial.perturbation.seconds): arm for arm in list_arms(outcome)}
    ranks = max((num_ranks for num_ranks, _ in arms), default=1)
    delays = sorted(delay for num_ranks, delay in arms if num_ranks == ranks and (1, delay) in arms)
    if ranks == 1 or len(delays) < 2:
        return {}
    speedups = {delay: divide_steps(arms[1, delay], arms[ranks, delay]) for delay in delays}
    curve = ", ".join(f"{say('ratio', found)} at {1e3 * delay:g} ms" for delay, found in speedups.items())
    one, many = arms[1, 0.0].step.value, arms[ranks, 0.0].step.value
    law = ", ".join(f"{(one + delay) / (many + delay):.2f} at {1e3 * delay:g} ms" for delay in delays)
    longest = delays[-1]
    serial = longest / (one + longest)
    return {
        "scaling": join(
            f"Speedup on {ranks} ranks is {curve}. Every rank sleeps at once, so the delay adds to a step on any number"
            " of ranks and shrinks with none: it pulls the speedup toward 1.",
            *quote(outcome, ADDED.name),
        ),
        "linearly": f"Non-linearly: speedup(d) = (T₁ + d)/(T_N + d), a hyperbola from T₁/T_N = {one / many:.2f} toward"
        f" 1, steep while d is small against T_N ({say('seconds', many)}) and ever flatter after that. It predicts"
        f" {law}; measured: {curve}.",
        "amdahl": join(
            f"The delay is a serial part: of a step on one rank with {1e3 * longest:g} ms, f = d/(T₁ + d) ="
            f" {format_share(serial)} does not shrink, so by Amdahl's law no number of ranks gains more than 1/f ="
            f" {1 / serial:.1f} times.",
            *quote(outcome, AMDAHL_OVERLAY.name),
        ),
    }


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
    verdict = {1: "Yes", -1: "No, it gets worse", 0: "Not resolved: the intervals overlap"}[
        compare_estimates(speedups[last], speedups[first])
    ]
    listed = ", ".join(f"{say('ratio', found)} at global batch {batch}" for batch, found in sorted(speedups.items()))
    return {
        "improve": f"{verdict}: speedup over one rank is {listed}. The gradients have the same bytes at every batch,"
        " while computing grows with it, so their share of a step shrinks.",
        "saturate": join(*quote(outcome, DOUBLING.name))
        or "Not within these batches: every doubling still gains throughput.",
    }


def answer_straggler(outcome: Outcome | None) -> Answers:
    disturbed = [arm for arm in list_arms(outcome) if arm.trial.perturbation.seconds]
    if not disturbed:
        return {}
    delay, ranks = disturbed[0].trial.perturbation.seconds, disturbed[0].trial.num_ranks
    return {
        "training_time": join(
            "Every step, and so the whole training run, gets longer by about the sleep of the one slow rank,"
            f" {1e3 * delay:g} ms.",
            *quote(outcome, COST.name),
        ),
        "synchronization": join(
            "That DDP is synchronous: the all-reduce of a bucket ends when the last rank has brought its gradients, so"
            f" a step takes as long as on the slowest of {ranks} ranks, and the others wait inside backward. They"
            " cannot make up for it, and the losses are the same: only time is lost.",
            *quote(outcome, STRAGGLER.name),
        ),
    }


def join(*sentences: str) -> str:
    return " ".join(sentence for sentence in sentences if sentence)


def name(arm: Arm) -> str:
    return make_options(arm.trial.workload, arm.trial.options).label


def count_parameters(arm: Arm) -> int:
    return make_options(arm.trial.workload, arm.trial.options).count_parameters()

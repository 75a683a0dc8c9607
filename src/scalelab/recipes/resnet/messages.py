"""What DDP sends. R4: with which bandwidth, by step and as published. R6: what besides gradients, and whether the batch
norm of single ranks is enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import communication_by_subtraction
from scalelab.analysis.stats import estimate_location, judge
from scalelab.analysis.traffic import count_wire_bytes
from scalelab.answers.train import TrainStudy
from scalelab.recipes.evidence import (
    UNTOLD,
    Compared,
    compare_estimates,
    count_parameters,
    find_completed,
    keep_tables,
    make_beside_table,
    quote,
    say_wide,
    scale,
)
from scalelab.recipes.feasibility import choose, choose_ranks, make_sampling
from scalelab.recipes.recipe import Answer, Main, Outcome, Outcomes, Row, Size, pair_questions
from scalelab.recipes.resnet import published
from scalelab.recipes.resnet.epochs import (
    Pair,
    count_steps,
    list_pairs,
    list_shared,
    make_main,
    name_beside,
    name_pair,
    prefer_uncrowded,
)
from scalelab.recipes.resnet.learning import SMALL_RATE
from scalelab.recipes.resnet.training import make_job
from scalelab.records.settings import Optimization, TrainingRun
from scalelab.records.trial import Trial, TrialResult
from scalelab.report.document import Table
from scalelab.report.findings import select
from scalelab.studies.comm_volume.report import BUFFERS, GRADIENTS
from scalelab.studies.comm_volume.study import CommVolume
from scalelab.studies.shared.arms import Arm
from scalelab.units import format_interval, format_points, format_quantity, format_share

NORM_SEEDS = 5
NORM_BATCH = 512
"""R6: images per rank of the published claim."""
SMALL_SPREAD = 0.05
"""R6: variances of ranks that differ by less normalize alike."""
WORTH_SYNCHRONIZING = 0.01
"""R6: gains in accuracy below one point do not pay for synchronizing batch norm."""
LIMIT = published.BANDWIDTH_BYTES_PER_SECOND


def answer_r4(size: Size, outcomes: Outcomes) -> Answer:
    pairs = list_pairs(outcomes)
    lines = [Compared(name_pair(arm), measure_bandwidth(plain, arm), None) for _, plain, arm in pairs]
    if not lines:
        return Answer()
    table = make_beside_table(
        "bandwidth",
        lines,
        title="Effective bandwidth of one all-reduce per step",
        size=size,
        notes=("2·M·(N − 1)/N bytes over t_N − t_1 of a step",),
    )
    fair = prefer_uncrowded(pairs)
    rates = [said for _, plain, arm in fair if (said := say_bandwidth(plain, arm))]
    sent = f"M = {count_gradient_bytes(fair[0][2]):,} bytes of gradients (4 per parameter)"
    here = f"Here, with one all-reduce of {sent} per step: {', '.join(rates)}." if rates else f"Here {sent}."
    sentences = [here, *compare_batches(fair), *explain_utilization(fair)]
    sentences += explain_sharing([arm for _, _, arm in pairs])
    return Answer(
        main=make_main("bandwidth", "bandwidth", list_published_rates(fair)),
        tables=keep_tables(table, *compare_as_published(size, pairs)),
        sentences=tuple(sentences),
        questions=pair_questions("resnet", "R4", {"bandwidth": " ".join((correct_published(), *sentences))}),
    )


def correct_published() -> str:
    """What the published method leaves out, at its first number of devices and batch."""
    n, batch = published.DEVICES[0], published.BATCHES[0]
    rate, seconds = published.find_effective_bandwidth(n, batch), published.EPOCH_SECONDS[n][batch]
    least = published.count_epoch_steps(n, batch) * published.count_ring_bytes(n) / seconds
    return (
        "The report divides one all-reduce by the communication of a whole epoch, but every step has one:"
        f" {published.count_epoch_steps(n, batch)} on {n} devices at batch {batch}, so its"
        f" {published.COMMUNICATION_SECONDS[n][batch]} s mean {rate / 1e9:.2f} GB/s, {rate / LIMIT:.1f} times the"
        f" {LIMIT / 1e9:g} GB/s that it divides by. Even over the whole epoch of {seconds} s it is"
        f" {least / 1e9:.2f} GB/s, so {LIMIT / 1e9:g} GB/s cannot be the link's bandwidth."
    )


def compare_batches(pairs: Sequence[Pair]) -> Iterator[str]:
    """Whether t_N − t_1 can be transfer at all: the bytes are the same at every batch."""
    by_ranks: dict[int, list[tuple[int, Estimate]]] = {}
    for _, plain, arm in pairs:
        rate = measure_bandwidth(plain, arm)
        if rate is not None:
            by_ranks.setdefault(arm.trial.num_ranks, []).append((arm.trial.batch_per_rank, rate))
    for ranks, found in by_ranks.items():
        (few, first), (many, last) = min(found, key=itemgetter(0)), max(found, key=itemgetter(0))
        if compare_estimates(first, last) == 1:
            yield (
                f"On {ranks} devices the same bytes seem {format_quantity('ratio', first.value / last.value)} times"
                f" slower at batch {many} than at {few}, so t_N − t_1 (a step on N devices less one on 1) is mostly"
                " waiting and contention, which grow with the step, not transfer."
            )


def say_bandwidth(plain: Arm, arm: Arm) -> str:
    """`21 (17 to 25) MB/s (2 devices, batch 8)`; a lower limit where communication may be zero; empty where unknown."""
    found, bound = measure_bandwidth(plain, arm), bound_bandwidth(plain, arm)
    if found is not None and found.low is not None and found.high is not None:
        value, low, high = (print_megabytes(rate) for rate in (found.value, found.low, found.high))
        return f"{value} ({low} to {high}) MB/s ({name_pair(arm)})"
    return "" if bound is None else f"at least {print_megabytes(bound)} MB/s ({name_pair(arm)})"


def print_megabytes(rate: float) -> str:
    """To two digits, and never as a power of ten."""
    return f"{rate / 1e6:,.0f}" if rate >= 1e8 else f"{rate / 1e6:.2g}"


def explain_utilization(pairs: Sequence[Pair]) -> Iterator[str]:
    """The share of the published link's bandwidth, and why it is not a utilization."""
    found = [(arm, scale(measure_bandwidth(plain, arm), 1 / LIMIT)) for _, plain, arm in pairs]
    listed = ", ".join(f"{say_wide('share', share)} ({name_pair(arm)})" for arm, share in found if share is not None)
    if listed:
        yield (f"Of {LIMIT / 1e9:g} GB/s that is {listed}: not a utilization, as that is not this machine's link.")


def list_published_rates(pairs: Sequence[Pair]) -> list[Compared]:
    """The published method: the bytes of one all-reduce over the communication of a whole epoch."""
    lines = []
    for batch, plain, arm in pairs:
        ranks = arm.trial.num_ranks
        ours = scale(measure_bandwidth(plain, arm), 1 / count_steps(arm))
        rate = published.EFFECTIVE_GIGABYTES_PER_SECOND[ranks][batch]
        lines.append(Compared(name_beside(arm, batch), ours, 1e9 * float(rate), f"{rate} GB/s"))
    return lines


def list_utilization(pairs: Sequence[Pair]) -> Iterator[Compared]:
    """The same over the published bandwidth of a link."""
    for line, (batch, _, arm) in zip(list_published_rates(pairs), pairs, strict=True):
        ours = scale(line.ours, 1 / LIMIT) if isinstance(line.ours, Estimate) else None
        percent = published.UTILIZATION_PERCENT[arm.trial.num_ranks][batch]
        yield Compared(line.what, ours, float(percent) / 100, f"{percent} %")


def compare_as_published(size: Size, pairs: Sequence[Pair]) -> Iterator[Table | None]:
    rates, shares = list_published_rates(pairs), list_utilization(pairs)
    title, notes = "By the published method", ("one all-reduce per epoch, although every step has one",)
    yield make_beside_table("bandwidth", rates, title=title, size=size, notes=notes)
    yield make_beside_table(
        "share",
        shares,
        title=f"{title}: utilization of {LIMIT / 1e9:g} GB/s",
        size=size,
        unlike=list_shared(pairs) if size == "full" else [name_beside(arm, batch) for batch, _, arm in pairs],
    )


def measure_bandwidth(plain: Arm, arm: Arm) -> Estimate | None:
    """Ring bytes of a step over how much longer it is than on one device; None if that may be zero."""
    excess = communication_by_subtraction(plain.clean, arm.clean, arm.trial.num_ranks, is_weak=True)
    if not excess.is_above(0):
        return None
    sent = count_wire_bytes("all_reduce", count_gradient_bytes(arm), arm.trial.num_ranks)
    return None if sent is None else excess.map(lambda seconds: sent / seconds)


def bound_bandwidth(plain: Arm, arm: Arm) -> float | None:
    """The least bandwidth that the longest possible communication leaves; None if that is unknown."""
    excess = communication_by_subtraction(plain.clean, arm.clean, arm.trial.num_ranks, is_weak=True)
    sent = count_wire_bytes("all_reduce", count_gradient_bytes(arm), arm.trial.num_ranks)
    return None if sent is None or excess.high is None or excess.high <= 0 else sent / excess.high


def count_gradient_bytes(arm: Arm) -> int:
    return 4 * count_parameters(arm)


def explain_sharing(arms: Sequence[Arm]) -> Iterator[str]:
    """Why ranks that share cores show no bandwidth."""
    crowded = sorted({arm.trial.num_ranks for arm in arms if arm.trial.is_oversubscribed})
    if crowded:
        yield (
            f"On {' and '.join(map(str, crowded))} devices that share cores this is not a bandwidth: M is the same at"
            " every batch, while t_N − t_1 has all the time that ranks wait for a core."
        )


def make_r6(size: Size) -> Row:
    study = CommVolume(
        strategies=("ddp",),
        ranks=choose_ranks(size, published.LARGE_RANKS),
        batch_per_rank=choose(size, small=2, full=512),
        job=make_job(size, is_counted=True),
        sampling=make_sampling(size, rounds=2, steps=4, phase_steps=0),
    )
    kinds = [(kind, seed) for seed in range(NORM_SEEDS) for kind in ("local", "synced")]
    norms = {f"{kind}{seed}": make_norm_training(size, kind, seed) for kind, seed in kinds}
    return Row(
        id="R6",
        title="What DDP sends",
        parts={"messages": study, **norms},
        conclude=partial(answer_r6, size),
        num_tables=1,
        shows=("messages",),
    )


@dataclass(frozen=True, kw_only=True)
class NormTraining(TrainStudy):
    """A training run after which the batch statistics of ranks are compared."""

    def plan(self) -> list[Trial]:
        return [replace(trial, instruments=("norms",)) for trial in super().plan()]


def make_norm_training(size: Size, kind: str, seed: int) -> NormTraining:
    """Local or synchronized batch norm, with 512 images per rank; in small with 16."""
    ranks = choose_ranks(size, published.LARGE_RANKS)
    job = make_job(size, seed=seed, optimization=Optimization(lr=choose(size, small=SMALL_RATE, full=None)))
    return NormTraining(
        ranks=ranks,
        global_batch=ranks * choose(size, small=16, full=512),
        course=TrainingRun(epochs=choose(size, small=3, full=published.LARGE_EPOCHS), log_every=10**6, keep=0),
        job=replace(job, spreading=replace(job.spreading, sync_batch_norm=kind == "synced")),
    )


def answer_r6(size: Size, outcomes: Outcomes) -> Answer:
    outcome = outcomes.get("messages")
    sent = sum_bytes(outcome, "gradients")
    if not sent:
        return Answer(sentences=quote(outcome))
    printed = f"{published.GRADIENT_BYTES:,}"
    table = make_beside_table(
        "count",
        [Compared("gradient bytes per step", sent, published.GRADIENT_BYTES, printed)],
        title="What every rank passes to the all-reduce",
        size=size,
        notes=("counted, not timed",),
        is_ratio=True,
    )
    told = quote(outcome, GRADIENTS.name, BUFFERS.name)  # in the first sentence and in the answers
    verdict = "exactly" if sent == published.GRADIENT_BYTES else "not"
    sentence = f"DDP all-reduces {sent:,} bytes of gradients per step, {verdict} the published {printed}."
    buffers, (norms, is_enough) = sum_bytes(outcome, "buffers"), answer_norms(outcomes)
    too = f"no, {buffers:,} bytes of buffers too" if buffers else "yes"
    more = "" if buffers is None else f" Q5, only gradients: {too}."
    enough = f" Q6, gradients alone suffice: {is_enough[0].lower()}{is_enough[1:]}." if is_enough else ""
    return Answer(
        lead=f"{sentence}{more}{enough}",
        main=Main("count", "gradient bytes per step", sent, published.GRADIENT_BYTES, printed, is_ratio=True),
        tables=keep_tables(table),
        sentences=tuple(said for said in quote(outcome) if said not in told) or (sentence,),
        questions=pair_questions("resnet", "R6", answer_buffers(outcome) | norms),
        charts=outcome.document.sections[0].charts[:1] if outcome and outcome.document else (),
    )


def answer_buffers(outcome: Outcome | None) -> dict[str, str]:
    gradients, buffers = (sum_bytes(outcome, purpose) for purpose in ("gradients", "buffers"))
    if not gradients or buffers is None:
        return {}
    found = select(outcome.document.findings, BUFFERS) if outcome and outcome.document else ()
    ratio = next((finding.values.get("ratio") for finding in found), None)
    cost = (
        f" Without them a step takes {format_interval('ratio', ratio)} times as long: {judge(ratio)}."
        if isinstance(ratio, Estimate)
        else ""
    )
    return {
        "buffers": f"{'Yes' if buffers else 'No'}: {buffers:,} bytes of buffers beside {gradients:,} of gradients,"
        f" {format_share(buffers / (buffers + gradients))} of what a step sends. The buffers are batch norm's"
        " running means and variances and its counts of batches. They are copied from rank 0 before"
        f" every forward, not averaged.{cost}"
    }


def answer_norms(outcomes: Outcomes) -> tuple[dict[str, str], str]:
    """Local against synchronized batch norm: statistics of a step, and test accuracy seed by seed; and the verdict."""
    differences, spreads, accuracies = [], [], []
    trial = None
    for seed in range(NORM_SEEDS):
        local, synced = (find_completed(outcomes.get(f"{kind}{seed}")) for kind in ("local", "synced"))
        scores = [read_test_accuracy(result) for result in (local, synced)]
        if local is None or scores[0] is None or scores[1] is None:
            continue
        trial = local.trial
        differences.append(scores[1] - scores[0])
        accuracies.append(scores[0])
        spreads += [rank.norms for rank in local.ranks[:1] if rank.norms is not None]
    if trial is None:
        return {}, ""
    gain, level = estimate_location(differences), estimate_location(accuracies)
    apart, verdict = "", judge_accuracy(gain)
    is_enough = verdict
    if spreads:
        mean, variance = (sum(one[place] for one in spreads) / len(spreads) for place in (0, 1))
        at_published = variance * (trial.batch_per_rank / NORM_BATCH) ** 0.5
        is_enough = verdict or f"{'Yes' if at_published < SMALL_SPREAD else 'No'}, by the statistics"
        verdict = verdict or judge_statistics(at_published)
        apart = (
            f" In a step after training, the batch means of ranks are {mean:.3f} standard deviations apart and their"
            f" variances {format_share(variance)} (root mean square over {spreads[0].num_channels} channels). Both"
            f" shrink as 1/√n, so at {NORM_BATCH} images per rank, which were not measured, variances should differ by"
            f" about {format_share(at_published)}."
        )
    verdict = verdict or UNTOLD
    ends = " to ".join(format_points(end, 1) for end in (gain.low, gain.high) if end is not None)
    change = f"{format_points(gain.value, 1)} points{f' ({ends})' if ends else ''}"
    answer = (
        f"{verdict}. With {trial.batch_per_rank} images per rank on {trial.num_ranks} ranks, test accuracy is"
        f" {say_wide('accuracy', level)} with local batch norm and changes by {change} with"
        f" synchronized batch norm, over {len(differences)} seeds.{apart} Training does not need"
        " the buffers of other ranks: a step normalizes by its own batch, and only evaluation reads running averages."
    )
    return {"enough": answer}, is_enough


def judge_accuracy(gain: Estimate) -> str:
    """Whether gradients alone suffice, by what synchronizing gains in accuracy; empty where that does not decide."""
    if gain.low is None or gain.high is None:
        return ""
    return "No, by accuracy" if gain.low > 0 else "Yes, by accuracy" if gain.high < WORTH_SYNCHRONIZING else ""


def judge_statistics(spread: float) -> str:
    """The same by how far the batch variances of ranks are apart at the published batch."""
    if spread < SMALL_SPREAD:
        return "Yes, by the statistics: a rank normalizes almost as all ranks together would; accuracy does not decide"
    return "No, by the statistics: ranks normalize differently; accuracy does not decide"


def read_test_accuracy(result: TrialResult | None) -> float | None:
    """After the last epoch."""
    points = [point.accuracy for point in result.curve if point.is_evaluation] if result else []
    return points[-1] if points else None


def sum_bytes(outcome: Outcome | None, purpose: str) -> int | None:
    """Of the first rank that counted its messages, under plain DDP."""
    for result in outcome.results if outcome else ():
        for rank in result.ranks:
            known = [message for message in rank.messages if message.purpose == purpose]
            if rank.messages and all(message.payload_bytes is not None for message in known):
                return sum(message.payload_bytes or 0 for message in known)
    return None

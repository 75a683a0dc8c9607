"""Warnings about the measurement itself, each with the step that would improve it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence

from scalelab.analysis.quality import Outlier, find_drift, find_outliers, measure_noise
from scalelab.ranks.placement import Placement, find_mistakes
from scalelab.records.trial import Status, StepKind, TrialResult
from scalelab.report.findings import Caution
from scalelab.studies.shared.arms import Arm
from scalelab.units import format_quantity, format_share

MOST_NAMED = 3
"""How many outliers are named, the others are counted; how many configurations may have warnings of their own."""
MOST_OUTLIERS = 0.02
"""A share of outliers below this is what any shared machine has."""
NOISY_WITHIN = 0.15
NOISY_BETWEEN = 0.05
"""Relative spreads above which a host is called noisy: of steps within a launch, of launches' medians."""
FEWEST_LAUNCHES = 6
"""With fewer, intervals assume that launches differ as a normal distribution does."""
HEAVY_TAIL = 1.15
"""A mean this many times the median is not noise around it."""
STOLEN = 0.02
"""A share of processor time taken by the hypervisor that moves step times by as much."""


def find_cautions(arms: Iterable[Arm]) -> tuple[Caution, ...]:
    """Everything that makes the numbers less certain than their intervals say."""
    every = list(arms)
    found = [caution for arm in every for caution in _look_at_arm(arm)]
    return (*_look_at_host(every), *_name_drifts(every), *found, *_name_tails(every))


def _look_at_arm(arm: Arm) -> Iterator[Caution]:
    if arm.trial.course is None:
        yield from _name_failure(arm)
    yield from _name_non_finite(arm)
    yield from _name_unequal_losses(arm)
    yield from _name_blocks(arm)
    if not arm.is_measured:
        return
    if arm.trial.course is None:  # a training run is one launch by intent, as long as it is
        yield from _name_missing_ablation(arm)
        yield from _name_warmup(arm)


def _name_failure(arm: Arm) -> Iterator[Caution]:
    failure = arm.failure
    if failure is None:
        return
    num_failed = sum(result.status is failure.status for result in arm.results)
    which = "" if not arm.is_measured else f" in {num_failed} of {len(arm.results)} rounds"
    yield Caution(
        message=f"{arm.label} {failure.status.words}{which}: {failure.reason}",
        next_step=f"{failure.status.advice}; its logs are in trials/{failure.trial.name}",
    )


def _name_non_finite(arm: Arm) -> Iterator[Caution]:
    for result in arm.results:
        bad = result.first_non_finite_loss()
        if bad is not None:
            yield Caution(
                message=f"{arm.label}: the loss of rank {bad.rank} is {bad.loss} from step {bad.step} of round"
                f" {result.trial.round} on; its times are those of a training that has failed",
                next_step="lower the learning rate or check the data before trusting this row",
            )
            return


def _name_unequal_losses(arm: Arm) -> Iterator[Caution]:
    """All rounds train the same model on the same data from the same seed: their losses should be the very same."""
    losses = [result.losses() for result in arm.results if result.status is Status.COMPLETED]
    for other in losses[1:]:
        differing = [step for step in losses[0] if repr(losses[0][step]) != repr(other.get(step))]
        if differing:
            yield Caution(
                message=f"{arm.label}: rounds with the same seed gave different losses from step {differing[0]} on",
                next_step="seed what build() draws; on GPUs, kernels that add in changing order do this too",
            )
            return


def _name_blocks(arm: Arm) -> Iterator[Caution]:
    """Samples that are not fully shuffled."""
    words = next((rank.shuffle for result in arm.results for rank in result.ranks if rank.shuffle), "")
    if words:
        yield Caution(
            message=f"{arm.label}: its samples are {words}",
            next_step="if the file is sorted, use --shuffle full, or scalelab data convert to what is read by a map",
        )


def _name_missing_ablation(arm: Arm) -> Iterator[Caution]:
    if arm.trial.plan.comm_free_steps and arm.trial.strategy != "single" and not any(arm.comm_free):
        yield Caution(
            message=f"{arm.label}: no memory was left for a copy of the training's state, so that steps without"
            " communication could not be run",
            next_step="give ranks more memory, or rely on communication by subtraction",
        )


def _name_warmup(arm: Arm) -> Iterator[Caution]:
    num_steps = arm.num_clean_steps
    if not arm.warmup.is_settled:
        yield Caution(
            message=f"{arm.label}: steps have not settled at step {arm.warmup.num_steps} of {num_steps}",
            next_step=f"run more steps, --steps {4 * num_steps}{_suggest_allocator([arm])}",
        )


def _suggest_allocator(arms: Sequence[Arm]) -> str:
    """On a CPU, memory that goes back and forth to the kernel is the usual cause of steps of two speeds."""
    is_open = any(arm.trial.device == "cpu" and arm.trial.allocator == "system" for arm in arms)
    return ", or try --allocator keep" if is_open else ""


def _name_tails(arms: Sequence[Arm]) -> Iterator[Caution]:
    """Long steps, arm by arm where few have them; many with them are one fact about the machine, said once."""
    measured = [arm for arm in arms if arm.is_measured]
    outliers = [(arm, found) for arm in measured for found in _name_outliers(arm)]
    tails = [(arm, found) for arm in measured for found in _name_heavy_tail(arm)]
    if len({id(arm) for arm, _ in (*outliers, *tails)}) <= MOST_NAMED:
        yield from (caution for arm in measured for other, caution in (*outliers, *tails) if other is arm)
        return
    if outliers:
        named = ", ".join(
            f"{arm.label} ({len(find_outliers(arm.clean))} of {_count_steps(arm)})" for arm, _ in outliers
        )
        yield Caution(message=f"steps over 1.5 times the median: {named}", next_step=outliers[0][1].next_step)
    if tails:
        named = ", ".join(f"{arm.label} {_measure_tail(arm):.1f}× ({_measure_mean_rate(arm)})" for arm, _ in tails)
        yield Caution(
            message=f"the mean step is far above the median; with its long steps a training does: {named}",
            next_step=tails[0][1].next_step,
        )


def _count_steps(arm: Arm) -> int:
    return sum(len(steps) for steps in arm.clean)


def _measure_mean_rate(arm: Arm) -> str:
    """What a training feels: the throughput by the mean step."""
    mean = statistics.fmean(seconds for launch in arm.clean for seconds in launch)
    return f"{format_quantity('rate', arm.trial.global_batch / mean)} samples/s"


def _measure_tail(arm: Arm) -> float:
    """The mean step over the median."""
    steps = [seconds for launch in arm.clean for seconds in launch]
    return statistics.fmean(steps) / statistics.median(steps)


def _name_outliers(arm: Arm) -> Iterator[Caution]:
    outliers = find_outliers(arm.clean)
    num_steps = _count_steps(arm)
    if len(outliers) <= MOST_OUTLIERS * num_steps:
        return
    worst = sorted(outliers, key=lambda outlier: -outlier.ratio)[:MOST_NAMED]
    named = ", ".join(
        f"step {_number_step(arm, outlier)} of round {outlier.round + 1} ({outlier.ratio:.1f}×)" for outlier in worst
    )
    yield Caution(
        message=f"{arm.label}: {len(outliers)} of {num_steps} steps took over 1.5 times the median, worst {named}",
        next_step="close other programs; the median ignores them, a mean would not",
    )


def _number_step(arm: Arm, outlier: Outlier) -> int:
    """The number of an outlier in its launch, as `samples.csv` has it: steps of other kinds ran between clean ones."""
    (result,) = (result for result in arm.results if result.trial.round == outlier.round + 1)
    return list(result.step_seconds(StepKind.CLEAN))[arm.num_dropped + outlier.step]


def _name_heavy_tail(arm: Arm) -> Iterator[Caution]:
    """A few very long steps move no median, and decide how long a training takes."""
    tail = _measure_tail(arm)
    if tail > HEAVY_TAIL:
        yield Caution(
            message=f"{arm.label}: the mean step is {tail:.1f} times the median; with its long steps a"
            f" training does {_measure_mean_rate(arm)}",
            next_step="look at samples.csv: batches that start again, such as a DataLoader's workers, do this",
        )


def _name_drifts(arms: Sequence[Arm]) -> Iterator[Caution]:
    """One warning for all configurations that drift: it is the machine that does."""
    over: list[tuple[str, float]] = []
    within: list[tuple[str, float]] = []
    for arm in arms:
        drift = find_drift(arm.clean) if arm.is_measured and arm.trial.course is None else None
        if drift is not None and drift.change_over_rounds is not None:
            over.append((arm.label, drift.change_over_rounds))
        if drift is not None and drift.change_within_launches is not None:
            within.append((arm.label, drift.change_within_launches))
    if over:
        yield Caution(
            message=f"steps drifted from the first round to the last: {_list_changes(over)}",
            next_step="trust ratios, which are taken round by round; let the machine idle before measuring",
        )
    if within:
        yield Caution(
            message=f"steps drift within a launch: {_list_changes(within)}",
            next_step=f"use more --steps, --warmup if the slow part comes first{_suggest_allocator(arms)}",
        )


def _list_changes(changes: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{label} by {format_share(change)}" for label, change in changes)


def _look_at_host(arms: Sequence[Arm]) -> Iterator[Caution]:
    results = [result for arm in arms for result in arm.results]
    noises = [(arm, measure_noise(arm.clean)) for arm in arms if arm.is_measured and not arm.trial.is_oversubscribed]
    between = max(((n.between_ratio or 0.0, arm.label) for arm, n in noises), default=(0.0, ""))
    within = max(((n.within_ratio or 0.0, arm.label) for arm, n in noises), default=(0.0, ""))
    if between[0] > NOISY_BETWEEN:
        yield Caution(
            message=f"noisy host: launches of {between[1]} differ by {format_share(between[0])} (standard deviation)",
            next_step="close other programs, or raise --rounds",
        )
    if within[0] > NOISY_WITHIN:
        yield Caution(
            message=f"noisy host: steps of {within[1]} differ by {format_share(within[0])} (standard deviation)",
            next_step=f"close other programs, or raise --steps{_suggest_allocator(arms)}",
        )
    yield from _name_few_launches(arms)
    yield from warn_of_load(results)
    yield from _name_misplacement(results)


def _name_misplacement(results: Sequence[TrialResult]) -> Iterator[Caution]:
    """Ranks that shared cores though there were enough, and nobody asked for it: their launcher bound them so."""
    for result in results:
        if result.trial.is_oversubscribed or result.trial.bind == "none" or result.trial.num_processes == 1:
            continue
        placements = [Placement(rank=own.rank, host=own.host, cores=own.cores) for own in result.ranks if own.cores]
        for message, next_step in find_mistakes(placements):
            yield Caution(message=f"{result.trial.configuration}: {message}", next_step=next_step)
            return


def _name_few_launches(arms: Sequence[Arm]) -> Iterator[Caution]:
    counts = [
        (sum(bool(len(steps)) for steps in arm.clean), arm.label)
        for arm in arms
        if arm.is_measured and not arm.trial.course
    ]
    fewest, label = min(counts, default=(FEWEST_LAUNCHES, ""))
    if fewest >= FEWEST_LAUNCHES:
        return
    if fewest == 1:
        message = f"{label} was launched once: its interval does not include how launches differ"
    else:
        message = f"{label} was launched {fewest} times: an interval rests on few numbers, a verdict may be chance"
    yield Caution(message=message, next_step="use --rounds 12")


def warn_of_load(results: Sequence[TrialResult]) -> Iterator[Caution]:
    """What else ran on the host, before and meanwhile."""
    launched = [result for result in results if result.started_at]
    first = min(launched, key=lambda result: result.started_at, default=None)
    if first is not None and first.load_before is not None and first.load_before > 1.0:
        yield Caution(
            message=f"noisy host: its load was {first.load_before:.1f} before the first trial",
            next_step="wait until other programs have ended",
        )
    stolen = [result.steal_ratio for result in results if result.steal_ratio is not None]
    if stolen and sum(stolen) / len(stolen) > STOLEN:
        mean = sum(stolen) / len(stolen)
        yield Caution(
            message=f"noisy host: its hypervisor gave {format_share(mean)} of the processor time to others",
            next_step="measure on a dedicated machine, or raise --rounds",
        )

"""Warnings about the measurement itself, each with the step that would improve it.

Worst first (`report/findings.py`): rows that failed, losses that are not numbers, ranks that did other work than meant,
then whatever makes numbers less certain than their intervals say.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from scalelab.analysis.quality import Outlier, find_disturbed, find_drift, find_outliers, measure_noise
from scalelab.analysis.stats import Rounds
from scalelab.launch.ranks.placement import Placement, find_mistakes
from scalelab.records.strategies import find_strategy
from scalelab.records.trial import Status, StepKind, TrialResult
from scalelab.report.findings import Caution, CautionKind
from scalelab.studies.shared.accelerators import look_at_devices
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.script import look_at_script
from scalelab.units import format_quantity, format_share, list_some

MOST_NAMED = 3
"""How many outliers are named, the others are counted; how many rows may have warnings of their own."""
MOST_OUTLIERS = 0.02
"""A share of outliers below this is what any shared machine has."""
NOISY_WITHIN = 0.15
NOISY_BETWEEN = 0.05
"""Relative spreads above which a host is called noisy: of steps within a launch, of launches' medians."""
FEWEST_LAUNCHES = 6
"""With fewer, intervals assume that launches differ as a normal distribution does."""
FEWEST_LOSSES = 3
"""Different losses of a rank above which the same losses elsewhere are not a coincidence."""
HEAVY_TAIL = 1.15
"""A mean this many times the median is not noise around it."""
STOLEN = 0.02
"""A share of processor time taken by the hypervisor that moves step times by as much."""

FAILED = CautionKind(
    "failed", "A row crashed, timed out, ran out of memory or was invalid", "failure", ("status", "failed", "rounds")
)
NOT_RUN = CautionKind("not-run", "A row was not run, with the reason", "failure", ("status", "failed", "rounds"))
TOO_FEW_STEPS = CautionKind("too-few-steps", "No step of a row was left after the warm-up", "failure", ("steps",))
NON_FINITE = CautionKind("non-finite", "A loss became NaN or infinite", "non-finite", ("step", "round", "rank"))
UNEQUAL_LOSSES = CautionKind(
    "unequal-losses", "Rounds with the same seed gave different losses", "wrong-work", ("step",)
)
SAME_SAMPLES = CautionKind("same-samples", "Ranks had the same losses: they train on the same samples", "wrong-work")
PARTLY_SHUFFLED = CautionKind("partly-shuffled", "Samples are not fully shuffled", "wrong-work", ("shuffle",))
MISPLACED = CautionKind("misplaced-ranks", "Ranks shared cores although there were enough", "wrong-work")
NOISY_LAUNCHES = CautionKind("noisy-launches", "Launches of a row differ by more than 5 %", "noise", ("deviation",))
DISTURBED = CautionKind("disturbed-rounds", "Single launches took over 1.5 times the median of their row", "noise")
NOISY_STEPS = CautionKind("noisy-steps", "Steps within a launch differ by more than 15 %", "noise", ("deviation",))
FEW_LAUNCHES = CautionKind("few-launches", "A row was launched fewer than six times", "noise", ("launches",))
LOADED_HOST = CautionKind("loaded-host", "Other programs ran before the first trial", "noise", ("load",))
STOLEN_TIME = CautionKind("stolen-time", "The hypervisor gave CPU time to other machines", "noise", ("share",))
DRIFT = CautionKind("drift", "Step times drift within a launch or from round to round", "noise", ("change",))
OUTLIERS = CautionKind("outliers", "Over 2 % of steps took over 1.5 times the median", "noise", ("outliers", "steps"))
HEAVY_TAILS = CautionKind("heavy-tail", "The mean step is far above the median", "noise", ("mean_over_median",))
NOT_SETTLED = CautionKind("not-settled", "Step times never settled in a launch", "noise", ("step", "steps"))
UNSTEADY = (
    *(NOISY_LAUNCHES, DISTURBED, NOISY_STEPS, LOADED_HOST, STOLEN_TIME, DRIFT, OUTLIERS, HEAVY_TAILS),
    NOT_SETTLED,
)
"""That step times vary more than they should: one thing to say of a report, for all of its rows."""
EXTRAPOLATED = CautionKind("extrapolated", "A number lies beyond what was measured", "note", ("ranks", "largest_ranks"))
UNTRAINED = CautionKind("not-trained", "The reference itself is often wrong", "wrong-work", ("accuracy",))
NO_ABLATION = CautionKind("no-ablation", "No step ran without communication, with the reason", "note")

VERBS = {
    Status.OUT_OF_MEMORY: "ran out of memory",
    Status.INVALID: "is invalid",
    Status.CRASHED: "crashed",
    Status.TIMED_OUT: "timed out",
    Status.NOT_RUN: "was not run",
}
"""How a trial ended, as the verb of a sentence."""


def is_unsteady(caution: Caution) -> bool:
    """Whether it says that step times vary more than they should."""
    return any(caution.kind == kind.name for kind in UNSTEADY)


def find_cautions(arms: Iterable[Arm]) -> tuple[Caution, ...]:
    """Everything that makes the numbers less certain than their intervals say."""
    every = list(arms)
    found = [*(caution for arm in every for caution in _look_at_arm(arm)), *look_at_devices(every)]
    return (*found, *_look_at_host(every), *_name_unsettled(every), *_name_drifts(every), *_name_tails(every))


def _look_at_arm(arm: Arm) -> Iterator[Caution]:
    is_run = arm.trial.training_run is not None  # a training run is one launch by intent, as long as it is
    if not is_run:
        yield from name_failure(arm.label, arm.results, is_measured=arm.is_measured)
    yield from _name_non_finite(arm)
    yield from _name_unequal_losses(arm)
    yield from _name_same_samples(arm)
    words = next((rank.shuffle for result in arm.results for rank in result.ranks if rank.shuffle), "")
    if words:
        advice = "if the file is sorted, use --shuffle full, or scalelab data convert to a format with random access"
        yield PARTLY_SHUFFLED(arm.label, f"{arm.label}: samples are {words}", advice, shuffle=words)
    if arm.completed and arm.num_clean_steps and not arm.is_measured and not is_run:
        yield _name_too_few_steps(arm)
    if not arm.is_measured or is_run:
        return
    is_plain = find_strategy(arm.trial.strategy).is_plain
    plan = arm.trial.step_plan
    is_alone = arm.is_alone or (arm.trial.num_ranks == 1 and bool(arm.scripts))  # nothing is sent
    if plan is not None and plan.comm_free_steps and not is_plain and not is_alone and not any(arm.comm_free):
        why = next((one.obstacle for one in arm.scripts if one.obstacle), "no memory was left to copy the model state")
        yield NO_ABLATION(
            arm.label,
            f"{arm.label}: no step ran without communication: {why}",
            "rely on communication by subtraction" if arm.scripts else "give ranks more memory, or use subtraction",
        )
    yield from look_at_script(arm)


def _name_too_few_steps(arm: Arm) -> Caution:
    """The warm-up may take all clean steps; of a script, those with an evaluation or a checkpoint are not clean."""
    found, steps = arm.num_clean_steps, len({sample.step for sample in arm.completed[0].samples})
    text = f"{arm.label}: no step is left after the warm-up: {found} of {steps} steps of a launch are clean"
    if arm.scripts and any(one.num_evaluations or one.num_checkpoints for one in arm.scripts):
        text += ", others have an evaluation or a checkpoint in them"
    return TOO_FEW_STEPS(arm.label, text, f"run more steps, --steps {4 * steps}", steps=found)


def _name_same_samples(arm: Arm) -> Iterator[Caution]:
    """Ranks whose losses are equal to the last bit in every step, unless they compute one loss over all samples."""
    is_shared = arm.trial.num_processes == 1 or any(one.num_sharing > 1 for one in arm.scripts)
    for result in () if is_shared else arm.completed:
        by_rank: dict[int, list[float | None]] = {}
        for sample in (one for one in result.samples if one.kind is not StepKind.FREE):  # whose loss is not read
            by_rank.setdefault(sample.rank, []).append(sample.loss)
        if len(by_rank) < 2 or len(set(first := by_rank.get(0, []))) < FEWEST_LOSSES or None in first:
            continue
        place = arm.trial.mesh.find_data_rank
        marks = {one.rank: one.script.input_mark for one in result.ranks if one.script}
        same = [n for n, losses in by_rank.items() if place(n) and losses == first and marks.get(n) == marks.get(0)]
        if same:
            yield SAME_SAMPLES(
                arm.label,
                f"{arm.label}: ranks 0 and {same[0]} have the same loss in every step: they train on the same samples",
                "return a Dataset, which is split over the ranks, or let build() take rank and draw by it (in a script:"
                " DistributedSampler)",
            )
            return


def _name_unsettled(arms: Sequence[Arm]) -> Iterator[Caution]:
    """One warning for all rows whose launches were too short."""
    unsettled = [arm for arm in arms if arm.is_measured and not arm.trial.training_run and not arm.warmup.is_settled]
    if unsettled:
        worst = max(unsettled, key=lambda arm: arm.warmup.num_steps / arm.num_clean_steps)
        steps, at = worst.num_clean_steps, worst.warmup.num_steps
        labels = ", ".join(arm.label for arm in unsettled)
        yield NOT_SETTLED(
            labels,
            f"step times had not settled at step {at} of {steps}: {labels}",
            f"run more steps, --steps {4 * steps}{_suggest_allocator(unsettled)}",
            step=at,
            steps=steps,
        )


def name_failure(label: str, results: Sequence[TrialResult], *, is_measured: bool, more: str = "") -> Iterator[Caution]:
    """How the first launch of a row that did not complete ended, and in how many rounds if others did complete."""
    failure = next((result for result in results if result.status is not Status.COMPLETED), None)
    if failure is None:
        return
    num_failed = sum(result.status is failure.status for result in results)
    which = f" in {num_failed} of {len(results)} rounds" if is_measured else ""
    kind = NOT_RUN if failure.status is Status.NOT_RUN else FAILED
    yield kind(
        label,
        f"{label} {VERBS[failure.status]}{which}: {failure.reason}{more}",
        "; ".join(filter(None, (failure.advice, f"logs: trials/{failure.trial.name}"))),
        status=failure.status.value,
        failed=num_failed,
        rounds=len(results),
    )


def _name_non_finite(arm: Arm) -> Iterator[Caution]:
    for result in arm.results:
        bad = result.first_non_finite_loss
        if bad is None:
            continue
        later = [one.loss for one in result.samples if one.step > bad.step and one.rank == bad.rank]
        is_back = any(loss is not None and math.isfinite(loss) for loss in later)
        where = f"step {bad.step} of round {result.trial.round}"
        text = f"the loss is {bad.loss} in {where} (rank {bad.rank}), and finite again later"
        advice = "check that such a step does not update the model"
        if not is_back:
            text = (
                f"the loss is {bad.loss} from {where} on (rank {bad.rank}); its step times are those of a diverged run"
            )
            advice = "lower the learning rate or check the data before trusting this row"
        values = {"step": bad.step, "round": result.trial.round, "rank": bad.rank}
        yield NON_FINITE(arm.label, f"{arm.label}: {text}", advice, **values)
        return


def _name_unequal_losses(arm: Arm) -> Iterator[Caution]:
    """All rounds train the same model on the same data from the same seed: their losses should be the very same."""
    losses = [result.losses() for result in arm.results if result.status is Status.COMPLETED]
    for other in (other for other in losses[1:] if other != losses[0]):  # NaN differs from itself; its words do not
        differing = [step for step in losses[0] if repr(losses[0][step]) != repr(other.get(step))]
        if differing:
            where, of = "build()", "with the same seed"
            if arm.scripts:
                where, of = "the script, or use --scratch if it resumes from a checkpoint", "of the script"
            text = f"{arm.label}: rounds {of} gave different losses from step {differing[0]} on"
            advice = f"seed everything random in {where}; on GPUs, nondeterministic kernels do this too"
            yield UNEQUAL_LOSSES(arm.label, text, advice, step=differing[0])
            return


def _suggest_allocator(arms: Sequence[Arm]) -> str:
    """On a CPU, memory that goes back and forth to the kernel is the usual cause of steps of two speeds."""
    is_open = any(arm.trial.device == "cpu" and arm.trial.allocator == "system" for arm in arms)
    return ", or try --allocator keep" if is_open else ""


def _name_tails(arms: Sequence[Arm]) -> Iterator[Caution]:
    """Long steps, row by row where few rows have them; many with them are one fact about the machine, said once."""
    measured = [arm for arm in arms if arm.is_measured]
    outliers = {arm.label: found for arm in measured for found in _name_outliers(arm)}
    tails = {arm.label: found for arm in measured for found in _name_heavy_tail(arm)}
    if len({*outliers, *tails}) <= MOST_NAMED:
        yield from (found[arm.label] for arm in measured for found in (outliers, tails) if arm.label in found)
        return
    if outliers:
        counts = [(label, one.values) for label, one in outliers.items()]
        named = ", ".join(f"{label} ({values['outliers']} of {values['steps']})" for label, values in counts)
        yield OUTLIERS("", f"steps over 1.5 times the median: {named}", next(iter(outliers.values())).next_step)
    if tails:
        slow = [arm for arm in measured if arm.label in tails]
        named = ", ".join(f"{arm.label} {_measure_tail(arm):.1f}× ({_measure_mean_rate(arm)})" for arm in slow)
        step = next(iter(tails.values())).next_step
        yield HEAVY_TAILS("", f"mean step far above the median (throughput by the mean in brackets): {named}", step)


def _measure_mean_rate(arm: Arm) -> str:
    """What a training run feels: the throughput by the mean step."""
    mean = statistics.fmean(seconds for launch in arm.clean for seconds in launch)
    return f"{format_quantity('rate', arm.step_samples / mean)} samples/s"


def _measure_tail(arm: Arm) -> float:
    """The mean step over the median."""
    steps = [seconds for launch in arm.clean for seconds in launch]
    return statistics.fmean(steps) / statistics.median(steps)


def _name_outliers(arm: Arm) -> Iterator[Caution]:
    outliers = find_outliers(arm.clean)
    num_steps = sum(len(steps) for steps in arm.clean)
    if len(outliers) <= MOST_OUTLIERS * num_steps:
        return
    worst = sorted(outliers, key=lambda outlier: -outlier.ratio)[:MOST_NAMED]
    named = ", ".join(f"step {_number_step(arm, one)} of round {one.round + 1} ({one.ratio:.1f}×)" for one in worst)
    yield OUTLIERS(
        arm.label,
        f"{arm.label}: {len(outliers)} of {num_steps} steps took over 1.5 times the median, worst {named}",
        "close other programs; the median ignores them, a mean would not",
        outliers=len(outliers),
        steps=num_steps,
    )


def _number_step(arm: Arm, outlier: Outlier) -> int:
    """The number of an outlier in its launch, as `samples.csv` has it: steps of other kinds ran between clean ones."""
    (result,) = (result for result in arm.results if result.trial.round == outlier.round + 1)
    return list(result.step_seconds(StepKind.CLEAN))[arm.num_dropped + outlier.step]


def _name_heavy_tail(arm: Arm) -> Iterator[Caution]:
    """A few very long steps move no median, and decide how long a training run takes."""
    tail = _measure_tail(arm)
    if tail > HEAVY_TAIL:
        yield HEAVY_TAILS(
            arm.label,
            f"{arm.label}: the mean step is {tail:.1f} times the median; with its long steps it does"
            f" {_measure_mean_rate(arm)}",
            "look at samples.csv: restarting data loader workers, for example, cause this",
            mean_over_median=tail,
        )


def _name_drifts(arms: Sequence[Arm]) -> Iterator[Caution]:
    """One warning for all rows that drift: it is the machine that does."""
    over: dict[str, float] = {}
    within: dict[str, float] = {}
    for arm in arms:
        drift = find_drift(arm.clean) if arm.is_measured and arm.trial.training_run is None else None
        if drift is not None and drift.change_over_rounds is not None:
            over[arm.label] = drift.change_over_rounds
        if drift is not None and drift.change_within_launches is not None:
            within[arm.label] = drift.change_within_launches
    more_steps = f"use more --steps, or --warmup if the slow steps come first{_suggest_allocator(arms)}"
    idle = "trust ratios, which are taken round by round; let the machine idle before measuring"
    for changes, words, step in (
        (over, "step times drifted from the first round to the last", idle),
        (within, "step times drift within a launch", more_steps),
    ):
        if changes:
            listed = ", ".join(f"{label} by {format_share(change)}" for label, change in changes.items())
            yield DRIFT(", ".join(changes), f"{words}: {listed}", step, change=max(changes.values(), key=abs))


def _look_at_host(arms: Sequence[Arm]) -> Iterator[Caution]:
    fair = [arm for arm in arms if arm.is_measured and not arm.trial.is_oversubscribed]
    noises = {arm.label: measure_noise(arm.clean) for arm in fair}
    between = {label: noise.between_ratio or 0.0 for label, noise in noises.items()}
    within = {label: noise.within_ratio or 0.0 for label, noise in noises.items()}
    yield from name_noise(NOISY_LAUNCHES, between, NOISY_BETWEEN, "launches", "--rounds")
    yield from _name_disturbed(fair)
    yield from name_noise(NOISY_STEPS, within, NOISY_WITHIN, "steps", f"--steps{_suggest_allocator(arms)}")
    yield from name_few_launches(
        {arm.label: arm.clean for arm in arms if arm.is_measured and not arm.trial.training_run}
    )
    results = [result for arm in arms for result in arm.results]
    yield from warn_of_load(results)
    yield from _name_misplacement(results)


def name_noise(
    kind: CautionKind, spreads: Mapping[str, float], limit: float, what: str, remedy: str
) -> Iterator[Caution]:
    """The row with the largest spread, where that is above the limit."""
    worst = max(spreads, key=lambda label: spreads[label], default="")
    if spreads.get(worst, 0.0) > limit:
        yield kind(
            worst,
            f"noisy host: {what} of {worst} vary by {format_share(spreads[worst])} (standard deviation)",
            f"close other programs, or raise {remedy}",
            deviation=spreads[worst],
        )


def _name_disturbed(arms: Sequence[Arm]) -> Iterator[Caution]:
    """Launches that stand out from their row, all in one warning: what ran beside them slowed several rows."""
    found = {arm.label: find_disturbed(arm.clean) for arm in arms}
    slow = sorted(((over, label, n) for label, rounds in found.items() for n, over in rounds.items()), reverse=True)
    if slow:
        named = list_some([f"{label} in round {n} ({over:.1f}×)" for over, label, n in slow], MOST_NAMED)
        text = f"single rounds took over 1.5 times the row's median: {named}; intervals reach that far"
        yield DISTURBED(", ".join(filter(found.get, found)), text, "something else ran then: measure again")


def _name_misplacement(results: Sequence[TrialResult]) -> Iterator[Caution]:
    """Ranks that shared cores though there were enough, and no flag asked for it: their launcher bound them so."""
    for result in results:
        if result.trial.is_oversubscribed or result.trial.bind == "none" or result.trial.num_processes == 1:
            continue
        placements = [Placement(rank=own.rank, host=own.host, cores=own.cores) for own in result.ranks if own.cores]
        for message, next_step in find_mistakes(placements):
            yield MISPLACED(result.trial.configuration, f"{result.trial.configuration}: {message}", next_step)
            return


def name_few_launches(rows: Mapping[str, Rounds]) -> Iterator[Caution]:
    """The row with the fewest launches, where an interval over them means little."""
    counts = [(sum(bool(len(steps)) for steps in rounds), label) for label, rounds in rows.items()]
    fewest, label = min(counts, default=(FEWEST_LAUNCHES, ""))
    if fewest >= FEWEST_LAUNCHES:
        return
    once, several = "once: its interval leaves out how launches differ", "times: intervals rest on few launches"
    message = once if fewest == 1 else f"{fewest} {several}, a verdict may be due to chance"
    yield FEW_LAUNCHES(label, f"{label} was launched {message}", "use --rounds 12", launches=fewest)


def warn_of_load(results: Sequence[TrialResult]) -> Iterator[Caution]:
    """What else ran on the host, before and meanwhile."""
    launched = [result for result in results if result.started_at]
    first = min(launched, key=lambda result: result.started_at, default=None)
    if first is not None and first.load_before is not None and first.load_before > 1.0:
        message = f"noisy host: its load was {first.load_before:.1f} before the first trial"
        yield LOADED_HOST("", message, "wait until other programs end", load=first.load_before)
    stolen = [result.steal_ratio for result in results if result.steal_ratio is not None]
    if stolen and (mean := statistics.fmean(stolen)) > STOLEN:
        yield STOLEN_TIME(
            "",
            f"noisy host: the hypervisor gave {format_share(mean)} of the CPU time to other machines",
            "measure on a dedicated machine, or raise --rounds",
            share=mean,
        )

"""The tables and words of `loader-workers`: what a step waits for, what an epoch takes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import Verdict, estimate_location, estimate_median, estimate_ratio, judge
from scalelab.records.trial import StepKind, StepSample, TrialResult
from scalelab.report.document import Column, Table
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.breakdown import estimate_phase_share
from scalelab.studies.shared.sweep import (
    CONTROL,
    SweepColumn,
    make_sweep_table,
    ratio_column,
    samples_column,
)
from scalelab.units import format_interval, format_quantity

Read = Callable[[StepSample], float | None]


def read_load(sample: StepSample) -> float | None:
    """What a step waits for its batch."""
    return sample.input_seconds


def read_train(sample: StepSample) -> float | None:
    """The rest of it."""
    parts = (sample.forward_seconds, sample.backward_seconds, sample.optimizer_seconds)
    known = [seconds for seconds in parts if seconds is not None]
    return sum(known) if len(known) == len(parts) else None


def collect_phases(result: TrialResult, read: Read) -> list[float]:
    """Of every timed step of every rank."""
    found = (read(sample) for sample in result.samples if sample.kind is StepKind.PHASES)
    return [seconds for seconds in found if seconds is not None]


def estimate_part(arm: Arm, read: Read) -> Estimate | None:
    """The median of a part of the step, over steps and ranks."""
    rounds = [collect_phases(result, read) for result in arm.completed]
    return estimate_median(rounds) if any(rounds) else None


def estimate_mean_part(arm: Arm, read: Read) -> Estimate | None:
    """The mean of a part of the step, from the means of the launches."""
    rounds = [collect_phases(result, read) for result in arm.completed]
    means = [statistics.fmean(steps) for steps in rounds if steps]
    return estimate_location(means) if means else None


def estimate_mean_step(arm: Arm) -> Estimate | None:
    """The mean of the clean steps, from the means of the launches."""
    means = [statistics.fmean(steps) for steps in arm.clean if len(steps)]
    return estimate_location(means) if means else None


def estimate_first_step(arm: Arm) -> Estimate | None:
    """The very first step of every launch: the workers have just been started."""
    firsts = [next(iter(result.step_seconds(StepKind.CLEAN).values()), None) for result in arm.completed]
    known = [seconds for seconds in firsts if seconds is not None]
    return estimate_location(known) if known else None


def make_split_table(arms: Iterable[Arm], reference: Arm | None) -> Table:
    """The step, and what it is made of."""
    total = Column(key="step_seconds", header="total", quantity="seconds", note="a clean step")
    load = Column(key="load_seconds", header="load", quantity="seconds", note="waiting for the batch")
    train = Column(key="train_seconds", header="train", quantity="seconds", note="forward, backward and optimizer")
    share = Column(key="load_share", header="load share", quantity="share")
    columns = [
        SweepColumn(column=total, read=lambda arm: arm.step),
        SweepColumn(column=load, read=lambda arm: estimate_part(arm, read_load)),
        SweepColumn(column=train, read=lambda arm: estimate_part(arm, read_train)),
        SweepColumn(column=share, read=lambda arm: estimate_phase_share(arm, "input")),
        ratio_column(reference, header="× 0 workers"),
        samples_column(),
    ]
    return make_sweep_table(arms, columns, name_header="run")


def make_epoch_table(arms: Iterable[Arm], steps_per_epoch: int | None) -> Table:
    """What all steps of an epoch take, with loading and without, and what starting costs."""

    def stretch(mean: Estimate | None) -> Estimate | None:
        if mean is None or not steps_per_epoch:
            return None
        return mean.map(lambda seconds: seconds * steps_per_epoch)

    whole = Column(key="epoch_seconds", header="epoch", quantity="seconds", note="its steps times the mean step")
    bare = Column(
        key="epoch_train_seconds",
        header="without loading",
        quantity="seconds",
        note="the same of forward, backward and optimizer",
    )
    mean_step = Column(key="mean_step_seconds", header="mean step", quantity="seconds")
    first = Column(key="first_step_seconds", header="first step", quantity="seconds", note="workers have just started")
    columns = [
        SweepColumn(column=whole, read=lambda arm: stretch(estimate_mean_step(arm))),
        SweepColumn(column=bare, read=lambda arm: stretch(estimate_mean_part(arm, read_train))),
        SweepColumn(column=mean_step, read=estimate_mean_step),
        SweepColumn(column=first, read=estimate_first_step),
    ]
    length = "" if not steps_per_epoch else f"an epoch has {steps_per_epoch} steps"
    return make_sweep_table(arms, columns, name_header="run", notes=(length,) if length else ())


def summarise_workers(arms: Mapping[str, Arm], reference: Arm | None) -> Iterator[str]:
    """Which number is the best, and what loading costs without any."""
    if reference is None or not reference.is_measured:
        return
    others = [arm for name, arm in arms.items() if arm.is_measured and arm is not reference and name != CONTROL]
    ratios = [(arm, estimate_ratio(arm.clean, reference.clean)) for arm in others]
    yield from _name_best(ratios)
    load = estimate_part(reference, read_load)
    if load is not None:
        share = format_quantity("share", estimate_phase_share(reference, "input"))
        yield f"Without workers a step waits {format_quantity('seconds', load)} for its batch, {share} of it."
    best = min(ratios, key=lambda pair: pair[1].value, default=None)
    hidden = estimate_part(best[0], read_load) if best else None
    if best is not None and hidden is not None and judge(best[1]) is Verdict.FASTER:
        yield f"With {best[0].label} it waits {format_quantity('seconds', hidden)}."
    slower = [(arm, ratio) for arm, ratio in ratios if judge(ratio) is Verdict.SLOWER]
    if slower:
        listed = ", ".join(f"{arm.label} ({format_interval('ratio', ratio)} times)" for arm, ratio in slower)
        yield f"Slower than none: {listed}."


def _name_best(ratios: list[tuple[Arm, Estimate]]) -> Iterator[str]:
    """The fastest, if it is faster than none, and the fewest that do as well."""
    if not ratios:
        return
    best, ratio = min(ratios, key=lambda pair: pair[1].value)
    if judge(ratio) is not Verdict.FASTER:
        is_sure = all(judge(other) in (Verdict.SLOWER, Verdict.NO_DIFFERENCE) for _, other in ratios)
        verdict = "Use none" if is_sure else "Whether workers help is unresolved"
        words = f"a step with {best.label} takes {format_interval('ratio', ratio)} times as long as without"
        yield f"{verdict}: {words}, {judge(ratio)}."
        return
    yield f"Use {best.label}: a step takes {format_interval('ratio', ratio)} of that without any, the least of all."
    for arm, _ in ratios:
        against = estimate_ratio(arm.clean, best.clean)
        if arm is best:
            return
        if judge(against) is Verdict.NO_DIFFERENCE:
            yield f"{arm.label} does as well: {format_interval('ratio', against)} times the step of {best.label}."
            return

"""What rows answer from: measured arms, sums over training runs, forecasts, and tables beside the published ones.

Absolute times belong to a machine. Only a ratio, a share or an order compares with a published number, and only those
are divided by it; times and bytes stand beside the published ones, and are divided by them in full size only.
A published figure is text: it keeps the digits and the unit that it was printed with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from scalelab.analysis.estimate import Domain, Estimate
from scalelab.analysis.stats import estimate_location, estimate_ratio, estimate_unpaired_ratio, pair_medians
from scalelab.answers.train import TrainStudy
from scalelab.recipes.recipe import Outcome, Outcomes, Size
from scalelab.recipes.setting import RANDOM, name_model
from scalelab.records.trial import Option, Status, StepKind, Trial, TrialResult
from scalelab.report.document import Table
from scalelab.report.findings import Finding, FindingKind
from scalelab.report.tables import INTERVAL_NOTE, Field, make_column, make_table, ratio_column, text_column
from scalelab.studies.memory.answer import collect_rows
from scalelab.studies.memory.study import Memory
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.sweep import CONTROL
from scalelab.units import Quantity, format_known, format_quantity
from scalelab.workloads.catalogue import BUILT_IN, make_options

UNTOLD = "This run does not show it"
LEAST_TASKS = 3
"""Rows that measured one configuration, for its spread to be told."""
WITHOUT_UNIT: tuple[Quantity, ...] = ("ratio", "share")
"""Accuracies are of a dataset: in small it is another one than the published."""


def list_arms(outcome: Outcome | None) -> list[Arm]:
    """The measured arms, without the control."""
    arms = outcome.arms.values() if outcome else ()
    return [arm for arm in arms if arm.configuration != CONTROL and arm.is_measured]


def find_arm(outcome: Outcome | None, options: Mapping[str, Option] | None = None, **fields: object) -> Arm | None:
    """The first measured arm whose trial has these fields and options."""
    for arm in list_arms(outcome):
        is_wanted = all(getattr(arm.trial, name) == value for name, value in fields.items())
        if is_wanted and all(arm.trial.options.get(name) == value for name, value in (options or {}).items()):
            return arm
    return None


def list_spread(outcome: Outcome | None) -> list[Arm]:
    """The measured arms with more than one rank, the fewest ranks first."""
    return sorted((a for a in list_arms(outcome) if a.trial.num_ranks > 1), key=lambda arm: arm.trial.num_ranks)


def find_too_large(outcome: Outcome) -> Arm | None:
    """The first arm that ran out of memory."""
    return next((a for a in outcome.arms.values() if a.failure and a.failure.status is Status.OUT_OF_MEMORY), None)


def describe_limit(outcome: Outcome) -> str:
    """`with memory capped at 300 MB per rank, …, batch 64 does not fit`; empty where every batch fits."""
    failed = find_too_large(outcome)
    if failed is None:
        return ""
    limit, batch = failed.trial.memory_limit_bytes, failed.trial.global_batch
    has = f"the machine has {say('bytes', there)}" if (there := find_host_memory(outcome)) else ""
    if limit is None:
        return f"batch {batch} runs out of memory{f' ({has})' if has else ''}"
    return (
        f"with memory capped at {say('bytes', limit)} per rank, to imitate a full device{f' ({has})' if has else ''},"
        f" batch {batch} does not fit"
    )


def find_host_memory(outcome: Outcome) -> int | None:
    """Of the machine that it ran on; None: unknown, as before 0.2."""
    known = [rank.host_memory_bytes for result in outcome.results for rank in result.ranks]
    return min((num_bytes for num_bytes in known if num_bytes), default=None)


def explain_limit(outcome: Outcome) -> tuple[str, ...]:
    """What a limit counts, beside the memory in tables."""
    if not any(arm.trial.memory_limit_bytes for arm in outcome.arms.values()):
        return ()
    return (
        "The limit is scalelab's, not the machine's memory. It counts what a process allocates beyond torch itself, not"
        " its tensors alone; the resident memory of a process includes torch, and may exceed the limit.",
    )


def is_out_of_memory(batch: int, result: TrialResult) -> bool:
    """Whether this is the batch that was published as out of memory, and it was."""
    return result.status is Status.OUT_OF_MEMORY and result.trial.global_batch == batch


def divide_steps(numerator: Arm | None, denominator: Arm | None) -> Estimate | None:
    """The step time of one over that of the other, round by round; None where either is missing."""
    if numerator is None or denominator is None:
        return None
    return estimate_ratio(numerator.clean, denominator.clean)


def divide_speedups(one: tuple[Arm, Arm], other: tuple[Arm, Arm]) -> Estimate | None:
    """The speedup of one pair over that of the other, each a slow arm and a fast one; round by round.

    Narrower than both speedups where a slow round slows all four arms; None where no round completed all of them.
    """
    medians = pair_medians([arm.clean for arm in (*one, *other)])
    if not medians.shape[1]:
        return None
    above, below = medians[0] / medians[1], medians[2] / medians[3]
    return estimate_ratio([[speedup] for speedup in above], [[speedup] for speedup in below])


def compare_estimates(one: Estimate, other: Estimate) -> int:
    """1 where one interval lies above the other, −1 where below, 0 where they overlap."""
    return int(one.ends[0] > other.ends[1]) - int(one.ends[1] < other.ends[0])


def compare_independent(one: Estimate, other: Estimate) -> int:
    """1 where one ratio of times is above another of another study, −1 where below, 0 where the interval includes none.

    The arms that face each other add up as squares, on the log scale (Zou and Donner 2008).
    """
    ends = (one.low, one.high, other.low, other.high)
    if any(end is None or end <= 0 for end in ends):
        return compare_estimates(one, other)
    low, high, below, above = (math.log(end) for end in ends if end is not None)
    mine, theirs = math.log(one.value), math.log(other.value)
    apart = mine - theirs
    is_above = apart > math.hypot(mine - low, above - theirs)
    return int(is_above) - int(-apart > math.hypot(high - mine, theirs - below))


def compare_tasks(rows: Mapping[str, Outcomes]) -> Iterator[str]:
    """How much one configuration differs between the rows that measured it: only ratios within a row compare."""
    found: dict[tuple[str, ...], dict[str, Arm]] = {}
    for row, outcomes in rows.items():
        for arm in (arm for outcome in outcomes.values() for arm in list_arms(outcome)):
            trial = arm.trial
            if trial.workload in BUILT_IN and not trial.perturbation.seconds and not trial.training_run:
                name = f"{name_model(trial)}, {trial.strategy} × {trial.num_ranks}, batch {trial.global_batch}"
                alike = (name, trial.dtype, str(trial.spreading), str(make_options(trial.workload, trial.options)))
                found.setdefault(alike, {}).setdefault(row, arm)
    most = max(found, key=lambda alike: len(found[alike]), default=("",))
    steps = sorted((arm.step.value, row) for row, arm in found.get(most, {}).items())
    if len(steps) < LEAST_TASKS:
        return
    low, high = (f"{format_quantity('seconds', seconds)} ({row})" for seconds, row in (steps[0], steps[-1]))
    yield (
        f"a step of {most[0]}, took {low} to {high}: rows ran one after the other beside changing load, so only ratios"
        " within a row compare"
    )


def read_memory(arm: Arm) -> int | None:
    """The accounted peak of the rank that has most; the resident set of its process where nothing was accounted."""
    accounted = [rank.memory.peak_bytes for rank in arm.reports if rank.memory]
    return max(accounted, default=arm.peak_memory_bytes)


def count_parameters(arm: Arm) -> int:
    return make_options(arm.trial.workload, arm.trial.options).count_parameters()


def scale(estimate: Estimate | None, factor: float) -> Estimate | None:
    return None if estimate is None else estimate.map(lambda value: value * factor)


def list_completed(outcome: Outcome | None) -> list[TrialResult]:
    return [result for result in outcome.results if result.status is Status.COMPLETED] if outcome else []


def find_completed(outcome: Outcome | None) -> TrialResult | None:
    """The first result that completed."""
    return next(iter(list_completed(outcome)), None)


@dataclass(frozen=True, kw_only=True)
class RepeatedTraining(TrainStudy):
    """A training run launched several times, so that its whole time has an interval.

    Those of one row take turns, so that a machine that gets slower slows all of them.
    """

    launches: int = 3

    def plan(self) -> list[Trial]:
        return [replace(trial, round=number) for trial in super().plan() for number in range(1, self.launches + 1)]


def list_totals(outcome: Outcome | None) -> dict[int, float]:
    """The time of all steps of a training run on its slowest rank, profiled ones included, by launch."""
    kinds = (StepKind.CLEAN, StepKind.PROFILED)
    return {
        one.trial.round: sum(seconds for kind in kinds for seconds in one.step_seconds(kind).values())
        for one in list_completed(outcome)
    }


ListTimes = Callable[[Outcome | None], dict[int, float]]
"""A time of every launch of a training run."""


def sum_training(outcome: Outcome | None, list_times: ListTimes = list_totals) -> Estimate | None:
    """The time of a training run over its launches: by default that of all steps."""
    totals = list_times(outcome)
    return estimate_location(list(totals.values())) if totals else None


def divide_trainings(
    numerator: Outcome | None, denominator: Outcome | None, list_times: ListTimes = list_totals
) -> Estimate | None:
    """The whole time of one training run over that of another, launch by launch: a row's launches take turns."""
    above, below = list_times(numerator), list_times(denominator)
    shared = sorted(above.keys() & below.keys())
    if len(shared) > 1:
        return estimate_ratio([[above[launch]] for launch in shared], [[below[launch]] for launch in shared])
    sides = ([[total] for total in totals.values()] for totals in (above, below))
    return estimate_unpaired_ratio(*sides) if above and below else None


def list_losses(outcome: Outcome | None) -> list[float]:
    """The losses of a training run, step by step."""
    result = find_completed(outcome)
    return [] if result is None else list(result.losses().values())


def list_findings(outcome: Outcome | None, *kinds: FindingKind) -> list[Finding]:
    """What a study found, of these kinds."""
    names = {kind.name for kind in kinds}
    findings = outcome.document.findings if outcome and outcome.document else ()
    return [finding for finding in findings if finding.kind in names]


def quote(outcome: Outcome | None, *kinds: str, subject: str = "") -> tuple[str, ...]:
    """What a study found, the weightiest first; of some kinds, and about one subject, only if they are named."""
    if outcome is None or outcome.document is None:
        return ()
    if not kinds:
        return outcome.document.summary
    found = [finding for finding in outcome.document.findings if finding.kind in kinds]
    return tuple(finding.text for finding in found if subject in ("", finding.subject))


@dataclass(frozen=True, kw_only=True)
class MemoryForecast(Memory):
    """Memory by forecast alone: a step on tensors without memory, and no measurement."""

    def plan(self) -> list[Trial]:
        return self.plan_forecasts()


def describe_forecast(outcome: Outcome | None, device_bytes: float, origin: str = "as published") -> list[str]:
    """Whether every configuration would fit into a device; with where its sizes come from."""
    sentences = []
    for row in collect_rows(outcome.results) if outcome else ():
        if row.forecast is None:
            continue
        peak = row.forecast.peak_bytes
        model = make_options(row.trial.workload, row.trial.options).label
        verdict = "fits" if peak <= device_bytes else "does not fit"
        sentences.append(
            f"Prediction, not measured: {model} {origin} in {row.trial.dtype}, {row.label} per rank, peaks at"
            f" {say('bytes', peak)} with CPU operators; it {verdict} into {say('bytes', device_bytes)}, not"
            " counting fragmentation and the CUDA context."
        )
    return sentences


def read_peak(outcome: Outcome | None) -> int | None:
    """The highest forecast of a part."""
    found = [row.forecast.peak_bytes for row in (collect_rows(outcome.results) if outcome else ()) if row.forecast]
    return max(found, default=None)


ACCOUNTED = "accounted: what torch's allocator holds at the peak of a step, not what the process has resident"


def list_tables(outcome: Outcome) -> list[Table]:
    """The tables of a study, each with a title; of a training run not its curve: on random data it shows nothing."""
    document = outcome.document
    found = []
    for section in document.sections if document else ():
        for number, table in enumerate(section.tables):
            title = table.title or (section.heading if number == 0 else "")
            found.append(replace(name_resident(table, outcome), title=title))
    kept = found[1:] if any(result.trial.training_run for result in outcome.results) else found
    title = document.title if document else ""
    return [replace(table, title=table.title or title) for table in kept[:1]] + kept[1:]


def name_resident(table: Table, outcome: Outcome) -> Table:
    """On a CPU, peaks are of the whole process, torch included: rows may show those of its tensors beside them."""
    if any(result.trial.device != "cpu" for result in outcome.results):
        return table
    columns = (
        replace(column, header="resident memory") if column.key == "peak_memory_bytes" else column
        for column in table.columns
    )
    return replace(table, columns=tuple(columns))


def learns_nothing(outcome: Outcome) -> bool:
    """Whether it is a training run on random data: its loss is not what a row asks about."""
    runs = [result.trial for result in outcome.results if result.trial.training_run]
    return bool(runs) and all(trial.options.get("data", RANDOM) == RANDOM for trial in runs)


class Compared(NamedTuple):
    """One line of a comparison."""

    what: str
    ours: Estimate | float | None
    published: float | None
    printed: str = ""
    """The published figure as it was printed, with its unit; empty: derived from printed figures."""


def is_comparable(quantity: Quantity, size: Size, *, is_ratio: bool = False) -> bool:
    """Whether a number of ours may be divided by a published one."""
    return is_ratio or quantity in WITHOUT_UNIT or size == "full"


def print_published(quantity: Quantity, published: float | None, printed: str) -> str | None:
    return None if published is None else printed or say(quantity, published)


def divide_published(ours: Estimate | float | None, published: float | None) -> Estimate | float | None:
    if ours is None or not published:
        return None
    return ours.map(lambda value: value / published) if isinstance(ours, Estimate) else ours / published


def make_beside_table(
    quantity: Quantity,
    lines: Iterable[Compared],
    *,
    title: str,
    size: Size,
    notes: tuple[str, ...] = (),
    is_ratio: bool = False,
    is_signed: bool = False,
    header: str = "ours",
    unlike: Collection[str] = (),
) -> Table | None:
    """Ours beside the published; None where there is nothing of ours. `is_ratio`: it compares across machines.

    `is_signed`: lines may be differences, so that one below 0 is possible. `unlike`: lines that are not divided.
    """
    listed = list(lines)
    if all(line.ours is None for line in listed):
        return None
    quotients = {line.what: divide_published(line.ours, line.published) for line in listed if line.what not in unlike}
    quotient: Field[Compared] = ratio_column("quotient", "ours / published", lambda line: quotients.get(line.what))
    is_divided = is_comparable(quantity, size, is_ratio=is_ratio) and any(
        found is not None for found in quotients.values()
    )
    there: Field[Compared] = text_column(
        "published", "published", lambda line: print_published(quantity, line.published, line.printed), align="right"
    )
    usual: Domain | None = "amount" if quantity == "share" else "part" if quantity == "accuracy" else None
    domain: Domain | None = "signed" if is_signed else usual
    has_interval = any(isinstance(line.ours, Estimate) and line.ours.low is not None for line in listed)
    return make_table(
        listed,
        text_column("what", "what", lambda line: line.what),
        make_column(quantity, "ours", header, lambda line: line.ours, domain=domain),
        there if any(line.published is not None for line in listed) else None,
        quotient if is_divided else None,
        title=title,
        notes=(*((INTERVAL_NOTE,) if has_interval else ()), *notes),
    )


def say(quantity: Quantity, value: Estimate | float | None) -> str:
    """A number in a finding; where its interval is wider than itself, the ends."""
    return format_known(quantity, value) if isinstance(value, Estimate) else format_quantity(quantity, value)


def say_wide(quantity: Quantity, value: Estimate | float | None) -> str:
    """A number in an answer, however wide its interval: `1.9 (1.1 to 11.8) ms`, with no end that is impossible.

    `unknown` only where the number itself is.
    """
    if not isinstance(value, Estimate) or value.low is None or value.high is None:
        return format_quantity(quantity, value)
    if value.value < 0:
        return "unknown"
    high = min(value.high, 1.0) if quantity in ("share", "accuracy") and value.value <= 1 else value.high
    return format_quantity(quantity, replace(value, low=max(0.0, value.low), high=high))


def keep_tables(*tables: Table | None) -> tuple[Table, ...]:
    return tuple(table for table in tables if table is not None)

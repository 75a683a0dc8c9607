"""Where the time of a step goes: the parts of every rank (`analysis/step_parts.py`), and the phases of every row.

A step split in two: waiting for its batch (load), and forward, backward and optimizer (train).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_location, estimate_median
from scalelab.analysis.step_parts import LARGEST_REST, PARTS, LaunchSteps, RankBreakdown, break_down, tabulate_steps
from scalelab.records.strategies import find_strategy
from scalelab.records.trial import PHASES, StepKind, StepSample, Trial, TrialResult
from scalelab.report.charts.plot import plot_parts
from scalelab.report.document import Chart, Table
from scalelab.report.findings import DETAIL, REASON, Caution, CautionKind, FindingKind, Known
from scalelab.report.tables import INTERVAL_NOTE, Field, make_table, seconds_column, share_column, text_column
from scalelab.studies.shared.arms import Arm, count_rest, describe_failures, describe_status, join_words, keep_by_arm
from scalelab.units import format_share

HEADERS = {"exposed": "exposed comm"}
"""Parts whose name alone would not do."""
BREAKDOWN_NOTES = (
    INTERVAL_NOTE,
    "step = input + compute + exposed comm + waiting + stalled + rest",
    "waiting: for the last rank's gradients; exposed comm: the all-reduce after that, with nothing left to compute",
    "stalled: other programs ran on its core; rest: the part of clean steps that phase-timed steps do not explain",
)
WAITING = FindingKind("waiting", "Ranks wait for a slower rank", DETAIL, ("seconds", "share"))
UNEXPLAINED = CautionKind("unexplained-time", "The parts of a step do not add up to it", "noise", ("share", "rank"))


def waits_for_buffers(result: TrialResult) -> bool:
    """Whether ranks get rank 0's buffers before every forward, and the model has some."""
    trial = result.trial
    is_sent = find_strategy(trial.strategy).does_send("buffers", "forward") and trial.spreading.broadcast_buffers
    if not is_sent or trial.num_ranks == 1 or spans_hosts(result):
        return False
    return any(report.buffer_bytes for report in result.ranks)


def spans_hosts(result: TrialResult) -> bool:
    """Whether its ranks ran on several hosts, whose clocks cannot be compared."""
    return len({report.host for report in result.ranks if report.host}) > 1


@keep_by_arm
def tabulate_launches(arm: Arm) -> list[LaunchSteps | None]:
    """The phase-timed steps of every completed launch."""
    return [
        tabulate_steps(result.samples, result.trial.num_processes, waits_for_buffers=waits_for_buffers(result))
        for result in arm.completed
    ]


@keep_by_arm
def break_arm(arm: Arm) -> list[RankBreakdown] | None:
    """Every rank's step in parts; None if they cannot be separated (`explain_missing` says why)."""
    if not arm.is_measured or explain_arm(arm):
        return None
    return break_down(tabulate_launches(arm), [_read_clean(arm, result) for result in arm.completed])


def _read_clean(arm: Arm, result: TrialResult) -> list[list[float]]:
    """Each rank's clean steps of one launch, after the warm-up."""
    steps: list[list[float]] = [[] for _ in range(result.trial.num_processes)]
    for sample in result.samples:
        if sample.kind is StepKind.CLEAN:
            steps[sample.rank].append(sample.step_seconds)
    return [times[arm.num_dropped :] for times in steps]


def explain_strategy(trial: Trial) -> str:
    """Why a strategy's steps have no parts; empty: they have."""
    strategy = find_strategy(trial.strategy)
    if strategy.does_send("parameters", "forward"):
        return f"{trial.strategy} communicates in forward and backward: no moment exists after which a rank only waits"
    if strategy.has_replicas:
        return f"{trial.strategy} is one process: its replicas are not timed separately"
    return ""


def explain_arm(arm: Arm) -> str:
    """Why a row's steps have no parts, whatever was timed; empty: they have."""
    if any(spans_hosts(result) for result in arm.completed):
        return "its ranks are on several hosts, whose clocks cannot be compared"
    if arm.trial.accumulation > 1 and any(waits_for_buffers(result) for result in arm.completed):
        return "its buffers are sent in the first of several micro-batches, which are not timed separately"
    return explain_strategy(arm.trial)


def explain_missing(arm: Arm) -> str:
    """Why a row has no parts."""
    return explain_arm(arm) or "no parts: its phases or its last gradients were not timed"


def make_breakdown_table(arm: Arm, *, title: str = "") -> Table:
    """One row per rank; every part is – where they cannot be separated, with the reason below."""
    found = break_arm(arm)
    by_rank = dict(enumerate(found)) if found else {}

    def read(rank: int, value: Callable[[RankBreakdown], Known]) -> Known:
        return value(by_rank[rank]) if rank in by_rank else None

    def part_column(part: str) -> Field[int]:
        return seconds_column(
            f"{part}_seconds", HEADERS.get(part, part), lambda rank: read(rank, lambda parts: parts.parts.get(part))
        )

    return make_table(
        range(arm.trial.num_processes),
        text_column("rank", "rank", lambda rank: f"rank {rank}"),
        seconds_column("step_seconds", "step", lambda rank: read(rank, lambda parts: parts.step)),
        *(part_column(part) for part in PARTS),
        seconds_column("rest_seconds", "rest", lambda rank: read(rank, lambda parts: parts.rest)),
        share_column("rest_share", "of the step", lambda rank: read(rank, lambda parts: parts.rest_share)),
        title=title,
        notes=BREAKDOWN_NOTES if found else (explain_missing(arm),),
    )


def warn_of_rest(arm: Arm) -> Iterator[Caution]:
    """Parts that do not add up to the step explain less than they seem to."""
    unexplained = [parts for parts in break_arm(arm) or () if not parts.is_explained]
    if unexplained:
        worst = max(unexplained, key=lambda parts: abs(parts.rest_share))
        # Parts are timed in their own steps: on a loaded machine those may take longer than the clean ones.
        is_over = worst.rest_share < 0
        share = format_share(1 - worst.rest_share if is_over else worst.rest_share)
        words = f"add up to {share} of the clean step" if is_over else f"leave {share} of the clean step unexplained"
        yield UNEXPLAINED(
            arm.label,
            f"{arm.label}: the parts of a step, timed in their own steps, {words} on rank {worst.rank}"
            f" (limit {format_share(LARGEST_REST)})",
            "close other programs, or raise --phase-steps and --rounds",
            share=worst.rest_share,
            rank=worst.rank,
        )


ORDER = ("compute", "exposed", "waiting", "input", "stalled")
assert set(ORDER) == set(PARTS)
MOST_RANKS = 16
MOST_BARS = 24
SLIVER = 0.002
"""A part that is shorter than this part of the longest is less than a pixel."""


SLEEP = "injected sleep"


def plot_rank_parts(*arms: Arm) -> Chart | None:
    """Every rank's step, those of several arms on one axis; None if no arm's parts can be separated."""
    found = {arm.label: (arm, ranks) for arm in arms if (ranks := break_arm(arm))}
    rows: list[dict[str, Any]] = []
    for label, (arm, by_rank) in found.items():
        for parts in by_rank[:MOST_RANKS]:
            bar = f"rank {parts.rank}" if len(found) == 1 else f"{label}, rank {parts.rank}"
            rows += [{"bar": bar, "key": label} | part for part in list_parts(arm, parts)]
    if not rows:
        return None
    drawn, slivers = drop_slivers([row for row in rows if row["seconds"].value >= 0])
    said = ["The parts of a clean step, timed in steps of their own: they may add up to a little more than the step."]
    hidden = max(len(by_rank) for _, by_rank in found.values()) - MOST_RANKS
    if hidden > 0:
        said.append(count_rest(hidden, "rank", "in the table only"))
    only = next(iter(found))
    return plot_parts(
        title=f"A step of {only}, rank by rank" if len(found) == 1 else "A step, rank by rank",
        rows=drawn,
        caption=join_words(*said, slivers, "Intervals are in the table."),
    )


def list_parts(arm: Arm, parts: RankBreakdown) -> Iterator[dict[str, Any]]:
    """The parts of a rank's step, a sleep that was injected into its compute apart from it."""
    told = arm.trial.perturbation
    is_asleep = told.seconds and told.delay_phase != "input" and told.delay_rank in (None, parts.rank)
    for part in (part for part in ORDER if part in parts.parts):
        seconds = parts.parts[part]
        if part == "compute" and is_asleep and seconds.value >= told.seconds:
            yield {"series": part, "seconds": seconds.map(lambda whole: whole - told.seconds)}
            yield {"series": SLEEP, "seconds": Estimate(value=told.seconds)}
        else:
            yield {"series": HEADERS.get(part, part), "seconds": seconds}
    yield {"series": "rest", "seconds": parts.rest}


def drop_slivers(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Without parts that no bar would show, and a sentence that names them."""
    longest: dict[str, float] = {}
    for row in rows:
        longest[row["series"]] = max(longest.get(row["series"], 0.0), abs(row["seconds"].value))
    slivers = [name for name, seconds in longest.items() if seconds < SLIVER * max(longest.values())]
    words = f"Too short to draw: {', '.join(slivers)}." if slivers else ""
    return [row for row in rows if row["series"] not in slivers], words


def plot_phases(arms: Iterable[Arm]) -> Chart | None:
    """The phases of every configuration whose steps were timed phase by phase; None if none was."""
    known = list(arms)
    timed = [arm for arm in known if arm.is_measured and arm.phase("forward") is not None]
    if not timed:
        return None
    rows = [
        {"bar": arm.label, "series": phase, "seconds": found, "key": arm.label}
        for arm in timed[:MOST_BARS]
        for phase in PHASES
        if (found := arm.phase(phase)) is not None
    ]
    failed = [
        {"bar": arm.label, "status": describe_status(arm), "key": arm.label} for arm in known if not arm.is_measured
    ]
    said = ["Medians of steps timed phase by phase; backward includes the gradient all-reduce."]
    if len(timed) > MOST_BARS:
        said.append(count_rest(len(timed) - MOST_BARS, "configuration", "not drawn"))
    drawn, slivers = drop_slivers(rows)
    said += [slivers, *describe_failures((row["bar"], row["status"]) for row in failed)]
    return plot_parts(title="Phases of a step", rows=drawn, caption=join_words(*said), failed=failed)


def estimate_phase_share(arm: Arm, phase: str) -> Estimate | None:
    """The phase's seconds over those of all phases, launch by launch; None if none were timed."""
    shares = [share for result in arm.completed if (share := read_phase_share(result, phase)) is not None]
    return estimate_location(shares) if shares else None


def read_phase_share(result: TrialResult, phase: str) -> float | None:
    """The same of one launch, over all its timed steps and ranks."""
    totals = dict.fromkeys(PHASES, 0.0)
    for sample in result.samples:
        if sample.kind is StepKind.PHASES:
            for name in PHASES:
                totals[name] += getattr(sample, f"{name}_seconds") or 0.0
    whole = sum(totals.values())
    return totals[phase] / whole if whole else None


LOADER_WAIT = FindingKind(
    "loader-wait", "How long a step waits for its batch", REASON, ("wait_seconds", "share", "utilization", "rank")
)
Read = Callable[[StepSample], float | None]


def read_load(sample: StepSample) -> float | None:
    """How long a step waits for its batch."""
    return sample.input_seconds


def read_train(sample: StepSample) -> float | None:
    """The rest of the step."""
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
    """The very first step of every launch: workers have just started."""
    firsts = [next(iter(result.step_seconds(StepKind.CLEAN).values()), None) for result in arm.completed]
    known = [seconds for seconds in firsts if seconds is not None]
    return estimate_location(known) if known else None

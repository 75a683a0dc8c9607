"""What a scaling study answers: the numbers, and the findings that follow from them.

Two bases are measured, because they answer different questions. The plain loop (no process group) is what a user has
today. One rank under the strategy separates the cost of more ranks from the overhead of the strategy itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.quality import find_resolution
from scalelab.analysis.speedup import (
    AmdahlFit,
    ExposedCommunication,
    GustafsonFit,
    UslFit,
    communication_by_ablation,
    communication_by_subtraction,
    estimate_scaled_speedup,
    fit_amdahl,
    fit_gustafson,
    fit_usl,
    karp_flatt,
)
from scalelab.analysis.stats import Rounds, Verdict, estimate_ratio, judge
from scalelab.records.strategies import SCRIPT, find_strategy
from scalelab.records.trial import TrialResult
from scalelab.report.findings import ASIDE, DETAIL, MAIN, REASON, Finding, FindingKind
from scalelab.studies.shared.arms import Arm, find_measured, group_arms
from scalelab.studies.shared.breakdown import WAITING, break_arm
from scalelab.studies.shared.communication import compare_methods, describe_traced, list_methods
from scalelab.studies.shared.study import LINK
from scalelab.units import (
    choose_unit,
    format_count,
    format_interval,
    format_known,
    format_share,
    format_times,
    format_value,
    is_known,
)

WORTH_A_LOOK = 0.05
"""A rank that waits for others during a larger share of its step is named."""

SPEEDUP = FindingKind("speedup", "How many times as fast as the reference a row is", MAIN, ("speedup", "efficiency"))
EFFICIENCY = FindingKind(
    "efficiency", "Speedup over the ideal of a row", ASIDE, ("efficiency", "efficiency_over_one_rank")
)
NO_ANSWER = FindingKind("no-answer", "Too little was measured to answer the question", MAIN)
LINEARITY = FindingKind(
    "linearity", "Whether efficiency over one rank of the strategy stays 100 %", REASON, ("efficiency", "verdict")
)
LOSS = FindingKind(
    "scaling-loss",
    "By how much a step exceeds its ideal, and which part of that is communication",
    REASON,
    ("excess_seconds", "exposed_seconds", "rest_seconds"),
    free=("excess_seconds", "rest_seconds"),
)
EXPOSED = FindingKind(
    "exposed-communication", "Time per step that waits for communication, by ablation", DETAIL, ("seconds", "share")
)
OPTIMIZER = FindingKind(
    "replicated-optimizer", "The optimizer step, which every rank repeats", ASIDE, ("seconds", "one_rank_seconds")
)
AMDAHL = FindingKind("amdahl", "Serial fraction of the Amdahl fit", DETAIL, ("serial_fraction", "karp_flatt"))
GUSTAFSON = FindingKind("gustafson", "Serial fraction of the Gustafson fit", DETAIL, ("serial_fraction", "karp_flatt"))
USL = FindingKind(
    "usl", "Universal scalability law: contention and coherency", DETAIL, ("contention", "coherency", "peak_ranks")
)
OVERHEAD = FindingKind("ddp-overhead", "One rank of the strategy over the plain loop", DETAIL, ("ratio", "verdict"))
OVERSUBSCRIBED = FindingKind("oversubscribed-rows", "Rows whose ranks share cores", DETAIL)
CONTROL = FindingKind("control", "The reference measured twice, over itself", ASIDE, ("ratio", "verdict", "resolution"))


@dataclass(frozen=True, kw_only=True)
class ScalingAnswer:
    """The arms of a scaling study and the questions that can be asked of them."""

    arms: dict[str, Arm]
    strategy: str
    is_strong: bool

    @classmethod
    def from_results(
        cls, results: Sequence[TrialResult], strategy: str, forced_warmup: int | None, *, is_strong: bool
    ) -> ScalingAnswer:
        is_script = any(result.trial.strategy == SCRIPT.name for result in results)
        arms = group_arms([one for one in results if one.trial.configuration != LINK], forced_warmup)
        return cls(arms=arms, strategy=SCRIPT.name if is_script else strategy, is_strong=is_strong)

    @cached_property
    def plain(self) -> Arm | None:
        return self._measured("single-1")

    @cached_property
    def control(self) -> Arm | None:
        return self._measured("control")

    @cached_property
    def one_rank(self) -> Arm | None:
        return self._measured(f"{self.strategy}-1")

    @cached_property
    def spread(self) -> list[Arm]:
        """The strategy's arms that were measured, by number of ranks."""
        rows = [arm for arm in self.arms.values() if arm.is_measured and arm is not self.control]
        arms = [arm for arm in rows if arm.trial.strategy == self.strategy]
        return sorted(arms, key=lambda arm: arm.trial.num_ranks)

    @cached_property
    def fair(self) -> list[Arm]:
        """Those whose ranks have cores of their own: the only ones that a law of scaling can be fitted to."""
        return [arm for arm in self.spread if not arm.trial.is_oversubscribed and not arm.is_alone]

    @cached_property
    def largest(self) -> Arm | None:
        """The most ranks with cores of their own; None where only one rank was measured so."""
        return next((arm for arm in reversed(self.fair) if arm.trial.num_ranks > 1), None)

    @property
    def base(self) -> Arm | None:
        """What speedups refer to first: the plain loop, or one rank of the strategy when that failed."""
        return self.plain or self.one_rank

    def speedup(self, arm: Arm, base: Arm | None) -> Estimate | None:
        """Work per second over that of the base, of ranks that train one model."""
        return None if arm.is_alone else self.compare_work(arm, base)

    def compare_work(self, arm: Arm, base: Arm | None) -> Estimate | None:
        """Work per second over that of the base; under weak scaling the work grows with the ranks."""
        if base is None or arm is base or not arm.is_measured:
            return None
        pair = (arm.configuration, base.configuration)
        if pair not in self._compared:
            work = 1.0 if self.is_strong and self.has_planned_work else arm.step_samples / base.step_samples
            self._compared[pair] = estimate_scaled_speedup(base.clean, arm.clean, work)
        return self._compared[pair]

    @cached_property
    def _compared(self) -> dict[tuple[str, str], Estimate]:
        return {}

    @cached_property
    def has_planned_work(self) -> bool:
        """Whether a step of every row takes the same samples: of all ranks (strong) or of each (weak)."""
        rows = [arm for arm in (self.plain, *self.spread) if arm is not None]
        return len({arm.step_samples if self.is_strong else arm.rank_samples for arm in rows}) <= 1

    def efficiency(self, arm: Arm, base: Arm | None) -> Estimate | None:
        speedup = self.speedup(arm, base)
        return None if speedup is None else speedup.map(lambda ratio: ratio / arm.trial.num_ranks)

    def exposed(self, arm: Arm) -> ExposedCommunication | None:
        """What a step saves without the gradient all-reduce; there is none without a process group."""
        if find_strategy(arm.trial.strategy).is_plain or not any(len(steps) for steps in arm.comm_free):
            return None
        return communication_by_ablation(arm.clean, arm.comm_free)

    def excess(self, arm: Arm) -> Estimate | None:
        """By how much a step is longer than the ideal: T_N − T_1/N, or T_N − T_1 under weak scaling."""
        if self.one_rank is None or arm.trial.num_ranks == 1 or find_strategy(arm.trial.strategy).is_plain:
            return None
        if not self.has_planned_work or arm.is_alone:
            return None
        return communication_by_subtraction(
            self.one_rank.clean, arm.clean, arm.trial.num_ranks, is_weak=not self.is_strong
        )

    def list_methods(self, arm: Arm) -> dict[str, Estimate | None]:
        """Seconds of communication per step by every method; subtraction counts every loss against ideal scaling."""
        return list_methods(arm) | {"subtraction": self.excess(arm)}

    @cached_property
    def controlled(self) -> tuple[Arm, Arm] | None:
        """The control, and the reference that it measures again."""
        return None if self.reference is None or self.control is None else (self.control, self.reference)

    @property
    def reference(self) -> Arm | None:
        """What the control measures again: the plain loop, or a script on one rank."""
        return self.one_rank if self.strategy == SCRIPT.name else self.plain

    @cached_property
    def amdahl(self) -> AmdahlFit | None:
        return fit_amdahl(self._times()) if self.is_strong and self.has_planned_work else None

    @cached_property
    def gustafson(self) -> GustafsonFit | None:
        return None if self.is_strong or not self.has_planned_work else fit_gustafson(self._times())

    @cached_property
    def usl(self) -> UslFit | None:
        return fit_usl({arm.trial.num_ranks: _throughputs(arm) for arm in self.fair})

    def _times(self) -> dict[int, Rounds]:
        return {arm.trial.num_ranks: arm.clean for arm in self.fair}

    def _measured(self, configuration: str) -> Arm | None:
        return find_measured(self.arms, configuration)


def _throughputs(arm: Arm) -> Rounds:
    return [[arm.step_samples / seconds for seconds in steps] for steps in arm.clean]


def find_findings(answer: ScalingAnswer) -> Iterator[Finding]:
    several = [arm for arm in answer.spread if arm.trial.num_ranks > 1]
    fair = [arm for arm in several if not arm.trial.is_oversubscribed]
    best = (fair or several)[-1] if several else None
    for arm in several:
        yield from _describe_speedup(answer, arm, is_main=arm is best)
    if best is None and any(arm.trial.num_ranks > 1 for arm in answer.arms.values()):
        yield NO_ANSWER("", "Nothing was measured on more than 1 rank: scaling is unknown.")
    if fair and best is not None:
        yield from _describe_linearity(answer, fair)
        yield from _explain_loss(answer, best)
        yield from _name_waiting(best)
        yield from _describe_exposed(answer, best)
    yield from _describe_law(answer)
    yield from _describe_overhead(answer)
    if crowded := ", ".join(str(arm.trial.num_ranks) for arm in several if arm.trial.is_oversubscribed):
        text = f"Oversubscribed at {crowded} ranks (ranks share cores): those rows show oversubscription, not scaling."
        yield OVERSUBSCRIBED("", text)
    if fair and best is not None:
        yield from describe_traced(best)
        yield from compare_methods(best, answer.list_methods(best))
    if answer.controlled is not None:
        yield _describe_control(*answer.controlled)


def _describe_control(control: Arm, reference: Arm) -> Finding:
    ratio = estimate_ratio(control.clean, reference.clean)
    verdict, factor = judge(ratio), format_interval("ratio", ratio)
    resolution = find_resolution(control.clean, reference.clean)
    power = "" if resolution is None else f" At this noise 8 of 10 runs would detect {format_share(resolution)}."
    what = "the plain loop" if reference.label == "plain loop" else reference.label
    text = f"Control: {what} measured twice differs by a factor of {factor}: {verdict}.{power}"
    return CONTROL("control", text, ratio=ratio, verdict=str(verdict), resolution=resolution)


def _describe_speedup(answer: ScalingAnswer, arm: Arm, *, is_main: bool) -> Iterator[Finding]:
    base = answer.base
    speedup, efficiency = answer.speedup(arm, base), answer.efficiency(arm, base)
    if base is None or speedup is None or efficiency is None:
        return
    over = "the plain loop on 1 rank" if base is answer.plain else base.label
    did = "ran" if answer.is_strong else "did"
    as_fast = f"as fast as {over}" if answer.is_strong else f"the work per second of {over}"
    who, share = f"{answer.strategy} on {arm.trial.num_ranks} ranks", format_known("share", efficiency)
    yield SPEEDUP(
        arm.label,
        f"{who} {did} {format_times(speedup)} {as_fast}: {share} efficiency.",
        weight=MAIN if is_main else ASIDE,
        speedup=speedup,
        efficiency=efficiency,
    )
    own = answer.efficiency(arm, answer.one_rank)
    one_rank = None if answer.one_rank is base else answer.one_rank
    more = f", {format_known('share', own)} over {one_rank.label}" if own and one_rank else ""
    text = f"Efficiency of {arm.label}: {share} over {over}{more}."
    yield EFFICIENCY(arm.label, text, efficiency=efficiency, efficiency_over_one_rank=own)


def _describe_linearity(answer: ScalingAnswer, fair: list[Arm]) -> Iterator[Finding]:
    """Whether the time per rank's work stays the same, and where it grows most."""
    efficiencies = [(arm, answer.efficiency(arm, answer.one_rank)) for arm in fair]
    known = [(arm, value) for arm, value in efficiencies if value is not None]
    if not known:
        return
    last, efficiency = known[-1]
    verdict = judge(efficiency.map(lambda ratio: 1 / ratio))
    share = f"{format_known('share', efficiency)} efficiency over {answer.strategy} × 1 at {last.trial.num_ranks} ranks"
    drop = _find_largest_drop(known) if len(known) > 1 else ""
    text = {
        Verdict.NO_DIFFERENCE: f"Scaling is linear up to {last.trial.num_ranks} ranks: efficiency over"
        f" {answer.strategy} × 1 stays within 5 % of 100 %.",
        Verdict.SLOWER: f"Scaling is not linear: {share}{drop}.",
        Verdict.FASTER: f"Scaling is superlinear: {share}.",
        Verdict.UNRESOLVED: f"Unresolved whether scaling is linear: {share}.",
    }[verdict]
    yield LINEARITY(last.label, text, efficiency=efficiency, verdict=str(verdict))


def _find_largest_drop(known: list[tuple[Arm, Estimate]]) -> str:
    steps = [(1, 1.0), *((arm.trial.num_ranks, value.value) for arm, value in known)]
    (low, before), (high, after) = max(pairwise(steps), key=lambda pair: pair[0][1] - pair[1][1])
    return f"; it drops most from {low} to {high} ranks ({format_share(before)} to {format_share(after)})"


def _explain_loss(answer: ScalingAnswer, arm: Arm) -> Iterator[Finding]:
    """The excess over the ideal step, of which ablation says how much is communication; the rest is compute."""
    excess, exposed = answer.excess(arm), answer.exposed(arm)
    efficiency = answer.efficiency(arm, answer.one_rank)
    if excess is None or exposed is None or efficiency is None:
        return
    if judge(efficiency.map(lambda ratio: 1 / ratio)) is not Verdict.SLOWER:
        return
    n = arm.trial.num_ranks
    ideal = f"1/{n} of {answer.strategy} × 1" if answer.is_strong else f"{answer.strategy} × 1"
    rest = excess.value - exposed.seconds.value
    yield LOSS(
        arm.label,
        f"At {n} ranks a step takes {format_known('seconds', excess)} longer than {ideal}:"
        f" {_split_loss(excess, exposed.seconds, is_strong=answer.is_strong)}.",
        excess_seconds=excess,
        exposed_seconds=exposed.seconds,
        rest_seconds=rest,
    )
    optimizer, before = arm.phase("optimizer"), answer.one_rank.phase("optimizer") if answer.one_rank else None
    if answer.is_strong and optimizer is not None and before is not None:
        here, there = format_known("seconds", optimizer), format_known("seconds", before)
        text = f"Every rank runs the whole optimizer step: {here} on {n} ranks, {there} on 1."
        yield OPTIMIZER(arm.label, text, seconds=optimizer, one_rank_seconds=before)


def _split_loss(excess: Estimate, exposed: Estimate, *, is_strong: bool) -> str:
    """Communication and the rest, in numbers that add up to the excess as it is printed."""
    if not (is_known(excess) and is_known(exposed)):
        return f"too noisy to split (exposed communication: {format_known('seconds', exposed)}); use more --rounds"
    unit = choose_unit("seconds", [excess])
    whole, part = (round(one.value / unit.factor, unit.decimals) for one in (excess, exposed))
    sent, rest = (f"{format_value(number * unit.factor, unit)} {unit.symbol}" for number in (part, abs(whole - part)))
    if part > whole:
        return f"{sent} of exposed communication, less {rest} by which compute alone is faster than that"
    slow = "does not shrink with the batch or is slowed by other ranks" if is_strong else "slows down"
    return f"{sent} of exposed communication + {rest} of compute that {slow}"


def _describe_exposed(answer: ScalingAnswer, arm: Arm) -> Iterator[Finding]:
    exposed = answer.exposed(arm)
    if exposed is None:
        return
    known = f"{format_known('share', exposed.share)} of the step ({format_known('seconds', exposed.seconds)})"
    share = known if is_known(exposed.seconds) else f"{format_known('seconds', exposed.seconds)} a step"
    text = f"Exposed communication at {format_count(arm.trial.num_ranks, 'rank')}: {share}, by ablation."
    yield EXPOSED(arm.label, text, seconds=exposed.seconds, share=exposed.share)


def _name_waiting(arm: Arm) -> Iterator[Finding]:
    """The rank that waits most for slower ones, where that is worth a look."""
    worst = max(break_arm(arm) or (), key=lambda parts: parts.parts["waiting"].value, default=None)
    if worst is None or worst.share("waiting").value < WORTH_A_LOOK:
        return
    waiting = worst.parts["waiting"]
    if waiting.is_above(0):
        yield WAITING(
            f"rank {worst.rank}",
            f"Rank {worst.rank} of {arm.label} waits {format_known('seconds', waiting)} per step for slower ranks:"
            " `scalelab run straggler` finds which, and in which phase.",
            weight=REASON,
            seconds=waiting,
            share=worst.share("waiting"),
        )


def _describe_law(answer: ScalingAnswer) -> Iterator[Finding]:
    fit = answer.amdahl or answer.gustafson
    if fit is None:
        return
    serial, last = fit.serial_fraction, answer.fair[-1]
    kind, law = (AMDAHL, "Amdahl") if answer.is_strong else (GUSTAFSON, "Gustafson")
    speedup = answer.speedup(last, answer.one_rank)
    if serial.value >= 1:
        is_sure = speedup is not None and speedup.is_below(1)
        over = f"{last.label} is {'slower' if is_sure else 'faster'} than {answer.strategy} × 1"
        slower = over if is_sure else f"Unresolved whether {over}"
        yield kind("", f"{slower}: no serial fraction up to 1 explains that ({law}'s law).", serial_fraction=serial)
        return
    point = karp_flatt(speedup, last.trial.num_ranks) if speedup and answer.is_strong and len(answer.fair) > 2 else None
    flatt = f" (Karp–Flatt at {last.trial.num_ranks} ranks: {format_known('share', point)})" if point else ""
    text = f"{law} fit: serial fraction {format_known('share', serial)}{flatt}."
    yield kind("", text, serial_fraction=serial, karp_flatt=point)
    usl = answer.usl
    if usl is not None:
        peak = usl.peak_ranks
        top = f"throughput would peak near {peak:.0f} ranks" if peak else "no peak in sight"
        text = (
            f"USL fit: contention {format_known('share', usl.contention)}, coherency"
            f" {format_known('share', usl.coherency)}; {top}."
        )
        yield USL("", text, contention=usl.contention, coherency=usl.coherency, peak_ranks=peak)


def _describe_overhead(answer: ScalingAnswer) -> Iterator[Finding]:
    """What the strategy costs on a single rank."""
    if answer.plain is None or answer.one_rank is None:
        return
    ratio = estimate_ratio(answer.one_rank.clean, answer.plain.clean)
    verdict, label, factor = judge(ratio), answer.one_rank.label, format_interval("ratio", ratio)
    noise = " although it does the same work: more likely noise than a gain" if verdict is Verdict.FASTER else ""
    text = f"{answer.strategy} overhead at world size 1: {factor} times the step of the plain loop, {verdict}{noise}."
    yield OVERHEAD(label, text, ratio=ratio, verdict=str(verdict))

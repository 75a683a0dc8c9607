"""The comparison of strategies in words: which is fastest, who varies, who idles and when, who holds more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scalelab.analysis.spread import estimate_variation
from scalelab.analysis.stats import Verdict, estimate_ratio, judge
from scalelab.studies.arms import Arm
from scalelab.studies.communication import compare_trace, measure_ablation
from scalelab.studies.profiled import describe_traced
from scalelab.studies.strategies_devices import find_excess, list_devices
from scalelab.studies.strategies_losses import describe_losses
from scalelab.units import format_interval, format_quantity, format_share

CLEAR_EXCESS = 0.05
"""A device 0 that holds this share more than the others is worth a word."""


def summarise_strategies(arms: Sequence[Arm], reference: Arm | None) -> tuple[str, ...]:
    """The findings, the main one first; nothing where nothing was measured."""
    return tuple(_find_sentences(arms, reference))


def _find_sentences(arms: Sequence[Arm], reference: Arm | None) -> Iterator[str]:
    if not arms:
        return
    yield from _name_fastest(arms)
    if reference is not None and reference.is_measured:
        yield from _compare_all(arms, reference)
    yield from _compare_variation(arms)
    for arm in arms:
        yield from _describe_idling(arm)
    yield from _compare_memory(arms)
    for arm in arms:
        yield from describe_traced(arm)
        yield from compare_trace(arm, measure_ablation(arm))
    if reference is not None and reference.is_measured:
        words = describe_losses(arms, reference)
        if words:
            yield words


def _name_fastest(arms: Sequence[Arm]) -> Iterator[str]:
    ranked = sorted(arms, key=lambda arm: arm.step.value)
    if len(ranked) < 2:
        return
    first, second = ranked[:2]
    ratio = estimate_ratio(second.clean, first.clean)
    step = format_quantity("seconds", first.step)
    if judge(ratio) is Verdict.SLOWER:
        yield (
            f"{_capital(first.label)} was the fastest with {step} a step; the next, {second.label}, took"
            f" {format_quantity('ratio', ratio)} times as long."
        )
    else:
        yield (
            f"{_capital(first.label)}, with {step} a step, and {second.label} were fastest and cannot be told apart:"
            f" the ratio is {format_interval('ratio', ratio)}."
        )


def _compare_all(arms: Sequence[Arm], reference: Arm) -> Iterator[str]:
    words = {
        Verdict.FASTER: "faster: {} of its time",
        Verdict.SLOWER: "slower: {} times as long",
        Verdict.NO_DIFFERENCE: "no different: {}",
        Verdict.UNRESOLVED: "unresolved: {}",
    }
    found = []
    for arm in arms:
        if arm is not reference:
            ratio = estimate_ratio(arm.clean, reference.clean)
            verdict = judge(ratio)
            said = format_share(ratio.value) if verdict is Verdict.FASTER else format_interval("ratio", ratio)
            found.append(f"{arm.label} is {words[verdict].format(said)}")
    if found:
        yield f"Against the {reference.label}: {'; '.join(found)}."


def _compare_variation(arms: Sequence[Arm]) -> Iterator[str]:
    """The steadiest and the least steady, where their intervals leave no doubt."""
    found = [(estimate_variation(arm.clean), arm) for arm in arms]
    known = sorted(((v, arm) for v, arm in found if v is not None), key=lambda entry: entry[0].value)
    if len(known) < 2:
        return
    (low, steady), (high, unsteady) = known[0], known[-1]
    said = (
        f"{unsteady.label} {format_quantity('share', high)} and of {steady.label} {format_quantity('share', low)}"
        " (standard deviation over mean)"
    )
    if low.high is not None and high.low is not None and high.low > low.high:
        yield f"Steps vary most under {unsteady.label}: those of {said}."
    else:
        yield f"No strategy's steps clearly vary more than another's: those of {said}."


def _describe_idling(arm: Arm) -> Iterator[str]:
    """Who idles, by how much, and in dp also when."""
    known = [(device.name, device.utilization.busy) for device in list_devices(arm) if device.utilization]
    if len(known) < 2 or len(known) < arm.trial.num_ranks:
        return
    shares = ", ".join(f"{name} {format_quantity('share', busy)}" for name, busy in known)
    yield f"Busy under {arm.label}: {shares}.{_explain_dp(arm) if arm.trial.strategy == 'dp' else ''}"


def _explain_dp(arm: Arm) -> str:
    """Taking the batch and updating are done once, by replica 0's device, while the others have nothing to do."""
    phases = {name: arm.phase(name) for name in ("input", "forward", "backward", "optimizer")}
    values = {name: phase.value for name, phase in phases.items() if phase is not None}
    if len(values) < len(phases) or not sum(values.values()):
        return ""
    alone = (values["input"] + values["optimizer"]) / sum(values.values())
    return (
        f" Device 0 alone takes the batch and updates the parameters, {format_share(alone)} of the step; within forward"
        " and backward it also copies parameters, scatters, gathers and sums, while the others wait."
    )


def _compare_memory(arms: Sequence[Arm]) -> Iterator[str]:
    for arm in arms:
        excess = find_excess(arm)
        devices = [device.memory for device in list_devices(arm) if device.memory]
        if excess is None or len(devices) < 2 or excess.low is None or excess.low <= 0:
            continue
        others = devices[0].value - excess.value
        if others > 0 and excess.value > CLEAR_EXCESS * others:
            basis = " (tensors added up)" if arm.trial.is_emulated else ""
            yield (
                f"Under {arm.label} device 0 holds {format_quantity('bytes', excess)} more than the others, which hold"
                f" {format_quantity('bytes', others)}{basis}."
            )


def _capital(text: str) -> str:
    return text if text.startswith(("ddp", "dp", "fsdp")) else text[:1].upper() + text[1:]

"""Data types in words with numbers: which is faster here, which saves memory, which still trains, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import Verdict, judge
from scalelab.studies.arms import Arm
from scalelab.studies.dimension_words import describe_failures
from scalelab.studies.sweep import CONTROL, compare_steps
from scalelab.units import format_bytes, format_interval, format_share

SMALLEST_SAVING = 0.05
"""A peak memory that differs by less is not worth a word."""


def summarise_dtypes(
    arms: Mapping[str, Arm], reference: Arm | None, judge_loss: Callable[[Arm], str | None]
) -> tuple[str, ...]:
    """The findings, the main one first."""
    rows = [arm for arm in arms.values() if arm is not reference and arm.configuration != CONTROL]
    ratios = {arm.label: compare_steps(arm, reference) for arm in rows}
    known = {label: ratio for label, ratio in ratios.items() if isinstance(ratio, Estimate)}
    return tuple(
        chain(
            _describe_speed(known),
            _explain_speed(known, reference),
            _describe_memory(rows, reference),
            _describe_losses(rows, judge_loss),
            describe_failures(rows),
        )
    )


def _describe_speed(ratios: Mapping[str, Estimate]) -> Iterator[str]:
    if not ratios:
        return
    best = min(ratios, key=lambda label: ratios[label].value)
    if judge(ratios[best]) is Verdict.FASTER:
        yield f"{best} is the fastest here: {format_interval('ratio', ratios[best])} times the step of float32."
    elif all(judge(ratio) is Verdict.SLOWER for ratio in ratios.values()):
        yield "float32 is the fastest here: every other type is slower."
    else:
        yield "No type is surely faster than float32 here."
    for label, ratio in ratios.items():
        if label != best or judge(ratio) is not Verdict.FASTER:
            yield f"{label}: {format_interval('ratio', ratio)} times the step of float32, {judge(ratio)}."


def _explain_speed(ratios: Mapping[str, Estimate], reference: Arm | None) -> Iterator[str]:
    """What usually makes 16 bits slow; which of it holds is not measured."""
    slow = [label for label, ratio in ratios.items() if "16" in label and judge(ratio) is Verdict.SLOWER]
    if not slow or reference is None:
        return
    if reference.trial.device == "cpu":
        yield (
            f"Why {_list(slow)} may be slower on a CPU: without instructions for the type (AVX512-FP16, AVX512-BF16,"
            " AMX) its products are converted to float32 and back or run in kernels that are not vectorised; what is"
            " saved in memory traffic pays only for large tensors."
        )
    else:
        yield (
            f"Why {_list(slow)} may be slower on a GPU: products that are too small to fill its units for the type do"
            " not pay for the casts around them."
        )


def _describe_memory(rows: list[Arm], reference: Arm | None) -> Iterator[str]:
    before = reference.peak_memory_bytes if reference else None
    if not before:
        return
    for arm in rows:
        peak = arm.peak_memory_bytes
        change = None if peak is None else peak / before - 1
        if change is not None and abs(change) >= SMALLEST_SAVING:
            word = "less" if change < 0 else "more"
            yield f"{arm.label} takes {format_share(abs(change))} {word} memory at its peak: {format_bytes(peak)}."


def _describe_losses(rows: list[Arm], judge_loss: Callable[[Arm], str | None]) -> Iterator[str]:
    verdicts = {arm.label: judge_loss(arm) for arm in rows if arm.is_measured}
    equal = [label for label, verdict in verdicts.items() if verdict == "as float32"]
    differing = [label for label, verdict in verdicts.items() if verdict == "differently"]
    broken = [label for label, verdict in verdicts.items() if verdict == "not finite"]
    if equal:
        yield f"The last loss is float32's, within the type's tolerance: {_list(equal)}."
    if differing:
        yield f"The last loss differs from float32's by more than the type's tolerance: {_list(differing)}."
    if broken:
        yield f"The loss became NaN or infinite: {_list(broken)}; a step time of that is one of a failed training."


def _list(labels: list[str]) -> str:
    return " and ".join([", ".join(labels[:-1]), labels[-1]]) if len(labels) > 1 else labels[0]

"""`quantize` in words: what int8 cost, what it gained, which layer is to blame; and what to be careful about."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.paired import find_chance
from scalelab.analysis.stats import Verdict, judge
from scalelab.records.quantized import SMALL_NET, Quantized
from scalelab.records.settings import Quantization
from scalelab.records.trial import Status, TrialResult
from scalelab.report.findings import Caution
from scalelab.studies.quantize.answer import (
    EAGER,
    INT8,
    MIXED,
    RUNTIME,
    Latency,
    LayerBlame,
    StageAnswer,
    count_multiply_adds,
    find_fallen_back,
    find_outlier,
    find_size,
    find_stage,
    rank_layers,
)
from scalelab.studies.quantize.report import RUNTIME_TITLES, name_reference
from scalelab.studies.shared.cautions import warn_of_load
from scalelab.units import format_bytes, format_quantity, format_seconds, format_share

STANDS_OUT = 0.5
"""The share of the noise from which on a layer is to blame, and not merely the worst of many; if it is also twice that
of the next."""
MUCH_CLIPPED = 0.01
FEW_SAMPLES = 1000
LITTLE_LEARNT = 0.5
FEW_CALIBRATED = 100
NO_CHANCE = 0.05


def summarise(quantized: Quantized, answers: Sequence[StageAnswer], latencies: Sequence[Latency]) -> tuple[str, ...]:
    """The findings, the main one first."""
    return tuple(
        chain(
            _describe_cost(answers),
            _describe_runtimes(answers),
            _describe_size(quantized),
            _describe_speed(quantized, latencies),
            _describe_blame(quantized, answers),
            _describe_mixed(quantized, answers),
        )
    )


def _describe_cost(answers: Sequence[StageAnswer]) -> Iterator[str]:
    main = find_stage(answers, MIXED, INT8)
    if main is None or main.agreement is None:
        return
    num_samples = len(main.stage.predictions)
    same = f"{format_quantity('accuracy', main.agreement.value)} of them get the same class as in float"
    if main.difference is None or main.counts is None:
        yield f"{main.stage.title}: of {num_samples} samples {same}; accuracy cannot be told without their classes."
        return
    counts = main.counts
    chance = find_chance(counts)
    told = "no more than chance makes" if chance >= NO_CHANCE else "more than chance makes"
    balance = f"{counts.lost} lost and {counts.won} won, {told}" if counts.lost + counts.won else "none lost, none won"
    yield f"{main.stage.title} {say_change(main.difference)}: of {num_samples} samples {balance}; {same}."


def say_change(difference: Estimate) -> str:
    """`loses 0.12 points (−0.31 to 0.07)`."""
    points = 100 * difference.value
    verb = "loses" if points < 0 else "gains" if points > 0 else "keeps the accuracy"
    size = f" {abs(points):.2f} points of accuracy" if points else ""
    if difference.low is None or difference.high is None:
        return f"{verb}{size}"
    ends = " to ".join(f"{100 * end:+.2f}".replace("-", "−") for end in (difference.low, difference.high))
    return f"{verb}{size} ({ends})"


def _describe_runtimes(answers: Sequence[StageAnswer]) -> Iterator[str]:
    """Whether what runs gives what was simulated."""
    main = find_stage(answers, MIXED, INT8)
    for name in (RUNTIME, EAGER):
        found = find_stage(answers, name)
        if main is None or found is None:
            continue
        pairs = zip(found.stage.predictions, main.stage.predictions, strict=True)
        num_differing = sum(mine != theirs for mine, theirs in pairs)
        if num_differing:
            yield f"{found.stage.title} puts {num_differing} samples into another class than the simulation does."
        else:
            yield f"{found.stage.title} puts every sample into the class that the simulation says."


def _describe_size(quantized: Quantized) -> Iterator[str]:
    before, after = find_size(quantized, "float32.onnx"), find_size(quantized, "int8.onnx")
    if before and after:
        sizes = f"{format_bytes(after)} instead of {format_bytes(before)}"
        if after < before:
            yield f"The stored model is {before / after:.2f} times smaller: {sizes}."
        else:
            yield f"The stored model is not smaller: {sizes}. So few weights are less than what describes the graph."


def _describe_speed(quantized: Quantized, latencies: Sequence[Latency]) -> Iterator[str]:
    found = [one for one in latencies if one.runtime == "onnxruntime-int8" and one.speedup]
    found = found or [one for one in latencies if one.runtime == "eager-int8" and one.speedup]
    if not found:
        return
    parts = []
    is_gain = False
    for one in found:
        assert one.speedup is not None
        verdict = judge(one.speedup.map(lambda ratio: 1 / ratio))
        is_gain = is_gain or verdict is Verdict.FASTER
        parts.append(f"{format_quantity('ratio', one.speedup)} times as fast at batch {one.batch} ({verdict})")
    what = RUNTIME_TITLES[found[0].runtime]
    yield f"{what} against {name_reference(latencies)}: {', '.join(parts)}."
    if not is_gain:
        yield f"No gain in speed: {explain_no_gain(quantized)}."


def explain_no_gain(quantized: Quantized) -> str:
    """Why int8 is not faster, from what is known of the net and of its kernels."""
    fallen_back = [layer.name for layer in find_fallen_back(quantized)]
    if fallen_back:
        return f"{', '.join(fallen_back[:3])} fell back to float, with numbers turned into int8 and back around it"
    num_operations = count_multiply_adds(quantized)
    if num_operations < SMALL_NET:
        return (
            f"the net is small. A sample is {num_operations / 1e6:.2g} million multiply-adds, and calling kernels,"
            f" pooling and turning numbers into int8 and back take more than those save{_name_slowest(quantized)}"
        )
    return "no kernel fell back to float; this processor may lack instructions for int8 (AVX512 VNNI, AVX-VNNI, AMX)"


def _name_slowest(quantized: Quantized) -> str:
    """The layer that takes longer in int8 than in float32, by most."""
    timed = [(layer.name, layer.seconds, layer.float_seconds) for layer in quantized.layers]
    slower = [(now - before, name, now, before) for name, now, before in timed if now and before and now > before]
    if not slower:
        return ""
    _, name, now, before = max(slower)
    return f"; {name} takes {format_seconds(now)} in int8 and {format_seconds(before)} in float32"


def _describe_blame(quantized: Quantized, answers: Sequence[StageAnswer]) -> Iterator[str]:
    blames = [blame for blame in rank_layers(quantized) if blame.noise_share is not None]
    if not blames:
        return
    worst = blames[0]
    name, share = worst.layer.name, format_share(worst.noise_share)
    outlier = find_outlier(worst.layer)
    others = blames[1].noise_share or 0.0 if len(blames) > 1 else 0.0
    if outlier is not None or (worst.noise_share or 0.0) >= max(STANDS_OUT, 2 * others):
        main = find_stage(answers, INT8)
        is_lost = main is not None and main.counts is not None and main.counts.lost > main.counts.won
        blamed = "is to blame" if is_lost or outlier is not None else "makes most of the noise, and costs nothing"
        yield f"{name} {blamed}: {share} of the noise in the logits is its own{_say_trials(worst)}."
    elif len(blames) > 1:
        second = f"{blames[1].layer.name}'s, {format_share(blames[1].noise_share)}"
        yield f"No layer stands out: the most noise in the logits is {name}'s, {share}, then {second}."
    if outlier is not None:
        yield (
            f"One weight of {name} is {outlier:.0f} times as large as the next of its channel, which leaves the others"
            f" {outlier:.0f} times as few integers: look at that weight, or keep the layer in float with --mixed."
        )
    clipped = worst.layer.clipped_share
    if clipped is not None and clipped > MUCH_CLIPPED:
        yield (
            f"{format_share(clipped)} of {name}'s results lie outside of its range: --calibration minmax clips nothing"
            " of what it sees, and more --samples see more."
        )


def _say_trials(blame: LayerBlame) -> str:
    if blame.only is None or blame.without is None:
        return ""
    only, without = (f"{100 * change:+.2f}".replace("-", "−") for change in (blame.only, blame.without))
    return f"; alone in int8 it changes accuracy by {only} points, all others without it by {without}"


def _describe_mixed(quantized: Quantized, answers: Sequence[StageAnswer]) -> Iterator[str]:
    before, after = find_stage(answers, INT8), find_stage(answers, MIXED)
    if not quantized.kept_float or before is None or after is None:
        return
    names = ", ".join(quantized.kept_float)
    if before.difference and after.difference:
        yield f"Kept in float: {names}. All in int8 {say_change(before.difference)}, so {say_change(after.difference)}."


def find_cautions(
    results: Sequence[TrialResult], quantized: Quantized | None, settings: Quantization
) -> Iterator[Caution]:
    yield from warn_of_load(results)
    for result in results:
        if result.status is not Status.COMPLETED:
            advice = "scalelab resume runs it again" if result.status is Status.CRASHED else result.status.advice
            yield Caution(
                message=f"the trial did not end ({result.status.words}): {result.reason}",
                next_step=f"{advice}; its logs are in trials/{result.trial.name}",
            )
    if quantized is None or not quantized.stages:
        return
    yield from _look_at_samples(quantized, settings)
    for layer in find_fallen_back(quantized):
        yield Caution(
            message=f"{layer.name} runs in float: no int8 kernel took it",
            next_step="look at its kernel, and whether its shape or groups are unusual",
        )


def _look_at_samples(quantized: Quantized, settings: Quantization) -> Iterator[Caution]:
    num_samples = len(quantized.stages[0].predictions)
    if not quantized.labels:
        yield Caution(
            message="there are no test samples with classes, so that only agreement with float is told"
            + (f", on {quantized.tested_on}" if quantized.tested_on else ""),
            next_step="let build() return test_batches of pairs: inputs and classes",
        )
    elif num_samples < FEW_SAMPLES:
        yield Caution(
            message=f"{num_samples} test samples: one of them is worth {100 / num_samples:.2f} points",
            next_step="use a larger test set, such as --data cifar10, before small differences are believed",
        )
    if quantized.labels:
        right = zip(quantized.stages[0].predictions, quantized.labels, strict=True)
        accuracy = sum(found == true for found, true in right) / num_samples
        if accuracy < LITTLE_LEARNT:
            yield Caution(
                message=f"the float model itself is right on {format_share(accuracy)} only: what is not learnt cannot"
                " be lost",
                next_step="train for more --epochs, with another --lr, or give trained --weights",
            )
    if quantized.num_calibrated < min(FEW_CALIBRATED, settings.num_samples):
        yield Caution(
            message=f"ranges come from {quantized.num_calibrated} samples only",
            next_step="give more training batches, and --samples",
        )

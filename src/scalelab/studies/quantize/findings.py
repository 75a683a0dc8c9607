"""What quantization cost, what it gained, which layer is to blame; and what to be careful about."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.paired import find_chance
from scalelab.analysis.stats import Verdict, judge
from scalelab.records.quantized import SMALL_NET, Quantized
from scalelab.records.tasks import Quantization
from scalelab.records.trial import TrialResult
from scalelab.report.findings import DETAIL, MAIN, REASON, Caution, CautionKind, Finding, FindingKind
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
from scalelab.studies.shared.cautions import UNTRAINED, name_failure, warn_of_load
from scalelab.units import (
    format_bytes,
    format_count,
    format_points,
    format_quantity,
    format_seconds,
    format_share,
    format_times,
)

STANDS_OUT = 0.5
"""A layer is to blame if it makes this share of the noise, and twice as much as the next."""
MUCH_CLIPPED = 0.01
FEW_SAMPLES = 1000
LITTLE_LEARNT = 0.5
FEW_CALIBRATED = 100
NO_CHANCE = 0.05

ACCURACY = FindingKind(
    "int8-accuracy", "What int8 does to accuracy", MAIN, ("difference", "lost", "won", "chance", "agreement")
)
AGREEMENT = FindingKind("runtime-agreement", "Whether a runtime gives what was simulated", DETAIL, ("differing",))
SIZE = FindingKind("stored-size", "Size of the stored int8 model", REASON, ("int8_bytes", "float_bytes", "ratio"))
SPEED = FindingKind("int8-speedup", "Speed of int8 against float32 at one batch size", REASON, ("speedup", "verdict"))
NO_GAIN = FindingKind("no-speedup", "Why int8 is not faster", REASON)
BLAME = FindingKind("blame", "The layer with the most quantization noise in the logits", REASON, ("noise_share",))
OUTLIER = FindingKind("weight-outlier", "One weight far larger than the others of its channel", REASON, ("ratio",))
CLIPPED = FindingKind("clipped", "Activations outside the chosen range", DETAIL, ("share",))
KEPT_FLOAT = FindingKind("mixed-precision", "What keeping layers in float brought", REASON, ("before", "after"))

FALLBACK = CautionKind("float-fallback", "A layer runs in float: no int8 kernel took it", "wrong-work")
NO_LABELS = CautionKind("no-labels", "There are no labelled test samples", "note")
SMALL_TEST = CautionKind("few-samples", "Few test samples", "noise", ("samples",))
FEW_RANGES = CautionKind("few-calibrated", "Ranges come from few samples", "noise", ("samples",))


def summarise(quantized: Quantized, answers: Sequence[StageAnswer], latencies: Sequence[Latency]) -> Iterator[Finding]:
    """The findings, the main one first."""
    yield from _describe_cost(answers)
    yield from _describe_mixed(quantized, answers)
    yield from _describe_size(quantized)
    yield from _describe_speed(quantized, latencies)
    yield from _describe_blame(quantized, answers)
    yield from _describe_runtimes(answers)


def _describe_cost(answers: Sequence[StageAnswer]) -> Iterator[Finding]:
    main = find_stage(answers, MIXED, INT8)
    if main is None or main.agreement is None:
        return
    title, counts, difference = main.stage.title, main.counts, main.difference
    num_samples = len(main.stage.predictions)
    same = f"{format_quantity('accuracy', main.agreement.value)} get the same class as in float"
    if difference is None or counts is None:
        text = f"{title}: of {num_samples} samples, {same}; accuracy is unknown without their classes."
        yield ACCURACY(title, text, agreement=main.agreement)
        return
    chance = find_chance(counts)
    verdict = "consistent with chance" if chance >= NO_CHANCE else "more than chance"
    balance = f"{counts.lost} lost and {counts.won} won, {verdict}" if counts.lost + counts.won else "none lost or won"
    yield ACCURACY(
        title,
        f"{title} {format_change(difference)}: of {num_samples} samples, {balance}; {same}.",
        difference=difference,
        lost=counts.lost,
        won=counts.won,
        chance=chance,
        agreement=main.agreement,
    )


def format_change(difference: Estimate) -> str:
    """`loses 0.12 points of accuracy (−0.31 to +0.07)`; `keeps the accuracy (−1.14 to +1.14 points)`."""
    points = 100 * difference.value
    verb = "loses" if points < 0 else "gains" if points > 0 else "keeps the accuracy"
    size = f" {abs(points):.2f} points of accuracy" if points else ""
    if difference.low is None or difference.high is None:
        return f"{verb}{size}"
    ends = " to ".join(map(format_points, (difference.low, difference.high)))
    return f"{verb}{size} ({ends}{'' if points else ' points'})"


def _describe_runtimes(answers: Sequence[StageAnswer]) -> Iterator[Finding]:
    """Whether what runs gives what was simulated."""
    main = find_stage(answers, MIXED, INT8)
    for name in (RUNTIME, EAGER):
        found = find_stage(answers, name)
        if main is None or found is None:
            continue
        pairs = zip(found.stage.predictions, main.stage.predictions, strict=True)
        num_differing = sum(mine != theirs for mine, theirs in pairs)
        title = found.stage.title
        text = f"{title} agrees with the simulation on every sample."
        if num_differing:
            text = f"{title} classifies {format_count(num_differing, 'sample')} differently from the simulation."
        yield AGREEMENT(title, text, differing=num_differing)


def _describe_size(quantized: Quantized) -> Iterator[Finding]:
    before, after = find_size(quantized, "float32.onnx"), find_size(quantized, "int8.onnx")
    if before and after:
        sizes = f"{format_bytes(after)} instead of {format_bytes(before)}"
        text = f"The stored model is {before / after:.2f} times smaller: {sizes}."
        if after >= before:
            text = f"The stored model is not smaller: {sizes}; for so few weights the graph takes more space."
        yield SIZE("", text, int8_bytes=after, float_bytes=before, ratio=before / after)


def _describe_speed(quantized: Quantized, latencies: Sequence[Latency]) -> Iterator[Finding]:
    found = [one for one in latencies if one.runtime == "onnxruntime-int8" and one.speedup]
    found = found or [one for one in latencies if one.runtime == "eager-int8" and one.speedup]
    verdicts = []
    for one in found:
        assert one.speedup is not None
        verdict = judge(one.speedup.map(lambda ratio: 1 / ratio))
        verdicts.append(verdict)
        yield SPEED(
            f"batch {one.batch}",
            f"{RUNTIME_TITLES[one.runtime]} is {format_times(one.speedup)} as fast as"
            f" {name_reference(latencies)} at batch {one.batch} ({verdict}).",
            speedup=one.speedup,
            verdict=str(verdict),
        )
    if found and Verdict.FASTER not in verdicts:
        yield NO_GAIN("", f"int8 is not faster: {explain_no_gain(quantized)}.")


def explain_no_gain(quantized: Quantized) -> str:
    """Why int8 is not faster, from what is known of the network and its kernels."""
    fallen_back = [layer.name for layer in find_fallen_back(quantized)]
    if fallen_back:
        return f"{', '.join(fallen_back[:3])} fell back to float, with conversions to int8 and back around it"
    num_operations = count_multiply_adds(quantized)
    if num_operations < SMALL_NET:
        return (
            f"the network is small. A sample takes {num_operations / 1e6:.2g} million multiply-adds; launching kernels,"
            f" pooling and converting to int8 and back cost more than they save{_name_slowest(quantized)}"
        )
    return "no kernel fell back to float; this CPU may lack int8 instructions (AVX512 VNNI, AVX-VNNI, AMX)"


def _name_slowest(quantized: Quantized) -> str:
    """The layer that int8 slows down most."""
    timed = [(layer.name, layer.seconds, layer.float_seconds) for layer in quantized.layers]
    slower = [(now - before, name, now, before) for name, now, before in timed if now and before and now > before]
    if not slower:
        return ""
    _, name, now, before = max(slower)
    return f"; {name} takes {format_seconds(now)} in int8 and {format_seconds(before)} in float32"


def _describe_blame(quantized: Quantized, answers: Sequence[StageAnswer]) -> Iterator[Finding]:
    blames = [blame for blame in rank_layers(quantized) if blame.noise_share is not None]
    if not blames:
        return
    worst = blames[0]
    name, share = worst.layer.name, format_share(worst.noise_share)
    outlier, clipped = find_outlier(worst.layer), worst.layer.clipped_share
    others = blames[1].noise_share or 0.0 if len(blames) > 1 else 0.0
    if outlier is not None or (worst.noise_share or 0.0) >= max(STANDS_OUT, 2 * others):
        main = find_stage(answers, INT8)
        is_lost = main is not None and main.counts is not None and main.counts.lost > main.counts.won
        blamed = "is to blame" if is_lost or outlier is not None else "makes most of the noise, at no cost"
        text = f"{name} {blamed}: it makes {share} of the noise in the logits{_describe_trials(worst)}."
        yield BLAME(name, text, noise_share=worst.noise_share)
    elif len(blames) > 1:
        second = f"{blames[1].layer.name} {format_share(blames[1].noise_share)}"
        text = f"No layer stands out: the most noise in the logits comes from {name}, {share}, then {second}."
        yield BLAME("", text, noise_share=worst.noise_share)
    if outlier is not None:
        yield OUTLIER(
            name,
            f"One weight of {name} is {outlier:.0f} times as large as the next of its channel, which leaves the others"
            f" {outlier:.0f} times fewer integers: check that weight, or keep the layer in float with --mixed.",
            ratio=outlier,
        )
    if clipped is not None and clipped > MUCH_CLIPPED:
        yield CLIPPED(
            name,
            f"{format_share(clipped)} of {name}'s activations lie outside its range: use --calibration minmax, or more"
            " --samples.",
            share=clipped,
        )


def _describe_trials(blame: LayerBlame) -> str:
    if blame.only is None or blame.without is None:
        return ""
    only, without = format_points(blame.only), format_points(blame.without)
    return f"; alone in int8 it changes accuracy by {only} points, all others without it by {without}"


def _describe_mixed(quantized: Quantized, answers: Sequence[StageAnswer]) -> Iterator[Finding]:
    before, after = find_stage(answers, INT8), find_stage(answers, MIXED)
    if quantized.kept_float and before and after and before.difference and after.difference:
        names = ", ".join(quantized.kept_float)
        yield KEPT_FLOAT(
            names,
            f"Kept in float: {names}. All in int8 {format_change(before.difference)}; mixed"
            f" {format_change(after.difference)}.",
            before=before.difference,
            after=after.difference,
        )


def find_cautions(
    results: Sequence[TrialResult], quantized: Quantized | None, settings: Quantization
) -> Iterator[Caution]:
    yield from name_failure("the trial", results, is_measured=False)
    yield from warn_of_load(results)
    if quantized is None or not quantized.stages:
        return
    yield from _judge_samples(quantized, settings)
    for layer in find_fallen_back(quantized):
        yield FALLBACK(
            layer.name,
            f"{layer.name} runs in float: no int8 kernel took it",
            "check its kernel, and whether its shape or groups are unusual",
        )


def _judge_samples(quantized: Quantized, settings: Quantization) -> Iterator[Caution]:
    num_samples = len(quantized.stages[0].predictions)
    if not quantized.labels:
        where = f", on {quantized.tested_on}" if quantized.tested_on else ""
        yield NO_LABELS(
            "",
            f"no labelled test samples: only agreement with float is known{where}",
            "let build() return test_batches of pairs: inputs and classes",
        )
    else:
        right = zip(quantized.stages[0].predictions, quantized.labels, strict=True)
        accuracy = sum(found == true for found, true in right) / num_samples
        if num_samples < FEW_SAMPLES:
            yield SMALL_TEST(
                "",
                f"{num_samples} test samples: one of them is worth {100 / num_samples:.2f} points",
                "use a larger test set, such as --data cifar10, to resolve small differences",
                samples=num_samples,
            )
        if accuracy < LITTLE_LEARNT:
            yield UNTRAINED(
                "",
                f"the float model reaches only {format_share(accuracy)} accuracy: there is little to lose",
                "train for more --epochs, with another --lr, or give trained --weights",
                accuracy=accuracy,
            )
    if quantized.num_calibrated < min(FEW_CALIBRATED, settings.num_samples):
        yield FEW_RANGES(
            "",
            f"ranges come from only {format_count(quantized.num_calibrated, 'sample')}",
            "give more training batches, and --samples",
            samples=quantized.num_calibrated,
        )

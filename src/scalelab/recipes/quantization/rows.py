"""Q1 to Q5: weights, integer weights, activations, integers throughout, and the bias.

One training serves Q1 to Q4, and another, with a bias on the last layer, Q5. In small, both are of digits, for more
epochs: 1,437 images in place of 50,000. Which K a published accuracy had is not printed beside it; the code has 255, so
it stands beside ours with 255.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.paired import estimate_share
from scalelab.recipes.evidence import Compared, find_completed, keep_tables, make_beside_table, say
from scalelab.recipes.feasibility import choose
from scalelab.recipes.quantization import published
from scalelab.recipes.quantization.published import read_percent
from scalelab.recipes.recipe import Finding, Outcome, Outcomes, Row, Size
from scalelab.records.quantized import Histogram, HistogramKind, Quantized
from scalelab.report.document import Column, Table, make_row
from scalelab.studies.quantize.answer import StageAnswer, compare_stages
from scalelab.studies.quantize.findings import say_change
from scalelab.studies.quantize.report import PAIRED_NOTE
from scalelab.studies.quantize.study import Quantize
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Study
from scalelab.units import format_share

PLAIN, BIASED = "plain", "bias"
"""The two trainings."""
SMALL_EPOCHS = 8
LARGEST = 127
DEVIATIONS = 3


def make_study(size: Size, bias: str) -> Quantize:
    data = choose(size, small="digits", full="cifar10")
    return Quantize(
        calibration="lab",
        samples=published.CALIBRATION_IMAGES,
        global_batch=published.BATCH,
        epochs=choose(size, small=SMALL_EPOCHS, full=published.EPOCHS),
        job=Job(
            workload="lenet",
            options={"data": data, "bias": bias},
            threads_per_rank=1,
            timeout=choose(size, small="10min", full="2h"),
        ),
    )


def make_parts(size: Size) -> Mapping[str, Study]:
    return {PLAIN: make_study(size, "none")}


def make_q1(size: Size) -> Row:
    return Row(id="Q1", title="Weights", parts=make_parts(size), conclude=find_q1, num_tables=0)


def make_q2(size: Size) -> Row:
    return read_first(size, "Q2", "Integer weights", partial(find_q2, size))


def make_q3(size: Size) -> Row:
    return read_first(size, "Q3", "Activations", find_q3)


def make_q4(size: Size) -> Row:
    return read_first(size, "Q4", "Integer activations", partial(find_q4, size))


def read_first(size: Size, row: str, title: str, find: Callable[[Outcomes], Finding]) -> Row:
    """A row that asks the trial of Q1 something else."""
    return Row(id=row, title=title, parts=make_parts(size), conclude=find, reads="Q1", num_tables=0)


def make_q5(size: Size) -> Row:
    return Row(
        id="Q5",
        title="Integer bias",
        parts={BIASED: make_study(size, "last")},
        conclude=partial(find_q5, size),
        num_tables=0,
    )


def read_quantized(outcome: Outcome | None) -> Quantized | None:
    result = find_completed(outcome)
    return None if result is None else result.quantized


def list_histograms(quantized: Quantized, kind: HistogramKind) -> list[Histogram]:
    return [histogram for histogram in quantized.histograms if histogram.kind == kind]


def answer_stages(quantized: Quantized) -> dict[str, StageAnswer]:
    """Every stage beside float, by name."""
    return {answer.stage.name: answer for answer in compare_stages(quantized)}


def measure_accuracy(answer: StageAnswer | None) -> Estimate | None:
    if answer is None or answer.counts is None:
        return None
    return estimate_share(answer.counts.both + answer.counts.won, answer.counts.num_samples)


def describe(answer: StageAnswer) -> str:
    """`loses 0.10 points of accuracy (−0.42 to +0.22) and gives 97.34 % of images the class of float`."""
    change = "cannot be judged" if answer.difference is None else say_change(answer.difference)
    same = None if answer.agreement is None else answer.agreement.value
    return f"{change} and gives {say('accuracy', same)} of images the class of float"


def compare(answer: StageAnswer | None, printed: str | None = None, what: str = "") -> Compared:
    """One line: ours beside what was printed."""
    title = what or (answer.stage.title if answer else "")
    there = None if printed is None else read_percent(printed)
    return Compared(title, measure_accuracy(answer), there, f"{printed} %" if printed else "")


def make_agreement_table(found: Mapping[str, StageAnswer]) -> Table:
    """Every stage beside float, image by image."""
    columns = (
        Column(key="stage", header="stage", align="left"),
        Column(key="change", header="change, points", quantity="accuracy"),
        Column(key="agreement", header="same class", quantity="accuracy"),
    )
    compared = [answer for answer in found.values() if answer.agreement is not None]
    rows = tuple(make_row(answer.stage.title, answer.difference, answer.agreement) for answer in compared)
    return Table(title="Beside float", columns=columns, rows=rows, notes=(PAIRED_NOTE,))


def find_q1(outcomes: Outcomes) -> Finding:
    quantized = read_quantized(outcomes.get(PLAIN))
    histograms = list_histograms(quantized, "weights") if quantized else []
    if not histograms:
        return Finding()
    columns = (
        Column(key="layer", header="layer", align="left"),
        Column(key="num_weights", header="weights", quantity="count"),
        Column(key="least", header="least", quantity="number"),
        Column(key="largest", header="largest", quantity="number"),
        Column(key="three_sigma", header="3σ", quantity="number"),
        Column(key="scale", header="n_w", quantity="number"),
        Column(key="sigma_scale", header="n_w by 3σ", quantity="number"),
    )
    rows, spans = [], {}
    for one in histograms:
        largest, sigma = find_largest(one), DEVIATIONS * one.deviation
        spans[one.layer] = largest / sigma if sigma else 1.0
        scales = (LARGEST / limit if limit else None for limit in (largest, sigma))
        rows.append(make_row(one.layer, sum(one.counts), one.least, one.largest, sigma, *scales))
    table = Table(
        title="Weights by layer",
        columns=columns,
        rows=tuple(rows),
        notes=("n_w: integer per number, 127 / max|w| or 127 / 3σ",),
    )
    widest, tightest = max(spans, key=spans.__getitem__), min(spans, key=spans.__getitem__)
    answer = (
        f"The largest weight is {spans[widest]:.1f} times 3σ in {widest} and {spans[tightest]:.1f} times in {tightest}."
        " Where it is more than 1, a range of 3σ has finer steps for most weights and clamps the few beyond it."
    )
    return Finding(tables=(table,), answers=(answer,))


def find_largest(histogram: Histogram) -> float:
    return max(-histogram.least, histogram.largest)


def find_q2(size: Size, outcomes: Outcomes) -> Finding:
    quantized = read_quantized(outcomes.get(PLAIN))
    if quantized is None:
        return Finding()
    found = answer_stages(quantized)
    lines = [
        compare(found.get("float")),
        compare(found.get("weights"), published.WEIGHTS_PERCENT),
        compare(found.get("weights-3sigma")),
        compare(found.get("dequantized")),
    ]
    table = make_beside_table("accuracy", lines, title="Accuracy", size=size, notes=list_notes(size))
    answers = [
        f"The network with int8 weights {describe(found['weights'])}; with the range of 3σ it"
        f" {describe(found['weights-3sigma'])}.",
        f"Dequantized, the weights give {count_same(found, 'dequantized', 'weights')} images the class that they have"
        " as integers: without biases, a factor on all weights of a layer is one on all logits.",
    ]
    return Finding(tables=keep_tables(table), answers=tuple(answers))


def count_same(found: Mapping[str, StageAnswer], one: str, other: str) -> str:
    """`9,998 of 10,000`."""
    pairs = list(zip(found[one].stage.predictions, found[other].stage.predictions, strict=True))
    return f"{sum(mine == theirs for mine, theirs in pairs):,} of {len(pairs):,}"


def list_notes(size: Size) -> tuple[str, ...]:
    return ("in small, ours are digits",) if size == "small" else ()


def find_q3(outcomes: Outcomes) -> Finding:
    quantized = read_quantized(outcomes.get(PLAIN))
    before = list_histograms(quantized, "before") if quantized else []
    if quantized is None or not before:
        return Finding()
    after = {one.layer: one for one in list_histograms(quantized, "after")}
    columns = (
        Column(key="layer", header="layer", align="left"),
        Column(key="least", header="least before", quantity="number"),
        Column(key="least_after", header="after ReLU", quantity="number"),
        Column(key="largest", header="largest", quantity="number"),
        Column(key="three_sigma", header="3σ after", quantity="number"),
        Column(key="scale", header="127 / max", quantity="number"),
    )
    rows = []
    for one in before:
        seen = after[one.layer]
        scale = LARGEST / find_largest(seen) if find_largest(seen) else None
        rows.append(make_row(one.layer, one.least, seen.least, seen.largest, DEVIATIONS * seen.deviation, scale))
    table = Table(title="Results by layer", columns=columns, rows=tuple(rows))
    farther = [one.layer for one in before if -one.least > one.largest and after[one.layer].least >= 0]
    top = max(before, key=lambda one: one.largest)
    answers = [
        f"On {quantized.num_calibrated} images, results reach up to {top.largest:.3g}, in {top.layer}. After ReLU they"
        f" are 0 and more, so that {LARGEST + 1} of the 256 integers are ever used.",
    ]
    if farther:
        answers.append(
            f"In {', '.join(farther)} the negative results reach farther than the positive ones: a range that is taken"
            " before ReLU is wider than what is kept."
        )
    return Finding(tables=(table,), answers=tuple(answers))


def find_q4(size: Size, outcomes: Outcomes) -> Finding:
    quantized = read_quantized(outcomes.get(PLAIN))
    if quantized is None:
        return Finding()
    found = answer_stages(quantized)
    lines = [
        compare(found.get("float")),
        compare(found.get("int8"), what=f"weights + activations, K = {published.CLAMP}"),
        compare(found.get("int8-255"), published.ACTIVATIONS_PERCENT),
    ]
    table = make_beside_table("accuracy", lines, title="Accuracy", size=size, notes=list_notes(size))
    answers = [*describe_integers(found), describe_saturation(quantized), *describe_ties(quantized, found)]
    answers += [words for words in quantized.remarks if ".onnx" in words]
    return Finding(tables=keep_tables(table, make_agreement_table(found)), answers=tuple(answers))


def describe_integers(found: Mapping[str, StageAnswer]) -> Iterator[str]:
    yield f"With K = {published.CLAMP}, the network in integers {describe(found['int8'])}."
    yield f"With K = {published.PEAK} and the clamp at {published.CLAMP}, it {describe(found['int8-255'])}."


def describe_saturation(quantized: Quantized) -> str:
    """What K = 255 clamps of the input and of every layer's results, from the histograms that scales are made of."""
    shares = {one.layer: find_share_beyond(one, published.PEAK) for one in list_histograms(quantized, "after")}
    listed = ", ".join(f"{format_share(share)} of {layer}" for layer, share in shares.items())
    return (
        f"K = {published.PEAK} clamps what lies beyond {published.CLAMP}/{published.PEAK} of the largest: {listed}, by"
        " the bins of the histograms."
    )


def find_share_beyond(histogram: Histogram, peak: int) -> float:
    """The share of numbers in bins whose middle is beyond what the clamp lets through."""
    limit = find_largest(histogram) * published.CLAMP / peak
    width = (histogram.high - histogram.low) / len(histogram.counts)
    middles = (histogram.low + width * (number + 0.5) for number in range(len(histogram.counts)))
    beyond = sum(count for count, middle in zip(histogram.counts, middles, strict=True) if abs(middle) > limit)
    return beyond / max(1, sum(histogram.counts))


def describe_ties(quantized: Quantized, found: Mapping[str, StageAnswer]) -> Iterator[str]:
    tied = next((layer.tied_outputs for layer in quantized.layers if layer.tied_outputs is not None), None)
    if tied is None or "int8-accumulators" not in found:
        return
    yield (
        f"The int8 logits of {tied:,} of {len(quantized.labels):,} images have two largest, of which the first is"
        f" taken. With the int32 sums of the last layer as logits, the network {describe(found['int8-accumulators'])}."
    )
    stages = (found[name].stage.predictions for name in ("float", "int8", "int8-accumulators"))
    other = [(true, sums) for true, rounded, sums in zip(*stages, strict=True) if rounded != true]
    if other:
        num_repaired = sum(sums == true for true, sums in other)
        yield (
            f"int8 gives {len(other):,} image{'s'[: len(other) != 1]} another class than float, and {num_repaired:,} of"
            " them would have float's with those sums: that much is the rounding of logits to a byte, and its ties."
        )


def find_q5(size: Size, outcomes: Outcomes) -> Finding:
    quantized = read_quantized(outcomes.get(BIASED))
    if quantized is None:
        return Finding()
    found = answer_stages(quantized)
    lines = [
        compare(found.get("float"), published.BIAS_FLOAT_PERCENT),
        compare(found.get("weights-raw-bias"), published.BIAS_RAW_PERCENT),
        compare(found.get("weights")),
        compare(found.get("int8"), what=f"weights + activations + bias, K = {published.CLAMP}"),
        compare(found.get("int8-255"), published.BIAS_ALL_PERCENT),
    ]
    table = make_beside_table("accuracy", lines, title="Accuracy", size=size, notes=list_notes(size))
    raw = found["weights-raw-bias"]
    answers = [
        f"With K = {published.CLAMP} and the bias in int32, the network in integers {describe(found['int8'])}; with"
        f" K = {published.PEAK} it {describe(found['int8-255'])}.",
        f"Integer weights beside the bias as it was: that {describe(raw)}, and"
        f" {count_same(found, 'weights-raw-bias', 'weights-no-bias')} images get the class that they have without any"
        f" bias. With the bias scaled as the logits are, it {describe(found['weights'])}.",
        *describe_ties(quantized, found),
        *(words for words in quantized.remarks if ".onnx" in words),
    ]
    return Finding(tables=keep_tables(table, make_agreement_table(found)), answers=tuple(answers))

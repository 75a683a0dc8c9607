"""The quantization recipe, Q1 to Q5: weights, integer weights, activations, all in integers, and the bias.

One training run serves Q1 to Q4, and another, with a bias on the last layer, Q5. In small, both train on digits:
the first for more epochs, until weights have left their initial distribution; the second for the published two, as
later the bias decides no image. No published accuracy names its K; the code has 255, so it stands beside ours with 255.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.paired import estimate_share
from scalelab.recipes.evidence import Compared, find_completed, keep_tables, make_beside_table, scale
from scalelab.recipes.feasibility import choose
from scalelab.recipes.quantization import published
from scalelab.recipes.quantization.published import make_checks, read_percent
from scalelab.recipes.quantization.questions import (
    LARGEST,
    answer_activations,
    answer_bias,
    answer_forward,
    answer_integers,
    answer_weights,
    describe_alone,
    describe_bias,
    describe_export,
    describe_reach,
    describe_ties,
    describe_weights,
    judge_clamp,
    measure_spans,
)
from scalelab.recipes.quantization.shapes import draw_layers, find_distance, find_largest, measure_kurtosis
from scalelab.recipes.recipe import Answer, Main, Outcome, Outcomes, Recipe, Row, Size, pair_questions
from scalelab.records.quantized import Histogram, HistogramKind, LayerReport, Quantized
from scalelab.report.document import Chart, Table
from scalelab.report.tables import count_column, make_column, make_table, text_column
from scalelab.studies.quantize.answer import StageAnswer, compare_stages
from scalelab.studies.quantize.report import PAIRED_NOTE, draw_stages
from scalelab.studies.quantize.study import QuantizeStudy
from scalelab.studies.shared.job import Job

PLAIN, BIASED = "plain", "bias"
"""The two training runs."""
SMALL_EPOCHS = {"none": 8, "last": published.EPOCHS}
DEVIATIONS = 3
ACCURACY = "Accuracy of the first network, ± over its test images"
NETWORKS = 8
"""In small, of either kind and each from its own seed: 355 test images of one network leave small changes open."""


def make_studies(size: Size, name: str, bias: str) -> dict[str, QuantizeStudy]:
    """The network of the tables first, then others that differ in the seed."""
    first = make_study(size, bias)
    seeds = range(1, choose(size, small=NETWORKS, full=1))
    return {name: first} | {
        f"{name}-{n}": replace(first, job=replace(first.job, seed=first.job.seed + n)) for n in seeds
    }


def make_study(size: Size, bias: str) -> QuantizeStudy:
    data = choose(size, small="digits", full="cifar10")
    return QuantizeStudy(
        calibration="lab",
        samples=published.CALIBRATION_IMAGES,
        global_batch=published.BATCH,
        epochs=choose(size, small=SMALL_EPOCHS[bias], full=published.EPOCHS),
        job=Job(
            workload="lenet",
            options={"data": data, "bias": bias},
            threads_per_rank=1,
            timeout=choose(size, small="10min", full="2h"),
        ),
    )


def make_rows(size: Size) -> Sequence[Row]:
    plain = make_studies(size, PLAIN, "none")

    def ask(row: str, title: str, answer: Callable[[Outcomes], Answer], reads: str = "Q1") -> Row:
        """A row that asks the training run without a bias."""
        return Row(id=row, title=title, parts=plain, conclude=answer, reads=reads, num_tables=0, shows=(PLAIN,))

    return (
        ask("Q1", "Weights", answer_q1, reads=""),
        ask("Q2", "Integer weights", partial(answer_q2, size)),
        ask("Q3", "Activations", answer_q3),
        ask("Q4", "Integer activations", partial(answer_q4, size)),
        Row(
            id="Q5",
            title="Integer bias",
            parts=make_studies(size, BIASED, "last"),
            conclude=partial(answer_q5, size),
            num_tables=0,
            shows=(BIASED,),
        ),
    )


def read_quantized(outcome: Outcome | None) -> Quantized | None:
    result = find_completed(outcome)
    return None if result is None else result.quantized


def list_networks(outcomes: Outcomes) -> list[Quantized]:
    """Of a row; the one in its tables first."""
    return [found for outcome in outcomes.values() if (found := read_quantized(outcome)) is not None]


def list_histograms(quantized: Quantized | None, kind: HistogramKind) -> list[Histogram]:
    return [histogram for histogram in quantized.histograms if histogram.kind == kind] if quantized else []


def answer_stages(quantized: Quantized) -> dict[str, StageAnswer]:
    """Every stage beside float, by name."""
    return {answer.stage.name: answer for answer in compare_stages(quantized)}


def measure_accuracy(answer: StageAnswer | None) -> Estimate | None:
    if answer is None or answer.counts is None:
        return None
    return estimate_share(answer.counts.both + answer.counts.won, answer.counts.num_samples)


def compare(answer: StageAnswer | None, printed: str | None = None, what: str = "") -> Compared:
    """One line: ours beside what was printed."""
    title = what or (answer.stage.title if answer else "")
    there = None if printed is None else read_percent(printed)
    return Compared(title, measure_accuracy(answer), there, f"{printed} %" if printed else "")


def make_main(answer: StageAnswer | None, printed: str, what: str) -> Main:
    return Main("accuracy", what, measure_accuracy(answer), read_percent(printed), f"{printed} %")


def make_accuracy_table(size: Size, lines: Sequence[Compared]) -> Table | None:
    notes = ("in small, ours are on digits",) if size == "small" else ()
    return make_beside_table("accuracy", lines, title=ACCURACY, size=size, notes=notes)


def make_agreement_table(found: Mapping[str, StageAnswer]) -> Table:
    """Every stage beside float, image by image."""
    return make_table(
        [answer for answer in found.values() if answer.agreement is not None],
        text_column("stage", "stage", lambda answer: answer.stage.title),
        make_column("number", "change_points", "change, points", lambda answer: scale(answer.difference, 100)),
        make_column("accuracy", "agreement", "same class", lambda answer: answer.agreement, shows_interval=False),
        make_column("accuracy", "least", "at least", lambda answer: answer.agreement and answer.agreement.low),
        title="Compared with float",
        notes=(
            PAIRED_NOTE,
            "same class: images that get the class that float gives them; at least: the lower end of its interval",
            f"K = {published.CLAMP} where no K is named; dequantized: integer weights divided by their scale again",
            "int32 logits: the last layer's sums, not rounded to int8",
        ),
    )


def make_scale_table(quantized: Quantized) -> Table | None:
    """The scales of every layer, and the combined ones that its sums and its output have; with K = 127."""
    known = [layer for layer in quantized.layers if layer.output_scale is not None and layer.weight_scales]
    if not known:
        return None

    def find_sums(layer: LayerReport) -> float | None:
        return 1 / (layer.scale * layer.output_scale) if layer.scale and layer.output_scale else None

    return make_table(
        known,
        text_column("layer", "layer", lambda layer: layer.name),
        make_column("number", "weight_scale", "n_w", lambda layer: 1 / layer.weight_scales[0]),
        text_column("output_scale", "n_out", lambda layer: f"{layer.output_scale:.3e}", align="right"),
        text_column("sum_scale", "sums", lambda layer: f"{find_sums(layer) or 0.0:.3e}", align="right"),
        make_column("number", "combined_scale", "output", lambda layer: 1 / layer.scale if layer.scale else None),
        title="Scales by layer",
        notes=(
            f"with K = {published.CLAMP}; n_w: what weights are multiplied by; n_out: what a layer's int32 sums are"
            " multiplied by to become int8",
            f"sums: {published.CLAMP} / max|input| · Π(n_w · n_out) of the layers before · n_w, which a bias is"
            " multiplied by; output: sums · n_out = 127 / max|a|",
        ),
    )


def make_bias_table(quantized: Quantized) -> Table | None:
    """Every int32 bias."""
    rows = [(layer.name, number, value) for layer in quantized.layers for number, value in enumerate(layer.bias)]
    table = make_table(
        rows,
        text_column("layer", "layer", lambda row: row[0]),
        count_column("number", "output", lambda row: row[1]),
        text_column("bias", "bias, int32", lambda row: f"{row[2]:,}".replace("-", "−"), align="right"),
        title="Integer biases",
        notes=("bias × the scale of its layer's sums, rounded",),
    )
    return table if rows else None


def draw_changes(found: Mapping[str, StageAnswer]) -> tuple[Chart, ...]:
    """The change of every stage against float, image by image; with labels that fit."""
    short = [
        replace(one, stage=replace(one.stage, title=one.stage.title.replace(" + ", "+"))) for one in found.values()
    ]
    return draw_stages([one for one in short if one.stage.name != "float"])[1:]


def divide_largest(limit: float) -> float | None:
    """The integer that one unit becomes, where the limit becomes 127."""
    return LARGEST / limit if limit else None


def answer_q1(outcomes: Outcomes) -> Answer:
    histograms = list_histograms(read_quantized(outcomes.get(PLAIN)), "weights")
    if not histograms:
        return Answer()
    sigmas = {one.layer: DEVIATIONS * one.deviation for one in histograms}
    spans = measure_spans(histograms)
    table = make_table(
        histograms,
        text_column("layer", "layer", lambda one: one.layer),
        count_column("num_weights", "weights", lambda one: sum(one.counts)),
        make_column("number", "least", "min", lambda one: one.least),
        make_column("number", "largest", "max", lambda one: one.largest),
        make_column("number", "three_sigma", "3σ", lambda one: sigmas[one.layer]),
        make_column("number", "scale", "n_w", lambda one: divide_largest(find_largest(one))),
        make_column("number", "sigma_scale", "n_w by 3σ", lambda one: divide_largest(sigmas[one.layer])),
        make_column("number", "kurtosis", "kurtosis", measure_kurtosis),
        make_column("number", "distance", "distance", find_distance),
        title="Weights by layer",
        notes=(
            "n_w: integers per unit, 127 / max|w| or 127 / 3σ; kurtosis: excess kurtosis, 0 of a normal distribution,"
            " ± 2 standard errors; distance: Kolmogorov–Smirnov, to a normal distribution",
        ),
    )
    widest = max(spans, key=spans.__getitem__)
    sentences = (describe_reach(spans),)
    return Answer(
        main=Main("ratio", f"largest weight over 3σ, {widest}", spans[widest]),
        tables=(table,),
        sentences=sentences,
        questions=pair_questions("quantization", "Q1", answer_weights(histograms)),
        charts=draw_layers(histograms),
        is_plot_asked=True,
    )


def answer_q2(size: Size, outcomes: Outcomes) -> Answer:
    quantized = read_quantized(outcomes.get(PLAIN))
    if quantized is None:
        return Answer()
    found = answer_stages(quantized)
    lines = [
        compare(found.get("float")),
        compare(found.get("weights"), published.WEIGHTS_PERCENT),
        compare(found.get("weights-3sigma")),
        compare(found.get("dequantized")),
    ]
    sentences = (
        describe_weights(list_networks(outcomes)),
        f"Dequantized weights classify {count_same(found, 'dequantized', 'weights')} images as the integers do: without"
        " biases, a scale on all weights of a layer only scales the logits.",
    )
    return Answer(
        main=make_main(found.get("weights"), published.WEIGHTS_PERCENT, "accuracy, int8 weights"),
        tables=keep_tables(make_accuracy_table(size, lines)),
        sentences=sentences,
        questions=pair_questions("quantization", "Q2", answer_integers(found, list_networks(outcomes))),
    )


def count_same(found: Mapping[str, StageAnswer], one: str, other: str) -> str:
    """`9,998 of 10,000`."""
    pairs = list(zip(found[one].stage.predictions, found[other].stage.predictions, strict=True))
    return f"{sum(mine == theirs for mine, theirs in pairs):,} of {len(pairs):,}"


def answer_q3(outcomes: Outcomes) -> Answer:
    quantized = read_quantized(outcomes.get(PLAIN))
    before = list_histograms(quantized, "before")
    if quantized is None or not before:
        return Answer()
    after = {one.layer: one for one in list_histograms(quantized, "after")}
    linear = [one.layer for one in before if after[one.layer].least < 0]
    table = make_table(
        before,
        text_column("layer", "layer", lambda one: one.layer),
        make_column("number", "least", "min before", lambda one: one.least),
        make_column("number", "least_after", "after ReLU", lambda one: None if one.layer in linear else 0.0),
        make_column("number", "largest", "max", lambda one: after[one.layer].largest),
        make_column("number", "three_sigma", "3σ after", lambda one: DEVIATIONS * after[one.layer].deviation),
        make_column("number", "scale", "127 / max", lambda one: divide_largest(find_largest(after[one.layer]))),
        title="Activations by layer",
        notes=(f"no ReLU follows {', '.join(linear)}: its maximum and 3σ are of the output itself",) if linear else (),
    )
    farther = [one.layer for one in before if -one.least > one.largest and after[one.layer].least >= 0]
    top = max(before, key=lambda one: one.largest)
    sentences = [
        f"On {quantized.num_calibrated} images, activations reach {top.largest:.3g}, in {top.layer}.",
        f"After a ReLU they are never negative, so only {LARGEST + 1} of the 256 integers are used.",
    ]
    if farther:
        sentences.append(
            f"In {', '.join(farther)} negative values reach farther than positive ones: a range taken before ReLU is"
            " wider than needed."
        )
    return Answer(
        main=Main("number", f"largest activation, {top.layer}", top.largest),
        tables=(table,),
        sentences=tuple(sentences),
        questions=pair_questions("quantization", "Q3", answer_activations(before, after)),
        charts=draw_layers([*before, *(after[one.layer] for one in before)]),
        is_plot_asked=True,
    )


def answer_q4(size: Size, outcomes: Outcomes) -> Answer:
    quantized = read_quantized(outcomes.get(PLAIN))
    if quantized is None:
        return Answer()
    found, networks = answer_stages(quantized), list_networks(outcomes)
    lines = [
        compare(found.get("float")),
        compare(found.get("int8"), what=f"weights + activations, K = {published.CLAMP}"),
        compare(found.get("int8-255"), published.ACTIVATIONS_PERCENT),
    ]
    return Answer(
        main=make_main(found.get("int8-255"), published.ACTIVATIONS_PERCENT, f"accuracy, int8, K = {published.PEAK}"),
        tables=keep_tables(make_accuracy_table(size, lines), make_agreement_table(found), make_scale_table(quantized)),
        questions=pair_questions("quantization", "Q4", answer_forward(networks, list_histograms(quantized, "after"))),
        sentences=(
            *((judge_clamp(networks),) if len(networks) > 1 else ()),
            describe_alone(found, networks),
            *describe_ties(quantized, found),
            *describe_export(quantized),
        ),
    )


def answer_q5(size: Size, outcomes: Outcomes) -> Answer:
    quantized = read_quantized(outcomes.get(BIASED))
    if quantized is None:
        return Answer()
    found = answer_stages(quantized)
    lines = [
        compare(found.get("float"), published.BIAS_FLOAT_PERCENT),
        compare(found.get("weights-raw-bias"), published.BIAS_RAW_PERCENT),
        compare(found.get("weights")),
        compare(found.get("int8"), what=f"weights + activations + bias, K = {published.CLAMP}"),
        compare(found.get("int8-255"), published.BIAS_ALL_PERCENT),
    ]
    networks = list_networks(outcomes)
    answers = answer_bias(found, networks, quantized.layers)
    return Answer(
        main=make_main(found.get("int8-255"), published.BIAS_ALL_PERCENT, f"accuracy, int8, K = {published.PEAK}"),
        tables=keep_tables(
            make_accuracy_table(size, lines),
            make_agreement_table(found),
            make_scale_table(quantized),
            make_bias_table(quantized),
        ),
        questions=pair_questions("quantization", "Q5", answers),
        charts=draw_changes(found),
        sentences=(
            *((describe_bias(networks),) if len(networks) > 1 else ()),
            describe_alone(found, networks),
            f"With int8 weights and an unscaled bias,"
            f" {count_same(found, 'weights-raw-bias', 'weights-no-bias')} images get the class that they get without a"
            " bias.",
            *describe_ties(quantized, found),
            *describe_export(quantized),
        ),
    )


QUANTIZATION = Recipe(
    name="quantization",
    title="A small CNN in int8",
    assignment="a course's homework 5, part B: five questions",
    stand_in="digits of scikit-learn instead of CIFAR-10; Q1 to Q4 train for 8 epochs instead of 2, Q5 for"
    " 2, as later its bias decides no image",
    terms="Terms: float: the network as trained; other stages replace its numbers by integers. Every row trains several"
    " networks that differ in the seed: “over seeds” an interval is of networks, “over images” of other test images."
    " Changes over seeds are medians (Hodges–Lehmann) and need not add up.",
    make_rows=make_rows,
    make_checks=make_checks,
)

"""What the rows of the quantization recipe say of what the lab left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scalelab.recipes.quantization.questions import (
    answer_activations,
    answer_bias,
    answer_forward,
    answer_integers,
    compare_ranges,
    describe_weights,
    say_change,
    weigh_bias,
)
from scalelab.recipes.quantization.rows import (
    BIASED,
    PLAIN,
    answer_q1,
    answer_q3,
    answer_q4,
    answer_q5,
    answer_stages,
    describe_ties,
    make_rows,
)
from scalelab.recipes.quantization.shapes import (
    describe_saturation,
    explain_flat,
    find_distance,
    find_share_beyond,
    is_bell,
    judge_shapes,
)
from scalelab.recipes.recipe import Answer, Outcome
from scalelab.records.quantized import Histogram, LayerReport, Quantized, Stage
from scalelab.records.trial import Status, TrialResult
from scalelab.studies.shared.study import Study
from tests.recipes.played import PlayedLauncher, play_histogram


def play(row: int, tmp_path: Path) -> tuple[Study, TrialResult]:
    """The first network of a row, played to its end."""
    study = next(iter(make_rows("small")[row].parts.values()))
    (trial,) = study.plan()
    return study, PlayedLauncher().launch(trial, tmp_path)


def make_outcome(study: Study, result: TrialResult) -> Outcome:
    return Outcome(study=study, results=(result,), document=None)


def read_quantized(result: TrialResult) -> Quantized:
    assert result.quantized is not None
    return result.quantized


def test_four_rows_read_one_training_and_the_fifth_has_its_own() -> None:
    rows = make_rows("small")
    assert [row.reads for row in rows] == ["", "Q1", "Q1", "Q1", ""]
    assert [next(iter(row.parts)) for row in rows] == [PLAIN] * 4 + [BIASED]
    assert all(row.parts == rows[0].parts for row in rows[:4])


def test_weights_are_told_by_layer_with_both_scales(tmp_path: Path) -> None:
    finding = answer_q1({PLAIN: make_outcome(*play(0, tmp_path))})
    (table,) = finding.tables
    layer, count, least, largest, sigma, scale, sigma_scale, *_ = (cell.value for cell in table.rows[0])
    assert (layer, count, least, largest, sigma) == ("conv1", 100, -4.0, 4.0, 3.0)
    assert scale == pytest.approx(127 / 4)
    assert sigma_scale == pytest.approx(127 / 3)
    assert "1.3 × 3σ" in finding.sentences[0]


def test_results_that_reach_farther_below_zero_are_named(tmp_path: Path) -> None:
    study, result = play(0, tmp_path)
    quantized = read_quantized(result)
    deep = replace(play_histogram("conv1", "before"), least=-9.0)
    others = tuple(one for one in quantized.histograms if (one.layer, one.kind) != ("conv1", "before"))
    changed = replace(result, quantized=replace(quantized, histograms=(deep, *others)))
    words = answer_q3({PLAIN: make_outcome(study, changed)}).sentences
    assert words[2].startswith("In conv1 negative values reach farther")
    assert len(answer_q3({PLAIN: make_outcome(study, result)}).sentences) == 2


def test_both_peaks_are_told_with_what_they_agree_on(tmp_path: Path) -> None:
    words = answer_q4("small", {PLAIN: make_outcome(*play(0, tmp_path))}).sentences
    assert words[0].startswith("With K = 255 and the clamp at 127, the network in the tables loses 15.00 points")
    assert "; with K = 127 it is right on 2 images fewer than float (−2.67 to" in words[0]
    assert words[-1].startswith("The exported ONNX network, run by onnxruntime, gives no other logits")


def test_ties_of_rounded_logits_are_counted_by_image(tmp_path: Path) -> None:
    quantized = read_quantized(play(0, tmp_path)[1])
    assert quantized is not None
    last = replace(quantized.layers[-1], tied_outputs=3)
    tied = replace(quantized, layers=(*quantized.layers[:-1], last))
    words = list(describe_ties(tied, answer_stages(tied)))
    assert words[0].startswith("In 3 of 200 images two int8 logits tie for the largest")
    assert len(words) == 1
    assert list(describe_ties(quantized, answer_stages(quantized))) == []


def test_an_unscaled_bias_is_held_against_none(tmp_path: Path) -> None:
    finding = answer_q5("small", {BIASED: make_outcome(*play(4, tmp_path))})
    assert "200 of 200 images get the class that they get without a bias" in finding.sentences[1]
    beside = {str(row[0].value): row[2].value for row in finding.tables[0].rows}
    assert beside["weights-raw-bias"] == "51.4 %"
    assert beside["int8-255"] == "54.49 %"


def make_quantized(**wrong: int) -> Quantized:
    """Float is right on all 200 images, a stage wrong on the first so many; names have _ for -."""
    stages = [
        Stage(name=name.replace("_", "-"), title=name, predictions=(1,) * count + (0,) * (200 - count))
        for name, count in {"float": 0, **wrong}.items()
    ]
    return Quantized(labels=(0,) * 200, stages=tuple(stages))


@pytest.mark.parametrize(
    ("raw", "scaled", "without", "words"),
    [
        (0, 0, 0, "This data cannot show it: the bias changes the class of none of the 200 images."),
        (40, 0, 40, "Yes. Scaling the bias changes the accuracy by +20.00 points"),
        (0, 40, 0, "No, the unscaled bias does better. Scaling the bias changes the accuracy by −20.00 points"),
        (1, 0, 1, "This run does not show it, the change could be chance. Scaling the bias"),
    ],
)
def test_a_bias_is_judged_only_where_it_decides_images(raw: int, scaled: int, without: int, words: str) -> None:
    quantized = make_quantized(weights_raw_bias=raw, weights=scaled, weights_no_bias=without, int8_255=0)
    answer = answer_bias(answer_stages(quantized), [quantized])["bias"]
    assert answer.startswith(words)
    assert "54.1 % without a bias (Q2), 51.4 % with an unscaled one (Q5)" in answer


def test_a_bias_is_weighed_against_the_largest_logit() -> None:
    """Logits reach 127 × 0.1 = 12.7; a bias of 20 × 0.1 × 0.05 = 0.1 beside them, or beside 40 × 50 as much."""
    first = LayerReport(name="fc1", op="linear", weight_scales=(1 / 40,))
    last = LayerReport(name="fc2", op="linear", weight_scales=(1 / 50,), scale=0.1, output_scale=0.05, bias=(3, -20))
    words = weigh_bias([first, last])
    assert "Π n_w = 2.0e+03 times as large" in words
    assert "the largest bias (0.1) is 0.8 % of the largest logit (12.7); unscaled, it is 4e-06 of it" in words
    assert weigh_bias([]).startswith("Integer weights make the logits many orders of magnitude larger")


@pytest.mark.parametrize(
    ("rounded", "start", "reason"),
    [
        (1, "This run does not resolve a drop: −0.50 points", "so neither cost is beyond its interval"),
        (
            60,
            "A drop, not small (limit: 2 points): −30.00 points",
            "so the clamp costs accuracy, and rounding activations nothing",
        ),
    ],
)
def test_a_drop_is_explained_as_far_as_it_is_there(rounded: int, start: str, reason: str) -> None:
    quantized = make_quantized(weights=0, int8_255=rounded, int8=0)
    answer = answer_forward([quantized])["drop"]
    assert answer.startswith(start)
    assert reason in answer
    assert f"Correct, of 200 images: 200 with int8 weights, {200 - rounded} with activations." in answer


def test_networks_of_other_seeds_resolve_what_one_leaves_open() -> None:
    """One image of 200 could be chance; one to three in each of eight networks is not."""
    networks = [make_quantized(weights=0, int8_255=wrong, int8=0) for wrong in (1, 2, 3, 1, 2, 2, 1, 3)]
    answers = [answer_forward(some)["drop"] for some in (networks[:1], networks)]
    assert answers[0].startswith("This run does not resolve a drop")
    assert answers[1].startswith("A drop, small (limit: 2 points): −1.00 points (−1.25 to −0.50 over 8 seeds)")
    assert "the clamp of K = 255 by −1.00 points" in answers[1]


def test_the_small_recipe_trains_networks_that_differ_in_the_seed_only() -> None:
    for row in make_rows("small")[::4]:
        trials = [trial for study in row.parts.values() for trial in study.plan()]
        assert [trial.seed for trial in trials] == list(range(8))
        assert all(replace(trial, seed=0) == trials[0] for trial in trials)
    assert [len(row.parts) for row in make_rows("full")] == [1] * 5


def make_shape(layer: str, counts: tuple[int, ...], mean: float = 0.0, least: float = -4.0) -> Histogram:
    """A histogram with a standard deviation of 1 on paper."""
    return replace(play_histogram(layer, "before"), counts=counts, mean=mean, least=least)


def test_a_bell_a_box_and_a_shifted_one_are_told_apart() -> None:
    bell = make_shape("bell", (60, 6060, 60_600, 241_700, 383_000, 241_700, 60_600, 6060, 60))
    box, shifted = make_shape("box", (10_000,) * 9), replace(bell, layer="shifted", mean=0.5)
    after = {one.layer: replace(play_histogram(one.layer, "after"), layer=one.layer) for one in (bell, box, shifted)}
    assert answer_activations([bell], after)["before"].startswith("Centred: yes, bell (mean")
    assert "Bell-shaped (by the limits of Q1): no" in answer_activations([box], after)["before"]
    both = answer_activations([bell, box, shifted], after)["before"]
    assert both.startswith("Centred: only bell, box of 3 layers (mean within 0.2 σ of zero; the farthest is 0.50 σ, sh")
    assert "only bell, shifted of 3 layers" in both
    assert "Bell-shaped (excess kurtosis within ± 0.5" in judge_shapes([bell, box, shifted])


def test_flat_weights_are_called_uniform_only_where_they_may_be() -> None:
    box = make_shape("box", (10_000,) * 100)
    half = make_shape("half", (4000, 8000, 12_000, 14_000, 16_000, 16_000, 14_000, 12_000, 8000, 4000))
    bell = make_shape("bell", (60, 6060, 60_600, 241_700, 383_000, 241_700, 60_600, 6060, 60))
    assert explain_flat([bell]) == ""
    assert "box cannot be told from the uniform distribution" in explain_flat([box])
    assert explain_flat([half]) == (
        " half lie between a normal distribution and the uniform one that initialization draws from (−1.2)."
    )


def test_an_interval_says_whether_it_is_over_seeds_or_over_images() -> None:
    networks = [make_quantized(weights=wrong, weights_3sigma=wrong + 2) for wrong in (0, 1, 0, 1, 0, 1, 0, 1)]
    found = answer_stages(networks[0])
    alone, together = (answer_integers(found, some)["range"] for some in (networks[:1], networks))
    assert alone.count("over images") == 3
    assert "over seeds" not in alone
    assert together.count("over 8 seeds") == 3
    assert "so 3σ costs accuracy: −1.00 points (−1.00 to −1.00 over 8 seeds) apart" in together
    assert describe_weights(networks).endswith("over 8 seeds).")
    assert say_change(found["weights-3sigma"]).endswith("points over images)")


def test_a_bell_is_near_a_normal_distribution_and_humps_are_not() -> None:
    humps = make_shape("humps", (0, 900, 2500, 60_000, 1000, 1000, 60_000, 2500, 900))
    assert find_distance(make_shape("bell", (1, 8, 28, 56, 70, 56, 28, 8, 1))) < 0.03
    assert find_distance(make_shape("box", (10_000,) * 100)) == pytest.approx(0.057, abs=0.002)
    assert not is_bell(humps)


def test_ranges_are_compared_layer_by_layer(tmp_path: Path) -> None:
    quantized = read_quantized(play(0, tmp_path)[1])
    wide = replace(play_histogram("fc9", "weights"), layer="fc9", deviation=9.0)
    found = compare_ranges([replace(quantized, histograms=(*quantized.histograms, wide))])
    assert "coarser steps in fc9, whose weights do not reach it" in found
    assert compare_ranges([]) == ""


def test_a_layer_without_relu_is_not_called_one(tmp_path: Path) -> None:
    study, result = play(0, tmp_path)
    quantized = read_quantized(result)
    linear = tuple(
        replace(one, least=-3.0) if (one.layer, one.kind) == ("conv2", "after") else one for one in quantized.histograms
    )
    found = answer_q3({PLAIN: make_outcome(study, replace(result, quantized=replace(quantized, histograms=linear)))})
    assert [row[2].value for row in found.tables[0].rows] == [0.0, None]
    assert any("no ReLU follows conv2" in note for note in found.tables[0].notes)
    assert "no ReLU follows conv2" in found.questions[1].answer


def test_what_255_clamps_is_read_from_the_bins(tmp_path: Path) -> None:
    after = play_histogram("conv1", "after")
    assert find_share_beyond(after, 255) == pytest.approx(0.3), "the two bins beyond 1.99 of 4"
    assert find_share_beyond(after, 127) == 0
    both_sides = play_histogram("conv1", "before")
    assert find_share_beyond(both_sides, 255) == pytest.approx(0.5), "the bins at both ends"
    results = [one for one in read_quantized(play(0, tmp_path)[1]).histograms if one.kind == "after"]
    assert "30 % of conv1, 30 % of conv2" in describe_saturation(results)
    assert "background" not in describe_saturation(results)
    dark = replace(both_sides, layer="input", counts=(9, *(0 for _ in both_sides.counts[1:])))
    assert describe_saturation([dark]).endswith("the input's are mostly negative, the background of the images.")


def test_a_training_that_failed_leaves_rows_without_an_answer(tmp_path: Path) -> None:
    study, result = play(0, tmp_path)
    failed = replace(result, status=Status.CRASHED, quantized=None)
    for row in make_rows("small"):
        name = next(iter(row.parts))
        assert row.conclude({name: make_outcome(study, failed)}) == Answer()
        assert row.conclude({}) == Answer()

"""The figures of a model taken to int8."""

from __future__ import annotations

from dataclasses import replace

from scalelab.records.quantized import Histogram, LayerReport, Quantized, Stage, Timing
from scalelab.report.document import Chart, Section
from scalelab.studies.quantize.answer import compare_stages, find_latencies
from scalelab.studies.quantize.report import MOST_HISTOGRAMS, make_sections
from tests.report.charts.figures import draw, list_layers, list_texts, list_values

LABELS = tuple(number % 4 for number in range(80))


def make_histogram(layer: str, kind: str, **fields: float) -> Histogram:
    ranges = {"chosen_low": -2.0, "chosen_high": 2.0} | fields
    return Histogram(
        layer=layer,
        kind=kind,  # type: ignore[arg-type]
        low=-4.0,
        high=4.0,
        counts=(1, 20, 300, 20, 1),
        least=0.0 if kind == "after" else -4.0,
        largest=4.0,
        mean=0.0,
        deviation=1.0,
        **ranges,
    )


def make_record(num_layers: int = 2, **fields: object) -> Quantized:
    names = [f"conv{number}" for number in range(num_layers)]
    worse = tuple(0 if number % 10 == 1 else label for number, label in enumerate(LABELS))
    record: dict[str, object] = {
        "labels": LABELS,
        "stages": (
            Stage(name="float", title="float32", predictions=LABELS),
            Stage(name="int8", title="int8", predictions=worse),
            Stage(name="onnxruntime", title="int8 by onnxruntime", predictions=worse),
        ),
        "layers": tuple(
            LayerReport(name=name, op="conv", sqnr=30.0 - number, sqnr_alone=35.0, output_sqnr=40.0 - number)
            for number, name in enumerate(names)
        ),
        "histograms": tuple(make_histogram(name, kind) for name in names for kind in ("weights", "before", "after")),
        "timings": tuple(
            Timing(runtime=runtime, batch=batch, seconds=(0.01 * batch, 0.011 * batch, 0.012 * batch))
            for runtime in ("onnxruntime-float32", "onnxruntime-int8")
            for batch in (1, 8)
        ),
        "sizes": (("float32.onnx", 4000), ("int8.onnx", 1100)),
    }
    return Quantized(**(record | fields))  # type: ignore[arg-type]


def list_charts(record: Quantized) -> dict[str, Chart]:
    sections = make_all(record)
    return {chart.title: chart for section in sections for chart in section.charts}


def make_all(record: Quantized) -> list[Section]:
    return make_sections(record, compare_stages(record), find_latencies(record))


def test_every_figure_is_drawn() -> None:
    charts = list_charts(make_record())
    assert list(charts) == [
        "Accuracy by stage", "Change against float", "Latency by runtime and batch", "Size of the stored models",
        "Noise in the logits by layer", "Signal over quantization noise by layer", "conv0: weights",
        "conv0: activations", "conv1: weights", "conv1: activations",
    ]  # fmt: skip
    for chart in charts.values():
        assert "<svg" in draw(chart)


def test_accuracy_has_an_interval_and_its_change_too() -> None:
    charts = list_charts(make_record())
    for title in ("Accuracy by stage", "Change against float"):
        assert list_layers(charts[title], "rule")
    assert len(list_values(charts["Accuracy by stage"], "point")) == 3
    assert [value["name"] for value in list_values(charts["Change against float"], "point")] == [
        "int8", "int8 by onnxruntime",
    ]  # fmt: skip


def test_chosen_range_and_three_deviations_are_drawn_into_a_histogram() -> None:
    chart = list_charts(make_record())["conv0: weights"]
    assert sorted(value["at"] for value in list_values(chart, "rule")) == [-3, -2, 2, 3]
    assert set(list_texts(chart)) == {"range", "−3σ", "+3σ"}


def test_results_before_and_after_are_two_series() -> None:
    chart = list_charts(make_record())["conv0: activations"]
    assert {value["series"] for value in list_values(chart, "bar")} == {"before ReLU", "after ReLU"}


def test_results_without_relu_are_one_series() -> None:
    linear = tuple(replace(one, least=-4.0) for one in make_record().histograms)
    chart = list_charts(make_record(histograms=linear))["conv0: activations"]
    assert {value["series"] for value in list_values(chart, "bar")} == {"activations"}


def test_of_many_layers_the_worst_are_drawn_in_their_order() -> None:
    charts = list_charts(make_record(num_layers=12))
    drawn = [title for title in charts if title.endswith(": weights")]
    assert drawn == [f"conv{number}: weights" for number in range(12 - MOST_HISTOGRAMS, 12)]
    assert f"The {MOST_HISTOGRAMS} worst of 12 layers" in charts[drawn[0]].caption


def test_a_record_without_times_and_classes_has_the_figures_that_are_left() -> None:
    record = make_record(labels=(), timings=(), histograms=(), layers=())
    assert list(list_charts(record)) == ["Size of the stored models"]


def test_latencies_of_one_batch_are_bars() -> None:
    timings = tuple(
        Timing(runtime=runtime, batch=1, seconds=(0.01, 0.011)) for runtime in ("onnxruntime-float32", "eager-int8")
    )
    chart = list_charts(make_record(timings=timings))["Latency by runtime"]
    assert [value["name"] for value in list_values(chart, "bar")] == ["onnxruntime, float32", "torch, int8"]

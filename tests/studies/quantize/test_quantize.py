"""What int8 costs, by records that a rank might have left: tables, words, warnings, and flags that cannot work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalelab import Job
from scalelab.analysis.estimate import Estimate
from scalelab.errors import UsageError
from scalelab.records.quantized import LayerReport, Quantized, Stage, Timing
from scalelab.records.settings import Optimization
from scalelab.records.tasks import Quantize
from scalelab.records.trial import Status, TrialResult
from scalelab.report.document import Document
from scalelab.report.findings import MAIN
from scalelab.studies.quantize.answer import compare_stages, find_latencies, rank_layers
from scalelab.studies.quantize.study import QuantizeStudy
from tests.studies.answers import find_caution, find_finding, list_kinds

LABELS = tuple(number % 10 for number in range(2000))


def spoil(predictions: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The same with so many of them wrong."""
    return tuple((one + 1) % 10 if number < count else one for number, one in enumerate(predictions))


def make_layers(**worst: Any) -> tuple[LayerReport, ...]:
    plain = {"num_tested": 200, "correct_only": 180, "correct_without": 178, "sqnr": 40.0, "sqnr_alone": 42.0}
    first = LayerReport(
        name="conv1", op="conv", num_weights=450, multiply_adds=350_000, output_sqnr=50.0, kernel="QLinearConv",
        seconds=50e-6, float_seconds=20e-6, weight_gap=1.2, **plain,
    )  # fmt: skip
    second = LayerReport(
        name="fc1", op="linear", num_weights=48_000, multiply_adds=48_000, output_sqnr=48.0, kernel="QGemm",
        seconds=6e-6, float_seconds=8e-6, weight_gap=1.3, **plain,
    )  # fmt: skip
    return first, replace(second, **worst)


def make_record(**fields: Any) -> Quantized:
    right = spoil(LABELS, 200)
    defaults: dict[str, Any] = {
        "labels": LABELS,
        "stages": (
            Stage(name="float", title="float", predictions=right),
            Stage(name="int8", title="int8", predictions=spoil(LABELS, 204)),
            Stage(name="onnxruntime", title="int8 by onnxruntime", predictions=spoil(LABELS, 204)),
        ),
        "layers": make_layers(),
        "timings": tuple(
            Timing(runtime=runtime, batch=batch, seconds=tuple(base * (1 + 0.01 * n) for n in range(15)))
            for batch, base32, base8 in ((1, 60e-6, 90e-6), (64, 5e-3, 7e-3))
            for runtime, base in (("onnxruntime-float32", base32), ("onnxruntime-int8", base8))
        ),
        "sizes": (("float32.onnx", 248_000), ("int8.onnx", 62_000)),
        "num_calibrated": 512,
        "correct_float": 181,
        "correct_int8": 178,
    }
    return Quantized(**(defaults | fields))


def conclude(record: Quantized | None, study: QuantizeStudy | None = None, **fields: Any) -> Document:
    study = study or QuantizeStudy()
    (trial,) = study.plan()
    defaults: dict[str, Any] = {"status": Status.COMPLETED, "quantized": record}
    return study.conclude([TrialResult(trial=trial, **(defaults | fields))])


def find_row(document: Document, heading: str, name: str) -> dict[str, Any]:
    (table,) = next(section.tables for section in document.sections if section.heading == heading)
    row = next(row for row in table.rows if row[0].value == name)
    return {column.key: cell.value for column, cell in zip(table.columns, row, strict=True)}


def test_accuracy_is_told_with_what_was_won_and_lost() -> None:
    document = conclude(make_record())
    row = find_row(document, "", "int8")
    assert row["accuracy"] == pytest.approx(1796 / 2000)
    assert (row["won"], row["lost"]) == (0, 4)
    assert row["change"] == pytest.approx(-4 / 2000)
    assert row["agreement"] == pytest.approx(1996 / 2000)
    assert find_row(document, "", "float")["change"] is None
    first = document.findings[0]
    assert (first.kind, first.subject, first.weight) == ("int8-accuracy", "int8", MAIN)
    assert (first.values["lost"], first.values["won"]) == (4, 0)
    assert first.text.startswith("int8 loses 0.20 points of accuracy (")
    assert "of 2000 samples, 4 lost and 0 won, consistent with chance" in first.text
    assert "99.80 % get the same class as in float" in first.text


def test_many_lost_and_none_won_is_more_than_chance() -> None:
    stages = (*make_record().stages[:1], Stage(name="int8", title="int8", predictions=spoil(LABELS, 220)))
    found = find_finding(conclude(make_record(stages=stages)), "int8-accuracy")
    assert isinstance(found.values["chance"], float)
    assert found.values["chance"] < 0.001
    assert "20 lost and 0 won, more than chance" in found.text


def test_a_runtime_that_gives_other_classes_than_the_simulation_is_named() -> None:
    record = make_record()
    same = find_finding(conclude(record), "runtime-agreement", "int8 by onnxruntime")
    assert same.values == {"differing": 0}
    other = replace(record.stages[2], predictions=spoil(LABELS, 207))
    found = find_finding(conclude(replace(record, stages=(*record.stages[:2], other))), "runtime-agreement")
    assert found.values == {"differing": 3}


def test_a_small_net_has_no_gain_and_the_reason_is_told() -> None:
    document = conclude(make_record())
    assert find_finding(document, "stored-size").values == {"int8_bytes": 62_000, "float_bytes": 248_000, "ratio": 4.0}
    speed = find_finding(document, "int8-speedup", "batch 1")
    assert speed.values["verdict"] == "slower"
    assert "onnxruntime, int8 is 0.6" in speed.text
    reason = find_finding(document, "no-speedup").text
    assert "the network is small. A sample takes 0.4 million multiply-adds" in reason
    assert "conv1 takes 50.0 µs in int8 and 20.0 µs in float32" in reason


def test_a_layer_that_fell_back_to_float_is_the_reason_and_a_warning() -> None:
    document = conclude(make_record(layers=make_layers(kernel="float")))
    assert "fc1 fell back to float" in find_finding(document, "no-speedup").text
    assert find_caution(document, "float-fallback").subject == "fc1"


def test_a_net_that_gains_says_so_and_gives_no_excuse() -> None:
    record = make_record()
    swapped = {"onnxruntime-float32": "onnxruntime-int8", "onnxruntime-int8": "onnxruntime-float32"}
    timings = tuple(replace(timing, runtime=swapped[timing.runtime]) for timing in record.timings)
    document = conclude(replace(record, timings=timings))
    speedup = find_finding(document, "int8-speedup", "batch 1").values["speedup"]
    assert isinstance(speedup, Estimate)
    assert speedup.value == pytest.approx(1.5)
    assert "no-speedup" not in list_kinds(document)


def test_latencies_are_compared_round_by_round() -> None:
    found = {(one.runtime, one.batch): one for one in find_latencies(make_record())}
    assert found["onnxruntime-float32", 1].speedup is None
    speedup = found["onnxruntime-int8", 1].speedup
    assert speedup is not None
    assert speedup.value == pytest.approx(60 / 90)
    assert speedup.half_width == pytest.approx(0, abs=1e-9)


def test_layers_are_ranked_by_their_noise_in_the_answer() -> None:
    blames = rank_layers(make_record())
    assert [blame.layer.name for blame in blames] == ["fc1", "conv1"]
    assert sum(blame.noise_share or 0 for blame in blames) == pytest.approx(1)
    assert blames[0].only == pytest.approx(-1 / 200)
    assert blames[0].without == pytest.approx(-3 / 200)


def test_a_layer_with_most_of_the_noise_is_to_blame_where_something_is_lost() -> None:
    document = conclude(make_record(layers=make_layers(output_sqnr=20.0, clipped_share=0.2)))
    words = find_finding(document, "blame", "fc1").text
    assert "fc1 is to blame: it makes 100 % of the noise in the logits" in words
    assert "alone in int8 it changes accuracy by −0.50 points, all others without it by −1.50" in words
    assert find_finding(document, "clipped", "fc1").values == {"share": 0.2}


def test_an_outlier_among_weights_ranks_first_however_little_noise_it_makes() -> None:
    layers = make_layers()
    record = make_record(layers=(replace(layers[0], output_sqnr=62.0, weight_gap=40.0), layers[1]))
    assert rank_layers(record)[0].layer.name == "conv1"
    assert find_finding(conclude(record), "weight-outlier", "conv1").values == {"ratio": 40.0}


def test_layers_that_are_alike_are_not_blamed() -> None:
    found = find_finding(conclude(make_record(layers=make_layers(output_sqnr=50.0))), "blame")
    assert found.subject == ""
    assert "No layer stands out" in found.text


def test_without_classes_there_is_agreement_and_a_warning() -> None:
    document = conclude(make_record(labels=(), correct_float=None))
    assert find_row(document, "", "int8")["accuracy"] is None
    assert find_row(document, "", "int8")["agreement"] == pytest.approx(1996 / 2000)
    assert "no-labels" in list_kinds(document)


def test_training_samples_that_stand_in_for_test_samples_are_told() -> None:
    stages = tuple(replace(stage, predictions=(1, 2, 3)) for stage in make_record().stages)
    record = make_record(labels=(), stages=stages, tested_on="3 training samples following the calibration samples")
    cautions = conclude(record).cautions
    assert any("on 3 training samples following the calibration samples" in caution.message for caution in cautions)


def test_a_file_that_is_not_smaller_is_not_called_smaller() -> None:
    found = find_finding(conclude(make_record(sizes=(("float32.onnx", 1390), ("int8.onnx", 1480)))), "stored-size")
    assert "The stored model is not smaller: 1.48 kB instead of 1.39 kB" in found.text


def test_layers_kept_in_float_are_named_with_what_that_brought() -> None:
    record = make_record(kept_float=("fc1",))
    mixed = Stage(name="mixed", title="int8, mixed", predictions=spoil(LABELS, 200))
    document = conclude(replace(record, stages=(*record.stages, mixed)))
    assert find_finding(document, "int8-accuracy").text.startswith("int8, mixed keeps the accuracy")
    kept = find_finding(document, "mixed-precision", "fc1")
    assert kept.text.startswith("Kept in float: fc1. All in int8 loses 0.20 points")


def test_what_a_crashed_rank_has_left_is_still_told() -> None:
    record = make_record(layers=(), timings=(), sizes=())
    document = conclude(record, status=Status.CRASHED, reason="rank 0 was killed by SIGSEGV")
    assert find_row(document, "", "int8")["lost"] == 4
    assert "SIGSEGV" in find_caution(document, "failed").message


def test_a_trial_that_left_nothing_is_a_warning_and_no_table() -> None:
    document = conclude(None, status=Status.INVALID, reason="act is nn.SiLU, which has no int8 kernel here")
    assert document.sections == ()
    assert "act is nn.SiLU" in find_caution(document, "failed").message


def test_remarks_are_a_section_of_their_own() -> None:
    sections = conclude(make_record(remarks=("a kernel fell back",))).sections
    assert any(section.paragraphs == ("a kernel fell back",) for section in sections)


@pytest.mark.parametrize(
    ("fields", "kind", "samples"),
    [({"labels": LABELS[:200]}, "few-samples", 200), ({"num_calibrated": 3}, "few-calibrated", 3)],
)
def test_measurements_to_be_careful_with_are_warned_of(fields: dict[str, Any], kind: str, samples: int) -> None:
    record = make_record(**fields)
    stages = tuple(replace(stage, predictions=stage.predictions[: len(record.labels)]) for stage in record.stages)
    assert find_caution(conclude(replace(record, stages=stages)), kind).values == {"samples": samples}


def test_a_model_that_learnt_nothing_is_warned_of() -> None:
    stage = Stage(name="float", title="float", predictions=spoil(LABELS, 1500))
    document = conclude(make_record(stages=(stage, replace(stage, name="int8", title="int8"))))
    assert find_caution(document, "not-trained").values == {"accuracy": 0.25}


def test_a_record_without_a_stage_can_be_compared() -> None:
    assert compare_stages(Quantized(labels=(), stages=())) == []


def test_the_plan_is_one_training_on_the_digits_that_is_quantized() -> None:
    (trial,) = QuantizeStudy().plan()
    assert trial.options["data"] == "digits"
    assert trial.training_run is not None
    assert trial.training_run.epochs == 10
    assert trial.optimization.lr == 0.01
    (small,) = QuantizeStudy(global_batch=4).plan()
    assert small.optimization.lr is None
    (own,) = QuantizeStudy(job=Job(workload="lenet", optimization=Optimization(lr=0.5))).plan()
    assert own.optimization.lr == 0.5


def test_trained_weights_need_no_training(tmp_path: Path) -> None:
    file = tmp_path / "trained.pt"
    file.touch()
    (trial,) = QuantizeStudy(weights=str(file)).plan()
    assert trial.training_run is None
    assert isinstance(trial.task, Quantize)
    assert trial.task.settings.weights == str(file)
    (longer,) = QuantizeStudy(weights=str(file), epochs=2).plan()
    assert longer.training_run is not None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"weights": "gone.pt"}, "--weights gone.pt is not a file"),
        ({"epochs": -1}, "--epochs must be at least"),
        ({"samples": 0}, "--samples must be at least"),
        ({"mixed": -0.1}, "--mixed must be a finite number ≥ 0, got -0.1"),
        ({"tested": 0}, "--tested must be at least"),
        ({"lab_peak": 255}, "--lab-peak is not read without --calibration lab"),
        ({"calibration": "lab", "mixed": 0.1}, "--mixed is not read with --calibration lab"),
        ({"calibration": "lab", "lab_peak": 100}, "--lab-peak must be one of 127, 255"),
        ({"job": Job(workload="lenet", dtype="bfloat16")}, "--dtype bfloat16 cannot be quantized"),
        ({"job": Job(workload="gpt2")}, "--workload gpt2 has no images"),
    ],
)
def test_what_cannot_work_is_refused_with_its_flag(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        QuantizeStudy(**fields).plan()

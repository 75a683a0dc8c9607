"""Q1 and Q3 ask for plots, Q4 and Q5 for scales and integers: in the document, and in the code to hand in."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scalelab.quantize.lab.observe import NUM_BINS
from scalelab.recipes.quantization.rows import BIASED, PLAIN, answer_q1, answer_q3, answer_q4, answer_q5, make_rows
from scalelab.recipes.recipe import Answer, Outcome, list_scripts
from scalelab.records.quantized import LayerReport
from scalelab.report.document import Table
from tests.recipes.played import PlayedLauncher, play_histogram

SCRIPTS = {file.name: file for file in list_scripts("quantization")}
LAYERS = ("conv1", "conv2", "fc1", "fc2", "fc3")
STEP = {"input": 1 / 127, "weight": 1 / 50}


@pytest.fixture
def outcomes(tmp_path: Path) -> dict[str, Outcome]:
    """Both networks of the lab, with histograms and scales of five layers, each scale half of the one before."""
    found = {}
    for row, name in ((0, PLAIN), (4, BIASED)):
        study = make_rows("small")[row].parts[name]
        (trial,) = study.plan()
        result = PlayedLauncher().launch(trial, tmp_path / name)
        assert result.quantized is not None
        histograms = tuple(play_histogram(layer, kind) for layer in LAYERS for kind in ("weights", "before", "after"))  # type: ignore[arg-type]
        layers = tuple(
            LayerReport(
                name=layer,
                op="conv",
                weight_scales=(STEP["weight"],),
                scale=1 / 2**number,
                output_scale=2**number / 1000,
                bias=(-150, 4_200) if name == BIASED and layer == "fc3" else (),
            )
            for number, layer in enumerate(LAYERS)
        )
        quantized = replace(result.quantized, histograms=histograms, layers=layers)
        found[name] = Outcome(study=study, results=(replace(result, quantized=quantized),), document=None)
    return found


def find_table(answer: Answer, title: str) -> Table:
    (table,) = (table for table in answer.tables if table.title == title)
    return table


def read_rows(table: Table) -> list[list[Any]]:
    return [[cell.value for cell in row] for row in table.rows]


def test_weights_of_every_layer_are_drawn_in_every_report(outcomes: dict[str, Outcome]) -> None:
    answer = answer_q1(outcomes)
    assert [chart.title for chart in answer.charts] == [f"{layer}: weights" for layer in LAYERS]
    assert answer.is_plot_asked, "a brief report keeps them"
    assert NUM_BINS == 100


def test_activations_of_every_layer_are_drawn_in_every_report(outcomes: dict[str, Outcome]) -> None:
    answer = answer_q3(outcomes)
    assert [chart.title for chart in answer.charts] == [f"{layer}: activations" for layer in LAYERS]
    assert answer.is_plot_asked
    first = str(answer.charts[0].spec)
    assert "before ReLU" in first
    assert "after ReLU" in first


def test_scales_of_every_layer_are_printed_with_the_combined_one(outcomes: dict[str, Outcome]) -> None:
    """n_w, n_out, the scale of the sums and that of the output, which is their product."""
    table = find_table(answer_q4("small", outcomes), "Scales by layer")
    rows = read_rows(table)
    assert [row[0] for row in rows] == list(LAYERS)
    assert rows[2][1:] == [pytest.approx(50), "4.000e-03", "1.000e+03", pytest.approx(4)]
    assert any("Π(n_w · n_out) of the layers before · n_w" in note for note in table.notes)


def test_every_integer_bias_is_printed(outcomes: dict[str, Outcome]) -> None:
    answer = answer_q5("small", {BIASED: outcomes[BIASED]})
    assert read_rows(find_table(answer, "Integer biases")) == [["fc3", 0, "−150"], ["fc3", 1, "4,200"]]
    assert len(find_table(answer, "Scales by layer").rows) == 5
    assert "Integer biases" not in [table.title for table in answer_q4("small", outcomes).tables]


class Pyplot(SimpleNamespace):
    """Keeps what it is asked to draw."""

    def __init__(self) -> None:
        super().__init__(asked=[])

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **fields: self.asked.append((name, arguments, fields))


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pyplot]:
    """A matplotlib, and the scripts where they find each other."""
    pyplot = Pyplot()
    monkeypatch.setitem(sys.modules, "matplotlib", SimpleNamespace(pyplot=pyplot))
    monkeypatch.syspath_prepend(str(next(iter(SCRIPTS.values())).parent))
    yield pyplot
    for name in SCRIPTS:
        sys.modules.pop(Path(name).stem, None)


def test_the_notebook_draws_a_hundred_bins(lab: Pyplot) -> None:
    script = runpy.run_path(str(SCRIPTS["HW5_PartB_1_weights.py"]), run_name="imported")
    script["show_histogram"](torch.tensor([[-1.0, 1.0]]), "conv1 weights")
    names = [name for name, _, _ in lab.asked]
    assert names == ["figure", "hist", "title", "xlabel", "ylabel", "show"]
    assert lab.asked[1][1][0].tolist() == [-1.0, 1.0]
    assert lab.asked[1][2] == {"bins": 100}
    assert lab.asked[2][1] == ("conv1 weights",)


def test_the_functions_of_the_lab_are_those_that_were_asked_for() -> None:
    """By their names and formulas: 127 / max, the product of all scales before, rounding, and the clamps."""
    sys.path.insert(0, str(SCRIPTS["HW5_PartB_1_weights.py"].parent))
    try:
        names = ("HW5_PartB_1_weights.py", "HW5_PartB_2_activations.py", "HW5_PartB_3_bias.py")
        weights, activations, bias = (runpy.run_path(str(SCRIPTS[name]), run_name="imported") for name in names)
    finally:
        del sys.path[0]
        for name in SCRIPTS:
            sys.modules.pop(Path(name).stem, None)
    integers, n_w = weights["quantized_weights"](torch.tensor([-0.5, 0.1, 0.25]))
    assert (integers.tolist(), n_w) == ([-127, 25, 64], 254)
    assert weights["quantized_weights"](torch.zeros(2))[1] == 1.0
    before = [(2.0, 0.5), (4.0, 0.25)]
    assert activations["quantize_activations"](torch.tensor([-8.0, 2.0]), 2.0, 10.0, before, 255) == 255 / (8 * 10 * 2)
    found = bias["quantized_bias"](torch.tensor([0.26, -1e12]), 2.0, 10.0, before)
    assert found.tolist() == [5, -(2**31)]

"""The published comparisons of layouts: what is run beside them, and what follows from their numbers alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalelab.recipes.parallelism import published
from scalelab.recipes.parallelism.rows import list_tensor_sides, make_rows
from scalelab.recipes.recipe import Printed, Row
from scalelab.recipes.report import ROW
from scalelab.recipes.reproduce import Reproduce
from scalelab.report.findings import select
from scalelab.runs.experiment import run_study
from scalelab.workloads.catalogue import MlpOptions
from tests.recipes.played import PlayedLauncher


def find_row(name: str) -> Row:
    return next(row for row in make_rows("small") if row.id == name)


def test_all_claims_follow_but_the_gain_of_interleaving() -> None:
    checks = published.make_checks()
    assert [check.claim for check in checks if check.holds is not True] == [
        "interleaved 1F1B is 1.28 times as fast as 1F1B"
    ]


@pytest.mark.parametrize(
    ("row", "name", "text", "claim"),
    [
        ("L1", "three_d_global_batch", "512", "global batches"),
        ("L1", "fsdp128_memory", "72.4", "128 ranks instead of 8"),
        ("L2", "v100_4_tflops", "57.5", "V100: 71.9"),
        ("L2", "a100_4_scaling", "83.5", "A100: efficiency"),
        ("L2", "narayanan_1t_pflops", "512.0", "aggregate rates"),
        ("L2", "narayanan_1t_peak", "54", "of the peak"),
        ("L3", "seq_175b", "63.04", "activations of 16 rows"),
        ("L3", "seconds_full_22b", "1.50", "recomputing only attention"),
    ],
)
def test_a_figure_that_is_a_little_off_is_noticed(
    row: str, name: str, text: str, claim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {**published.PRINTED[row], name: Printed(text, "")}
    monkeypatch.setattr(published, "PRINTED", {**published.PRINTED, row: wrong})
    assert [claim in check.claim for check in published.make_checks() if check.holds is False] == [True]


def test_the_bubble_of_one_stage_is_none_and_rounds_divide_it() -> None:
    assert published.find_bubble(1, 4) == 0
    assert published.find_bubble(8, 32) == pytest.approx(7 / 39)
    assert published.find_bubble(8, 32, rounds=2) == pytest.approx(7 / 71)


def test_the_time_of_an_operation_compares_models_of_any_size() -> None:
    """Within one model it is the quotient of tokens per second."""
    assert published.divide_titan("fsdp8", "fsdp8_compile") == pytest.approx(6667 / 5762)
    assert 1 < published.divide_titan("two_d", "fsdp128_float8") < published.divide_titan("three_d", "fsdp128_float8")


def test_the_model_grows_exactly_with_its_tensor_parallel_ranks() -> None:
    """So that efficiency is a quotient of step times."""
    sides = list_tensor_sides("small")
    assert [side.num_ranks for side in sides] == [1, 2, 4]
    flops = [MlpOptions(**side.options).flops_per_sample() * side.global_batch for side in sides]  # type: ignore[arg-type]
    assert flops == [flops[0], 2 * flops[0], 4 * flops[0]]


def test_sides_differ_in_mesh_schedule_and_recomputing_alone() -> None:
    pairs = {trial.configuration: trial for trial in find_row("L1").parts["pairs"].plan()}
    assert [trial.strategy for trial in pairs.values()] == ["fsdp2", "pp", "pp"]
    assert pairs["pp2"].mesh == pairs["pp2-interleaved"].mesh
    assert pairs["pp2-interleaved"].spreading.pipeline_schedule == "interleaved"
    recomputed = [trial for trial in find_row("L3").parts["recompute"].plan() if trial.round == 1]
    assert [trial.shape.checkpointing for trial in recomputed] == ["none", "selective", "full"]
    assert {trial.mesh.text for trial in recomputed} == {"tp=2"}


def test_equal_steps_are_an_efficiency_of_one(tmp_path: Path) -> None:
    """Played ranks take as long with N times the layers on N ranks."""
    reproduce = Reproduce(recipe="parallelism", only=("L2",), device="cpu")
    _, document = run_study(reproduce, runs_dir=tmp_path, launcher=PlayedLauncher())
    (found,) = select(document.findings, ROW, "L2")
    ours = found.values["ours"]
    assert ours.low <= 1 <= ours.high  # type: ignore[union-attr]
    assert found.values["published"] == 0.917

"""Two runs side by side: faster, slower, no difference or unresolved, and what else is not the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from scalelab.analysis.stats import DIFFERENT, Verdict, estimate_run_ratio, judge, judge_together
from scalelab.answers.comparison import RunSide, compare_runs
from scalelab.cli.compare import judge_for_ci, read_gates
from scalelab.errors import UsageError
from scalelab.launch.fake import FakeLauncher
from scalelab.records.trial import Status, Trial, to_builtins
from scalelab.report.document import Document, read_document, render_json
from scalelab.report.findings import select
from scalelab.studies.shared.arms import group_arms
from scalelab.studies.shared.job import Job
from tests.analysis.noise import simulate_drift, simulate_rounds
from tests.records import make_environment
from tests.studies.answers import JOB, SAMPLING, find_row, make_strong, set_machine, share_evenly


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 16)


def make_side(
    name: str,
    seconds: Callable[[Trial], float] = share_evenly,
    *,
    failures: dict[str, Status] | None = None,
    noise: float = 0.01,
    environment: dict[str, Any] | None = None,
    **fields: Any,
) -> RunSide:
    launcher = FakeLauncher(seconds, noise=noise, seed=sum(map(ord, name)), failures=failures)
    results = [launcher.launch(trial, Path("unused")) for trial in make_strong(**fields).plan()]
    found = to_builtins(make_environment(**(environment or {})))
    return RunSide(name=name, arms=group_arms(results, None), environment=found)


def scale(factor: float) -> Callable[[Trial], float]:
    return lambda trial: factor * share_evenly(trial)


def find_verdicts(document: Document) -> dict[str, str]:
    return {str(row[0].value): str(row[-1].value) for row in document.tables[0].rows}


@pytest.mark.parametrize(("factor", "verdict"), [(1.3, "slower"), (0.7, "faster"), (1.0, "no difference")])
def test_the_second_run_is_judged_by_the_first(factor: float, verdict: str) -> None:
    document = compare_runs(make_side("before"), make_side("after", scale(factor)))
    assert find_verdicts(document) == dict.fromkeys(("plain loop", "ddp × 1", "ddp × 2", "ddp × 4"), verdict)
    row = find_row(document.tables[0], "ddp × 2")
    assert row["ratio"].value == pytest.approx(factor, rel=0.02)
    assert row["before_seconds"].value == pytest.approx(0.2, rel=0.02)
    assert row["after_seconds"].value == pytest.approx(0.2 * factor, rel=0.02)
    (finding,) = select(document.findings, "verdict", "ddp × 2")
    assert finding.values["verdict"] == verdict


def test_comparing_the_other_way_round_gives_the_inverse() -> None:
    before, after = make_side("before"), make_side("after", scale(1.2))
    there, back = (
        find_row(compare_runs(*sides).tables[0], "ddp × 2")["ratio"].value
        for sides in ((before, after), (after, before))
    )
    assert isinstance(there, float)
    assert isinstance(back, float)
    assert there * back == pytest.approx(1.0)


def test_a_noisy_difference_is_unresolved_and_asks_for_more_rounds() -> None:
    sampling = replace(SAMPLING, rounds=2)
    sides = (make_side(name, noise=0.3, sampling=sampling) for name in ("before", "after"))
    document = compare_runs(*sides)
    assert "unresolved" in find_verdicts(document).values()
    assert any("--rounds" in sentence for sentence in document.summary)


def test_one_launch_each_is_unresolved() -> None:
    sampling = replace(SAMPLING, rounds=1)
    document = compare_runs(make_side("a", sampling=sampling), make_side("b", scale(2.0), sampling=sampling))
    assert set(find_verdicts(document).values()) == {"unresolved"}


def test_only_common_configurations_are_compared() -> None:
    document = compare_runs(make_side("before", ranks=(1, 2)), make_side("after", ranks=(1, 4)))
    assert list(find_verdicts(document)) == ["plain loop", "ddp × 1"]


def test_runs_with_different_numbers_of_rounds_are_compared() -> None:
    longer = make_side("after", scale(1.3), sampling=replace(SAMPLING, rounds=9))
    assert set(find_verdicts(compare_runs(make_side("before"), longer)).values()) == {"slower"}


def test_runs_with_nothing_in_common_are_refused_with_what_each_has() -> None:
    before, after = make_side("before"), make_side("after")
    lonely = replace(after, arms={"fsdp-8": after.arms["ddp-4"]})
    with pytest.raises(
        UsageError, match=r"runs before and after have no configuration in common: single-1.* against fsdp-8"
    ):
        compare_runs(before, lonely)
    with pytest.raises(UsageError, match="against none"):
        compare_runs(before, replace(after, arms={}))


def test_a_configuration_that_failed_on_one_side_is_a_row_without_verdict() -> None:
    after = make_side("after", failures={"ddp-4": Status.OUT_OF_MEMORY})
    document = compare_runs(make_side("before"), after)
    row = find_row(document.tables[0], "ddp × 4")
    assert row["after_seconds"].value == "out of memory"
    assert row["before_seconds"].value == pytest.approx(0.1, rel=0.02)
    assert row["ratio"].value is None
    assert row["verdict"].value == "–"
    assert [finding.subject for finding in select(document.findings, "no-verdict")] == ["ddp × 4"]


def move_workload(side: RunSide, workload: str, checksum: str | None) -> RunSide:
    arms = {name: replace(arm, trial=replace(arm.trial, workload=workload)) for name, arm in side.arms.items()}
    return replace(side, arms=arms, environment=dict(side.environment) | {"workload sha256": checksum})


@pytest.mark.parametrize(("checksum", "verdict"), [("same", "slower"), ("other", "–"), (None, "–")])
def test_one_file_in_two_places_is_the_same_work(checksum: str | None, verdict: str) -> None:
    before = move_workload(make_side("before"), "/here/net.py:build", "same")
    after = move_workload(make_side("after", scale(1.5)), "/there/net.py:build", checksum)
    assert set(find_verdicts(compare_runs(before, after)).values()) == {verdict}


def list_differences(document: Document) -> dict[str, tuple[str, str]]:
    if len(document.tables) < 2:
        return {}
    return {str(what.value): (str(a.value), str(b.value)) for what, a, b in document.tables[1].rows}


def test_runs_that_differ_in_nothing_list_no_difference() -> None:
    assert list_differences(compare_runs(make_side("before"), make_side("after"))) == {}


def test_what_else_differs_between_machines_is_listed() -> None:
    after = make_side("after", environment={"torch": "2.14.0", "host": "node2", "processor": None, "load_average": 3.0})
    assert list_differences(compare_runs(make_side("before"), after)) == {
        "host": ("node1", "node2"),
        "processor": ("Xeon", "–"),
        "torch": ("2.13.0", "2.14.0"),
    }


def test_variables_that_differ_are_listed_one_by_one() -> None:
    variables = {"OMP_NUM_THREADS": "8", "NCCL_DEBUG": "INFO"}
    after = make_side("after", environment={"variables": variables})
    assert list_differences(compare_runs(make_side("before"), after)) == {
        "NCCL_DEBUG": ("–", "INFO"),
        "OMP_NUM_THREADS": ("1", "8"),
    }


def test_what_else_differs_between_the_trials_is_listed() -> None:
    job = Job(workload="mlp", options=JOB.options, device="cpu", dtype="float64", timeout="1min")
    differences = list_differences(compare_runs(make_side("before"), make_side("after", job=job)))
    assert differences["ddp-2: dtype"] == ("float32", "float64")
    assert not any("timeout" in what for what in differences)


def test_every_comparison_warns_that_the_runs_were_not_interleaved() -> None:
    document = compare_runs(make_side("before"), make_side("after"))
    assert document.cautions[0].kind == "not-interleaved"
    assert document.setting == "A before · B after"


def test_a_comparison_survives_json() -> None:
    document = compare_runs(make_side("before"), make_side("after", failures={"ddp-4": Status.CRASHED}))
    assert read_document(render_json(document)) == document


def test_the_plain_loop_of_either_run_takes_the_machine_out_of_the_others() -> None:
    """Run B was measured while the machine was 2 % slower, and its ddp is 20 % slower than that."""

    def disturb(trial: Trial) -> float:
        return 1.02 * (1.2 if trial.strategy == "ddp" else 1.0) * share_evenly(trial)

    document = compare_runs(make_side("before", noise=0.001), make_side("after", disturb, noise=0.001))
    rows = {str(row[0].value): row[3] for row in document.tables[0].rows}
    assert rows["ddp × 2"].value == pytest.approx(1.2, rel=0.005)
    assert rows["plain loop"].value == pytest.approx(1.02, rel=0.005)
    assert "relative to each run's plain loop" in document.tables[0].notes[-1]
    other = compare_runs(
        make_side("before", noise=0.001), make_side("after", disturb, noise=0.001, environment={"torch": "2.14.0"})
    )
    assert find_row(other.tables[0], "ddp × 2")["ratio"].value == pytest.approx(1.224, rel=0.005)


@pytest.mark.parametrize(
    ("factor", "noise", "code"), [(1.0, 0.001, 0), (1.06, 0.001, 3), (1.0, 0.5, 4), (0.8, 0.001, 0)]
)
def test_a_threshold_makes_an_exit_code_and_a_junit_file(
    factor: float, noise: float, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = compare_runs(make_side("before", noise=noise), make_side("after", scale(factor), noise=noise))
    junit = tmp_path / "junit.xml"
    assert judge_for_ci(document, 0.05, junit) == code
    suite = ElementTree.parse(junit).getroot()
    gates = read_gates(document, 0.05)
    assert [case.get("name") for case in suite] == list(gates)
    assert int(suite.get("failures", "")) == sum(len(case.findall("failure")) for case in suite)
    assert (int(suite.get("failures", "")) > 0) == (code == 3)
    assert capsys.readouterr().err.startswith({0: "passed", 3: "slower", 4: "unresolved"}[code])


def test_two_runs_of_the_same_thing_are_seldom_called_different() -> None:
    """Runs at different times on a machine that wanders by 3 %, and by 6 %: at most one in twenty."""
    rng = np.random.default_rng(11)
    for noise in (1.0, 2.0):
        for has_yardstick in (False, True):
            wrong = sum(judge_pair(rng, 1.0, noise, has_yardstick) in DIFFERENT for _ in range(400)) / 400
            assert wrong <= 0.05 + 2 * 0.011, (noise, has_yardstick)
    found = sum(judge_pair(rng, 1.05, 1.0, True) is Verdict.SLOWER for _ in range(200)) / 200
    assert found >= 0.7


def test_a_table_of_equal_rows_is_seldom_wrong_about_any() -> None:
    rng = np.random.default_rng(12)
    num_wrong = 0
    for _ in range(60):
        yardstick, *rows = zip(*(simulate_run(rng, [1.0] * 7, 1.0) for _ in range(2)), strict=True)
        ratios = {str(number): partial(estimate_run_ratio, *row, yardstick) for number, row in enumerate(rows)}
        num_wrong += any(judge(ratio) in DIFFERENT for ratio in judge_together(ratios, ratios).values())
    assert num_wrong <= 6  # 5 % of 60, and two standard errors


def judge_pair(rng: np.random.Generator, ratio: float, noise: float, has_yardstick: bool) -> Verdict:
    """The verdict on a row of two runs of 12 rounds, each with a wander of its own, which a plain loop shares."""
    (before, plain_before), (after, plain_after) = (simulate_run(rng, [one, 1.0], noise) for one in (1.0, ratio))
    return judge(estimate_run_ratio(after, before, (plain_after, plain_before) if has_yardstick else None))


def simulate_run(rng: np.random.Generator, medians: list[float], noise: float) -> list[list[list[float]]]:
    """Configurations of one run; every launch is one number, with the spread that the median of 20 steps has."""
    drift = simulate_drift(rng, 12, spread=0.03 * noise)
    levels = {"within": 0.02 * noise, "between": 0.015 * noise, "spike_share": 0.0, "drift": drift}
    return [simulate_rounds(rng, median, num_steps=1, **levels) for median in medians]

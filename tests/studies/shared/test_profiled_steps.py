"""What profiled steps say of communication, in the documents of the studies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from scalelab.launch.fake import FakeLauncher
from scalelab.records.observations import DdpCounters, Message, RankReport, TracedStep
from scalelab.records.trial import TrialResult
from scalelab.report.document import Document, Table
from scalelab.runs.experiment import run_study
from scalelab.studies.model_size import ModelSize
from scalelab.studies.shared.arms import Arm, group_arms
from scalelab.studies.shared.communication import (
    compare_methods,
    count_bytes,
    describe_traced,
    estimate_traced,
    estimate_traced_exposed,
    has_traces,
    list_methods,
    make_traced_table,
)
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import FEW_STEPS, Sampling, Study
from scalelab.studies.strategies.study import Strategies
from tests.records import make_record, make_result
from tests.studies.answers import (
    AlteredLauncher,
    find_finding,
    find_row,
    list_kinds,
    make_strong,
    make_weak,
    set_machine,
)

SAMPLING = Sampling(rounds=4, steps=12, phase_steps=4, comm_free_steps=4, profile_steps=FEW_STEPS)


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 4)


def make_step(*, exposed_ms: float, waiting_ms: float | None = 0.0, compute_ms: float = 60.0) -> TracedStep:
    exposed, compute = round(1e6 * exposed_ms), round(1e6 * compute_ms)
    return TracedStep(
        span_ns=exposed + compute,
        compute_ns=compute,
        overlapped_ns=0,
        exposed_ns=exposed,
        copy_ns=0,
        idle_ns=0,
        messages=(Message(kind="all_reduce", count=1, payload_bytes=1000),),
        transfer_ns=None if waiting_ms is None else exposed - round(1e6 * waiting_ms),
        waiting_ns=None if waiting_ms is None else round(1e6 * waiting_ms),
    )


def make_arm(launches: Sequence[Sequence[Sequence[TracedStep]]]) -> Arm:
    """An arm from the steps of every rank of every launch."""
    results = []
    for number, ranks in enumerate(launches, start=1):
        trial = make_record(configuration="ddp-2", strategy="ddp", num_ranks=2, round=number)
        reports = tuple(RankReport(rank=rank, traced_steps=tuple(steps)) for rank, steps in enumerate(ranks))
        results.append(make_result(trial, ranks=reports))
    return group_arms(results, 0)["ddp-2"]


def find_table(document: Document, key: str) -> Table:
    (table,) = (table for table in document.tables if any(column.key == key for column in table.columns))
    return table


def play(launcher: FakeLauncher, study: object, directory: Path) -> Document:
    return run_study(study, runs_dir=directory, launcher=launcher)[1]  # type: ignore[arg-type]


def test_the_number_of_a_launch_is_the_median_of_its_steps_so_that_a_cold_one_does_not_count() -> None:
    steps = [make_step(exposed_ms=90), make_step(exposed_ms=10), make_step(exposed_ms=12)]
    arm = make_arm([[steps, steps]] * 3)
    exposed = estimate_traced(arm, 0, "traced_exposed_seconds")
    assert exposed is not None
    assert exposed.value == pytest.approx(0.012)
    assert (exposed.low, exposed.high) == (pytest.approx(0.012), pytest.approx(0.012))


def test_the_rank_that_waits_least_says_what_is_exposed() -> None:
    early = [make_step(exposed_ms=30, waiting_ms=20)]
    late = [make_step(exposed_ms=10)]
    arm = make_arm([[early, late], [late, early]])
    exposed = estimate_traced_exposed(arm)
    assert exposed is not None
    assert exposed.value == pytest.approx(0.010)


def test_one_launch_has_no_interval() -> None:
    exposed = estimate_traced_exposed(make_arm([[[make_step(exposed_ms=1)]] * 2]))
    assert exposed is not None
    assert (exposed.low, exposed.high) == (None, None)


@pytest.mark.parametrize("ranks", [[[], []], [[make_step(exposed_ms=1)], []], [[make_step(exposed_ms=1)]]])
def test_launches_in_which_a_rank_has_no_trace_are_left_out(ranks: list[list[TracedStep]]) -> None:
    arm = make_arm([ranks])
    assert not has_traces(arm)
    assert make_traced_table([arm]) is None
    assert estimate_traced_exposed(arm) is None
    assert list(describe_traced(arm)) == []
    assert list(compare_methods(arm, list_methods(arm))) == []


def test_the_waiting_rank_is_named_where_it_is_worth_a_word() -> None:
    early, late = [make_step(exposed_ms=30, waiting_ms=20)], [make_step(exposed_ms=10)]
    (found,) = describe_traced(make_arm([[early, late]] * 3))
    assert "rank 0 waits 20.0 ± 0.0 ms" in found.text
    (found,) = describe_traced(make_arm([[late, late]] * 3))
    assert "waits" not in found.text


def test_collectives_that_were_not_matched_have_neither_transfer_nor_waiting() -> None:
    arm = make_arm([[[make_step(exposed_ms=10, waiting_ms=None)]] * 2] * 2)
    table = make_traced_table([arm])
    assert table is not None
    row = find_row(table, "rank 0")
    assert (row["traced_transfer_seconds"].value, row["traced_waiting_seconds"].value) == (None, None)
    assert row["traced_exposed_seconds"].value == pytest.approx(0.010)
    assert count_bytes(arm, 0) == 1000


@pytest.mark.parametrize(("ablation_ms", "agrees"), [(10, True), (30, False), (2, False)])
def test_the_trace_is_held_against_ablation(ablation_ms: float, agrees: bool) -> None:
    arm = make_arm([[[make_step(exposed_ms=10)]] * 2] * 3)
    exposed = estimate_traced_exposed(arm)
    assert exposed is not None
    ablation = exposed.map(lambda seconds: seconds * ablation_ms / 10)
    (found,) = compare_methods(arm, {"ablation": ablation, "phases": None, "trace": exposed})
    assert found.values == {"ablation": ablation, "trace": exposed, "agree": agrees}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp-full"])
def test_scaling_has_the_table_and_the_way(tmp_path: Path, strategy: str) -> None:
    launcher = FakeLauncher(lambda trial: 0.1 / trial.num_ranks + 0.01, comm_seconds=lambda _: 0.01)
    for make in (make_strong, make_weak):
        document = play(launcher, make(sampling=SAMPLING, strategy=strategy, ranks=(1, 2)), tmp_path)
        table = find_table(document, "traced_waiting_seconds")
        row = find_row(table, "rank 1")
        assert row["traced_exposed_seconds"].value == pytest.approx(0.01)
        assert row["traced_transfer_seconds"].value == pytest.approx(0.01)
        assert find_finding(document, "traced-communication").values["seconds"].value == pytest.approx(0.01)
        if strategy == "ddp":
            (ways,) = (table for table in document.tables if "every method" in table.title)
            assert find_row(ways, "trace")["seconds"].value == pytest.approx(0.01)
            methods = find_finding(document, "communication-methods").values
            assert methods["ablation"].value == pytest.approx(0.01)


def test_sizes_have_communication_by_trace_beside_the_other_ways(tmp_path: Path) -> None:
    study = ModelSize(sizes=("dim=16", "dim=32"), sampling=SAMPLING, job=Job(workload="mlp", device="cpu"))
    document = play(FakeLauncher(lambda _: 0.1, comm_seconds=lambda _: 0.02), study, tmp_path)
    ways = find_table(document, "counted_seconds")
    row = find_row(ways, "dim=16 × 2")
    assert row["phases_seconds"].value == pytest.approx(0.02)
    assert row["traced_exposed_seconds"].value == pytest.approx(0.02)
    assert find_row(find_table(document, "traced_waiting_seconds"), "dim=32 × 2, rank 1")


def test_strategies_have_every_rank_of_those_with_several(tmp_path: Path) -> None:
    sampling = replace(SAMPLING, comm_free_steps=0)
    study = Strategies(strategies=("single", "dp", "ddp", "fsdp2"), sampling=sampling, job=Job(device="cpu"))
    document = play(FakeLauncher(lambda _: 0.1, comm_seconds=lambda _: 0.02), study, tmp_path)
    table = find_table(document, "traced_waiting_seconds")
    names = [str(row[0].value) for row in table.rows]
    assert names == [f"{name} × 2, rank {rank}" for name in ("ddp", "fsdp2") for rank in (0, 1)]


def test_ddp_among_strategies_has_ablation_and_counters_beside_the_trace(tmp_path: Path) -> None:
    study = Strategies(strategies=("single", "dp", "ddp", "fsdp2"), sampling=SAMPLING, job=Job(device="cpu"))
    assert [trial.name for trial in study.plan() if "counters" in trial.instruments] == ["ddp-2-r1"]
    counters = DdpCounters(
        forward_seconds=(0.03,), backward_seconds=(0.05,), communication_seconds=(0.05,), overlap_seconds=(0.03,)
    )

    def count(result: TrialResult) -> TrialResult:
        if "counters" not in result.trial.instruments:
            return result
        return replace(result, ranks=tuple(replace(report, counters=counters) for report in result.ranks))

    launcher = AlteredLauncher(count, step_seconds=lambda _: 0.1, comm_seconds=lambda _: 0.02)
    document = play(launcher, study, tmp_path)
    table = find_table(document, "ablation_seconds")
    assert [row[0].value for row in table.rows] == ["ddp × 2", "fsdp2 × 2"]
    row = find_row(table, "ddp × 2")
    for key in ("ablation_seconds", "counted_seconds", "traced_exposed_seconds"):
        assert row[key].value == pytest.approx(0.02)
    sharded = find_row(table, "fsdp2 × 2")
    assert (sharded["ablation_seconds"].value, sharded["counted_seconds"].value) == (None, None)
    assert sharded["traced_exposed_seconds"].value == pytest.approx(0.02)
    assert find_finding(document, "communication-methods", "ddp × 2").values["agree"] is True


def test_the_share_by_trace_is_of_the_profiled_step_and_not_of_a_shorter_clean_one(tmp_path: Path) -> None:
    def slow_down(result: TrialResult) -> TrialResult:
        step = make_step(exposed_ms=150, compute_ms=450)
        return replace(result, ranks=tuple(replace(report, traced_steps=(step,) * 3) for report in result.ranks))

    launcher = AlteredLauncher(slow_down, step_seconds=lambda _: 0.1, comm_seconds=lambda _: 0.01)
    document = play(launcher, make_strong(sampling=SAMPLING, ranks=(1, 2)), tmp_path)
    (ways,) = (table for table in document.tables if "every method" in table.title)
    assert find_row(ways, "trace")["share"].value == pytest.approx(0.25)
    assert find_row(ways, "ablation")["share"].value == pytest.approx(0.1)


def count_profiled(study: Study) -> set[int]:
    return {trial.step_plan.profiled_steps for trial in study.plan() if trial.step_plan}


def test_a_few_steps_are_profiled_unless_told_otherwise_and_none_under_a_limit() -> None:
    for study in (make_strong(sampling=SAMPLING), Strategies(job=Job(device="cpu")), ModelSize()):
        assert count_profiled(study) == {FEW_STEPS}
    limited = make_strong(sampling=SAMPLING, job=Job(device="cpu", memory_limit="2GB"))
    assert count_profiled(limited) == {0}
    off = make_strong(sampling=replace(SAMPLING, profile_steps=0))
    assert count_profiled(off) == {0}


def test_without_profiled_steps_there_is_no_table(tmp_path: Path) -> None:
    study = make_strong(sampling=replace(SAMPLING, profile_steps=0), ranks=(1, 2))
    document = play(FakeLauncher(lambda trial: 0.1 / trial.num_ranks, comm_seconds=lambda _: 0.01), study, tmp_path)
    assert not any(column.key == "traced_waiting_seconds" for table in document.tables for column in table.columns)
    assert "traced-communication" not in list_kinds(document)

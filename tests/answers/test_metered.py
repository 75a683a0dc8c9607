"""Metered runs read back: ranks side by side, in honest words, and two of them compared."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from scalelab.answers.comparison import RunSide, compare_runs
from scalelab.answers.metered import MOST_JUDGED, MeteredRun, count_all_steps
from scalelab.errors import UsageError
from scalelab.records.observations import RankReport
from scalelab.records.trial import Status, StepKind, StepSample, Trial, TrialResult, from_builtins, to_builtins
from scalelab.report.document import Document
from scalelab.report.findings import select
from scalelab.studies.catalogue import STUDIES, load_kind
from scalelab.studies.shared.arms import group_arms
from scalelab.studies.shared.job import Job
from tests.records import make_environment, make_record
from tests.studies.answers import find_row


def make_metered(**fields: Any) -> MeteredRun:
    return MeteredRun(**({"label": "my-run", "job": Job(workload="train.py"), "num_ranks": 2} | fields))


def wobble(step: int) -> float:
    """A noise of one percent that repeats itself."""
    return 1 + 0.01 * ((step * 7) % 5 - 2) / 2


def make_result(
    seconds: Callable[[int, int], float] = lambda rank, step: 0.1 * wobble(step),
    *,
    num_ranks: int = 2,
    num_steps: int = 40,
    kind: StepKind = StepKind.CLEAN,
    configuration: str = "my-run",
    workload: str = "train.py",
    global_batch: int | None = None,
    **fields: Any,
) -> TrialResult:
    trial = make_record(
        configuration=configuration,
        workload=workload,
        strategy="metered",
        num_ranks=num_ranks,
        global_batch=global_batch or num_ranks,
    )
    samples = tuple(
        StepSample(
            rank,
            step,
            kind,
            float(step),
            seconds(rank, step),
            0.01,
            0.05 if kind is StepKind.PHASES else None,
            loss=1 / (1 + step),
        )
        for rank in range(num_ranks)
        for step in range(num_steps)
    )
    ranks = tuple(RankReport(rank=rank, peak_memory_bytes=1000 + rank) for rank in range(num_ranks))
    made: dict[str, Any] = {"status": Status.COMPLETED, "samples": samples, "ranks": ranks}
    return TrialResult(trial=trial, **(made | fields))


def say_all(document: Document) -> str:
    return "\n".join(document.summary)


def warn_all(document: Document) -> str:
    return "\n".join(f"{caution.message} → {caution.next_step}" for caution in document.cautions)


def test_every_rank_has_a_row_and_all_have_one_together() -> None:
    document = make_metered(global_batch=64).conclude([make_result(global_batch=64)])
    (table,) = document.tables
    assert [row[0].value for row in table.rows] == ["0", "1", "all"]
    first, both = find_row(table, "0"), find_row(table, "all")
    assert first["step_seconds"].value == pytest.approx(0.1, rel=0.01)
    assert first["step_seconds"].low is not None
    assert first["input_share"].value == pytest.approx(0.1, rel=0.01)
    assert first["peak_memory_bytes"].value == 1000
    assert both["samples_per_second"].value == pytest.approx(640, rel=0.01)
    assert both["peak_memory_bytes"].value == 1001
    assert document.setting == "my-run · train.py · 2 ranks · global batch 64 · 40 steps, no warm-up dropped (auto)"
    found = {finding.kind: finding.values for finding in document.findings}
    assert found["rank-lag"]["rank"] is None
    assert found["loader-wait"]["share"] == pytest.approx(0.1, rel=0.01)
    assert found["loss"] == {"first": 1.0, "last": 0.025}


def test_one_rank_is_one_row_and_an_unknown_batch_has_no_rate() -> None:
    document = make_metered(num_ranks=1).conclude([make_result(num_ranks=1)])
    (table,) = document.tables
    assert [row[0].value for row in table.rows] == ["0"]
    assert find_row(table, "0")["samples_per_second"].value is None
    assert "batch unknown" in document.setting
    assert "samples/s" not in say_all(document) + warn_all(document)


def test_the_slowest_rank_is_named() -> None:
    slow = make_result(lambda rank, step: (0.1 + 0.02 * rank) * wobble(step))
    (finding,) = select(make_metered().conclude([slow]).findings, "rank-lag")
    assert finding.subject == "rank 1"
    assert finding.values["lag"] == pytest.approx(0.2, rel=0.01)


def test_a_rank_is_not_called_slowest_within_the_noise() -> None:
    draws = random.Random(5)
    noisy = make_result(lambda rank, step: draws.uniform(0.1, 0.3))
    (finding,) = select(make_metered().conclude([noisy]).findings, "rank-lag")
    assert finding.values["rank"] is None


def test_slow_first_steps_are_dropped() -> None:
    cold = make_result(lambda rank, step: 0.1 * wobble(step) * (3 if step < 4 else 1))
    document = make_metered().conclude([cold])
    assert "40 steps, first 4 dropped as warm-up (auto)" in document.setting
    assert find_row(document.tables[0], "0")["step_seconds"].value == pytest.approx(0.1, rel=0.01)


def test_phases_have_columns_and_their_steps_count() -> None:
    document = make_metered().conclude([make_result(kind=StepKind.PHASES)])
    row = find_row(document.tables[0], "1")
    assert row["forward_seconds"].value == pytest.approx(0.05)
    assert row["backward_seconds"].value is None
    assert row["step_seconds"].value == pytest.approx(0.1, rel=0.01)


def test_one_launch_is_always_a_warning_and_no_flag_is_asked_for() -> None:
    wild = make_result(lambda rank, step: 0.1 * (1 + 9 * (step % 7 == 3)) * (1 + step / 40))
    document = make_metered().conclude([wild])
    kinds = [caution.kind for caution in document.cautions]
    assert kinds.count("few-launches") == 1
    assert {"outliers", "heavy-tail"} <= set(kinds)
    warnings = warn_all(document)
    assert "metered ×" not in warnings
    for flag in ("--rounds", "--steps", "--allocator", "samples/s", "round 1"):
        assert flag not in warnings


def test_what_a_failed_launch_recorded_is_told_with_its_reason() -> None:
    reason = "rank 1 raised an error after 40 steps: ValueError: bad"
    document = make_metered().conclude([make_result(status=Status.CRASHED, reason=reason)])
    assert document.cautions[0].kind == "failed"
    assert reason in document.cautions[0].message
    assert find_row(document.tables[0], "0")["step_seconds"].value == pytest.approx(0.1, rel=0.01)


def test_a_rank_that_recorded_nothing_is_a_row() -> None:
    lonely = make_result()
    lonely = make_result(samples=tuple(s for s in lonely.samples if s.rank == 0), status=Status.CRASHED)
    document = make_metered().conclude([lonely])
    assert find_row(document.tables[0], "1")["step_seconds"].value == "nothing recorded"
    assert find_row(document.tables[0], "0")["step_seconds"].value == pytest.approx(0.1, rel=0.01)
    assert select(document.findings, "throughput")[0].values == {}


def test_runs_without_steps_or_results_have_a_document() -> None:
    (finding,) = select(make_metered().conclude([make_result(num_steps=0)]).findings, "throughput")
    assert finding.values == {}
    assert make_metered().conclude([]).tables == ()


def test_a_long_run_is_judged_by_its_last_steps() -> None:
    spike = MOST_JUDGED + 50
    long = make_result(lambda rank, step: 1.0 if step >= spike else 0.1, num_ranks=1, num_steps=MOST_JUDGED + 100)
    warnings = warn_all(make_metered(num_ranks=1).conclude([long]))
    assert f"of {MOST_JUDGED} steps took over 1.5 times the median, worst step {spike} (10.0×)" in warnings


def test_a_metered_run_is_read_like_a_study_and_cannot_be_planned() -> None:
    assert "metered" not in STUDIES
    study = make_metered(global_batch=8)
    assert from_builtins(to_builtins(study), load_kind("metered")) == study
    with pytest.raises(UsageError, match="made by your own script"):
        study.plan()


def make_side(name: str, result: TrialResult, trial: Trial | None = None) -> RunSide:
    return RunSide(
        name=name,
        arms=group_arms([count_all_steps(result)], None),
        environment=to_builtins(make_environment()),
    )


def test_two_scripts_are_compared_whatever_they_are_called() -> None:
    before = make_side("a", make_result(configuration="old", workload="train.py"))
    slower = make_result(lambda rank, step: 0.2 * wobble(step), configuration="new", workload="faster.py")
    document = compare_runs(before, make_side("b", slower))
    row = find_row(document.tables[0], "old → new")
    assert row["ratio"].value == pytest.approx(2.0)
    assert row["verdict"].value == "unresolved"
    assert document.summary == (
        "old → new: unresolved: B takes 2.00 times as long as A; one launch does not show how launches differ; launch"
        " both again and see whether the ratio holds.",
    )
    differing = {row[0].value for row in document.tables[1].rows}
    assert differing == {"old: workload"}


def test_steps_with_phases_are_compared_with_clean_ones() -> None:
    sides = make_side("a", make_result()), make_side("b", make_result(kind=StepKind.PHASES))
    document = compare_runs(*sides)
    assert find_row(document.tables[0], "my-run")["ratio"].value == pytest.approx(1.0)


def test_scripts_with_other_batches_have_no_ratio() -> None:
    sides = make_side("a", make_result(global_batch=64)), make_side("b", make_result(global_batch=128))
    document = compare_runs(*sides)
    assert find_row(document.tables[0], "my-run")["ratio"].value is None
    assert document.cautions[0].kind == "other-work"


def test_the_same_batch_on_more_ranks_is_the_same_work() -> None:
    one = make_result(num_ranks=1, global_batch=64)
    two = make_result(lambda rank, step: 0.05 * wobble(step), num_ranks=2, global_batch=64)
    document = compare_runs(make_side("a", one), make_side("b", two))
    assert find_row(document.tables[0], "my-run")["ratio"].value == pytest.approx(0.5)

"""Metered runs of one name, read as one scaling table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scalelab.answers.comparison import compare_runs, read_side
from scalelab.cli.predict import main
from scalelab.errors import UsageError
from scalelab.records.store import RunStore, open_run
from scalelab.records.trial import Status, TrialResult
from scalelab.report.document import Document, Table
from scalelab.report.findings import select
from scalelab.runs.pool import open_run_or_pool
from scalelab.studies.catalogue import derive_document
from tests.answers.test_metered import make_result, wobble
from tests.records import make_environment
from tests.studies.answers import find_row

STRONG = {1: 64, 2: 64}
WEAK = {1: 32, 2: 64}


def store_launch(runs: Path, result: TrialResult, label: str = "sign", *, is_batch_known: bool = True) -> RunStore:
    """A metered run on disk, as a Meter leaves it."""
    trial = result.trial
    fields = {
        "label": label,
        "job": {"workload": trial.workload},
        "num_ranks": trial.num_ranks,
        "global_batch": trial.global_batch if is_batch_known else None,
    }
    store = RunStore.create(
        runs, study="metered", fields=fields, trials=[trial], environment=make_environment(), label=label
    )
    store.save_result(result)
    return store


def store_launches(runs: Path, batches: dict[int, int], seconds: dict[int, float], label: str = "sign") -> None:
    """Six launches on each number of ranks, in turns."""
    for launch in range(6):
        for num_ranks, batch in batches.items():
            base = seconds[num_ranks] * (1 + 0.002 * launch)
            result = make_result(
                lambda _, step, base=base: base * wobble(step),  # type: ignore[misc]
                num_ranks=num_ranks,
                global_batch=batch,
            )
            store_launch(runs, result, label)


def read_pool(runs: Path, name: str = "sign") -> Document:
    return derive_document(open_run_or_pool(name, runs))


def find_launches(document: Document) -> Table:
    (section,) = [section for section in document.sections if section.heading == "Launches"]
    return section.tables[0]


def test_launches_on_equal_ranks_are_the_rounds_of_a_row(tmp_path: Path) -> None:
    store_launches(tmp_path, STRONG, {1: 0.1, 2: 0.06})
    document = read_pool(tmp_path)
    assert document.title == "Strong scaling"
    assert document.setting == "sign · train.py · global batch 64 · 12 launches, no warm-up dropped (auto)"
    row = find_row(document.tables[0], "metered × 2")
    assert row["speedup"].value == pytest.approx(1 / 0.6, rel=0.01)
    assert row["speedup"].low is not None, "launches give an interval"
    assert row["samples_per_second"].value == pytest.approx(64 / 0.06, rel=0.02)
    assert len(find_launches(document).rows) == 12
    assert not select(document.cautions, "few-launches")


def test_ranks_that_keep_their_batch_scale_weakly(tmp_path: Path) -> None:
    store_launches(tmp_path, WEAK, {1: 0.1, 2: 0.11})
    document = read_pool(tmp_path)
    assert document.title == "Weak scaling"
    assert "batch 32 per rank" in document.setting
    assert find_row(document.tables[0], "metered × 2")["speedup"].value == pytest.approx(2 / 1.1, rel=0.01)


def test_rows_of_other_batches_are_compared_by_samples_per_second(tmp_path: Path) -> None:
    store_launches(tmp_path, {1: 32, 2: 48}, {1: 0.1, 2: 0.1})
    document = read_pool(tmp_path)
    assert "batch differs by row" in document.setting
    assert find_row(document.tables[0], "metered × 2")["speedup"].value == pytest.approx(1.5, rel=0.01)
    assert select(document.cautions, "unequal-work")


def test_a_name_with_one_launch_is_that_run_and_a_directory_names_one_of_many(tmp_path: Path) -> None:
    first = store_launch(tmp_path, make_result())
    assert open_run_or_pool("sign", tmp_path).path == first.path
    second = store_launch(tmp_path, make_result())
    assert len(open_run_or_pool("sign", tmp_path).paths) == 2
    assert open_run_or_pool(second.name, tmp_path).path == second.path
    assert open_run_or_pool("last", tmp_path).path == second.path
    assert open_run("sign", tmp_path).path == second.path


def test_what_a_launch_recorded_before_it_failed_counts_and_is_named(tmp_path: Path) -> None:
    store_launch(tmp_path, make_result())
    failed = store_launch(tmp_path, make_result(status=Status.CRASHED, reason="rank 0 raised an error"))
    document = read_pool(tmp_path)
    (caution,) = select(document.cautions, "failed")
    assert caution.subject == failed.name
    assert find_launches(document).rows[1][2].value == 40, "its steps"


def test_ranks_of_unknown_batches_are_refused_with_the_runs(tmp_path: Path) -> None:
    stores = [store_launch(tmp_path, make_result(num_ranks=n), is_batch_known=False) for n in (1, 2)]
    with pytest.raises(UsageError, match="do not record their batch: pass batch_size=") as raised:
        read_pool(tmp_path)
    assert stores[0].name in str(raised.value)


def test_two_versions_with_several_launches_are_compared_with_a_verdict(tmp_path: Path) -> None:
    store_launches(tmp_path, WEAK, {1: 0.1, 2: 0.11}, "before")
    store_launches(tmp_path, WEAK, {1: 0.1, 2: 0.07}, "after")
    sides = [read_side(open_run_or_pool(name, tmp_path)) for name in ("before", "after")]
    document = compare_runs(*sides)
    row = find_row(document.tables[0], "metered-2")
    assert row["ratio"].value == pytest.approx(0.07 / 0.11, rel=0.01)
    assert row["verdict"].value == "faster"


def test_metered_launches_are_extrapolated_as_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store_launches(tmp_path / "runs", STRONG, {1: 0.1, 2: 0.06})
    assert main(["sign", "--ranks", "4", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["sections"][0]["tables"][0]["rows"]
    assert [row[0]["value"] for row in rows] == [1, 2, 4]
    with pytest.raises(UsageError, match="what-if flags need gradient-ready times"):
        main(["sign", "--link", "1GB/s"])

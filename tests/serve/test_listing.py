"""Lines of runs: told from a glance, kept while nothing changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalelab.records.store import RunStore, glance_at_status
from scalelab.records.trial import Status
from scalelab.serve.listing import Index, describe_run, is_run_name
from tests.records import make_record, make_result, make_store


def make_three(runs_dir: Path) -> RunStore:
    return make_store(runs_dir, [make_record(round=number) for number in (1, 2, 3)])


def test_a_run_is_counted_by_its_results(tmp_path: Path) -> None:
    store = make_three(tmp_path)
    first, second, third = store.trials()
    assert describe_run(store.path).state == "interrupted"
    store.save_result(make_result(first))
    store.save_result(make_result(second, status=Status.CRASHED, reason="it died"))
    line = describe_run(store.path)
    assert (line.num_done, line.num_failed, line.state) == (2, 1, "interrupted, 1 failed")
    store.save_result(make_result(third))
    assert describe_run(store.path).state == "complete, 1 failed"
    assert not describe_run(tmp_path / "nothing").num_trials


def test_a_status_far_into_a_file_is_found_and_none_is_damage(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    assert glance_at_status(file) is None
    file.write_text('{"pad": "' + "x" * 20_000 + '", "status": "timed_out"}')
    assert glance_at_status(file) == "timed_out"
    file.write_text("{")
    assert glance_at_status(file) == "damaged"


def test_an_index_sees_a_run_that_is_resumed(tmp_path: Path) -> None:
    store = make_three(tmp_path)
    for trial in store.trials():
        store.save_result(make_result(trial))
    index = Index(runs_dir=tmp_path)
    assert [line.state for line in index.list_lines()] == ["complete"]
    (store.trial_directory(store.record.trials[0]) / "result.json").unlink()
    with store.claim():
        assert [line.state for line in index.list_lines()] == ["running"]
    assert [line.state for line in index.list_lines()] == ["interrupted"]


def test_a_link_that_leads_out_of_the_runs_is_not_listed(tmp_path: Path) -> None:
    runs_dir = tmp_path / "runs"
    inside = make_three(runs_dir)
    outside = make_three(tmp_path / "elsewhere")
    (runs_dir / "leading-out").symlink_to(outside.path)
    (runs_dir / "staying").symlink_to(inside.path)
    assert {line.name for line in Index(runs_dir=runs_dir).list_lines()} == {inside.name, "staying"}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\\b", "a\x00b", "a\udcffb"])
def test_what_is_no_name_of_a_directory_is_none(name: str) -> None:
    assert not is_run_name(name)

"""Answers are derived beside the page, and kept."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from scalelab.report.document import Document
from scalelab.serve import library as reports
from scalelab.serve.library import DERIVING, Shelf
from tests.records import make_record, make_result, make_store


def test_an_answer_that_takes_long_is_told_of_and_then_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path, [make_record(round=number) for number in (1, 2)])
    may_go_on, calls = threading.Event(), []

    def conclude(path: Path) -> tuple[Document | None, str]:
        calls.append(path)
        assert may_go_on.wait(60)
        return Document(title=f"answer {len(calls)}"), ""

    monkeypatch.setattr(reports, "conclude_safely", conclude)
    shelf = Shelf(wait_seconds=0.0)
    for _ in range(3):
        assert shelf.conclude(store.path) == (None, DERIVING, False)
    assert len(calls) == 1, "it is derived once, however often it is asked for"
    may_go_on.set()
    patient = Shelf(wait_seconds=60.0)
    document, problem, is_newest = patient.conclude(store.path)
    assert document is not None
    assert (problem, is_newest) == ("", True)
    num_calls = len(calls)
    patient.conclude(store.path)
    assert len(calls) == num_calls, "nothing has changed"
    may_go_on.clear()
    store.save_result(make_result(store.trials()[0]))
    patient.wait_seconds = 0.0
    assert patient.conclude(store.path) == (document, "", False), "the answer before, until there is a newer one"
    may_go_on.set()
    patient.wait_seconds = 60.0
    assert patient.conclude(store.path).is_newest


def test_an_answer_that_cannot_be_derived_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> tuple[Document | None, str]:
        raise TypeError("odd")

    monkeypatch.setattr(reports, "conclude_safely", fail)
    store = make_store(tmp_path, [make_record()])
    assert Shelf(wait_seconds=60.0).conclude(store.path) == (
        None,
        "the answer cannot be computed (TypeError: odd)",
        True,
    )

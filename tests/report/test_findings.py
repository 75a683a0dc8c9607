"""Findings and cautions are data: kinds make them, documents of schema 1 become them."""

from __future__ import annotations

import json

import pytest

from scalelab.analysis.estimate import Estimate
from scalelab.errors import DamagedRun
from scalelab.report.document import Document, read_document, render_json
from scalelab.report.findings import DETAIL, MAIN, CautionKind, FindingKind, order_cautions, order_findings, select

SPEEDUP = FindingKind("speedup", "How many times as fast", MAIN, ("speedup",))
CONTROL = FindingKind("control", "The reference measured twice", DETAIL, ("ratio", "verdict"))
NOISY = CautionKind("noisy-steps", "Steps differ", "noise", ("spread",))
FAILED = CautionKind("failed", "A row did not run", "failure")


def make_document() -> Document:
    return Document(
        title="T",
        findings=(
            CONTROL("plain loop", "Control.", ratio=1.0, verdict="no difference"),
            SPEEDUP("ddp × 2", "Faster.", speedup=Estimate(value=1.9, low=1.8, high=2.0)),
            SPEEDUP("ddp × 4", "Much faster.", speedup=Estimate(value=3.5)),
        ),
        cautions=(NOISY("ddp × 2", "noisy", "wait", spread=0.2), FAILED("ddp × 4", "failed", "look")),
    )


def test_findings_survive_the_disk_with_their_intervals() -> None:
    document = make_document()
    assert read_document(render_json(document)) == document


def test_a_program_asks_for_a_number_without_reading_a_sentence() -> None:
    data = json.loads(render_json(make_document()))
    (found,) = [one for one in data["findings"] if one["kind"] == "speedup" and one["subject"] == "ddp × 2"]
    assert found["values"]["speedup"] == {"value": 1.9, "low": 1.8, "high": 2.0}


def test_findings_are_selected_by_kind_and_subject() -> None:
    found = make_document().findings
    assert [one.subject for one in select(found, SPEEDUP)] == ["ddp × 2", "ddp × 4"]
    assert [one.text for one in select(found, "speedup", "ddp × 4")] == ["Much faster."]


def test_the_weightiest_finding_and_the_worst_caution_come_first() -> None:
    document = make_document()
    assert [one.kind for one in order_findings(document.findings)] == ["speedup", "speedup", "control"]
    assert [one.kind for one in order_cautions(document.cautions)] == ["failed", "noisy-steps"]


def test_a_value_that_its_kind_does_not_declare_is_refused() -> None:
    with pytest.raises(ValueError, match="'speedup' does not declare ratio"):
        SPEEDUP("ddp × 2", "Faster.", ratio=1.0)


def test_sentences_of_schema_1_become_findings() -> None:
    caution = {"message": "m", "next_step": "n"}
    old = {"schema_version": 1, "title": "T", "summary": ["First.", "Second."], "cautions": [caution]}
    document = read_document(json.dumps(old))
    assert document.summary == ("First.", "Second.")
    assert [one.weight for one in document.findings] == [MAIN, DETAIL]
    assert document.cautions[0].severity == "note"


def test_a_document_of_a_later_version_is_refused() -> None:
    with pytest.raises(DamagedRun, match="schema version 3"):
        read_document(json.dumps({"schema_version": 3, "title": "T"}))

"""Studies run by the fake launcher, and the cells of their answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scalelab.launch.fake import FakeLauncher
from scalelab.records.store import RunStore
from scalelab.records.trial import Trial, TrialResult
from scalelab.report.document import Cell, Document, Table
from scalelab.report.findings import Caution, CautionKind, Finding, FindingKind, select
from scalelab.runs.experiment import run_study
from scalelab.studies.scaling.study import StrongScaling, WeakScaling
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling

JOB = Job(workload="mlp", options={"dim": 8, "depth": 2}, device="cpu")
SAMPLING = Sampling(rounds=6, steps=12, phase_steps=2, comm_free_steps=2)
ONE_RANK_SECONDS = 0.4


def set_machine(monkeypatch: pytest.MonkeyPatch, num_cores: int) -> None:
    """Plan for a machine of so many cores and no GPU, whatever this one is."""
    monkeypatch.setattr("scalelab.studies.shared.job.count_cores", lambda: num_cores)
    monkeypatch.setattr("scalelab.studies.shared.job.find_gpus", tuple)


def make_strong(**fields: Any) -> StrongScaling:
    return StrongScaling(**({"job": JOB, "sampling": SAMPLING, "ranks": (1, 2, 4)} | fields))


def make_weak(**fields: Any) -> WeakScaling:
    return WeakScaling(**({"job": JOB, "sampling": SAMPLING, "ranks": (1, 2, 4)} | fields))


def share_evenly(trial: Trial) -> float:
    """Perfect strong scaling."""
    return ONE_RANK_SECONDS / trial.num_ranks


def obey_amdahl(serial: float) -> Callable[[Trial], float]:
    return lambda trial: ONE_RANK_SECONDS * (serial + (1 - serial) / trial.num_ranks)


class AlteredLauncher(FakeLauncher):
    """A fake launcher whose results are changed before they are given back."""

    def __init__(self, change: Callable[[TrialResult], TrialResult], **fields: Any) -> None:
        super().__init__(fields.pop("step_seconds", share_evenly), **fields)
        self._change = change

    def launch(self, trial: Trial, directory: Path) -> TrialResult:
        return self._change(super().launch(trial, directory))


def answer(
    study: StrongScaling | WeakScaling, runs_dir: Path, launcher: FakeLauncher | Callable[[Trial], float] = share_evenly
) -> tuple[RunStore, Document]:
    """Run a study to its end."""
    fake = launcher if isinstance(launcher, FakeLauncher) else FakeLauncher(launcher)
    return run_study(study, runs_dir=runs_dir, launcher=fake)


def find_row(table: Table, name: object) -> dict[str, Cell]:
    """The cells of the row that a table calls `name`, by the keys of their columns."""
    (row,) = (row for row in table.rows if row[0].value == name)
    return {column.key: cell for column, cell in zip(table.columns, row, strict=True)}


def find_tables(document: Document) -> tuple[Table, Table, Table]:
    """The main table, where the time goes, and the laws."""
    main, time, *_, laws = document.tables
    return main, time, laws


def find_finding(document: Document, kind: str, subject: str | None = None) -> Finding:
    """The only finding of a kind, about one subject if it is given."""
    (found,) = select(document.findings, kind, subject)
    return found


def find_caution(document: Document, kind: str, subject: str | None = None) -> Caution:
    """The only caution of a kind, about one subject if it is given."""
    (found,) = (one for one in document.cautions if one.kind == kind and subject in (None, one.subject))
    return found


def list_kinds(document: Document) -> set[str]:
    """The kinds of all findings and cautions."""
    return {one.kind for one in (*document.findings, *document.cautions)}


def covers(cell: Cell, truth: float) -> bool:
    assert cell.low is not None
    assert cell.high is not None
    return cell.low <= truth <= cell.high


def say_all(document: Document) -> str:
    return "\n".join(document.summary)


def warn_all(document: Document) -> str:
    return "\n".join(f"{caution.message} -> {caution.next_step}" for caution in document.cautions)


def find_kinds(document: Document, kind: FindingKind | CautionKind | str) -> dict[str, Finding | Caution]:
    """Findings and cautions of one kind, by subject."""
    name = kind if isinstance(kind, str) else kind.name
    return {one.subject: one for one in (*document.findings, *document.cautions) if one.kind == name}

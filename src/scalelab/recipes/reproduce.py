"""`reproduce`: all studies of a recipe as one run.

A recipe is itself a study: its plan is the plans of its parts, one after the other, each trial named by its row and
part, and its conclusion is theirs under one title. So it is kept, resumed, shown and exported like every other run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, ClassVar, Literal

import tyro

from scalelab.errors import UnknownName, UsageError
from scalelab.recipes.assignments import RECIPES
from scalelab.recipes.recipe import Check, Outcome, Row, Size
from scalelab.report.document import Caution, Column, Document, Section, Table, make_row
from scalelab.studies.study import Expecting, Job, Searching, Selective, Study
from scalelab.trial import Trial, TrialResult

NameOfRecipe = Literal["polaris", "gpt2", "scaling", "resnet"]


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """The experiments of a published assignment, with its parameters, beside its numbers."""

    name: ClassVar[str] = "reproduce"
    question: ClassVar[str] = "What do the published experiments give here?"

    recipe: Annotated[NameOfRecipe, tyro.conf.Positional]
    """Which assignment."""
    size: Size = "small"
    """small: the same shape, for two CPU cores and a few minutes; full: the published parameters, for GPUs."""
    only: tuple[str, ...] = ()
    """Rows to run, such as P6 P7. None: all."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA where there is a GPU."""

    def __post_init__(self) -> None:
        known = [row.id for row in RECIPES[self.recipe].make_rows(self.size)]
        for wanted in self.only:
            if wanted.upper() not in known:
                raise UnknownName(f"row of {self.recipe}", wanted, known)

    @property
    def job(self) -> Job:
        """Every part has its own."""
        return Job(device=self.device)

    @property
    def label(self) -> str:
        return f"reproduce-{self.recipe}"

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The rows that were asked for, each on the device that was."""
        wanted = {name.upper() for name in self.only}
        rows = RECIPES[self.recipe].make_rows(self.size)
        return tuple(self._place(row) for row in rows if not wanted or row.id in wanted)

    def _place(self, row: Row) -> Row:
        """A row whose parts cannot be planned on this machine is not run, for the reason that planning gives."""
        parts: dict[str, Study] = {}
        reason = row.reason
        for key, study in row.parts.items():
            placed: Study = replace(study, job=replace(study.job, device=self.device))
            try:
                placed.plan()
            except UsageError as error:
                reason = f"{reason}; {error}" if reason else str(error)
            else:
                parts[key] = placed
        return replace(row, parts=parts, reason=reason)

    def plan(self) -> list[Trial]:
        trials = [trial for row in self.rows for key, study in row.parts.items() for trial in _name(row, key, study)]
        if not trials:
            reasons = "; ".join(f"{row.id}: {row.reason}" for row in self.rows)
            raise UsageError(f"nothing of --only {' '.join(self.only)} can be run here: {reasons}")
        return trials

    def plan_more(self, results: Sequence[TrialResult]) -> list[Trial]:
        more = []
        for row in self.rows:
            for key, study in row.parts.items():
                if isinstance(study, Searching):
                    found = study.plan_more(_select(results, row, key))
                    more += [_rename(trial, row, key) for trial in found]
        return more

    def refuse(self, trial: Trial, results: Sequence[TrialResult]) -> str | None:
        row, key, own = self._find_part(trial)
        study = row.parts[key]
        return study.refuse(own, _select(results, row, key)) if isinstance(study, Selective) else None

    def expects(self, result: TrialResult) -> bool:
        row, key, own = self._find_part(result.trial)
        study = row.parts[key]
        return isinstance(study, Expecting) and study.expects(replace(result, trial=own))

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        recipe = RECIPES[self.recipe]
        sections: list[Section] = []
        summary: list[str] = []
        cautions: list[Caution] = []
        for row in self.rows:
            outcomes = {key: _conclude_part(study, _select(results, row, key)) for key, study in row.parts.items()}
            finding = row.conclude(outcomes)
            sections.append(_make_section(row, outcomes, finding.tables, finding.answers))
            summary += [f"{row.id}: {answer}" for answer in finding.answers[:1]]
            cautions += _collect_cautions(row, outcomes)
        checks = [check for check in recipe.make_checks() if not self.only or check.id in {row.id for row in self.rows}]
        if checks:
            sections.append(Section(heading="Checks of the published numbers", tables=(make_check_table(checks),)))
        return Document(
            title=recipe.title,
            question=self.question,
            setting=f"{self.recipe} · {self.size} · rows {' '.join(row.id for row in self.rows)}",
            sections=(Section(tables=(make_overview(self.rows, results),)), *sections),
            summary=tuple(summary),
            cautions=_drop_repeated(cautions),
        )

    def _find_part(self, trial: Trial) -> tuple[Row, str, Trial]:
        number, key, configuration = trial.configuration.split(".", 2)
        (row,) = (row for row in self.rows if row.id.lower() == number)
        return row, key, replace(trial, configuration=configuration)


def _rename(trial: Trial, row: Row, key: str) -> Trial:
    return replace(trial, configuration=f"{row.id.lower()}.{key}.{trial.configuration}")


def _name(row: Row, key: str, study: Study) -> Iterator[Trial]:
    for trial in study.plan():
        yield _rename(trial, row, key)


def _select(results: Sequence[TrialResult], row: Row, key: str) -> tuple[TrialResult, ...]:
    """The results of one part, named as its study names them."""
    prefix = f"{row.id.lower()}.{key}."
    return tuple(
        replace(result, trial=replace(result.trial, configuration=result.trial.configuration.removeprefix(prefix)))
        for result in results
        if result.trial.configuration.startswith(prefix)
    )


def _conclude_part(study: Study, results: tuple[TrialResult, ...]) -> Outcome:
    return Outcome(study=study, results=results, document=study.conclude(results) if results else None)


def _make_section(
    row: Row, outcomes: Mapping[str, Outcome], tables: tuple[Table, ...], answers: tuple[str, ...]
) -> Section:
    own = []
    for key, outcome in outcomes.items():
        for number, table in enumerate(outcome.document.tables if outcome.document else ()):
            assert outcome.document is not None
            title = table.title or (outcome.document.title if number == 0 else "")
            own.append(replace(table, title=f"{title} ({key})" if title and len(outcomes) > 1 else title))
    said = [words for outcome in outcomes.values() if outcome.document for words in outcome.document.summary]
    reason = (f"Not run: {row.reason}." if not row.parts else f"Not whole: {row.reason}.",) if row.reason else ()
    return Section(heading=f"{row.id} · {row.title}", paragraphs=(*reason, *answers, *said), tables=(*tables, *own))


def make_overview(rows: Sequence[Row], results: Sequence[TrialResult]) -> Table:
    """Every row with what became of it."""
    columns = (
        Column(key="row", header="row", align="left"),
        Column(key="title", header="experiment", align="left"),
        Column(key="completed", header="completed", quantity="count"),
        Column(key="failed", header="not completed", quantity="count"),
        Column(key="state", header="state", align="left"),
    )
    made = []
    for row in rows:
        own = [result for key in row.parts for result in _select(results, row, key)]
        num_completed = sum(result.status == "completed" for result in own)
        state = "not_run" if not row.parts else "run" if own else "not run yet"
        made.append(make_row(row.id, row.title, num_completed, len(own) - num_completed, state))
    return Table(columns=columns, rows=tuple(made))


def make_check_table(checks: Sequence[Check]) -> Table:
    """What was published, and what follows from its own numbers."""
    columns = (
        Column(key="row", header="row", align="left"),
        Column(key="claim", header="published", align="left"),
        Column(key="computed", header="recomputed", align="left"),
        Column(key="holds", header="holds", align="left"),
    )
    rows = tuple(make_row(check.id, check.claim, check.computed, "yes" if check.holds else "no") for check in checks)
    return Table(columns=columns, rows=rows)


def _collect_cautions(row: Row, outcomes: Mapping[str, Outcome]) -> Iterator[Caution]:
    for outcome in outcomes.values():
        for caution in outcome.document.cautions if outcome.document else ():
            yield replace(caution, message=f"{row.id}: {caution.message}")


def _drop_repeated(cautions: Sequence[Caution]) -> tuple[Caution, ...]:
    """A warning about the machine is said once, not by every row."""
    seen: set[str] = set()
    kept = []
    for caution in cautions:
        words = caution.message.partition(": ")[2]
        if words not in seen:
            kept.append(caution)
            seen.add(words)
    return tuple(kept)

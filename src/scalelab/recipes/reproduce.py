"""`reproduce`: all studies of a recipe as one run.

A recipe is itself a study: its plan is the plans of its parts, one after the other, each trial named by its row and
part, and its conclusion is theirs under one title. So it is kept, resumed, shown and exported like every other run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, ClassVar, Literal

import tyro

from scalelab.errors import UnknownName, UsageError
from scalelab.recipes.assignments import RECIPES
from scalelab.recipes.feasibility import find_obstacle, find_trial_obstacle, limit_memory
from scalelab.recipes.recipe import Check, Finding, Outcome, Row, Size
from scalelab.report.document import Caution, Column, Document, Section, Table, make_row
from scalelab.studies.study import Expecting, Job, Searching, Selective, Study
from scalelab.studies.train import Train
from scalelab.trial import Status, Trial, TrialResult

NameOfRecipe = Literal["polaris", "gpt2", "scaling", "resnet"]

MOST_WHOLE_PARTS = 2
"""With more parts, a row shows each one's main table and main sentence only."""
MEASURES_NOTHING = "it measures nothing itself"


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
        return tuple(_place(row, self.device, self.size) for row in rows if not wanted or row.id in wanted)

    @cached_property
    def obstacles(self) -> dict[tuple[str, str], str]:
        """Why parts cannot be run on this machine, by the prefix of their trials and their name."""
        found = {}
        for row in self.rows:
            for key, study in row.parts.items():
                if (row.prefix, key) not in found:
                    obstacle = find_obstacle(study)
                    found.update({(row.prefix, key): obstacle} if obstacle else {})
        return found

    @cached_property
    def measured_parts(self) -> dict[tuple[str, str], Study]:
        """Every part once, although several rows may read it."""
        return {(row.prefix, key): study for row in self.rows for key, study in row.parts.items()}

    @property
    def reasons(self) -> dict[str, str]:
        """Why rows are not run here, or not whole, by their names."""
        return {row.id: reason for row in self.rows if (reason := self._explain(row, ()))}

    def plan(self) -> list[Trial]:
        possible = {name: study for name, study in self.measured_parts.items() if name not in self.obstacles}
        trials = [_rename(trial, *name) for name, study in possible.items() for trial in study.plan()]
        if not trials:
            reasons = _join_alike((row.id, self.reasons.get(row.id, MEASURES_NOTHING)) for row in self.rows)
            raise UsageError(f"nothing of that can be run here: {reasons}")
        return trials

    def plan_more(self, results: Sequence[TrialResult]) -> list[Trial]:
        more = []
        for name, study in self.measured_parts.items():
            own = _select(results, *name)
            if isinstance(study, Searching) and own:
                more += [_rename(trial, *name) for trial in study.plan_more(own)]
        return more

    def refuse(self, trial: Trial, results: Sequence[TrialResult]) -> str | None:
        name, own = _split_name(trial)
        study = self.measured_parts[name]
        obstacle = find_trial_obstacle(study, own)
        if obstacle is not None:
            return obstacle
        return study.refuse(own, _select(results, *name)) if isinstance(study, Selective) else None

    def expects(self, result: TrialResult) -> bool:
        name, own = _split_name(result.trial)
        study = self.measured_parts[name]
        is_sought = isinstance(study, Expecting) and study.expects(replace(result, trial=own))
        is_too_large = result.status is Status.NOT_RUN and find_trial_obstacle(study, own) is not None
        return is_sought or is_too_large or any(row.expects(result) for row in self.rows if row.prefix == name[0])

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        recipe = RECIPES[self.recipe]
        outcomes = {name: conclude_part(study, _select(results, *name)) for name, study in self.measured_parts.items()}
        sections: list[Section] = []
        summary: list[str] = []
        cautions: list[tuple[str, Caution]] = []
        for row in self.rows:
            own = {key: outcomes[row.prefix, key] for key in row.parts if outcomes[row.prefix, key].results}
            finding = row.conclude(own)
            shown = {} if row.reads and any(other.id == row.reads for other in self.rows) else own
            sections.append(make_row_section(row, shown, finding, self._say_why(row, own)))
            summary += [f"{row.id}: {answer}" for answer in finding.answers[:1]]
            cautions += _collect_cautions(row, shown)
        checks = [check for check in recipe.make_checks() if not self.only or check.id in {row.id for row in self.rows}]
        if checks:
            sections.append(Section(heading="Checks of the published numbers", tables=(make_check_table(checks),)))
        return Document(
            title=recipe.title,
            question=self.question,
            setting=f"{self.recipe} · {self.size} · rows {' '.join(row.id for row in self.rows)}",
            sections=(Section(tables=(self._make_overview(outcomes),)), *sections),
            summary=tuple(summary),
            cautions=merge_cautions(cautions),
        )

    def _explain(self, row: Row, own: Iterable[str]) -> str:
        """Why a row is not run, or not whole: its own reason, and what hinders those parts that gave nothing."""
        hindered = {key: self.obstacles.get((row.prefix, key)) for key in row.parts if key not in own}
        found = {key: obstacle for key, obstacle in hindered.items() if obstacle}
        is_all = len(set(found.values())) == 1 and len(found) == len(row.parts)
        words = next(iter(found.values())) if is_all else _join_alike(found.items())
        return "; ".join(part for part in (row.reason, words) if part)

    def _is_hindered(self, row: Row, own: Collection[str]) -> bool:
        """Whether nothing of a row can be run here, and nothing of it was run elsewhere."""
        return not own and all((row.prefix, key) in self.obstacles for key in row.parts)

    def _say_why(self, row: Row, own: Collection[str]) -> str:
        reason = self._explain(row, own)
        return f"{'Not run' if self._is_hindered(row, own) else 'Not whole'}: {reason}." if reason else ""

    def _make_overview(self, outcomes: Mapping[tuple[str, str], Outcome]) -> Table:
        """Every row with what became of it."""
        columns = (
            Column(key="row", header="row", align="left"),
            Column(key="title", header="experiment", align="left"),
            Column(key="completed", header="completed", quantity="count"),
            Column(key="failed", header="not completed", quantity="count"),
            Column(key="state", header="state", align="left"),
        )
        made = []
        for row in self.rows:
            own = {key: found for key in row.parts if (found := outcomes[row.prefix, key].results)}
            results = [result for found in own.values() for result in found]
            num_completed = sum(result.status == "completed" for result in results)
            state = row.state or self._describe_state(row, own)
            made.append(make_row(row.id, row.title, num_completed, len(results) - num_completed, state))
        return Table(columns=columns, rows=tuple(made))

    def _describe_state(self, row: Row, own: Collection[str]) -> str:
        if not own:
            return "not run" if self._is_hindered(row, own) else "not run yet"
        if row.reads:
            return f"read from {row.reads}"
        return "run in part" if self._explain(row, own) else "run"


def _join_alike(reasons: Iterable[tuple[str, str]]) -> str:
    """Every reason once, with the names of those that share it."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons:
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(sharing)}: {reason}" for reason, sharing in names.items())


def _place(row: Row, device: Literal["auto", "cpu", "cuda"], size: Size) -> Row:
    parts: dict[str, Study] = {}
    for key, study in row.parts.items():
        placed: Study = replace(study, job=replace(study.job, device=device))
        parts[key] = limit_memory(placed) if size == "full" else placed
    return replace(row, parts=parts)


def _rename(trial: Trial, prefix: str, key: str) -> Trial:
    return replace(trial, configuration=f"{prefix}.{key}.{trial.configuration}")


def _split_name(trial: Trial) -> tuple[tuple[str, str], Trial]:
    """The part that a trial belongs to, and the trial as its study names it."""
    prefix, key, configuration = trial.configuration.split(".", 2)
    return (prefix, key), replace(trial, configuration=configuration)


def _select(results: Sequence[TrialResult], prefix: str, key: str) -> tuple[TrialResult, ...]:
    """The results of one part, named as its study names them."""
    start = f"{prefix}.{key}."
    own = (result for result in results if result.trial.configuration.startswith(start))
    return tuple(replace(result, trial=_split_name(result.trial)[1]) for result in own)


def conclude_part(study: Study, results: tuple[TrialResult, ...]) -> Outcome:
    return Outcome(study=study, results=results, document=study.conclude(results) if results else None)


def make_row_section(row: Row, outcomes: Mapping[str, Outcome], finding: Finding, why: str) -> Section:
    """A row's answers first, then its numbers beside the published ones, then what its studies say themselves."""
    own: list[Table] = []
    said: list[str] = []
    most = None if len(outcomes) <= MOST_WHOLE_PARTS else 1
    for key, outcome in outcomes.items():
        if outcome.document is None:
            continue
        mark = f" ({key})" if len(outcomes) > 1 else ""
        for number, table in enumerate(list_tables(outcome)[:most]):
            title = table.title or (outcome.document.title if number == 0 else "")
            own.append(replace(table, title=f"{title}{mark}" if title else ""))
        new = (words for words in outcome.document.summary[:most] if words not in finding.answers)
        said += [f"{outcome.document.title}{mark}: {words}" if mark else words for words in new]
    return Section(
        heading=f"{row.id} · {row.title}",
        paragraphs=(*((why,) if why else ()), *finding.answers, *said),
        tables=(*finding.tables, *own),
    )


def list_tables(outcome: Outcome) -> tuple[Table, ...]:
    """The tables of a study; of a training not its curve: on random data it shows nothing."""
    tables = outcome.document.tables if outcome.document else ()
    return tables[1:] if isinstance(outcome.study, Train) else tables


def make_check_table(checks: Sequence[Check]) -> Table:
    """What was published, and what follows from its own numbers."""
    columns = (
        Column(key="row", header="row", align="left"),
        Column(key="holds", header="holds", align="left"),
        Column(key="check", header="published → recomputed", align="left"),
    )
    rows = tuple(
        make_row(check.id, "yes" if check.holds else "no", f"{check.claim} → {check.computed}") for check in checks
    )
    return Table(columns=columns, rows=rows)


def _collect_cautions(row: Row, outcomes: Mapping[str, Outcome]) -> Iterator[tuple[str, Caution]]:
    for key, outcome in outcomes.items():
        for caution in outcome.document.cautions if outcome.document else ():
            step = caution.next_step.replace(" trials/", f" trials/{row.prefix}.{key}.")
            if "--" in step and " trials/" not in step:  # reproduce has no such flag
                verb = "scalelab train" if isinstance(outcome.study, Train) else f"scalelab run {outcome.study.name}"
                step = f"{step}, with {verb}"
            yield row.id, replace(caution, next_step=step)


def merge_cautions(found: Iterable[tuple[str, Caution]]) -> tuple[Caution, ...]:
    """One warning for all that differ in numbers only, as those about the machine do, with the rows that have it."""
    alike: dict[str, list[tuple[str, Caution]]] = {}
    for row, caution in found:
        alike.setdefault(re.sub(r"[0-9.]+", "", caution.message), []).append((row, caution))
    merged = []
    for group in alike.values():
        rows = ", ".join(dict.fromkeys(row for row, _ in group))
        (first, caution), differs = group[0], any(row != group[0][0] for row, _ in group)
        whose = f" (numbers of {first})" if differs and len({other.message for _, other in group}) > 1 else ""
        merged.append(replace(caution, message=f"{rows}: {caution.message}{whose}"))
    return tuple(merged)

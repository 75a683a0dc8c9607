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

from scalelab.answers.train import Train
from scalelab.errors import UsageError
from scalelab.measure.launchers.site import Site
from scalelab.recipes.assignments import RECIPES
from scalelab.recipes.evidence import OTHER_MACHINE
from scalelab.recipes.feasibility import find_obstacle, find_trial_obstacle, limit_memory
from scalelab.recipes.recipe import Check, Finding, Outcome, Row, Size
from scalelab.recipes.row_charts import choose_charts
from scalelab.recipes.submitted import SubmittedTraining
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.document import Column, Document, Section, Table, make_cell, make_row
from scalelab.report.findings import Caution, as_findings
from scalelab.studies.shared.cautions import FEW_LAUNCHES, HEAVY_TAILS, NOT_SETTLED, OUTLIERS
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Study

NameOfRecipe = Literal["polaris", "gpt2", "scaling", "resnet", "quantization"]

MOST_WHOLE_PARTS = 2
"""With more parts, a row shows each one's main table and main sentence only."""
MOST_SENTENCES = 2
"""Of a study, where the row has answers of its own."""
MOST_TABLES = 2
"""Of a study, where the row has no tables of its own."""
MOST_COLUMNS = 5
"""Of a study's main table, where the row has tables of its own."""
MEASURES_NOTHING = "it measures nothing itself"
ABOUT_ONE = (NOT_SETTLED.name, OUTLIERS.name, FEW_LAUNCHES.name, HEAVY_TAILS.name)
"""Kinds of warnings about one configuration: several of a kind are said once."""
WITH = ", with "


@dataclass(frozen=True, kw_only=True)
class Reproduce(Study):
    """The experiments of a published assignment, with its parameters, beside its numbers."""

    name: ClassVar[str] = "reproduce"
    has_own_launchers: ClassVar[bool] = True
    title: ClassVar[str] = "Reproduction"
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
        for wanted in self.wanted:
            if wanted not in known:
                raise UsageError(f"unknown row {wanted!r} of {self.recipe}: use some of {', '.join(known)}")

    @property
    def wanted(self) -> tuple[str, ...]:
        """The rows that were asked for, as they are called; commas may stand between them too."""
        return tuple(name.upper() for words in self.only for name in re.split(r"[,\s]+", words) if name)

    @property
    def job(self) -> Job:
        """Every part has its own."""
        return Job(device=self.device)

    @property
    def command(self) -> str:
        """What makes this run again."""
        words = ["scalelab", "reproduce", self.recipe, "--size", self.size, "--device", self.device]
        return " ".join([*words, *(("--only", *self.wanted) if self.wanted else ())])

    @property
    def label(self) -> str:
        return f"reproduce-{self.recipe}"

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The rows that were asked for, each on the device that was."""
        wanted = set(self.wanted)
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
            why = {row.id: MEASURES_NOTHING if row.state else self.reasons.get(row.id, "") for row in self.rows}
            reasons = _join_alike(why.items())
            raise UsageError(f"nothing of that can be run here: {reasons}")
        return trials

    def plan_more(self, results: Sequence[TrialResult]) -> list[Trial]:
        more = []
        for name, study in self.measured_parts.items():
            own = _select(results, *name)
            if own:
                more += [_rename(trial, *name) for trial in study.plan_more(own)]
        return more

    def refuse(self, trial: Trial, results: Sequence[TrialResult]) -> str | None:
        name, own = _split_name(trial)
        study = self.measured_parts[name]
        obstacle = find_trial_obstacle(study, own)
        if obstacle is not None:
            return obstacle
        return study.refuse(own, _select(results, *name))

    def expects(self, result: TrialResult) -> bool:
        """What was left out, with its reason, and what a part's study looks for; a published failure still fails."""
        name, own = _split_name(result.trial)
        study = self.measured_parts[name]
        return study.expects(replace(result, trial=own)) or result.status is Status.NOT_RUN

    def find_part(self, trial: Trial) -> str:
        """As in `s2.strong.ddp-2`."""
        return ".".join(trial.configuration.split(".", 2)[:2])

    def find_site(self, trial: Trial) -> Site | None:
        """What a trial that is a job asks for, where neither flags nor a site file say it; None: it is none."""
        study = self.measured_parts[_split_name(trial)[0]]
        return study.site if isinstance(study, SubmittedTraining) else None

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        recipe = RECIPES[self.recipe]
        outcomes = {name: conclude_part(study, _select(results, *name)) for name, study in self.measured_parts.items()}
        sections: list[Section] = []
        is_compared = False
        summary: list[str] = []
        cautions: list[tuple[str, Caution]] = []
        for row in self.rows:
            own = {key: outcomes[row.prefix, key] for key in row.parts if outcomes[row.prefix, key].results}
            finding = row.conclude(own)
            if row.state and finding.answers:
                finding = replace(finding, answers=(*finding.answers, f"The runnable script: {self.command}"))
            shown = {} if row.reads and any(other.id == row.reads for other in self.rows) else own
            is_compared = is_compared or bool(finding.tables)
            sections.append(make_row_section(row, shown, finding, self._say_why(row, own)))
            summary += [f"{row.id}: {answer}" for answer in finding.answers[:1]]
            cautions += _collect_cautions(row, shown)
        checks = [
            check for check in recipe.make_checks() if not self.wanted or check.id in {row.id for row in self.rows}
        ]
        if checks:
            sections.append(Section(heading="Checks of the published numbers", tables=(make_check_table(checks),)))
        return Document(
            title=recipe.title,
            question=self.question,
            setting=f"{self.recipe} · {self.size} · rows {' '.join(row.id for row in self.rows)}",
            sections=(Section(tables=(self._make_overview(outcomes, is_compared),)), *sections),
            findings=as_findings(summary),
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
        is_hindered = self._is_hindered(row, own) and not row.state
        return f"{'Not run' if is_hindered else 'Not whole'}: {reason}." if reason else ""

    def _make_overview(self, outcomes: Mapping[tuple[str, str], Outcome], is_compared: bool) -> Table:
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
        return Table(
            columns=columns, rows=tuple(made), notes=(OTHER_MACHINE,) if self.size == "small" and is_compared else ()
        )

    def _describe_state(self, row: Row, own: Mapping[str, Sequence[TrialResult]]) -> str:
        if not own:
            return "not run" if self._is_hindered(row, own) else "not run yet"
        if row.reads:
            return f"read from {row.reads}"
        if all(result.status is Status.NOT_RUN for results in own.values() for result in results):
            return "not run"
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
    """A row's answers first, then its numbers beside the published ones, then the main points of its studies."""
    said: list[str] = []
    shown: list[tuple[str, Table]] = []
    hidden: dict[str, list[str]] = {}
    is_crowded = len(outcomes) > MOST_WHOLE_PARTS
    for key, outcome in outcomes.items():
        if outcome.document is None:
            continue
        mark = f" ({key})" if len(outcomes) > 1 else ""
        tables = name_tables(outcome)
        usual = 1 if is_crowded or finding.tables else MOST_TABLES
        most = usual if row.num_tables is None or not finding.answers else row.num_tables
        shown += [(key, shorten_table(table) if finding.tables else table) for table in tables[:most]]
        names = hidden.setdefault(outcome.study.name, [])
        names += [table.title for table in tables[most:] if table.title and table.title not in names]
        said_by_study = list_sentences(outcome, finding, is_crowded) if most else ()
        new = [words for words in said_by_study if words not in finding.answers]
        said += [f"{outcome.document.title}{mark}: {words}" if mark else words for words in new]
    left_out = [f"{', '.join(names)} (scalelab run {study})" for study, names in hidden.items() if names]
    rest = (f"Not repeated here: {'; '.join(left_out)}.",) if left_out else ()
    return Section(
        heading=f"{row.id} · {row.title}",
        paragraphs=(*((why,) if why else ()), *finding.answers, *said, *rest),
        tables=(*finding.tables, *merge_tables(shown, len(outcomes) > 1)),
        charts=tuple(choose_charts({key: outcome.document for key, outcome in outcomes.items()})),
    )


def list_sentences(outcome: Outcome, finding: Finding, is_crowded: bool) -> tuple[str, ...]:
    """What a study says that is worth repeating; of a training nothing: on random data its loss shows nothing."""
    if outcome.document is None or isinstance(outcome.study, Train):
        return ()
    if finding.answers:
        return () if is_crowded else outcome.document.summary[:MOST_SENTENCES]
    return outcome.document.summary[:1] if is_crowded else outcome.document.summary


def name_tables(outcome: Outcome) -> list[Table]:
    """The tables of a study with a title each; of a training not its curve: on random data it shows nothing."""
    document = outcome.document
    tables: list[Table] = []
    for section in document.sections if document else ():
        for number, table in enumerate(section.tables):
            heading = section.heading if number == 0 else ""
            tables.append(replace(table, title=table.title or heading))
    kept = tables[1:] if isinstance(outcome.study, Train) else tables
    first = kept[:1]
    return [replace(table, title=table.title or (document.title if document else "")) for table in first] + kept[1:]


def shorten_table(table: Table) -> Table:
    """Its main columns, without notes on the others."""
    columns, rows = table.columns[:MOST_COLUMNS], tuple(row[:MOST_COLUMNS] for row in table.rows)
    return replace(table, columns=columns, rows=rows, notes=tuple(note for note in table.notes if note.startswith("±")))


def merge_tables(shown: Sequence[tuple[str, Table]], is_marked: bool) -> Iterator[Table]:
    """Tables that differ in their rows only become one, with the part that each row is of."""
    alike: dict[tuple[object, ...], list[tuple[str, Table]]] = {}
    for key, table in shown:
        alike.setdefault((table.title, table.columns, table.notes), []).append((key, table))
    for group in alike.values():
        key, first = group[0]
        if len(group) == 1:
            yield replace(first, title=f"{first.title} ({key})") if is_marked and first.title else first
            continue
        part = Column(key="part", header="part", align="left")
        rows = tuple((make_cell(key), *row)[:MOST_COLUMNS] for key, table in group for row in table.rows)
        yield replace(first, columns=(part, *first.columns)[:MOST_COLUMNS], rows=rows)


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
                step = f"{step}{WITH}{verb}"
            yield row.id, replace(caution, next_step=step)


def merge_cautions(found: Iterable[tuple[str, Caution]]) -> tuple[Caution, ...]:
    """One warning for all that differ in numbers or in the configuration only, with the rows that have it."""
    alike: dict[str, list[tuple[str, Caution]]] = {}
    for row, caution in found:
        what = caution.kind if caution.kind in ABOUT_ONE else caution.message
        alike.setdefault(re.sub(r"[0-9.]+", "", what), []).append((row, caution))
    return tuple(_merge_alike(group) for group in alike.values())


def _merge_alike(group: Sequence[tuple[str, Caution]]) -> Caution:
    rows = ", ".join(dict.fromkeys(row for row, _ in group))
    first, caution = group[0]
    whose = ""
    if len({(row, other.message) for row, other in group}) > 1 and caution.kind in ABOUT_ONE:
        whose = f" ({len(group)} such configurations; this is of {first})"
    elif len({other.message for _, other in group}) > 1 and any(row != first for row, _ in group):
        whose = f" (numbers of {first})"
    return Caution(message=f"{rows}: {caution.message}{whose}", next_step=_join_steps(group))


def _join_steps(group: Sequence[tuple[str, Caution]]) -> str:
    """The first advice; where it names a command, the commands of all."""
    step, sign, _ = group[0][1].next_step.partition(WITH)
    commands = dict.fromkeys(other.next_step.partition(WITH)[2] for _, other in group)
    first, *others = [command for command in commands if command] or [""]
    return f"{step}{sign}{', '.join([first, *(other.removeprefix('scalelab run ') for other in others)])}"

"""The document of a recipe: every row's main number beside the published one, then row by row, then the checks.

The first table is the answer on one screen. A row's own tables come before those of its studies. Warnings of several
rows that are of one kind become one that names the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from scalelab.analysis.estimate import Estimate
from scalelab.recipes.evidence import (
    divide_published,
    is_comparable,
    learns_nothing,
    list_tables,
    print_published,
    say_wide,
)
from scalelab.recipes.recipe import Answer, Check, Main, Outcome, Outcomes, Row, Size
from scalelab.recipes.setting import describe_setting
from scalelab.records.trial import Status, TrialResult
from scalelab.report.document import Chart, Column, Section, Table, make_cell
from scalelab.report.findings import ASIDE, DETAIL, MAIN, Caution, Finding, FindingKind
from scalelab.report.tables import INTERVAL_NOTE, count_column, make_table, text_column
from scalelab.studies.catalogue import find_command
from scalelab.studies.shared.cautions import DISTURBED, FAILED, NOT_RUN, is_unsteady, name_failure
from scalelab.units import format_count, format_quantity, format_share, is_known, list_some

ROWS = FindingKind(
    "reproduction",
    "How many rows of a recipe ran, and how many main numbers agree with the published ones",
    MAIN,
    ("rows", "ran", "comparable", "agree"),
)
CHECKS = FindingKind("checks", "How many published claims follow from the published numbers", MAIN, ("claims", "hold"))
ROW = FindingKind(
    "row", "The answer of one row, with its main number and the published one", DETAIL, ("ours", "published", "verdict")
)

MOST_TABLES = 2
"""Of a study, where the row has no tables of its own."""
MOST_COLUMNS = 5
"""Of a study's table, where the row has tables of its own."""
MOST_WHOLE_PARTS = 2
"""With more parts, a row shows one table of each study."""
MOST_SENTENCES = 4
"""After the answers of a row; its studies say the others."""
MOST_CHARTS = 4
"""Of one row; the others are in the studies themselves."""
MOST_NAMED = 4
"""Configurations that a merged warning names."""
AGREES, OTHER_SETUP, IMPRECISE = "agrees", "other setup", "too imprecise"
LOWER, HIGHER = "lower", "higher"
"""Than published, by an interval that is wider than the number: a quotient would say nothing."""
WIDEST = 0.25
"""Of a number: with a wider interval, agreement says nothing."""
VERDICT_NOTES = (
    "agrees: the published number is within our interval; 1.20×: ours over the published one",
    f"{IMPRECISE}: it is within our interval, but that is wider than ± {format_share(WIDEST)} of our number",
    f"{OTHER_SETUP}: another machine, model size or data set; for ratios only another link or shared cores",
)


@dataclass(frozen=True, kw_only=True)
class Concluded:
    """A row with what became of it."""

    row: Row
    outcomes: Outcomes
    """Of the parts that have a result."""
    answer: Answer
    reason: str
    """Why it did not run, or not completely; empty: it did."""
    state: str
    is_hindered: bool
    """Whether nothing of it can run here, and nothing of it ran elsewhere."""
    is_shown_elsewhere: bool
    """Whether the row that measured its parts shows them."""

    @property
    def results(self) -> list[TrialResult]:
        return [result for outcome in self.outcomes.values() for result in outcome.results]

    @property
    def num_completed(self) -> int:
        return sum(result.status is Status.COMPLETED for result in self.results)

    @property
    def shown(self) -> Outcomes:
        return {} if self.is_shown_elsewhere else self.outcomes


def judge_main(main: Main | None, size: Size) -> str | None:
    """Whether the interval holds the published number, else their quotient; None: there is nothing to compare."""
    if main is None or main.ours is None or main.published is None:
        return None
    if not main.is_alike or not is_comparable(main.quantity, size, is_ratio=main.is_ratio):
        return OTHER_SETUP
    ours = main.ours if isinstance(main.ours, Estimate) else Estimate(value=main.ours)
    low, high = ours.ends
    if low <= main.published <= high:
        return IMPRECISE if max(high - ours.value, ours.value - low) > WIDEST * abs(ours.value) else AGREES
    if not is_known(ours):
        return LOWER if high < main.published else HIGHER
    return f"{format_quantity('ratio', divide_published(ours.value, main.published))}×"


def say_main(main: Main) -> str | None:
    """A main number with its interval, however wide, as a verdict rests on both: by its ends where ± would hide it."""
    if main.ours is None or main.is_close_outside:
        return main.print_ends()
    said = say_wide(main.quantity, main.ours)
    return format_quantity(main.quantity, main.ours) if said == "unknown" else said


def make_overview(rows: Sequence[Concluded], size: Size) -> Table:
    """Every row with its main number here and as published, and the verdict."""
    verdicts = {one.row.id: judge_main(one.answer.main, size) for one in rows}
    mains = {one.row.id: one.answer.main or Main("text", one.row.title, None) for one in rows}
    is_compared = any(main.published is not None for main in mains.values())

    def read_published(one: Concluded) -> str | None:
        main = mains[one.row.id]
        return print_published(main.quantity, main.published, main.printed)

    notes = [note for note in VERDICT_NOTES if not note.startswith(IMPRECISE) or IMPRECISE in verdicts.values()]
    return make_table(
        rows,
        text_column("row", "row", lambda one: one.row.id),
        text_column("number", "main number", lambda one: mains[one.row.id].what),
        text_column("ours", "here", lambda one: say_main(mains[one.row.id]), align="right"),
        text_column("published", "published", read_published, align="right") if is_compared else None,
        text_column("verdict", "verdict", lambda one: verdicts[one.row.id] or name_state(one)) if is_compared else None,
        notes=notes if any(verdicts.values()) else (),
    )


def name_state(one: Concluded) -> str | None:
    """What became of a row without a verdict, unless it simply ran."""
    return None if one.state == "run" else one.state


def make_state_table(rows: Sequence[Concluded]) -> Table:
    """Every row with its experiment and what became of its trials."""
    return make_table(
        rows,
        text_column("row", "row", lambda one: one.row.id),
        text_column("title", "experiment", lambda one: one.row.title),
        count_column("completed", "completed", lambda one: one.num_completed),
        count_column("failed", "not completed", lambda one: len(one.results) - one.num_completed),
        text_column("state", "state", lambda one: one.state),
        title="Trials",
    )


def find_findings(rows: Sequence[Concluded], checks: Sequence[Check], size: Size) -> Iterator[Finding]:
    """How much was reproduced, then every row's main answer."""
    if not any(one.results for one in rows):
        return
    ran = [one for one in rows if one.num_completed]
    num_rows = sum(not one.row.state for one in rows)
    missing = [one.row.id for one in rows if not one.row.state and not one.num_completed]
    which = f" (not: {', '.join(missing)})" if missing and ran else ""
    verdicts = [judge_main(one.answer.main, size) for one in rows]
    comparable = [verdict for verdict in verdicts if verdict not in (None, OTHER_SETUP)]
    num_agree, num_wide = comparable.count(AGREES), comparable.count(IMPRECISE)
    wide = f", {num_wide} {'is' if num_wide == 1 else 'are'} too imprecise to tell" if num_wide else ""
    forecast = [
        one.row.id
        for one, verdict in zip(rows, verdicts, strict=True)
        if verdict not in (None, OTHER_SETUP) and one.answer.main is not None and one.answer.main.is_forecast
    ]
    which_forecast = f" (a forecast: {', '.join(forecast)})" if forecast else ""
    compared = f"{format_count(len(comparable), 'comparable number')}{which_forecast}"
    said = f"; {num_agree} of {compared} agree{wide}" if comparable else ""
    to_measure = " with measurements" if num_rows < len(rows) else ""
    yield ROWS(
        "",
        f"{len(ran)} of {format_count(num_rows, 'row')}{to_measure} ran{which}{said}.",
        rows=num_rows,
        ran=len(ran),
        comparable=len(comparable),
        agree=num_agree,
    )
    if checks:
        failed = list(dict.fromkeys(check.id for check in checks if check.holds is False))
        unproved = list(dict.fromkeys(check.id for check in checks if check.holds is None))
        hold = sum(check.holds is True for check in checks)
        named = {"not": failed, "not decided by the published numbers": unproved}
        which = "; ".join(f"{words}: {', '.join(ids)}" for words, ids in named.items() if ids)
        words = f"Published claims that hold when recomputed: {hold} of {len(checks)}{f' ({which})' if which else ''}."
        yield CHECKS("", words, claims=len(checks), hold=hold)
    for one, verdict in zip(rows, verdicts, strict=True):
        main = one.answer.main
        for sentence in [one.answer.lead] if one.answer.lead else one.answer.sentences[:1]:
            yield ROW(
                one.row.id,
                f"{one.row.id}: {sentence}",
                ours=main.ours if main else None,
                published=main.published if main else None,
                verdict=verdict or one.state,
                weight=DETAIL if main and not one.row.is_extra else ASIDE,
            )


def make_section(one: Concluded) -> Section:
    """A row's answers first, then its numbers beside the published ones, then the main tables of its studies."""
    lead = "Unlike the assignment" if set(one.row.parts) <= set(one.outcomes) else "Incomplete"
    lead = "Not run" if one.is_hindered and not one.row.state else lead
    why = f"{lead}: {one.reason}." if one.reason else ""
    wanted = one.row.shows or one.shown
    outcomes = {key: one.shown[key] for key in wanted if key in one.shown and one.shown[key].document is not None}
    named = {one.row.name_part(key): outcome for key, outcome in outcomes.items()}
    is_crowded = len(outcomes) > MOST_WHOLE_PARTS
    most = 1 if is_crowded or one.answer.tables else MOST_TABLES
    if one.row.num_tables is not None and one.answer.sentences:
        most = one.row.num_tables
    tables = [
        (one.row.name_part(key), shorten_table(table) if one.answer.tables else table)
        for key, outcome in outcomes.items()
        for table in list_tables(outcome)[:most]
    ]
    answers = [str(question) for question in one.answer.questions]
    sentences = one.answer.sentences or tuple(quote_studies(named, is_crowded))
    rest = [sentence for sentence in sentences if not any(sentence in answer for answer in answers)]
    main = rest[:MOST_SENTENCES] if one.row.parts else rest[:1]  # without questions its sentences are the answer
    first = (*((why,) if why else ()), *list_setting(one), *(answers or main))
    return Section(
        heading=f"{one.row.id} · {one.row.title}",
        paragraphs=(*first, *(rest[:MOST_SENTENCES] if answers else rest[len(main) :])),
        most_lines=one.row.most_lines,
        num_answers=None if one.row.is_extra or (one.row.state and not answers) else len(first),
        questions=tuple(question.heading for question in one.answer.questions),
        tables=(*one.answer.tables, *merge_tables(tables, is_marked=len(outcomes) > 1)),
        charts=one.answer.charts or tuple(choose_charts(named)),
        is_plot_asked=one.answer.is_plot_asked,
    )


def list_setting(one: Concluded) -> Iterator[str]:
    """What was run; of a row that reads another, which."""
    if one.is_shown_elsewhere:
        yield f"Setting: as in {one.row.reads}, whose runs it reads"
    elif said := describe_setting(one.outcomes):
        yield f"Setting: {said}"


def quote_studies(outcomes: Outcomes, is_crowded: bool) -> Iterator[str]:
    """What the studies found, for a row that says nothing itself."""
    for key, outcome in outcomes.items():
        if outcome.document is not None:
            mark = f"{outcome.document.title} ({key}): " if len(outcomes) > 1 else ""
            yield from (f"{mark}{words}" for words in outcome.document.summary[: 1 if is_crowded else None])


def shorten_table(table: Table) -> Table:
    """Its main columns, without notes on the others."""
    columns, rows = table.columns[:MOST_COLUMNS], tuple(row[:MOST_COLUMNS] for row in table.rows)
    return replace(
        table, columns=columns, rows=rows, notes=tuple(note for note in table.notes if note == INTERVAL_NOTE)
    )


def merge_tables(shown: Sequence[tuple[str, Table]], *, is_marked: bool) -> Iterator[Table]:
    """Tables that differ in their rows only become one, with the part of each row."""
    alike: dict[tuple[object, ...], list[tuple[str, Table]]] = {}
    for key, table in shown:
        alike.setdefault((table.title, table.columns), []).append((key, table))
    for group in alike.values():
        key, first = group[0]
        if len(group) == 1:
            yield replace(first, title=mark_title(first.title, key)) if is_marked and first.title else first
            continue
        columns = (Column(key="part", header="part", align="left"), *first.columns)
        rows = tuple((make_cell(key), *row) for key, table in group for row in table.rows)
        notes = tuple(dict.fromkeys(note for _, table in group for note in table.notes))
        yield replace(first, columns=columns, rows=rows, notes=notes)


def mark_title(title: str, part: str) -> str:
    """With the part that it is of, unless its last word says so."""
    return title if title.lower().endswith(part.lower()) else f"{title} ({part})"


def choose_charts(outcomes: Outcomes) -> Iterator[Chart]:
    """The first chart of every part, with the part's name where there are several; the last names what is left out."""
    mains = {key: find_main_chart(outcome) for key, outcome in outcomes.items()}
    found = {key: chart for key, chart in mains.items() if chart is not None}
    left_out = list(found)[MOST_CHARTS:]
    for number, (key, chart) in enumerate(list(found.items())[:MOST_CHARTS], start=1):
        named = replace(chart, title=mark_title(chart.title, key)) if len(found) > 1 else chart
        if number == MOST_CHARTS and left_out:
            named = replace(named, caption=f"{named.caption} Not drawn: {', '.join(left_out)}.".strip())
        yield named


def find_main_chart(outcome: Outcome) -> Chart | None:
    if outcome.document is None or learns_nothing(outcome):
        return None
    return next((chart for section in outcome.document.sections for chart in section.charts), None)


def make_check_table(checks: Sequence[Check]) -> Table:
    """What was published, and what follows from its own numbers."""
    return make_table(
        checks,
        text_column("row", "row", lambda check: check.id),
        text_column("holds", "holds", lambda check: {True: "yes", False: "no", None: "open"}[check.holds]),
        text_column("check", "published → recomputed", lambda check: f"{check.claim} → {check.computed}"),
    )


@dataclass(frozen=True, kw_only=True)
class Found:
    """A warning with where it was found."""

    row: str
    caution: Caution
    command: str = ""
    """What has the flags that its advice names."""


def list_cautions(rows: Iterable[Concluded]) -> tuple[Caution, ...]:
    """The warnings of all studies, those of one kind merged."""
    found = []
    for one in rows:
        for key, outcome in one.shown.items():
            published = list_published(one.row, outcome.results)
            for caution in (*find_unnamed(outcome), *(outcome.document.cautions if outcome.document else ())):
                is_timeless = is_unsteady(caution) and any(result.quantized for result in outcome.results)
                if is_timeless or (caution.kind == FAILED.name and caution.values.get("status") in published):
                    continue
                step = point_to_logs(caution, outcome.results, f"{one.row.prefix}.{key}")
                command = find_command(outcome.study.name) if caution.severity in ("noise", "control") else ""
                found.append(Found(row=one.row.id, caution=replace(caution, next_step=step), command=command))
    return merge_cautions(found)


def list_published(row: Row, results: Sequence[TrialResult]) -> set[str]:
    """The ways in which trials failed, all of them as published."""
    failed = [result for result in results if result.status is not Status.COMPLETED]
    statuses = {result.status for result in failed}
    return {
        status.value for status in statuses if all(row.expects(result) for result in failed if result.status is status)
    }


def find_unnamed(outcome: Outcome) -> Iterator[Caution]:
    """Failures that the study neither expects nor warns of: they head the answer of a recipe all the same."""
    named = {caution.values.get("status") for caution in outcome.document.cautions} if outcome.document else set()
    for arm in outcome.arms.values():
        failure = None if arm.is_measured else arm.failure
        if (
            failure
            and failure.status.value not in {*named, Status.NOT_RUN.value}
            and not outcome.study.expects(failure)
        ):
            yield from name_failure(arm.label, arm.results, is_measured=False)


def point_to_logs(caution: Caution, results: Sequence[TrialResult], prefix: str) -> str:
    """The advice after a failure, with the trial as this run names it."""
    if caution.kind not in (FAILED.name, NOT_RUN.name):
        return caution.next_step
    failed = [result for result in results if result.status.value == caution.values.get("status")]
    result = next((one for one in failed if one.trial.label == caution.subject), failed[0] if failed else None)
    if result is None:
        return caution.next_step
    return "; ".join(filter(None, (result.advice, f"logs: trials/{prefix}.{result.trial.name}")))


def merge_cautions(found: Iterable[Found]) -> tuple[Caution, ...]:
    """One warning for all of one kind, with the rows and configurations that have it."""
    alike: dict[tuple[object, ...], list[Found]] = {}
    for one in found:
        kind = one.caution.kind
        same = one.caution.message if kind == "other" else one.caution.values.get("status")
        alike.setdefault((kind, same), []).append(one)
    return tuple(_merge_alike(group) for group in alike.values())


def _merge_alike(group: Sequence[Found]) -> Caution:
    first = group[0]
    which = tuple(dict.fromkeys(one.row for one in group))
    rows = ", ".join(which)
    named = [] if first.caution.kind == DISTURBED.name else group[1:]  # whose subject is a list of its own
    others = list(dict.fromkeys(_name(one) for one in named if one.caution.subject and _name(one) != _name(first)))
    also = f" (also {list_some(others, MOST_NAMED)})" if others else ""
    commands = list(dict.fromkeys(one.command for one in group if one.command))
    way = commands[0] if len(commands) == 1 else "scalelab run and the study of each row" if commands else ""
    step = f"{first.caution.next_step}, with {way}" if way else first.caution.next_step
    message, timed = f"{rows}: {first.caution.message}{also}", which if is_unsteady(first.caution) else ()
    return replace(first.caution, subject=rows, rows=timed, message=message, next_step=step)


def _name(one: Found) -> str:
    return f"{one.row} {one.caution.subject}".strip()

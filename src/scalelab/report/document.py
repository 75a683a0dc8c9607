"""A report before it has a format: headings, tables, charts, findings, warnings.

A study concludes with a `Document`; every renderer is a function of it and of nothing else. The numbers in
it are raw, in base units (seconds, bytes, per second, ratios in [0, 1]); how many digits they get is decided
when they are printed. It is stored as `document.json`, so that a report can be rendered again where nothing
can be measured.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from scalelab.analysis.estimate import Estimate
from scalelab.errors import DamagedRun
from scalelab.report.findings import DETAIL, MAIN, Caution, Finding, Value, order_cautions, order_findings
from scalelab.units import Quantity

Align = Literal["left", "right"]
STRICT: Mapping[str, Any] = {"ensure_ascii": False, "allow_nan": False}
SCHEMA_VERSION = 2
"""Raised by one whenever a document of an older version would be misread. 2: findings and cautions have kinds."""
BRIEF_CHARACTERS, BRIEF_ROWS = 420, 12
"""Of a paragraph and of a table in a brief report."""
LINE_CHARACTERS = 140
"""Of a line of a brief report."""
BRIEF_WARNINGS = 5


@dataclass(frozen=True, kw_only=True)
class Column:
    """What one column of a table holds."""

    key: str
    """Its name in exports: stable, in words of the code, for example `step_seconds`."""
    header: str
    """Its name for a reader, without the unit: that is chosen when it is printed."""
    quantity: Quantity = "text"
    align: Align = "right"
    shows_interval: bool = True
    """Whether ± is printed; exports always have the interval."""
    unit_of: str = ""
    """The key of the column whose unit this one takes, so that both compare at a glance; empty: it has its own."""
    is_detail: bool = False
    """Whether one screen leaves it out; the full report and exports always have it."""
    note: str = ""
    """What the column means, where its header does not say enough; it is printed below the table."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One entry of a table: a raw number with its interval, or a word such as `out of memory`."""

    value: Value = None
    low: float | None = None
    high: float | None = None
    mark: str = ""
    """A footnote sign such as †; one of the table's notes explains it."""
    whole: str = ""
    """The whole word if `value` is shortened, for exports; empty: it is not."""

    @property
    def estimate(self) -> Estimate | None:
        """The number with its interval; None if the cell holds a word, a truth or nothing."""
        if self.value is None or isinstance(self.value, bool | str):
            return None
        return Estimate(value=self.value, low=self.low, high=self.high)


def make_cell(source: Value | Estimate, *, mark: str = "") -> Cell:
    """A cell from an estimate or a plain value."""
    if isinstance(source, Estimate):
        return Cell(value=source.value, low=source.low, high=source.high, mark=mark)
    return Cell(value=source, mark=mark)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of cells; the first column names the row."""

    title: str = ""
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    """Printed below the table: what ± means, what a mark means."""

    def __post_init__(self) -> None:
        keys = [column.key for column in self.columns]
        if not keys or len(set(keys)) < len(keys):
            raise ValueError(f"table {self.title!r} needs columns with different keys, not {keys}")
        for number, row in enumerate(self.rows, start=1):
            if len(row) != len(keys):
                raise ValueError(f"table {self.title!r}: row {number} has {len(row)} cells for {len(keys)} columns")


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure as a Vega-Lite specification without width, fonts and colours, which are the renderer's.

    Its data are inline, in the units that its axes name. Formats without figures leave it out.
    """

    title: str = ""
    spec: Mapping[str, Any] = field(default_factory=dict)
    caption: str = ""
    """What is drawn and what is not, in a sentence below it: what intervals are, why a line is broken."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the report; without a heading it belongs to the title above it."""

    heading: str = ""
    paragraphs: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()
    num_answers: int | None = None
    """How many of its first paragraphs a brief report keeps; None: a brief report leaves it out."""
    questions: tuple[str, ...] = ()
    """What paragraphs begin with that answer a question: set in bold."""
    most_lines: int | None = None
    """Of all its answers in a brief report, where an assignment limits an explanation."""
    is_plot_asked: bool = False
    """Whether its charts answer what was asked, so that a brief report keeps them."""

    def split_question(self, paragraph: str) -> tuple[str, str]:
        """The question that a paragraph begins with, empty for most, and the rest."""
        asked = next((words for words in self.questions if paragraph.startswith(words)), "")
        return asked, paragraph.removeprefix(asked)

    def cut_answer(self, paragraph: str, most: int) -> str:
        """A paragraph of a brief report: the whole question, and the first sentences of its answer."""
        asked, rest = self.split_question(paragraph)
        return asked + cut_text(rest, most - len(asked))

    def cut_paragraphs(self, most: int, longer: Mapping[int, int]) -> tuple[str, ...]:
        """The paragraphs of a brief report, the longest cut again until all of them are within the limit of lines."""
        lengths = {
            number: min(len(words), longer.get(number, most))
            for number, words in enumerate(self.paragraphs)
            if number < (self.num_answers or 0) or number in longer
        }
        while True:
            found = tuple(self.cut_answer(self.paragraphs[number], length) for number, length in lengths.items())
            longest = max(lengths, key=lambda number: lengths[number], default=0)
            num_lines = sum(math.ceil(len(words) / LINE_CHARACTERS) for words in found)
            if self.most_lines is None or num_lines <= self.most_lines or lengths[longest] <= BRIEF_CHARACTERS:
                return found
            lengths[longest] -= 20

    @property
    def is_empty(self) -> bool:
        return not (self.heading or self.paragraphs or self.tables or self.charts)

    @property
    def is_drawn(self) -> bool:
        """Whether it has nothing but charts."""
        return not (self.paragraphs or self.tables)


@dataclass(frozen=True, kw_only=True)
class Document:
    """A whole report."""

    title: str
    question: str = ""
    setting: str = ""
    """What was measured, in one line: workload, strategy, data type, backend, batch, steps."""
    sections: tuple[Section, ...] = ()
    findings: tuple[Finding, ...] = ()
    """What was found, the main one first."""
    cautions: tuple[Caution, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    """Name and value of what the numbers depend on: hardware, software, versions."""
    schema_version: int = SCHEMA_VERSION

    @property
    def headline(self) -> str:
        """The title and what it asks."""
        return f"{self.title}: {self.question}" if self.question else self.title

    @property
    def summary(self) -> tuple[str, ...]:
        """The findings in words, the weightiest first."""
        return tuple(finding.text for finding in order_findings(self.findings))

    @property
    def failures(self) -> tuple[Caution, ...]:
        """What did not run: it heads the answer in every format."""
        return tuple(caution for caution in self.cautions if caution.severity == "failure")

    @property
    def warnings(self) -> tuple[Caution, ...]:
        """What else to be careful about, the worst first: it stands after the results."""
        return tuple(one for one in order_cautions(self.cautions) if one.severity != "failure")

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables of all sections; the first is the main one."""
        return tuple(table for section in self.sections for table in section.tables)

    def shorten(
        self,
        most: int = BRIEF_CHARACTERS,
        num_more: int = 0,
        rows: int = BRIEF_ROWS,
        *,
        is_drawn: bool = False,
        lengths: Mapping[tuple[int, int], int] | None = None,
    ) -> Document:
        """A brief report: of every section with answers these, each cut to its first sentences, its first table, and
        the warnings without advice.

        So many further tables go to the sections in turn, the first ones first. `is_drawn`: with the charts that were
        asked for. `lengths`: of answers that may be longer, and of other paragraphs, by the numbers of the section and
        the paragraph.

        A document without answers keeps its findings and its first table.
        """
        answered = [section for section in self.sections if section.num_answers is not None]
        if not answered:
            first = [Section(tables=(_shorten_table(table, rows),)) for table in self.tables[:1]]
            return replace(self, sections=tuple(first), cautions=self.failures, environment=())
        sections = [
            Section(
                heading=section.heading,
                paragraphs=section.cut_paragraphs(
                    most, {number: length for (where, number), length in (lengths or {}).items() if where == place}
                ),
                tables=tuple(
                    _shorten_table(table, rows) for table in section.tables[: 1 - (place - num_more) // len(answered)]
                ),
                charts=section.charts if is_drawn and section.is_plot_asked else (),
                num_answers=section.num_answers,
                questions=section.questions,
            )
            for place, section in enumerate(answered)
        ]
        gone = {section.heading.partition(" · ")[0] for section in self.sections if section.num_answers is None}
        cautions = self._shorten_cautions(gone)
        return replace(self, sections=tuple(sections), findings=(), cautions=cautions, environment=())

    def _shorten_cautions(self, gone: Set[str]) -> tuple[Caution, ...]:
        """Every failure and the worst warnings, without advice; the last says how many are left out.

        Those about noise of several parts become one, which names the parts; parts that are `gone` have none.
        """
        there = [replace(one, rows=tuple(row for row in one.rows if row not in gone)) for one in self.warnings]
        warnings = _merge_noise([one for one in there if one.subject not in gone or not one.subject])
        kept = [replace(caution, next_step="") for caution in (*self.failures, *warnings[:BRIEF_WARNINGS])]
        left_out = len(warnings) - BRIEF_WARNINGS
        if left_out > 0:
            more = "1 more warning is" if left_out == 1 else f"{left_out} more warnings are"
            kept.append(Caution(message=f"{more} in the full report", next_step=""))
        return tuple(kept)


def _merge_noise(cautions: Sequence[Caution]) -> list[Caution]:
    """One warning for all that say of parts of a report that their times are uncertain; others as they are."""
    noisy = [one for one in cautions if one.rows]
    if len(noisy) < 2:
        return list(cautions)
    rows = ", ".join(sorted({row for one in noisy for row in one.rows}))
    merged = Caution(
        message=f"noisy machine: step times of {rows} vary more than they should, so answers that rest on them are"
        f" uncertain, those on ratios of one round less so ({len(noisy)} warnings are in the full report)",
        next_step="",
        severity="noise",
    )
    return [merged if one is noisy[0] else one for one in cautions if one is noisy[0] or one not in noisy]


def cut_text(words: str, most: int) -> str:
    """Whole sentences of a paragraph up to so many characters; at least one. A sentence may begin with a name."""
    ends = [found.end() for found in re.finditer(r"(?<! al)[.?](?= \S)", words)]
    if len(words) <= most or not ends:
        return words
    return words[: max((end for end in ends if end <= most), default=ends[0])]


def _shorten_table(table: Table, most: int) -> Table:
    left_out = len(table.rows) - most
    more = "1 more row is" if left_out == 1 else f"{left_out} more rows are"
    rows = table.rows[:most] if left_out > 0 else table.rows
    notes = (*table.notes, *((f"{more} in the full report",) if left_out > 0 else ()))
    return replace(table, rows=rows, notes=notes)


def read_document(text: str) -> Document:
    """The document that `render_json` wrote."""
    from scalelab.records.trial import from_builtins  # here: only reading needs it, and it loads every record

    try:
        data = json.loads(text)
        version = data.get("schema_version") if isinstance(data, dict) else None
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise DamagedRun(
                f"the document has schema version {version}, this scalelab reads up to {SCHEMA_VERSION}: "
                "upgrade scalelab to read it"
            )
        if not isinstance(version, int) or version < 1:
            raise ValueError("it has no schema_version")
        return from_builtins(upgrade_document(data, version), Document)
    except (ValueError, RecursionError) as error:
        raise DamagedRun(
            f"the document cannot be read ({error}): render it again from its run, or restore the file"
        ) from error


def upgrade_document(data: dict[str, Any], version: int) -> dict[str, Any]:
    """A document of an older schema as one of this. Schema 1 had sentences only: each is a finding of kind `note`."""
    if version > 1:
        return data
    findings = [
        {"kind": "note", "text": text, "weight": DETAIL if number else MAIN}
        for number, text in enumerate(data.pop("summary", ()))
    ]
    return data | {"findings": findings, "schema_version": SCHEMA_VERSION}


_OBEYED = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\U000e0000-\U000e007f]")
"""What JSON leaves as it is and a terminal does not: control and direction characters."""


def render_json(document: Document) -> str:
    """The document as strict JSON, indented but for the figures: those are for programs, each on one line."""
    from scalelab.records.trial import to_builtins

    data: Any = _replace_non_finite(to_builtins(document))
    charts = [chart for section in data["sections"] for chart in section["charts"]]
    specs = iter([json.dumps(chart["spec"], **STRICT, separators=(",", ":")) for chart in charts])
    for chart in charts:
        chart["spec"] = None
    # No text can hold this key: its quotes would be escaped.
    text = re.sub('"spec": null', lambda _: f'"spec": {next(specs)}', json.dumps(data, **STRICT, indent=2))
    # Halves of characters, from file names that could not be decoded, fit no file.
    whole = text.encode("utf-8", "replace").decode("utf-8") + "\n"
    return _OBEYED.sub(lambda match: json.dumps(match[0])[1:-1], whole)


def _replace_non_finite(data: object) -> object:
    """The same builtins with None for nan and the infinities, which JSON cannot hold."""
    if isinstance(data, dict):
        return {key: _replace_non_finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_replace_non_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data

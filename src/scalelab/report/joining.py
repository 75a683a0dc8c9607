"""Several runs in one report: how they compare first, then what they share in one figure, then each for itself.

Every run gets a letter, in the order in which they were named; each is compared with the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from string import ascii_uppercase

from scalelab.report.document import Caution, Chart, Document, Section
from scalelab.report.overlaid import overlay_charts

DECIDED = ("B is faster", "B is slower")
"""What a comparison says of what differs."""


@dataclass(frozen=True, kw_only=True)
class NamedDocument:
    """A run's own report."""

    name: str
    study: str
    document: Document


def join_documents(own: Sequence[NamedDocument], comparisons: Sequence[Document]) -> Document:
    """One report of several runs; `comparisons` are those of every later run with the first, where there is one."""
    letters = letter_runs(own)
    is_pair = len(own) == 2
    others = "B" if is_pair else f"B to {letters[-1]}"
    return Document(
        title="Comparison",
        question="Is B faster than A?" if is_pair else f"Are {others} faster than A?",
        setting=" · ".join(f"{letter} {one.name}" for letter, one in zip(letters, own, strict=True)),
        sections=(
            *(section for comparison in comparisons for section in list_compared(comparison, is_pair=is_pair)),
            *overlay_runs(own, letters),
            *(section for letter, one in zip(letters, own, strict=True) for section in list_own(letter, one)),
        ),
        summary=order_findings(
            [finding for comparison in comparisons for finding in list_findings(comparison, is_pair=is_pair)]
        ),
        cautions=tuple(join_cautions(own, letters, comparisons)),
        environment=tuple(join_environments(own, letters)),
    )


def letter_runs(own: Sequence[NamedDocument]) -> list[str]:
    """A, B, …; after Z with a number."""
    return [ascii_uppercase[n % 26] + (str(n // 26 + 1) if n >= 26 else "") for n in range(len(own))]


def list_compared(comparison: Document, *, is_pair: bool) -> Iterator[Section]:
    """What a comparison says; its A and B are named where there are more than two runs."""
    for number, section in enumerate(comparison.sections):
        heading = section.heading or "Step times side by side"
        words = () if is_pair or number else (comparison.setting,)
        yield replace(section, heading=heading, paragraphs=(*words, *section.paragraphs))


def list_findings(comparison: Document, *, is_pair: bool) -> Iterator[str]:
    named = comparison.setting.rpartition("· B ")[2]
    yield from (finding if is_pair else f"{finding} (B: {named})" for finding in comparison.summary)


def order_findings(findings: Sequence[str]) -> tuple[str, ...]:
    """What differs first: a report begins with its main finding."""
    return tuple(sorted(findings, key=lambda words: not any(verdict in words for verdict in DECIDED)))


def overlay_runs(own: Sequence[NamedDocument], letters: Sequence[str]) -> Iterator[Section]:
    """The figures that runs of the same study share, each with all runs in it."""
    made = []
    for study in dict.fromkeys(one.study for one in own):
        sharing = {letter: one.document for letter, one in zip(letters, own, strict=True) if one.study == study}
        titles = [list_titles(document) for document in sharing.values()]
        for title in titles[0] if len(sharing) > 1 else ():
            charts = {letter: find_chart(document, title) for letter, document in sharing.items()}
            found = {letter: chart for letter, chart in charts.items() if chart is not None}
            overlaid = overlay_charts(found) if len(found) > 1 else None
            made += [overlaid] if overlaid is not None else []
    if made:
        yield Section(heading="All runs in one figure", charts=tuple(made))


def list_titles(document: Document) -> list[str]:
    return list(dict.fromkeys(chart.title for section in document.sections for chart in section.charts if chart.title))


def find_chart(document: Document, title: str) -> Chart | None:
    """The figure of that title; None where there is none, or more than one."""
    found = [chart for section in document.sections for chart in section.charts if chart.title == title]
    return found[0] if len(found) == 1 else None


def list_own(letter: str, one: NamedDocument) -> Iterator[Section]:
    """A run's own report under its letter."""
    document = one.document
    words = (document.headline, document.setting, *document.summary)
    yield Section(heading=f"{letter}: {one.name}", paragraphs=tuple(word for word in words if word))
    for section in document.sections:
        yield replace(section, heading=f"{letter}: {section.heading or 'Results'}")


def join_cautions(
    own: Sequence[NamedDocument], letters: Sequence[str], comparisons: Sequence[Document]
) -> Iterator[Caution]:
    """Those of the comparisons, each once, then those of the runs."""
    yield from dict.fromkeys(caution for comparison in comparisons for caution in comparison.cautions)
    for letter, one in zip(letters, own, strict=True):
        for caution in one.document.cautions:
            yield replace(caution, message=f"{letter}: {caution.message}")


def join_environments(own: Sequence[NamedDocument], letters: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What is the same everywhere once, what differs by letter."""
    tables: list[Mapping[str, str]] = [dict(one.document.environment) for one in own]
    for name in dict.fromkeys(name for table in tables for name in table):
        values = [table.get(name, "–") for table in tables]
        if len(set(values)) == 1:
            yield name, values[0]
        else:
            yield from ((f"{letter}: {name}", value) for letter, value in zip(letters, values, strict=True))

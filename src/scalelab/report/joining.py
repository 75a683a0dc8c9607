"""Several runs in one report: first how they compare, then shared charts, then each run on its own.

Runs get letters in the order named; each is compared with the first.

Charts of lines that all runs have are overlaid. Their specifications are merged, so the axes must agree in titles and
units. Rows with a key are measurements, and their series are named after their run. Of lines without a key only the
ideal is kept: a fit belongs to its run. Bars are not overlaid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from string import ascii_uppercase
from typing import Any

from scalelab.report.charts.plot import DASHES, LEGEND, MOST_SERIES, SHAPES
from scalelab.report.document import Chart, Document, Section
from scalelab.report.findings import Caution, Finding, order_findings

IDEAL = "ideal"
KINDS = ("line", "point", "circle", "rule", "area")
"""Marks that can lie over each other."""
CAPTION = "All runs on the same axes, with the intervals of their own charts below. Fits are shown only there."
Spec = Mapping[str, Any]


def overlay_charts(charts: Mapping[str, Chart]) -> Chart | None:
    """The same figure of several runs, by their names, as one; None if they cannot share axes."""
    specs = {name: chart.spec for name, chart in charts.items()}
    first, *others = specs.values()
    if len(specs) < 2 or not all(is_of_lines(spec) for spec in specs.values()):
        return None
    if any(list_chart_titles(other) != list_chart_titles(first) for other in others):
        return None
    places = {channel: join_places(list(specs.values()), channel) for channel in ("x", "y")}
    layers = [layer for name, spec in specs.items() for layer in rename_layers(spec, name, is_first=spec is first)]
    own = list(dict.fromkeys(row["series"] for layer in layers for row in layer["data"]["values"]))
    if not own or len(own) > MOST_SERIES + 1:
        return None
    layers = [dress_layer(layer, places, own) for layer in layers if layer["data"]["values"]]
    last = max((index for index, layer in enumerate(layers) if kind_of(layer) == "point"), default=None)
    for index, layer in enumerate(layers):
        if index != last:
            layer.pop("params", None)  # a selection has one name in a figure
    chart = next(iter(charts.values()))
    return Chart(title=chart.title, caption=CAPTION, spec={**first, "layer": layers})


def is_of_lines(spec: Spec) -> bool:
    """Whether a figure is layers of lines and points with their own data."""
    layers = spec.get("layer")
    if not isinstance(layers, Sequence) or not any(kind_of(layer) == "line" for layer in layers):
        return False
    return all(
        kind_of(layer) in KINDS and "values" in layer.get("data", {}) and has_plain_series(layer) for layer in layers
    )


def has_plain_series(layer: Spec) -> bool:
    """Whether series differ only in what can be given anew; where it asks for names, they are parts of one run."""
    encoded = [(name, place) for name, place in layer.get("encoding", {}).items() if isinstance(place, Mapping)]
    by_series = {name for name, place in encoded if place.get("field") == "series"}
    asks_names = any("datum.series" in str(place.get("condition", "")) for _, place in encoded)
    return not asks_names and by_series <= {"color", "shape", "strokeDash", "detail"}


def kind_of(layer: Spec) -> str:
    mark = layer.get("mark", "")
    return str(mark.get("type", "")) if isinstance(mark, Mapping) else str(mark)


def list_chart_titles(spec: Spec) -> list[tuple[str, str]]:
    """What the axes of a figure are called, units and all."""
    found = {
        (channel, f"{place.get('title')} {read_axis(place).get('description')}") for channel, place in list_places(spec)
    }
    return sorted(found)


def read_axis(place: Spec) -> Spec:
    axis = place.get("axis")
    return axis if isinstance(axis, Mapping) else {}


def list_places(spec: Spec) -> Iterator[tuple[str, Spec]]:
    """The axes of every layer."""
    for layer in spec["layer"]:
        for channel in ("x", "y"):
            place = layer.get("encoding", {}).get(channel)
            if isinstance(place, Mapping) and "field" in place:
                yield channel, place


def join_places(specs: Sequence[Spec], channel: str) -> dict[str, Any]:
    """Ticks and ends of an axis that hold for all figures.

    Labels that were written for the ticks of one figure do not fit those of another: then the axis that reaches
    furthest is taken as it is.
    """
    places = [place for spec in specs for name, place in list_places(spec) if name == channel]
    joined: dict[str, Any] = {}
    axes = [axis for place in places if "values" in (axis := read_axis(place))]
    if len({str(axis.get("labelExpr")) for axis in axes}) > 1:
        widest = max(axes, key=lambda axis: (max(axis["values"]), -min(axis["values"])))
        joined["axis"] = {name: widest[name] for name in ("values", "labelExpr") if name in widest}
    elif axes:
        joined["axis"] = {"values": sorted({value for axis in axes for value in axis["values"]})}
    domains = [place["scale"]["domain"] for place in places if "domain" in place.get("scale", {})]
    if domains and all(isinstance(value, int | float) for domain in domains for value in domain):
        joined["domain"] = [min(map(min, domains)), max(map(max, domains))]
    return joined


def rename_layers(spec: Spec, run: str, *, is_first: bool) -> Iterator[dict[str, Any]]:
    """The layers of one run, its series named after it."""
    for layer in spec["layer"]:
        kept = []
        for row in layer["data"]["values"]:
            series = str(row.get("series", ""))
            if row.get("key") is not None:
                kept.append({**row, "series": f"{run} · {series}" if series else run})
            elif series == IDEAL and is_first:
                kept.append(dict(row))
        yield {**layer, "data": {"values": kept}}


def dress_layer(layer: Spec, places: Mapping[str, Spec], names: Sequence[str]) -> dict[str, Any]:
    """A layer in the common axes, its series distinct from those of other runs."""
    encoding = {}
    for channel, place in layer["encoding"].items():
        made = dict(place) if isinstance(place, Mapping) else place
        if channel in places and isinstance(made, dict):
            made = set_place(made, places[channel])
        elif isinstance(made, dict) and made.get("field") == "series":
            made |= {"scale": make_scale(channel, names)}
            made |= {} if channel == "detail" else {"legend": LEGEND}
        encoding[channel] = made
    return {**layer, "encoding": encoding}


def set_place(place: dict[str, Any], joined: Spec) -> dict[str, Any]:
    if "axis" in joined and isinstance(place.get("axis"), Mapping):
        place["axis"] = {**place["axis"], **joined["axis"]}
    if "domain" in joined and "scale" in place:
        place["scale"] = {**place["scale"], "domain": joined["domain"]}
    return place


def make_scale(channel: str, names: Sequence[str]) -> dict[str, Any]:
    """Colours, shapes and dashes of all series; the ideal is a dotted line without points."""
    scale: dict[str, Any] = {"domain": list(names)}
    if channel == "shape":
        scale["range"] = ["stroke" if name == IDEAL else SHAPES[n % len(SHAPES)] for n, name in enumerate(names)]
    elif channel == "strokeDash":
        scale["range"] = [[1, 3] if name == IDEAL else DASHES[n % len(DASHES)] for n, name in enumerate(names)]
    return scale


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
        findings=tuple(
            order_findings(one for comparison in comparisons for one in list_findings(comparison, is_pair=is_pair))
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


def list_findings(comparison: Document, *, is_pair: bool) -> Iterator[Finding]:
    """The verdicts, with the name of B where there are more than two runs."""
    named = comparison.setting.rpartition("· B ")[2]
    for finding in comparison.findings:
        yield finding if is_pair else replace(finding, text=f"{finding.text} (B: {named})")


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
    """The figure of that title; None if there is none, or more than one."""
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
    compared = [caution for comparison in comparisons for caution in comparison.cautions]
    yield from {caution.message: caution for caution in compared}.values()
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

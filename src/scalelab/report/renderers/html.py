"""A document as one page that needs nothing else: no network, no server, no other file.

The main finding comes first, in a sentence, with what failed; then the other findings; then figures with their tables
below them; then warnings, each with its next step; then what it was measured on, and the raw samples. The page holds
the whole document as JSON and the program that draws its figures, so a tooltip shows what `--json` writes.

Parts of a document may come from someone else: names of runs, paths, texts of failures. They go in as text. A
Content-Security-Policy lets only the two programs run that are in the page, known by their hashes, and lets nothing be
loaded from anywhere. It forbids `eval` too: Vega then interprets its expressions instead of compiling them.

Colours follow the reader's system, or the button; printed, a page is light and unfolded. Without scripts, words and
tables are still there.

The program that draws is Vega, Vega-Lite and vega-embed, bundled by vl-convert. Bundling takes longer than the rest, so
the bundle is cached in `$XDG_CACHE_HOME/scalelab` or `~/.cache/scalelab`, by vl-convert's version and with its hash.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path

from scalelab import __version__
from scalelab.checks import clean_text
from scalelab.errors import UsageError
from scalelab.records.files import Archive, write_atomically
from scalelab.report.document import Chart, Document, Section, Table, render_json
from scalelab.report.findings import Caution
from scalelab.report.renderers.csv_table import render_csv
from scalelab.report.renderers.theme import (
    BESIDE,
    COMPOSED,
    DARK,
    EXTRAS,
    FONT,
    LEGEND_SIGN,
    LETTER,
    LIGHT,
    Palette,
    is_wide,
    is_zoomable,
    list_names,
    make_config,
)
from scalelab.report.tables import MOST_FINDINGS, TextColumn, format_columns, list_notes
from scalelab.units import PLUS_MINUS, format_bytes, list_some

LONG_PROSE = 40
"""Cells with more letters than this get more room before they are broken into lines."""
MOST_VECTORS = 4000
"""A figure of more data than this is drawn as pixels, which browsers handle faster than as many elements."""

ZOOM_HINT = "Ctrl or Shift + wheel to zoom, drag to pan, double-click to reset."
"""Only in HTML."""


def set_text(text: str) -> str:
    """A text on one line, escaped."""
    return escape(clean_text(text), quote=True)


def set_words(text: str) -> str:
    """A sentence that never breaks a line inside "1.9 ± 0.1", "67 %" or "ddp × 2"."""
    return re.sub("(?<=[±×]) | (?=[±×%])", "\u00a0", set_text(text))


def set_table(table: Table, label: str) -> str:
    """A table in its own box, which scrolls sideways where a screen is narrow."""
    columns = format_columns(table)
    titled = f"<caption>{set_text(table.title)}</caption>" if table.title else ""
    head = "".join(f'<th scope="col"{_name_classes(column)}>{set_text(column.header)}</th>' for column in columns)
    rows = "\n".join(
        f"<tr>{''.join(_set_cell(column, row, is_name=not number) for number, column in enumerate(columns))}</tr>"
        for row in range(len(table.rows))
    )
    notes = "".join(f"<p>{set_text(note)}</p>" for note in list_notes(table))
    return (
        f'<div class="table"><div class="scroll" tabindex="0" role="region" aria-label="{set_text(label)}">'
        f"<table>{titled}<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>"
        f'{f"""<div class="notes">{notes}</div>""" if notes else ""}</div>\n'
    )


def _name_classes(column: TextColumn, text: str = "") -> str:
    names = ["left"] if column.align == "left" else []
    if column.is_prose:
        names += ["prose", "long"] if len(text) > LONG_PROSE else ["prose"]
    return f' class="{" ".join(names)}"' if names else ""


def _set_cell(column: TextColumn, row: int, *, is_name: bool) -> str:
    text = re.sub(" +", " ", column.cells[row].strip())
    number, sign, interval = text.partition(PLUS_MINUS)
    inner = set_text(text)
    if sign and not column.is_prose:
        inner = f'{escape(number)}<span class="pm">{escape(sign + interval)}</span>'
    mark = f"<sup>{set_text(column.marks[row])}</sup>" if column.marks[row] else ""
    tag, scope = ("th", ' scope="row"') if is_name else ("td", "")
    return f"<{tag}{scope}{_name_classes(column, text)}>{inner}{mark}</{tag}>"


def set_charts(section: Section, number: int) -> str:
    """The figures of a section, two beside each other where there is room."""
    if not section.charts:
        return ""
    last = len(section.charts) - 1
    figures = "".join(
        set_figure(chart, f"{number}-{index}", is_wide=is_wide(chart) or (index == last and last % 2 == 0))
        for index, chart in enumerate(section.charts)
    )
    many = " many" if len(section.charts) > 1 else ""
    return f'<div class="charts{many}">{figures}</div>\n'


def set_figure(chart: Chart, place: str, *, is_wide: bool) -> str:
    """The frame of a figure; the program of the page draws into it."""
    title, caption = set_text(chart.title), set_words(chart.caption)
    label = ": ".join(part for part in (title, caption) if part) or "chart"
    longest = max((len(name) for name in list_names(chart.spec)), default=0)
    large = ' data-large="true"' if count_values(chart.spec) > MOST_VECTORS else ""
    wide = ' class="wide"' if is_wide else ""
    heading = f"<h3>{title}</h3>" if title else ""
    words = f"<p>{caption}</p>" if caption else ""
    words += f'<p class="hint">{ZOOM_HINT}</p>' if is_zoomable(chart) else ""
    actions = "".join(
        f'<button type="button" data-format="{kind.lower()}" aria-label="{kind} of {title or label}">{kind}</button>'
        for kind in ("SVG", "PNG")
    )
    return (
        f'<figure{wide}>{heading}<div class="plot" role="img" aria-label="{label}" data-chart="{place}"'
        f' data-entry="{longest * LETTER + LEGEND_SIGN:.1f}" data-name="{name_file(chart.title)}"{large}></div>'
        f'<figcaption>{words}<div class="actions">{actions}</div></figcaption></figure>\n'
    )


def count_values(part: object) -> int:
    """How many rows of data a figure has."""
    if isinstance(part, Mapping):
        rows = part.get("values")
        own = len(rows) if isinstance(rows, list | tuple) else 0
        return own + sum(count_values(value) for name, value in part.items() if name != "values")
    return sum(map(count_values, part)) if isinstance(part, list | tuple) else 0


def name_file(title: str) -> str:
    """A name for the picture of a figure."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower())[:60].strip("-") or "chart"


LONG_FINDING = 150
"""A first sentence with more letters than this is set smaller."""


def render_html(document: Document, *, archive: Archive | None = None) -> str:
    """The whole page; `archive` are the raw files to download from it."""
    style = make_style()
    scripts = [load_script(), read_asset("report.js")] if has_charts(document) else [read_asset("report.js")]
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{make_policy(scripts, style)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<meta name="generator" content="scalelab {__version__}">\n<link rel="icon" href="data:,">\n'
        f"<title>{set_text(document.headline)}</title>\n<style>{style}</style>\n</head>\n"
    )
    data = (
        f'<script type="application/json" id="document">{set_json(json.loads(render_json(document)))}</script>\n'
        f'<script type="application/json" id="theme">{set_json(make_themes())}</script>\n'
    )
    programs = "".join(f"<script>{script}</script>\n" for script in scripts)
    return f"{head}<body>\n{set_page(document, archive)}{data}{programs}</body>\n</html>\n"


def has_charts(document: Document) -> bool:
    return any(section.charts for section in document.sections)


def set_page(document: Document, archive: Archive | None) -> str:
    """Everything that is seen."""
    parts = list(list_parts(document))
    contents = "".join(f'<li><a href="#{place}">{heading}</a></li>' for place, heading, _ in parts)
    body = "".join(
        f'<section id="{place}"><h2>{heading}</h2>\n{content}</section>\n' for place, heading, content in parts
    )
    nav = f'<nav aria-label="contents"><ol>{contents}<li><a href="#data">Raw data</a></li></ol></nav>'
    return (
        '<div class="page">\n<header><div class="bar"><div class="brand">scalelab <span>report</span></div>'
        '<button type="button" id="mode">Dark</button></div>\n'
        f'<div class="hero">{set_hero(document)}</div></header>\n<div class="columns"><main>\n'
        '<noscript><p class="note">Charts and downloads need JavaScript, which is disabled here. Text and tables'
        " are complete.</p></noscript>\n"
        f"{body}{set_downloads(document, archive)}"
        f"<footer><p>Made by scalelab {__version__}. Self-contained: this file loads nothing.</p></footer></main>\n"
        f"{nav}</div>\n</div>\n"
    )


def set_hero(document: Document) -> str:
    """Title, the main finding, what was measured, and whether there are warnings."""
    question = f": {set_text(document.question)}" if document.question else ""
    found = clean_text(document.summary[0]) if document.findings else ""
    long = " long" if len(found) > LONG_FINDING else ""
    finding = f'<p class="finding{long}">{set_words(found)}</p>' if found else ""
    setting = f'<p class="setting">{set_text(document.setting)}</p>' if document.setting else ""
    failed = set_cautions(document.failures, "Failed.", "failure")
    number = len(document.warnings)
    counted = f"{number} warning{'s' if number > 1 else ''}"
    jump = f'<p class="jump"><a href="#warnings">{counted} about this measurement</a></p>' if number else ""
    return f"<h1><strong>{set_text(document.title)}</strong>{question}</h1>{finding}{setting}{failed}{jump}"


def list_parts(document: Document) -> Iterator[tuple[str, str, str]]:
    """Place, heading and content of every part, in their order."""
    if document.summary[1:]:
        yield "findings", "Findings", set_findings(document.summary[1:])
    for number, section in enumerate(document.sections):
        if not section.is_empty:
            heading = section.heading or ("Results" if not number else "More results")
            yield f"part-{number}", set_text(heading), set_section(section, number)
    if document.warnings:
        yield "warnings", "Warnings", set_cautions(document.warnings, "Warning.", "warning")
    if document.environment:
        rows = "".join(f"<dt>{set_text(name)}</dt><dd>{set_text(value)}</dd>" for name, value in document.environment)
        folded = f"<details><summary>Hardware, software and command</summary><dl>{rows}</dl></details>\n"
        yield "environment", "Environment", folded


def set_findings(sentences: Sequence[str]) -> str:
    """The weightiest as a list, the rest folded (unless it is only one): figures stay close to the answer."""
    items = [f"<li>{set_words(sentence)}</li>" for sentence in sentences]
    num_shown = MOST_FINDINGS - 1 if len(items) > MOST_FINDINGS else len(items)
    shown, rest = items[:num_shown], items[num_shown:]
    more = f"<summary>{len(rest)} more findings</summary>"
    folded = f'<details>{more}<ul class="list">{"".join(rest)}</ul></details>\n' if rest else ""
    return f'<ul class="list">{"".join(shown)}</ul>\n{folded}'


def set_cautions(cautions: Sequence[Caution], sign: str, look: str) -> str:
    """What is wrong, each in a box with its next step."""
    return "".join(
        f'<div class="{look}"><p><span class="sign">{sign}</span> {set_words(caution.message)}</p>'
        f'<p class="next">→ {set_words(caution.next_step)}</p></div>\n'
        for caution in cautions
    )


def set_section(section: Section, number: int) -> str:
    split = map(section.split_question, section.paragraphs)
    words = "".join(
        f"<p>{f'<strong>{set_words(asked)}</strong>' if asked else ''}{set_words(rest)}</p>\n" for asked, rest in split
    )
    tables = "".join(set_table(table, table.title or section.heading or "table of results") for table in section.tables)
    return f"{words}{set_charts(section, number)}{tables}"


def set_downloads(document: Document, archive: Archive | None) -> str:
    """Links to what the page carries, and the data behind them."""
    table = render_csv(document).encode()
    stem = name_file(document.title)
    carried = [("tables", f"{stem}.csv", "text/csv", "every cell of every table", table)]
    words = "The document has every number of this page, raw and in base units, with its interval."
    if archive is not None:
        inside = f"plan, environment, samples and results in {archive.num_files} files"
        carried.insert(0, ("raw", archive.name, "application/zip", inside, archive.content))
        words += " Traces, logs and checkpoints stay with the run."
        if archive.left_out:
            words += f" Too large for this page: {list_some(archive.left_out, 5)}."
    links = f'<a class="button" href="#document" data-file="document" download="{stem}.json" type="application/json">'
    links += f"{stem}.json <small>the whole document</small></a>"
    blocks = ""
    for place, name, kind, what, content in carried:
        size = format_bytes(len(content))
        links += f'<a class="button" href="#data" data-file="{place}" download="{set_text(name)}" type="{kind}">'
        links += f"{set_text(name)} <small>{what}, {size}</small></a>"
        encoded = base64.b64encode(content).decode()
        blocks += f'<script type="application/octet-stream" id="{place}">{encoded}</script>\n'
    return (
        f'<section id="data"><h2>Raw data</h2>\n<div class="downloads">{links}</div>\n'
        f'<p class="files">{set_text(words)}</p>\n</section>\n{blocks}'
    )


def make_style(asset: str = "report.css") -> str:
    """A style sheet, with the colours of both themes."""
    light, dark = (make_variables(name, palette) for name, palette in (("light", LIGHT), ("dark", DARK)))
    rules = (
        f":root {{ --font: {FONT}; color-scheme: light; {light} }}",
        f':root[data-theme="dark"] {{ color-scheme: dark; {dark} }}',
        f"@media screen and (prefers-color-scheme: dark) {{ :root:not([data-theme]) {{ {dark} }} }}",
    )
    return "\n".join([*rules, read_asset(asset)])


def make_variables(name: str, palette: Palette) -> str:
    """The colours of a theme as the style sheet calls them."""
    other = DARK if name == "light" else LIGHT
    colours = {"background": palette.background, "text": palette.text, "quiet": palette.quiet, "line": palette.line}
    colours |= {"tip": palette.text if name == "light" else "#eef1f5", "tip-text": other.text, "tip-quiet": other.quiet}
    return " ".join(f"--{key}: {value};" for key, value in (colours | EXTRAS[name]).items())


def make_themes() -> dict[str, object]:
    """What the page's program needs to dress figures as `theme.apply_theme` does."""
    named = {"light": LIGHT, "dark": DARK}
    looks = {
        name: {"background": palette.background, "config": make_config(palette)} for name, palette in named.items()
    }
    return looks | {"beside": BESIDE, "sign": LEGEND_SIGN, "composed": list(COMPOSED)}


def make_policy(scripts: list[str], style: str) -> str:
    """What the page may do: run its own programs, and nothing else."""
    allowed = " ".join(f"'{hash_source(script)}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {allowed}; style-src '{hash_source(style)}'; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )


def hash_source(text: str) -> str:
    """A program or style sheet as a policy names it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def set_json(data: object) -> str:
    """Data inside a script element, which nothing in them can end."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def read_asset(name: str) -> str:
    return (files("scalelab.report") / "assets" / name).read_text(encoding="utf-8")


PACKAGE = "vl-convert-python"
SNIPPET = "window.vegaEmbed = vegaEmbed;"
NOTICE = (
    "/* Vega, Vega-Lite, vega-embed and what they are made of: (c) University of Washington Interactive Data Lab and"
    " contributors, BSD-3-Clause and other permissive licences; https://vega.github.io */"
)


def find_version() -> str:
    """The version of vl-convert that is installed."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        raise UsageError(
            "--html draws charts with vl-convert, which is not installed: pip install 'scalelab[report]', or use"
            " --markdown or --json, which need no extra package"
        ) from None


def load_script() -> str:
    """The program, as text for a script element; it sets `vegaEmbed` and keeps its other names to itself."""
    place = find_cache_directory() / f"vega-{find_version()}.js"
    return read_kept(place) or make_script(place)


def find_cache_directory() -> Path:
    """Where a user's programs keep what they can make again (XDG Base Directory Specification)."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    with contextlib.suppress(RuntimeError):  # no home directory
        chosen = chosen.expanduser()
    return chosen / "scalelab"


def read_kept(place: Path) -> str | None:
    """The text that was kept; None if there is none, or not the one that was written."""
    try:
        digest, _, script = place.read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return script if digest == f"// {hash_source(script)}" else None


def make_script(place: Path) -> str:
    """Have vl-convert bundle the program, and keep it where that is possible."""
    import vl_convert

    # A script element ends at the first </script, wherever that stands.
    bundled = vl_convert.javascript_bundle(SNIPPET).replace("</script", "<\\/script").replace("<!--", "<\\!--")
    script = f"{NOTICE}\n(function () {{\n{bundled}\n}})();\n"
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(place, f"// {hash_source(script)}\n{script}")
    return script

"""The timeline of a job as one page: every event, compressed, and the programs that draw it.

The page works without a network. Its numbers are those of `trace/timeline.py`; the names of kernels stand in it once.
"""

from __future__ import annotations

import base64
import zlib

from scalelab.answers.trace.view import TraceView
from scalelab.report.renderers.html import make_policy, make_style, read_asset, set_json, set_text
from scalelab.report.renderers.theme import DARK, EXTRAS, LIGHT
from scalelab.trace.timeline import SHOWN_KINDS, pack_job
from scalelab.units import format_count, format_seconds

COLOURS = {
    "compute": 0,
    "communication": 1,
    "copies": 2,
    "operator": 5,
    "launch": 7,
    "runtime": 6,
    "annotation": 3,
    "module": 4,
    "source": 2,
}
"""Places in the colours of a theme: of parts of device time, the same as in the charts of a report."""
SCRIPTS = ("timeline_data.js", "timeline.js", "timeline_input.js")
KEYS = (
    ("W S, + −, Ctrl + wheel", "zoom"),
    ("A D, ← →, drag, Shift + wheel", "move in time"),
    ("↑ ↓, wheel", "scroll ranks (the wheel zooms if all fit)"),
    ("0, Home", "show the whole job"),
    ("click", "keep an event; on a rank or thread: open or close it"),
    ("F, double-click", "zoom to the kept event, of a collective to all its ranks"),
    ("/, Enter, N, Shift + N", "search names; next and previous hit"),
    ("H", "show threads of the host"),
)


def render_timeline(view: TraceView) -> tuple[str, str]:
    """The page, and what it leaves out, in words."""
    packed = pack_job(view.job, view.events)
    data = base64.b64encode(zlib.compress(packed.pack(), 6)).decode()
    about, num_ranks = packed.about, len(view.ranks)
    title = f"{format_count(num_ranks, 'rank')} · {format_count(about['numEvents'], 'event')}"
    notes, left_out = [], ""
    if about["numDropped"]:
        longest = format_seconds(about["longestDropped"] * 1e-9)
        left_out = f", without {format_count(about['numDropped'], 'event')} of at most {longest}"
        notes.append(
            f"without {format_count(about['numDropped'], 'event')} of at most {longest}; --step shows fewer steps"
        )
    if about["numClocks"] > 1:
        notes.append(f"clocks of {about['numClocks']} sets of ranks are not aligned: each begins at 0")
    elif num_ranks > 1:
        notes.append(f"clocks aligned within {format_seconds((about['clockError'] or 0) * 1e-9)}")
    scripts = [read_asset(name) for name in SCRIPTS]
    style = make_style("timeline.css")
    palettes = {
        name: {
            "background": palette.background,
            "text": palette.text,
            "quiet": palette.quiet,
            "grid": palette.grid,
            "edge": EXTRAS[name]["edge"],
            "kinds": [palette.series[COLOURS[kind]] for kind in SHOWN_KINDS],
        }
        for name, palette in (("light", LIGHT), ("dark", DARK))
    }
    keys = "".join(f"<dt><kbd>{set_text(key)}</kbd></dt><dd>{set_text(words)}</dd>" for key, words in KEYS)
    body = f"""<header><h1>Timeline</h1><p>{set_text(" · ".join([title, *notes]))}</p><span class="space"></span>
<input id="search" type="search" placeholder="Search kernels and operators" aria-label="Search kernels and operators">
<span id="count" role="status"></span>
<button type="button" id="hosts" aria-pressed="false">Host threads</button>
<button type="button" id="all">Whole job</button><button type="button" id="keys">Keys</button></header>
<div class="legend" id="legend"></div>
<div id="stage">
<canvas id="canvas" tabindex="0" role="img" aria-label="{set_text(f"Timeline of {title}")}"></canvas></div>
<div id="details" role="status"></div><div id="tip"></div>
<dialog id="help"><h1>Keys and mouse</h1><dl>{keys}</dl><form method="dialog"><button>Close</button></form></dialog>
<script type="application/json" id="about">{set_json(about)}</script>
<script type="application/json" id="palettes">{set_json(palettes)}</script>
<script type="text/plain" id="data">{data}</script>
"""
    programs = "".join(f"<script>{script}</script>\n" for script in scripts)
    head = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{make_policy(scripts, style)}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Timeline: {set_text(title)}</title><style>{style}</style></head>\n"
    )
    return f"{head}<body>\n{body}{programs}</body></html>\n", left_out

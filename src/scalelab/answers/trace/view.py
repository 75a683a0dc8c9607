"""A job's traces, and the part of them that is shown: which steps, and how many rows."""

from __future__ import annotations

import base64
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import takewhile
from typing import NamedTuple

from scalelab.answers.trace.charts import Timeline, TimelineCounter
from scalelab.errors import UsageError
from scalelab.report.document import Cell
from scalelab.report.renderers.html import make_policy, make_style, read_asset, set_json, set_text
from scalelab.report.renderers.theme import DARK, EXTRAS, LIGHT
from scalelab.trace.attribution import Attribution, AttributionCounter
from scalelab.trace.collectives import Collective
from scalelab.trace.critical_path import CriticalCounter, StepRecords
from scalelab.trace.idle import LaneCounter, LaneTimes
from scalelab.trace.job_trace import JobTrace
from scalelab.trace.matching import Matching
from scalelab.trace.operators import KernelCounter, KernelTime, OperatorCounter, OperatorTime
from scalelab.trace.rank_time import Parts
from scalelab.trace.rank_trace import MakeCounter, RankTrace
from scalelab.trace.timeline import SHOWN_KINDS, EventCounter, RankEvents, pack_job
from scalelab.trace.waiting import JobArrivals, KindSummary, find_arrivals, select_steps, summarise_kinds
from scalelab.trace.windows import Steps
from scalelab.units import REST_HIDDEN, format_count, format_seconds, list_some

NS = 1e-9
LONGEST_NAME = 60
"""Longer names of kernels and operators are shortened."""
_PARAMETERS = re.compile(r"\([^()]*\)")


class Counted(NamedTuple):
    """What the counters found on one rank, in the order of `make_counters`."""

    kernels: Sequence[KernelTime]
    operators: Sequence[OperatorTime]
    lanes: LaneTimes
    timeline: Timeline
    attribution: Attribution
    critical: StepRecords


COUNTERS = (KernelCounter, OperatorCounter, LaneCounter, TimelineCounter, AttributionCounter, CriticalCounter)


def make_counters(steps: Steps, *, is_overview: bool = False, most_events: int = 0) -> list[MakeCounter]:
    """Everything read from a trace besides its breakdown and its collectives; events only if some are kept."""
    found: list[MakeCounter] = [] if is_overview else [partial(kind, steps=steps) for kind in COUNTERS]
    return [*found, partial(EventCounter, steps=steps, most=most_events)] if most_events else found


@dataclass(frozen=True, kw_only=True)
class TraceView:
    """The traces of a job, read with `make_counters`."""

    job: JobTrace
    steps: Steps = None
    """The steps that are shown; None: the whole traces."""
    top: int = 10
    """The most rows of a table of names, gaps, streams or steps."""
    has_charts: bool = True
    """Whether charts are drawn: a terminal shows none."""

    @property
    def ranks(self) -> dict[int, RankTrace]:
        return self.job.by_rank

    @property
    def has_device(self) -> bool:
        return any(trace.tables.has_device for trace in self.job.ranks)

    @property
    def lacks_device(self) -> bool:
        """Whether the job ran on a device whose work is in none of the traces."""
        return not self.has_device and any(trace.tables.missing_device for trace in self.job.ranks)

    @property
    def timed_ranks(self) -> dict[int, RankTrace]:
        """Those whose time is known: not the ones that lack their device."""
        return {rank: trace for rank, trace in self.ranks.items() if not trace.tables.missing_device}

    @cached_property
    def counted(self) -> dict[int, Counted]:
        found = {rank: trace.counted[: len(COUNTERS)] for rank, trace in self.ranks.items()}
        return {rank: Counted(*counted) for rank, counted in found.items() if len(counted) == len(COUNTERS)}

    @cached_property
    def events(self) -> dict[int, RankEvents]:
        """Those that were kept for a timeline, by rank."""
        every = {rank: trace.counted[-1] for rank, trace in self.ranks.items() if trace.counted}
        return {rank: last for rank, last in every.items() if isinstance(last, RankEvents)}

    @cached_property
    def matching(self) -> Matching | None:
        """The collectives that the ranks share and that begin in what is shown; None with one rank."""
        whole = self.job.matching
        return whole if whole is None or self.steps is None else select_steps(whole, self.ranks, self.steps)

    @cached_property
    def arrivals(self) -> JobArrivals | None:
        """Who waited for whom in these; None if there are none."""
        return find_arrivals(self.matching) if self.matching is not None and self.matching.num_matched else None

    def check(self) -> None:
        """Reject steps that no trace has."""
        known = {step.number for trace in self.job.ranks for step in trace.tables.steps}
        missing = sorted((self.steps or frozenset()) - known)
        if missing:
            listed = list_some(sorted(known), 20, REST_HIDDEN)
            raise UsageError(
                f"--step {missing[0]} is in no trace; the traces have {f'steps {listed}' if known else 'no steps'}"
            )

    def find_parts(self, trace: RankTrace) -> Parts:
        """A rank's time in parts: of its whole span, or of the chosen steps together."""
        if self.steps is None:
            return trace.breakdown.whole
        return sum((p for step, p in trace.breakdown.by_step.items() if step in self.steps), start=Parts())

    def list_steps(self, trace: RankTrace) -> dict[int, Parts]:
        return {step: p for step, p in trace.breakdown.by_step.items() if self.steps is None or step in self.steps}

    @cached_property
    def kinds(self) -> list[KindSummary]:
        """The collectives of all ranks in what is shown, by kind."""
        return summarise_kinds(self.list_collectives())

    def list_collectives(self) -> Iterator[Collective]:
        """Those of all ranks in what is shown."""
        for trace in self.job.ranks:
            for collective in trace.collectives:
                if self.steps is None or collective.step in self.steps:
                    yield collective


def add_kernels(view: TraceView) -> list[KernelTime]:
    """The kernels of all ranks together, the longest total first."""
    found: dict[tuple[str, str], KernelTime] = {}
    for counted in view.counted.values():
        for kernel in counted.kernels:
            key = (kernel.name, kernel.kind)
            known = found.get(key)
            found[key] = kernel if known is None else KernelTime(
                name=kernel.name,
                kind=kernel.kind,
                count=known.count + kernel.count,
                total_ns=known.total_ns + kernel.total_ns,
                longest_ns=max(known.longest_ns, kernel.longest_ns),
            )  # fmt: skip
    return sorted(found.values(), key=lambda kernel: (-kernel.total_ns, kernel.name))


def add_operators(view: TraceView) -> list[OperatorTime]:
    """The operators of all ranks together, the longest self time first."""
    found: dict[str, OperatorTime] = {}
    for counted in view.counted.values():
        for operator in counted.operators:
            known = found.get(operator.name)
            found[operator.name] = operator if known is None else OperatorTime(
                name=operator.name,
                count=known.count + operator.count,
                total_ns=known.total_ns + operator.total_ns,
                self_ns=known.self_ns + operator.self_ns,
                longest_ns=max(known.longest_ns, operator.longest_ns),
            )  # fmt: skip
    return sorted(found.values(), key=lambda operator: (-operator.self_ns, operator.name))


def shorten_names(names: Sequence[str], longest: int = LONGEST_NAME) -> list[str]:
    """Names that fit a table, without arguments; different names stay different where possible."""
    short = {name: _shorten(name, longest) for name in names}
    for cut in (_cut_middle, _show_difference, _show_difference):  # each tells more of them apart
        for text, count in Counter(short.values()).items():
            alike = [name for name in short if short[name] == text and len(name) > longest] if count > 1 else []
            same = takewhile(lambda letters: len(set(letters)) == 1, zip(*alike, strict=False))
            num_same = sum(1 for _ in same)
            short |= {name: cut(name, longest, num_same) for name in alike}
    return [short[name] for name in names]


def name_cells(names: Sequence[str], longest: int = LONGEST_NAME) -> dict[str, Cell]:
    """Cells with names that fit a table, by the whole name, which exports keep."""
    short = zip(names, shorten_names(names, longest), strict=True)
    return {name: Cell(value=shown, whole="" if shown == name else name) for name, shown in short}


def _shorten(name: str, longest: int) -> str:
    if len(name) <= longest:
        return name
    plain, before = name.removeprefix("void ").replace("(anonymous namespace)::", ""), ""
    while plain != before:
        before, plain = plain, _PARAMETERS.sub("", plain)
    plain = plain or name
    return plain if len(plain) <= longest else f"{plain[: longest - 1]}…"


def _cut_middle(name: str, longest: int, _: int) -> str:
    head = longest // 2
    return f"{name[:head]}…{name[head + 1 - longest :]}"


def _show_difference(name: str, longest: int, num_same: int) -> str:
    """The begin of a name, and what follows the first letters that it shares with others."""
    head = longest // 2
    start = min(max(head, num_same - 4), len(name) - (longest - head - 2))
    return f"{name[:head]}…{name[start : start + longest - head - 2]}…"


def divide(part: float, whole: float) -> float | None:
    """A share; None of nothing."""
    return part / whole if whole else None


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

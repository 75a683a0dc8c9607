"""What decides a step, and what it would take without: tables of the critical path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from scalelab.answers.trace.tables import note_more
from scalelab.answers.trace.view import NS, TraceView, divide, name_cells, shorten_names
from scalelab.report.document import Section, Table
from scalelab.report.findings import REASON, Finding, FindingKind
from scalelab.report.tables import count_column, make_table, seconds_column, share_column, text_column
from scalelab.trace.critical_path import EdgeLabel, PathPiece, StepPiece, StepRecords, StepTiming, build_graph
from scalelab.units import format_seconds, format_share

CRITICAL = FindingKind(
    "critical-path", "What the critical path of a step consists of", REASON, ("step", "seconds", "share", "saved_share")
)
MOST_NAMES = 3
"""Names on the path that are left out one at a time."""


@dataclass(frozen=True)
class RetimedStep:
    """A step without some of its pieces."""

    change: str
    span_ns: int


@dataclass(frozen=True)
class CriticalStep:
    """The critical path of one step."""

    step: int | None
    num_ranks: int
    span_ns: int
    path: Sequence[PathPiece]
    what_ifs: Sequence[RetimedStep] = ()
    without_main_ns: int | None = None
    """What the step takes if the main piece of its path takes no time; None: that piece is what nothing explains."""

    def sum_by_piece(self) -> dict[StepPiece, tuple[int, int]]:
        """Pieces and nanoseconds, the most first."""
        found: dict[StepPiece, tuple[int, int]] = {}
        for one in self.path:
            count, total = found.get(one.piece, (0, 0))
            found[one.piece] = (count + 1, total + one.nanoseconds)
        return dict(sorted(found.items(), key=lambda item: -item[1][1]))

    def sum_by_name(self) -> list[tuple[PathPiece, int]]:
        """Kernels and collectives by name, with their count."""
        found: dict[tuple[StepPiece, str], tuple[int, int]] = {}
        for one in self.path:
            if one.name:
                count, total = found.get((one.piece, one.name), (0, 0))
                found[one.piece, one.name] = (count + 1, total + one.nanoseconds)
        ordered = sorted(found.items(), key=lambda item: (-item[1][1], item[0]))
        return [(PathPiece(piece, name, total), count) for (piece, name), (count, total) in ordered]


def find_critical_step(view: TraceView) -> CriticalStep | None:
    """The middle step of what is shown, on all ranks with one clock; None: it is not in the traces, or too large."""
    steps = choose_ranks(view)
    if not steps:
        return None
    try:
        timing = StepTiming(build_graph(view.ranks, steps, view.job.matching))
    except ValueError:  # collectives of ranks that are paired crosswise
        return None
    number = next(iter(steps.values())).step
    found = CriticalStep(number, len(steps), timing.span_ns, timing.walk())
    main = next(iter(found.sum_by_piece()), StepPiece.OTHER)
    without = timing.measure_without(partial(_is_piece, (main,))) if main is not StepPiece.OTHER else None
    return replace(found, what_ifs=list(list_what_ifs(timing, found)), without_main_ns=without)


def choose_ranks(view: TraceView) -> dict[int, StepRecords]:
    """The steps of ranks whose clocks are aligned; of one rank alone, if the traces have no collective in common."""
    steps = {rank: counted.critical for rank, counted in view.counted.items()}
    known = {rank: step for rank, step in steps.items() if len(step.kernels) and step.is_whole}
    clocks = view.job.matching.clocks if view.job.matching is not None else {}
    references = [clocks[rank].reference for rank in known if rank in clocks]
    if not known:
        return {}
    first = min(known)
    main = max(references, key=references.count) if references else None
    chosen = {
        rank: step
        for rank, step in known.items()
        if main is not None and rank in clocks and clocks[rank].reference == main and step.step == known[first].step
    }
    return chosen or {first: known[first]}


def list_what_ifs(timing: StepTiming, step: CriticalStep) -> Iterator[RetimedStep]:
    """The step without a kind of piece, and without the longest names of its path."""
    pieces = step.sum_by_piece()
    changes: dict[str, Callable[[EdgeLabel], bool]] = {}
    if pieces.get(StepPiece.TRANSFER):
        changes["communication took no time"] = partial(_is_piece, (StepPiece.TRANSFER,))
    if pieces.get(StepPiece.HOST) or pieces.get(StepPiece.LAUNCH):
        changes["the host launched in no time"] = partial(_is_piece, (StepPiece.HOST, StepPiece.LAUNCH))
    if pieces.get(StepPiece.COPY):
        changes["copies took no time"] = partial(_is_piece, (StepPiece.COPY,))
    names = [one for one, _ in step.sum_by_name()[:MOST_NAMES]]
    for one, short in zip(names, shorten_names([one.name for one in names]), strict=True):
        changes[f"{short} took no time"] = partial(_is_name, one.piece, one.name)
    for change, is_free in changes.items():
        yield RetimedStep(change, timing.measure_without(is_free))


def _is_piece(pieces: tuple[StepPiece, ...], label: EdgeLabel) -> bool:
    return label.piece in pieces


def _is_name(piece: StepPiece, name: str, label: EdgeLabel) -> bool:
    return label.piece is piece and label.name == name


def make_critical_section(view: TraceView, step: CriticalStep | None) -> Section | None:
    """The path by kind and by name, and what the step would take."""
    if step is None or not step.span_ns:
        return None
    return Section(
        heading="Critical path", tables=(_make_pieces(step), *_make_names(view, step), *_make_what_ifs(step))
    )


def _name_step(step: CriticalStep) -> str:
    which = "the whole trace" if step.step is None else f"step {step.step}"
    return f"{which}, {step.num_ranks} rank{'s' if step.num_ranks > 1 else ''}"


def _make_pieces(step: CriticalStep) -> Table:
    return make_table(
        list(step.sum_by_piece().items()),
        text_column("piece", "piece", lambda row: str(row[0])),
        count_column("num_pieces", "pieces", lambda row: row[1][0]),
        seconds_column("path_seconds", "on the path", lambda row: row[1][1] * NS),
        share_column("path_share", "on the path / step", lambda row: divide(max(0, row[1][1]), step.span_ns)),
        title="Critical path",
        notes=(
            f"{_name_step(step)}: {format_seconds(step.span_ns * NS)} from its start to the end of its last kernel",
            "the pieces add up to it; communication: "
            + (
                "transfers, after the last rank has arrived"
                if step.num_ranks > 1
                else "waiting for other ranks included"
            ),
        ),
    )


def _make_names(view: TraceView, step: CriticalStep) -> Iterator[Table]:
    rows = step.sum_by_name()
    shown = rows[: view.top]
    names = name_cells([one.name for one, _ in shown])
    if shown:
        yield make_table(
            shown,
            text_column("name", "name", lambda row: names[row[0].name]),
            text_column("piece", "piece", lambda row: str(row[0].piece)),
            count_column("num_runs", "count", lambda row: row[1]),
            seconds_column("path_seconds", "on the path", lambda row: row[0].nanoseconds * NS),
            share_column("path_share", "on the path / step", lambda row: divide(row[0].nanoseconds, step.span_ns)),
            title="On the critical path",
            notes=tuple(note_more(len(rows), len(shown))),
        )


def _make_what_ifs(step: CriticalStep) -> Iterator[Table]:
    if step.what_ifs:
        yield make_table(
            step.what_ifs,
            text_column("change", "what if", lambda one: one.change),
            seconds_column("step_seconds", "the step takes", lambda one: one.span_ns * NS),
            share_column("saved_share", "saved / step", lambda one: max(0.0, 1 - one.span_ns / step.span_ns)),
            title="What if",
            notes=("the step re-timed; unexplained waits stay",),
        )


FEWEST_SAVED = 0.25
"""Of the main piece's share: if the step without that piece saves less, other chains are nearly as long."""


def summarise_critical(step: CriticalStep | None) -> Iterator[Finding]:
    """What most of the path is, and the largest change."""
    if step is None or not step.span_ns:
        return
    piece, (_, total) = next(iter(step.sum_by_piece().items()))
    best = min(step.what_ifs, key=lambda one: one.span_ns, default=None)
    saved = max(0.0, 1 - best.span_ns / step.span_ns) if best is not None else None
    share = min(1.0, total / step.span_ns)
    which = "the trace" if step.step is None else f"step {step.step}"
    without = f"; if {best.change}, the step would be {format_share(saved)} shorter" if best and saved else ""
    alone = 1 - step.without_main_ns / step.span_ns if step.without_main_ns is not None else share
    if alone < FEWEST_SAVED * share:
        without = (
            f", but other chains are nearly as long: without it, the step would be only {format_share(alone)} shorter"
        )
    yield CRITICAL(
        str(piece),
        f"The critical path of {which} is {format_share(share)} {piece}{without}.",
        step=step.step,
        seconds=step.span_ns * NS,
        share=share,
        saved_share=saved,
    )

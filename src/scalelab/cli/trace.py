"""`scalelab trace DIR|FILE…`: what profiler traces of a job show. `scalelab trace diff A B`: two of them compared.

What reads and describes is imported where it is used: half of the time of a small trace would go into it.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Optional

import tyro

from scalelab.checks import check_at_least, clean_text, find_unguarded
from scalelab.cli.flags import Integers, Patterns, Recordings, RunsDir, parse_flags
from scalelab.cli.output import Output, check_writable, write_outputs, write_target
from scalelab.data.remote import fetch_remote
from scalelab.errors import UsageError
from scalelab.records.files import RUNS_DIR
from scalelab.report.document import Document

if TYPE_CHECKING:
    from scalelab.answers.trace.view import TraceView

DIFF = "diff"
FEW_FILES = 8
"""Files that are read by one process unless --jobs says otherwise."""
MOST_IN_FULL = 64
"""Ranks whose kernels, operators and streams are listed."""
TRACE_ENDINGS = (".json", ".json.gz", ".sqlite")
"""Of what is fetched from a directory elsewhere."""
NS_PER_TICK = {"us": 1000, "ns": 1}
TRACES, OUTPUT = "Traces", "Output"
"""Titles in the help. Without them, tyro parses the source of both classes at every start."""


@dataclass(frozen=True, kw_only=True)
class TraceFlags:
    """What to read from the files, and what to show."""

    rank: Integers = ()
    """Only these ranks."""
    step: Integers = ()
    """Only these steps of the profiler."""
    communication: Patterns = ()
    """Also count kernels whose name matches one of these as communication."""
    compute: Patterns = ()
    """Count kernels whose name matches one of these as compute, though they look like communication."""
    time_unit: Literal["us", "ns"] = "us"
    """Time unit of the files; Kineto writes microseconds."""
    top: int = 10
    """Maximum rows in tables of names, gaps, streams and steps."""
    jobs: int = 0
    """Processes that read the files; 0: one per core for more than 8 files, else one."""
    dask: Annotated[Optional[str], tyro.conf.arg(metavar="ADDRESS")] = None  # noqa: UP045 - as in output.py
    """Read the files on the Dask scheduler at this address, such as tcp://host:8786, whose workers see them. local: on
    --jobs workers of this machine."""

    def check(self) -> None:
        """Reject invalid flags before anything is read."""
        check_at_least("top", self.top, 1)
        check_at_least("jobs", self.jobs, 0)
        for flag in ("communication", "compute"):
            for pattern in getattr(self, flag):
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise UsageError(f"--{flag} {pattern!r} is not a valid regular expression: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Read profiler traces of a job: exposed communication, stragglers, kernels, operators, idle time. To compare two:
    scalelab trace diff A B"""

    paths: Annotated[Recordings, tyro.conf.arg(name="paths", metavar="DIR|FILE|RUN…"), tyro.conf.Positional]
    """Trace files of torch.profiler (.json, .json.gz) or exports of nsys (.sqlite), one per rank, or a directory of
    them; dumps of torch's flight recorder; or a run such as last, of which the traced trial with the most ranks is
    read. Addresses such as s3://… and https://… are fetched."""
    reading: Annotated[TraceFlags, tyro.conf.arg(help=TRACES)] = field(default_factory=TraceFlags)
    overview: bool = False
    """The job as a whole: stragglers by rank, host, rail, stage and link, and the step without them. On for more than
    64 ranks, whose other tables would not fit; --rank shows some of them in full."""
    merged: Annotated[Optional[Path], tyro.conf.arg(metavar="FILE")] = None  # noqa: UP045 - as in output.py
    """Also write all ranks into one trace for Perfetto (.json, .json.gz): a process per rank, clocks aligned, arrows
    from the last rank of a collective to those that wait."""
    timeline: Annotated[Optional[Path], tyro.conf.arg(metavar="FILE")] = None  # noqa: UP045
    """Also write a page (.html) with every event on one clock, which zooms from the job to the kernel and joins
    collectives across ranks."""
    hta: bool = False
    """Only the temporal breakdown and overlap, by the definitions of HolisticTraceAnalysis."""
    runs_dir: RunsDir = RUNS_DIR
    output: Annotated[Output, tyro.conf.arg(help=OUTPUT)] = field(default_factory=Output)

    def check(self) -> None:
        """Reject invalid flags before anything is read."""
        self.output.check()
        self.reading.check()
        if not self.paths:
            raise UsageError("give trace files or a directory before the flags: scalelab trace DIR --rank 0")
        for flag, path in (("--merged", self.merged), ("--timeline", self.timeline)):
            if path is not None and self.hta:
                raise UsageError(f"{flag} cannot be used with --hta")
            if path is not None:
                check_writable(path, flag)
        for name in ("step", "communication", "compute", "time-unit", "dask") if self.hta else ():
            field_name = name.replace("-", "_")
            if getattr(self.reading, field_name) != getattr(TraceFlags(), field_name):
                raise UsageError(f"--{name} cannot be used with --hta")


@dataclass(frozen=True, kw_only=True)
class TraceDiff:
    """Compare two traces: kernels and operators that were added, removed, slower or faster."""

    a: Annotated[Path, tyro.conf.arg(name="a", metavar="A"), tyro.conf.Positional]
    """Baseline: a trace file, or a directory of them."""
    b: Annotated[Path, tyro.conf.arg(name="b", metavar="B"), tyro.conf.Positional]
    """Trace to compare with the baseline."""
    reading: Annotated[TraceFlags, tyro.conf.arg(help=TRACES)] = field(default_factory=TraceFlags)
    output: Annotated[Output, tyro.conf.arg(help=OUTPUT)] = field(default_factory=Output)


def main(args: Sequence[str]) -> int:
    if args and args[0] == DIFF:
        return main_diff(args[1:])
    wanted = parse_flags(Trace, args, "trace")
    wanted.check()
    if "numpy" not in sys.modules:  # traces need no BLAS, and a process without its threads can be forked
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if not wanted.hta:
        freeze_modules()
    with fetch_remote(wanted.paths, TRACE_ENDINGS) as paths:
        document, view = describe_recordings(replace(wanted, paths=paths), has_charts=bool(wanted.output.wanted))
        write_outputs(document, wanted.output)
        if wanted.merged is not None and view is not None:
            merge_files(view, wanted.merged, wanted.reading)
        if wanted.timeline is not None and view is not None:
            draw_timeline(view, wanted.timeline)
    return 0


def freeze_modules() -> None:
    """Load what reads and describes, and let the collector leave it alone: going through it again and again takes a
    tenth of the time of a report. Only for a process that answers one question and ends."""
    import scalelab.answers.trace.report
    import scalelab.answers.trace.view  # noqa: F401

    gc.freeze()


def describe_recordings(wanted: Trace, *, has_charts: bool = True) -> tuple[Document, TraceView | None]:
    """The answer, and what was read for it; of dumps, and by HTA's definitions, nothing is kept."""
    paths = [find_recording(path, wanted.runs_dir) for path in wanted.paths]
    flight = read_flight(paths)
    if flight is not None:
        for flag, path in (("--merged", wanted.merged), ("--timeline", wanted.timeline)):
            if path is not None:
                raise UsageError(f"{flag} needs profiler traces: dumps of the flight recorder have no kernels")
        return flight, None
    files = choose_files(paths, wanted.reading)
    if wanted.hta:
        return read_as_hta(files), None
    is_overview = wanted.overview or len(files) > MOST_IN_FULL
    has_events = wanted.timeline is not None
    view = read_view(files, wanted.reading, is_overview=is_overview, has_charts=has_charts, has_events=has_events)
    return describe_view(view, is_overview=is_overview), view


def merge_files(view: TraceView, path: Path, reading: TraceFlags) -> None:
    """Write the merged trace."""
    from scalelab.trace.merged import write_merged

    num_dropped = write_merged(view.job, path, ns_per_tick=NS_PER_TICK[reading.time_unit])
    left_out = f", without {num_dropped} events that have no time" if num_dropped else ""
    print(f"Wrote {path}{left_out}: open it in https://ui.perfetto.dev", file=sys.stderr)  # noqa: T201


def draw_timeline(view: TraceView, path: Path) -> None:
    """Write the page of all events."""
    from scalelab.answers.trace.view import render_timeline

    page, note = render_timeline(view)
    write_target(path, page, "--timeline")
    print(f"Wrote {path}{note}: open it in a browser", file=sys.stderr)  # noqa: T201


def main_diff(args: Sequence[str]) -> int:
    from scalelab.answers.trace.diff import compare_traces

    wanted = parse_flags(TraceDiff, args, f"trace {DIFF}")
    wanted.output.check()
    wanted.reading.check()
    sides = [read_view(choose_files([path], wanted.reading), wanted.reading) for path in (wanted.a, wanted.b)]
    write_outputs(compare_traces(sides[0], sides[1], (str(wanted.a), str(wanted.b))), wanted.output)
    return 0


def read_flight(paths: Sequence[Path]) -> Document | None:
    """What dumps of torch's flight recorder show; None: the paths lead to something else."""
    from scalelab.trace.files.flight import find_dumps, read_dumps

    dumps = find_dumps(paths)
    if not dumps:
        return None
    from scalelab.answers.trace.flight import describe_flight

    return describe_flight(read_dumps(dumps))


def find_recording(path: Path, runs_dir: Path) -> Path:
    """The path; where it is the name of a run, the directory of its traced trial with the most ranks."""
    if path.exists() or len(path.parts) != 1:
        return path
    from scalelab.records.store import open_run

    try:
        store = open_run(str(path), runs_dir)
    except UsageError:
        return path
    traced = [trial for trial in store.trials() if (store.trial_directory(trial.name) / "trace").is_dir()]
    if not traced:
        raise UsageError(f"{store.name} has no traces: run it with --profile-steps 3")
    chosen = max(traced, key=lambda trial: (trial.num_ranks, -trial.round))
    if len(traced) > 1:
        print(f"reading {chosen.name} of {store.name}, one of {len(traced)} traced trials", file=sys.stderr)  # noqa: T201
    return store.trial_directory(chosen.name)


def choose_files(paths: Sequence[Path], reading: TraceFlags) -> list[Path]:
    """The files to read; with --rank, chosen by the header of each file."""
    from scalelab.trace.files.reader import find_trace_files, peek_rank

    files = find_trace_files(paths)
    if not reading.rank:
        return files
    ranks = {file: peek_rank(file) for file in files}
    missing = sorted(set(reading.rank) - set(ranks.values()))
    if missing:
        known = ", ".join(map(str, sorted({rank for rank in ranks.values() if rank is not None}))) or "none"
        raise UsageError(f"--rank {missing[0]} has no trace here; ranks with a trace: {known}")
    return [file for file in files if ranks[file] in reading.rank]


def describe_view(view: TraceView, *, is_overview: bool) -> Document:
    """Everything that the files show, or the job as a whole."""
    if is_overview:
        from scalelab.answers.trace.overview import describe_fleet

        return describe_fleet(view)
    from scalelab.answers.trace.report import describe_traces

    return describe_traces(view)


def read_view(
    files: Sequence[Path],
    reading: TraceFlags,
    *,
    is_overview: bool = False,
    has_charts: bool = True,
    has_events: bool = False,
) -> TraceView:
    """Read every file; for an overview only what is compared between ranks is kept."""
    from scalelab.answers.trace.view import TraceView, make_counters
    from scalelab.trace.job_trace import read_ranks
    from scalelab.trace.timeline import MOST_EVENTS

    most_events = MOST_EVENTS // max(1, len(files)) if has_events else 0
    steps = frozenset(reading.step) or None
    job = read_ranks(
        files,
        ns_per_tick=NS_PER_TICK[reading.time_unit],
        communication=reading.communication,
        compute=reading.compute,
        counters=make_counters(steps, is_overview=is_overview, most_events=most_events),
        num_processes=reading.jobs
        or (len(os.sched_getaffinity(0)) if len(files) > FEW_FILES or reading.dask is not None else 1),
        dask=reading.dask,
        say=lambda file, number: say_progress(file, number, len(files)),
    )
    view = TraceView(job=job, steps=steps, top=reading.top, has_charts=has_charts)
    view.check()
    return view


def read_as_hta(files: Sequence[Path]) -> Document:
    """The same files by the definitions of HolisticTraceAnalysis."""
    from scalelab.answers.trace.hta import describe_hta
    from scalelab.trace.files.reader import number_ranks, peek_rank
    from scalelab.trace.hta import read_hta

    ranks = number_ranks([(file, peek_rank(file)) for file in files])
    found = {}
    for number, (rank, file) in enumerate(zip(ranks, files, strict=True), start=1):
        say_progress(file, number, len(files))
        found[rank] = read_hta(file)
    return describe_hta(dict(sorted(found.items())))


def say_progress(file: Path, number: int, num_files: int) -> None:
    """Which of several files is being read, on a terminal."""
    if num_files > 1 and sys.stderr.isatty():
        end = "\n" if number == num_files else "\r"
        words = f"\x1b[2Kreading {clean_text(file.name)}, {number} of {num_files}"
        print(words, end=end, file=find_unguarded(sys.stderr), flush=True)

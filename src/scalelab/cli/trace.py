"""`scalelab trace DIR|FILE…`: what the traces of a job say. `scalelab trace diff A B`: two of them side by side."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from scalelab.answers.trace.diff import compare_traces, describe_hta
from scalelab.answers.trace.report import describe_traces
from scalelab.answers.trace.view import TraceView, make_counters
from scalelab.checks import check_at_least
from scalelab.cli.flags import parse_flags
from scalelab.cli.output import Output, write_outputs
from scalelab.errors import UsageError
from scalelab.report.document import Document
from scalelab.trace.hta import read_hta
from scalelab.trace.rank import peek_rank, read_rank
from scalelab.trace.ranks import combine_ranks, find_trace_files, number_ranks

DIFF = "diff"
NS_PER_TICK = {"us": 1000, "ns": 1}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How trace files are read, and what of them is shown."""

    rank: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N…")] = ()
    """Only these ranks."""
    step: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N…")] = ()
    """Only these steps of the profiler."""
    communication: Annotated[tuple[str, ...], tyro.conf.arg(metavar="REGEX…")] = ()
    """Kernels whose name matches one of these are communication too."""
    time_unit: Literal["us", "ns"] = "us"
    """The unit of the files' times: Kineto writes microseconds."""
    top: int = 10
    """The most rows of a table of names, gaps, streams or steps."""

    def check(self) -> None:
        """Refuse what cannot work before anything is read."""
        check_at_least("top", self.top, 1)
        for pattern in self.communication:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UsageError(f"--communication {pattern!r} is no regular expression: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What the traces of a job say: communication, who waits for whom, kernels, operators, idle time. What differs
    between two traces: scalelab trace diff A B"""

    paths: Annotated[tuple[Path, ...], tyro.conf.arg(name="paths", metavar="DIR|FILE…"), tyro.conf.Positional]
    """Trace files of torch's profiler (.json, .json.gz), one per rank, or a directory of them, such as a trial's."""
    reading: Reading = field(default_factory=Reading)
    hta: bool = False
    """Only the temporal breakdown and overlap of HolisticTraceAnalysis, by its definitions."""
    output: Output = field(default_factory=Output)

    def check(self) -> None:
        """Refuse what cannot work before anything is read."""
        self.output.check()
        self.reading.check()
        if not self.paths:
            raise UsageError("name a trace file, or a directory of them, before the flags: scalelab trace DIR --rank 0")
        for name in ("step", "communication", "time-unit") if self.hta else ():
            field_name = name.replace("-", "_")
            if getattr(self.reading, field_name) != getattr(Reading(), field_name):
                raise UsageError(f"--{name} has no meaning with --hta, which has rules of its own: leave it out")


@dataclass(frozen=True, kw_only=True)
class TraceDiff:
    """Two traces side by side: operators and kernels that were added, removed, or became slower or faster."""

    a: Annotated[Path, tyro.conf.arg(name="a", metavar="A"), tyro.conf.Positional]
    """What to compare with: a trace file, or a directory of them."""
    b: Annotated[Path, tyro.conf.arg(name="b", metavar="B"), tyro.conf.Positional]
    """What is in question."""
    reading: Reading = field(default_factory=Reading)
    output: Output = field(default_factory=Output)


def main(args: Sequence[str]) -> int:
    if args and args[0] == DIFF:
        return main_diff(args[1:])
    wanted = parse_flags(Trace, args, "trace")
    wanted.check()
    files = choose_files(wanted.paths, wanted.reading)
    document = read_as_hta(files) if wanted.hta else describe_traces(read_view(files, wanted.reading))
    write_outputs(document, wanted.output)
    return 0


def main_diff(args: Sequence[str]) -> int:
    wanted = parse_flags(TraceDiff, args, f"trace {DIFF}")
    wanted.output.check()
    wanted.reading.check()
    sides = [read_view(choose_files([path], wanted.reading), wanted.reading) for path in (wanted.a, wanted.b)]
    write_outputs(compare_traces(sides[0], sides[1], (str(wanted.a), str(wanted.b))), wanted.output)
    return 0


def choose_files(paths: Sequence[Path], reading: Reading) -> list[Path]:
    """The files to read; of the ranks that were asked for, by what the beginning of each file says."""
    files = find_trace_files(paths)
    if not reading.rank:
        return files
    ranks = {file: peek_rank(file) for file in files}
    missing = sorted(set(reading.rank) - set(ranks.values()))
    if missing:
        known = ", ".join(map(str, sorted({rank for rank in ranks.values() if rank is not None}))) or "no rank"
        raise UsageError(f"--rank {missing[0]} has no trace here: there are those of {known}")
    return [file for file in files if ranks[file] in reading.rank]


def read_view(files: Sequence[Path], reading: Reading) -> TraceView:
    """Read every file, one after the other."""
    steps = frozenset(reading.step) or None
    traces = []
    for number, file in enumerate(files, start=1):
        say_progress(file, number, len(files))
        traces.append(
            read_rank(
                file,
                ns_per_tick=NS_PER_TICK[reading.time_unit],
                communication=reading.communication,
                counters=make_counters(steps),
            )
        )
    view = TraceView(job=combine_ranks(traces), steps=steps, top=reading.top)
    view.check()
    return view


def read_as_hta(files: Sequence[Path]) -> Document:
    """The same files by the definitions of HolisticTraceAnalysis."""
    ranks = number_ranks([(file, peek_rank(file)) for file in files])
    found = {}
    for number, (rank, file) in enumerate(zip(ranks, files, strict=True), start=1):
        say_progress(file, number, len(files))
        found[rank] = read_hta(file)
    return describe_hta(dict(sorted(found.items())))


def say_progress(file: Path, number: int, num_files: int) -> None:
    """Which file is being read, where somebody looks and there are several."""
    if num_files > 1 and sys.stderr.isatty():
        end = "\n" if number == num_files else "\r"
        print(f"\x1b[2Kreading {file.name}, {number} of {num_files}", end=end, file=sys.stderr, flush=True)  # noqa: T201

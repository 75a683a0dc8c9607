"""Where a document goes: the terminal, or files and standard output in other formats."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from scalelab.cli.console import OutputConsole
from scalelab.errors import NotWritable, UsageError
from scalelab.files import storage_errors, write_atomically
from scalelab.report.document import Document
from scalelab.report.exports import render_csv, render_json
from scalelab.report.markdown import render_markdown
from scalelab.report.terminal import render_terminal

Target = Annotated[str | None, tyro.conf.arg(metavar="PATH|-")]
RunsDir = Annotated[Path, tyro.conf.arg(name="runs-dir", help="Where runs are kept.")]


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where the answer goes besides the terminal: a path, or - for standard output instead of the terminal's table."""

    markdown: Target = None
    """Markdown, for a pull request."""
    json: Target = None
    """JSON: the whole document with raw numbers."""
    csv: Target = None
    """CSV: every cell of every table with its interval, one per line."""

    @property
    def wanted(self) -> dict[str, tuple[str, Callable[[Document], str]]]:
        """The formats asked for: target and renderer by flag."""
        every = {
            "--markdown": (self.markdown, render_markdown),
            "--json": (self.json, render_json),
            "--csv": (self.csv, render_csv),
        }
        return {flag: (target, render) for flag, (target, render) in every.items() if target is not None}

    @property
    def takes_stdout(self) -> bool:
        """Whether a format takes the place of the terminal's table."""
        return any(target == "-" for target, _ in self.wanted.values())

    def check(self) -> None:
        """Refuse, before anything is measured, targets that cannot be written."""
        targets = [target for target, _ in self.wanted.values()]
        if targets.count("-") > 1:
            raise UsageError("only one of --markdown, --json and --csv can go to standard output (-)")
        for flag, (target, _) in self.wanted.items():
            if target != "-" and Path(target).is_dir():
                raise UsageError(f"{flag} {target} is a directory: give the name of a file in it")
            if target != "-":
                check_writable(Path(target), flag)


def write_outputs(document: Document, output: Output) -> None:
    """Print the document, unless a format goes to standard output, and write the files asked for."""
    to_stdout = [render for target, render in output.wanted.values() if target == "-"]
    if to_stdout:
        sys.stdout.write(to_stdout[0](document))
    else:
        render_terminal(document, OutputConsole())
    for flag, (target, render) in output.wanted.items():
        if target != "-":
            write_target(Path(target), render(document), flag)
            print(f"Wrote {target}", file=sys.stderr)  # noqa: T201


def write_target(path: Path, text: str, flag: str) -> None:
    """Write a file whole or not at all; what is no ordinary file, such as a pipe or a device, is written into."""
    place = path.resolve()
    with storage_errors(path, flag):
        if place.exists() and not place.is_file():
            with place.open("w", encoding="utf-8") as stream:
                stream.write(text)
        else:
            write_atomically(place, text)


def check_writable(path: Path, flag: str) -> None:
    """Refuse a target before anything is measured for it."""
    if path.exists() and not os.access(path, os.W_OK):
        raise NotWritable(f"{flag} {path} cannot be written: choose another place")
    if not path.exists() or path.is_file():
        with storage_errors(path, flag):
            path.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path.resolve().parent).close()

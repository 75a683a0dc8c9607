"""Where a document goes: the terminal, or files and standard output in other formats."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Optional

import tyro

from scalelab.checks import find_unguarded
from scalelab.errors import NotWritable, UsageError
from scalelab.records.files import storage_errors, write_atomically
from scalelab.report.document import Document
from scalelab.units import format_count

Target = Annotated[Optional[str], tyro.conf.arg(metavar="PATH|-")]  # noqa: UP045 - tyro imports typeguard for str | None
Renderer = Callable[[Document, Sequence[Path]], str | bytes]
"""From a document and the directories of its runs to a file."""
NEEDED = {"--html": ("vl_convert",), "--pdf": ("vl_convert", "typst")}
"""Packages that are not installed with scalelab itself."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where the answer goes besides the terminal: a path, or - for standard output."""

    html: Target = None
    """Self-contained HTML file with interactive charts."""
    pdf: Target = None
    """PDF report."""
    brief: bool = False
    """A short PDF, at most two pages for a recipe: answers and the main tables."""
    markdown: Target = None
    """Markdown for a pull request, with its charts as pictures beside it."""
    json: Target = None
    """JSON document with raw numbers, findings and warnings."""
    csv: Target = None
    """CSV: one line per cell of every table, with its interval."""
    full: bool = False
    """Print every table, finding and warning instead of one screen."""

    @property
    def wanted(self) -> dict[str, tuple[str, Renderer]]:
        """The requested formats: target and renderer by flag."""
        if not any((self.html, self.pdf, self.markdown, self.json, self.csv)):
            return {}
        from scalelab.report.document import render_json
        from scalelab.report.renderers.csv_table import render_csv
        from scalelab.report.renderers.markdown import render_markdown

        every: dict[str, tuple[str | None, Renderer]] = {
            "--html": (self.html, make_page),
            "--pdf": (self.pdf, partial(make_pdf, is_brief=self.brief)),
            "--markdown": (self.markdown, lambda document, _: render_markdown(document)),
            "--json": (self.json, lambda document, _: render_json(document)),
            "--csv": (self.csv, lambda document, _: render_csv(document)),
        }
        return {flag: (target, render) for flag, (target, render) in every.items() if target is not None}

    @property
    def takes_stdout(self) -> bool:
        """Whether a format goes to standard output instead of the terminal's answer."""
        return any(target == "-" for target, _ in self.wanted.values())

    def check(self) -> None:
        """Reject targets that cannot be written before anything is measured."""
        targets = [target for target, _ in self.wanted.values()]
        if self.brief and self.pdf is None:
            raise UsageError("--brief makes the PDF short: use it with --pdf PATH")
        if targets.count("-") > 1:
            raise UsageError("only one of --html, --pdf, --markdown, --json and --csv can go to standard output (-)")
        for flag, (target, _) in self.wanted.items():
            check_installed(flag)
            if target != "-" and Path(target).is_dir():
                raise UsageError(f"{flag} {target} is a directory: use the name of a file in it")
            if target != "-":
                check_writable(Path(target), flag)


def check_installed(flag: str) -> None:
    """Reject a format whose packages are missing."""
    missing = [name for name in NEEDED.get(flag, ()) if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{flag} needs {' and '.join(missing)}, which is not installed: pip install 'scalelab[report]',"
            " or use --markdown or --json"
        )


def make_page(document: Document, runs: Sequence[Path]) -> str:
    """The document as an HTML page with the raw files of its runs; its renderer is imported on first use."""
    from scalelab.records.files import pack_runs
    from scalelab.report.renderers.html import render_html

    return render_html(document, archive=pack_runs(runs) if runs else None)


def make_pdf(document: Document, runs: Sequence[Path], *, is_brief: bool = False) -> bytes:  # noqa: ARG001
    from scalelab.report.renderers.pdf import render_pdf

    return render_pdf(document, is_brief=is_brief)


def write_outputs(document: Document, output: Output, runs: Sequence[Path] = ()) -> None:
    """Print the document, unless a format goes to standard output, and write the requested files."""
    if not output.takes_stdout:
        from scalelab.report.renderers.terminal import find_width, render_terminal, takes_styles  # --help needs none

        is_styled = takes_styles(sys.stdout)
        find_unguarded(sys.stdout).write(
            render_terminal(document, find_width(), is_full=output.full, is_styled=is_styled)
        )
    write_formats(document, output, runs)


def write_formats(document: Document, output: Output, runs: Sequence[Path] = ()) -> None:
    """Write the requested files, and what goes to standard output."""
    if not output.wanted:
        return
    from scalelab.report.renderers.markdown import render_markdown

    for flag, (target, render) in output.wanted.items():
        if target == "-":
            write_stdout(render(document, runs))
            continue
        pictures = draw_beside(document, Path(target)) if flag == "--markdown" else []
        made = render_markdown(document, pictures) if pictures else render(document, runs)
        write_target(Path(target), made, flag)
        beside = f" and {format_count(len(pictures), 'picture')} beside it" if pictures else ""
        print(f"Wrote {target}{beside}", file=sys.stderr)  # noqa: T201


def draw_beside(document: Document, page: Path) -> list[str]:
    """Write the charts as pictures beside a Markdown page; returns their names, none if vl_convert is missing."""
    has_charts = any(section.charts for section in document.sections)
    if not has_charts or find_spec("vl_convert") is None:
        return []
    from scalelab.report.renderers.pictures import draw_pictures

    pictures = draw_pictures(document, page.stem)
    for name, picture in pictures.items():
        write_target(page.with_name(name), picture, "--markdown")
    return list(pictures)


def write_stdout(made: str | bytes) -> None:
    if isinstance(made, str):
        find_unguarded(sys.stdout).write(made)  # a renderer spells what a terminal would obey
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(made)


def write_target(path: Path, made: str | bytes, flag: str) -> None:
    """Write a file atomically; a pipe or a device is opened and written to."""
    place = path.resolve()
    with storage_errors(path, flag):
        if place.exists() and not place.is_file():
            with place.open("wb") as stream:
                stream.write(made.encode("utf-8", "replace") if isinstance(made, str) else made)
        else:
            write_atomically(place, made)


def check_writable(path: Path, flag: str) -> None:
    """Reject a target before anything is measured."""
    if path.exists() and not os.access(path, os.W_OK):
        raise NotWritable(f"{flag} {path} is not writable: use another path")
    if not path.exists() or path.is_file():
        with storage_errors(path, flag):
            path.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path.resolve().parent).close()


def fill_notebook(file: Path) -> None:
    """Execute a notebook, so that it has its outputs; where that is impossible, print why."""
    from scalelab.recipes.recipe import execute_notebook

    print(f"Executing {file.name}", file=sys.stderr)  # noqa: T201
    if obstacle := execute_notebook(file):
        print(obstacle, file=sys.stderr)  # noqa: T201

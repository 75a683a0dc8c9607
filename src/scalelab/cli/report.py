"""`scalelab report RUN…`: a report to share: HTML, PDF, Markdown with pictures, a bundle.

The document is recomputed from the raw samples, so that an old run gets the charts and sentences of this version.
Several runs are compared, each with the first. Nothing here imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from scalelab.answers.comparison import describe_runs
from scalelab.cli.flags import RunsDir, parse_flags
from scalelab.cli.output import Output, check_installed, make_page, make_pdf, write_formats, write_target
from scalelab.errors import UsageError
from scalelab.records.store import RUNS_DIR, RunStore, open_run
from scalelab.report.document import Document

MOST_LETTERS = 100
"""Letters of a run's name in a file name."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write a report of one run, or a comparison of several, to share; HTML by default."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = ("last",)
    """Names, unique prefixes or paths of runs, or last; each is compared with the first."""
    runs_dir: RunsDir = RUNS_DIR
    bundle: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """New directory with the report, the raw data and a script that repeats the measurement."""
    output: Output = field(default_factory=Output)


def main(args: Sequence[str]) -> int:
    report = parse_flags(Report, args, "report")
    stores = open_runs(report)
    output = choose_output(report, stores)
    output.check()
    if output.markdown not in (None, "-"):
        check_installed("--html")  # its pictures are the point here
    if report.bundle is not None:
        from scalelab.export.bundle import check_bundle

        check_bundle(report.bundle)
        check_installed("--pdf")
    document = describe_runs(stores)
    write_formats(document, output, [store.path for store in stores])
    if report.bundle is not None:
        fill_bundle(report.bundle, document, stores)
    return 0


def open_runs(report: Report) -> list[RunStore]:
    """The runs; a run given twice is refused."""
    stores = [open_run(name, report.runs_dir) for name in report.runs]
    places = [store.path.resolve() for store in stores]
    for number, place in enumerate(places):
        if place in places[:number]:
            raise UsageError(f"{report.runs[number]} is {place.name}, which is already listed: give every run once")
    if not stores:
        raise UsageError("give at least one run: scalelab report last")
    return stores


def choose_output(report: Report, stores: Sequence[RunStore]) -> Output:
    """The requested formats; without any, an HTML page in the working directory."""
    if report.output.wanted or report.bundle is not None:
        return report.output
    name = stores[0].name if len(stores) == 1 else "comparison"
    return replace(report.output, html=f"{name[:MOST_LETTERS]}.html")


def fill_bundle(directory: Path, document: Document, stores: Sequence[RunStore]) -> None:
    """The raw data and the script, with the HTML and PDF reports."""
    from scalelab.export.bundle import write_bundle

    write_bundle(directory, stores, ["report.html", "report.pdf"])
    runs = [store.path for store in stores]
    write_target(directory / "report.html", make_page(document, runs), "--bundle")
    write_target(directory / "report.pdf", make_pdf(document, runs), "--bundle")
    print(f"Wrote {directory}", file=sys.stderr)  # noqa: T201

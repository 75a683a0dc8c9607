"""`scalelab show`: print the answer of a run again; `scalelab report RUN…`: HTML, PDF, Markdown or a bundle to share.

`show` prints the stored document. `report` recomputes it from the raw samples, so that an old run gets the charts and
sentences of this version; several runs are compared, each with the first. Nothing here imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from scalelab.cli.flags import RunsDir, parse_flags
from scalelab.cli.output import (
    Output,
    check_installed,
    fill_notebook,
    make_page,
    make_pdf,
    write_formats,
    write_outputs,
    write_target,
)
from scalelab.errors import UsageError
from scalelab.records.store import RUNS_DIR, RunStore, without_collector
from scalelab.report.document import Document
from scalelab.runs.pool import open_run_or_pool
from scalelab.studies.catalogue import read_answer

MOST_LETTERS = 100
"""Letters of a run's name in a file name."""


@dataclass(frozen=True, kw_only=True)
class Show:
    """Print the answer of a run again, in any format."""

    run: Annotated[str, tyro.conf.Positional] = "last"
    """Name, unique prefix or path of a run, or last."""
    runs_dir: RunsDir = RUNS_DIR
    refresh: bool = False
    """Recompute the answer from the raw samples."""
    output: Output = field(default_factory=Output)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write a report of one run, or a comparison of several, to share; HTML by default."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN…")] = ("last",)
    """Names, unique prefixes or paths of runs, or last; each is compared with the first."""
    runs_dir: RunsDir = RUNS_DIR
    bundle: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """New directory with the report, the raw data and a script that repeats the measurement."""
    output: Output = field(default_factory=Output)


def main(args: Sequence[str]) -> int:
    """`show` or `report`, as the first word says."""
    verb, *rest = args
    return show_answer(rest) if verb == "show" else write_report(rest)


def show_answer(args: Sequence[str]) -> int:
    show = parse_flags(Show, args, "show")
    show.output.check()
    store = open_run_or_pool(show.run, show.runs_dir)
    write_outputs(read_answer(store, refresh=show.refresh), show.output, store.paths)
    is_by_path = Path(show.run).exists()
    if not show.output.takes_stdout and not is_by_path:
        name = show.run if show.runs_dir == RUNS_DIR else store.path
        place = store.path if len(store.paths) == 1 else f"{len(store.paths)} runs in {store.path.parent}"
        print(f"\n{place}  ·  scalelab report {name} --html report.html")  # noqa: T201
    return 0


def write_report(args: Sequence[str]) -> int:
    from scalelab.answers.comparison import describe_runs  # it loads the analysis, which `show` does not need

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
    with without_collector():  # ten thousand trials are a million objects, which stay until the end
        document = describe_runs(stores)
    write_formats(document, output, [path for store in stores for path in store.paths])
    if report.bundle is not None:
        fill_bundle(report.bundle, document, stores)
    return 0


def open_runs(report: Report) -> list[RunStore]:
    """The runs; a run given twice is refused."""
    stores = [open_run_or_pool(name, report.runs_dir) for name in report.runs]
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
    for notebook in sorted((directory / "scripts").rglob("*.ipynb")):
        fill_notebook(notebook)
    runs = [path for store in stores for path in store.paths]
    write_target(directory / "report.html", make_page(document, runs), "--bundle")
    write_target(directory / "report.pdf", make_pdf(document, runs), "--bundle")
    print(f"Wrote {directory}", file=sys.stderr)  # noqa: T201

"""What `run` and `resume` share: measure what is missing, answer, say where it is and what to do next."""

from __future__ import annotations

import sys

from scalelab.cli.output import Output, write_outputs
from scalelab.cli.progress import ProgressReporter
from scalelab.experiment import execute_run
from scalelab.measure.launchers.launcher import Launcher
from scalelab.report.document import Document
from scalelab.store import RunStore
from scalelab.trial import Status


def measure_and_report(store: RunStore, launcher: Launcher, output: Output) -> int:
    """Run the trials that have no result, print and export the answer; gives the exit code."""
    try:
        with ProgressReporter() as progress:
            document = execute_run(store, launcher, progress)
    except KeyboardInterrupt:
        message = f"Interrupted; what was measured is kept  ·  scalelab resume {store.name}"
        print(message, file=sys.stderr)  # noqa: T201
        return 130
    return report_run(store, document, output)


def report_run(store: RunStore, document: Document, output: Output) -> int:
    """Print and export the document; 3 when some trials failed."""
    write_outputs(document, output)
    results, _ = store.results()
    failed = [result for result in results if result.status is not Status.COMPLETED]
    traceback = next((result.traceback for result in failed if result.traceback), "")
    if traceback:
        print(f"\n{traceback}", file=sys.stderr)  # noqa: T201
    stream = sys.stderr if output.takes_stdout else sys.stdout
    print(f"\nSaved to {store.path}  ·  scalelab show last --markdown report.md", file=stream)
    return 3 if failed else 0

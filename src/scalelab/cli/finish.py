"""The end of a command that measured: the answer, where it is, what to do next, and the exit code."""

from __future__ import annotations

import sys

from scalelab.cli.output import Output, write_outputs
from scalelab.report.document import Document
from scalelab.store import RunStore
from scalelab.trial import Status


def report_run(store: RunStore, document: Document, output: Output) -> int:
    """Print and export the document; 3 when some trials failed."""
    write_outputs(document, output)
    stream = sys.stderr if "-" in (output.json, output.csv, output.markdown) else sys.stdout
    results, _ = store.results()
    failed = [result for result in results if result.status is not Status.COMPLETED]
    for result in failed:
        if result.traceback:
            print(f"\n{result.traceback}", file=sys.stderr)  # noqa: T201
            break
    next_command = f"scalelab show {store.name} --markdown report.md"
    print(f"\nSaved to {store.path}  ·  {next_command}", file=stream)
    return 3 if failed else 0

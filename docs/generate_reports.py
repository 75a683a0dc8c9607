"""Store the reports that pages show: the newest run of every study, and of every recipe, in a directory of runs.

    python docs/generate_reports.py RUNS_DIR [NAME …]

The document is derived from the raw samples, as `scalelab report` does it, and stored without the names of the machine.
"""

from __future__ import annotations

import gzip
import re
import sys
from dataclasses import replace
from pathlib import Path

from scalelab.records.store import RunStore, find_runs
from scalelab.report.document import Document
from scalelab.report.renderers.exports import render_json
from scalelab.studies.catalogue import derive_document

REPORTS = Path(__file__).parent / "reports"
LEFT_OUT = ("host", "git")
"""What of the environment is nobody's business."""


def main(runs_dir: str, *wanted: str) -> None:
    newest: dict[str, RunStore] = {}
    for path in find_runs(Path(runs_dir)):
        store = RunStore.open(path)
        name = str(store.record.fields.get("recipe") or store.record.study)
        newest[name] = store
    REPORTS.mkdir(exist_ok=True)
    for name, store in newest.items():
        if not wanted or name in wanted:
            text = clean_text(render_json(clean_document(derive_document(store))), runs_dir)
            (REPORTS / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
            print(f"{name}: {store.name}")  # noqa: T201


def clean_document(document: Document) -> Document:
    kept = tuple((name, value) for name, value in document.environment if name not in LEFT_OUT)
    return replace(document, environment=kept)


def clean_text(text: str, runs_dir: str) -> str:
    """The same without the directory that the runs lie in."""
    shorter = text.replace(f" --runs-dir {runs_dir}", "").replace(f"{Path(runs_dir).absolute()}/", "")
    return re.sub(r"/(?:tmp|home|root|Users|work)/[\w./-]*/", "", shorter)


if __name__ == "__main__":
    main(*sys.argv[1:])

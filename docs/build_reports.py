"""Write the reports that pages embed into the built site.

    python docs/build_reports.py site/reports

Zensical has no hooks, so this runs after it (`make docs` does both). `reports/NAME.json.gz` is the document of a real
run, stored by `generate_reports.py`. It becomes `NAME.html`, rendered as `scalelab report --html` does, and a page
embeds it with `<iframe class="report" src="…/reports/NAME.html">`.
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

from scalelab.report.document import Document, read_document
from scalelab.report.renderers.html import render_html

REPORTS = Path(__file__).parent / "reports"


def read_report(name: str) -> Document:
    """Read the stored document of a report."""
    return read_document(gzip.decompress((REPORTS / f"{name}.json.gz").read_bytes()).decode())


def build_reports(target: Path) -> None:
    """Render every stored report into a directory."""
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(REPORTS.glob("*.json.gz")):
        name = file.name.removesuffix(".json.gz")
        (target / f"{name}.html").write_text(render_html(read_report(name)), encoding="utf-8")


if __name__ == "__main__":
    build_reports(Path(sys.argv[1]))

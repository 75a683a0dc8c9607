"""Reports inside of pages.

A page says `<!-- report: NAME -->` where the report of a real run is to stand. Its document lies in
`reports/NAME.json.gz` (`generate_reports.py` writes it), and becomes a page of the site, made by the same renderer that
users have, and a frame in the page that names it.
"""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

from scalelab.report.document import Document, read_document
from scalelab.report.renderers.html import render_html

REPORTS = Path(__file__).parent / "reports"
MARKER = re.compile(r"^<!-- report: ([a-z0-9-]+) -->$", re.MULTILINE)


def read_report(name: str) -> Document:
    """The stored document of a report."""
    return read_document(gzip.decompress((REPORTS / f"{name}.json.gz").read_bytes()).decode())


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put a frame where a page names a report."""
    up = "../" * page.url.rstrip("/").count("/") + ("../" if page.url.rstrip("/") else "")

    def make_frame(match: re.Match[str]) -> str:
        place = f"{up}reports/{match[1]}.html"
        return (
            f'<iframe src="{place}" title="The report of a real run" loading="lazy"'
            ' style="width: 100%; height: 42rem; border: 1px solid #8884; border-radius: 8px"></iframe>\n\n'
            f'<a href="{place}">The report alone</a>'
        )

    return MARKER.sub(make_frame, markdown)


def on_post_build(*, config: Any, **_: Any) -> None:
    """Write every stored report as a page of the site."""
    target = Path(config["site_dir"]) / "reports"
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(REPORTS.glob("*.json.gz")):
        name = file.name.removesuffix(".json.gz")
        (target / f"{name}.html").write_text(render_html(read_report(name)), encoding="utf-8")

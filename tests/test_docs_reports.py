"""The reports that pages show are of real runs, of what the page is about, and draw."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from scalelab.recipes.reproduce import RECIPES
from scalelab.report.document import render_json
from scalelab.studies.catalogue import STUDIES

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


FRAME = re.compile(r'^<iframe class="report" src="(?P<place>[./]*)reports/(?P<name>[a-z0-9-]+)\.html" ', re.MULTILINE)


def load_builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_reports", DOCS / "build_reports.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUILDER = load_builder()
FRAMES = {page: list(FRAME.finditer(page.read_text(encoding="utf-8"))) for page in PAGES}
NAMED = {page: [frame["name"] for frame in frames] for page, frames in FRAMES.items()}
STORED = sorted(file.name.removesuffix(".json.gz") for file in (DOCS / "reports").glob("*.json.gz"))


@pytest.mark.parametrize("name", [*(f"studies/{name}" for name in STUDIES), *(f"recipes/{name}" for name in RECIPES)])
def test_every_study_and_recipe_shows_a_report_of_its_own(name: str) -> None:
    assert NAMED[DOCS / f"{name}.md"] == [name.partition("/")[2]]


def test_every_report_that_is_named_is_stored_and_the_other_way_round() -> None:
    assert sorted({name for names in NAMED.values() for name in names}) == STORED


def test_the_command_that_retakes_a_report_is_written_down_for_each() -> None:
    text = (DOCS / "generate_reports.py").read_text(encoding="utf-8")
    assert (
        sorted(re.findall(r"^    ([a-z0-9-]+) +scalelab (?:run|train|quantize|reproduce)\b", text, re.MULTILINE))
        == STORED
    )


@pytest.mark.parametrize("name", STORED)
def test_a_stored_report_is_measured_and_does_not_speak_of_the_machine_it_was_made_on(name: str) -> None:
    document = BUILDER.read_report(name)
    told = dict(document.environment)
    assert told["run"].startswith("20")
    assert told["torch"] not in ("", "–")
    assert document.summary
    assert any(section.charts for section in document.sections), "a report without a chart"
    assert not re.findall(r"/(?:home|root|Users|work|mnt|tmp)/\w+", render_json(document))


@pytest.mark.parametrize("page", [page for page in PAGES if FRAMES[page]], ids=lambda page: page.stem)
def test_a_frame_and_the_link_below_it_lead_to_the_report(page: Path) -> None:
    """A page `a/b.md` is served as `a/b/`, so it is one level deeper than its file."""
    for frame in FRAMES[page]:
        assert frame["place"] == "../" * len(page.relative_to(DOCS).parts)
        assert f'<a href="{frame["place"]}reports/{frame["name"]}.html">' in page.read_text(encoding="utf-8")


def test_a_stored_report_becomes_a_page_of_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them: `make docs` builds all."""
    smallest = min(BUILDER.REPORTS.glob("*.json.gz"), key=lambda file: file.stat().st_size)
    (tmp_path / smallest.name).write_bytes(smallest.read_bytes())
    monkeypatch.setattr(BUILDER, "REPORTS", tmp_path)
    BUILDER.build_reports(tmp_path / "reports")
    (page,) = (tmp_path / "reports").glob("*.html")
    assert page.stem == smallest.name.removesuffix(".json.gz")
    assert "<script" in page.read_text(encoding="utf-8")

"""`scalelab report` as a user types it: formats, several runs, refusals; and that torch is never loaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from subprocess import run as run_process

import pytest

from scalelab.cli.app import run_verb
from scalelab.errors import UsageError
from scalelab.launch.fake import FakeLauncher
from scalelab.runs.experiment import run_study
from scalelab.studies.dtypes import Dtypes
from scalelab.studies.shared.study import Sampling
from tests.studies.answers import JOB, answer, make_strong, set_machine

pytest.importorskip("vl_convert", reason="reports need the extra scalelab[report]")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    set_machine(monkeypatch, 4)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_runs(number: int = 1) -> list[str]:
    return [answer(make_strong(), Path("runs"))[0].name for _ in range(number)]


def test_without_a_flag_the_page_of_the_last_run_is_written_here(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (name,) = make_runs()
    assert run_verb(["report"]) == 0
    page = (place / f"{name}.html").read_text(encoding="utf-8")
    assert "Strong scaling" in page
    assert capsys.readouterr() == ("", f"Wrote {name}.html\n")


def test_every_format_is_written_where_it_was_asked_for(place: Path) -> None:
    pytest.importorskip("typst", reason="a PDF needs the extra scalelab[report]")
    make_runs()
    formats = {kind: f"out/report.{kind}" for kind in ("html", "pdf", "json", "csv")}
    flags = [part for kind, file in formats.items() for part in (f"--{kind}", file)]
    assert run_verb(["report", "last", *flags, "--markdown", "out/report.md"]) == 0
    assert (place / "out/report.pdf").read_bytes().startswith(b"%PDF")
    charts = [
        chart
        for section in json.loads((place / "out/report.json").read_text())["sections"]
        for chart in section["charts"]
    ]
    pictures = sorted(file.name for file in (place / "out").glob("*.svg"))
    assert len(pictures) == len(charts) > 0
    markdown = (place / "out/report.md").read_text(encoding="utf-8")
    assert all(f"]({name})" in markdown for name in pictures)


def test_several_runs_become_one_comparison(place: Path) -> None:
    names = make_runs(2)
    assert run_verb(["report", *names, "--json", "both.json"]) == 0
    document = json.loads((place / "both.json").read_text())
    assert document["title"] == "Comparison"
    assert document["setting"] == f"A {names[0]} · B {names[1]}"
    headings = [section["heading"] for section in document["sections"]]
    assert f"A: {names[0]}" in headings
    assert "All runs in one figure" in headings
    assert run_verb(["report", *names]) == 0
    assert (place / "comparison.html").is_file()


def test_runs_with_nothing_in_common_say_so_and_are_shown_one_by_one(place: Path) -> None:
    (first,) = make_runs()
    dtypes = Dtypes(job=JOB, sampling=Sampling(rounds=2, steps=6, control=False))
    second = run_study(dtypes, runs_dir=Path("runs"), launcher=FakeLauncher(lambda _: 0.1))[0].name
    assert run_verb(["report", first, second, "--json", "both.json"]) == 0
    document = json.loads((place / "both.json").read_text())
    assert "no configuration in common" in document["cautions"][0]["message"]
    assert len([section for section in document["sections"] if section["heading"].startswith("B: ")]) > 1


def test_the_answer_is_derived_again_from_the_samples(place: Path) -> None:
    (name,) = make_runs()
    (place / "runs" / name / "document.json").write_text("not a document")
    assert run_verb(["report", "--html", "page.html"]) == 0


def test_a_bundle_holds_reports_data_and_script(place: Path) -> None:
    pytest.importorskip("typst", reason="a PDF needs the extra scalelab[report]")
    (name,) = make_runs()
    assert run_verb(["report", "--bundle", "out"]) == 0
    names = {file.name for file in (place / "out").iterdir()}
    assert {"report.html", "report.pdf", "README.md", "reproduce.sh", "runs"} <= names
    assert (place / "out" / "runs" / name / "run.json").is_file()
    assert not list(place.glob("*.html"))


def test_refusals_name_the_flag_and_the_next_step(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (name,) = make_runs()
    with pytest.raises(UsageError, match="give every run once"):
        run_verb(["report", name, "last"])
    with pytest.raises(UsageError, match="is a directory"):
        run_verb(["report", "--html", "."])
    with pytest.raises(UsageError, match="only one of"):
        run_verb(["report", "--html", "-", "--json", "-"])
    monkeypatch.setattr("scalelab.cli.output.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"--html needs vl_convert.*pip install 'scalelab\[report\]'"):
        run_verb(["report"])
    with pytest.raises(UsageError, match="--pdf needs vl_convert and typst"):
        run_verb(["show", "last", "--pdf", "report.pdf"])


def test_other_verbs_write_pages_too(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = make_runs(2)
    assert run_verb(["show", "last", "--html", "shown.html"]) == 0
    assert f'download="{names[1]}.zip"' in (place / "shown.html").read_text(encoding="utf-8")
    assert run_verb(["compare", *names, "--html", "-"]) == 0
    assert "<!doctype html>" in capsys.readouterr().out


PROGRAM = """
import sys
from scalelab.cli.app import run_verb
run_verb(["report", "--html", "a.html"])
print("torch" in sys.modules)
"""


def test_a_report_never_loads_torch(place: Path) -> None:
    make_runs()
    done = run_process([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, cwd=place)
    assert done.stdout.strip() == "False"

"""Every measured number of the pages has its command and its date; those that follow from others are derived again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from scalelab.cli.app import run_verb
from scalelab.report.document import Document
from tests.test_docs_reports import BUILDER

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "reference")]
DATE = re.compile(r"\b20\d\d-\d\d-\d\d")
BLOCK = re.compile(r"^```(?:console|text)\n(.*?)^```", re.MULTILINE | re.DOTALL)
QUANTITY = re.compile(r"\d\s?(?:%|×|µs|ms|s\b|[kMG]i?B\b|times)")
MEASURED = re.compile(r"\d ± \d|\d (?:ms|µs)\b|\d samples/s")
WITHOUT_RESULT = {"augmentation", "data_doctor", "memory", "report", "straggler"}
"""Programs that are named beside numbers which are not their results: sizes, delays, bars."""
COMPUTED = "$ scalelab plan"
"""What measures nothing."""


class Passage(NamedTuple):
    page: str
    text: str


def list_passages() -> Iterator[Passage]:
    """Paragraphs, items and rows of tables that name a program of benchmarks/."""
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for passage in re.split(r"\n\n|\n(?=[-|])", text):
            if "python benchmarks/" in passage:
                yield Passage(str(page.relative_to(ROOT)), passage)


def list_outputs() -> Iterator[tuple[str, str, str]]:
    """Page, block and the paragraph before it, of everything that shows measured times."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in BLOCK.finditer(text):
            if MEASURED.search(block[1]) and not block[1].startswith(COMPUTED):
                yield str(page.relative_to(ROOT)), block[1], text[: block.start()].rstrip().rpartition("\n\n")[2]


def test_every_number_of_a_benchmark_has_its_date() -> None:
    undated = [one for one in list_passages() if QUANTITY.search(one.text) and not DATE.search(one.text)]
    named = {name for one in undated for name in re.findall(r"benchmarks/(\w+)\.py", one.text)}
    assert named == WITHOUT_RESULT, [one for one in undated if not named & WITHOUT_RESULT]


def test_every_program_that_is_named_exists() -> None:
    named = {name for one in list_passages() for name in re.findall(r"benchmarks/(\w+\.py)", one.text)}
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / "benchmarks" / name).is_file()] == []


def test_every_measured_output_has_its_date() -> None:
    outputs = list(list_outputs())
    assert len(outputs) > 8
    undated = [(page, block.splitlines()[0]) for page, block, lead in outputs if not DATE.search(block + lead)]
    assert undated == []


def test_the_plan_that_is_shown_is_computed_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = (ROOT / "docs" / "how-to" / "plan.md").read_text(encoding="utf-8")
    shown = [block[1] for block in BLOCK.finditer(text) if block[1].startswith(COMPUTED) and block[1].count("$") == 1]
    assert shown
    for block in shown:
        command, _, output = block.partition("\n")
        assert run_verb(command.removeprefix("$ scalelab ").split()) == 0
        assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == output.rstrip().splitlines()


ROW = re.compile(
    r"^  (?P<run>plain loop|control|ddp × (?P<ranks>\d+)) +(?P<step>[\d.]+)(?: ± [\d.]+)? +(?P<rate>\d+)"
    r" +(?P<speedup>[\d.]+)(?: ± [\d.]+)? +(?P<efficiency>\d+) %",
    re.MULTILINE,
)


@pytest.mark.parametrize("page", ["README.md", "docs/get-started/tour.md"])
def test_rates_and_efficiencies_of_a_shown_table_follow_from_its_steps_and_speedups(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    batch = int(re.findall(r"global batch (\d+)", text)[0])
    rows = list(ROW.finditer(text))
    assert len(rows) == 4
    for row in rows:
        step, rounding = float(row["step"]), 0.5 if "." not in row["step"] else 0.05
        assert batch / (step + rounding) * 1e3 - 1 <= float(row["rate"]) <= batch / (step - rounding) * 1e3 + 1
        ranks, speedup = int(row["ranks"] or 1), float(row["speedup"])
        assert float(row["efficiency"]) == pytest.approx(100 * speedup / ranks, abs=0.5 + 0.5 / ranks)


def read_column(document: Document, key: str) -> list[float]:
    table = document.tables[0]
    place = [column.key for column in table.columns].index(key)
    return [float(str(row[place].value)) for row in table.rows]


def test_the_stored_report_of_strong_scaling_is_derived_again() -> None:
    document = BUILDER.read_report("strong-scaling")
    labels = [str(row[0].value) for row in document.tables[0].rows]
    ranks = [int(label.partition("× ")[2].split()[0]) if "×" in label else 1 for label in labels]
    batch = int(re.findall(r"global batch (\d+)", document.setting)[0])
    rates = [batch / step for step in read_column(document, "step_seconds")]
    assert rates == pytest.approx(read_column(document, "samples_per_second"))
    speedups = read_column(document, "speedup")
    derived = [speedup / count for speedup, count in zip(speedups, ranks, strict=True)]
    assert derived == pytest.approx(read_column(document, "efficiency"))

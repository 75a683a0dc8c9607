"""What a verb prints by default fits on one screen: 40 lines of 100 columns, failures first, the rest one flag away.

That every stored run and command does is asserted where its numbers are, in test_golden.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.test_golden import RUNS, scalelab, unpack
from tests.screen import MOST_LINES, WIDTH, check_screen


@pytest.fixture(autouse=True)
def set_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))


def print_screen(*arguments: object) -> list[str]:
    return scalelab(*arguments).splitlines()


def test_the_list_of_runs_fits_on_one_screen(tmp_path: Path) -> None:
    for name in RUNS:
        unpack(name, tmp_path)
    check_screen(print_screen("list", "--runs-dir", tmp_path), MOST_LINES)


def test_a_finished_run_is_resumed_on_one_screen(tmp_path: Path) -> None:
    lines = print_screen("resume", unpack("strong-scaling", tmp_path), "--trust")
    *answer, _, place = lines
    assert place.startswith("Saved to ")
    check_screen(answer, MOST_LINES - 2)


def test_files_are_written_with_a_line_each(tmp_path: Path) -> None:
    run = unpack("strong-scaling", tmp_path)
    page, bundle = tmp_path / "report.html", tmp_path / "bundle"
    assert print_screen("report", run, "--html", page, "--bundle", bundle) == []
    assert page.stat().st_size
    assert (bundle / "report.pdf").stat().st_size
    (line,) = print_screen("export", run, "--tensorboard", tmp_path / "events")
    assert line.startswith("Wrote ")
    assert line.endswith(f"tensorboard --logdir {tmp_path / 'events'}")


@pytest.mark.parametrize("name", ["strong-scaling-failed", "batch-size-out-of-memory"])
def test_what_failed_heads_the_answer(name: str, tmp_path: Path) -> None:
    lines = print_screen("show", unpack(name, tmp_path), "--refresh")
    rule = next(number for number, line in enumerate(lines) if "──" in line)
    failed = [number for number, line in enumerate(lines) if line == "Failed"]
    assert failed[0] < rule


@pytest.mark.parametrize("name", ["strong-scaling", "strategies", "reproduce-scaling"])
def test_everything_is_one_flag_away(name: str, tmp_path: Path) -> None:
    run = unpack(name, tmp_path)
    short, full = print_screen("show", run), print_screen("show", run, "--full")
    assert len(full) > len(short)


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["run", "strong-scaling", "--help"]])
def test_help_fits_on_one_screen(words: list[str]) -> None:
    check_screen(print_screen(*words), MOST_LINES)

"""Tests that are executed side by side: each once, its file in one process, and nothing is lost with a process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FILES = {
    "test_module.py": """
import os, pytest

@pytest.fixture(scope="module")
def pid():
    with open("made", "a") as file:
        file.write("module ")
    yield os.getpid()
    with open("ended", "a") as file:
        file.write("module ")

@pytest.fixture(scope="session")
def session():
    yield
    with open("ended", "a") as file:
        file.write("session ")

@pytest.mark.parametrize("number", range(3))
def test_it_is_one_process(pid, session, number, capfd):
    os.system(f"echo {number}")
    assert os.getpid() == pid
    assert capfd.readouterr().out == f"{number}\\n"
""",
    "test_ends.py": """
import pytest

def test_it_fails():
    print("said before")
    assert 6 * 9 == 42

@pytest.mark.skip(reason="not today")
def test_it_is_skipped(): ...
""",
    "test_death.py": """
import os

def test_it_is_passed_before(tmp_path): ...

def test_it_dies():
    os._exit(5)

def test_it_is_never_reached(): ...
""",
    "test_alone.py": """
import os, pytest

@pytest.mark.alone
def test_it_is_last():
    assert open("made").read() == "module "
    assert not os.path.exists(f"/proc/self/task/{os.getpid()}/children") or not open(
        f"/proc/self/task/{os.getpid()}/children"
    ).read()
""",
}


def run_pytest(directory: Path, *arguments: str) -> str:
    for name, text in FILES.items():
        (directory / name).write_text(text)
    (directory / "pytest.ini").write_text("[pytest]\nmarkers = alone\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.spread", "-p", "no:cacheprovider", "-v", "--workers", "2"]
    root = str(Path(__file__).parents[1])
    ended = subprocess.run(
        [*command, f"--rootdir={directory}", f"--basetemp={directory / 'base'}", *arguments],
        cwd=directory, env={"PYTHONPATH": root, "PATH": ""}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 1, ended.stdout + ended.stderr
    return ended.stdout


def test_each_is_executed_once_and_what_a_dead_process_leaves_has_failed(tmp_path: Path) -> None:
    printed = run_pytest(tmp_path)
    assert "3 failed, 5 passed, 1 skipped" in printed
    assert (tmp_path / "made").read_text() == "module "
    assert (tmp_path / "ended").read_text() == "module session "
    assert "said before" in printed, "what a failed test printed is shown"
    assert re.search(r"_ test_death.py::test_it_dies _+\nthe process that executed it died", printed)
    assert re.search(r"_ test_death.py::test_it_is_never_reached _+\nthe process that had its file died", printed)
    assert printed.index("test_it_is_last PASSED") > printed.rindex("test_it_is_one_process[2] PASSED")


def test_the_first_failure_ends_it_where_that_is_asked_for(tmp_path: Path) -> None:
    printed = run_pytest(tmp_path, "-x", "test_ends.py", "test_module.py")
    assert "stopping after 1 failures" in printed

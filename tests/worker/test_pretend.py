"""On a pretend accelerator, whose work is queued and done later, figures are right and every mistake is noticed."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.worker.pretend_cases import CHECKS, FAULTS, MUTANTS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@functools.cache
def run_cases() -> Any:
    """All of them, in one process that has the device."""
    command = [sys.executable, "-W", "error", "-m", "tests.worker.pretend_cases"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # the profiler prints lines of its own


@pytest.mark.parametrize("name", CHECKS)
def test_it_holds(name: str) -> None:
    assert run_cases()["checks"][name] == ""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_noticed(name: str) -> None:
    assert run_cases()["mutants"][name] != ""


@pytest.mark.parametrize("name", FAULTS)
def test_the_self_test_finds_what_is_wrong_with_a_device(name: str) -> None:
    found, expected = run_cases()["faults"][name], FAULTS[name][1]
    assert expected in found if expected else found == []
    assert name == "forgotten synchronise" or len(found) <= 1


def test_the_paths_of_scalelab_are_right_on_one_device() -> None:
    found = run_cases()["paths"]
    assert all(found[name][0] for name in ("plain loop", "memory limit", "host-bound"))
    assert [name for name, (is_right, _) in found.items() if is_right is False] == []

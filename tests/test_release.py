"""What a release is made of agrees: versions of Python, targets of make, the image, and what a bug report says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from scalelab import __version__
from scalelab.cli.app import main

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def list_steps(file: Path) -> list[dict[str, str]]:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    jobs = yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def test_workflows_test_every_python_that_the_package_names() -> None:
    named = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", one)]
    (matrix,) = re.findall(r"python: \[(.+)\]", (ROOT / ".github/workflows/check.yml").read_text(encoding="utf-8"))
    assert matrix.replace('"', "").split(", ") == named
    assert PROJECT["requires-python"] == f">={named[0]}"


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_workflows_run_targets_that_exist_and_name_the_version_of_every_action(file: Path) -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    steps = list_steps(file)
    assert {word for step in steps for word in re.findall(r"make (\w+)", step.get("run", ""))} <= set(targets)
    assert all(re.search(r"@\S+$", step["uses"]) for step in steps if "uses" in step)


def test_the_image_copies_files_that_exist_and_installs_extras_that_exist() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    copied = [word for line in re.findall(r"^COPY (?!--)(.+) \S+$", text, re.MULTILINE) for word in line.split()]
    assert copied
    assert all((ROOT / word).exists() for word in copied)
    (extras,) = re.findall(r"whl\)\[(.+?)\]", text)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_a_bug_report_has_the_versions_that_matter(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version", "--verbose"])
    lines = capsys.readouterr().out.splitlines()
    assert done.value.code == 0
    assert lines[0].startswith(f"scalelab {__version__} (")
    assert lines[1].startswith("Python 3.")
    assert "msgspec" in lines[3]
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100

"""Adding a strategy takes its file, its record and two pages: done here in a copy, as the guide says, on real ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[3]
NAME = "allreduce"
MOST_FILES = 6
COPIED = ("src", "docs/reference", "docs/generate_cli.py")
RECORDS = "src/scalelab/records/strategies.py"
PAGE = "docs/reference/strategies.md"
ROW = f"| `{NAME}` | every gradient is averaged on its own as soon as it is ready | one per rank |\n"

SCRIPT = f"""\
import json, runpy, sys
from dataclasses import fields
from pathlib import Path

from scalelab.launch.local import LocalLauncher
from scalelab.records.settings import StepShape
from scalelab.runs.experiment import run_study
from scalelab.studies.catalogue import STUDIES, load_study
from scalelab.studies.comm_volume.study import CommVolume
from scalelab.studies.memory.study import Memory
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling


def plan_studies():
    for name in STUDIES:
        kind = load_study(name)
        known = {{field.name for field in fields(kind)}}
        if known & {{"strategy", "strategies"}}:
            chosen = {{"strategy": {NAME!r}}} if "strategy" in known else {{"strategies": ("ddp", {NAME!r})}}
            ranks = {{}} if "tuple" in str(kind.__annotations__.get("ranks", "tuple")) else {{"ranks": 2}}
            yield name, [trial.strategy for trial in kind(**chosen, **ranks).plan()]


if __name__ == "__main__":
    said = {{"plans": dict(plan_studies())}}
    job = Job(workload="mlp", options={{"dim": 16, "depth": 2}}, device="cpu", shape=StepShape(micro_batch=2))
    sampling = Sampling(rounds=1, steps=4, phase_steps=0, comm_free_steps=0, control=False)
    with LocalLauncher() as launcher:
        for kind, flags in ((CommVolume, {{"batch_per_rank": 4}}), (Memory, {{"batches": (4,)}})):
            study = kind(strategies=("ddp", {NAME!r}), job=job, sampling=sampling, **flags)
            store, document = run_study(study, runs_dir=Path("runs"), launcher=launcher)
            results = store.results()[0]
            said[study.name] = {{
                "findings": {{finding.kind: finding.values for finding in document.findings}},
                "status": {{result.trial.configuration: str(result.status) for result in results}},
                "losses": {{result.trial.configuration: list(result.losses().values()) for result in results}},
                "peaks": {{
                    result.trial.configuration: max(rank.memory.peak_bytes for rank in result.ranks if rank.memory)
                    for result in results
                    if any(rank.memory for rank in result.ranks)
                }},
            }}
    Path("said.json").write_text(json.dumps(said))
    runpy.run_path("docs/generate_cli.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources with one more strategy: the file and the record of the guide, and a row of its page."""
    place = tmp_path_factory.mktemp("copy")
    for name in COPIED:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place / name)  # what is compiled stays so
        else:
            shutil.copy(ROOT / name, place / name)
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    function, record = (
        re.search(rf'```python title="{re.escape(title)}"\n(.*?)```', guide, re.DOTALL)
        for title in (f"src/scalelab/worker/strategies/{NAME}.py", RECORDS)
    )
    assert function is not None
    assert record is not None
    (place / f"src/scalelab/worker/strategies/{NAME}.py").write_text(function[1], encoding="utf-8")
    insert_before(place / RECORDS, ")\n\nSTRATEGIES: dict", textwrap.indent(record[1].rstrip(), "    ") + ",\n")
    insert_before(place / PAGE, "\n```console", ROW)
    (place / "add.py").write_text(SCRIPT, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(place / "src")}
    done = subprocess.run(
        [sys.executable, "add.py"], cwd=place, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return place


def insert_before(file: Path, mark: str, text: str) -> None:
    before, found, after = file.read_text(encoding="utf-8").partition(mark)
    assert found
    file.write_text(before + text + found + after, encoding="utf-8")


@pytest.fixture(scope="module")
def said(copy: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((copy / "said.json").read_text(encoding="utf-8"))
    return found


def test_few_files_are_touched(copy: Path) -> None:
    now = {file.relative_to(copy) for name in COPIED for file in [copy / name, *(copy / name).rglob("*")]}
    touched = [
        str(file)
        for file in now
        if (copy / file).is_file()
        and "__pycache__" not in file.parts
        and not ((ROOT / file).is_file() and (ROOT / file).read_bytes() == (copy / file).read_bytes())
    ]
    expected = {f"src/scalelab/worker/strategies/{NAME}.py", RECORDS, PAGE, "docs/reference/cli.md"}
    assert set(touched) == expected
    assert len(touched) <= MOST_FILES


def test_the_code_of_the_guide_passes_the_linter(copy: Path) -> None:
    ruff = Path(sys.executable).with_name("ruff")
    files = (RECORDS, f"src/scalelab/worker/strategies/{NAME}.py")
    for words in (("check",), ("format", "--check")):
        command = [ruff, *words, "--config", ROOT / "pyproject.toml", *files]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_every_study_with_a_strategy_plans_it(said: dict[str, Any]) -> None:
    assert len(said["plans"]) >= 20
    for name, planned in said["plans"].items():
        assert NAME in planned, name


def test_it_sends_what_its_record_says_and_trains_as_ddp(said: dict[str, Any]) -> None:
    found = said["comm-volume"]
    assert set(found["status"].values()) == {"completed"}
    assert found["findings"]["theory"] == {"rows": 2, "differing": 0}
    assert found["findings"]["wire-ratio"] == {"ratio": 1.0}
    assert found["losses"][f"{NAME}-2"] == found["losses"]["ddp-2"]


def test_its_memory_is_forecast_and_measured(said: dict[str, Any]) -> None:
    found = said["memory"]
    assert set(found["status"].values()) == {"completed"}
    forecast, measured = (found["peaks"][f"{kind}{NAME}-2-b4"] for kind in ("forecast-", ""))
    # By rule, nothing but the buckets is saved, and they are as large as what ddp sends.
    buckets = said["comm-volume"]["findings"]["gradient-volume"]["payload_bytes"]
    assert found["peaks"]["forecast-ddp-2-b4"] - forecast == buckets
    # gloo may hold a copy of a gradient a little longer than the all-reduce takes.
    assert 0 <= measured - forecast < buckets

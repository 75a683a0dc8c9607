"""Adding a launcher takes its file, its record and its row in the docs: done here in a copy, as the guide says."""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_FILES = 6
STAND_IN = """#!/bin/sh
num_ranks=${2#-n}
shift 5
for rank in $(seq 0 $((num_ranks - 1))); do
    FLUX_JOB_ID=f1 FLUX_JOB_SIZE=$num_ranks FLUX_JOB_NNODES=1 FLUX_TASK_RANK=$rank FLUX_TASK_LOCAL_ID=$rank "$@" &
done
wait
"""
"""`flux run -n2 -N1 -o cpu-affinity=off COMMAND…`, with the variables that Flux sets."""
PLAN_ALL = """
import contextlib, io, json, sys
from scalelab.cli.app import main
from scalelab.studies.catalogue import STUDIES
codes = {}
for name in STUDIES:
    sys.argv = ["scalelab", "run", name, "--launcher", "flux", "--dry-run"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            codes[name] = main(sys.argv[1:])
        except SystemExit as end:
            codes[name] = end.code
print(json.dumps(codes))
"""
RUN_ONE = """
import json, sys
from pathlib import Path
from scalelab import Job, Sampling, StrongScaling
from scalelab.records.files import write_trial
from scalelab.launch.launcher import choose_launcher
job = Job(workload="mlp", options={"dim": 32, "depth": 2}, threads_per_rank=1, launcher="flux")
study = StrongScaling(job=job, ranks=(2,), global_batch=8, sampling=Sampling(rounds=1, steps=4))
trial = next(trial for trial in study.plan() if trial.num_ranks == 2)
directory = Path(sys.argv[1])
write_trial(directory, trial)
launcher = choose_launcher(study.job, [trial])
launcher.check()
result = launcher.launch(trial, directory)
print(json.dumps([result.status, result.reason, *(rank.launcher for rank in result.ranks)]))
"""
GENERATED = Path("docs/reference/cli.md")
"""What `docs/generate_cli.py` writes: the choices of --launcher."""
ROW = "| `flux` | `flux run` | the nodes of the enclosing Flux instance |\n"


def insert(file: Path, before: str, text: str) -> None:
    """Put a text in front of another one."""
    found = file.read_text(encoding="utf-8")
    assert found.count(before) == 1, before
    file.write_text(found.replace(before, text + before), encoding="utf-8")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository with one more launcher, and nothing else changed."""
    place = tmp_path_factory.mktemp("copy")
    for name in ("src", "docs"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("reports", "images"))
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Add a launcher")[1]
    written, starter, record = re.findall(r"```python[^\n]*\n(.*?)```", guide.split("\n## ")[0], re.DOTALL)
    (place / "src/scalelab/launch/flux.py").write_text(written, encoding="utf-8")
    records = place / "src/scalelab/records/launchers.py"
    insert(records, ']\nScheduler = Literal["', ', "flux"')
    insert(records, "}\nSTEP_LAUNCHER = ", starter)
    insert(records, "}\nSCHEDULERS: ", record)
    insert(place / "docs/how-to/clusters.md", "\nEach trial is one command, so the number", ROW)
    return place


def run(place: Path, *arguments: str) -> str:
    """What Python prints in the copy; it must succeed."""
    environment = {**os.environ, "PYTHONPATH": str(place / "src"), "PATH": f"{place}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=place, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def is_same(one: Path, other: Path) -> bool:
    return one.is_file() and filecmp.cmp(one, other, shallow=False)


def test_it_touches_few_files(copy: Path) -> None:
    files = (path for name in ("src", "docs") for path in (copy / name).rglob("*") if path.is_file())
    own = [path.relative_to(copy) for path in files if "__pycache__" not in path.parts]
    touched = [path for path in own if not is_same(ROOT / path, copy / path)]
    assert len({*touched, GENERATED}) <= MOST_FILES, touched


def test_every_study_plans_with_it(copy: Path) -> None:
    codes = json.loads(run(copy, "-c", PLAN_ALL))
    assert {name for name, code in codes.items() if code} == {"network"}, "which emulates its hosts"


@pytest.mark.ranks
def test_it_runs_a_trial(copy: Path) -> None:
    program, directory = copy / "flux", copy / "trial"
    program.write_text(STAND_IN, encoding="utf-8")
    program.chmod(0o755)
    directory.mkdir()
    assert json.loads(run(copy, "-c", RUN_ONE, str(directory))) == ["completed", "", "Flux", "Flux"]

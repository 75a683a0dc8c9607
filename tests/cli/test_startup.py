"""What a command imports before it answers: looking must not wait for what only measuring needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scalelab import FakeLauncher, Job, Sampling, StrongScaling, run_study
from scalelab.cli.flags import parse_flags

MOST_MODULES = 79
HEAVY = ("torch", "numpy", "scipy", "psij", "typeguard")
PROGRAM = """
import sys
from scalelab.cli.app import main
try:
    main(sys.argv[1:])
except SystemExit as ended:
    assert not ended.code, ended.code
ours = [name for name in sys.modules if name.partition(".")[0] == "scalelab"]
print(len(ours), *(name for name in {heavy} if name in sys.modules), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one run."""
    found = tmp_path_factory.mktemp("startup")
    study = StrongScaling(job=Job(workload="mlp"), sampling=Sampling(rounds=2))
    run_study(study, runs_dir=found / "runs", launcher=FakeLauncher(lambda trial: 0.1 / trial.num_ranks))
    return found


@pytest.mark.parametrize("words", ["--help", "run --help", "list", "list --help", "show", "show last", "show --help"])
def test_looking_loads_little_of_ours_and_nothing_heavy(words: str, place: Path) -> None:
    program = PROGRAM.replace("{heavy}", repr(HEAVY))
    command = [sys.executable, "-c", program, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=place, check=True)
    number, *heavy = done.stderr.splitlines()[-1].split()
    assert heavy == []
    assert int(number) <= MOST_MODULES
    assert len(done.stdout.splitlines()) <= 40


def test_ctrl_c_is_handled_before_anything_else_is_imported() -> None:
    program = "import sys; before = {*sys.modules}; import scalelab.__main__; print(*({*sys.modules} - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"__future__", "types", "scalelab", "scalelab.__main__"}


def test_the_help_of_no_study_loads_scipy_or_psij() -> None:
    program = """
import sys
import scalelab.cli.study_flags
from scalelab.studies.catalogue import STUDIES, load_study
studies = [load_study(name) for name in STUDIES]
assert len(studies) > 20
print(*(name for name in ("torch", "scipy", "psij", "typeguard") if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_without_tyros_private_hook_a_mistyped_flag_is_still_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tyro._errors", None)
    with pytest.raises(SystemExit) as ended:
        parse_flags(Sampling, ["--rounds", "x"], "run")
    assert ended.value.code == 2

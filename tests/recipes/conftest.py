"""What tests of recipes share: their documents, played to the end, and a process that runs the code to hand in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from scalelab.recipes.recipe import write_scripts

RUNNER = Path(__file__).with_name("script_runner.py")
VARIABLES = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@dataclass
class Runner:
    """Scripts of one assignment after the other, each in its own directory."""

    process: subprocess.Popen[str]
    place: Path

    def run(self, recipe: str, script: str, *arguments: str, ranks: int = 2, **variables: str) -> str:
        """What rank 0 printed; `ranks` is 0 for a script that python starts."""
        directory = self.place / f"{Path(script).stem}-{len(list(self.place.iterdir()))}"
        directory.mkdir()
        return self.run_in(directory, recipe, script, *arguments, ranks=ranks, **variables)

    def run_in(
        self, directory: Path, recipe: str, script: str, *arguments: str, ranks: int = 2, **variables: str
    ) -> str:
        scripts = self.place.with_name("scripts") / recipe
        if not scripts.exists():
            write_scripts(recipe, scripts)
        job = {
            "script": str(scripts / script),
            "arguments": arguments,
            "variables": variables,
            "ranks": ranks,
            "directory": str(directory),
        }
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        assert set(answer["codes"]) == {0}, answer["printed"]
        return str(answer["printed"][0])


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with subprocess.Popen(
        [sys.executable, "-P", str(RUNNER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | VARIABLES,
    ) as process:
        place = tmp_path_factory.mktemp("scripts") / "runs"
        place.mkdir()
        yield Runner(process, place)

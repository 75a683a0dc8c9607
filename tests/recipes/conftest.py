"""What tests of recipes share: their documents, played to the end, and a process that runs the code to hand in."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from scalelab.recipes.recipe import QUESTIONS, Question, read_published, write_scripts
from scalelab.recipes.reproduce import RECIPES, NameOfRecipe, Reproduce
from scalelab.report.document import Document, Section
from scalelab.runs.experiment import find_failed, run_study
from scalelab.studies.catalogue import read_study
from tests.recipes.played import PlayedLauncher

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


def find_section(document: Document, row: str) -> Section:
    (section,) = (section for section in document.sections if section.heading.startswith(f"{row} · "))
    return section


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Document]:
    """Every recipe in small, played to its end, as on a machine that can emulate hosts."""
    return {name: play_recipe(name, tmp_path_factory.mktemp("runs")) for name in RECIPES}


def play_recipe(name: str, runs_dir: Path, **fields: Any) -> Document:
    reproduce = Reproduce(recipe=cast("NameOfRecipe", name), **({"device": "cpu"} | fields))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scalelab.recipes.feasibility.find_host_obstacle", lambda: None)
        patch.setattr("scalelab.recipes.feasibility.find_batch_system", lambda: None)
        store, document = run_study(reproduce, runs_dir=runs_dir, launcher=PlayedLauncher())
    assert not find_failed(store, read_study(store)), "what fails as published is no failure"
    return document


def check_answers(document: Document, name: str, answers: Mapping[str, tuple[str, ...]]) -> None:
    """Every question of a recipe has an answer with these words, and no other is expected."""
    asked = read_published(name, QUESTIONS)
    keys = [f"{row}.{key}" for row, questions in asked.items() for key in questions]
    assert keys == [key for key in answers if key.partition(".")[0] in asked]
    for row, questions in asked.items():
        section = find_section(document, row)
        split = dict(section.split_question(words) for words in section.paragraphs)
        for key, printed in questions.items():
            answer = split[Question(printed.text, "").heading]
            missing = [words for words in answers[f"{row}.{key}"] if not re.search(words, answer)]
            assert not missing, f"{row}.{key}: {answer}"

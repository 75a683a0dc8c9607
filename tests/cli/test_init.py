"""`scalelab init`: what forward takes is found by trying, and the file that follows from it trains."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scalelab.cli.app import main
from scalelab.cli.init import Target, ask, describe_unused, find_target, is_build, refuse_failure, render_build
from scalelab.cli.study_flags import parse_study
from scalelab.errors import UsageError
from scalelab.worker.models.inspection import inspect_model

MODELS = """
from dataclasses import dataclass
import torch
from torch import nn

class Images(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.stem, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4 * 14 * 14, classes)
    def forward(self, images):
        return self.head(nn.functional.max_pool2d(self.stem(images), 2).flatten(1))

@dataclass
class Config:
    vocabulary: int = 50

class Language(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed, self.head = nn.Embedding(config.vocabulary, 8), nn.Linear(8, config.vocabulary)
    def forward(self, tokens, targets=None):
        logits = self.head(self.embed(tokens))
        loss = None if targets is None else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(30, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 5)
    def forward(self, words):
        return {"tags": self.head(self.cell(self.embed(words))[0])}

class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(20, 4), nn.Embedding(9, 4)
    def forward(self, user, item):
        return (self.user(user) * self.item(item)).sum(-1)

class Regression(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, 1)
    def forward(self, features):
        return self.layer(features)

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.classes, self.value = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 1)
    def forward(self, *, features):
        hidden = self.body(features)
        return self.classes(hidden), self.value(hidden)

class Configured(Regression):
    def __init__(self, config: Config, width):
        super().__init__(config.vocabulary)

class Strange(nn.Module):
    def forward(self, graph):
        return graph.nodes

def make_images(classes=3):
    return Images(classes)

def count():
    return 3

def build(batch_size):
    raise NotImplementedError
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "models_of_init.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    for name in ("models_of_init", "written_by_init"):
        sys.modules.pop(name, None)


def look(name: str, arguments: str = "") -> dict[str, Any]:
    words = {"module": "models_of_init", "name": name, "arguments": arguments, "directory": str(Path.cwd())}
    return inspect_model(words)


@pytest.mark.parametrize(
    ("name", "arguments", "shapes", "kind"),
    [
        ("Images", "", [[1, 28, 28]], "classes"),
        ("make_images", "classes=4", [[1, 28, 28]], "classes"),
        ("Language", "Config(vocabulary=40)", [[16]], "loss"),
        ("Tagger", "", [[16]], "tokens"),
        ("Pairs", "", [[16], [16]], "classes"),
        ("Regression", "width=7", [[7]], "values"),
        ("Named", "", [[6]], "classes"),
    ],
)
def test_what_forward_takes_is_found_and_the_written_file_trains(
    models: Path, name: str, arguments: str, shapes: list[list[int]], kind: str
) -> None:
    found = look(name, arguments)
    assert [one["shape"] for one in found["inputs"]] == shapes
    assert found["output"]["kind"] == kind
    target = Target(module="models_of_init", name=name, file=models / "models_of_init.py")
    names = ["Config"] if "Config" in arguments else []
    (models / "written_by_init.py").write_text(render_build(target, arguments, names, found))
    model, batches, loss, make_optimizer = importlib.import_module("written_by_init").build(6, 0, 0)
    optimizer = make_optimizer(model.parameters())
    assert len(batches[0][0]) == 6
    value = loss(model, batches[0])
    value.backward()
    optimizer.step()
    assert value.ndim == 0


@pytest.mark.parametrize(
    ("name", "arguments", "line"),
    [
        ("Regression", "", "models_of_init.py:Regression needs width: give --arguments 'width=…'"),
        (
            "Configured",
            "",
            "models_of_init.py:Configured needs config, width: give --arguments 'config=Config(), width=…'",
        ),
        ("Regression", "width='a'", "models_of_init.py:Regression cannot be made: TypeError: "),
        (
            "Absent",
            "",
            "models_of_init has no Absent: its models are Images, Language, Tagger, Pairs, ",
        ),
        ("count", "", "models_of_init.py:count made a int, not an nn.Module: name the class of the model"),
        ("Strange", "", "models_of_init.py:Strange: forward(graph) took none of "),
    ],
)
def test_what_stops_it_is_one_line_with_the_next_step(models: Path, name: str, arguments: str, line: str) -> None:
    target = find_target(f"models_of_init.py:{name}")
    with pytest.raises(UsageError) as caught:
        refuse_failure(target, look(name, arguments))
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_parameters_that_the_first_output_does_not_reach_are_named(models: Path) -> None:
    assert look("Named")["unused"] == ["value.weight", "value.bias"]
    assert describe_unused(["a", "b", "c"]) == (
        "a, b and 1 more get no gradient from this output: add the others to compute_loss, or run with"
        " --find-unused-parameters"
    )


def fail(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(("init", *arguments))
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("error: ")


def test_no_answer_is_an_error_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    with pytest.raises(UsageError, match="no answer given: give --arguments"):
        ask("Arguments: ", "give --arguments")


def test_bad_input_is_refused_before_anything_is_made(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fail(capsys) == "no terminal to ask on: scalelab init file.py:Class"
    assert fail(capsys, "absent.py").startswith("there is no file absent.py: give file.py:Class or ")
    known = "Images, Language, Tagger, Pairs, Regression, Named, Strange"
    instead = f"scalelab init models_of_init.py:Strange (it has {known})"
    assert fail(capsys, "models_of_init.py") == f"no terminal to ask on: {instead}"
    assert fail(capsys, "models_of_init.py:Images", "--arguments", "a b") == (
        "--arguments 'a b' is not Python: give them as in a call, 'hidden=64'"
    )
    (models / "scalelab.toml").write_text("")
    assert fail(capsys, "models_of_init.py:Images") == "scalelab.toml exists already: remove it first"
    assert is_build(find_target("models_of_init.py:build"))


@pytest.mark.ranks
@pytest.mark.usefixtures("shared_ranks")
def test_a_model_becomes_a_project_that_studies_read(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(("init", "models_of_init.py:Language", "--arguments", "Config()", "--ranks", "1", "2"))
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "models_of_init.py:Language: 850 parameters; forward takes tokens int (batch, 16) and gives its loss"
    )
    assert lines[1].startswith("One step of scalelab_build.py:build on cpu: 4 samples took ")
    study, _ = parse_study("strong-scaling", [])
    assert (study.job.workload, study.ranks) == ("scalelab_build.py:build", (1, 2))
    assert set(study.job.options) == {"lr"}

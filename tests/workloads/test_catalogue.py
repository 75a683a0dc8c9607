"""The built-in workloads by name, and the way from options to a trial."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from scalelab.errors import UnknownName, UsageError
from scalelab.worker.models.load import BUILDERS
from scalelab.workloads.catalogue import BUILT_IN, find_workload, make_options, resolve_options
from scalelab.workloads.source import OwnWorkload


def test_every_built_in_workload_can_be_built() -> None:
    assert BUILDERS.keys() == BUILT_IN.keys()
    assert list(BUILT_IN) == sorted(BUILT_IN)


@pytest.mark.parametrize("module", ["catalogue", "schedule", "workload", "source"])
def test_what_the_parent_reads_does_not_load_torch(module: str) -> None:
    code = f"import sys, scalelab.workloads.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", BUILT_IN)
def test_options_survive_a_trial(name: str) -> None:
    made = make_options(name, {})
    values = {field.name: getattr(made, field.name) for field in fields(made)}
    given = {option: value for option, value in values.items() if value is not None}
    assert make_options(name, given) == made


def test_an_unknown_workload_lists_the_known_ones_and_the_way_to_an_own_one() -> None:
    known = "gpt2, lenet, mlp, moe, resnet18, transformer"
    with pytest.raises(
        UnknownName, match=rf"'resnet'\. Did you mean 'resnet18'\? Known: {known}\. Your own: --workload file\.py"
    ):
        find_workload("resnet")


def test_an_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"unknown option of mlp 'detph'\. Did you mean 'depth'\?"):
        make_options("mlp", {"detph": 3})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet18", {"norm": "group"}),
        ("resnet18", {"data": "imagenet"}),
        ("gpt2", {"size": "huge"}),
        ("gpt2", {"data": "text"}),
        ("lenet", {"bias": "first"}),
        ("transformer", {"heads": "eight"}),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"--workload {name}: .*{next(iter(options))}"):
        make_options(name, options)


def test_a_file_is_a_workload_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def build(): ...\ndef other(): ...\n")
    (tmp_path / "script").write_text("def build(): ...\n")
    for name, function in (("own.py", "build"), ("own.py:other", "other"), ("script", "build")):
        found = find_workload(str(tmp_path / name))
        assert isinstance(found, OwnWorkload)
        assert found.function == function


def test_a_trial_carries_absolute_paths_even_of_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_options("resnet18", {"data": "cifar10"}) == {"data": "cifar10", "data_path": str(tmp_path / "data")}
    tokens = {"data": "tokens", "data_path": "a/*.bin", "test_path": "b"}
    resolved = resolve_options("gpt2", tokens)
    assert resolved == {"data": "tokens", "data_path": f"{tmp_path}/a/*.bin", "test_path": str(tmp_path / "b")}
    assert resolve_options("gpt2", resolved) == resolved


def test_what_has_no_path_stays_as_it_is() -> None:
    assert resolve_options("mlp", {"dim": 3}) == {"dim": 3}
    assert resolve_options("resnet18", {"norm": "none"}) == {"norm": "none"}
    assert resolve_options("own.py:build", {"data_path": "a"}) == {"data_path": "a"}

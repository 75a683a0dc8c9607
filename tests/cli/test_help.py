"""The help: whole sentences in titled groups, one screen for a study, torch's names, and what a switch does."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import tyro

from scalelab.checks import FLAGS
from scalelab.cli import help as helping
from scalelab.cli.app import VERBS, main
from scalelab.cli.data.command import FLAGS as DATA_FLAGS
from scalelab.cli.help import WITHOUT, list_flags, render_help
from scalelab.cli.study_flags import make_command_class
from scalelab.studies.catalogue import STUDIES, load_study
from scalelab.workloads.catalogue import BUILT_IN

MOST_LINES = 40


@pytest.fixture(autouse=True)
def hundred_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def read_help(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        main(words)
    captured = capsys.readouterr()
    assert (ended.value.code, captured.err) == (0, "")
    return captured.out.splitlines()


def list_classes() -> list[type[Any]]:
    made = [make_command_class(load_study(name), BUILT_IN["resnet18"], "") for name in STUDIES]
    return [*made, *DATA_FLAGS.values()]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_of_a_hundred_columns(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = read_help(capsys, verb, "--help")
    assert lines[0].startswith("usage: scalelab ")
    assert max(map(len, lines)) <= 100


def test_a_study_shows_its_own_flags_and_those_that_matter(capsys: pytest.CaptureFixture[str]) -> None:
    lines = read_help(capsys, "run", "strong-scaling", "--workload", "mlp", "--help")
    assert len(lines) <= MOST_LINES
    text = "\n".join(lines)
    for flag in ("--ranks", "--global-batch-size", "--workload", "--dim", "--device", "--rounds", "--html", "--full"):
        assert f"  {flag} " in text
    for flag in ("--comm-hook", "--wall-time", "--lr-warmup"):
        assert flag not in text
    assert lines[-1].endswith("more options: scalelab run strong-scaling --help-all")


def test_all_flags_are_one_flag_away_in_groups_with_titles(capsys: pytest.CaptureFixture[str]) -> None:
    lines = read_help(capsys, "run", "strong-scaling", "--help-all")
    titles = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    for title in ("Options:", "Model and device:", "Strategy options:", "Injected delay:", "Batch job:", "Output:"):
        assert title in titles
    lines += read_help(capsys, "run", "weak-scaling", "--help")
    assert [new for new in FLAGS.values() if not any(line.startswith(f"  --{new} ") for line in lines)] == []


@pytest.mark.parametrize("kind", list_classes(), ids=lambda kind: kind.__name__)
def test_every_flag_has_a_text_and_every_switch_says_what_it_does(kind: type[Any]) -> None:
    flags = list_flags(kind)
    assert [one.invocation for one in flags if not one.text] == []
    switches = [one.field for one in flags if one.invocation.startswith("--no-")]
    assert [name for name in switches if name not in WITHOUT] == []


def test_types_and_defaults_are_said_as_a_user_types_them(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Inner:
        deep: float = 0.5

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Outer:
        sizes: tuple[int, ...] = (1, 2)
        name: str
        hidden: tyro.conf.Suppress[int] = 3
        inner: Inner = dataclasses.field(default_factory=lambda: Inner(deep=0.25))

    monkeypatch.setattr(
        helping, "read_hints", lambda kind: {one.name: types[one.name] for one in dataclasses.fields(kind)}
    )
    types = {"sizes": tuple[int, ...], "name": str, "hidden": tyro.conf.Suppress[int], "inner": Inner, "deep": float}
    text = render_help(Outer, "verb", "It does.", shows_all=True)
    assert "--sizes INT …               (default: 1 2)" in text
    assert "--name TEXT                 (required)" in text
    assert "Inner:\n  --deep FLOAT                (default: 0.25)" in text
    assert "hidden" not in text

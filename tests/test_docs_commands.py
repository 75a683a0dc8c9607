"""Every command of the pages parses; those that a reader types are executed by the tests beside this one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scalelab.answers.train import TrainStudy
from scalelab.cli.app import VERBS, print_help
from scalelab.cli.compare import Compare
from scalelab.cli.completion import Completion
from scalelab.cli.data.command import FLAGS as DATA_FLAGS
from scalelab.cli.data.command import VERBS as DATA_VERBS
from scalelab.cli.doctor.command import Doctor
from scalelab.cli.export import Export
from scalelab.cli.flags import parse_flags
from scalelab.cli.init import Init
from scalelab.cli.list_runs import ListRuns, Prune, Remove
from scalelab.cli.meter import MeterCommand
from scalelab.cli.plan import PlanFlags
from scalelab.cli.predict import Predict
from scalelab.cli.report import Report, Show
from scalelab.cli.reproduce import Command
from scalelab.cli.resume import Resume
from scalelab.cli.run import print_studies
from scalelab.cli.serve import Serve
from scalelab.cli.study_flags import parse_kind, parse_study
from scalelab.cli.trace import DIFF, Trace, TraceDiff
from scalelab.studies.collectives.study import Collectives
from scalelab.studies.quantize.study import QuantizeStudy
from tests.docs_reader import ELSEWHERE, TYPED, explain
from tests.test_docs import COMMAND, FENCE, PAGES, ROOT, list_blocks, provide_shards, provide_workloads

VERB_FLAGS: dict[str, type[Any]] = {
    "init": Init,
    "reproduce": Command,
    "list": ListRuns,
    "rm": Remove,
    "prune": Prune,
    "meter": MeterCommand,
    "show": Show,
    "report": Report,
    "compare": Compare,
    "export": Export,
    "serve": Serve,
    "predict": Predict,
    "plan": PlanFlags,
    "trace": Trace,
    "resume": Resume,
    "doctor": Doctor,
    "completion": Completion,
}


def list_commands(page: Path) -> Iterator[str]:
    """The arguments of every `scalelab …` in a page: in blocks, fenced or indented, and between backticks."""
    blocks = [block.text for block in list_blocks(page) if block.language != "python"]
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    indented = re.findall(r"^ {4,}(.*)$", prose, re.MULTILINE)
    spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    for candidate in (*lines, *indented, *spans):
        match = COMMAND.match(candidate.strip())
        if match and not {"STUDY", "COMMAND", "RECIPE", "…"} & set(candidate.split()):
            yield re.split(r" (?:[|>#;]|&&|·| )", match["arguments"])[0].strip()


COMMANDS = {command: page.relative_to(ROOT) for page in PAGES for command in list_commands(page)}
EXECUTED = {command for typed in TYPED.values() for command in typed if not explain(command, ELSEWHERE)}
"""By tests/test_docs_execution*.py, which is more than parsing."""


def parse_command(arguments: list[str]) -> object:
    """Parse as the command line does, without running anything; returns the exit code, raises what it would report."""
    try:
        _parse(arguments)
    except SystemExit as end:
        return end.code or 0
    return 0


def _parse(arguments: list[str]) -> None:
    verb = arguments[0] if arguments else "--help"
    if verb in ("-h", "--help", "-V", "--version"):
        print_help()
    elif len(arguments) == 1:
        assert verb in VERBS
    elif verb == "run" and arguments[1:] == ["--help"]:
        print_studies()
    elif verb == "run":
        flags, dashes, script = split_at_dashes(arguments[2:])
        study, execution = parse_study(arguments[1], flags, script if dashes else None)
        assert study.plan()
        execution.output.check()
    elif verb == "train":
        train, execution = parse_kind(TrainStudy, arguments[1:], verb)
        assert train.plan()
        execution.output.check()
    elif verb in ("collectives", "quantize"):
        study, execution = parse_kind(Collectives if verb == "collectives" else QuantizeStudy, arguments[1:], verb)
        assert study.plan()
        execution.output.check()
    elif verb == "data":
        assert arguments[1] in DATA_VERBS
        if arguments[2:]:
            parse_flags(DATA_FLAGS[arguments[1]], arguments[2:], " ".join(arguments[:2]))
    elif arguments[:2] == ["trace", DIFF]:
        parse_flags(TraceDiff, arguments[2:], " ".join(arguments[:2])).reading.check()
    else:
        parse_flags(VERB_FLAGS[verb], split_at_dashes(arguments[1:])[0], verb)


def split_at_dashes(words: list[str]) -> tuple[list[str], bool, list[str]]:
    """The flags of a study, whether a script follows, and its words."""
    cut = words.index("--") if "--" in words else len(words)
    return words[:cut], cut < len(words), words[cut + 1 :]


def provide_script(arguments: list[str], directory: Path) -> None:
    """A training script, which ranks alone run."""
    *_, script = split_at_dashes(arguments)
    if script and script[0] != "-m":
        (directory / script[0]).touch()


def provide_stored_sets(arguments: list[str], directory: Path) -> None:
    """Files that are looked for by name and opened by ranks only."""
    for name in arguments[1:] if arguments[:2] == ["run", "io-formats"] else ():
        if name.endswith(".h5"):
            (directory / name).touch()


def provide_weights(arguments: list[str], directory: Path) -> None:
    """A file of weights, which ranks alone read."""
    if "--weights" in arguments:
        (directory / arguments[arguments.index("--weights") + 1]).touch()


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - EXECUTED))
def test_every_command_that_is_not_executed_parses(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("scalelab.data.cifar10.check_cifar10", lambda directory, num_files: None)
    page, arguments = COMMANDS[command], shlex.split(command)
    provide_workloads(arguments, page, tmp_path)
    provide_shards(arguments, tmp_path)
    provide_stored_sets(arguments, tmp_path)
    provide_weights(arguments, tmp_path)
    provide_script(arguments, tmp_path)
    assert parse_command(arguments) == 0, f"{page}: scalelab {command}: {capsys.readouterr()}"


def test_there_are_commands_to_parse_and_every_verb_has_one() -> None:
    assert set(VERB_FLAGS) | {"run", "train", "collectives", "quantize", "data"} == set(VERBS)
    shown = {command.split()[0] for command in COMMANDS if command}
    assert set(VERBS) <= shown

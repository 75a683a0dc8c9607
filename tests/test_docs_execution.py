"""Every command of every page is executed, in the order of its page, in a directory of its own.

Ranks are played from formulas; everything else is what a reader gets: flags, files, runs on disk, reports. What needs a
cluster, a GPU or the network is left to the tests that have one, and is listed with its reason.
"""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from scalelab.cli import confirm, reproduce, resume, run, train
from scalelab.cli.app import run_verb
from scalelab.serving.server import PageServer
from scalelab.store import RunStore, find_runs
from scalelab.trial import Trial, TrialResult
from scalelab.workloads.catalogue import BUILT_IN
from tests.recipes.played import PlayedLauncher
from tests.studies.traces import build_rank
from tests.test_docs import COMMAND, PAGES, ROOT, list_blocks, provide_shards, provide_workloads

ELSEWHERE = {
    r"--launcher (slurm|pbs|lsf)\b": "needs a batch system: tests/launchers have one",
    r"--device cuda\b": "needs GPUs",
    r"^data fetch\b": "needs the network: tests/cli/test_data_fetch.py has a server",
    r"--tokenizer gpt2\b": "needs GPT-2's own files",
    r"^resume last$": "needs a run that was cut short: tests/cli/test_interruption.py has one",
    r"^reproduce \w+ --size full$": "has data of its own: tests/recipes play it",
    r"^doctor$": "starts real ranks: tests/cli/test_doctor.py",
}
RUN_NAME = re.compile(r"\d{4}-\d\d-\d\d-\d{4}-([a-z-]+)")


class ReaderLauncher(PlayedLauncher):
    """Plays built-in workloads with all that they report, and the reader's own with times alone."""

    def check(self) -> None:
        """Nothing is missing where ranks are played."""

    def launch(self, trial: Trial, directory: Path) -> TrialResult:
        played = super().launch if trial.workload in (*BUILT_IN, "") else super(PlayedLauncher, self).launch
        result = played(trial, directory)
        for rank in range(trial.num_ranks if trial.plan.profiled_steps else 0):
            (directory / "trace").mkdir(exist_ok=True)
            build_rank(rank).write(directory / "trace" / f"rank{rank}.json")
        return replace(result, started_at="2026-01-02T03:04:05+00:00", wall_seconds=1.0)


def list_commands(page: Path) -> list[str]:
    """What a reader types, from the fenced blocks of a page."""
    commands = []
    for block in list_blocks(page):
        for line in block.text.replace("\\\n", " ").splitlines():
            match = COMMAND.match(line.strip())
            is_typed = line.startswith("$ ") or block.language in ("sh", "bash")
            if match and is_typed and block.language != "python":
                commands.append(re.split(r" (?:[|>#;]|&&|·)", match["arguments"])[0].strip())
    return [command for command in commands if "STUDY" not in command]


EXECUTED = {page: commands for page in PAGES if (commands := list_commands(page))}


def explain_absence(command: str) -> str:
    """Why a command is not executed here; empty: it is."""
    return next((reason for pattern, reason in ELSEWHERE.items() if re.search(pattern, command)), "")


def provide_files(arguments: list[str], page: Path, directory: Path) -> None:
    """What a reader has already: a workload, shards, a stored set, traces, a table, runs by name."""
    provide_workloads(arguments, page.relative_to(ROOT), directory)
    provide_shards(arguments, directory)
    for argument in arguments[1:]:
        place = directory / argument
        if argument.endswith(".h5") and not place.exists() and "--out" not in arguments[: arguments.index(argument)]:
            with h5py.File(place, "w") as file:
                file.create_dataset("x", data=np.arange(512, dtype="f4").reshape(64, 8), chunks=(8, 8))
        elif argument.endswith(".csv") and "--table" in arguments and not place.exists():
            place.write_text("ranks,epoch_seconds\n1,100\n2,55\n")
        elif argument.endswith((".pt", ".md")) and not place.exists() and argument in ("trained.pt", "README.md"):
            place.write_text("some words\n" * 200)
        name = RUN_NAME.search(argument)
        if name:
            provide_run(name[0], name[1], directory / "runs")
    if arguments[0] == "trace":
        provide_traces(arguments[1:], directory)


def provide_run(name: str, study: str, runs_dir: Path) -> None:
    """The newest run of a study under the name that a session was recorded with."""
    if not (runs_dir / name).exists():
        found = [path for path in find_runs(runs_dir) if path.name.endswith(study)]
        shutil.copytree(found[-1], runs_dir / name)


def provide_traces(arguments: list[str], directory: Path) -> None:
    for argument in arguments:
        place = directory / argument
        if argument.endswith((".json", ".json.gz")):
            build_rank(int(argument.startswith("rank1"))).write(place)
        elif re.fullmatch(r"(traces|before|after)/|\w+turbed-r1", argument):
            for rank in range(2):
                place.mkdir(exist_ok=True)
                build_rank(rank).write(place / f"rank{rank}.json")


@pytest.mark.parametrize("page", EXECUTED, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_works(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("scalelab.workloads.image_options.check_cifar10", lambda directory, num_files: None)
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    monkeypatch.setattr(PageServer, "serve_forever", lambda self, poll_interval: None)
    for module in (run, train, reproduce, resume, confirm):
        if hasattr(module, "choose_launcher"):
            monkeypatch.setattr(module, "choose_launcher", lambda *_: ReaderLauncher())
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr("sys.stdin", None)
    for command in EXECUTED[page]:
        if explain_absence(command):
            continue
        arguments = shlex.split(command)
        provide_last(arguments, tmp_path)
        provide_files(arguments, page, tmp_path)
        try:
            code = run_verb(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
        assert code in (0, 3), f"scalelab {command}: {capsys.readouterr()}"
    for path in find_runs(tmp_path / "runs"):
        assert RunStore.open(path).record.trials


def provide_last(arguments: list[str], directory: Path) -> None:
    """A run to read where a page begins with reading one."""
    if "last" in arguments and not find_runs(directory / "runs"):
        run_verb(["run", "strong-scaling", "--workload", "mlp", "--ranks", "1", "2", "--rounds", "2"])


def test_commands_that_are_left_out_have_a_reason_that_is_needed() -> None:
    every = [command for commands in EXECUTED.values() for command in commands]
    absent = [command for command in every if explain_absence(command)]
    assert len(absent) < len(every) / 4
    for pattern in ELSEWHERE:
        assert any(re.search(pattern, command) for command in every), f"nothing is left out because of {pattern}"

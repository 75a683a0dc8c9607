"""A reader who types every command of a page, in its order, in a directory of their own.

Ranks are played from formulas, for fewer steps than are asked for; everything else is what a reader gets: flags, files,
runs on disk, reports. The name of a run is that of the reader's own, and a run is cut short before it is resumed. What
needs a cluster, a GPU, the network or somebody's files is left out, with the reason.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
from msgspec import structs

from scalelab.cli import serve
from scalelab.cli.app import run_verb
from scalelab.launch.fake import FakeLauncher
from scalelab.records.observations import GradientTimes
from scalelab.records.store import RunStore, find_runs
from scalelab.records.tasks import Exchange, Measure, Read
from scalelab.records.trial import Trial, TrialResult
from scalelab.serve.server import Library, PageServer
from scalelab.workloads.catalogue import BUILT_IN
from tests.answers.traces import build_rank
from tests.recipes.played import PlayedLauncher
from tests.test_docs import COMMAND, PAGES, ROOT, list_blocks, provide_shards, provide_workloads

ELSEWHERE = {
    r"--launcher (slurm|pbs)\b": "needs a batch system: tests/launch/batch have one",
    r"--device cuda\b": "needs GPUs",
    r"^data fetch\b": "needs the network: tests/cli/test_data_fetch.py has a server",
    r"--tokenizer gpt2\b": "needs GPT-2's own files",
    r"^init\b": "needs a model: tests/cli/test_init.py has some",
    r"--fail-if-slower\b": "ends as the noise of two runs decides: tests/cli/test_list.py has every end",
}
FAILING = {
    r"^run dimensions --vary features=512,1024\b": "features and width must agree, as its page says",
}
"""Commands of which some trials are meant to fail: they end with 3."""
RUN_NAME = re.compile(r"\d{4}-\d\d-\d\d-\d{4}(?:-(?P<study>[a-z-]+))?")
WRITING = ("--html", "--pdf", "--markdown", "--json", "--csv", "--out", "--bundle", "--tensorboard")
MOST_STEPS = 8
NUM_LAYERS = 4


class ReaderLauncher(PlayedLauncher):
    """Plays built-in workloads with all that they report, and the reader's own with times alone."""

    def launch(self, trial: Trial, directory: Path) -> TrialResult:
        is_known = trial.workload in (*BUILT_IN, "")
        short = shorten(trial)
        result = super().launch(short, directory) if is_known else FakeLauncher.launch(self, short, directory)
        for rank in range(trial.num_ranks if trial.step_plan and trial.step_plan.profiled_steps else 0):
            (directory / "trace").mkdir(exist_ok=True)
            build_rank(rank).write(directory / "trace" / f"rank{rank}.json")
        ranks = result.ranks
        if "gradients" in trial.instruments:
            ranks = tuple(replace(rank, gradients=play_gradients(trial, rank.num_parameters)) for rank in ranks)
        return replace(result, trial=trial, ranks=ranks, started_at="2026-01-02T03:04:05+00:00", wall_seconds=1.0)


def shorten(trial: Trial) -> Trial:
    """The same trial with fewer steps, timings and batches: one is like the other where ranks are played."""
    match trial.task:
        case Measure(plan=plan) as task:
            short = replace(
                plan,
                clean_steps=min(plan.clean_steps, MOST_STEPS),
                phase_steps=min(plan.phase_steps, 2),
                comm_free_steps=min(plan.comm_free_steps, 2),
            )
            return replace(trial, task=structs.replace(task, plan=short))
        case Exchange(repeats=repeats) as task:
            return replace(trial, task=structs.replace(task, repeats=min(repeats, 2)))
        case Read(dataset=dataset) as task:
            fewer = replace(dataset, num_samples=min(dataset.num_samples, MOST_STEPS * trial.global_batch))
            return replace(trial, task=structs.replace(task, dataset=fewer))
    return trial


def play_gradients(trial: Trial, num_parameters: int | None) -> GradientTimes:
    """Layers of one size, ready one after the other."""
    seconds = 0.0005 * trial.batch_per_rank
    return GradientTimes(
        ready_seconds=tuple(seconds * (layer + 1) / NUM_LAYERS for layer in range(NUM_LAYERS)),
        payload_bytes=(4 * (num_parameters or 0) // NUM_LAYERS,) * NUM_LAYERS,
        backward_seconds=seconds,
    )


def list_typed(page: Path) -> list[str]:
    """What a reader types, from the fenced blocks of a page: the arguments of scalelab, and where to go before."""
    typed = []
    for block in list_blocks(page):
        for line in block.text.replace("\\\n", " ").splitlines():
            match = COMMAND.match(line.strip())
            is_typed = line.startswith("$ ") or block.language in ("sh", "bash")
            if line.startswith("$ cd "):
                typed.append(line.removeprefix("$ "))
            elif match and is_typed and block.language != "python":
                typed.append(re.split(r" (?:[|>#;]|&&|·)", match["arguments"])[0].strip())
    return [command for command in typed if "STUDY" not in command]


TYPED = {page: commands for page in PAGES if (commands := list_typed(page))}


def explain(command: str, reasons: dict[str, str]) -> str:
    """The reason for which a command is special; empty: it is not."""
    return next((reason for pattern, reason in reasons.items() if re.search(pattern, command)), "")


def read_page(page: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Type all commands of a page but those that are left out; every run that they made has been finished."""
    sit_down(directory, monkeypatch)
    for command in TYPED[page]:
        if not explain(command, ELSEWHERE):
            type_command(command, page, directory, capsys)
    for store in map(RunStore.open, find_runs(directory / "runs")):
        assert all(map(store.has_result, store.record.trials)), f"{store.name} was left unfinished"


def sit_down(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty directory, in which ranks are played and whoever waits for a key or a click gets Ctrl-C."""
    monkeypatch.chdir(directory)
    monkeypatch.setattr("scalelab.data.cifar10.check_cifar10", lambda directory, num_files: None)
    for place in (
        "cli.run",
        "cli.measuring",
        "cli.train",
        "cli.reproduce",
        "cli.resume",
        "runs.experiment",
        "launch.launcher",
    ):
        module = importlib.import_module(f"scalelab.{place}")
        if hasattr(module, "choose_launcher"):  # some import it when they need it
            monkeypatch.setattr(module, "choose_launcher", lambda *_: ReaderLauncher())
    monkeypatch.setenv("CXX", sys.executable)  # torch.compile's compiler, which is looked for and, played, not used
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    monkeypatch.setattr(serve, "PageServer", InterruptedServer)
    (directory / "runs").mkdir()


class InterruptedServer(PageServer):
    """Takes any free port, for another test or program may have the one that is asked for."""

    def __init__(self, library: Library, port: int) -> None:
        super().__init__(library, 0)

    def serve_forever(self, poll_interval: float = 0.5) -> None:
        raise KeyboardInterrupt


def type_command(command: str, page: Path, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Execute one command of a page, after what the reader has by then, and look at what it leaves."""
    command = name_own_runs(command, directory / "runs")
    arguments = shlex.split(command)
    if arguments[0] == "cd":
        os.chdir(arguments[1])
        return
    provide_files(arguments, page, directory)
    capsys.readouterr()
    try:
        code = run_verb(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    printed = capsys.readouterr()
    assert code == (3 if explain(command, FAILING) else 0), f"scalelab {command}: {printed}"
    assert printed.out or printed.err, f"scalelab {command} answers nothing"
    for flag, value in pairwise(arguments):
        if flag in WRITING and value != "-":
            assert Path(value).exists(), f"scalelab {command} wrote no {value}"


def name_own_runs(command: str, runs_dir: Path) -> str:
    """The command with the reader's runs in place of those that a session was recorded with."""
    names = list(RUN_NAME.finditer(command))
    runs = list_runs(runs_dir, len(names)) if names else []
    for place, match in enumerate(names):
        alike = [path for path in runs if match["study"] in (None, RunStore.open(path).record.study)]
        command = command.replace(match[0], alike[place - len(names)].name)
    return command


def provide_files(arguments: list[str], page: Path, directory: Path) -> None:
    """What a reader has already: a workload, shards, a stored set, weights, a text, a table, traces, a run."""
    provide_workloads(arguments, page.relative_to(ROOT), directory)
    provide_shards(arguments, directory)
    for name in {"floats.h5", "samples.h5"} & set(arguments):
        with h5py.File(directory / name, "w") as file:
            file.create_dataset("x", data=np.arange(512, dtype="f4").reshape(64, 8), chunks=(8, 8))
    texts = {"epochs.csv": "ranks,epoch_seconds\n1,100\n2,55\n", "trained.pt": "weights", "README.md": "words\n" * 400}
    for name in texts.keys() & set(arguments):
        (directory / name).write_text(texts[name])
    if arguments[0] == "trace":
        provide_traces(arguments[1:], directory)
    if "last" in arguments:
        newest = list_runs(directory / "runs")[-1]
        if arguments[0] == "resume":
            cut_short(RunStore.open(newest))


def provide_traces(arguments: Sequence[str], directory: Path) -> None:
    """Traces of two ranks, as files or in their own directories."""
    for argument in arguments:
        if re.fullmatch(r"rank\d\.json(\.gz)?", argument):
            build_rank(int(argument[4]), num_steps=4).write(directory / argument)
        elif argument in ("traces/", "before/", "after/"):
            (directory / argument).mkdir(exist_ok=True)
            for rank in range(2):
                build_rank(rank).write(directory / argument / f"rank{rank}.json")


def list_runs(runs_dir: Path, num_needed: int = 1) -> list[Path]:
    """The reader's runs, the newest last; where a page begins with reading some, so many are made first."""
    while len(find_runs(runs_dir)) < num_needed:
        run_verb(["run", "strong-scaling", "--workload", "mlp", "--ranks", "1", "2", "--rounds", "2"])
    return find_runs(runs_dir)


def cut_short(store: RunStore) -> None:
    """As Ctrl-C leaves a run: the last trial has no result."""
    (store.trial_directory(store.record.trials[-1]) / "result.json").unlink()

"""`StepLauncher`: the ranks of a trial as one step of an allocation, or of this machine: srun, mpiexec, torchrun.

Every trial is a command of its own, so that the number of ranks may change from trial to trial inside one allocation.
What it starts is `cluster_rank.py`, once per rank. Ranks and launcher share nothing but the trial's directory: a word
where each rank is, a word how it ended, and the files that every rank writes. So it is one launcher for all of them.

The launcher watches these words. When one says that a rank failed, the others get a moment and the step is ended; when
the time limit has passed, each rank has been ended on its own node with its stacks in its log, and here only what does
not answer is left to end. A step is ended by SIGTERM to its command, which srun and mpiexec hand on, and by SIGKILL
where that does not help.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scalelab.errors import LaunchFailed, StorageFull
from scalelab.launch.agreement import (
    EXIT_STORAGE,
    end_file,
    kill_group,
    loads_file,
    place_file,
    read_words,
    step_log,
)
from scalelab.launch.launcher import check_torch, read_conditions
from scalelab.launch.local import GRACE_SECONDS, clear_previous
from scalelab.launch.outcome import RankEnd, conclude_trial
from scalelab.launch.ranks.allocation import Allocation
from scalelab.launch.steps import (
    STEPS,
    StepCommand,
    clean_variables,
    find_interpreter,
    name_words,
    place_ranks,
    put_once_on_each_node,
    run_torchrun,
)
from scalelab.launch.utilization import OTHERS
from scalelab.records.observations import DeviceLoad
from scalelab.records.trial import Cause, Trial, TrialResult, from_builtins, not_run

LOOK_SECONDS = 0.1
"""How often the launcher looks for words of the ranks."""
LATE_SECONDS = 15.0
"""How long beyond the time limit ranks may take to write their stacks and leave word."""
WORD_SECONDS = 60.0
"""How long a shared file system may take to show what ranks wrote that have ended. NFS may remember for as long that a
file was not there."""
LAST_SECONDS = 3.0
"""The same for ranks that had to be ended, and have had their moment: those that are alive have written by now."""
END_SECONDS = 10.0
"""How long a terminated command may take to end its processes."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """By which command the ranks of a trial are started, and where."""

    kind: str
    """A name of `STEPS`; empty: torchrun alone, on this machine."""
    program: str = ""
    """The whole path of srun or mpiexec."""
    allocation: Allocation | None = None
    """None: this machine alone."""
    ranks_per_node: int | None = None
    is_torchrun: bool = False
    """Whether the command starts a torchrun on every node, and that the ranks."""

    def make_command(self, trial: Trial, name: str, ranks: Sequence[str], scratch: str) -> StepCommand:
        """The whole command of a trial; raises `LaunchFailed` where the allocation is too small for it."""
        spread = place_ranks(
            trial.num_processes,
            self.allocation,
            ranks_per_node=self.ranks_per_node,
            cores_per_rank=count_cores_per_process(trial),
            has_gpus=trial.device == "cuda",
        )
        if self.is_torchrun:
            first = self.allocation.first_node if self.allocation else ""
            torchrun = run_torchrun(spread, first_node=first, port=trial.port, name=name, scratch=scratch)
            ranks = (*torchrun, "-m", *ranks)
            spread = put_once_on_each_node(spread)
        else:
            ranks = (*find_interpreter(), "-P", "-m", *ranks)
        step = STEPS[self.kind](self.program, spread) if self.kind else StepCommand()
        return replace(step, words=(*step.words, *ranks))


def count_cores_per_process(trial: Trial) -> int:
    """The cores that each process of a trial is to have; replicas of dp are threads of one."""
    return trial.num_ranks // trial.num_processes * (trial.threads_per_rank + trial.spare_cores_per_rank)


class StepLauncher:
    """Runs trials as steps. Close it, or use it as a context manager; nothing lives between two trials."""

    def __init__(self, step: Step) -> None:
        self.step = step

    def __enter__(self) -> StepLauncher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self) -> None:
        """Refuse at once where nothing can be trained; what a container has is not known here."""
        if find_interpreter() == (sys.executable,):
            check_torch()

    def close(self) -> None:
        """There is nothing to end."""

    def launch(self, trial: Trial, directory: Path) -> TrialResult:
        """Run the trial as a step; whatever interrupts this call, the step is ended first."""
        clear_previous(trial, directory)
        launch, ranks = secrets.token_hex(4), "scalelab.worker.entry.cluster_rank"
        with tempfile.TemporaryDirectory(prefix="scalelab-") as scratch:  # torchrun never removes its own
            name = f"scalelab-{trial.name}-{launch}"
            try:
                command = self.step.make_command(trial, name, (ranks, str(directory.resolve()), launch), scratch)
            except LaunchFailed as error:
                return not_run(trial, str(error), cause=Cause.LAUNCHER)
            conditions = read_conditions()
            process = start_step(command, directory)
            watch = StepWatch(trial, directory, launch, process)
            try:
                watch.wait(conditions.launched + trial.timeout_seconds + LATE_SECONDS)
            finally:
                end_step(process)
        measured = conditions.compare()
        ends = watch.read_ends(describe_end(command, process, directory))
        if ends is None:
            waited = f"no rank had started after {trial.timeout_seconds:g} s: " if watch.had_to_end else ""
            return not_run(trial, waited + describe_end(command, process, directory), cause=Cause.LAUNCHER)
        if any(end.code == EXIT_STORAGE for end in ends):
            raise StorageFull(f"a rank could not write to {directory}: free some space, then run 'scalelab resume'")
        measured["has_oom_kill"] = watch.has_oom_kill()
        result = conclude_trial(trial, directory, ends, loads=watch.read_loads(), **measured)
        is_elsewhere = any(rank.host != socket.gethostname() for rank in result.ranks)
        return forget_this_host(forget_clocks(result)) if is_elsewhere else result


def forget_clocks(result: TrialResult) -> TrialResult:
    """Without what would compare the clocks of several nodes, which have different zeros. What a node saw of one rank
    is held against the steps of that rank, by the same clock."""
    own = tuple(load for load in result.loads if load.device != OTHERS)
    return replace(result, first_step_seconds=None, loads=own)


def forget_this_host(result: TrialResult) -> TrialResult:
    """Drop this host's load if no rank ran on it: a login node's load does not matter."""
    is_here = any(rank.host in ("", socket.gethostname()) for rank in result.ranks)
    return result if is_here else replace(result, load_before=None, steal_ratio=None)


class StepWatch:
    """A step that is running, seen through the words of its ranks."""

    def __init__(self, trial: Trial, directory: Path, launch: str, process: subprocess.Popen[bytes]) -> None:
        self.trial = trial
        self.directory = directory
        self.launch = launch
        self.process = process
        self.had_to_end = False
        """Whether the step has to be ended, because a rank failed or time was up."""
        self.ended_before: set[int] = set()
        """The ranks that were not ended by us."""

    def wait(self, deadline: float) -> None:
        """Wait until the step has ended, or a rank has failed and the others had their moment."""
        while self.process.poll() is None:
            if self._has_failed():
                # Ranks whose time is up write their stacks, each by its own node's clock.
                grace = LATE_SECONDS if self._is_late() else GRACE_SECONDS
                deadline = min(deadline, time.perf_counter() + grace)
            if time.perf_counter() > deadline:
                self.had_to_end = True
                self.ended_before = {rank for rank in range(self.trial.num_processes) if self._read_end(rank)}
                return
            self._sleep(LOOK_SECONDS)

    def read_ends(self, said: str) -> list[RankEnd] | None:
        """How every rank ended; None: none has ever begun."""
        ranks = range(self.trial.num_processes)
        patience = LAST_SECONDS if self.had_to_end else 0.0 if self.process.returncode else WORD_SECONDS
        give_up = time.perf_counter() + patience
        while self._awaits_words() and time.perf_counter() < give_up:
            time.sleep(LOOK_SECONDS)
            list(self.directory.iterdir())  # has NFS ask its server what there is
        places = [self._read_place(rank) for rank in ranks]
        if not any(places):
            return None
        nodes = [place["node"] if place else "" for place in places]
        words = f"{self._describe_silent(nodes)}; {said}"
        return [self._conclude(rank, nodes[rank], words) for rank in ranks]

    def has_oom_kill(self) -> bool:
        """Whether the kernel of the rank's own node killed a process for lack of memory."""
        ends = (self._read_end(rank) for rank in range(self.trial.num_processes))
        return any(end is not None and end["has_oom_kill"] for end in ends)

    def read_loads(self) -> tuple[DeviceLoad, ...]:
        """How busy the ranks were, as each one's node saw it."""
        files = (loads_file(self.directory, rank) for rank in range(self.trial.num_processes))
        words = (read_words(file, self.launch) for file in files)
        return tuple(from_builtins(load, DeviceLoad) for word in words if word for load in word["loads"])

    def _awaits_words(self) -> bool:
        """Whether a rank that can still report its end has not done so."""
        silent = [rank for rank in range(self.trial.num_processes) if self._read_end(rank) is None]
        return any(self._read_place(rank) for rank in silent) if self.had_to_end else bool(silent)

    def _describe_silent(self, nodes: Sequence[str]) -> str:
        """Ranks that ended without a report: on a dead node, or killed together with their parents."""
        silent = [rank for rank in range(self.trial.num_processes) if self._read_end(rank) is None]
        named = [f"rank {rank} {'on ' + nodes[rank] if nodes[rank] else '(never started)'}" for rank in silent]
        return f"{' and '.join(named)} exited without a message, as when a node dies"

    def _conclude(self, rank: int, node: str, words: str) -> RankEnd:
        end = self._read_end(rank)
        if end is None:
            is_late = self.had_to_end and not self._has_failed()
            # One that had begun leaves word also when we end it: this one's node is gone, and whoever started it waits.
            was_killed = self.had_to_end and not node
            return RankEnd(code=None, was_killed=was_killed, is_timed_out=is_late, node=node, words=words)
        number = end["signal"]
        return RankEnd(
            code=-number if number else end["code"],
            was_killed=bool(number) and self.had_to_end and rank not in self.ended_before,
            is_timed_out=bool(end["is_timed_out"]),
            node=node,
        )

    def _read_place(self, rank: int) -> dict[str, Any] | None:
        return read_words(place_file(self.directory, rank), self.launch)

    def _read_end(self, rank: int) -> dict[str, Any] | None:
        return read_words(end_file(self.directory, rank), self.launch)

    def _has_failed(self) -> bool:
        """Whether a rank has ended that was not to end yet."""
        ends = (self._read_end(rank) for rank in range(self.trial.num_processes))
        return any(end is not None and end["code"] != 0 for end in ends)

    def _is_late(self) -> bool:
        """Whether a rank has ended because its time was up."""
        ends = (self._read_end(rank) for rank in range(self.trial.num_processes))
        return any(end is not None and end["is_timed_out"] for end in ends)

    def _sleep(self, seconds: float) -> None:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return


def start_step(command: StepCommand, directory: Path) -> subprocess.Popen[bytes]:
    """Start the command in its own session: Ctrl-C reaches only the parent."""
    bound = (sys.executable, "-P", "-m", "scalelab.launch.bound", str(os.getpid()))
    variables = {"PYTHONSAFEPATH": "1", **command.variables}
    with step_log(directory).open("wb") as log:
        return subprocess.Popen(
            [*bound, *command.words],
            env=clean_variables(os.environ) | variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def describe_end(command: StepCommand, process: subprocess.Popen[bytes], directory: Path) -> str:
    """How the command ended, in its own words: an error that it, or a rank, has named comes before its last line."""
    text = step_log(directory).read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if any(character.isalpha() for character in line)]
    errors = [line for line in lines if "error: " in line.lower()]
    words = errors[0] if errors else lines[-1] if lines else "no word"
    return f"{name_words(command.words)} exited with code {process.returncode}: {words}; see {step_log(directory)}"


def end_step(process: subprocess.Popen[bytes]) -> None:
    """End the command and all that it started; one that has ended is left alone."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            kill_group(process.pid)
    process.wait()
    kill_group(process.pid)

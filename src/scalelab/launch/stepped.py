"""`StepLauncher`: the ranks of a trial as one step of an allocation, or of this machine: srun, mpiexec, torchrun.

Every trial is a command of its own, so that the number of ranks may change from trial to trial inside one allocation.
What it starts is `supervisor.py`, once per rank. Ranks and launcher share nothing but the trial's directory: a word
where each rank is, a word how it ended, and the files that every rank writes. So it is one launcher for all of them.

The launcher watches these words. When one says that a rank failed, the others get a moment and the step is ended; when
the time limit has passed, each rank has been ended on its own node with its stacks in its log, and here only what does
not answer is left to end. A step is ended by SIGTERM to its commands, which srun and mpiexec hand on, and by SIGKILL
where that does not help. The launcher lists the directory and reads what is new: every file is opened once.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scalelab.errors import LaunchFailed
from scalelab.launch.agreement import (
    EXIT_STORAGE,
    end_file,
    kill_group,
    loads_file,
    place_file,
    read_words,
    report_storage,
    step_log,
)
from scalelab.launch.launcher import Launched, check_torch, read_conditions
from scalelab.launch.local import GRACE_SECONDS, clear_previous
from scalelab.launch.outcome import RankEnd, conclude_trial
from scalelab.launch.ranks.placement import count_cores_per_process
from scalelab.launch.starters import (
    StepCommand,
    clean_variables,
    find_interpreter,
    find_program,
    is_this_host,
    name_words,
    place_ranks,
    put_once_on_each_node,
    run_torchrun,
    tell_kind,
)
from scalelab.launch.utilization import OTHERS
from scalelab.records.launchers import LAUNCHERS, STARTERS, Allocation, find_allocation, load
from scalelab.records.observations import DeviceLoad
from scalelab.records.running import hold_directory, remove_leftovers
from scalelab.records.settings import find_kind
from scalelab.records.trial import Cause, Trial, TrialResult, from_builtins, not_run

SUPERVISOR = "scalelab.launch.supervisor"
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
class LaunchStep:
    """By which command the ranks of a trial are started, and where."""

    kind: str
    """A name of `STARTERS`; empty: torchrun alone, on this machine."""
    program: str = ""
    """The whole path of srun or mpiexec."""
    allocation: Allocation | None = None
    """None: this machine alone."""
    ranks_per_node: int | None = None
    is_torchrun: bool = False
    """Whether the command starts a torchrun on every node, and that the ranks."""

    def make_command(self, trial: Trial, name: str, ranks: Sequence[str], scratch: str) -> StepCommand:
        """The whole command of a trial; raises `LaunchFailed` where the allocation is too small for it."""
        is_free = bool(self.kind) and STARTERS[self.kind].finds_nodes
        spread = place_ranks(
            trial.num_processes,
            self.allocation,
            ranks_per_node=None if is_free else self.ranks_per_node,
            cores_per_rank=count_cores_per_process(trial),
            has_gpus=find_kind(trial.device).is_accelerator,
        )
        if is_free and self.ranks_per_node is not None:
            spread = replace(spread, ranks_per_node=self.ranks_per_node)
        if self.is_torchrun:
            first = self.allocation.first_node if self.allocation else ""
            torchrun = run_torchrun(spread, first_node=first, port=trial.port, name=name, scratch=scratch)
            ranks = (*torchrun, "-m", *ranks)
            spread = put_once_on_each_node(spread)
        else:
            ranks = (*find_interpreter(), "-P", "-m", *ranks)
        step = load(STARTERS[self.kind].step)(self.program, spread) if self.kind else StepCommand()
        return replace(step, words=(*step.words, *ranks))


def find_step(job: Launched, variables: Mapping[str, str]) -> LaunchStep:
    """The command that starts the ranks of a job here."""
    allocation, record = find_allocation(variables), LAUNCHERS[job.launcher]
    if record.starts_torchrun:
        # A job's shell may run on a login node, and its script on a service node.
        is_here = allocation is not None and (not allocation.first_node or is_this_host(allocation.first_node))
        if allocation is None or (allocation.num_nodes == 1 and is_here):
            return LaunchStep(kind="", is_torchrun=True, ranks_per_node=job.ranks_per_node)
        return make_step(allocation, job, LAUNCHERS[allocation.scheduler].starters, is_torchrun=True)
    if record.batch is not None and (allocation is None or allocation.scheduler != job.launcher):
        raise LaunchFailed(
            f"--launcher {job.launcher} starts ranks only inside a {job.launcher} job, and this is not one"
        )
    return make_step(allocation, job, record.starters)


def make_step(
    allocation: Allocation | None, job: Launched, kinds: Sequence[str], *, is_torchrun: bool = False
) -> LaunchStep:
    """A step by one of several starters that have the same program; mpiexec finds the nodes of an allocation itself."""
    name = STARTERS[kinds[0]].program
    program = find_program(name, "--mpiexec", job.mpiexec) if len(kinds) > 1 else find_program(name)
    return LaunchStep(
        kind=tell_kind(program, kinds),
        program=program,
        allocation=allocation,
        ranks_per_node=job.ranks_per_node,
        is_torchrun=is_torchrun,
    )


class StepLauncher:
    """Runs trials as steps. Close it, or use it as a context manager; nothing lives between two trials."""

    def __init__(self, step: LaunchStep) -> None:
        self.step = step

    @classmethod
    def open(cls, job: Launched) -> StepLauncher:
        """The launcher of a job, in the allocation that this process is in."""
        return cls(find_step(job, os.environ))

    def __enter__(self) -> StepLauncher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self) -> None:
        """Reject at once where nothing can be trained; what a container has is not known here."""
        if find_interpreter() == (sys.executable,):
            check_torch()

    def close(self) -> None:
        """There is nothing to end."""

    def launch(self, trial: Trial, directory: Path) -> TrialResult:
        """Run the trial as a step; whatever interrupts this call, the step is ended first."""
        launch = secrets.token_hex(4)
        remove_leftovers()
        with hold_directory("torchrun") as scratch:  # torchrun never removes its own
            name = f"scalelab-{trial.name}-{launch}"
            try:
                command = self.step.make_command(
                    trial, name, (SUPERVISOR, str(directory.resolve()), launch), str(scratch)
                )
            except LaunchFailed as error:
                return not_run(trial, str(error), cause=Cause.LAUNCHER)
            result = run_step(trial, directory, launch, [command])
        is_elsewhere = any(rank.host != socket.gethostname() for rank in result.ranks)
        return forget_this_host(forget_clocks(result)) if is_elsewhere else result


def run_step(trial: Trial, directory: Path, launch: str, commands: Sequence[StepCommand]) -> TrialResult:
    """Run a trial by commands that start its supervisors, and conclude from the words that they leave."""
    clear_previous(trial, directory)
    conditions = read_conditions()
    processes: list[subprocess.Popen[bytes]] = []
    watch = StepWatch(trial, directory, launch, processes)
    try:
        for command in commands:  # one by one: those before one that fails must be ended
            processes.append(start_step(command, directory))  # noqa: PERF401
        watch.wait(conditions.launched + trial.timeout_seconds + LATE_SECONDS)
    finally:
        end_step(processes)
    measured = conditions.compare()
    said = describe_end(commands, processes, directory)
    ends = watch.read_ends(said)
    if ends is None:
        waited = f"no rank had started after {trial.timeout_seconds:g} s: " if watch.had_to_end else ""
        return not_run(trial, waited + said, cause=Cause.LAUNCHER)
    if any(end.code == EXIT_STORAGE for end in ends):
        raise report_storage(directory)
    measured["has_oom_kill"] = watch.has_oom_kill()
    return conclude_trial(trial, directory, ends, loads=watch.read_loads(), **measured)


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

    def __init__(self, trial: Trial, directory: Path, launch: str, processes: list[subprocess.Popen[bytes]]) -> None:
        self.trial = trial
        self.directory = directory
        self.launch = launch
        self.processes = processes
        """The commands that start the ranks."""
        self.had_to_end = False
        """Whether the step has to be ended, because a rank failed or time was up."""
        self.ended_before: set[int] = set()
        """The ranks that were not ended by us."""
        self._places: dict[int, dict[str, Any]] = {}
        self._ends: dict[int, dict[str, Any]] = {}

    def wait(self, deadline: float) -> None:
        """Wait until the step has ended, or a rank has failed and the others had their moment."""
        while any(process.poll() is None for process in self.processes):
            self.look()
            if self._has_failed():
                # Ranks whose time is up write their stacks, each by its own node's clock.
                is_late = any(end["is_timed_out"] for end in self._ends.values())
                deadline = min(deadline, time.perf_counter() + (LATE_SECONDS if is_late else GRACE_SECONDS))
            if time.perf_counter() > deadline:
                self.had_to_end = True
                self.ended_before = set(self._ends)
                return
            self._sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Read the words that are new; listing the directory has NFS ask its server what there is."""
        there = {entry.name for entry in os.scandir(self.directory)}
        for known, name_file in ((self._places, place_file), (self._ends, end_file)):
            for rank in range(self.trial.num_processes):
                file = name_file(self.directory, rank)
                words = read_words(file, self.launch) if rank not in known and file.name in there else None
                if words is not None:
                    known[rank] = words

    def read_ends(self, said: str) -> list[RankEnd] | None:
        """How every rank ended; None: none has ever begun."""
        ranks = range(self.trial.num_processes)
        has_failed = any(process.returncode for process in self.processes)
        patience = LAST_SECONDS if self.had_to_end else 0.0 if has_failed else WORD_SECONDS
        give_up = time.perf_counter() + patience
        self.look()
        while self._awaits_words() and time.perf_counter() < give_up:
            time.sleep(LOOK_SECONDS)
            self.look()
        if not self._places:
            return None
        nodes = [self._places[rank]["node"] if rank in self._places else "" for rank in ranks]
        words = f"{self._describe_silent(nodes)}; {said}"
        return [self._conclude(rank, nodes[rank], words) for rank in ranks]

    def has_oom_kill(self) -> bool:
        """Whether the kernel of the rank's own node killed a process for lack of memory."""
        self.look()
        return any(end["has_oom_kill"] for end in self._ends.values())

    def read_loads(self) -> tuple[DeviceLoad, ...]:
        """How busy the ranks were, as each one's node saw it."""
        files = (loads_file(self.directory, rank) for rank in range(self.trial.num_processes))
        words = (read_words(file, self.launch) for file in files)
        return tuple(from_builtins(load, DeviceLoad) for word in words if word for load in word["loads"])

    def _list_silent(self) -> list[int]:
        return [rank for rank in range(self.trial.num_processes) if rank not in self._ends]

    def _awaits_words(self) -> bool:
        """Whether a rank that can still report its end has not done so."""
        silent = self._list_silent()
        return any(rank in self._places for rank in silent) if self.had_to_end else bool(silent)

    def _describe_silent(self, nodes: Sequence[str]) -> str:
        """Ranks that ended without a report: on a dead node, or killed together with their parents."""
        silent = self._list_silent()
        named = [f"rank {rank} {'on ' + nodes[rank] if nodes[rank] else '(never started)'}" for rank in silent]
        return f"{' and '.join(named)} exited without a message, as when a node dies"

    def _conclude(self, rank: int, node: str, words: str) -> RankEnd:
        end = self._ends.get(rank)
        if end is None:
            is_late = self.had_to_end and not self._has_failed()
            # One that had begun leaves word also when we end it: this one's node is gone, and what started it waits.
            was_killed = self.had_to_end and not node
            return RankEnd(code=None, was_killed=was_killed, is_timed_out=is_late, node=node, words=words)
        number = end["signal"]
        return RankEnd(
            code=-number if number else end["code"],
            was_killed=bool(number) and self.had_to_end and rank not in self.ended_before,
            is_timed_out=bool(end["is_timed_out"]),
            node=node,
        )

    def _has_failed(self) -> bool:
        """Whether a rank has ended that was not to end yet."""
        return any(end["code"] != 0 for end in self._ends.values())

    def _sleep(self, seconds: float) -> None:
        living = next((process for process in self.processes if process.poll() is None), None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            if living is not None:
                living.wait(seconds)


def start_step(command: StepCommand, directory: Path) -> subprocess.Popen[bytes]:
    """Start the command in its own session: Ctrl-C reaches only the parent."""
    bound = (sys.executable, "-P", "-m", "scalelab.launch.bound", str(os.getpid()))
    variables = {"PYTHONSAFEPATH": "1", **command.variables}
    with step_log(directory).open("ab") as log:
        return subprocess.Popen(
            [*bound, *command.words],
            env=clean_variables(os.environ) | variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def describe_end(commands: Sequence[StepCommand], processes: Sequence[subprocess.Popen[bytes]], directory: Path) -> str:
    """How the commands ended, in their own words: an error that one of them or a rank names, or else the last line."""
    text = step_log(directory).read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if any(character.isalpha() for character in line)]
    errors = [line for line in lines if "error: " in line.lower()]
    words = errors[0] if errors else lines[-1] if lines else "no word"
    code = next((process.returncode for process in processes if process.returncode), 0)
    return f"{name_words(commands[0].words)} exited with code {code}: {words}; see {step_log(directory)}"


def end_step(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the commands and all that they started; those that have ended are left alone."""
    living = [process for process in processes if process.poll() is None]
    for process in living:
        process.send_signal(signal.SIGTERM)
    give_up = time.perf_counter() + END_SECONDS
    for process in living:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, give_up - time.perf_counter()))
    for process in processes:
        if process.poll() is None:
            kill_group(process.pid)
        process.wait()
        kill_group(process.pid)

"""torch's profiler in a training run: its schedule, and where its traces go.

By itself a rank writes `trace/rank<r>.json.gz`. With a name, files and their directory are called as people who collect
profiles of many jobs in one place call them, and say what was run:

    trace/<name>_<n>nodes_E<epochs>_R<ranks>_<timestamp>/<name>-<rank>-of-<ranks>.json

S<steps> instead of E<epochs> where the training counts steps. The timestamp is rank 0's, the same for all. Beside every
trace lies the table of key averages as text. The second and further cycles of a schedule end in `.2`, `.3` …
"""

from __future__ import annotations

import os
import socket
import time
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerAction, profile, schedule

from scalelab.launch.agreement import trace_file
from scalelab.records.settings import TrainingRun
from scalelab.records.trial import StepKind, Trial
from scalelab.worker.device import list_activities

KEY_AVERAGES_ROWS = 40
FINISH_SECONDS = 0.1
"""How long threads of a process group have to end what they do."""


class RankProfiler:
    """Runs the wait, warm-up and record cycles, then removes the profiler."""

    def __init__(self, run: TrainingRun, trace: Path, first_step: int) -> None:
        self._trace, self._run, self._first = trace, run, first_step
        self._profile: profile | None = None
        self._num_cycles = 0
        if run.profile_active:
            plan = schedule(
                wait=run.profile_wait,
                warmup=run.profile_warmup,
                active=run.profile_active,
                repeat=run.profile_repeat,
            )
            self._profile = profile(
                activities=list_activities(), schedule=plan, record_shapes=True, on_trace_ready=self._write
            )
            self._profile.start()

    def kind_of(self, step: int) -> StepKind:
        """Whether a step carries the profiler."""
        run = self._run
        cycle_steps = run.profile_wait + run.profile_warmup + run.profile_active
        is_waiting = (step - self._first) % cycle_steps < run.profile_wait if cycle_steps else True
        return StepKind.CLEAN if self._profile is None or is_waiting else StepKind.PROFILED

    def advance(self) -> bool:
        """After every step; whether a trace was written, which the other ranks may still be doing."""
        num_before = self._num_cycles
        if self._profile is not None:
            if self._profile.current_action is ProfilerAction.RECORD_AND_SAVE:
                let_threads_finish()
            self._profile.step()
        if self._num_cycles == self._run.profile_repeat:
            self.close()
        return self._num_cycles > num_before

    def close(self) -> None:
        if self._profile is not None:
            if self._profile.current_action in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE):
                let_threads_finish()
            self._profile.stop()
            self._profile = None

    def _write(self, finished: profile) -> None:
        self._num_cycles += 1
        trace = name_cycle(self._trace, self._num_cycles)
        trace.parent.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(trace))
        by = "self_device_time_total" if len(list_activities()) > 1 else "self_cpu_time_total"
        table = finished.key_averages().table(sort_by=by, row_limit=KEY_AVERAGES_ROWS)
        name = trace.name.removesuffix(".gz").removesuffix(".json")
        trace.with_name(f"{name}.txt").write_text(table + "\n", encoding="utf-8")


def name_cycle(trace: Path, cycle: int) -> Path:
    """The file of a cycle: the first has the plain name."""
    if cycle == 1:
        return trace
    stem, dot, suffix = trace.name.rpartition(".json")
    return trace.with_name(f"{stem}.{cycle}{dot}{suffix}")


def find_profile_file(trial: Trial, run: TrainingRun, directory: Path, rank: int, num_steps: int) -> Path:
    """Where a rank's trace goes. With a name, all ranks must ask at the same time: they agree on the timestamp."""
    if not run.profile_active or not run.profile_name:
        return trace_file(directory, rank)
    told = [datetime.now().astimezone().strftime("%Y-%m-%d-%H%M%S")]
    if dist.is_initialized():
        dist.broadcast_object_list(told, src=0, device=torch.device("cpu") if dist.get_backend() == "gloo" else None)
    length = f"E{run.epochs}" if run.epochs else f"S{num_steps}"
    folder = f"{run.profile_name}_{count_nodes()}nodes_{length}_R{trial.num_ranks}_{told[0]}"
    file = f"{run.profile_name}-{rank}-of-{trial.num_ranks}.json"
    return trace_file(directory, rank).parent / folder / file


def count_nodes() -> int:
    """As torchrun counts them, which may emulate some; without it, the hosts that ranks say they are on."""
    told = os.environ.get("GROUP_WORLD_SIZE", "")
    if told.isdecimal():
        return int(told)
    if not dist.is_initialized():
        return 1
    names: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    return len(set(names))


def let_threads_finish() -> None:
    """Give the process group's threads time to let go of what they exchanged, while the profiler still listens.

    A thread carries the profiler's state into what it does after an exchange. One that releases a tensor after the
    profiler has stopped writes into memory that is gone, and the rank dies: seen once in some hundred launches on a
    machine with more to do than cores.
    """
    if dist.is_initialized():
        time.sleep(FINISH_SECONDS)

"""What a launcher and its ranks have agreed on: assignments, exit codes, signals, process groups and files.

The CPU time of every replica of an emulated `dp`, readable from other processes.

Replicas are threads of one process that live for one pass, so that a look from outside, twenty times a second, would
miss most of them. The process itself therefore adds up what each of its replicas' threads used, in a small file that
it and the parent map into memory. It costs two clock readings for each replica and pass, and only a trial whose
utilization is looked at has it.

Threads that an operation starts in a replica are not in it: with more than one core per replica the parent looks at
cores instead.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import select
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalelab.errors import DamagedRun, StorageFull, UsageError
from scalelab.records.files import read_json, write_atomically
from scalelab.records.observations import RankSource
from scalelab.records.settings import TrainingRun
from scalelab.records.trial import to_builtins
from scalelab.units import format_bytes

EXIT_FAILED = 1
"""The rank failed; the reason is in its outcome file."""
EXIT_STORAGE = 74
"""The rank could not write its files (EX_IOERR of sysexits.h)."""


def report_storage(directory: Path) -> StorageFull:
    """The error where a rank ended with `EXIT_STORAGE`."""
    if not directory.is_dir():
        has_run = (directory.parents[1] / "run.json").is_file()
        next_step = "'scalelab resume' continues from here" if has_run else "measure again"
        return StorageFull(f"{directory} was deleted while a rank was writing to it: {next_step}")
    return StorageFull(
        f"a rank could not write to {directory} (see its logs): free some space, raise ulimit -f or make it writable,"
        " then run 'scalelab resume'"
    )


DUMP_SIGNAL = signal.SIGUSR1
"""Makes a rank write the stacks of all its threads into its log."""


PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""From prctl.h."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What the launcher decides for a rank, beyond the trial."""

    directory: str
    rank: int
    cores: tuple[int, ...]
    local_rank: int
    num_local_ranks: int = 0
    """Ranks on its machine; 0: all of the trial."""
    address: str = "127.0.0.1"
    """Where rank 0 listens."""
    port: int = 0
    listen_fd: int | None = None
    """Rank 0 inherits the socket that the rendezvous listens on; the others connect to its port."""
    host: str = ""
    """The name of an emulated host; empty: the machine's own."""
    launcher: str = ""
    agreeing: tuple[str, ...] = ()
    host_rank: int | None = None
    """Who started the rank, which sources agree, and its local rank, for the report."""
    sources: tuple[RankSource, ...] = ()


def name_rank_process(assignment: Assignment, parent: int) -> list[str]:
    """The command of a rank in an interpreter of its own, which ends with the parent."""
    words = json.dumps(to_builtins(assignment))
    return [sys.executable, "-P", "-m", "scalelab.worker", str(parent), words]


def log_file(directory: Path, rank: int) -> Path:
    """What the rank printed, and its stacks after a time-out; stays with the trial."""
    return directory / f"rank{rank}.log"


def samples_file(directory: Path, rank: int) -> Path:
    """The rank's samples so far, extended after every block; becomes part of `samples.csv`."""
    return directory / f"rank{rank}.csv"


def transfers_file(directory: Path, rank: int) -> Path:
    """The rank's timings of an exchange so far, extended after each; becomes part of `transfers.csv`."""
    return directory / f"rank{rank}.transfers.csv"


def fetches_file(directory: Path, rank: int) -> Path:
    """The rank's batches of a stored set so far, extended after each pass; becomes part of `fetches.csv`."""
    return directory / f"rank{rank}.fetches.csv"


def scratch_directory(directory: Path) -> Path:
    """Where the stored sets of a trial are while it runs; nothing of it stays."""
    return directory / "scratch"


def outcome_file(directory: Path, rank: int) -> Path:
    """How the rank ended, written last; becomes part of `result.json`."""
    return directory / f"rank{rank}.json"


def place_file(directory: Path, rank: int) -> Path:
    """Where a rank of a cluster is, written before anything else; a scratch file."""
    return directory / f"rank{rank}.place.json"


def end_file(directory: Path, rank: int) -> Path:
    """How the process of a rank of a cluster ended, as its node saw it; a scratch file."""
    return directory / f"rank{rank}.end.json"


def loads_file(directory: Path, rank: int) -> Path:
    """How busy a rank of a cluster was, as its node saw it; a scratch file."""
    return directory / f"rank{rank}.loads.json"


def flight_file(directory: Path, rank: int) -> Path:
    """The rank's last collectives by torch's flight recorder, written shortly before its time is up."""
    return directory / "flight" / f"rank_{rank}"


def write_words(path: Path, words: dict[str, Any]) -> None:
    """Leave word for the launcher. It reads all of it or nothing; a word need not survive a power cut."""
    scratch = path.with_name(f".{path.name}")
    scratch.write_text(json.dumps(words), encoding="utf-8")
    scratch.replace(path)


def read_words(path: Path, launch: str) -> dict[str, Any] | None:
    """What a rank of a cluster has written in this launch; None: nothing yet."""
    try:
        words = read_json(path)
    except DamagedRun:
        return None
    return words if words.get("launch") == launch else None


def step_log(directory: Path) -> Path:
    """What the command printed that started the ranks of a cluster; stays with the trial."""
    return directory / "step.log"


def trace_file(directory: Path, rank: int) -> Path:
    """What torch's profiler recorded; stays with the trial."""
    return directory / "trace" / f"rank{rank}.json.gz"


def copied_directory(directory: Path) -> Path:
    """The copy of a script's working directory that a trial runs in."""
    return directory / "workdir"


def curve_file(directory: Path) -> Path:
    """The lines of a training run so far; becomes part of `result.json`."""
    return directory / "curve.jsonl"


def keep_curve(path: Path, num_steps: int) -> None:
    """Keep the lines of the first steps; those beyond, and one that was cut, are dropped."""
    if path.is_file():
        whole = path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
        kept = [line for line in whole if json.loads(line)["step"] < num_steps]
        write_atomically(path, "".join(f"{line}\n" for line in kept))


def quantized_file(directory: Path) -> Path:
    """What taking a model to int8 has given so far, replaced after every stage; becomes part of `result.json`."""
    return directory / "rank0.quantized.json"


def start_file(directory: Path) -> Path:
    """Where a training run resumed from, written before its first step; stays with the trial."""
    return directory / "start.json"


def checkpoint_directory(directory: Path, run: TrainingRun) -> Path:
    """Where a training run keeps its checkpoints."""
    return Path(run.checkpoints) if run.checkpoints else directory / "checkpoints"


def list_checkpoints(root: Path) -> list[Path]:
    """The checkpoints that were completed, oldest first."""
    return sorted(path for path in root.glob("step-*") if re.fullmatch(r"step-\d{8}", path.name) and path.is_dir())


def adopt_orphans() -> None:
    """Have the kernel give this process what its descendants leave behind, daemons included (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def ended_file(directory: Path) -> Path:
    """The processes that outlived their ranks and were ended, if there were any; stays with the trial."""
    return directory / "ended.json"


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel kill this process when its parent dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(1)


class ParentWatch:
    """Ends this process when its parent closes its end of a pipe: while torch is imported, nothing else looks at it.

    Not by the kernel's signal, which follows the parent's thread. `stop` it before a fork: no thread survives one.
    """

    def __init__(self, pipe: int) -> None:
        self._stop_read, self._stop_write = os.pipe()
        self._poll = select.poll()
        self._poll.register(pipe, 0)  # that it was closed is always reported
        self._poll.register(self._stop_read, select.POLLIN)
        self._pipe = pipe
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        if self._pipe in dict(self._poll.poll()):
            os._exit(EXIT_FAILED)

    def stop(self) -> None:
        os.close(self._stop_write)
        self._thread.join()
        os.close(self._stop_read)


def kill_group(pid: int) -> bool:
    """End what is in a rank's process group; False where there is none: it has ended, or does not lead one yet."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def remove_scratch(directory: Path) -> None:
    """Remove what the result replaces."""
    for pattern in ("rank*.csv", "rank*.json", "rendezvous-*.json", "curve.jsonl"):
        for file in directory.glob(pattern):
            file.unlink()
    remove_stored(directory)


def remove_stored(directory: Path) -> None:
    """Remove the stored sets of a trial."""
    shutil.rmtree(scratch_directory(directory), ignore_errors=True)


NUM_BYTES = 8
"""Of one replica's seconds, a double."""


def clock_file(directory: Path) -> Path:
    """Shared while the trial runs; the parent removes it."""
    return directory / "replicas.clock"


def make_replica_clock(directory: Path, num_replicas: int) -> memoryview[float]:
    """One double for each replica, which both sides see at once, at 0; stays mapped as long as the process lives."""
    path = clock_file(directory)
    path.write_bytes(bytes(NUM_BYTES * num_replicas))
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("d")


def open_replica_clock(directory: Path, num_replicas: int, stack: ExitStack) -> memoryview[float] | None:
    """What the rank has made; None: not yet. Unmapped with the stack."""
    path = clock_file(directory)
    if not path.is_file() or path.stat().st_size < NUM_BYTES * num_replicas:
        return None
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    bytes_view = memoryview(mapped)
    seconds = bytes_view.cast("d")
    stack.callback(mapped.close)
    stack.callback(bytes_view.release)
    stack.callback(seconds.release)
    return seconds


MOST_COPIED_BYTES = 1_000_000_000
"""A larger working directory holds data, which a script should be given by an absolute path."""


def copy_for_script(source: Path, directory: Path) -> None:
    """Copy a script's working directory without hidden files, caches and the runs themselves."""

    def leave_out(place: str, names: list[str]) -> list[str]:
        return [name for name in names if name.startswith(".") or name == "__pycache__" or Path(place, name) in above]

    copy = copied_directory(directory.resolve())
    above = {*copy.parents} - {*source.resolve().parents, source.resolve()}
    found = (Path(place, name) for place, _, names in _walk(source.resolve(), leave_out) for name in names)
    size = sum(file.stat().st_size for file in found if file.is_file())
    if size > MOST_COPIED_BYTES:
        raise UsageError(
            f"--scratch copies at most {format_bytes(MOST_COPIED_BYTES)}, {source} has {format_bytes(size)}: start in a"
            " directory without the data, or leave out --scratch"
        )
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(source.resolve(), copy, ignore=leave_out, symlinks=True)


def _walk(source: Path, leave_out: Callable[[str, list[str]], list[str]]) -> Iterator[tuple[str, list[str], list[str]]]:
    """`os.walk` without what is left out."""
    for place, directories, files in os.walk(source):
        directories[:] = [name for name in directories if name not in leave_out(place, directories)]
        yield place, directories, [name for name in files if name not in leave_out(place, files)]
